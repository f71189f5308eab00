//! String instructions, alone and repeated.
//!
//! A repeated MOVS or STOS works on as much as lies on the pages at hand, by the
//! host's own repeated instruction, so that operands that overlap do what they
//! do on a processor. After each part the registers are up to date: a fault or a
//! request between parts leaves the instruction to be executed again for the
//! rest.
//!
//! In [`Op`]: `segment` is the source's, `base` the destination's, `source` the
//! size of an address, `destination` the kind of repetition.

use std::arch::asm;
use std::sync::atomic::Ordering;

use iced_x86::{Instruction, Mnemonic};
use weft_vcpu::PAGE_SIZE;

use super::arithmetic::{binary, operation};
use super::select::{Operands, sized};
use crate::cpu::{Cpu, Faulted, register, rflags, segment};
use crate::flags;
use crate::op::{Handler, Op, Outcome};
use crate::tlb::tlb_index;
use crate::walk::Need;

const RAX: u8 = register::RAX as u8;
const RCX: usize = register::RCX;
const RSI: usize = register::RSI;
const RDI: usize = register::RDI;

/// Elements that are done between two looks at requests, at most.
const ELEMENTS_MAX: u64 = 4096;

/// Values of `Op::destination`.
mod repeat {
    pub const NONE: u8 = 0;
    pub const WHILE_EQUAL: u8 = 1;
    pub const WHILE_NOT_EQUAL: u8 = 2;
}

/// The kinds of string instructions.
mod kind {
    pub const MOVE: u8 = 0;
    pub const STORE: u8 = 1;
    pub const LOAD: u8 = 2;
    pub const COMPARE: u8 = 3;
    pub const SCAN: u8 = 4;
    pub const INPUT: u8 = 5;
    pub const OUTPUT: u8 = 6;
}

fn address_mask(op: &Op) -> u64 {
    u64::MAX >> (64 - 8 * u32::from(op.source))
}

impl Cpu {
    fn source_address(&self, op: &Op) -> u64 {
        let offset = self.registers[RSI] & address_mask(op);
        self.wrapped(offset.wrapping_add(self.segment_bases[usize::from(op.segment)]))
    }

    fn destination_address(&self, op: &Op) -> u64 {
        let offset = self.registers[RDI] & address_mask(op);
        self.wrapped(offset.wrapping_add(self.segment_bases[usize::from(op.base)]))
    }

    /// Moves RSI, RDI or RCX, of which only an address's size counts.
    fn move_index(&mut self, index: usize, distance: u64, op: &Op) {
        let moved = self.registers[index].wrapping_add(distance) & address_mask(op);
        self.registers[index] = match op.source {
            2 => self.registers[index] & !0xffff | moved,
            _ => moved,
        };
    }

    fn step(&self, size: u64) -> u64 {
        if self.rflags_system & rflags::DF != 0 {
            size.wrapping_neg()
        } else {
            size
        }
    }

    /// Where `SIZE` bytes may be read directly.
    fn source_pointer<const SIZE: usize>(
        &mut self,
        address: u64,
    ) -> Result<Option<*mut u8>, Faulted> {
        let entry = &self.tlbs[self.privilege_class()].entries[tlb_index(address)];
        let offset = address.wrapping_sub(entry.read);
        if offset <= PAGE_SIZE - SIZE as u64 {
            return Ok(Some((entry.host + offset) as *mut u8));
        }
        self.pointer_slow(address, SIZE, Need::Read)
    }

    /// How many elements from an index register on lie on one page, without
    /// passing the end of what an address can be.
    fn elements_on_page(&self, address: u64, index: usize, size: u64, op: &Op) -> u64 {
        let on_page = PAGE_SIZE - (address & (PAGE_SIZE - 1));
        let mask = address_mask(op);
        let to_end = (mask - (self.registers[index] & mask)).saturating_add(1);
        on_page.min(to_end) / size
    }
}

