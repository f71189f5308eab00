//! Time: the host's, or the count of executed instructions.
//!
//! With the instruction clock one instruction is one tick of the TSC, and
//! nothing that the guest sees depends on the host's time: a run repeats
//! exactly. Blocks are the same whether they are interpreted or translated, so
//! deadlines are met at the same instruction either way.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::cpu::Cpu;

/// The instruction clock, as a vCPU and its environment share it. All on one
/// thread at a time; the atomics only make it shareable.
#[derive(Debug)]
pub struct InstructionClock {
    now: AtomicU64,
    deadline: AtomicU64,
}

impl Default for InstructionClock {
    fn default() -> Self {
        Self {
            now: AtomicU64::new(0),
            deadline: AtomicU64::new(u64::MAX),
        }
    }
}

impl InstructionClock {
    /// The guest's TSC when the vCPU last called its environment or stopped.
    pub fn now(&self) -> u64 {
        self.now.load(Ordering::Relaxed)
    }

    /// The TSC at which the vCPU is to come back with
    /// [`crate::Exit::Deadline`].
    pub fn set_deadline(&self, tsc: u64) {
        self.deadline.store(tsc, Ordering::Relaxed);
    }

    /// See [`InstructionClock::set_deadline`].
    pub fn deadline(&self) -> u64 {
        self.deadline.load(Ordering::Relaxed)
    }
}

/// Instructions between two looks at nothing in particular, where time is the
/// host's: as good as never.
const UNBOUNDED: i64 = i64::MAX / 4;

/// The host's time stamp counter.
pub fn host_tsc() -> u64 {
    // SAFETY: every x86-64 processor has it.
    unsafe { std::arch::x86_64::_rdtsc() }
}

impl Cpu {
    /// The guest's time stamp counter.
    pub fn tsc(&self) -> u64 {
        let ticks = if self.configuration.clock.is_some() {
            self.instructions()
        } else {
            host_tsc()
        };
        ticks.wrapping_add(self.tsc_offset)
    }

    /// Sets the guest's time stamp counter.
    pub fn set_tsc(&mut self, value: u64) {
        self.tsc_offset = self.tsc_offset.wrapping_add(value.wrapping_sub(self.tsc()));
    }

    /// Lets the environment know the time.
    pub fn publish_clock(&self) {
        if let Some(clock) = &self.configuration.clock {
            clock.now.store(self.tsc(), Ordering::Relaxed);
        }
    }

    /// Sets the budget to what is left until the deadline; false when nothing
    /// is.
    pub fn look_at_clock(&mut self) -> bool {
        let Some(clock) = &self.configuration.clock else {
            self.set_budget(UNBOUNDED);
            return true;
        };
        let left = clock.deadline().saturating_sub(self.tsc());
        self.set_budget(left.min(UNBOUNDED as u64) as i64);
        left != 0
    }

    /// The deadline is at hand: less than a block is left until then.
    pub fn reach_deadline(&mut self) {
        if let Some(clock) = &self.configuration.clock {
            let deadline = clock.deadline();
            if self.tsc() < deadline {
                self.set_tsc(deadline);
            }
        }
    }
}
