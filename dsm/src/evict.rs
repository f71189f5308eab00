//! Making room: a node drops a read-only copy, or pushes a page it owns.
//!
//! * A read-only copy is dropped and the manager told.
//! * The manager pushes a page of its own straight to the node with most room
//!   and records the new owner at once: whatever it sends to that node next
//!   comes after the page.
//! * If somebody else holds a copy, the manager offers it the ownership instead
//!   (`Push` with `Held`), keeping its own copy until the answer, since the other
//!   may have dropped its copy a moment before.
//! * Any other owner asks the manager, which names a target: itself when it
//!   holds a copy (then nothing but the ownership travels), else another holder
//!   (no extra room is needed there), else the node with most room.

use crate::node::{Node, content_of};
use crate::protocol::{Action, Body, Content, Denial, Keep, Refusal, Sink};
use crate::state::{EVICTION, Local, PLACE, Phase, State, TARGETED, Tables};
use crate::types::{NodeId, Page, Policy};

#[cfg(test)]
use crate::node::Mutant;

/// A node is short of room when less than this part of its budget is free: what it
/// owns is then hardly more than it may, whatever runs of pages are under way.
const SHORT_OF_ROOM: u32 = 32;

impl<T: Tables> Node<T> {
    pub(crate) fn evict<S: Sink>(&mut self, page: Page, to: Option<NodeId>, sink: &mut S) {
        if let Some(reason) = self.eviction_refused(page) {
            return sink.act(Action::Refused { page, reason });
        }
        let manager = self.manager_of(page);
        let manages = manager == self.me;
        let local = self.tables.local(page);
        match (local.owner(), manages) {
            (true, true) => {
                self.evict_owned(page, to, sink);
                self.advance(page, sink);
            }
            (true, false) => {
                local.set_offered(true);
                self.send(manager, page, Body::Offer { to }, sink);
            }
            (false, true) => {
                let me = self.me;
                self.tables.entry(page).copyset &= !me.bit();
                self.drop_copy(page, sink);
            }
            (false, false) => {
                self.drop_copy(page, sink);
                if !self.is_dead(manager) {
                    self.send(manager, page, Body::Dropped, sink);
                }
            }
        }
    }

    fn eviction_refused(&mut self, page: Page) -> Option<Refusal> {
        let policy = self.tables.policy(page);
        let manager = self.manager_of(page);
        let local = *self.tables.local(page);
        if !local.present() {
            return Some(Refusal::NotHere);
        }
        match policy {
            Policy::Private => return Some(Refusal::Private),
            Policy::ReadOnly if local.owner() => return Some(Refusal::ReadOnly),
            _ => {}
        }
        if !local.evictable() || manager == self.me && self.tables.entry(page).busy() {
            return Some(Refusal::Busy);
        }
        if local.owner() && self.is_dead(manager) {
            return Some(Refusal::ManagerLost);
        }
        None
    }

    fn drop_copy<S: Sink>(&mut self, page: Page, sink: &mut S) {
        self.tables.local(page).forget();
        sink.act(Action::Drop { page });
    }

    /// The manager's own page, at an idle entry.
    fn evict_owned<S: Sink>(&mut self, page: Page, to: Option<NodeId>, sink: &mut S) {
        let closed = self.closed;
        let me = self.me;
        let local = *self.tables.local(page);
        let entry = self.tables.entry(page);
        let mut holders = entry.copyset & !closed;
        if let Some(to) = to {
            holders &= to.bit();
        }
        let migratory = local.migratory() && local.written();
        if let Some(holder) = NodeId::lowest(holders) {
            let kind = EVICTION | if to.is_some() { TARGETED } else { 0 };
            entry.begin(Phase::Promote, kind, holder);
            self.tables.local(page).set_owner(false);
            let body = Body::Push {
                content: Content::Held,
                sole: false,
                migratory,
            };
            return self.send(holder, page, body, sink);
        }
        let Some(to) = self.target(to, me) else {
            return sink.act(Action::NoRoom { page });
        };
        let sole = self.tables.entry(page).copyset & !to.bit() == 0;
        self.push_out(page, to, local, sole, false, sink);
        self.record_owner(page, to);
    }

