//! Nodes that join and leave a running machine: the memory's part. `docs/membership.md` has
//! the sequences; an authority over the machine drives them, step by step, by calling these
//! functions on each slice.
//!
//! Any thread may call any of them, but not the one that receives frames, on which their
//! answers come: [`SharedMemory::hold`], [`SharedMemory::set_member`] and
//! [`SharedMemory::drain`] wait. Walks over all pages take the lock for some pages at a time.

use std::ops::{ControlFlow, Range};
use std::time::{Duration, Instant};

use weft_dsm::controller::{
    Budget, DrainPlan, DrainProgress, Event, Holdings, ManagerRun, ManagerRunError, PrecopyProgress,
};
use weft_dsm::{NodeId, Standing};

use super::shell::{PAGE_SHIFT, SharedMemory};
use super::state::State;

/// Pages of a walk for which the lock is held.
const WALK_PAGES: u64 = 4096;
/// How often a thread looks for what it waits for when nothing tells it.
const LOOK: Duration = Duration::from_millis(1);

/// Why a step of a change of membership did not come to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MembershipError {
    #[error("hand-overs of pages did not end within {0:?}")]
    NotQuiet(Duration),
    #[error("messages of {0} about pages in transition were not handled within {1:?}")]
    Queued(NodeId, Duration),
    #[error("the machine has ended")]
    Over,
}

impl SharedMemory {
    /// Stops hand-overs of this slice's pages, and waits until none is under way: `Quiet`.
    ///
    /// # Errors
    /// They did not end within two leases, or the machine has ended.
    pub fn hold(&self) -> Result<(), MembershipError> {
        self.locked(|state| state.step(self, Event::Hold, None));
        let is_quiet = |state: &mut State| state.controller.is_quiet();
        self.wait_until(is_quiet, MembershipError::NotQuiet)
    }

    /// Allows hand-overs again.
    pub fn resume(&self) {
        self.locked(|state| state.step(self, Event::Resume, None));
    }

    /// Tells this slice the standing of a node, itself included. The link to a node that
    /// becomes [`Standing::Present`] is there before; that of a node that becomes
    /// [`Standing::Absent`] was read to its end. Its number may be used again.
    ///
    /// # Errors
    /// Messages of a node that becomes absent still wait for pages in transition after two
    /// leases, or the machine has ended.
    pub fn set_member(&self, node: NodeId, standing: Standing) -> Result<(), MembershipError> {
        if standing == Standing::Absent {
            let is_read = |state: &mut State| !state.controller.has_queued(node);
            let queued = |patience| MembershipError::Queued(node, patience);
            self.wait_until(is_read, queued)?;
        }
        self.locked(|state| state.step(self, Event::Member { node, standing }, None));
        Ok(())
    }

    /// Tells this slice that a node died, after the last of its frames was delivered.
    pub fn peer_lost(&self, node: NodeId) {
        self.locked(|state| state.step(self, Event::PeerLost { node }, None));
    }

    /// Tells a slice that joins which nodes died before, a bit for each. Before it becomes
    /// present anywhere.
    pub fn learn_dead(&self, nodes: u32) {
        self.locked(|state| state.controller.learn_dead(nodes));
    }

    /// The managers of the pages from `first` on that differ from the configuration: at
    /// most `runs_max` runs, and the first page that is missing, if there are more. On one
    /// slice, after [`SharedMemory::unsettled`] found nothing on any.
    pub fn managers(&self, first: u64, runs_max: usize) -> (Vec<ManagerRun>, Option<u64>) {
        let mut runs: Vec<ManagerRun> = Vec::new();
        for pages in self.walk() {
            let pages = pages.start.max(first)..pages.end;
            let room = runs_max - runs.len();
            let (more, next) = self.locked(|state| state.controller.managers(pages, room));
            runs.extend(more);
            if next.is_some() {
                return (runs, next);
            }
        }
        (runs, None)
    }

    /// How many pages `node` manages, as far as this slice knows.
    pub fn managed_pages(&self, node: NodeId) -> u64 {
        let managed = |pages| self.locked(|state| state.controller.managed_pages(pages, node));
        self.walk().map(managed).sum()
    }

    /// Tells a slice that joins the managers of pages. Before it becomes present anywhere.
    ///
    /// # Errors
    /// Pages that there are not, or a node that there cannot be.
    pub fn learn_managers(&self, runs: &[ManagerRun]) -> Result<(), ManagerRunError> {
        for run in runs {
            self.locked(|state| state.controller.learn_managers(*run))?;
        }
        Ok(())
    }

    /// What this slice has: what a node that leaves is asked, when all nodes are quiet and
    /// know that it leaves.
    pub fn holdings(&self) -> Holdings {
        let mut holdings = Holdings::default();
        for pages in self.walk() {
            holdings.add(&self.locked(|state| state.controller.holdings(pages)));
        }
        holdings
    }

