//! The code that all blocks share: the ways in and out, and calls of handlers.
//!
//! While generated code runs, guest registers are in the host's as [`host`]
//! says, host R10 and R11 are scratch, RSP is the host's stack, and GS points to
//! the `Cpu`. The guest's arithmetic flags are in the host's flags or in
//! `Cpu::flags`: at the entry of a block in the latter. XMM registers are the
//! guest's while `State::xmm_live` is set, and then MXCSR is too.

use std::mem::offset_of;

use super::State;
use super::arena::{Arena, ArenaFull};
use super::assembler::register::*;
use super::assembler::{Assembler, Memory, Opcode, Rm, condition};
use super::thunk::{HOST_MXCSR, xmm_offset};
use crate::block::{Block, JUMP_ENTRIES, JumpCache, JumpEntry};
use crate::cpu::Cpu;
use crate::op::Op;

/// Where guest registers are kept in generated code: the same host register
/// where possible, so that shifts by CL, MUL, AH and CMPXCHG keep theirs.
/// `None`: in the `Cpu`.
pub const fn host(guest: u8) -> Option<u8> {
    match guest {
        RSP => Some(R15),
        R10 | R11 | R15 => None,
        _ => Some(guest),
    }
}

/// Generated code was left because of what a handler returned (an `Outcome`
/// that is not `Continue`).
pub const EXIT_HANDLER_MAX: u32 = 15;
/// The block at `Cpu::rip` is next; `State::link` may be a jump to be linked
/// with it.
pub const EXIT_NEXT: u32 = 16;
/// The interpreter has to run the block at `Cpu::rip`: SSE exceptions are not
/// all masked, or the budget does not suffice for the block.
pub const EXIT_INTERPRET: u32 = 17;

/// Addresses of the shared code.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stubs {
    /// `extern "C" fn(code, cpu) -> exit`.
    pub enter: u64,
    /// Runs the handler of the Op at R11 of the block at R10, and returns if the
    /// outcome is to continue. Called; flags are lost.
    pub handler: u64,
    /// Leaves to the block at page offset R10 (relative to `State::code_page`);
    /// R11 is the end of the jump that may be linked, or 0.
    pub next: u64,
    /// Leaves to the block at page offset R10, to have it interpreted.
    pub interpret: u64,
    /// Leaves to the block at address R10, nothing to be linked.
    pub lookup_miss: u64,
    /// Makes XMM registers the guest's; R11 is the page offset of the
    /// instruction to go on with if that cannot be. Called; flags and R10 are
    /// lost.
    pub load_xmm: u64,
    /// Flags from the `Cpu` to the host's. Called; R11 is lost.
    pub load_flags: u64,
    /// Goes to the block at address R10, for the supervisor and the user.
    pub lookup: [u64; 2],
}

const fn field(offset: usize) -> Memory {
    Memory::Field(offset as i32)
}

/// A guest register in the `Cpu`.
pub const fn register_field(guest: u8) -> Memory {
    Memory::Field(offset_of!(Cpu, registers) as i32 + 8 * guest as i32)
}

/// A field of `State`, by its offset there.
pub const fn state_field(offset: usize) -> Memory {
    field(offset_of!(Cpu, generated) + offset)
}

/// `Cpu::flags`.
pub const FLAGS: Memory = field(offset_of!(Cpu, flags));
/// `Cpu::request`.
pub const REQUEST: Memory = field(offset_of!(Cpu, request));
/// `State::code_page`.
pub const CODE_PAGE: Memory = state_field(offset_of!(State, code_page));
/// A word for what neither scratch register can hold.
pub const SCRATCH: Memory = state_field(offset_of!(State, scratch));
/// The host address of a window's start.
pub fn window(index: usize) -> Memory {
    state_field(offset_of!(State, windows) + 8 * index)
}

const XMM_LIVE: Memory = state_field(offset_of!(State, xmm_live));
const MXCSR: Memory = field(offset_of!(Cpu, fpu) + 24);
const CALLEE_SAVED: [u8; 6] = [RBX, RBP, R12, R13, R14, R15];

