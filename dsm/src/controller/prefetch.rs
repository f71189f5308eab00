//! Prefetches: a user comes to this node, and the pages that it used lately follow it.
//!
//! ```text
//!          begin                                 all were requested, no room, or end
//!  nothing ─────▶ requests, while few are under way ─────────────────────────▶ nothing
//! ```
//!
//! Invariants:
//!
//! - At most [`UNDER_WAY_MAX`] requests of prefetches are under way. While a user waits for a
//!   page, none begins unless fewer than [`WAITED_MAX`] are. Each page that comes while no
//!   user waits allows one more. So the pages of a user that often waits wait behind few
//!   others.
//! - A page that is expected to be written is requested once, to be written, though the user
//!   reads it first.
//! - A prefetch fills only memory that nothing must leave for: where room ends, it ends.
//! - None begins while prefetches are held, so that no page moves while a machine is paused.
//! - Nothing is requested for a user after its prefetch was ended, or replaced.

use std::collections::VecDeque;
use std::time::Duration;

use super::pages::fault;
use super::{Action, Controller, Look, Mutant, PrefetchList, Sink};
use crate::state::Tables;
use crate::types::{Access, Page};

/// Requests of prefetches that are under way, at most: 128 KiB, a tenth of a millisecond on
/// a link of 10 Gb/s.
pub const UNDER_WAY_MAX: usize = 32;
/// Requests that are under way, at most, when one begins while a user waits.
pub const WAITED_MAX: usize = 4;
/// Pages that are looked at in one step, under the lock.
const LOOKS_MAX: usize = 256;

/// What follows one user, the next run in front.
#[derive(Debug)]
struct Prefetch {
    user: u32,
    list: PrefetchList,
}

/// The prefetches of a node, at most one for each user; the oldest goes first.
#[derive(Debug, Default)]
pub(super) struct Prefetches {
    queued: VecDeque<Prefetch>,
    /// Requested pages that have not come.
    under_way: Vec<u64>,
    /// How many may be.
    limit: usize,
    /// Nothing is requested until [`super::Event::ResumePrefetches`].
    held: bool,
}

impl Prefetches {
    fn begin(&mut self, user: u32, list: PrefetchList) {
        self.end(user);
        self.queued.push_back(Prefetch { user, list });
    }

    fn end(&mut self, user: u32) {
        self.queued.retain(|prefetch| prefetch.user != user);
    }

    /// The next page, with the access that is expected.
    fn pop(&mut self) -> Option<(u64, Access)> {
        loop {
            let prefetch = self.queued.front_mut()?;
            let Some(run) = prefetch.list.runs.front_mut().filter(|run| run.count > 0) else {
                if prefetch.list.runs.pop_front().is_none() {
                    self.queued.pop_front();
                }
                continue;
            };
            let page = run.first;
            run.first += 1;
            run.count -= 1;
            return Some((page, run.access));
        }
    }
}

impl<T: Tables, B> Controller<T, B> {
    pub(super) fn begin_prefetch(&mut self, user: u32, list: PrefetchList) {
        self.prefetches.begin(user, list);
    }

    pub(super) fn end_prefetch(&mut self, user: u32) {
        if !self.is(Mutant::PrefetchForEver) {
            self.prefetches.end(user);
        }
    }

    /// What to request a page for that a user needs: a page that it is expected to write
    /// would be requested twice.
    pub(super) fn expected(&self, page: u64, access: Access) -> Access {
        let is_here = self.rights.of(page).is_some();
        let writes = |prefetch: &Prefetch| prefetch.list.writes(page);
        match access {
            Access::Read if !is_here && self.prefetches.queued.iter().any(writes) => Access::Write,
            access => access,
        }
    }

    pub(super) fn hold_prefetches(&mut self, held: bool) {
        self.prefetches.held = held;
    }

    /// Whether pages are still to be requested for a user.
    pub fn prefetches(&self) -> bool {
        !self.prefetches.queued.is_empty()
    }

    /// Whether requests of prefetches are under way.
    pub fn is_prefetching(&self) -> bool {
        !self.prefetches.under_way.is_empty()
    }

