//! When a node dies. The engine calls [`crate::Event::PeerLost`] for every page;
//! only the page's manager has something to find out.
//!
//! * The owner died, somebody holds a copy: that holder becomes the owner.
//! * The owner died, nobody holds a copy: the page is lost, and reported with the node. Later
//!   requests for it are told that node. It never reads as zero.
//! * One end of a transfer died: the manager asks the other end (`Probe`). The
//!   question makes it deaf to the dead node, so its answer (`Held`) stays true;
//!   a `Done` that it sent before comes first. If it owns the page, good; if
//!   not, the page went down with the dead node unless there is a copy.
//! * A sharer died: its acknowledgement is not awaited any longer.
//! * The manager died: requests under way and to come end in
//!   [`crate::Action::Lost`]. Copies that are here stay readable.

use crate::node::Node;
use crate::protocol::{Action, Body, Content, Denial, Refusal, Sink};
use crate::state::{PLACE, Phase, Tables};
use crate::types::{NodeId, Page, Policy};

#[cfg(test)]
use crate::node::Mutant;

impl<T: Tables> Node<T> {
    pub(crate) fn peer_lost<S: Sink>(&mut self, node: NodeId, page: Page, sink: &mut S) {
        self.mark_dead(node);
        if self.tables.policy(page) == Policy::Private {
            return;
        }
        if self.tables.local(page).frozen() {
            return self.frozen_peer_lost(node, page, sink);
        }
        let manager = self.manager_of(page);
        if manager == node {
            self.manager_lost(page, node, sink);
        } else if manager == self.me {
            self.party_lost(node, page, sink);
        }
    }

    pub(crate) fn manager_lost<S: Sink>(&mut self, page: Page, node: NodeId, sink: &mut S) {
        let local = self.tables.local(page);
        let offered = local.offered();
        local.set_offered(false);
        let waited = local.pending().is_some();
        if offered {
            sink.act(Action::Refused {
                page,
                reason: Refusal::ManagerLost,
            });
        }
        if waited {
            self.lost(page, node, sink);
        }
    }

    fn party_lost<S: Sink>(&mut self, node: NodeId, page: Page, sink: &mut S) {
        let entry = self.tables.entry(page);
        entry.wait_read &= !node.bit();
        entry.wait_write &= !node.bit();
        entry.copyset &= !node.bit();
        match entry.phase {
            Phase::Lost => {}
            Phase::Idle => {
                if entry.owner() == Some(node) {
                    self.recover(page, node, sink);
                }
            }
            Phase::Acks => {
                entry.acks &= !node.bit();
                if entry.acks == 0 {
                    let party = entry.party();
                    self.grant_write(page, party, sink);
                }
            }
            Phase::Transfer => self.transfer_lost(node, page, sink),
            Phase::Hand => self.hand_lost(page, node, sink),
            Phase::Promote => {
                if entry.party() == node {
                    self.not_here(page, node, sink);
                }
            }
            Phase::Probe => {
                if entry.acks & node.bit() != 0 {
                    self.transfer_failed(page, node, sink);
                }
            }
        }
    }

    fn transfer_lost<S: Sink>(&mut self, node: NodeId, page: Page, sink: &mut S) {
        let me = self.me;
        let dead = self.dead;
        let entry = self.tables.entry(page);
        let Some(owner) = entry.owner() else {
            return;
        };
        let party = entry.party();
        let other = if owner == node {
            party
        } else if party == node {
            owner
        } else {
            return;
        };
        #[cfg(test)]
        if self.has(Mutant::SkipProbe) {
            return self.transfer_failed(page, node, sink);
        }
        // What did not arrive here by now never will.
        if other == me || dead & other.bit() != 0 {
            return self.transfer_failed(page, node, sink);
        }
        let entry = self.tables.entry(page);
        entry.phase = Phase::Probe;
        entry.acks = other.bit();
        entry.dead = node.0;
        self.send(other, page, Body::Probe { dead: node }, sink);
    }

    /// At either end of a transfer: what became of it?
    pub(crate) fn probe<S: Sink>(&mut self, page: Page, from: NodeId, dead: NodeId, sink: &mut S) {
        self.mark_dead(dead);
        let owner = self.tables.local(page).owner();
        self.send(from, page, Body::Held { dead, owner }, sink);
    }

    pub(crate) fn held<S: Sink>(
        &mut self,
        page: Page,
        from: NodeId,
        dead: NodeId,
        owner: bool,
        sink: &mut S,
    ) {
        let entry = self.tables.entry(page);
        let expected =
            entry.phase == Phase::Probe && entry.dead == dead.0 && entry.acks & from.bit() != 0;
        // A `Done` that crossed the question has ended the transfer.
        if !expected {
            return;
        }
        if !owner {
            return self.transfer_failed(page, dead, sink);
        }
        let placing = entry.is(PLACE);
        if entry.owner() == Some(from) {
            if placing {
                let reason = Denial::Busy;
                self.send(from, page, Body::OfferDenied { reason }, sink);
            }
        } else {
            self.record_owner(page, from);
        }
        self.finish(page, sink);
    }

    /// Neither end of the transfer owns the page. The request, if its node
    /// lives, waits again.
    fn transfer_failed<S: Sink>(&mut self, page: Page, lost_with: NodeId, sink: &mut S) {
        let dead = self.dead;
        let entry = self.tables.entry(page);
        let party = entry.party();
        if !entry.is(PLACE) && dead & party.bit() == 0 {
            let access = entry.request();
            entry.wait(party, access);
        }
        entry.idle();
        self.recover(page, lost_with, sink);
    }

    /// At an idle entry whose owner is gone: a holder of a copy becomes owner,
    /// or the page is lost.
    pub(crate) fn recover<S: Sink>(&mut self, page: Page, lost_with: NodeId, sink: &mut S) {
        let me = self.me;
        let dead = self.dead;
        let entry = self.tables.entry(page);
        entry.copyset &= !dead;
        if entry.copyset & me.bit() != 0 {
            self.tables.local(page).set_owner(true);
            self.record_owner(page, me);
            return self.advance(page, sink);
        }
        if let Some(holder) = NodeId::lowest(entry.copyset) {
            entry.begin(Phase::Promote, 0, holder);
            entry.dead = lost_with.0;
            let body = Body::Push {
                content: Content::Held,
                sole: false,
                migratory: false,
            };
            return self.send(holder, page, body, sink);
        }
        #[cfg(test)]
        if self.has(Mutant::ZeroInsteadOfLost) {
            let entry = self.tables.entry(page);
            let (wait_read, wait_write) = (entry.wait_read, entry.wait_write);
            *entry = crate::state::Entry::default();
            entry.wait_read = wait_read;
            entry.wait_write = wait_write;
            return self.advance(page, sink);
        }
        let entry = self.tables.entry(page);
        entry.phase = Phase::Lost;
        let owner = entry.owner();
        entry.set_owner(lost_with);
        if let Some(owner) = owner {
            let count = &mut self.owned_pages[owner.index()];
            *count = count.saturating_sub(1);
        }
        self.advance(page, sink);
    }
}
