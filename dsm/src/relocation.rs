//! Pages that get another owner and manager at once, without a message of this protocol,
//! while no message about any page is under way. `docs/membership.md` has the sequence.
//!
//! The shell tells all nodes the same list, at a rest of all of them. So each node changes
//! its own records as if the page had been pushed and its entry handed over, and every
//! message had arrived.
//!
//! Invariant: what one node is told of a page is told to all of them, before the rest ends.

use crate::node::Node;
use crate::state::{Entry, Phase, Tables};
use crate::types::{NodeId, Page, Policy};

/// What can be relocated of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relocatable {
    /// The directory's entry; nobody ever touched the page.
    Untouched,
    /// The entry, and the only copy of the page.
    Owned,
}

impl<T: Tables> Node<T> {
    /// What can be relocated of a page that this node manages, if nothing is under way about
    /// it here.
    pub(crate) fn relocatable(&mut self, page: Page) -> Option<Relocatable> {
        let local = *self.tables.local(page);
        let is_mine = self.manager_by(page, local) == self.me && !self.hands_nothing_over();
        let is_ordinary = matches!(
            self.tables.policy(page),
            Policy::Invalidate | Policy::Update
        );
        let rests = !local.frozen() && !local.offered() && local.pending().is_none();
        if !(is_mine && is_ordinary && rests) || local.generation() != 0 {
            return None;
        }
        let entry = *self.tables.entry(page);
        if entry == Entry::default() && !local.present() {
            return Some(Relocatable::Untouched);
        }
        let is_idle = entry.phase() == Phase::Idle && entry.heir().is_none();
        let is_only = entry.owner() == Some(self.me) && entry.copyset() == 0;
        let is_here = local.owner() && local.present() && !local.zero();
        (is_idle && is_only && is_here && entry.waiting() == 0).then_some(Relocatable::Owned)
    }

    /// Whether this node knows nothing of a page but that `manager` manages it.
    pub(crate) fn is_unconcerned(&mut self, page: Page, manager: NodeId) -> bool {
        let local = *self.tables.local(page);
        local.clear() && local.generation() == 0 && self.manager_by(page, local) == manager
    }

    /// A page of this node goes to another one.
    pub(crate) fn give_relocated(&mut self, page: Page, to: NodeId, what: Relocatable) {
        if what == Relocatable::Owned {
            self.count_owner(Some(self.me), false);
            *self.tables.entry(page) = Entry::default();
            let local = self.tables.local(page);
            local.forget();
            local.distrust();
        }
        self.set_manager(page, to);
    }

    /// A page of another node comes to this one, whose memory has its bytes.
    pub(crate) fn take_relocated(&mut self, page: Page, what: Relocatable) {
        self.set_manager(page, self.me);
        if what == Relocatable::Owned {
            self.count_owner(Some(self.me), true);
            let me = self.me;
            self.tables.entry(page).set_owner(me);
            self.tables.local(page).make_writer(false);
        }
    }

    /// A page goes from one node to another, neither of them this one.
    pub(crate) fn learn_relocated(&mut self, page: Page, to: NodeId) {
        self.set_manager(page, to);
    }
}
