//! A thread that needs a page and waits for it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use weft_dsm::Page;
use weft_vcpu::{Access, Asker, Memory, Purpose, Unbacked};

use super::counters::MemoryCounters;
use super::shell::{PAGE_SHIFT, SharedMemory};
use super::state::fault;
use super::trace::FaultKind;
use super::waiters::Waiter;

impl SharedMemory {
    /// Waits for the page if another slice has it. See [`Memory::acquire`].
    fn fetch(
        &self,
        address: u64,
        access: Access,
        asker: Option<&Asker>,
    ) -> Result<*mut u8, Unbacked> {
        let host = self.host_of(address).ok_or(Unbacked(address))?;
        let page = address >> PAGE_SHIFT;
        self.wait_for_room(page);
        let mut state = self.lock();
        self.tell_of_writing(page, access);
        if self.rights.allow_use(page, access) && self.pins.add(page) {
            return Ok(host);
        }
        let waiter = Waiter::new(page, access);
        state.waiters.push(waiter.clone());
        let (start, mut counted) = (Instant::now(), None);
        let mut asking = Duration::ZERO;
        while !waiter.granted() && !self.is_over() {
            if !state.busy.contains_key(&page) {
                let work = state.step(fault(page, access), None);
                state = self.carry_out(state, page, work);
                if waiter.granted() {
                    break;
                }
            }
            let first = counted.is_none();
            if first {
                counted = Some(self.count_remote(page, access));
                state = self.ask_back_if_read(state, page, access);
                state = self.ask_for_code(state, page, asker);
            }
            drop(state);
            if first {
                asking = start.elapsed();
            }
            // A link whose lease ends tells more: it is given the time to.
            if !waiter.wait(2 * self.lease) {
                self.fail(did_not_come(page, 2 * self.lease));
            }
            state = self.lock();
        }
        let installing = waiter.since_granted();
        state.waiters.retain(|other| !Arc::ptr_eq(other, &waiter));
        if counted.is_some() && state.fresh == Some(page) {
            state = self.ask_ahead(state, page);
        }
        self.tell_of_writing(page, access);
        // Other walkers only read it, too, though the kernel here is about to write
        // an entry that was missing: a page that is read, then written, looks like
        // one to hand over.
        if counted.is_some() && asker.is_some_and(|asker| asker.purpose == Purpose::Table) {
            state.node.settle(Page(page));
        }
        drop(state);
        let Some(kind) = counted else {
            MemoryCounters::add(&self.counters.local, 1);
            return Ok(host);
        };
        let waited = start.elapsed();
        let waited_ns = waited.as_nanos() as u64;
        self.counters.count_wait(waited, asking, installing);
        if let Some(asker) = asker {
            self.vcpu_counts.count(asker.vcpu, waited_ns);
        }
        self.trace.record(page, kind, asker, start, waited);
        Ok(host)
    }

    pub(super) fn count_remote(&self, page: u64, access: Access) -> FaultKind {
        let (kind, counter) = match (access, self.rights.of(page)) {
            (Access::Read, _) => (FaultKind::Read, &self.counters.reads),
            (Access::Write, None) => (FaultKind::Write, &self.counters.writes),
            (Access::Write, Some(_)) => (FaultKind::Upgrade, &self.counters.upgrades),
        };
        MemoryCounters::add(counter, 1);
        self.counts.count(page, kind);
        kind
    }

    /// Under the lock, for who writes to a page beside its users.
    fn tell_of_writing(&self, page: u64, access: Access) {
        if let (Access::Write, Some(users)) = (access, self.users.get()) {
            users.written(page << PAGE_SHIFT);
        }
    }
}

impl Memory for SharedMemory {
    /// Waits for the page if another slice has it. What is returned is pinned
    /// until [`Memory::taken_up`].
    fn acquire(&self, address: u64, access: Access) -> Result<*mut u8, Unbacked> {
        self.fetch(address, access, None)
    }

    fn acquire_for(
        &self,
        address: u64,
        access: Access,
        asker: &Asker,
    ) -> Result<*mut u8, Unbacked> {
        self.fetch(address, access, Some(asker))
    }

    fn held(&self, address: u64, access: Access) -> Option<*mut u8> {
        if !self.rights.allow_use(address >> PAGE_SHIFT, access) {
            return None;
        }
        self.host_of(address)
    }

    fn acquire_held(&self, pages: &[u64], access: Access) -> bool {
        let state = self.lock();
        let hold = |address: &u64| {
            let page = address >> PAGE_SHIFT;
            self.host_of(*address).is_some()
                && self.rights.allow_use(page, access)
                && self.pins.add(page)
        };
        let held = pages.iter().take_while(|page| hold(page)).count();
        let (held, others) = pages.split_at(held);
        for page in held {
            self.tell_of_writing(page >> PAGE_SHIFT, access);
        }
        drop(state);
        if !others.is_empty() {
            for page in held {
                self.taken_up(*page);
            }
        }
        others.is_empty()
    }

    fn taken_up(&self, address: u64) {
        self.pins.remove(address >> PAGE_SHIFT);
        if self.held_back.load(Ordering::SeqCst) != 0
            && let Some(taker) = self.taker.get()
        {
            taker.unpark();
        }
    }

    fn end(&self) -> u64 {
        self.end
    }
}

pub(super) fn did_not_come(page: u64, patience: Duration) -> String {
    let seconds = patience.as_secs_f64();
    format!("page {page:#x} did not come within {seconds} s")
}
