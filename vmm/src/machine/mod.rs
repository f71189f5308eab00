//! A machine: its parts put together, and its life.

mod configuration;
mod handle;
mod lifecycle;
mod state;

pub use configuration::{BackEndChoice, CPUS_MAX, Configuration, Disk, Forward, Invalid, Network};
pub use handle::{ANSWER_SECONDS_MAX, Handle};
pub use lifecycle::{Answer, Counters, End, Refusal, Request, Stage, Status, VcpuStage};
pub use state::MachineState;
