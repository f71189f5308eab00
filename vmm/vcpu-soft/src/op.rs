//! One decoded instruction, ready to be executed.

use crate::cpu::Cpu;

/// What became of an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Outcome {
    /// Done; the next instruction of the block follows.
    Continue = 0,
    /// Done, and the block with it; `Cpu::rip` is the next instruction, whose
    /// block is found through the jump cache.
    End = 1,
    /// Nothing was committed but what the architecture allows; `Cpu::fault`
    /// says why. The caller of the handler knows the instruction.
    Fault = 2,
    /// Nothing was committed: the instruction would have written into the code
    /// that is being run. To be executed again, alone.
    Abort = 3,
    /// A direct branch was taken: `Cpu::rip` is its target, which
    /// `Block::links[0]` may hold.
    Taken = 4,
    /// Control fell through to the instruction after the block's last:
    /// `Cpu::rip`, which `Block::links[1]` may hold.
    Fallthrough = 5,
    /// Done, and the block with it, and the state of the CPU is one in which
    /// interrupts, requests or the mode have to be looked at: to the outer loop.
    Leave = 6,
    /// Part of a repeated string instruction is done and the registers say
    /// which; `Cpu::rip` is still the instruction's own. Not counted as
    /// executed yet.
    Repeat = 7,
}

/// Executes one [`Op`]. Registers, flags and `registers[Cpu::BLOCK_RIP]` of the
/// CPU are up to date when it is called, and when it returns.
///
/// # Safety
///
/// `Op` must be one that [`crate::decode`] made for the mode that the CPU is in,
/// and its block must be alive.
pub type Handler = unsafe extern "C" fn(&mut Cpu, &Op) -> Outcome;

/// A decoded instruction. Which fields mean something, the handler knows.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Op {
    /// What executes it.
    pub handler: Handler,
    /// Immediate operand, cut to the operand's size; the distance from the
    /// block's first instruction of a direct branch's target; or a pointer into
    /// the block's side tables.
    pub immediate: u64,
    /// Of the memory operand; for RIP-relative ones from the block's RIP.
    pub displacement: i32,
    /// Index of the register written; for byte registers the byte's offset in
    /// the register file.
    pub destination: u8,
    /// Index of the register read, in the same numbering.
    pub source: u8,
    /// Index of the base register; [`Cpu::NO_REGISTER`] without, and
    /// [`Cpu::BLOCK_RIP`] for RIP-relative operands.
    pub base: u8,
    /// Index of the index register.
    pub index: u8,
    /// Shift of the index register, 0 to 3.
    pub scale: u8,
    /// Index into [`Cpu::segment_bases`].
    pub segment: u8,
    /// Bytes of the instruction.
    pub length: u8,
    /// Whatever else the handler needs.
    pub extra: u8,
    /// Bytes from the block's first instruction.
    pub offset: u16,
}

impl Op {
    /// Bytes from the block's first instruction to the one after this.
    pub fn end(&self) -> u64 {
        u64::from(self.offset) + u64::from(self.length)
    }
}
