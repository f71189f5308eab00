//! How much of its host's memory a node may fill, and which pages go when it is full.
//!
//! ```text
//!  0 ─────────────── low ───────── high ───────── pages
//!                     ◀── evicted ──│              │ a request for one more waits
//! ```
//!
//! Invariants:
//!
//! - All pages of the node's own part fit below `low`. A page that must leave can go home,
//!   therefore, and home always has room for it.
//! - Eviction begins before a request has to wait for room, if others' pages have any.

use std::sync::Arc;

use super::Homes;
use super::rights::{Rights, Use};

/// Between `high` and the end is this part of what is not the node's own: room for
/// what comes while the first are being evicted.
const HIGH_PART: u64 = 8;
/// The same between `low` and the end: as many are evicted at a time.
const LOW_PART: u64 = 4;
/// Pages that are evicted at a time.
const BATCH: usize = 64;
/// Pages that are looked at to find them: among those, copies go first.
const WINDOW: usize = 2 * BATCH;
/// Pages in use that the hand passes at a time: the users are told about each.
const PASSED_MAX: usize = 4 * WINDOW;

/// Pages of memory that a node may fill. What its users keep of them is a part.
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

    /// Room for the node's `own` part, and for `others` pages of other nodes' parts,
    /// both in pages.
    pub const fn new(own: u64, others: u64) -> Budget {
        let pages = own.saturating_add(others);
        Budget {
            pages,
            high: pages - others.div_ceil(HIGH_PART),
            low: pages - others.div_ceil(LOW_PART),
        }
    }

    pub const fn pages(&self) -> u64 {
        self.pages
    }

    /// Whether eviction begins at `resident` pages.
    pub const fn is_exceeded(&self, resident: u64) -> bool {
        resident > self.high
    }

    /// Whether eviction goes on at `resident` pages.
    pub const fn is_tight(&self, resident: u64) -> bool {
        resident > self.low
    }

    /// Pages that may come before eviction begins.
    pub const fn room(&self, resident: u64) -> u64 {
        self.high.saturating_sub(resident)
    }

    /// Pages to evict now, of which `leaving` are on their way already.
    pub const fn wanted(&self, resident: u64, leaving: u64) -> usize {
        let many = resident.saturating_sub(self.low).saturating_sub(leaving);
        if many < BATCH as u64 {
            many as usize
        } else {
            BATCH
        }
    }
}

/// Pages that the hand passed.
#[derive(Debug, Default)]
pub struct Passed {
    pub(super) vacant: Vec<u64>,
    pub(super) used: Vec<u64>,
    pub(super) unused: Vec<u64>,
}

impl Passed {
    /// Pages whose memory may go back to the host where no user may use them.
    pub fn vacant(pages: Vec<u64>) -> Self {
        Self {
            vacant: pages,
            ..Self::default()
        }
    }

    /// Whether the hand passed pages in use, which may go when it comes by again.
    pub fn any_used(&self) -> bool {
        !self.used.is_empty()
    }
}

/// The clock: its hand goes round all pages and gives those in use a second chance. It
/// reads rights only, so it moves without the controller's lock.
pub struct Clock {
    hand: u64,
    /// Pages of it are never evicted.
    homes: Arc<Homes>,
    /// Eviction has begun and goes on.
    evicting: bool,
}

impl Clock {
    /// At the first page. Pages that the node manages stay, unless they are vacant.
    pub fn new(homes: Arc<Homes>) -> Clock {
        Clock {
            hand: 0,
            homes,
            evicting: false,
        }
    }

    /// Whether pages must go at `resident` pages: from the moment on when there are too
    /// many, until there are few enough.
    pub fn evicts(&mut self, budget: &Budget, resident: u64) -> bool {
        let goes_on = self.evicting && budget.is_tight(resident);
        self.evicting = budget.is_exceeded(resident) || goes_on;
        self.evicting
    }

    /// Moves the hand on until it has passed enough pages, once around at most.
    pub fn pass(&mut self, rights: &Rights) -> Passed {
        let mut passed = Passed::default();
        let end = rights.pages();
        for _ in 0..end {
            let enough = passed.unused.len() + passed.vacant.len() >= WINDOW;
            if enough || passed.used.len() >= PASSED_MAX {
                break;
            }
            if self.hand >= end {
                self.hand = 0;
            }
            let page = self.hand;
            match rights.pass(page, !self.homes.manages(page)) {
                Use::None => {}
                Use::Vacant => passed.vacant.push(page),
                Use::Recent => passed.used.push(page),
                Use::Old => passed.unused.push(page),
            }
            self.hand += 1;
        }
        passed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Access;
    use std::sync::atomic::AtomicU8;

    #[test]
    fn a_nodes_own_part_is_never_evicted_for_want_of_room() {
        for (own, others) in [
            (0, 256),
            (1 << 14, 256),
            (1 << 20, 1 << 14),
            (5, 1),
            (5, 7),
            (5, 0),
            (0, 0),
        ] {
            let budget = Budget::new(own, others);
            assert_eq!(budget.pages(), own + others);
            assert!(own <= budget.low && budget.low <= budget.high);
            assert!(budget.high <= budget.pages());
            // A thread that waits for room waits for pages that leave.
            assert!(others == 0 || budget.is_exceeded(budget.pages()));
        }
        assert_eq!(Budget::new(u64::MAX, 1).pages(), u64::MAX);
    }

    #[test]
    fn what_is_on_its_way_out_is_not_evicted_twice() {
        let budget = Budget::new(0, 100);
        assert!(budget.is_tight(76) && !budget.is_tight(75));
        assert!(budget.is_exceeded(88) && !budget.is_exceeded(87));
        assert_eq!(budget.wanted(90, 10), 5);
        assert_eq!(budget.wanted(90, 20), 0);
        assert_eq!(budget.wanted(1000, 0), BATCH);
        assert_eq!((budget.room(80), budget.room(99)), (7, 0));
    }

    #[test]
    fn the_hand_goes_round_and_leaves_the_own_part() {
        let rights = Rights::new((0..8).map(|_| AtomicU8::new(0)).collect());
        for page in [1, 2, 5, 7] {
            rights.set(page, Some(Access::Write));
        }
        let mut clock = Clock::new(Homes::new(0..4, 8).into());
        let first = clock.pass(&rights);
        assert_eq!((first.used, first.unused), (vec![5, 7], vec![]));
        rights.allow_use(7, Access::Read);
        rights.set(2, None);
        let second = clock.pass(&rights);
        assert_eq!((second.used, second.unused), (vec![7], vec![5]));
        assert_eq!(second.vacant, [2]);
    }
}
