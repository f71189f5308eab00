//! The XMM and YMM registers, loaded before an instruction and stored after it, with the
//! guest's MXCSR in force meanwhile.

use std::mem::offset_of;

use iced_x86::{Mnemonic, OpAccess, UsedRegister};

use super::SIMD_EXCEPTION;
use super::class::{Unit, is_string, raises_simd_exceptions};
use super::field::{EXCEPTIONS, MXCSR, MXCSR_MASKS, field, xmm_offset};
use crate::cpu::Cpu;
use crate::jit::assembler::register::*;
use crate::jit::assembler::{Assembler, Memory, Opcode, Rm, condition};

/// MXCSR with all exceptions masked, round to nearest: what Rust code expects.
pub const HOST_MXCSR: u32 = 0x1f80;

/// The vector registers of an instruction, also those that it does not name (of BLENDVPS,
/// PCMPESTRM).
pub(super) struct Vectors {
    /// Those that are read or only partly written.
    pub(super) loaded: u16,
    /// Those that are written.
    stored: u16,
    /// They are YMM registers.
    wide: bool,
    /// The instruction goes by MXCSR.
    pub(super) rounds: bool,
}

impl Vectors {
    /// Of an instruction that `unit` runs.
    pub(super) fn of(used: &[UsedRegister], unit: Unit, mnemonic: Mnemonic) -> Self {
        let mut vectors = Self {
            loaded: 0,
            stored: 0,
            wide: unit == Unit::Avx,
            rounds: match unit {
                Unit::Sse => raises_simd_exceptions(mnemonic),
                Unit::Avx => !is_string(mnemonic),
                _ => false,
            },
        };
        for used in used
            .iter()
            .filter(|used| used.register().is_vector_register())
        {
            let bit = 1 << (used.register().number() & 15);
            vectors.loaded |= bit;
            if is_written(used.access()) {
                vectors.stored |= bit;
            }
        }
        vectors
    }

    /// Loads them, and the guest's MXCSR.
    pub(super) fn load(&self, a: &mut Assembler) {
        for number in (0..16).filter(|n| self.loaded >> n & 1 != 0) {
            a.instruction(Opcode::escaped(0x28), number, field(xmm_offset(number)));
            if self.wide {
                high_half(a, INSERT, number);
            }
        }
        if self.rounds {
            // The guest's MXCSR without exception flags and with all masks.
            a.instruction(Opcode::narrow(0x8b), RCX, field(MXCSR));
            a.group1(1, false, Rm::Register(RCX), MXCSR_MASKS);
            a.group1(4, false, Rm::Register(RCX), !EXCEPTIONS);
            a.instruction(Opcode::narrow(0x89), RCX, Rm::Memory(Memory::At(RSP, -8)));
            a.instruction(Opcode::escaped(0xae), 2, Rm::Memory(Memory::At(RSP, -8)));
        }
    }

    /// Adds the exceptions to the guest's MXCSR, and puts the host's back. Returns from
    /// the thunk if the guest has not masked one of them.
    pub(super) fn check_exceptions(&self, a: &mut Assembler) {
        a.instruction(Opcode::escaped(0xae), 3, Rm::Memory(Memory::At(RSP, -8)));
        a.instruction(Opcode::narrow(0x8b), RDX, Rm::Memory(Memory::At(RSP, -8)));
        a.group1(4, false, Rm::Register(RDX), EXCEPTIONS);
        a.instruction(Opcode::narrow(0x8b), RCX, field(MXCSR));
        a.instruction(Opcode::narrow(0x09), RDX, field(MXCSR));
        a.instruction(Opcode::narrow(0xc7), 0, Rm::Memory(Memory::At(RSP, -8)));
        a.bytes(&HOST_MXCSR.to_le_bytes());
        a.instruction(Opcode::escaped(0xae), 2, Rm::Memory(Memory::At(RSP, -8)));
        // Raised and not masked: shr ecx, 7; not ecx; and ecx, edx; jz.
        a.bytes(&[0xc1, 0xe9, 7, 0xf7, 0xd1, 0x21, 0xd1]);
        let fine = a.label();
        a.jump_if(condition::EQUAL, fine);
        a.constant(RAX, u64::from(SIMD_EXCEPTION));
        self.clear_high_halves(a);
        a.bytes(&[0xc3]);
        a.bind(fine);
    }

    /// Stores those that are written.
    pub(super) fn store(&self, a: &mut Assembler) {
        for number in (0..16).filter(|n| self.stored >> n & 1 != 0) {
            a.instruction(Opcode::escaped(0x29), number, field(xmm_offset(number)));
            if self.wide {
                high_half(a, EXTRACT, number);
            }
        }
        self.clear_high_halves(a);
    }

    /// SSE instructions of the host are slow where upper halves are in use.
    fn clear_high_halves(&self, a: &mut Assembler) {
        if self.wide {
            // vzeroupper
            a.bytes(&[0xc5, 0xf8, 0x77]);
        }
    }
}

/// VINSERTF128 and VEXTRACTF128.
const INSERT: u8 = 0x18;
const EXTRACT: u8 = 0x19;

/// One of the two between the upper half of a YMM register and its place in the
/// `Cpu`.
fn high_half(a: &mut Assembler, opcode: u8, number: u8) {
    let offset = offset_of!(Cpu, ymm_high) as i32 + 16 * i32::from(number);
    // The other source of an insertion is the register itself; an extraction has none.
    let source = if opcode == INSERT { number } else { 0 };
    a.bytes(&[
        0xc4,
        (!number & 8) << 4 | 0x63,
        (!source & 15) << 3 | 0x05,
        opcode,
        0x87 | (number & 7) << 3,
    ]);
    a.bytes(&offset.to_le_bytes());
    a.bytes(&[1]);
}

pub(super) fn is_written(access: OpAccess) -> bool {
    !matches!(access, OpAccess::Read | OpAccess::CondRead)
}
