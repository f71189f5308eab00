//! The MMU notifier: by which a slice's memory changes what its mappers may use.
//!
//! The same idea as the kernel's `Documentation/mm/mmu_notifier.rst`: a mapper of guest memory
//! (software vCPUs, a mapping in KVM) registers a notifier, and its mappings of a page are
//! revoked before the page leaves.

use std::ops::Range;
use std::time::Duration;

use thiserror::Error;
use weft_pager::uffd::UffdError;
use weft_vcpu::{Access, NotAnswered, PAGE_SIZE};

/// A mapping of a page could not be granted or revoked.
#[derive(Debug, Error)]
pub enum NotifierError {
    /// A vCPU did not give up the page in time.
    #[error(transparent)]
    NotAnswered(#[from] NotAnswered),
    /// The kernel refused to change the guest's mapping.
    #[error("cannot {what} the guest's mapping: {source}")]
    Mapping {
        /// The attempted change, as a verb.
        what: &'static str,
        source: UffdError,
    },
    /// Shadow page tables that KVM derived from the page's bytes could not be invalidated.
    #[error("cannot stop vCPUs that use shadow page tables")]
    Shadows(#[source] std::io::Error),
}

/// A mapper of this slice's pages.
///
/// `revoke`, `granted` and `hide` are never called for a page while one of them runs for it,
/// and never under the shell's lock.
pub trait MmuNotifier: Send + Sync {
    /// Lowers the right to the page at guest-physical `address` to `kept`. After `Ok`, no
    /// thread of the mapper uses more than that before it has called
    /// [`weft_vcpu::Memory::acquire`] again.
    fn revoke(
        &self,
        address: u64,
        kept: Option<Access>,
        patience: Duration,
    ) -> Result<(), NotifierError>;

    /// Takes all rights to the pages at these guest-physical addresses, as `revoke` does for
    /// each. While the machine stands, so that it may take other pages, too.
    fn revoke_all(
        &self,
        addresses: &[Range<u64>],
        patience: Duration,
    ) -> Result<(), NotifierError> {
        let pages = addresses.iter().cloned();
        let mut pages = pages.flat_map(|addresses| addresses.step_by(PAGE_SIZE as usize));
        pages.try_for_each(|address| self.revoke(address, None, patience))
    }

    /// Maps a page that [`SharedMemory::ask`] requested, with this right.
    ///
    /// [`SharedMemory::ask`]: super::SharedMemory::ask
    fn granted(&self, _address: u64, _right: Access) -> Result<(), NotifierError> {
        Ok(())
    }

    /// Unmaps a page that stays, so that its next use is a fault.
    fn hide(&self, _address: u64) -> Result<(), NotifierError> {
        Ok(())
    }

    /// Arranges that the next use of the page is seen, by a fault or a check of its right.
    /// Called at any time, also while the page is granted or revoked.
    fn watch_for_use(&self, _address: u64) -> Result<(), NotifierError> {
        Ok(())
    }

    /// From now on, each first use of a page by a vCPU calls [`weft_vcpu::Memory::acquire`]
    /// or [`weft_vcpu::Memory::held`] again, though nothing was revoked: so that uses are
    /// seen. Does not wait for vCPUs.
    fn look_anew(&self) {}

    /// A thread that is not a vCPU is about to write to the page. Called under the shell's
    /// lock: must not block or call the shell.
    fn written(&self, _address: u64) {}

    /// Ends all waits for pages, because the machine ends.
    fn end(&self) {}
}