/// Writes the shared code at the start of an empty arena.
pub fn write(a: &mut Assembler, arena: &mut Arena) -> Result<Stubs, ArenaFull> {
    let mut stubs = Stubs::default();
    a.start(arena.next());
    a.align();
    stubs.enter = a.address();
    enter(a);
    let save_xmm = a.align_address();
    save_xmm_registers(a);
    stubs.handler = a.align_address();
    call_handler(a, save_xmm);
    stubs.load_flags = a.align_address();
    load_flags(a);
    a.bytes(&[0xc3]);
    let leave = Leave { save_xmm };
    stubs.load_xmm = a.align_address();
    load_xmm_registers(a, leave);
    stubs.next = a.align_address();
    a.load_add(R10, CODE_PAGE);
    a.store(state_field(offset_of!(State, link)), R11);
    a.store(field(offset_of!(Cpu, rip)), R10);
    leave.write(a, EXIT_NEXT);
    stubs.interpret = a.align_address();
    a.load_add(R10, CODE_PAGE);
    a.store(field(offset_of!(Cpu, rip)), R10);
    leave.write(a, EXIT_INTERPRET);
    stubs.lookup_miss = a.align_address();
    a.instruction(
        Opcode::wide(0xc7),
        0,
        Rm::Memory(state_field(offset_of!(State, link))),
    );
    a.bytes(&[0; 4]);
    a.store(field(offset_of!(Cpu, rip)), R10);
    leave.write(a, EXIT_NEXT);
    for class in 0..2 {
        stubs.lookup[class] = a.align_address();
        lookup(a, class, stubs.lookup_miss);
    }
    arena.push(a.finish())?;
    Ok(stubs)
}

fn enter(a: &mut Assembler) {
    for register in CALLEE_SAVED {
        a.push(register);
    }
    a.store(state_field(offset_of!(State, cpu)), RSI);
    // The code's address would be lost with RDI.
    a.copy(R11, RDI);
    load_registers(a);
    // jmp r11
    a.bytes(&[0x41, 0xff, 0xe3]);
}

fn load_registers(a: &mut Assembler) {
    for guest in 0..16 {
        if let Some(register) = host(guest) {
            a.load(register, register_field(guest));
        }
    }
}

fn store_registers(a: &mut Assembler) {
    for guest in 0..16 {
        if let Some(register) = host(guest) {
            a.store(register_field(guest), register);
        }
    }
}

fn return_to_rust(a: &mut Assembler) {
    for register in CALLEE_SAVED.into_iter().rev() {
        a.pop(register);
    }
    a.bytes(&[0xc3]);
}

/// The last part of every way out.
#[derive(Clone, Copy)]
struct Leave {
    save_xmm: u64,
}

impl Leave {
    fn write(self, a: &mut Assembler, exit: u32) {
        store_registers(a);
        self.save_live_xmm(a);
        a.constant(RAX, u64::from(exit));
        return_to_rust(a);
    }

    fn save_live_xmm(self, a: &mut Assembler) {
        let skip = a.label();
        test_xmm_live(a);
        a.jump_if(condition::EQUAL, skip);
        a.call_to(self.save_xmm);
        a.bind(skip);
    }
}

/// CMP of `State::xmm_live` with 0: equal when the registers are not the guest's.
pub fn test_xmm_live(a: &mut Assembler) {
    a.group1(7, false, Rm::Memory(XMM_LIVE), 0);
}

fn save_xmm_registers(a: &mut Assembler) {
    for number in 0..16 {
        let slot = Memory::Field(xmm_offset(number));
        a.instruction(Opcode::escaped(0x29), number, Rm::Memory(slot));
    }
    // stmxcsr; ldmxcsr
    a.instruction(Opcode::escaped(0xae), 3, Rm::Memory(MXCSR));
    let host = state_field(offset_of!(State, host_mxcsr));
    a.instruction(Opcode::escaped(0xae), 2, Rm::Memory(host));
    set_xmm_live(a, 0);
    a.bytes(&[0xc3]);
}

fn set_xmm_live(a: &mut Assembler, value: u32) {
    a.instruction(Opcode::narrow(0xc7), 0, Rm::Memory(XMM_LIVE));
    a.bytes(&value.to_le_bytes());
}

fn load_xmm_registers(a: &mut Assembler, leave: Leave) {
    let unmasked = a.label();
    // mov r10d, mxcsr; not r10d; test r10d, masks
    a.instruction(Opcode::narrow(0x8b), R10, Rm::Memory(MXCSR));
    a.instruction(Opcode::narrow(0xf7), 2, Rm::Register(R10));
    a.instruction(Opcode::narrow(0xf7), 0, Rm::Register(R10));
    a.bytes(&HOST_MXCSR.to_le_bytes());
    a.jump_if(condition::NOT_EQUAL, unmasked);
    a.instruction(Opcode::escaped(0xae), 2, Rm::Memory(MXCSR));
    for number in 0..16 {
        let slot = Memory::Field(xmm_offset(number));
        a.instruction(Opcode::escaped(0x28), number, Rm::Memory(slot));
    }
    set_xmm_live(a, 1);
    a.bytes(&[0xc3]);
    a.bind(unmasked);
    a.load_add(R11, CODE_PAGE);
    a.store(field(offset_of!(Cpu, rip)), R11);
    a.address_of(RSP, Memory::At(RSP, 8));
    leave.write(a, EXIT_INTERPRET);
}

