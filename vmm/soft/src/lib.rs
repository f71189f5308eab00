//! A software x86-64 vCPU for x86-64 hosts: an interpreter of decoded blocks,
//! and above it generated code.
//!
//! What it meets outside (memory, devices, the interrupt controller) are two
//! traits: [`Memory`] and [`Environment`]. The crate knows nothing of either's
//! inside.
//!
//! The design, and what was measured and rejected: `docs/soft-vcpu.md`.

pub mod access;
pub mod block;
pub mod clock;
mod control;
pub mod cpu;
mod cpuid;
pub mod debug;
pub mod decode;
mod devices;
pub mod environment;
mod exceptions;
pub mod fetch;
pub mod flags;
pub mod generated;
pub mod host;
pub mod interpret;
pub mod machine;
pub mod mmu;
mod model;
pub mod msr;
pub mod op;
pub mod requests;
pub mod run;
pub mod segments;
pub mod state;
pub mod tlb;
mod vcpu;
pub mod walk;

pub use environment::{Access, Asker, Environment, Exit, Memory, Purpose, Unbacked};
pub use machine::{NotAnswered, SoftMachine};
pub use model::CpuModel;
pub use run::Configuration;
pub use state::{CpuState, Undelivered};
pub use vcpu::{Kick, SoftCpu};