    /// Gives the page and the ownership to `to`.
    fn push_out<S: Sink>(
        &mut self,
        page: Page,
        to: NodeId,
        local: Local,
        sole: bool,
        held: bool,
        sink: &mut S,
    ) {
        let body = Body::Push {
            content: content_of(local, held),
            sole,
            migratory: local.migratory() && local.written(),
        };
        let message = self.about(page, body);
        self.tables.local(page).forget();
        sink.act(Action::Give {
            to,
            message,
            keep: Keep::Nothing,
        });
    }

    /// The node that takes a page pushed by `from`: the one asked for, or the
    /// one with most room, or this one beyond its budget.
    fn target(&self, to: Option<NodeId>, from: NodeId) -> Option<NodeId> {
        let fits = |node: NodeId| node != from && self.takes_pages(node);
        if let Some(to) = to {
            return Some(to).filter(|&to| fits(to));
        }
        let mut best = None;
        let mut best_room = 0;
        for node in (0..self.nodes).map(NodeId).filter(|&node| fits(node)) {
            let room = self.room_pages(node);
            if room > best_room {
                best_room = room;
                best = Some(node);
            }
        }
        best.or(Some(self.me).filter(|&me| fits(me) && self.has_spare_pages()))
    }

    /// Whether this node takes pages that no other has room for.
    fn has_spare_pages(&self) -> bool {
        let me = self.me.index();
        let most = self.budgets_pages[me].saturating_add(self.spare_pages);
        self.spare_pages > 0 && self.owned_pages[me] < most
    }

    /// Pages that a node may still own, of those managed here.
    fn room_pages(&self, node: NodeId) -> u32 {
        let index = node.index();
        self.budgets_pages[index].saturating_sub(self.owned_pages[index])
    }

    /// Whether a node but this one has room for more than a few pages.
    pub(crate) fn has_room_beside(&self, node: NodeId) -> bool {
        let others = (0..self.nodes).map(NodeId).filter(|&other| other != node);
        others
            .filter(|&other| self.takes_pages(other))
            .any(|other| self.room_pages(other) > self.budgets_pages[other.index()] / SHORT_OF_ROOM)
    }

    /// At the manager: `from` wants to push a page.
    pub(crate) fn offer<S: Sink>(
        &mut self,
        page: Page,
        from: NodeId,
        to: Option<NodeId>,
        sink: &mut S,
    ) {
        let me = self.me;
        let closed = self.closed;
        let entry = self.tables.entry(page);
        if entry.phase == Phase::Hand {
            return;
        }
        let denial = if entry.owner() != Some(from) {
            Some(Denial::NotOwner)
        } else if entry.busy() {
            Some(Denial::Busy)
        } else {
            None
        };
        if let Some(reason) = denial {
            return self.send(from, page, Body::OfferDenied { reason }, sink);
        }
        let copyset = entry.copyset & !closed;
        let holder = if copyset & me.bit() != 0 {
            Some(me)
        } else {
            NodeId::lowest(copyset)
        };
        let wanted = if to.is_some() { to } else { holder };
        let Some(to) = self.target(wanted, from) else {
            let reason = Denial::NoRoom;
            return self.send(from, page, Body::OfferDenied { reason }, sink);
        };
        let entry = self.tables.entry(page);
        entry.begin(Phase::Transfer, PLACE, to);
        let sole = entry.copyset & !to.bit() == 0;
        let held = to == me && entry.copyset & me.bit() != 0;
        self.send(from, page, Body::Place { to, sole, held }, sink);
    }

