//! A drain: pages, copies and directory entries leave a node, while it runs.
//!
//! It is a walk over pages, round after round, until a round finds nothing. What happens to
//! a page depends on what is here:
//!
//! | here | what happens |
//! | --- | --- |
//! | owned, and managed here | it is pushed to a target, and then its entry is handed over to that |
//! | owned, managed elsewhere | it is pushed to its manager (only if this node leaves) |
//! | a copy | it is dropped (only if this node leaves) |
//! | the directory's entry | it is handed over to a target |
//!
//! Invariants:
//!
//! - At most [`DrainPlan::window_pages`] pages are under way at a time: a page is, until
//!   its hand-over, which travels behind its bytes, is answered. So no message of a fault
//!   waits behind more than that.
//! - At most [`FEW`] are when another node has asked for a page that its user waits for. Each
//!   [`WIDEN_AFTER`] pages that have left since then allow one more. So the faults of a busy
//!   guest wait behind few pages, and an idle one leaves at the speed of the link.
//! - A page that is pinned or in transition is left for later, as it is when it is evicted.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use super::transition::Work;
use super::{Action, Controller, Look, Mutant, Sink};
use crate::protocol::{self, Body, Refusal};
use crate::state::{Phase, Tables};
use crate::types::{NodeId, Page};

/// Pages that one step of a drain looks at, at most.
const LOOK_MAX: u64 = 1024;

/// Pages that are under way, at most, after another node's user has faulted.
const FEW: usize = 32;
/// Pages that leave without such a fault until one more may be under way.
const WIDEN_AFTER: usize = 16;

/// Which pages leave a node, and where to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DrainPlan {
    /// Of these pages; those that are no memory are left out.
    pub pages: Vec<Range<u64>>,
    /// The next managers, filled one after the other.
    pub targets: Vec<DrainTarget>,
    /// Pages that may be under way at a time.
    pub window_pages: usize,
}

/// A node that takes pages and their management.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DrainTarget {
    pub node: NodeId,
    /// Pages that it may be handed.
    pub pages: u64,
}

/// How far a drain is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DrainProgress {
    /// Pages that were pushed to another node.
    pub sent_pages: u64,
    /// Copies that were dropped.
    pub dropped_copies: u64,
    /// Directory entries that other nodes have now.
    pub handed_over: u64,
    /// Rounds that are over.
    pub rounds: u64,
    /// The last round found nothing: nothing that the plan names is left here.
    pub is_over: bool,
    /// Pages that the last round could not move, because their manager died.
    pub unmovable: u64,
    /// In the last round entries stayed, because all targets are full, dead or about to
    /// leave.
    pub lacks_target: bool,
}

/// A drain that is under way.
pub(super) struct Drain {
    plan: DrainPlan,
    window: Window,
    walk: Walk,
    /// Pages that were begun with and are not done.
    begun: BTreeMap<u64, Step>,
    /// The round found something.
    found: bool,
    unmovable: u64,
    lacks_target: bool,
}

/// What was begun with a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Nothing yet: it waits.
    Waits,
    /// It was pushed, offered or dropped.
    Leaves,
    /// Its entry is handed over.
    Hands,
}

/// What a look at a page finds.
enum Found {
    /// The page does not concern the drain, or has left.
    Nothing,
    /// Nothing to do in this round.
    Later,
    /// This is under way, or was begun.
    Begun(Step),
}

/// A walk over ranges of pages.
#[derive(Debug, Default)]
pub(super) struct Walk {
    /// The range that it is in, and the next page.
    range: usize,
    next: u64,
}

impl Walk {
    /// The next page of these ranges.
    pub fn next_page(&mut self, ranges: &[Range<u64>]) -> Option<u64> {
        loop {
            let range = ranges.get(self.range)?;
            let page = self.next.max(range.start);
            if page < range.end {
                self.next = page + 1;
                return Some(page);
            }
            self.range += 1;
            self.next = 0;
        }
    }

    /// Whether it has found the end of the ranges.
    pub fn is_over(&self, ranges: &[Range<u64>]) -> bool {
        self.range == ranges.len()
    }
}

/// How many pages may be under way at a time.
#[derive(Debug)]
pub(super) struct Window {
    pages: usize,
    pages_max: usize,
    /// Pages that have left since another node's user faulted.
    undisturbed: usize,
}

impl Window {
    pub fn new(pages_max: usize) -> Self {
        Self {
            pages: pages_max.max(1),
            pages_max: pages_max.max(1),
            undisturbed: 0,
        }
    }

    pub fn is_full(&self, under_way: usize) -> bool {
        under_way >= self.pages
    }

    /// A page has left.
    pub fn widen(&mut self) {
        self.undisturbed += 1;
        if self.undisturbed.is_multiple_of(WIDEN_AFTER) {
            self.pages = (self.pages + 1).min(self.pages_max);
        }
    }

