//! Subscriptions: pages that are kept up to date. One node writes them again and again,
//! others read.
//!
//! ```text
//!  here ──taken by a write──▶ due ──a moment later──▶ asked for ──▶ here, unused
//!   ▲                          │  ▲                                     │
//!   │◀──────────fault──────────┘  └────────taken by a write─────────────┤
//!   └───────────────────────looked for──────────────────────────────────┤
//!                                    gone, until a fault ◀──too often───┘
//! ```
//!
//! A user that reads such a page finds it, without a wait. What is read is never older
//! than elsewhere: the page is asked for again only after it was given up.
//!
//! Invariants:
//!
//! - After [`UNREAD_MAX`] unread copies in a row the subscription stops until the next
//!   fault, which bounds what an unread page costs its writer.
//! - Each page is due at most once, so there are no more of these than pages that
//!   are kept up to date.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// From the loss of a page to the request: its writer writes several words of it, and
/// would have to ask for it once more if it were shared at once.
pub(super) const QUIET: Duration = Duration::from_micros(200);
/// Copies in a row that no user looks at until no more are asked for. Not one: a vCPU
/// that its host does not run for a moment misses some, and would then wait for the next.
pub(super) const UNREAD_MAX: u8 = 4;

/// Pages that a write took and that are not here again yet.
#[derive(Default)]
pub(super) struct Subscriptions {
    /// With the time of their request; the first is the earliest.
    due: VecDeque<(u64, Duration)>,
    /// The pages of `due`.
    waiting: BTreeSet<u64>,
    /// Asked for, and not answered.
    asked: BTreeSet<u64>,
    /// By page, how many copies in a row no user looked at; none has [`UNREAD_MAX`].
    unread: BTreeMap<u64, u8>,
}

impl Subscriptions {
    /// A write took a page; `unread`: no user had looked at the copy. Whether the page
    /// is due now that was not.
    pub fn outdated(&mut self, page: u64, unread: bool, now: Duration) -> bool {
        let before = self.unread.remove(&page).unwrap_or(0);
        let count = if unread { before + 1 } else { 0 };
        if count == UNREAD_MAX || self.waiting.contains(&page) {
            return false;
        }
        if count > 0 {
            self.unread.insert(page, count);
        }
        self.waiting.insert(page);
        self.due.push_back((page, now + QUIET));
        true
    }

    /// The next page that is due.
    pub fn pop_due(&mut self, now: Duration) -> Option<u64> {
        let (page, due) = *self.due.front()?;
        if due > now {
            return None;
        }
        self.due.pop_front();
        self.waiting.remove(&page);
        Some(page)
    }

    /// When the next page is due.
    pub fn next_due(&self) -> Option<Duration> {
        self.due.front().map(|(_, due)| *due)
    }

    /// A page that was due is being asked for.
    pub fn ask(&mut self, page: u64) {
        self.asked.insert(page);
    }

    /// Whether a page is being asked for.
    pub fn is_asked(&self, page: u64) -> bool {
        self.asked.contains(&page)
    }

    /// A request for a page is over.
    pub fn answered(&mut self, page: u64) {
        self.asked.remove(&page);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_due_once_and_after_a_moment() {
        let mut subscriptions = Subscriptions::default();
        let start = Duration::from_secs(1);
        assert!(subscriptions.outdated(7, false, start));
        assert!(!subscriptions.outdated(7, false, start + QUIET / 2));
        assert_eq!(subscriptions.next_due(), Some(start + QUIET));
        assert_eq!(subscriptions.pop_due(start), None);
        assert_eq!(subscriptions.pop_due(start + QUIET), Some(7));
        assert_eq!(subscriptions.pop_due(start + 2 * QUIET), None);
    }

    #[test]
    fn after_some_unread_copies_there_are_no_more() {
        let mut subscriptions = Subscriptions::default();
        let mut taken = |unread| {
            let due = subscriptions.outdated(7, unread, Duration::ZERO);
            subscriptions.pop_due(QUIET);
            due
        };
        let unread = (1..UNREAD_MAX).map(|_| taken(true)).collect::<Vec<_>>();
        assert!(unread.iter().all(|due| *due));
        assert!(!taken(true));
        // A copy that a fault brought is read.
        assert!(taken(false) && taken(true));
    }
}
