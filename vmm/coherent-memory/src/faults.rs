//! Faults of a slice's mappers: blocking ones, whose thread waits for the page, and
//! asynchronous ones, after which a vCPU sleeps in the kernel until its page is mapped.

use std::time::{Duration, Instant};

use weft_dsm::PAGE_BYTES;
use weft_dsm::controller::{Event, Purpose};
use weft_vcpu::{Access, Asker, Memory, Purpose as AskedFor, Unbacked};

use super::counters::MemoryCounters;
use super::served::ServedFault;
use super::shell::{PAGE_SHIFT, SharedMemory, to_protocol};
use super::trace::FaultKind;

impl SharedMemory {
    /// A blocking fault: waits for the page if another slice has it. See [`Memory::acquire`].
    fn blocking_fault(
        &self,
        address: u64,
        access: Access,
        asker: Option<&Asker>,
    ) -> Result<*mut u8, Unbacked> {
        let host = self.host_of(address).ok_or(Unbacked(address))?;
        let page = address >> PAGE_SHIFT;
        let wanted = to_protocol(access);
        let waiting = self.locked(|state| {
            self.mark_written(page, access);
            let held = match self.is_pinned_here(page) {
                true => state.controller.hold_again(page, wanted),
                false => state.controller.hold(page, wanted),
            };
            if held {
                return None;
            }
            let start = Instant::now();
            let (waiter, thread) = state.add_waiter();
            let event = Event::Acquire {
                waiter,
                page,
                access: wanted,
                purpose: asker.map_or(Purpose::Data, purpose),
            };
            let before = state.requested;
            state.step(self, event, None);
            // Its own page may have been requested earlier.
            let pages = (state.requested - before).max(1);
            Some((waiter, thread, start, pages))
        });
        self.add_own_pin(page);
        let Some((waiter, thread, start, pages)) = waiting else {
            return Ok(host);
        };
        let asking = start.elapsed();
        if let (Some(asker), Some(observer)) = (asker, self.fault_observer.get()) {
            observer.waits(asker.vcpu);
        }
        // Two leases: a link whose lease ends reports the cause, and earlier.
        let patience = 2 * self.lease;
        let mut retries = 0;
        while !thread.granted() && !self.is_over() {
            if !thread.wait(patience) {
                let waits = self.locked(|state| state.controller.waits_for_room(page));
                self.fail(self.why_not_here(page, waits, patience));
            }
            if !thread.granted() && !self.is_over() {
                retries += 1;
                self.locked(|state| state.step(self, Event::Retry { waiter }, None));
            }
        }
        self.counters.count_retries(retries);
        let installing = thread.since_granted();
        self.locked(|state| {
            state.remove_waiter(waiter);
            state.step(self, Event::Leave { waiter }, None);
            self.mark_written(page, access);
        });
        self.rights.touch(page);
        let Some(kind) = thread.remote() else {
            MemoryCounters::add(&self.counters.local, 1);
            return Ok(host);
        };
        let waited = start.elapsed();
        let waited_ns = waited.as_nanos() as u64;
        self.counters.count_wait(waited, asking, installing);
        if let Some(asker) = asker {
            self.vcpu_counts.count(asker.vcpu, waited_ns);
            let fault = ServedFault {
                vcpu: asker.vcpu,
                page,
                access,
                from: thread.server(),
                bytes: match kind {
                    FaultKind::Upgrade => 0,
                    FaultKind::Read | FaultKind::Write => pages * PAGE_BYTES as u64,
                },
                waited_ns,
            };
            self.served_counts.count(&fault);
            let observer = self.fault_observer.get();
            if observer.is_none_or(|observer| observer.served(&fault)) {
                self.count_for_exchange(page, fault.from);
            }
        }
        self.trace.record(page, kind, asker, start, waited);
        Ok(host)
    }

    /// An asynchronous fault: requests a page without waiting. [`MmuNotifier::granted`] is
    /// called when it may be used, perhaps before this returns. A second request for the page
    /// changes nothing. An address that is not memory is never granted.
    ///
    /// [`MmuNotifier::granted`]: super::MmuNotifier::granted
    pub fn ask(&self, address: u64, access: Access) {
        let (page, access) = (address >> PAGE_SHIFT, to_protocol(access));
        self.rights.touch(page);
        self.locked(|state| {
            state.step(self, Event::Ask { page, access }, None);
            state.controller.asked_by(page, self.now());
        });
    }