    /// A user elsewhere waits for a page.
    pub fn give_way(&mut self) {
        self.pages = self.pages.min(FEW);
        self.undisturbed = 0;
    }
}

impl Drain {
    fn new(plan: DrainPlan) -> Self {
        Self {
            window: Window::new(plan.window_pages),
            plan,
            walk: Walk::default(),
            begun: BTreeMap::new(),
            found: false,
            unmovable: 0,
            lacks_target: false,
        }
    }

    /// The round is over.
    fn start_again(&mut self) {
        self.walk = Walk::default();
        (self.found, self.unmovable, self.lacks_target) = (false, 0, false);
    }
}

impl<T: Tables, B> Controller<T, B> {
    /// Begins a drain, in place of one that is under way. [`super::Event::Drain`] goes on
    /// with it.
    pub fn begin_drain(&mut self, plan: DrainPlan) {
        self.drained = DrainProgress::default();
        self.drain = Some(Drain::new(self.within_memory(plan)));
    }

    /// The part of a plan that is about memory.
    pub(super) fn within_memory(&self, mut plan: DrainPlan) -> DrainPlan {
        let parts = &self.parts;
        let within = |pages: &Range<u64>| {
            let cut = |part: &Range<u64>| part.start.max(pages.start)..part.end.min(pages.end);
            parts.iter().map(cut).collect::<Vec<_>>()
        };
        plan.pages = plan.pages.iter().flat_map(within).collect();
        plan.pages.retain(|pages| !pages.is_empty());
        plan
    }

    /// Ends the drain: nothing more is begun, and pages stay where they are. What is under
    /// way comes to its end by itself.
    pub fn end_drain(&mut self) {
        self.drain = None;
    }

    /// Whether a drain is under way.
    pub fn drains(&self) -> bool {
        self.drain.is_some()
    }

    /// How far the drain is that was begun last.
    pub fn drain_progress(&self) -> DrainProgress {
        self.drained
    }

    fn is_draining(&self) -> bool {
        self.node.closed & self.node.me().bit() != 0
    }

    /// Another node asked for a page, which may have to pass those of the drain: its user
    /// waits, or is about to write it.
    pub(super) fn give_way(&mut self) {
        if let Some(drain) = &mut self.drain {
            drain.window.give_way();
        }
        self.precopy_gives_way();
    }

    /// The thread that drains has something to do, perhaps.
    pub(super) fn look_at_drain(&self, sink: &mut impl Sink<B>) {
        if self.drain.is_some() || self.precopies.is_under_way() {
            sink.act(Action::Look(Look::Membership));
        }
    }

    /// Goes on with the drain: with the pages that it has begun with, and then with the next
    /// ones, as long as the window allows.
    pub(super) fn go_on_draining(&mut self, now: Duration, sink: &mut impl Sink<B>) {
        if self.rests() && !self.is(Mutant::RestDrains) {
            return;
        }
        let Some(mut drain) = self.drain.take() else {
            return;
        };
        let begun: Vec<(u64, Step)> = drain
            .begun
            .iter()
            .map(|(page, step)| (*page, *step))
            .collect();
        for (page, before) in begun {
            self.drain_page(page, before, &mut drain, now, sink);
        }
        let mut looked = 0;
        while looked < LOOK_MAX && !drain.window.is_full(drain.begun.len()) {
            let Some(page) = drain.walk.next_page(&drain.plan.pages) else {
                break;
            };
            looked += 1;
            self.drain_page(page, Step::Waits, &mut drain, now, sink);
        }
        if looked == LOOK_MAX {
            sink.act(Action::Look(Look::Membership));
        }
        let ended = drain.walk.is_over(&drain.plan.pages) && drain.begun.is_empty();
        if ended {
            self.drained.rounds += 1;
            self.drained.unmovable = drain.unmovable;
            self.drained.lacks_target = drain.lacks_target;
            self.drained.is_over = !drain.found;
            drain.start_again();
        }
        self.drain = Some(drain);
    }

    fn drain_page(
        &mut self,
        page: u64,
        before: Step,
        drain: &mut Drain,
        now: Duration,
        sink: &mut impl Sink<B>,
    ) {
        match self.begin_to_leave(page, before, drain, now, sink) {
            Found::Nothing => {
                if drain.begun.remove(&page).is_some() {
                    drain.window.widen();
                }
            }
            Found::Later => {
                drain.found = true;
                drain.begun.remove(&page);
            }
            Found::Begun(step) => {
                drain.found = true;
                drain.begun.insert(page, step);
            }
        }
    }

