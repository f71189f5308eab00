//! Pages that follow a vCPU to this slice.

use std::time::Instant;

use weft_dsm::controller::{Event, PrefetchRun};
use weft_vcpu::PageRun;

use super::shell::{PAGE_SHIFT, SharedMemory, to_protocol};

impl SharedMemory {
    /// Fetches these pages for a vCPU while it runs here, in this order, until
    /// [`SharedMemory::end_prefetch`]. Never waits. Replaces what was fetched for it before.
    ///
    /// # Errors
    /// Some are beyond guest memory; nothing is fetched.
    pub fn prefetch(&self, vcpu: u32, runs: &[PageRun]) -> Result<(), String> {
        let pages = self.end >> PAGE_SHIFT;
        let is_beyond = |run: &&PageRun| run.count > pages || run.first > pages - run.count;
        if let Some(run) = runs.iter().find(is_beyond) {
            return Err(format!("page {:#x} is beyond guest memory", run.first));
        }
        let wanted = |run: &PageRun| PrefetchRun {
            first: run.first,
            count: run.count,
            access: to_protocol(run.access),
        };
        let (user, list) = (vcpu, runs.iter().map(wanted).collect::<Vec<_>>().into());
        self.locked(|state| state.step(self, Event::Prefetch { user, list }, None));
        Ok(())
    }

    /// A vCPU left this slice: nothing more is fetched for it.
    pub fn end_prefetch(&self, vcpu: u32) {
        let user = vcpu;
        self.locked(|state| state.step(self, Event::EndPrefetch { user }, None));
    }

    /// Stops fetching, and waits until what was requested is here: no page comes to this
    /// slice afterwards that no thread asks for. For two leases at most: a link whose lease
    /// ends reports the cause, and earlier.
    pub fn hold_prefetches(&self) {
        let deadline = Instant::now() + 2 * self.lease;
        self.locked(|state| state.step(self, Event::HoldPrefetches, None));
        loop {
            let given = self.membership.given();
            let is_over = !self.locked(|state| state.controller.is_prefetching());
            let left = deadline.saturating_duration_since(Instant::now());
            if is_over || left.is_zero() || self.is_over() {
                return;
            }
            self.membership.wait(given, left);
        }
    }

    /// Goes on fetching.
    pub fn resume_prefetches(&self) {
        self.locked(|state| state.step(self, Event::ResumePrefetches, None));
    }
}
