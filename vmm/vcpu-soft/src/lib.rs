//! A software x86-64 vCPU for x86-64 hosts: an interpreter of decoded blocks,
//! and above it generated code.
//!
//! What it meets outside (memory, devices, the interrupt controller) are two
//! traits: [`Memory`](weft_vcpu::Memory) and [`Environment`](weft_vcpu::Environment).
//! The crate knows nothing of either's inside.
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
mod exceptions;
pub mod fetch;
pub mod flags;
pub mod host;
pub mod interpret;
pub mod jit;
pub mod machine;
pub mod mmu;
pub mod model;
pub mod msr;
pub mod op;
pub mod recent;
pub mod requests;
pub mod run;
pub mod segments;
pub mod tlb;
mod vcpu;
pub mod walk;
mod zeroed;

pub use machine::SoftMachine;
pub use run::Configuration;
pub use vcpu::{Kick, SoftCpu};