    fn begin_to_leave(
        &mut self,
        page: u64,
        before: Step,
        drain: &mut Drain,
        now: Duration,
        sink: &mut impl Sink<B>,
    ) -> Found {
        if self.is_in_transition(page) && !self.is(Mutant::DrainInTransition) {
            return Found::Begun(before);
        }
        let local = *self.node.tables.local(Page(page));
        let manager = self.node.manager_of(Page(page));
        let (manages, all) = (manager == self.node.me(), self.is_draining());
        let entry = *self.node.tables.entry(Page(page));
        let hands = manages && (entry.phase() == Phase::Hand || entry.heir().is_some());
        if hands || local.frozen() {
            return Found::Begun(before);
        }
        let leaves = local.present() && (all || manages && local.owner());
        if !leaves && !manages {
            // What other nodes took long ago may still fill memory.
            if all && self.rights.is_vacant(page) {
                self.vacant.push(page);
                sink.act(Action::Look(Look::Room));
            }
            return match all && !self.node.has_nothing(Page(page)) {
                true => Found::Begun(before),
                false => Found::Nothing,
            };
        }
        if leaves {
            if !local.evictable() || manages && entry.busy() {
                return Found::Begun(before);
            }
            // One that came back is left for the next round.
            let waits = before != Step::Waits || self.pins.hold(page, now);
            return match waits {
                true => Found::Later,
                false => self.drain_present(page, local.owner(), manages, drain, now, sink),
            };
        }
        match before {
            Step::Hands => Found::Later,
            _ => self.drain_entry(page, drain, now, sink),
        }
    }

    /// A page that is here leaves.
    fn drain_present(
        &mut self,
        page: u64,
        owned: bool,
        manages: bool,
        drain: &mut Drain,
        now: Duration,
        sink: &mut impl Sink<B>,
    ) -> Found {
        let manager = self.node.manager_of(Page(page));
        let target = match manages {
            true => self.target_of(page, &drain.plan),
            false => Some(manager),
        };
        drain.lacks_target |= target.is_none();
        let Some(target) = target else {
            return Found::Later;
        };
        let actions = self.step_node(protocol::Event::Evict {
            page: Page(page),
            to: owned.then_some(target),
        });
        match actions.front() {
            Some(protocol::Action::Refused { reason, .. }) => {
                drain.unmovable += u64::from(*reason == Refusal::ManagerLost);
                return match reason {
                    Refusal::Busy => Found::Begun(Step::Waits),
                    _ => Found::Later,
                };
            }
            Some(protocol::Action::Send { message, .. })
                if matches!(message.body, Body::Offer { .. }) =>
            {
                self.leaving += 1;
            }
            _ => {}
        }
        match owned {
            true => self.drained.sent_pages += 1,
            false => self.drained.dropped_copies += 1,
        }
        self.carry_out(page, Work::evicting(actions), now, sink);
        Found::Begun(Step::Leaves)
    }

    /// The directory's entry of a page leaves.
    fn drain_entry(
        &mut self,
        page: u64,
        drain: &mut Drain,
        now: Duration,
        sink: &mut impl Sink<B>,
    ) -> Found {
        let Some(to) = self.target_of(page, &drain.plan) else {
            drain.lacks_target = true;
            return Found::Later;
        };
        let page_number = Page(page);
        let actions = self.step_node(protocol::Event::HandOver {
            page: page_number,
            to,
        });
        if let Some(protocol::Action::Refused { .. }) = actions.front() {
            return Found::Later;
        }
        let mut targets = drain.plan.targets.iter_mut();
        if let Some(target) = targets.find(|target| target.node == to) {
            target.pages = target.pages.saturating_sub(1);
        }
        self.carry_out(page, Work::new(actions, None), now, sink);
        Found::Begun(Step::Hands)
    }

    /// The next manager of a page: the node with its pre-copy, or else its owner, if that is a
    /// target; or the first target that is not full, if possible of those that the split has
    /// for it.
    fn target_of(&mut self, page: u64, plan: &DrainPlan) -> Option<NodeId> {
        let owner = self.node.tables.entry(Page(page)).owner();
        let me = self.node.me();
        let takes = |target: &&DrainTarget| {
            target.pages > 0 && target.node != me && self.node.takes_pages(target.node)
        };
        let mut targets = plan.targets.iter().filter(takes);
        let chosen = targets.clone().find(|t| self.chooses(page, t.node));
        let first = chosen.or(targets.clone().next())?.node;
        let wanted = self.precopies.target(page).or(owner);
        let takes = targets.any(|target| Some(target.node) == wanted);
        Some(wanted.filter(|_| takes).unwrap_or(first))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_elsewhere_makes_the_window_small_for_a_while() {
        let mut window = Window::new(FEW + 2);
        assert!(!window.is_full(FEW + 1));
        window.give_way();
        assert!(window.is_full(FEW) && !window.is_full(FEW - 1));
        (1..WIDEN_AFTER).for_each(|_| window.widen());
        assert!(window.is_full(FEW));
        // Another one begins to count anew.
        window.give_way();
        (1..WIDEN_AFTER).for_each(|_| window.widen());
        assert!(window.is_full(FEW));
        (0..4 * WIDEN_AFTER).for_each(|_| window.widen());
        assert!(window.is_full(FEW + 2) && !window.is_full(FEW + 1));
    }
}
