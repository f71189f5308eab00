//! Nodes that join and leave, and managers that change. The sequences, which the authority
//! over the aggregate drives, are in `docs/membership.md`.
//!
//! ```text
//!  Hold ──▶ is_quiet    no hand-over of this node is under way
//!  holdings, mentions   some pages at a time: what is left of this node, of another
//!  managers, learn_…    what a node that joins is told
//! ```
//!
//! Invariants:
//!
//! - A node that leaves asks for nothing: what its users need waits until it stays.
//! - Pages in transition count as busy, because messages about them may wait here. Not so a
//!   page whose memory goes back to the host, unless messages do wait: the shell begins this
//!   at any time, also after a node that leaves has nothing any more.

use std::ops::Range;
use std::time::Duration;

use super::{Action, Controller, Look, Mutant, Sink};
use crate::protocol;
use crate::state::{Phase, Tables};
use crate::types::{NodeId, PAGES_MAX, Page, Standing};

/// What a node has of some pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Holdings {
    /// Pages that it owns.
    pub owned: u64,
    /// Read-only copies.
    pub copies: u64,
    /// Directory entries.
    pub entries: u64,
    /// Other pages about which something is under way here.
    pub busy: u64,
}

impl Holdings {
    /// Whether it has nothing of them.
    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }

    pub fn add(&mut self, other: &Holdings) {
        self.owned += other.owned;
        self.copies += other.copies;
        self.entries += other.entries;
        self.busy += other.busy;
    }
}

/// Consecutive pages that one node manages, other than the configuration says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ManagerRun {
    /// The first page.
    pub first: u64,
    /// How many.
    pub count: u64,
    pub manager: NodeId,
}

/// Why what a node was told of managers cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ManagerRunError {
    #[error("{count} pages from {first:#x} on are not all memory")]
    Pages { first: u64, count: u64 },
    #[error("{0} is not among the nodes of this machine")]
    Node(NodeId),
    #[error("the managers of this machine are fixed")]
    Fixed,
}

impl<T: Tables, B> Controller<T, B> {
    /// Whether the hand-overs of this node are over, since it was told to hold.
    pub fn is_quiet(&self) -> bool {
        self.quiet || self.is(Mutant::QuietEarly)
    }

    /// Whether messages of a node wait for pages in transition. Then it is not absent yet.
    pub fn has_queued(&self, node: NodeId) -> bool {
        let mut transitions = self.transitions.values();
        transitions.any(|transition| transition.queued(node) > 0)
    }

    /// What this node has of `pages`.
    pub fn holdings(&mut self, pages: Range<u64>) -> Holdings {
        let mut holdings = Holdings::default();
        for page in pages {
            let local = *self.node.tables.local(Page(page));
            let manages = self.node.manager_of(Page(page)) == self.node.me();
            let (owner, copy) = (local.owner(), local.present() && !local.owner());
            holdings.owned += u64::from(owner);
            holdings.copies += u64::from(copy);
            holdings.entries += u64::from(manages);
            let busy = !self.node.has_nothing(Page(page))
                || self.is_under_way(page)
                || self.is_precopying_to(page, None);
            holdings.busy += u64::from(busy && !(owner || copy || manages));
        }
        holdings
    }

    /// Whether a step or messages about a page may wait for an operation or a pin.
    pub(super) fn is_under_way(&self, page: u64) -> bool {
        let transition = self.transitions.get(&page);
        transition.is_some_and(|transition| !transition.only_gives_back())
    }

    /// The first of `pages` about which something that this node knows mentions `node`, or
    /// is about to change. Between hand-overs, while `node` leaves, `None` is final for
    /// these pages, as far as this node has to say.
    pub fn mentions(&mut self, mut pages: Range<u64>, node: NodeId) -> Option<u64> {
        if self.is(Mutant::ForgetMentions) {
            return None;
        }
        pages.find(|page| {
            self.node.mentions(Page(*page), node)
                || self.is_in_transition(*page)
                || self.is_precopying_to(*page, Some(node))
        })
    }

    /// The first of `pages` whose manager is about to change, as far as this node knows.
    pub fn unsettled(&mut self, mut pages: Range<u64>) -> Option<u64> {
        let me = self.node.me();
        pages.find(|page| {
            let page = Page(*page);
            let (local, manager) = (*self.node.tables.local(page), self.node.manager_of(page));
            let entry = *self.node.tables.entry(page);
            let hands = entry.phase() == Phase::Hand || entry.heir().is_some();
            local.frozen() || manager == me && hands || self.is_in_transition(page.0)
        })
    }

