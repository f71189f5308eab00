//! PUSH, POP and their kin.

use iced_x86::{Code, Mnemonic, OpKind, Register};

use super::select::{Operands, Shape};
use crate::cpu::{Cpu, Faulted, register, rflags, segment};
use crate::op::{Handler, Op, Outcome};

const RSP: usize = register::RSP;
const RBP: usize = register::RBP;

/// D/B in a segment's rights.
pub const BIG: u16 = 1 << 14;

impl Cpu {
    /// Pushes eight bytes in 64-bit code.
    #[inline(always)]
    pub fn push_long(&mut self, value: u64) -> Result<(), Faulted> {
        let sp = self.registers[RSP].wrapping_sub(8);
        self.store::<8>(sp, value)?;
        self.registers[RSP] = sp;
        Ok(())
    }

    /// Bits of the stack pointer that count.
    fn stack_mask(&self) -> u64 {
        if self.mode.is_64() {
            u64::MAX
        } else if self.segments[segment::SS].rights & BIG != 0 {
            0xffff_ffff
        } else {
            0xffff
        }
    }

    /// The linear address of the stack pointer moved by `distance`.
    pub fn stack_address(&self, distance: u64) -> u64 {
        let offset = self.registers[RSP].wrapping_add(distance) & self.stack_mask();
        if self.mode.is_64() {
            offset
        } else {
            offset.wrapping_add(self.segment_bases[segment::SS]) & 0xffff_ffff
        }
    }

    /// Moves the stack pointer.
    pub fn move_stack(&mut self, distance: u64) {
        let mask = self.stack_mask();
        let moved = self.registers[RSP].wrapping_add(distance) & mask;
        self.registers[RSP] = match mask {
            0xffff => self.registers[RSP] & !0xffff | moved,
            _ => moved,
        };
    }

    /// Pushes `size` bytes in whatever mode.
    pub fn push(&mut self, size: usize, value: u64) -> Result<(), Faulted> {
        let distance = (size as u64).wrapping_neg();
        let address = self.stack_address(distance);
        match size {
            2 => self.store::<2>(address, value)?,
            4 => self.store::<4>(address, value)?,
            _ => self.store::<8>(address, value)?,
        }
        self.move_stack(distance);
        Ok(())
    }

    /// What [`Cpu::pop`] would give, `depth` bytes further up.
    pub fn peek(&mut self, size: usize, depth: u64) -> Result<u64, Faulted> {
        let address = self.stack_address(depth);
        match size {
            2 => self.load::<2>(address),
            4 => self.load::<4>(address),
            _ => self.load::<8>(address),
        }
    }

    /// Pops `size` bytes in whatever mode.
    pub fn pop(&mut self, size: usize) -> Result<u64, Faulted> {
        let value = self.peek(size, 0)?;
        self.move_stack(size as u64);
        Ok(value)
    }
}

extern "C" fn push_register(cpu: &mut Cpu, op: &Op) -> Outcome {
    let value = cpu.register(op.destination);
    attempt!(cpu, cpu.push_long(value));
    Outcome::Continue
}

extern "C" fn push_immediate(cpu: &mut Cpu, op: &Op) -> Outcome {
    attempt!(cpu, cpu.push_long(op.immediate));
    Outcome::Continue
}

extern "C" fn push_memory(cpu: &mut Cpu, op: &Op) -> Outcome {
    let value = attempt!(cpu, cpu.load::<8>(cpu.address(op)));
    attempt!(cpu, cpu.push_long(value));
    Outcome::Continue
}

extern "C" fn pop_register(cpu: &mut Cpu, op: &Op) -> Outcome {
    let sp = cpu.registers[RSP];
    let value = attempt!(cpu, cpu.load::<8>(sp));
    cpu.registers[RSP] = sp.wrapping_add(8);
    cpu.set_register(op.destination, value);
    Outcome::Continue
}

/// POP to memory: an address made from RSP sees it after the pop.
extern "C" fn pop_memory(cpu: &mut Cpu, op: &Op) -> Outcome {
    let size = usize::from(op.extra);
    let before = cpu.registers[RSP];
    let value = attempt!(cpu, cpu.pop(size));
    let address = cpu.address(op);
    let stored = match size {
        2 => cpu.store::<2>(address, value),
        4 => cpu.store::<4>(address, value),
        _ => cpu.store::<8>(address, value),
    };
    if stored.is_err() {
        cpu.registers[RSP] = before;
    }
    attempt!(cpu, stored);
    Outcome::Continue
}

