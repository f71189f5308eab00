//! Where in the `Cpu`, to which RDI points, a thunk finds what it needs.

use std::mem::offset_of;

use crate::cpu::Cpu;
use crate::jit::assembler::register::RDI;
use crate::jit::assembler::{Memory, Rm};

/// The x87 state, as FXSAVE has it.
pub(super) const FPU: i32 = offset_of!(Cpu, fpu) as i32;
/// The SSE control and status word in that state.
pub(super) const MXCSR: i32 = FPU + 24;
/// The arithmetic flags.
pub(super) const FLAGS: i32 = offset_of!(Cpu, flags) as i32;
/// The exception flags in MXCSR, and the masks of the x87 control word.
pub(super) const EXCEPTIONS: i32 = 0x3f;
/// The exception masks in MXCSR.
pub(super) const MXCSR_MASKS: i32 = 0x1f80;

pub(super) fn at(offset: i32) -> Memory {
    Memory::At(RDI, offset)
}

pub(super) fn field(offset: i32) -> Rm {
    Rm::Memory(at(offset))
}

pub(super) fn register_offset(number: u8) -> i32 {
    offset_of!(Cpu, registers) as i32 + 8 * i32::from(number)
}

/// Where an XMM register is in the `Cpu`.
pub fn xmm_offset(number: u8) -> i32 {
    FPU + 160 + 16 * i32::from(number)
}
