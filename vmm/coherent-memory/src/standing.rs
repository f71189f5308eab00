//! Pages that are kept up to date: one slice writes them again and again, others read.
//!
//! ```text
//!  here ──taken by a write──▶ due ──a moment later──▶ asked for ──▶ here, unused
//!   ▲                          │  ▲                                     │
//!   │◀──────────fault──────────┘  └────────taken by a write─────────────┤
//!   └───────────────────────looked for──────────────────────────────────┤
//!                                    gone, until a fault ◀──too often───┘
//! ```
//!
//! Whoever reads such a page finds it, without a wait. What is read is never older than
//! elsewhere: the page is asked for again only after it was given up.
//!
//! Invariants:
//!
//! - After a few copies that came unasked and went unused no more are asked for, until
//!   the next fault: what nobody reads costs its writer no more than those.
//! - Each page is due at most once, so there are no more of these than pages that
//!   are kept up to date.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use weft_vcpu::Access;

use super::counters::MemoryCounters;
use super::shell::{PAGE_SHIFT, SharedMemory};
use super::state::{State, fault};

/// From the loss of a page to the request: whoever took it writes several words of it,
/// and would have to ask for it once more if it were shared at once.
const QUIET: Duration = Duration::from_micros(200);
/// Copies in a row that nobody looks at until no more are asked for. Not one: a vCPU that
/// its host does not run for a moment misses some, and would then wait for the next.
const UNREAD_MAX: u8 = 4;

/// Pages that a write took and that are not here again yet.
#[derive(Default)]
pub(super) struct Standing {
    /// With the time when they are to be asked for; the first is the earliest.
    due: VecDeque<(u64, Instant)>,
    /// The pages of `due`.
    waiting: HashSet<u64>,
    /// Asked for, and not answered.
    asked: HashSet<u64>,
    /// By page, how many copies in a row nobody looked at; none has [`UNREAD_MAX`].
    unread: HashMap<u64, u8>,
    /// One became due that the taker does not know of.
    fresh: bool,
}

impl Standing {
    /// Whether a standing request for a page is under way.
    pub fn is_asked(&mut self, page: u64) -> bool {
        self.asked.contains(&page)
    }

    /// A request for a page is over.
    pub fn answered(&mut self, page: u64) {
        self.asked.remove(&page);
    }
}

impl SharedMemory {
    /// Has copies of the pages of `addresses` kept up to date, as far as they are
    /// memory. The same on all slices, before any vCPU runs.
    pub fn keep_up_to_date(&self, addresses: &Range<u64>) {
        let end = addresses.end.min(self.end).div_ceil(1 << PAGE_SHIFT);
        let pages = addresses.start >> PAGE_SHIFT..end;
        if !pages.is_empty() {
            self.lock().node.tables.update(pages);
        }
    }

    /// A write took a page that is kept up to date.
    pub(super) fn outdated(&self, state: &mut State, page: u64) {
        let standing = &mut state.standing;
        let unread = match self.rights.left_unused(page) {
            true => standing.unread.remove(&page).unwrap_or(0) + 1,
            false => {
                standing.unread.remove(&page);
                0
            }
        };
        if unread == UNREAD_MAX || standing.waiting.contains(&page) {
            return;
        }
        if unread > 0 {
            standing.unread.insert(page, unread);
        }
        standing.waiting.insert(page);
        standing.due.push_back((page, Instant::now() + QUIET));
        standing.fresh = true;
        self.standing.fetch_add(1, Ordering::SeqCst);
    }

    /// Tells the taker that a page became due. With the lock held, after all that was
    /// to be sent: nobody waits for this.
    pub(super) fn wake_for_standing(&self, state: &mut State) {
        if std::mem::take(&mut state.standing.fresh)
            && let Some(taker) = self.taker.get()
        {
            taker.unpark();
        }
    }

    /// Asks again for the pages that are due; how long until the next one is.
    pub(super) fn ask_again(&self) -> Option<Duration> {
        if self.standing.load(Ordering::SeqCst) == 0 {
            return None;
        }
        let mut state = self.lock();
        loop {
            let &(page, due) = state.standing.due.front()?;
            let left = due.saturating_duration_since(Instant::now());
            if !left.is_zero() {
                return Some(left);
            }
            state.standing.due.pop_front();
            state.standing.waiting.remove(&page);
            self.standing.fetch_sub(1, Ordering::SeqCst);
            // A fault may have brought it, or be at it.
            let is_here = self.rights.of(page).is_some() || state.busy.contains_key(&page);
            if is_here || self.lacks_room(page) || state.is_awaited(page) {
                continue;
            }
            MemoryCounters::add(&self.counters.standing, 1);
            state.standing.asked.insert(page);
            // As a fault that nobody waits for: one ahead would be given up where several
            // slices ask at the same moment.
            let work = state.step(fault(page, Access::Read), None);
            state = self.carry_out(state, page, work);
        }
    }
}
