//! How much of its host's memory a slice may fill, and who waits when it is full.
//!
//! ```text
//!  0 ─────────────── low ───────── high ───────── pages
//!                     ◀── evicted ──│              │ who needs one more waits
//! ```
//!
//! Invariant: all pages of the slice's own part of RAM fit below `low`. A page that
//! must go can go home, therefore, and home always has room for it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};
use std::thread::Thread;
use std::time::{Duration, Instant};

use super::counters::MemoryCounters;
use super::shell::SharedMemory;

/// Between `high` and the end is this part of what is not the slice's own: room for
/// what comes while the first are being evicted.
const HIGH_PART: u64 = 8;
/// Between `low` and the end likewise: as many are evicted at a time.
const LOW_PART: u64 = 4;
/// How often who waits for room looks again, should nobody tell.
const ROOM_LOOK: Duration = Duration::from_millis(10);

/// Pages of memory that a slice may fill. What its vCPUs keep of them is a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    pages: u64,
    high: u64,
    low: u64,
}

impl Budget {
    /// As many as there are.
    pub const UNLIMITED: Budget = Budget {
        pages: u64::MAX,
        high: u64::MAX,
        low: u64::MAX,
    };

    /// Room for the slice's `own` part of RAM, and for so many `others` of other
    /// slices' parts, both in pages.
    pub const fn new(own: u64, others: u64) -> Budget {
        let pages = own.saturating_add(others);
        Budget {
            pages,
            high: pages - others / HIGH_PART,
            low: pages - others / LOW_PART,
        }
    }

    pub const fn pages(&self) -> u64 {
        self.pages
    }

    /// Pages with which eviction begins.
    pub(super) const fn high(&self) -> u64 {
        self.high
    }

    /// Pages with which it ends.
    pub(super) const fn low(&self) -> u64 {
        self.low
    }
}

/// Who makes room, and who waits for it.
#[derive(Default)]
pub(super) struct Room {
    evictor: OnceLock<Thread>,
    /// The evictor was woken and has not looked yet.
    called: AtomicBool,
    /// Guards nothing but the wait.
    waiting: Mutex<()>,
    made: Condvar,
}

impl Room {
    /// The calling thread makes room from now on.
    pub fn serve(&self) {
        let _ = self.evictor.set(std::thread::current());
    }

    /// Has the evictor look.
    pub fn call(&self) {
        if !self.called.swap(true, Ordering::SeqCst)
            && let Some(evictor) = self.evictor.get()
        {
            evictor.unpark();
        }
    }

    /// The evictor's wait to be called, `patience` at most.
    pub fn wait_for_call(&self, patience: Duration) {
        if !self.called.load(Ordering::SeqCst) {
            std::thread::park_timeout(patience);
        }
        self.called.store(false, Ordering::SeqCst);
    }

    /// There is room, or the end has come.
    pub fn tell(&self) {
        drop(self.waiting.lock().unwrap_or_else(PoisonError::into_inner));
        self.made.notify_all();
    }

    fn wait(&self) {
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.made.wait_timeout(waiting, ROOM_LOOK));
    }
}

impl SharedMemory {
    /// Whether a page has to wait until others are gone.
    pub(super) fn lacks_room(&self, page: u64) -> bool {
        self.rights.resident() >= self.budget.pages() && !self.rights.used(page)
    }

    /// More pages than are to stay: what becomes free is given back to the host.
    pub(super) fn is_tight(&self) -> bool {
        self.rights.resident() > self.budget.low()
    }

    /// After a page came: others may have to go.
    pub(super) fn look_at_room(&self) {
        if self.rights.resident() > self.budget.high() {
            self.room.call();
        }
    }

    /// Waits until there is room for a page. No lock may be held, nor a page pinned.
    pub(super) fn wait_for_room(&self, page: u64) {
        if !self.lacks_room(page) {
            return;
        }
        MemoryCounters::add(&self.counters.room_waits, 1);
        let (start, patience) = (Instant::now(), 2 * self.lease);
        while self.lacks_room(page) && !self.is_over() {
            if start.elapsed() > patience {
                self.fail(format!(
                    "no room for page {page:#x} within {} s: this node has {} pages of its {}, \
                     and none could leave",
                    patience.as_secs_f64(),
                    self.rights.resident(),
                    self.budget.pages()
                ));
                return;
            }
            self.room.call();
            self.room.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slices_own_part_is_never_evicted_for_want_of_room() {
        for (own, others) in [(0, 256), (1 << 14, 256), (1 << 20, 1 << 14), (5, 0), (0, 0)] {
            let budget = Budget::new(own, others);
            assert_eq!(budget.pages(), own + others);
            assert!(own <= budget.low() && budget.low() <= budget.high());
            assert!(budget.high() <= budget.pages());
        }
        assert_eq!(Budget::new(u64::MAX, 1).pages(), u64::MAX);
    }
}
