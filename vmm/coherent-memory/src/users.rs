//! Those who use a slice's pages, and what they are told.

use std::time::Duration;

use thiserror::Error;
use weft_pager::uffd::UffdError;
use weft_vcpu::{Access, NotAnswered};

/// A page could not be given to those who use it, or taken from them.
#[derive(Debug, Error)]
pub enum UseError {
    /// A vCPU did not give it up.
    #[error(transparent)]
    NotAnswered(#[from] NotAnswered),
    /// The kernel would not change the guest's mapping.
    #[error("cannot {what} the guest's mapping: {source}")]
    Mapping {
        /// What was tried.
        what: &'static str,
        /// The kernel's answer.
        source: UffdError,
    },
    /// What KVM derived from the page's bytes could not be made void.
    #[error("cannot stop vCPUs that use shadow page tables")]
    Shadows(#[source] std::io::Error),
}

/// Those who use this slice's pages.
pub trait Users: Send + Sync {
    /// Takes the page at guest-physical `address` from its users, down to what is
    /// `kept`. When this returns `Ok`, nobody uses more of it, nor will without asking
    /// [`weft_vcpu::Memory::acquire`] again.
    fn revoke(
        &self,
        address: u64,
        kept: Option<Access>,
        patience: Duration,
    ) -> Result<(), UseError>;

    /// A page that [`SharedMemory::ask`] asked for may be used so from now on. As
    /// [`Users::revoke`] and [`Users::hide`], never called for a page while one of them
    /// is under way for it, nor under the shell's lock.
    ///
    /// [`SharedMemory::ask`]: super::SharedMemory::ask
    fn granted(&self, _address: u64, _right: Access) -> Result<(), UseError> {
        Ok(())
    }

    /// Users who are not at work with the page need not have it at hand.
    fn hide(&self, _address: u64) -> Result<(), UseError> {
        Ok(())
    }

    /// When users use the page next, they are to ask for it, or to look at its right:
    /// so it is known whether they do. At any time: the page may be given to them, or be
    /// taken, meanwhile.
    fn watch_for_use(&self, _address: u64) -> Result<(), UseError> {
        Ok(())
    }

    /// Another thread is about to write to the page, at its place in RAM. Called under
    /// the shell's lock: must not wait, nor ask for anything.
    fn written(&self, _address: u64) {}

    /// Nobody waits for a page any more.
    fn end(&self) {}
}