fn element<const KIND: u8, const SIZE: usize>(cpu: &mut Cpu, op: &Op) -> Result<(), Faulted> {
    let step = cpu.step(SIZE as u64);
    match KIND {
        kind::MOVE => {
            let value = cpu.load::<SIZE>(cpu.source_address(op))?;
            cpu.store::<SIZE>(cpu.destination_address(op), value)?;
            cpu.move_index(RSI, step, op);
            cpu.move_index(RDI, step, op);
        }
        kind::STORE => {
            let value = cpu.get::<SIZE>(RAX);
            cpu.store::<SIZE>(cpu.destination_address(op), value)?;
            cpu.move_index(RDI, step, op);
        }
        kind::LOAD => {
            let value = cpu.load::<SIZE>(cpu.source_address(op))?;
            cpu.set::<SIZE>(RAX, value);
            cpu.move_index(RSI, step, op);
        }
        kind::COMPARE => {
            let a = cpu.load::<SIZE>(cpu.source_address(op))?;
            let b = cpu.load::<SIZE>(cpu.destination_address(op))?;
            binary::<{ operation::CMP }, SIZE>(a, b, &mut cpu.flags);
            cpu.move_index(RSI, step, op);
            cpu.move_index(RDI, step, op);
        }
        kind::SCAN => {
            let b = cpu.load::<SIZE>(cpu.destination_address(op))?;
            let a = cpu.get::<SIZE>(RAX);
            binary::<{ operation::CMP }, SIZE>(a, b, &mut cpu.flags);
            cpu.move_index(RDI, step, op);
        }
        kind::INPUT => {
            let port = cpu.registers[register::RDX] as u16;
            cpu.check_port(port, SIZE)?;
            let address = cpu.destination_address(op);
            // Found out before the device is asked, which may mind being asked
            // twice.
            cpu.pointer::<SIZE>(address)?;
            let value = cpu.port_read(port, SIZE);
            cpu.store::<SIZE>(address, value)?;
            cpu.move_index(RDI, step, op);
        }
        _ => {
            let port = cpu.registers[register::RDX] as u16;
            cpu.check_port(port, SIZE)?;
            let value = cpu.load::<SIZE>(cpu.source_address(op))?;
            cpu.port_write(port, SIZE, value);
            cpu.move_index(RSI, step, op);
        }
    }
    Ok(())
}

/// As many elements as lie on the pages at hand, by one host instruction: how
/// many those were, 0 when it has to be done one by one.
fn chunk<const KIND: u8, const SIZE: usize>(
    cpu: &mut Cpu,
    op: &Op,
    count: u64,
) -> Result<u64, Faulted> {
    let destination = cpu.destination_address(op);
    let watched = cpu.breakpoints.watch_page(destination)
        || KIND == kind::MOVE && cpu.breakpoints.watch_page(cpu.source_address(op));
    if cpu.rflags_system & rflags::DF != 0 || cpu.traps_elements() || watched {
        return Ok(0);
    }
    let size = SIZE as u64;
    let mut elements = count.min(cpu.elements_on_page(destination, RDI, size, op));
    if KIND == kind::STORE {
        if elements == 0 {
            return Ok(0);
        }
        let Some(to) = cpu.pointer::<SIZE>(destination)? else {
            return Ok(0);
        };
        // SAFETY: all elements lie on the page that `to` is on, which is held
        // for writing.
        unsafe { store_elements::<SIZE>(to, cpu.registers[register::RAX], elements) };
        cpu.move_index(RDI, elements * size, op);
        return Ok(elements);
    }
    let source = cpu.source_address(op);
    elements = elements.min(cpu.elements_on_page(source, RSI, size, op));
    if elements == 0 {
        return Ok(0);
    }
    let (to, from) = loop {
        let revocations = cpu.revocations;
        let from = cpu.source_pointer::<SIZE>(source)?;
        let to = cpu.pointer::<SIZE>(destination)?;
        // While one was fetched the other may have gone.
        if revocations == cpu.revocations {
            break (to, from);
        }
    };
    let (Some(to), Some(from)) = (to, from) else {
        return Ok(0);
    };
    // SAFETY: all elements lie on the pages that `to` and `from` are on, which
    // are held for writing and for reading.
    unsafe { move_elements::<SIZE>(to, from, elements) };
    cpu.move_index(RSI, elements * size, op);
    cpu.move_index(RDI, elements * size, op);
    Ok(elements)
}

/// # Safety
///
/// `count` elements at `to` are mapped and writable.
unsafe fn store_elements<const SIZE: usize>(to: *mut u8, value: u64, count: u64) {
    // SAFETY: the caller's promise; the direction flag is clear in Rust code.
    unsafe {
        match SIZE {
            1 => asm!("rep stosb", inout("rdi") to => _, inout("rcx") count => _,
                in("rax") value, options(nostack, preserves_flags)),
            2 => asm!("rep stosw", inout("rdi") to => _, inout("rcx") count => _,
                in("rax") value, options(nostack, preserves_flags)),
            4 => asm!("rep stosd", inout("rdi") to => _, inout("rcx") count => _,
                in("rax") value, options(nostack, preserves_flags)),
            _ => asm!("rep stosq", inout("rdi") to => _, inout("rcx") count => _,
                in("rax") value, options(nostack, preserves_flags)),
        }
    }
}

/// # Safety
///
/// `count` elements at `to` are mapped and writable, and at `from` readable.
unsafe fn move_elements<const SIZE: usize>(to: *mut u8, from: *const u8, count: u64) {
    // SAFETY: the caller's promise; the direction flag is clear in Rust code.
    unsafe {
        match SIZE {
            1 => asm!("rep movsb", inout("rdi") to => _, inout("rsi") from => _,
                inout("rcx") count => _, options(nostack, preserves_flags)),
            2 => asm!("rep movsw", inout("rdi") to => _, inout("rsi") from => _,
                inout("rcx") count => _, options(nostack, preserves_flags)),
            4 => asm!("rep movsd", inout("rdi") to => _, inout("rsi") from => _,
                inout("rcx") count => _, options(nostack, preserves_flags)),
            _ => asm!("rep movsq", inout("rdi") to => _, inout("rsi") from => _,
                inout("rcx") count => _, options(nostack, preserves_flags)),
        }
    }
}

