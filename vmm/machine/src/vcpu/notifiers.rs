//! MMU notifiers: how coherent memory revokes pages from the vCPUs of a slice.

use std::io;
use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Weak};
use std::time::Duration;

use weft_coherent_memory::mapping::{PAGE_WORDS, Shadows};
use weft_coherent_memory::{MmuNotifier, NotifierError};
use weft_vcpu::Access;
use weft_vcpu_kvm::shadows::ShadowGate;
use weft_vcpu_soft::SoftMachine;

/// Revokes pages from software vCPUs. vCPUs that no longer exist use nothing.
pub struct SoftMmuNotifier(pub Weak<SoftMachine>);

impl MmuNotifier for SoftMmuNotifier {
    fn revoke(
        &self,
        address: u64,
        kept: Option<Access>,
        patience: Duration,
    ) -> Result<(), NotifierError> {
        let Some(machine) = self.0.upgrade() else {
            return Ok(());
        };
        Ok(machine.revoke(address, kept, patience)?)
    }

    fn revoke_all(
        &self,
        addresses: &[Range<u64>],
        patience: Duration,
    ) -> Result<(), NotifierError> {
        let Some(machine) = self.0.upgrade() else {
            return Ok(());
        };
        Ok(machine.revoke_all(addresses, patience)?)
    }

    fn look_anew(&self) {
        if let Some(machine) = self.0.upgrade() {
            machine.look_anew();
        }
    }
}

/// The shadows of page tables that KVM's vCPUs of a slice use.
pub struct KvmShadows(pub Arc<ShadowGate>);

impl Shadows for KvmShadows {
    fn taken(&self, address: u64, words: &[AtomicU64; PAGE_WORDS]) -> io::Result<()> {
        self.0.taken(address, words.iter())
    }

    fn mapped(&self, address: u64) {
        self.0.mapped(address);
    }

    fn unmapped(&self, address: u64) {
        self.0.unmapped_page(address);
    }

    fn written(&self, address: u64) {
        self.0.written(address);
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        self.0.counters()
    }
}
