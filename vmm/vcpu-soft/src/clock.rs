//! Time: the host's, or the count of executed instructions.
//!
//! With the count of instructions as the clock one instruction is one tick of
//! the TSC, and nothing that the guest sees depends on the host's time: a run
//! repeats exactly. Blocks are the same whether they are interpreted or
//! translated, a budget is used up to the last instruction, and requests are
//! looked at between any two blocks, so both count alike and take interrupts at
//! the same count.
//!
//! The count is exact when an instruction shows it or reaches a port, for that
//! ends its block. A device's register in memory is given the count at the end of
//! the block.

use crate::cpu::Cpu;

/// Instructions until the next look where nobody set a budget: as good as never.
const UNBOUNDED: i64 = i64::MAX / 4;

/// The host's time stamp counter, read after everything before it and before
/// everything after it. RDTSC alone may be executed before an earlier load: a
/// guest's `lfence; rdtsc`, whose LFENCE is an instruction of its own here, would
/// see time go backwards from one vCPU to the next by a dozen ticks, and Linux
/// gives up the TSC as its clock then (Intel SDM volume 2, RDTSC).
pub fn host_tsc() -> u64 {
    use std::arch::x86_64::{_mm_lfence, _rdtsc};
    // SAFETY: every x86-64 processor has these instructions.
    unsafe {
        _mm_lfence();
        let ticks = _rdtsc();
        _mm_lfence();
        ticks
    }
}

impl Cpu {
    /// The guest's time stamp counter.
    pub fn tsc(&self) -> u64 {
        let ticks = if self.configuration.deterministic {
            self.instructions()
        } else {
            host_tsc()
        };
        ticks.wrapping_add(self.tsc_offset)
    }

    /// Instructions executed since power-on.
    pub fn instructions(&self) -> u64 {
        self.instructions_limit.wrapping_sub(self.budget as u64)
    }

    /// Sets [`Cpu::instructions`].
    pub fn set_instructions(&mut self, count: u64) {
        self.instructions_limit = count.wrapping_add(self.budget as u64);
    }

    /// Lets this many more instructions be executed, or any number.
    pub fn set_budget(&mut self, count: Option<u64>) {
        let executed = self.instructions();
        let count = count.map_or(UNBOUNDED, |count| count.min(UNBOUNDED as u64) as i64);
        self.budget = count;
        self.set_instructions(executed);
    }
}