/// PUSH of anything but eight bytes in 64-bit code: `extra` bytes.
extern "C" fn push_any<const SOURCE: u8>(cpu: &mut Cpu, op: &Op) -> Outcome {
    let size = usize::from(op.extra);
    let value = match SOURCE {
        REGISTER => cpu.register(op.destination),
        MEMORY => {
            let address = cpu.address(op);
            let loaded = match size {
                2 => cpu.load::<2>(address),
                4 => cpu.load::<4>(address),
                _ => cpu.load::<8>(address),
            };
            attempt!(cpu, loaded)
        }
        SEGMENT => u64::from(cpu.segments[usize::from(op.destination)].selector),
        _ => op.immediate,
    };
    attempt!(cpu, cpu.push(size, value));
    Outcome::Continue
}

const REGISTER: u8 = 0;
const MEMORY: u8 = 1;
const SEGMENT: u8 = 2;
const IMMEDIATE: u8 = 3;

extern "C" fn pop_register_any(cpu: &mut Cpu, op: &Op) -> Outcome {
    let value = attempt!(cpu, cpu.pop(usize::from(op.extra)));
    match op.extra {
        2 => cpu.set::<2>(op.destination, value),
        4 => cpu.set::<4>(op.destination, value),
        _ => cpu.set::<8>(op.destination, value),
    }
    Outcome::Continue
}

extern "C" fn pop_segment(cpu: &mut Cpu, op: &Op) -> Outcome {
    let size = usize::from(op.extra);
    let selector = attempt!(cpu, cpu.peek(size, 0)) as u16;
    let which = usize::from(op.destination);
    attempt!(cpu, cpu.load_segment(which, selector));
    cpu.move_stack(size as u64);
    if which == segment::SS {
        return cpu.begin_shadow(op, true);
    }
    Outcome::Continue
}

extern "C" fn push_all(cpu: &mut Cpu, op: &Op) -> Outcome {
    let size = usize::from(op.extra);
    let before = cpu.registers[RSP];
    for index in 0..8 {
        let value = if index == RSP {
            before
        } else {
            cpu.registers[index]
        };
        let pushed = cpu.push(size, value);
        if pushed.is_err() {
            cpu.registers[RSP] = before;
        }
        attempt!(cpu, pushed);
    }
    Outcome::Continue
}

extern "C" fn pop_all(cpu: &mut Cpu, op: &Op) -> Outcome {
    let size = usize::from(op.extra);
    let mut values = [0; 8];
    for (depth, value) in values.iter_mut().enumerate() {
        *value = attempt!(cpu, cpu.peek(size, (depth * size) as u64));
    }
    cpu.move_stack(8 * size as u64);
    for (depth, value) in values.into_iter().enumerate() {
        let index = 7 - depth;
        match size {
            _ if index == RSP => {}
            2 => cpu.set::<2>(index as u8, value),
            _ => cpu.set::<4>(index as u8, value),
        }
    }
    Outcome::Continue
}

extern "C" fn leave(cpu: &mut Cpu, _: &Op) -> Outcome {
    let frame = cpu.registers[RBP];
    let value = attempt!(cpu, cpu.load::<8>(frame));
    cpu.registers[RSP] = frame.wrapping_add(8);
    cpu.registers[RBP] = value;
    Outcome::Continue
}

extern "C" fn leave_any(cpu: &mut Cpu, op: &Op) -> Outcome {
    let before = cpu.registers[RSP];
    let mask = cpu.stack_mask();
    cpu.registers[RSP] = before & !mask | cpu.registers[RBP] & mask;
    let popped = cpu.pop(usize::from(op.extra));
    if popped.is_err() {
        cpu.registers[RSP] = before;
    }
    let value = attempt!(cpu, popped);
    match op.extra {
        2 => cpu.set::<2>(RBP as u8, value),
        4 => cpu.set::<4>(RBP as u8, value),
        _ => cpu.registers[RBP] = value,
    }
    Outcome::Continue
}

/// ENTER: `immediate` is the frame's size, `source` the nesting level.
extern "C" fn enter(cpu: &mut Cpu, op: &Op) -> Outcome {
    let size = usize::from(op.extra);
    let before = (cpu.registers[RSP], cpu.registers[RBP]);
    let entered = enter_frame(cpu, op, size);
    if entered.is_err() {
        (cpu.registers[RSP], cpu.registers[RBP]) = before;
    }
    attempt!(cpu, entered);
    Outcome::Continue
}

fn enter_frame(cpu: &mut Cpu, op: &Op, size: usize) -> Result<(), Faulted> {
    let mask = cpu.stack_mask();
    cpu.push(size, cpu.registers[RBP])?;
    let frame = cpu.registers[RSP];
    if op.source > 0 {
        for level in 1..u64::from(op.source) {
            let offset = before_frame(cpu, level, size) & mask;
            let address = cpu.wrapped(offset.wrapping_add(stack_base(cpu)));
            let value = match size {
                2 => cpu.load::<2>(address)?,
                4 => cpu.load::<4>(address)?,
                _ => cpu.load::<8>(address)?,
            };
            cpu.push(size, value)?;
        }
        cpu.push(size, frame)?;
    }
    cpu.move_stack(op.immediate.wrapping_neg());
    match size {
        2 => cpu.set::<2>(RBP as u8, frame),
        4 => cpu.set::<4>(RBP as u8, frame),
        _ => cpu.registers[RBP] = frame,
    }
    Ok(())
}

