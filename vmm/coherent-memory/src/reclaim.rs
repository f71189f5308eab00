//! Memory that the guest does not need: a device says which pages, and their memory goes
//! back to the hosts.
//!
//! For the protocol a reclaimed page is a page to which its manager writes zeros: the
//! manager becomes its owner, all copies are invalidated, and its memory is given back
//! while it is pinned. So no message, state or invariant of the protocol is about it.
//! Memory that other slices keep for pages that left them is given back afterwards.

use std::io;
use std::ops::Range;

use weft_dsm::PAGE_BYTES;
use weft_dsm::controller::{Event, Passed};
use weft_vcpu::{Access, Memory};

use super::counters::MemoryCounters;
use super::shell::{PAGE_SHIFT, SharedMemory};

/// Pages that are pinned together while their memory goes back.
const PINNED_MAX: u64 = 64;
/// Vacant pages that are looked at in one step.
const VACANT_MAX: u64 = 512;

impl SharedMemory {
    /// Of `pages`, reclaims those that this slice manages. The guest does not use them
    /// until this returns. A page that leaves meanwhile, or whose manager changes, keeps its
    /// content.
    ///
    /// # Errors
    /// The kernel's answer, or the machine has ended.
    pub fn reclaim(&self, pages: Range<u64>) -> io::Result<()> {
        let pages = pages.start..pages.end.min(self.end >> PAGE_SHIFT);
        for start in pages.clone().step_by(PINNED_MAX as usize) {
            let chunk = start..pages.end.min(start + PINNED_MAX);
            let touched = self.touched(chunk);
            // No page is waited for while another is pinned.
            for page in &touched {
                let address = page << PAGE_SHIFT;
                if self.held(address, Access::Write).is_none()
                    && self.acquire(address, Access::Write).is_ok()
                {
                    self.unpin(address);
                }
            }
            if self.is_over() {
                return Err(io::Error::other("the machine has ended"));
            }
            let is_held = |page: &u64| self.acquire_held(&[page << PAGE_SHIFT], Access::Write);
            let held: Vec<u64> = touched.into_iter().filter(is_held).collect();
            let mut given = Ok(());
            for run in held.chunk_by(|page, next| page + 1 == *next) {
                if given.is_ok() {
                    let bytes = run.len() * PAGE_BYTES;
                    given = self.ram().give_back(run[0] << PAGE_SHIFT, bytes);
                }
                MemoryCounters::add(&self.counters.reclaimed, run.len() as u64);
                run.iter().for_each(|page| self.unpin(page << PAGE_SHIFT));
            }
            given?;
        }
        Ok(())
    }

    /// Of `pages`, gives memory back that is kept for pages which left this slice.
    pub fn release_vacant(&self, pages: Range<u64>) {
        let end = pages.end.min(self.end >> PAGE_SHIFT);
        for start in (pages.start..end).step_by(VACANT_MAX as usize) {
            let vacant = (start..end.min(start + VACANT_MAX)).collect();
            self.locked(|state| {
                state.step(self, Event::Evict(Passed::vacant(vacant)), None);
                state.step(self, Event::MakeRoom, None);
            });
        }
    }
}
