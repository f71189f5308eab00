//! vCPUs run by KVM, without its interrupt controllers: local APICs, I/O APIC,
//! timers and the paravirtual clock are the machine's own, behind
//! [`Environment`](weft_vcpu::Environment).
//!
//! | file | holds |
//! | --- | --- |
//! | [`detect`] | which KVM there is, and which back end is the better one |
//! | `vm` | the virtual machine: memory slots, filtered MSRs, vCPUs |
//! | `cpuid` | what CPUID shows |
//! | `model` | what of it a guest of a CPU model sees |
//! | `vcpu` | one vCPU: entering, leaving, injecting |
//! | `state` | its registers to and from [`CpuState`](weft_vcpu::CpuState) |
//! | `msrs` | which MSRs are state, which are the machine's |
//! | `calls` | calls of the kernel that `kvm-ioctls` lacks |
//! | `kick` | how another thread makes it come back |
//! | `run_page` | a mapping of `kvm_run`, and the signal that ends KVM_RUN |
//! | `shared` | what the vCPUs of a machine have in common |
//! | [`counters`] | exits by kind |
//! | [`shadows`] | what to do about shadows of page tables that another slice changes |
//! | `quirks` | what a KVM without hardware virtualisation cannot do |
//!
//! Invariants of a vCPU:
//!
//! - when `run` comes back, nothing that the guest did is half done: an I/O
//!   instruction whose device was asked was also completed;
//! - an interrupt is taken from the environment only when KVM accepts it at once,
//!   so it is either in the local APIC's request register or delivered;
//! - a kick is never lost: see `kick`.
//!
//! The design, and what was measured: `docs/vmm-kvm.md`. The interface: the
//! kernel's document virt/kvm/api.

mod calls;
pub mod counters;
mod cpuid;
pub mod detect;
mod kick;
mod model;
mod msrs;
mod quirks;
mod run_page;
pub mod shadows;
mod shared;
mod state;
mod vcpu;
mod vm;

use thiserror::Error;
use weft_vcpu::CpuModel;

pub use counters::{ExitCount, ExitCounters, Meter};
pub use detect::{Backend, Choice, Host, Paging, Unusable, Virtualization};
pub use vcpu::KvmVcpu;
pub use vm::{KvmBackEnd, KvmOptions};

use weft_vcpu::VcpuError;

/// Why a machine could not be made in KVM.
#[derive(Debug, Error)]
pub enum KvmError {
    /// The kernel refused.
    #[error("{what} failed")]
    Call {
        /// The call.
        what: &'static str,
        /// Its answer.
        source: std::io::Error,
    },
    /// More leaves than KVM takes.
    #[error("{0} CPUID leaves, but KVM accepts {1}")]
    Cpuid(usize, usize),
    /// KVM does not offer what the model has.
    #[error(
        "--cpu {model} has features that this KVM does not offer (CPUID 1, ECX: {missing:#x}): \
        choose an older model, or omit --cpu"
    )]
    Model {
        /// What was asked for.
        model: CpuModel,
        /// The bits that are missing.
        missing: u32,
    },
    /// Programs see the host's CPUID there, whatever KVM shows.
    #[error(
        "--cpu {0}: a KVM without hardware virtualisation cannot hide features of the host's \
        CPU: omit --cpu, or use --backend soft"
    )]
    ModelShown(CpuModel),
    /// More than KVM takes.
    #[error("{wanted} vCPUs, but this KVM supports {possible}")]
    Vcpus {
        /// Asked for.
        wanted: u32,
        /// At most.
        possible: usize,
    },
}

impl KvmError {
    fn call(what: &'static str, error: kvm_ioctls::Error) -> Self {
        Self::Call {
            what,
            source: error.into(),
        }
    }
}

impl From<KvmError> for VcpuError {
    fn from(error: KvmError) -> Self {
        match error {
            KvmError::Call { what, source } => Self::Kernel { what, source },
            other => Self::Kernel {
                what: "making a vCPU",
                source: std::io::Error::other(other),
            },
        }
    }
}

/// A failed call on a vCPU.
fn failed(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> VcpuError {
    move |error| VcpuError::Kernel {
        what,
        source: error.into(),
    }
}

/// What this back end, or this KVM, cannot do.
fn unsupported(what: String) -> VcpuError {
    VcpuError::Unsupported {
        back_end: "kvm",
        what,
    }
}