    pub(crate) fn offer_denied<S: Sink>(&mut self, page: Page, reason: Denial, sink: &mut S) {
        let local = self.tables.local(page);
        local.set_offered(false);
        sink.act(match reason {
            Denial::NoRoom => Action::NoRoom { page },
            Denial::Busy => Action::Refused {
                page,
                reason: Refusal::Busy,
            },
            Denial::NotOwner => Action::Refused {
                page,
                reason: Refusal::NotHere,
            },
        });
    }

    /// At the owner: the manager named a target.
    pub(crate) fn place<S: Sink>(
        &mut self,
        page: Page,
        to: NodeId,
        sole: bool,
        held: bool,
        sink: &mut S,
    ) {
        let local = *self.tables.local(page);
        if !local.owner() || !local.present() || !local.offered() {
            let manager = self.manager_of(page);
            return self.violation(
                page,
                manager,
                "a `Place` for a page that was not offered",
                sink,
            );
        }
        // The manager will hear of the death too, and ask.
        if self.is_dead(to) {
            return;
        }
        self.tables.local(page).set_offered(false);
        self.push_out(page, to, local, sole, held, sink);
    }

    /// A page and its ownership arrive without having been asked for.
    pub(crate) fn push<S: Sink>(
        &mut self,
        page: Page,
        from: NodeId,
        content: Content,
        sole: bool,
        migratory: bool,
        sink: &mut S,
    ) {
        let local = self.tables.local(page);
        if local.owner() {
            return self.violation(page, from, "a `Push` to the owner", sink);
        }
        let had_copy = local.present();
        if content == Content::Held && !had_copy {
            #[cfg(test)]
            let blind = self.has(Mutant::BlindPromotion);
            #[cfg(not(test))]
            let blind = false;
            if !blind {
                return self.send(from, page, Body::NotHere, sink);
            }
        }
        let local = self.tables.local(page);
        local.set_state(if sole {
            State::Exclusive
        } else {
            State::Shared
        });
        local.set_owner(true);
        local.set_migratory(migratory);
        local.set_written(false);
        if !had_copy {
            local.set_zero(content == Content::Zero);
            let writable = sole && content.has_bytes();
            // Written or not, the mark should survive a stay that was not asked for.
            local.set_written(content.has_bytes());
            sink.act(Action::Install {
                page,
                access: if writable {
                    crate::Access::Write
                } else {
                    crate::Access::Read
                },
                content,
            });
        }
        if content == Content::Held && from == self.manager_of(page) {
            // The manager waits for the answer to an offered ownership.
            self.send(from, page, Body::Done { exclusive: true }, sink);
        } else if self.tables.local(page).frozen() && !self.hurries() {
            // The manager may be another one by now.
            self.tables.local(page).owe_done();
        } else {
            self.arrived(page, from, true, sink);
        }
    }

    /// Whether this is the mutant that sends `Done` at once.
    fn hurries(&self) -> bool {
        #[cfg(test)]
        return self.has(Mutant::EagerDone);
        #[cfg(not(test))]
        false
    }

    /// At the manager: the holder accepted the ownership.
    pub(crate) fn promoted<S: Sink>(&mut self, page: Page, holder: NodeId, sink: &mut S) {
        let evicting = self.tables.entry(page).is(EVICTION);
        self.record_owner(page, holder);
        if evicting {
            self.drop_copy(page, sink);
        }
        self.finish(page, sink);
    }

    /// At the manager: the holder had dropped its copy, or died.
    pub(crate) fn not_here<S: Sink>(&mut self, page: Page, holder: NodeId, sink: &mut S) {
        let entry = self.tables.entry(page);
        if entry.phase != Phase::Promote || entry.party() != holder {
            return self.violation(page, holder, "an `OfferDenied` without an offer", sink);
        }
        let kind = entry.kind;
        let dead = NodeId(entry.dead);
        entry.copyset &= !holder.bit();
        entry.idle();
        if kind & EVICTION == 0 {
            return self.recover(page, dead, sink);
        }
        self.tables.local(page).set_owner(true);
        let to = (kind & TARGETED != 0).then_some(holder);
        self.evict_owned(page, to, sink);
        self.advance(page, sink);
    }
}