fn call_handler(a: &mut Assembler, save_xmm: u64) {
    store_registers(a);
    a.store(field(offset_of!(Cpu, block)), R10);
    a.load(R10, Memory::At(R10, offset_of!(Block, physical) as i32));
    a.group1(4, false, Rm::Register(R10), 0xfff);
    a.load_add(R10, CODE_PAGE);
    a.store(register_field(Cpu::BLOCK_RIP), R10);
    a.store(state_field(offset_of!(State, op)), R11);
    Leave { save_xmm }.save_live_xmm(a);
    a.load(RDI, state_field(offset_of!(State, cpu)));
    a.copy(RSI, R11);
    // call [r11 + handler]
    let handler = Memory::At(R11, offset_of!(Op, handler) as i32);
    a.instruction(Opcode::narrow(0xff), 2, Rm::Memory(handler));
    // test eax, eax
    a.bytes(&[0x85, 0xc0]);
    let out = a.label();
    a.jump_if(condition::NOT_EQUAL, out);
    load_registers(a);
    a.bytes(&[0xc3]);
    a.bind(out);
    a.address_of(RSP, Memory::At(RSP, 8));
    return_to_rust(a);
}

/// Host flags from `Cpu::flags`; R11 is lost.
pub fn load_flags(a: &mut Assembler) {
    a.copy(R11, RAX);
    // movzx eax, word [flags]; add al, 127; sahf
    a.instruction(Opcode::escaped(0xb7), RAX, Rm::Memory(FLAGS));
    a.bytes(&[0x04, 0x7f, 0x9e]);
    a.copy(RAX, R11);
}

/// `Cpu::flags` from the host's flags, which stay; R11 is lost.
pub fn save_flags(a: &mut Assembler) {
    a.copy(R11, RAX);
    // lahf; seto al; mov [flags], ax
    a.bytes(&[0x9f, 0x0f, 0x90, 0xc0]);
    a.instruction(
        Opcode::narrow(0x89).with_prefix(0x66),
        RAX,
        Rm::Memory(FLAGS),
    );
    a.copy(RAX, R11);
}

/// Compares the word that `Cpu::request` points to with 0: not equal when this
/// vCPU has to leave. R11 is lost.
pub fn test_request(a: &mut Assembler) {
    a.load(R11, REQUEST);
    a.group1(7, false, Rm::Memory(Memory::At(R11, 0)), 0);
}

/// Jumps to the code of the block at address R10, through the jump cache.
pub fn lookup(a: &mut Assembler, class: usize, miss: u64) {
    const ENTRY: usize = size_of::<JumpEntry>();
    let cache = offset_of!(Cpu, jump_caches) + class * size_of::<JumpCache>();
    test_request(a);
    a.jump_if_to(condition::NOT_EQUAL, miss);
    // r11 = ((r10 >> 12 ^ r10) & (entries - 1)) * entry
    a.instruction(Opcode::narrow(0x89), R10, Rm::Register(R11));
    a.shift(5, false, R11, 12);
    a.instruction(Opcode::narrow(0x31), R10, Rm::Register(R11));
    a.group1(4, false, Rm::Register(R11), JUMP_ENTRIES as i32 - 1);
    a.shift(4, false, R11, ENTRY.ilog2() as u8);
    let rip = Memory::FieldAt(R11, (cache + offset_of!(JumpEntry, rip)) as i32);
    a.instruction(Opcode::wide(0x3b), R10, Rm::Memory(rip));
    a.jump_if_to(condition::NOT_EQUAL, miss);
    let block = Memory::FieldAt(R11, (cache + offset_of!(JumpEntry, block)) as i32);
    a.load(R11, block);
    a.load(R11, Memory::At(R11, offset_of!(Block, code) as i32));
    // test r11, r11
    a.instruction(Opcode::wide(0x85), R11, Rm::Register(R11));
    a.jump_if_to(condition::EQUAL, miss);
    a.group1(4, true, Rm::Register(R10), -4096);
    a.store(CODE_PAGE, R10);
    a.bytes(&[0x41, 0xff, 0xe3]);
}
