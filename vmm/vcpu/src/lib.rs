//! The vocabulary of virtual CPUs: what those who run one, whose memory it uses and
//! whose devices it meets say to each other. It owes nothing to any back end.
//!
//! | file | holds |
//! | --- | --- |
//! | `environment` | the traits of what a vCPU meets: memory, devices, interrupts |
//! | `state` | all that a CPU is, as plain data |
//! | [`encoding`] | the same as bytes |
//! | `model` | which CPU the guest sees |
//! | [`paging`] | bits of page-table entries and page faults |

pub mod encoding;
mod environment;
mod model;
pub mod paging;
mod state;

use std::sync::Arc;

use thiserror::Error;

pub use environment::{
    Access, Asker, Environment, Exit, Memory, NotAnswered, PAGE_SIZE, PageRun, Purpose, Unbacked,
};
pub use model::{CpuModel, CpuidBits};
pub use state::{CpuState, DescriptorTable, Segment, Undelivered};

/// Makes a vCPU come back from [`Vcpu::run`], from any thread. May be called at
/// any time, and before `run` too: then `run` comes back at once.
pub trait Kick: Send + Sync {
    /// Asks for attention; never waits.
    fn kick(&self);
}

/// Numbers of a back end that only grow. Read by any thread, also when the vCPU
/// is gone.
pub trait BackEndCounters: Send + Sync {
    /// By name.
    fn list(&self) -> Vec<(&'static str, u64)>;
}

/// Why a vCPU cannot go on.
#[derive(Debug, Error)]
pub enum VcpuError {
    /// The kernel refused.
    #[error("{what} failed")]
    Kernel {
        /// The call.
        what: &'static str,
        /// Its answer.
        source: std::io::Error,
    },
    /// The guest did what this back end cannot do.
    #[error(
        "the guest executed an instruction that the {back_end} back end does not support: \
    {what}"
    )]
    Unsupported {
        back_end: &'static str,
        /// Instruction or event, with its address.
        what: String,
    },
    /// A budget of instructions was set where none are counted.
    #[error("this back end does not count instructions")]
    Uncounted,
}

/// One virtual CPU. Made on any thread; `run` and the state calls always on the
/// same one.
pub trait Vcpu: Send {
    /// Runs the guest until something needs its owner. Devices, interrupts and
    /// special registers are asked of `environment` on the way. A CPU that
    /// executed HLT stays halted until an interrupt that it accepts, or a
    /// non-maskable one, waits; until then this answers [`Exit::Halted`].
    fn run(&mut self, environment: &mut dyn Environment) -> Result<Exit, VcpuError>;

    /// All that the CPU is.
    fn save(&self) -> Result<CpuState, VcpuError>;

    /// Makes the CPU what `state` says.
    fn restore(&mut self, state: &CpuState) -> Result<(), VcpuError>;

    /// Makes the guest's TSC what the host's shows plus `offset`, modulo 2^64;
    /// where instructions are the clock, their count plus `offset`. Also part of
    /// the state (`CpuState::tsc_offset`), but cheap to change alone.
    fn set_tsc_offset(&mut self, offset: u64) -> Result<(), VcpuError>;

    /// From now on at most this many instructions are executed before `run` comes
    /// back with [`Exit::Deadline`]; `None`: no limit. Only a back end that
    /// counts instructions takes it.
    fn set_budget(&mut self, instructions: Option<u64>) -> Result<(), VcpuError> {
        let _ = instructions;
        Err(VcpuError::Uncounted)
    }

    /// Instructions executed since it was made or restored (then counted on
    /// from the state's); 0 where they are not counted.
    fn instructions(&self) -> u64 {
        0
    }

    /// Where the back end counts, if it does.
    fn back_end_counters(&self) -> Option<Arc<dyn BackEndCounters>> {
        None
    }

    /// The pages that it used since it came, the latest first, which others of its host's
    /// vCPUs did not write lately; then they are forgotten. Empty where the back end does not
    /// see what the guest uses. Not while it runs.
    fn take_working_set(&mut self) -> Vec<PageRun> {
        Vec::new()
    }

    /// Whether it tells the guest that local APICs have x2APIC mode.
    fn has_x2apic(&self) -> bool {
        false
    }

    /// What makes `run` come back.
    fn kicker(&self) -> Arc<dyn Kick>;
}

/// Makes the vCPUs of one machine.
pub trait BackEnd: Send + Sync {
    /// `kvm` or `soft`.
    fn name(&self) -> &'static str;

    /// Ticks of the guest's TSC in a second.
    fn tsc_hz(&self) -> u64;

    /// The guest's TSC minus the host's, where it cannot be chosen: because
    /// guest code reads the host's TSC as it is.
    fn fixed_tsc_offset(&self) -> Option<u64> {
        None
    }

    /// Words that a Linux kernel's command line needs with this back end.
    fn command_line(&self) -> &'static [&'static str] {
        &[]
    }

    /// What it does on its own that a log should name.
    fn quirks(&self) -> &'static [&'static str] {
        &[]
    }

    /// The vCPU whose local APIC identifier is `id`, in its reset state.
    fn create(&self, id: u32) -> Result<Box<dyn Vcpu>, VcpuError>;
}