    /// How many of the pages `node` manages, as far as this node knows.
    pub fn managed_pages(&mut self, pages: Range<u64>, node: NodeId) -> u64 {
        let managed = pages.filter(|page| self.node.manager_of(Page(*page)) == node);
        managed.count() as u64
    }

    /// The managers of `pages`, as far as they are not those of the configuration. At most
    /// `runs_max`; the first page that was not looked at, if there are more.
    pub fn managers(
        &mut self,
        pages: Range<u64>,
        runs_max: usize,
    ) -> (Vec<ManagerRun>, Option<u64>) {
        let mut runs: Vec<ManagerRun> = Vec::new();
        for page in pages {
            let manager = self.node.manager_of(Page(page));
            if manager == self.node.configured_manager(Page(page)) {
                continue;
            }
            if let Some(run) = runs.last_mut()
                && (run.manager, run.first + run.count) == (manager, page)
            {
                run.count += 1;
                continue;
            }
            if runs.len() == runs_max {
                return (runs, Some(page));
            }
            runs.push(ManagerRun {
                first: page,
                count: 1,
                manager,
            });
        }
        (runs, None)
    }

    /// Tells a node that joins the manager of pages. Before it takes part in anything.
    ///
    /// # Errors
    /// What cannot be; nothing was learned then.
    pub fn learn_managers(&mut self, run: ManagerRun) -> Result<(), ManagerRunError> {
        let ManagerRun {
            first,
            count,
            manager,
        } = run;
        if self.node.hands_nothing_over() {
            return Err(ManagerRunError::Fixed);
        }
        if manager.0 >= self.node.nodes {
            return Err(ManagerRunError::Node(manager));
        }
        let end = first.saturating_add(count);
        let fits = end <= PAGES_MAX && (first..end).all(|page| self.is_memory(page));
        if !fits {
            return Err(ManagerRunError::Pages { first, count });
        }
        for page in first..end {
            self.node.learn_manager(Page(page), manager);
            self.mark_manager(page);
        }
        Ok(())
    }

    /// Tells a node that joins which nodes died before, a bit for each.
    pub fn learn_dead(&mut self, nodes: u32) {
        let nodes = (0..self.node.nodes)
            .map(NodeId)
            .filter(|node| nodes & node.bit() != 0);
        for node in nodes.collect::<Vec<_>>() {
            self.node.mark_dead(node);
        }
    }

    pub(super) fn hold_managers(&mut self, sink: &mut impl Sink<B>) {
        self.quiet = false;
        for action in self.step_node(protocol::Event::Hold) {
            self.membership(action, sink);
        }
    }

    pub(super) fn resume_managers(&mut self) {
        self.quiet = false;
        self.step_node(protocol::Event::Resume);
    }

    pub(super) fn member(
        &mut self,
        node: NodeId,
        standing: Standing,
        now: Duration,
        sink: &mut impl Sink<B>,
    ) {
        self.step_node(protocol::Event::Member { node, standing });
        if standing == Standing::Absent {
            self.forget_precopies_of(node, sink);
        }
        self.admit(now, sink);
    }

    /// What the protocol says of managers.
    pub(super) fn membership(&mut self, action: protocol::Action, sink: &mut impl Sink<B>) {
        match action {
            protocol::Action::HandedOver { page, .. } => {
                self.drained.handed_over += u64::from(self.drain.is_some());
                self.mark_manager(page.0);
            }
            protocol::Action::TookOver { page } => {
                self.mark_manager(page.0);
                self.precopies.list(page.0);
            }
            protocol::Action::Quiet => {
                self.quiet = true;
                sink.act(Action::Look(Look::Membership));
            }
            _ => {}
        }
    }

    /// Pages that this node manages are not evicted.
    pub(super) fn mark_manager(&mut self, page: u64) {
        let manages = self.node.manager_of(Page(page)) == self.node.me();
        if !self.is(Mutant::KeepHomes) {
            self.homes.set(page, manages);
        }
    }

    /// Whether this node asks for nothing because it leaves.
    pub(super) fn is_leaving(&self) -> bool {
        self.node.leaving
    }
}