fn before_frame(cpu: &Cpu, level: u64, size: usize) -> u64 {
    cpu.registers[RBP].wrapping_sub(level * size as u64)
}

fn stack_base(cpu: &Cpu) -> u64 {
    if cpu.mode.is_64() {
        0
    } else {
        cpu.segment_bases[segment::SS]
    }
}

extern "C" fn push_flags(cpu: &mut Cpu, op: &Op) -> Outcome {
    let value = cpu.rflags() & !(rflags::RF | rflags::VM);
    attempt!(cpu, cpu.push(usize::from(op.extra), value));
    Outcome::Continue
}

extern "C" fn pop_flags(cpu: &mut Cpu, op: &Op) -> Outcome {
    let size = usize::from(op.extra);
    let value = attempt!(cpu, cpu.pop(size));
    let before = cpu.rflags();
    let mut writable = rflags::TF | rflags::DF | rflags::NT | rflags::AC | rflags::ID;
    writable |= crate::flags::RFLAGS_ARITHMETIC;
    if cpu.cpl == 0 {
        writable |= rflags::IOPL;
    }
    if u64::from(cpu.cpl) <= (before & rflags::IOPL) >> 12 {
        writable |= rflags::IF;
    }
    if size == 2 {
        writable &= 0xffff;
    }
    let mut after = before & !writable | value & writable;
    if size > 2 {
        after &= !rflags::RF;
    }
    cpu.set_rflags(after);
    let enabled = after & !before & rflags::IF != 0;
    if enabled || after & rflags::TF != 0 {
        cpu.rip = cpu.wrapped(cpu.next_rip(op));
        return Outcome::Leave;
    }
    Outcome::Continue
}

/// The handler of an instruction of this group.
pub fn select(operands: &Operands<'_>, op: &mut Op) -> Option<Handler> {
    let instruction = operands.instruction;
    let mnemonic = instruction.mnemonic();
    // iced counts what the instruction moves the stack pointer by.
    let moved = instruction.stack_pointer_increment().unsigned_abs() as u8;
    op.extra = moved;
    let fast = operands.mode.is_64() && moved == 8;
    let segment_operand = super::segment_index(instruction.op0_register());
    Some(match mnemonic {
        Mnemonic::Push => match operands.shape {
            Shape::Register if fast => push_register,
            Shape::Register => push_any::<REGISTER>,
            Shape::Memory if fast => push_memory,
            Shape::Memory => push_any::<MEMORY>,
            Shape::Immediate => {
                op.immediate = instruction.immediate(0);
                if fast {
                    push_immediate
                } else {
                    push_any::<IMMEDIATE>
                }
            }
            _ => {
                op.destination = segment_operand?;
                push_any::<SEGMENT>
            }
        },
        Mnemonic::Pop => match operands.shape {
            Shape::Register if fast => pop_register,
            Shape::Register => pop_register_any,
            Shape::Memory => pop_memory,
            _ => {
                op.destination = segment_operand?;
                pop_segment
            }
        },
        Mnemonic::Pusha | Mnemonic::Pushad => {
            op.extra = moved / 8;
            push_all
        }
        Mnemonic::Popa | Mnemonic::Popad => {
            op.extra = moved / 8;
            pop_all
        }
        Mnemonic::Pushf | Mnemonic::Pushfd | Mnemonic::Pushfq => push_flags,
        Mnemonic::Popf | Mnemonic::Popfd | Mnemonic::Popfq => pop_flags,
        Mnemonic::Leave => {
            op.extra = match instruction.code() {
                Code::Leavew => 2,
                Code::Leaved => 4,
                _ => 8,
            };
            if op.extra == 8 { leave } else { leave_any }
        }
        Mnemonic::Enter => {
            op.immediate = instruction.immediate(0);
            op.source = (instruction.immediate(1) & 31) as u8;
            op.extra = match instruction.code() {
                Code::Enterw_imm16_imm8 => 2,
                Code::Enterd_imm16_imm8 => 4,
                _ => 8,
            };
            enter
        }
        _ => return None,
    })
}

/// Whether an instruction is a POP to memory relative to the stack pointer,
/// which it has moved before it makes the address.
pub fn pops_relative_to_itself(operands: &Operands<'_>) -> bool {
    operands.instruction.mnemonic() == Mnemonic::Pop
        && operands.instruction.op0_kind() == OpKind::Memory
        && operands.instruction.memory_base().full_register() == Register::RSP
}
