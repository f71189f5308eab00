//! A software x86-64 vCPU for x86-64 hosts: an interpreter of decoded blocks,
//! and above it generated code.
//!
//! What it meets outside (memory, devices, the interrupt controller) are two
//! traits: [`Memory`] and [`Environment`]. The crate knows nothing of either's
//! inside.
//!
//! The design, and what was measured and rejected: `docs/soft-vcpu.md`.

pub mod block;
pub mod cpu;
pub mod decode;
pub mod environment;
pub mod fetch;
pub mod flags;
pub mod generated;
pub mod machine;
pub mod msr;
pub mod op;
pub mod requests;
pub mod run;
pub mod state;
pub mod tlb;

pub use environment::{Access, Environment, Exit, Memory, Unbacked};
pub use machine::SoftMachine;
pub use state::{CpuState, Undelivered};
