//! Pages that are asked for by who does not wait here: KVM's vCPUs sleep in the
//! kernel until their page is mapped.

use std::time::{Duration, Instant};

use weft_vcpu::Access;

use super::counters::MemoryCounters;
use super::fetch::did_not_come;
use super::shell::{PAGE_SHIFT, SharedMemory};
use super::state::{State, fault};

/// How long users that only asked for a page keep it at least: nobody hears when
/// they are at work with it, and to wake a thread alone takes a part of that.
const USE_MIN: Duration = Duration::from_micros(100);

/// A page that somebody wants who does not wait here.
pub(super) struct Asked {
    pub access: Access,
    pub since: Instant,
    /// How long it took to ask.
    pub asking: Duration,
    /// The protocol has to be asked again: its last answer was not enough.
    pub again: bool,
}

impl SharedMemory {
    /// Asks for a page without waiting for it: `Users::granted` is called when it
    /// may be used, perhaps before this returns. Asking again changes nothing. An
    /// address that is no memory is nobody's, and is never granted.
    pub fn ask(&self, address: u64, access: Access) {
        let page = address >> PAGE_SHIFT;
        if self.host_of(page << PAGE_SHIFT).is_none() {
            return;
        }
        let mut state = self.lock();
        if self.rights.allow_use(page, access) {
            MemoryCounters::add(&self.counters.local, 1);
            return self.grant(page, !state.busy.contains_key(&page));
        }
        if let Some(asked) = state.asked.get_mut(&page) {
            if access == Access::Write {
                asked.access = Access::Write;
            }
            return;
        }
        let asked = Asked {
            access,
            since: Instant::now(),
            asking: Duration::ZERO,
            again: false,
        };
        state.asked.insert(page, asked);
        if self.lacks_room(page) {
            MemoryCounters::add(&self.counters.room_waits, 1);
            state.kept_waiting.push_back(page);
            self.room.call();
            return;
        }
        if !state.busy.contains_key(&page) {
            let work = state.step(fault(page, access), None);
            state = self.carry_out(state, page, work);
        }
        if !state.asked.contains_key(&page) {
            return MemoryCounters::add(&self.counters.local, 1);
        }
        self.count_remote(page, access);
        state = self.ask_back_if_read(state, page, access);
        if let Some(asked) = state.asked.get_mut(&page) {
            asked.asking = asked.since.elapsed();
        }
    }

    /// Has the users ask for a page again before they use it next.
    pub fn hide(&self, address: u64) {
        let state = self.lock();
        if let Some(users) = self.users.get()
            && let Err(error) = users.hide(address)
        {
            self.fail(format!("a page could not be hidden from vCPUs: {error}"));
        }
        drop(state);
    }

    /// Breaks off when a page that was asked for did not come in time: whoever calls
    /// [`SharedMemory::ask`] calls this now and then.
    pub fn look_for_overdue(&self) {
        // A link whose lease ends tells more: it is given the time to.
        let patience = 2 * self.lease;
        let late =
            |(page, asked): (&u64, &Asked)| (asked.since.elapsed() > patience).then_some(*page);
        let overdue = self.lock().asked.iter().find_map(late);
        if let Some(page) = overdue {
            self.fail(did_not_come(page, patience));
        }
    }

    /// Gives a page that was asked for to the users, as far as it may be used.
    pub(super) fn grant_asked(&self, state: &mut State, page: u64) {
        let Some(asked) = state.asked.get(&page) else {
            return;
        };
        let (since, asking, here) = (asked.since, asked.asking, Instant::now());
        let enough = self.rights.allow_use(page, asked.access);
        if enough {
            state.asked.remove(&page);
        }
        self.grant(page, true);
        // What was here at once was not waited for.
        if enough && !asking.is_zero() {
            self.counters
                .count_wait(since.elapsed(), asking, here.elapsed());
        }
    }

    /// Has the users use a page as far as this slice may; `pinned`: for long enough to
    /// be of use. One that is about to go is not kept once more.
    pub(super) fn grant(&self, page: u64, pinned: bool) {
        let (Some(right), Some(users)) = (self.rights.of(page), self.users.get()) else {
            return;
        };
        if pinned {
            self.pins.add_for(page, USE_MIN);
        }
        if let Err(error) = users.granted(page << PAGE_SHIFT, right) {
            self.fail(format!("a page could not be given to a vCPU: {error}"));
        }
    }
}
