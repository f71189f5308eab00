//! Which arithmetic flags an instruction reads and defines, and where in a block
//! they are still needed.
//!
//! The host's flags hold the guest's between instructions of a block, but an
//! address translation changes them, and so does leaving the block. Where nobody
//! reads the flags again before they are all overwritten, nothing is saved.
//!
//! The approximation is on the safe side: flags that the manual calls undefined
//! count as passed through, because some processors leave them as they were.

use iced_x86::{Instruction, Mnemonic, OpKind, RflagsBits};

/// The six arithmetic flags.
pub const ALL: u32 = RflagsBits::OF
    | RflagsBits::SF
    | RflagsBits::ZF
    | RflagsBits::AF
    | RflagsBits::CF
    | RflagsBits::PF;

/// What one instruction does to the flags.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlagUse {
    /// Flags that it reads.
    pub read: u32,
    /// Flags whose old values are gone afterwards, whatever the operands.
    pub defined: u32,
    /// It may change flags at all.
    pub modifies: bool,
}

impl FlagUse {
    /// An instruction that may look at all flags, and change any.
    pub const OPAQUE: Self = Self {
        read: ALL,
        defined: 0,
        modifies: true,
    };

    /// The flags that an instruction uses.
    pub fn of(instruction: &Instruction) -> Self {
        let read = instruction.rflags_read() & ALL;
        let modifies = instruction.rflags_modified() & ALL != 0;
        let written = (instruction.rflags_written()
            | instruction.rflags_cleared()
            | instruction.rflags_set())
            & ALL;
        Self {
            read,
            defined: defined(instruction, written),
            modifies,
        }
    }

    /// Flags needed before the instruction when `after` are needed after it.
    pub fn before(self, after: u32) -> u32 {
        self.read | after & !self.defined
    }

    /// Whether the instruction wants the old flags in the host's: it reads some,
    /// or leaves some that are needed afterwards while it changes others.
    pub fn needs_old(self, after: u32) -> bool {
        self.read != 0 || self.modifies && after & !self.defined != 0
    }
}

fn defined(instruction: &Instruction, written: u32) -> u32 {
    use Mnemonic::*;
    match instruction.mnemonic() {
        // AF is undefined by the manual, and cleared by every processor.
        And | Or | Xor | Test => ALL,
        // A count of zero changes nothing.
        Shl | Sal | Shr | Sar | Rol | Ror | Rcl | Rcr | Shld | Shrd => {
            let last = instruction.op_count() - 1;
            let count = match instruction.op_kind(last) {
                OpKind::Immediate8 => instruction.immediate8() & 31,
                _ => 0,
            };
            let shift = !matches!(instruction.mnemonic(), Rol | Ror | Rcl | Rcr);
            if count != 0 && shift {
                RflagsBits::SF | RflagsBits::ZF | RflagsBits::PF | RflagsBits::CF
            } else {
                0
            }
        }
        Div | Idiv => 0,
        _ => written,
    }
}

/// The flags needed after each of a trace's instructions: by those after it, and
/// where it leads out of the trace.
pub fn needed_after(
    uses: impl DoubleEndedIterator<Item = FlagUse> + ExactSizeIterator,
    outside: &[u32],
    needed: &mut Vec<u32>,
) {
    needed.clear();
    needed.resize(outside.len(), 0);
    let mut live = 0;
    for ((slot, flags), outside) in needed.iter_mut().zip(uses).zip(outside).rev() {
        *slot = live | outside;
        live = flags.before(*slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use iced_x86::code_asm::*;

    fn uses(write: impl FnOnce(&mut CodeAssembler)) -> Vec<FlagUse> {
        let mut assembler = CodeAssembler::new(64).unwrap();
        write(&mut assembler);
        assembler.instructions().iter().map(FlagUse::of).collect()
    }

    #[test]
    fn overwritten_flags_are_not_needed() {
        let uses = uses(|a| {
            a.add(rax, rcx).unwrap();
            a.mov(rdx, rax).unwrap();
            a.cmp(rax, rdx).unwrap();
        });
        let mut needed = Vec::new();
        needed_after(uses.iter().copied(), &[0, 0, ALL], &mut needed);
        assert_eq!(needed, [0, 0, ALL]);
        assert_eq!(uses[0].before(needed[0]), 0);
    }

    #[test]
    fn carry_passes_through_inc() {
        let uses = uses(|a| {
            a.inc(rax).unwrap();
            a.adc(rcx, rdx).unwrap();
        });
        assert_eq!(uses[0].before(uses[1].before(0)), RflagsBits::CF);
        assert!(uses[0].needs_old(RflagsBits::CF));
        assert!(!uses[0].needs_old(RflagsBits::ZF));
    }

    #[test]
    fn a_shift_by_nothing_defines_nothing() {
        let uses = uses(|a| {
            a.shl(rax, cl).unwrap();
            a.shl(rax, 32).unwrap();
            a.shr(rax, 3).unwrap();
        });
        assert_eq!(uses[0].defined, 0);
        assert_eq!(uses[1].defined, 0);
        assert_eq!(uses[2].defined & RflagsBits::CF, RflagsBits::CF);
    }
}
