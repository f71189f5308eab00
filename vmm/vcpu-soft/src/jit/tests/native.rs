//! The native side: instructions between loads and stores of all registers.

use std::mem::offset_of;

use super::super::assembler::{Assembler, Memory as Operand, Opcode, Rm};
use super::super::{arena, set_gs_base, thunk};
use super::Machine;

/// Registers, flags and SSE state.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C, align(64))]
pub struct Context {
    pub fpu: [u8; 512],
    pub registers: [u64; 16],
    pub flags: u64,
    host_stack: u64,
    host_mxcsr: u32,
}

impl Context {
    pub const EMPTY: Self = Self {
        fpu: [0; 512],
        registers: [0; 16],
        flags: 0,
        host_stack: 0,
        host_mxcsr: thunk::HOST_MXCSR,
    };
}

impl Machine {
    /// Runs the bytes natively, on the other copy of memory.
    pub fn run_native(&mut self, code: &[u8], context: &mut Context) {
        let mut a = Assembler::default();
        self.arena.reset(0);
        a.start(self.arena.next());
        native_frame(&mut a, code);
        let code = self.arena.push(a.finish()).unwrap();
        arena::serialize();
        set_gs_base(&raw mut *context as u64);
        // SAFETY: the frame saves and restores what the C convention asks for;
        // the instructions use memory of `native` only.
        unsafe { std::mem::transmute::<u64, extern "C" fn()>(code)() };
        context.flags &= 0xffff;
        context.host_stack = 0;
    }

    /// Where `run_native` puts the bytes it is given.
    pub fn native_address(&mut self) -> u64 {
        self.arena.reset(0);
        let (mut with, mut without) = (Assembler::default(), Assembler::default());
        with.start(0);
        native_frame(&mut with, &[0xcc]);
        without.start(0);
        native_frame(&mut without, &[]);
        let common = with.finish().iter().zip(without.finish());
        self.arena.next() + common.take_while(|(a, b)| a == b).count() as u64
    }
}

/// `code` between loads and stores of all registers through GS.
fn native_frame(a: &mut Assembler, code: &[u8]) {
    let field = |offset: usize| Operand::Field(offset as i32);
    let general = |number: u8| field(offset_of!(Context, registers) + 8 * number as usize);
    let xmm = |number: u8| field(160 + 16 * number as usize);
    let flags = field(offset_of!(Context, flags));
    const RAX: u8 = 0;
    const RSP: u8 = 4;
    let saved = [3, 5, 12, 13, 14, 15];
    for register in saved {
        a.push(register);
    }
    a.store(field(offset_of!(Context, host_stack)), RSP);
    for number in 0..16 {
        a.instruction(Opcode::escaped(0x28), number, Rm::Memory(xmm(number)));
    }
    a.instruction(Opcode::escaped(0xae), 2, Rm::Memory(field(24)));
    a.load(RAX, flags);
    a.bytes(&[0x04, 0x7f, 0x9e]);
    for number in 0..16 {
        a.load(number, general(number));
    }
    a.bytes(code);
    for number in 0..16 {
        a.store(general(number), number);
    }
    a.load(RSP, field(offset_of!(Context, host_stack)));
    a.bytes(&[0x9f, 0x0f, 0x90, 0xc0]);
    a.store(flags, RAX);
    for number in 0..16 {
        a.instruction(Opcode::escaped(0x29), number, Rm::Memory(xmm(number)));
    }
    a.instruction(Opcode::escaped(0xae), 3, Rm::Memory(field(24)));
    a.instruction(
        Opcode::escaped(0xae),
        2,
        Rm::Memory(field(offset_of!(Context, host_mxcsr))),
    );
    for register in saved.into_iter().rev() {
        a.pop(register);
    }
    a.bytes(&[0xc3]);
}