extern "C" fn once<const KIND: u8, const SIZE: usize>(cpu: &mut Cpu, op: &Op) -> Outcome {
    attempt!(cpu, element::<KIND, SIZE>(cpu, op));
    cpu.go_on_or_trap(op)
}

extern "C" fn repeated<const KIND: u8, const SIZE: usize>(cpu: &mut Cpu, op: &Op) -> Outcome {
    let mut budget = ELEMENTS_MAX;
    loop {
        let count = cpu.registers[RCX] & address_mask(op);
        if count == 0 {
            return Outcome::Continue;
        }
        let mut done = 0;
        if KIND == kind::MOVE || KIND == kind::STORE {
            done = attempt!(cpu, chunk::<KIND, SIZE>(cpu, op, count));
        }
        if done == 0 {
            attempt!(cpu, element::<KIND, SIZE>(cpu, op));
            done = 1;
        }
        cpu.move_index(RCX, done.wrapping_neg(), op);
        if KIND == kind::COMPARE || KIND == kind::SCAN {
            let equal = flags::holds::<4>(cpu.flags);
            if equal != (op.destination == repeat::WHILE_EQUAL) {
                return cpu.go_on_or_trap(op);
            }
        }
        if cpu.traps_elements() {
            if cpu.registers[RCX] & address_mask(op) == 0 {
                return cpu.go_on_or_trap(op);
            }
            cpu.rip = cpu.wrapped(cpu.own_rip(op));
            return Outcome::Repeat;
        }
        budget = budget.saturating_sub(done);
        if budget == 0 {
            budget = ELEMENTS_MAX;
            // SAFETY: the requests lives as long as the CPU.
            let request = unsafe { (*cpu.request).load(Ordering::Relaxed) };
            if request != 0 {
                cpu.rip = cpu.wrapped(cpu.own_rip(op));
                return Outcome::Repeat;
            }
        }
    }
}

fn repetition(instruction: &Instruction) -> u8 {
    if instruction.has_repne_prefix() {
        repeat::WHILE_NOT_EQUAL
    } else if instruction.has_rep_prefix() {
        repeat::WHILE_EQUAL
    } else {
        repeat::NONE
    }
}

/// The size of an address in a string instruction, which its memory operands
/// tell.
fn address_size(instruction: &Instruction) -> u8 {
    use iced_x86::OpKind;
    for operand in 0..instruction.op_count() {
        match instruction.op_kind(operand) {
            OpKind::MemorySegSI | OpKind::MemorySegDI | OpKind::MemoryESDI => return 2,
            OpKind::MemorySegESI | OpKind::MemorySegEDI | OpKind::MemoryESEDI => return 4,
            _ => {}
        }
    }
    8
}

/// The handler of an instruction of this group.
pub fn select(operands: &Operands<'_>, op: &mut Op) -> Option<Handler> {
    let instruction = operands.instruction;
    if !instruction.is_string_instruction() {
        return None;
    }
    let size = instruction.memory_size().size();
    op.destination = repetition(instruction);
    op.source = address_size(instruction);
    let long = operands.mode.is_64();
    op.base = if long { segment::NONE } else { segment::ES } as u8;
    op.segment = super::operand_segment(instruction, operands.mode);
    let alone = op.destination == repeat::NONE;
    macro_rules! pick {
        ($kind:expr) => {
            if alone {
                sized!(size, once, { $kind })
            } else {
                sized!(size, repeated, { $kind })
            }
        };
    }
    Some(match instruction.mnemonic() {
        Mnemonic::Movsb | Mnemonic::Movsw | Mnemonic::Movsd | Mnemonic::Movsq => {
            pick!(kind::MOVE)
        }
        Mnemonic::Stosb | Mnemonic::Stosw | Mnemonic::Stosd | Mnemonic::Stosq => {
            pick!(kind::STORE)
        }
        Mnemonic::Lodsb | Mnemonic::Lodsw | Mnemonic::Lodsd | Mnemonic::Lodsq => {
            pick!(kind::LOAD)
        }
        Mnemonic::Cmpsb | Mnemonic::Cmpsw | Mnemonic::Cmpsd | Mnemonic::Cmpsq => {
            pick!(kind::COMPARE)
        }
        Mnemonic::Scasb | Mnemonic::Scasw | Mnemonic::Scasd | Mnemonic::Scasq => {
            pick!(kind::SCAN)
        }
        Mnemonic::Insb | Mnemonic::Insw | Mnemonic::Insd => pick!(kind::INPUT),
        Mnemonic::Outsb | Mnemonic::Outsw | Mnemonic::Outsd => pick!(kind::OUTPUT),
        _ => return None,
    })
}
