//! What the vCPUs of a machine have in common.

use std::sync::Arc;

use kvm_ioctls::VmFd;
use weft_guest_memory::Ram;

use super::shadows::ShadowGate;

/// What every vCPU of a machine needs.
pub(super) struct Shared {
    pub(super) vm: VmFd,
    /// The slots point into it: it must not go before the last vCPU.
    pub(super) ram: Ram,
    /// Bytes that KVM's XSAVE takes.
    pub(super) xsave_bytes: usize,
    /// MSRs that are state.
    pub(super) state_msrs: Vec<u32>,
    /// The guest's TSC offset, where KVM takes another and changes nothing.
    pub(super) fixed_tsc_offset: Option<u64>,
    /// Where shadows of page tables may have to be dropped.
    pub(super) gate: Option<Arc<ShadowGate>>,
}