    /// Makes the next use of a page a fault, while the page stays here.
    pub fn hide(&self, address: u64) {
        let page = address >> PAGE_SHIFT;
        self.locked(|state| state.step(self, Event::Hide { page }, None));
    }

    /// Fails if a page of an asynchronous fault did not come in time. A caller of
    /// [`SharedMemory::ask`] calls this regularly.
    pub fn check_overdue(&self) {
        // Two leases: a link whose lease ends reports the cause, and earlier.
        let patience = 2 * self.lease;
        let now = self.now();
        let overdue = self.locked(|state| {
            let page = state.controller.overdue(now, patience)?;
            Some((page, state.controller.waits_for_room(page)))
        });
        if let Some((page, waits)) = overdue {
            self.fail(self.why_not_here(page, waits, patience));
        }
    }

    pub(super) fn count_remote(&self, page: u64, access: weft_dsm::Access) -> FaultKind {
        let (kind, counter) = match (access, self.rights.of(page)) {
            (weft_dsm::Access::Read, _) => (FaultKind::Read, &self.counters.reads),
            (weft_dsm::Access::Write, None) => (FaultKind::Write, &self.counters.writes),
            (weft_dsm::Access::Write, Some(_)) => (FaultKind::Upgrade, &self.counters.upgrades),
        };
        MemoryCounters::add(counter, 1);
        self.counts.count(page, kind);
        kind
    }

    /// Under the lock: marks a page to which a thread writes that is not a vCPU.
    fn mark_written(&self, page: u64, access: Access) {
        if let (Access::Write, Some(notifier)) = (access, self.notifier.get()) {
            notifier.written(page << PAGE_SHIFT);
        }
    }

    /// Why a page is not here after `patience`; `waits`: it was never requested, since
    /// there is no room for it.
    fn why_not_here(&self, page: u64, waits: bool, patience: Duration) -> String {
        let seconds = patience.as_secs_f64();
        if !waits {
            return format!("page {page:#x} did not come within {seconds} s");
        }
        format!(
            "no room for page {page:#x} within {seconds} s: this node has {} pages of its {}, \
             and none could leave",
            self.rights.resident(),
            self.budget().pages()
        )
    }
}

impl Memory for SharedMemory {
    /// Waits for the page if another slice has it. The page is pinned until
    /// [`Memory::unpin`].
    fn acquire(&self, address: u64, access: Access) -> Result<*mut u8, Unbacked> {
        self.blocking_fault(address, access, None)
    }

    fn acquire_for(
        &self,
        address: u64,
        access: Access,
        asker: &Asker,
    ) -> Result<*mut u8, Unbacked> {
        self.blocking_fault(address, access, Some(asker))
    }

    fn held(&self, address: u64, access: Access) -> Option<*mut u8> {
        let page = address >> PAGE_SHIFT;
        if !self.rights.allow_use(page, to_protocol(access)) {
            return None;
        }
        self.host_of(address)
    }

    fn acquire_held(&self, pages: &[u64], access: Access) -> bool {
        if pages.iter().any(|address| self.host_of(*address).is_none()) {
            return false;
        }
        let numbers = pages.iter().map(|address| address >> PAGE_SHIFT);
        self.locked(|state| {
            let wanted = to_protocol(access);
            let has_pinned = |page| self.is_pinned_here(page);
            let held = state
                .controller
                .hold_all(numbers.clone(), wanted, has_pinned);
            if held {
                for page in numbers {
                    self.mark_written(page, access);
                    self.add_own_pin(page);
                }
            }
            held
        })
    }

    fn unpin(&self, address: u64) {
        if self.unpin_and_check(address) {
            self.deferred_work.wake();
        }
    }

    fn unpin_and_check(&self, address: u64) -> bool {
        self.remove_own_pin(address >> PAGE_SHIFT);
        self.pins.remove(address >> PAGE_SHIFT);
        self.pins.has_deferred()
    }

    fn do_deferred_work(&self) {
        self.locked(|state| state.step(self, Event::Tick, None));
    }

    fn end(&self) -> u64 {
        self.end
    }
}

/// The purpose of a fault, as the controller distinguishes it.
fn purpose(asker: &Asker) -> Purpose {
    match asker.purpose {
        AskedFor::Table => Purpose::Table,
        AskedFor::Code if !asker.user => Purpose::KernelCode,
        _ => Purpose::Data,
    }
}
