//! A software x86-64 vCPU for x86-64 hosts: an interpreter of decoded blocks,
//! and above it generated code.
//!
//! One [`SoftCpu`] is one virtual CPU and runs on one host thread. What it
//! meets outside (memory, devices, the interrupt controller) are two traits:
//! [`Memory`] and [`Environment`]. The crate knows nothing of either's inside.
//!
//! The design, and what was measured and rejected: `docs/soft-vcpu.md`.

pub mod environment;
pub mod state;

pub use environment::{Access, Environment, Exit, Memory, Unbacked};
pub use state::CpuState;