    /// Requests what may be requested now. After each step, since any may have brought a
    /// page, or ended a user's wait.
    pub(super) fn look_at_prefetches(&mut self, now: Duration, sink: &mut impl Sink<B>) {
        if self.prefetches.queued.is_empty() && self.prefetches.under_way.is_empty() {
            return;
        }
        self.count_under_way();
        if self.prefetches.held && !self.is_prefetching() {
            sink.act(Action::Look(Look::Membership));
        }
        for _ in 0..LOOKS_MAX {
            if !self.may_prefetch() {
                return;
            }
            let Some((page, access)) = self.prefetches.pop() else {
                return;
            };
            if self.is_prefetched(page) {
                self.prefetch(page, access, now, sink);
            }
        }
        if self.prefetches() {
            sink.act(Action::Look(Look::Tick));
        }
    }

    /// Forgets those that have come.
    fn count_under_way(&mut self) {
        let Prefetches {
            under_way, limit, ..
        } = &mut self.prefetches;
        let before = under_way.len();
        let tables = &mut self.node.tables;
        under_way.retain(|page| tables.local(Page(*page)).pending().is_some());
        let come = before - under_way.len();
        *limit = (*limit + come).clamp(WAITED_MAX, UNDER_WAY_MAX);
        if self.any_waits() && !self.is(Mutant::PrefetchWhileWaiting) {
            self.prefetches.limit = WAITED_MAX;
        }
    }

    fn may_prefetch(&mut self) -> bool {
        let under_way = self.prefetches.under_way.len();
        let room = self.budget.room(self.rights.resident());
        let has_room = room > under_way as u64 || self.is(Mutant::PrefetchBeyondRoom);
        if self.is_leaving() || !has_room {
            self.prefetches.queued.clear();
        }
        let few = under_way < self.prefetches.limit || self.is(Mutant::PrefetchAllAtOnce);
        let held = self.prefetches.held && !self.is(Mutant::PrefetchWhileHeld) || self.rests();
        few && !held
    }

    /// Whether a page is elsewhere, and nothing about it is under way.
    fn is_prefetched(&mut self, page: u64) -> bool {
        self.is_memory(page)
            && !self.is_in_transition(page)
            && self.node.tables.local(Page(page)).clear()
    }

    /// A page that is read is only asked for ahead: its manager refuses that while others
    /// are at it. One that is written is asked for as by a fault that no user waits for.
    fn prefetch(&mut self, page: u64, access: Access, now: Duration, sink: &mut impl Sink<B>) {
        sink.act(Action::Prefetch { page });
        let ahead = access == Access::Read;
        self.carry_out_event(page, fault(page, access, ahead), now, sink);
        if self.node.tables.local(Page(page)).pending().is_some() {
            self.prefetches.under_way.push(page);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::PrefetchRun;

    fn run(first: u64, count: u64) -> PrefetchRun {
        let access = Access::Read;
        PrefetchRun {
            first,
            count,
            access,
        }
    }

    fn popped(prefetches: &mut Prefetches) -> Vec<u64> {
        std::iter::from_fn(|| prefetches.pop().map(|(page, _)| page)).collect()
    }

    #[test]
    fn pages_come_in_the_order_of_the_runs() {
        let mut prefetches = Prefetches::default();
        prefetches.begin(0, vec![run(9, 2), run(4, 0), run(3, 1)].into());
        prefetches.begin(1, PrefetchList::default());
        prefetches.begin(2, vec![run(1, 1)].into());
        assert_eq!(popped(&mut prefetches), [9, 10, 3, 1]);
        assert!(prefetches.queued.is_empty());
    }

    #[test]
    fn a_user_has_one_prefetch() {
        let mut prefetches = Prefetches::default();
        prefetches.begin(0, vec![run(0, 100)].into());
        prefetches.begin(1, vec![run(200, 2)].into());
        assert_eq!(prefetches.pop(), Some((0, Access::Read)));
        prefetches.begin(0, vec![run(300, 1)].into());
        assert_eq!(popped(&mut prefetches), [200, 201, 300]);
        prefetches.begin(1, vec![run(200, 2)].into());
        prefetches.end(1);
        assert_eq!(prefetches.pop(), None);
    }
}
