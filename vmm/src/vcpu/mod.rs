//! A virtual CPU, whichever back end runs it.

use std::sync::Arc;

use thiserror::Error;
use weft_soft::{CpuState, Environment, Exit};

/// Makes a vCPU come back from [`Vcpu::run`], from any thread. May be called at
/// any time, and before `run` too: then `run` comes back at once.
pub trait Kick: Send + Sync {
    /// Asks for attention; never waits.
    fn kick(&self);
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
    #[error("the guest executed what the {back_end} back end cannot: {what}")]
    Unsupported {
        /// Which one.
        back_end: &'static str,
        /// Instruction or event, with its address.
        what: String,
    },
}

/// One virtual CPU. Made on any thread; `run` and the state calls always on the
/// same one.
pub trait Vcpu: Send {
    /// Runs the guest until something needs its owner. Devices, interrupts and
    /// special registers are asked of `environment` on the way.
    fn run(&mut self, environment: &mut dyn Environment) -> Result<Exit, VcpuError>;

    /// All that the CPU is.
    fn save(&self) -> Result<CpuState, VcpuError>;

    /// Makes the CPU what `state` says.
    fn restore(&mut self, state: &CpuState) -> Result<(), VcpuError>;

    /// What makes `run` come back.
    fn kicker(&self) -> Arc<dyn Kick>;
}