    /// The first page whose record here mentions `node`, or is about to change. All other
    /// slices check this after the node that leaves has nothing.
    pub fn mentions(&self, node: NodeId) -> Option<u64> {
        self.walk()
            .find_map(|pages| self.locked(|state| state.controller.mentions(pages, node)))
    }

    /// The first page whose manager is about to change, as far as this slice knows: what all
    /// are asked before a node joins.
    pub fn unsettled(&self) -> Option<u64> {
        self.walk()
            .find_map(|pages| self.locked(|state| state.controller.unsettled(pages)))
    }

    /// Changes how many pages this slice may fill: before other slices hand pages over to
    /// it, and after it handed some over.
    pub fn set_budget(&self, budget: Budget) {
        self.locked(|state| state.controller.set_budget(budget));
        self.evictor.wake();
    }

    /// The number of pages that this slice may fill.
    pub(super) fn budget(&self) -> Budget {
        self.locked(|state| state.controller.budget())
    }

    /// Moves pages and their management to other slices, as the plan says, until nothing is
    /// left, or until `observe` breaks off; pages stay where they are then. If this slice
    /// is [`Standing::Draining`] or [`Standing::Leaving`], everything leaves that it has of
    /// the pages; if it is present, those that it manages. `observe` is called after each
    /// step, a few hundred pages apart, and at least each millisecond.
    ///
    /// While this slice holds, entries stay. One drain at a time; a second one takes the
    /// place of the first.
    pub fn drain(
        &self,
        plan: DrainPlan,
        mut observe: impl FnMut(&DrainProgress) -> ControlFlow<()>,
    ) -> DrainProgress {
        self.locked(|state| state.controller.begin_drain(plan));
        loop {
            let before = self.membership.given();
            let progress = self.locked(|state| {
                state.step(self, Event::Drain, None);
                state.controller.drain_progress()
            });
            let broken = observe(&progress).is_break();
            if broken || progress.is_over || self.is_over() {
                self.locked(|state| state.controller.end_drain());
                return progress;
            }
            self.membership.wait(before, LOOK);
        }
    }

    /// Sends pages that this slice owns and manages to the slices that will own them, as the
    /// plan says, while users go on writing them: round after round over those that were
    /// written since, until `observe` breaks off. What was sent ahead stays so, and the pages
    /// that [`SharedMemory::drain`] moves or that others ask for go without their bytes. Ends
    /// with [`SharedMemory::end_precopy`]. `observe` is called at least each millisecond.
    pub fn precopy(
        &self,
        plan: DrainPlan,
        observe: impl FnMut(&PrecopyProgress) -> ControlFlow<()>,
    ) {
        self.locked(|state| state.controller.begin_precopy(plan));
        self.precopy_until(observe);
    }

    /// Ends a pre-copy: the slices that keep pages which did not become theirs drop them.
    /// Returns when they have, or `observe` breaks off.
    pub fn end_precopy(&self, observe: impl FnMut(&PrecopyProgress) -> ControlFlow<()>) {
        self.locked(|state| state.controller.end_precopy());
        self.precopy_until(observe);
    }

    /// How far the pre-copy is at this moment. `goes_on`: the calling thread sends what there
    /// is to send, instead of the thread that sleeps until the next millisecond.
    pub fn precopy_progress(&self, goes_on: bool) -> PrecopyProgress {
        self.locked(|state| {
            if goes_on {
                state.step(self, Event::Precopy, None);
            }
            state.controller.precopy_progress()
        })
    }

    fn precopy_until(&self, mut observe: impl FnMut(&PrecopyProgress) -> ControlFlow<()>) {
        loop {
            let before = self.membership.given();
            let progress = self.locked(|state| {
                state.step(self, Event::Precopy, None);
                state.controller.precopy_progress()
            });
            let broken = observe(&progress).is_break();
            if broken || progress.is_over || self.is_over() {
                return;
            }
            self.membership.wait(before, LOOK);
        }
    }

    /// Waits until the controller says so.
    fn wait_until(
        &self,
        mut is_so: impl FnMut(&mut State) -> bool,
        late: impl FnOnce(Duration) -> MembershipError,
    ) -> Result<(), MembershipError> {
        let patience = 2 * self.lease;
        let start = Instant::now();
        loop {
            let before = self.membership.given();
            if self.locked(&mut is_so) {
                return Ok(());
            }
            if self.is_over() {
                return Err(MembershipError::Over);
            }
            if start.elapsed() > patience {
                return Err(late(patience));
            }
            self.membership.wait(before, LOOK);
        }
    }

    /// All pages that are memory, some at a time, in ascending order.
    pub fn walk(&self) -> impl Iterator<Item = Range<u64>> {
        let parts = self.ram().parts().into_iter();
        parts.flat_map(|(start, length, _)| {
            let (first, end) = (start >> PAGE_SHIFT, (start + length) >> PAGE_SHIFT);
            let firsts = (first..end).step_by(WALK_PAGES as usize);
            firsts.map(move |first| first..end.min(first + WALK_PAGES))
        })
    }
}
