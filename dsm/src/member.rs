//! Nodes that join and leave. The sequences, which the authority over the aggregate
//! drives, are in `docs/membership.md`.
//!
//! Invariants: a node is absent or not, alike on all nodes, whenever a hand-over begins;
//! no message is about an absent node.

use crate::node::Node;
use crate::protocol::{Action, Sink};
use crate::state::{Entry, Tables};
use crate::types::{NodeId, Page, Standing};

#[cfg(test)]
use crate::node::Mutant;

impl<T: Tables> Node<T> {
    pub(crate) fn hold<S: Sink>(&mut self, sink: &mut S) {
        self.held = true;
        #[cfg(test)]
        if self.has(Mutant::NotQuiet) {
            return sink.act(Action::Quiet);
        }
        if self.handing == 0 {
            sink.act(Action::Quiet);
        }
    }

    pub(crate) fn resume(&mut self) {
        self.held = false;
    }

    pub(crate) fn member(&mut self, node: NodeId, standing: Standing) {
        let bit = node.bit();
        self.absent &= !bit;
        self.closed |= bit;
        match standing {
            Standing::Absent => {
                self.absent |= bit;
                self.owned_pages[node.index()] = 0;
            }
            Standing::Present => self.closed &= !bit,
            Standing::Draining | Standing::Leaving => {}
        }
        self.closed |= self.dead;
        if node == self.me {
            self.leaving = standing == Standing::Leaving;
        }
        self.refresh();
    }

    pub(crate) fn mark_dead(&mut self, node: NodeId) {
        self.dead |= node.bit();
        self.closed |= node.bit();
        self.refresh();
    }

    /// The sets that the hot paths look at.
    fn refresh(&mut self) {
        self.deaf = self.dead | self.absent;
        self.mute = if self.leaving { u32::MAX } else { self.dead };
    }

    /// The other members.
    pub(crate) fn others(&self) -> u32 {
        let all = ((1u64 << self.nodes) - 1) as u32;
        all & !self.deaf & !self.me.bit()
    }

    /// Whether a node may be given a page, or the directory's record of one.
    pub(crate) fn takes_pages(&self, node: NodeId) -> bool {
        node.0 < self.nodes && self.closed & node.bit() == 0
    }

    /// Whether a node's messages are accepted.
    pub fn hears(&self, node: NodeId) -> bool {
        self.deaf & node.bit() == 0
    }

    /// Whether anything that this node knows of a page is about `node`, or is about to
    /// change. Between hand-overs, with `node` draining, an answer `false` of a page's
    /// manager is final: nothing about the page is on its way to or from `node`.
    pub fn mentions(&mut self, page: Page, node: NodeId) -> bool {
        let manager = self.manager_of(page);
        let frozen = self.tables.local(page).frozen();
        let manages = manager == self.me;
        frozen || manager == node || manages && self.tables.entry(page).mentions(node)
    }

    /// Whether this node has nothing of a page: no copy, no ownership, no request, no
    /// directory entry.
    pub fn has_nothing(&mut self, page: Page) -> bool {
        let clear = self.tables.local(page).clear() && self.manager_of(page) != self.me;
        clear && (self.hands_nothing_over() || *self.tables.entry(page) == Entry::default())
    }

    /// Tells a node that joins who manages a page. Before it takes part in anything.
    ///
    /// # Panics
    /// When the managers of this aggregate are fixed.
    pub fn learn_manager(&mut self, page: Page, manager: NodeId) {
        assert!(!self.hands_nothing_over());
        let configured = self.configured_manager(page);
        self.tables.local(page).set_manager(manager, configured);
    }
}
