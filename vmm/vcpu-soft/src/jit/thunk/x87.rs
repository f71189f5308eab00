//! The x87 state (and MMX, which is in it), loaded before an instruction and stored
//! after it.

use super::field::{EXCEPTIONS, FPU, MXCSR, MXCSR_MASKS, field};
use super::vector::HOST_MXCSR;
use crate::jit::assembler::register::*;
use crate::jit::assembler::{Assembler, Memory, Opcode, Rm, condition};

/// Loads the x87 state with every exception masked and none pending.
pub(super) fn enter(a: &mut Assembler) {
    a.instruction(Opcode::escaped(0xb7), 8 + 1, field(FPU));
    a.instruction(Opcode::narrow(0x83).with_prefix(0x66), 1, field(FPU));
    a.bytes(&[EXCEPTIONS as u8]);
    // and word [status], 7f7f
    a.instruction(Opcode::narrow(0x81).with_prefix(0x66), 4, field(FPU + 2));
    a.bytes(&0x7f7f_u16.to_le_bytes());
    // The same for MXCSR, which the conversions between MMX and XMM use.
    a.instruction(Opcode::narrow(0x8b), R10, field(MXCSR));
    a.group1(1, false, field(MXCSR), MXCSR_MASKS);
    // fxrstor64
    let wide = Opcode {
        wide: true,
        ..Opcode::escaped(0xae)
    };
    a.instruction(wide, 1, field(FPU));
}

/// Stores the x87 state, and gives the host a clean one. The instruction and
/// data pointers would be the host's: they read as zero.
pub(super) fn save(a: &mut Assembler) {
    let wide = Opcode {
        wide: true,
        ..Opcode::escaped(0xae)
    };
    a.instruction(wide, 0, field(FPU));
    for pointer in [FPU + 8, FPU + 16] {
        a.instruction(Opcode::wide(0xc7), 0, field(pointer));
        a.bytes(&[0; 4]);
    }
    // fninit; then the host's MXCSR.
    a.bytes(&[0xdb, 0xe3]);
    a.instruction(Opcode::narrow(0xc7), 0, Rm::Memory(Memory::At(RSP, -8)));
    a.bytes(&HOST_MXCSR.to_le_bytes());
    a.instruction(Opcode::escaped(0xae), 2, Rm::Memory(Memory::At(RSP, -8)));
}

/// Stores the x87 state with the guest's masks, and marks an exception that these let
/// through as pending.
pub(super) fn leave(a: &mut Assembler) {
    save(a);
    // The guest's control word again, kept in R9 by `enter`.
    a.instruction(Opcode::narrow(0x89).with_prefix(0x66), 8 + 1, field(FPU));
    // MXCSR again, with what flags were added.
    a.instruction(Opcode::narrow(0x8b), RCX, field(MXCSR));
    a.group1(4, false, Rm::Register(RCX), EXCEPTIONS);
    a.instruction(Opcode::narrow(0x09), R10, Rm::Register(RCX));
    a.instruction(Opcode::narrow(0x89), RCX, field(MXCSR));
    // An exception that it does not mask sets ES and B:
    // mov ecx, [status]; mov edx, r9d; not edx; and edx, ecx; and edx, 3f; jz
    a.instruction(Opcode::escaped(0xb7), RCX, field(FPU + 2));
    a.instruction(Opcode::narrow(0x89), 8 + 1, Rm::Register(RDX));
    a.bytes(&[0xf7, 0xd2, 0x21, 0xca, 0x83, 0xe2, 0x3f]);
    let none = a.label();
    a.jump_if(condition::EQUAL, none);
    a.group1(1, false, Rm::Register(RCX), 0x8080);
    a.instruction(Opcode::narrow(0x89).with_prefix(0x66), RCX, field(FPU + 2));
    a.bind(none);
}
