//! The manager's part: one transaction per page at a time, the others wait in
//! two bitmaps and are served round robin.
//!
//! ```text
//!        Get (others hold copies)            all acknowledged
//! Idle -------------------------> Acks ---------------------------+
//!  | ^                                                            |
//!  | |  Done (or: data arrived here)                              v
//!  | +------------------------------ Transfer <--- owner elsewhere? --- no --> Idle
//!  +---- Get, owner elsewhere ----------^
//! ```
//!
//! When the manager owns the page, or asks for it itself, or only grants, no
//! `Done` travels: see [`crate`] for why that is sound.
//!
//! Invariant: an idle entry has no waiting requests.

use crate::node::Node;
use crate::protocol::{Action, Body, Content, Message, Refusal, Right, Sink};
use crate::state::{Entry, PLACE, Phase, Tables, WRITE};
use crate::types::{Access, NodeId, Page, Policy};

#[cfg(test)]
use crate::node::Mutant;

impl<T: Tables> Node<T> {
    pub(crate) fn get<S: Sink>(
        &mut self,
        page: Page,
        requester: NodeId,
        access: Access,
        ahead: bool,
        sink: &mut S,
    ) {
        let entry = self.tables.entry(page);
        if !entry.busy() {
            self.serve(page, requester, access, sink);
        } else if entry.phase == Phase::Hand {
            // It asks again when it hears who the manager is.
            #[cfg(test)]
            if self.has(Mutant::KeepServing) {
                self.serve(page, requester, access, sink);
            }
        } else if ahead {
            self.answer_retry(page, requester, sink);
        } else {
            entry.wait(requester, access);
        }
    }

    fn answer_retry<S: Sink>(&mut self, page: Page, requester: NodeId, sink: &mut S) {
        if requester == self.me {
            self.complete(page, sink);
        } else {
            self.send(requester, page, Body::Retry, sink);
        }
    }

    /// Begins a request at an idle entry.
    fn serve<S: Sink>(&mut self, page: Page, requester: NodeId, access: Access, sink: &mut S) {
        let entry = self.tables.entry(page);
        let Some(owner) = entry.owner() else {
            return self.first_touch(page, requester, sink);
        };
        if entry.phase == Phase::Lost {
            return self.answer_lost(page, requester, owner, sink);
        }
        if self.is_dead(owner) {
            self.tables.entry(page).wait(requester, access);
            return self.recover(page, owner, sink);
        }
        match access {
            Access::Read if !self.moves_whole(page, requester) => {
                self.serve_read(page, requester, owner, sink);
            }
            _ => self.serve_write(page, requester, owner, sink),
        }
    }

    /// Whether a reader becomes the owner: nobody else has a copy, and no other node
    /// has room for what the reader will have to push. Were it to get a copy, the
    /// owner's room would stay taken, and the reader could give up nothing but such
    /// copies, which it may need again at once.
    fn moves_whole(&mut self, page: Page, requester: NodeId) -> bool {
        self.tables.entry(page).copyset == 0
            && self.tables.policy(page) == Policy::Invalidate
            && !self.has_room_beside(requester)
    }

    fn first_touch<S: Sink>(&mut self, page: Page, requester: NodeId, sink: &mut S) {
        self.tables.entry(page).set_owner(requester);
        self.owned_pages[requester.index()] += 1;
        self.answer_grant(page, requester, Content::Zero, sink);
    }

    fn answer_grant<S: Sink>(
        &mut self,
        page: Page,
        requester: NodeId,
        content: Content,
        sink: &mut S,
    ) {
        if requester == self.me {
            self.granted(page, content, sink);
        } else {
            self.send(requester, page, Body::Grant { content }, sink);
        }
    }

    fn answer_lost<S: Sink>(&mut self, page: Page, requester: NodeId, node: NodeId, sink: &mut S) {
        #[cfg(test)]
        if self.has(Mutant::NoLostAnswer) {
            return;
        }
        if requester == self.me {
            self.lost(page, node, sink);
        } else {
            self.send(requester, page, Body::Lost { node }, sink);
        }
    }

    fn serve_read<S: Sink>(&mut self, page: Page, requester: NodeId, owner: NodeId, sink: &mut S) {
        // A push that crossed the request made it owner meanwhile.
        if owner == requester {
            return self.answer_grant(page, requester, Content::Held, sink);
        }
        let entry = self.tables.entry(page);
        let sole = entry.copyset == 0;
        if owner == self.me {
            if self.give(page, requester, Access::Read, sole, false, sink) {
                self.move_owner(page, requester);
            } else {
                self.tables.entry(page).copyset |= requester.bit();
            }
            return;
        }
        entry.begin(Phase::Transfer, 0, requester);
        let body = Body::Forward {
            access: Access::Read,
            requester,
            sole,
            held: false,
        };
        self.send(owner, page, body, sink);
        #[cfg(test)]
        self.break_early(page, sink);
    }

    fn serve_write<S: Sink>(&mut self, page: Page, requester: NodeId, owner: NodeId, sink: &mut S) {
        let me = self.me;
        let entry = self.tables.entry(page);
        let mut others = entry.copyset & !requester.bit() & !owner.bit();
        if others & me.bit() != 0 {
            others &= !me.bit();
            entry.copyset &= !me.bit();
            self.tables.local(page).forget();
            sink.act(Action::Drop { page });
            self.outdated(page, sink);
        }
        if others == 0 {
            return self.grant_write(page, requester, sink);
        }
        let entry = self.tables.entry(page);
        entry.begin(Phase::Acks, WRITE, requester);
        entry.acks = others;
        while let Some(holder) = NodeId::lowest(others) {
            others &= !holder.bit();
            self.send(holder, page, Body::Invalidate, sink);
        }
        #[cfg(test)]
        if self.has(Mutant::SkipAcks) {
            self.tables.entry(page).acks = 0;
            self.grant_write(page, requester, sink);
        }
    }

    pub(crate) fn acknowledged<S: Sink>(&mut self, page: Page, from: NodeId, sink: &mut S) {
        #[cfg(test)]
        if self.has(Mutant::SkipAcks) {
            return;
        }
        let entry = self.tables.entry(page);
        if entry.phase != Phase::Acks || entry.acks & from.bit() == 0 {
            return self.violation(page, from, "an unexpected acknowledgement", sink);
        }
        entry.acks &= !from.bit();
        entry.copyset &= !from.bit();
        if entry.acks == 0 {
            let party = entry.party();
            self.grant_write(page, party, sink);
        }
    }

    /// All copies but the owner's and the requester's are gone.
    pub(crate) fn grant_write<S: Sink>(&mut self, page: Page, requester: NodeId, sink: &mut S) {
        let dead = self.dead;
        let me = self.me;
        let entry = self.tables.entry(page);
        entry.copyset &= requester.bit();
        let held = entry.copyset != 0;
        let Some(owner) = entry.owner() else {
            return;
        };
        if dead & requester.bit() != 0 {
            entry.copyset = 0;
            return self.finish(page, sink);
        }
        if dead & owner.bit() != 0 && !held {
            entry.wait(requester, Access::Write);
            entry.idle();
            return self.recover(page, owner, sink);
        }
        if owner == requester {
            self.answer_grant(page, requester, Content::Held, sink);
            return self.finish(page, sink);
        }
        if owner == me {
            self.give(page, requester, Access::Write, true, held, sink);
            self.move_owner(page, requester);
            return self.finish(page, sink);
        }
        if dead & owner.bit() != 0 {
            // The requester's copy is the page now.
            self.move_owner(page, requester);
            self.data_without_owner(page, requester, sink);
            return self.finish(page, sink);
        }
        entry.begin(Phase::Transfer, WRITE, requester);
        let body = Body::Forward {
            access: Access::Write,
            requester,
            sole: true,
            held,
        };
        self.send(owner, page, body, sink);
        #[cfg(test)]
        self.break_early(page, sink);
    }

    /// The manager speaks for an owner that died: the requester holds a copy.
    fn data_without_owner<S: Sink>(&mut self, page: Page, requester: NodeId, sink: &mut S) {
        if requester == self.me {
            self.tables.local(page).make_writer(false);
            sink.act(Action::Allow { page });
            self.complete(page, sink);
        } else {
            let body = Body::Data {
                right: Right::Exclusive,
                content: Content::Held,
                migratory: false,
            };
            self.send(requester, page, body, sink);
        }
    }

    /// The ownership is with `to`, which holds the only copy.
    pub(crate) fn move_owner(&mut self, page: Page, to: NodeId) {
        let entry = self.tables.entry(page);
        entry.copyset = 0;
        self.record_owner(page, to);
    }

    /// The ownership is with `to`; the other copies stay.
    pub(crate) fn record_owner(&mut self, page: Page, to: NodeId) {
        let entry = self.tables.entry(page);
        let before = entry.owner();
        entry.set_owner(to);
        entry.copyset &= !to.bit();
        if let Some(before) = before {
            let count = &mut self.owned_pages[before.index()];
            *count = count.saturating_sub(1);
        }
        self.owned_pages[to.index()] += 1;
    }

    pub(crate) fn done<S: Sink>(
        &mut self,
        page: Page,
        from: NodeId,
        exclusive: bool,
        sink: &mut S,
    ) {
        #[cfg(test)]
        if self.has(Mutant::EarlyDone) {
            return;
        }
        let entry = self.tables.entry(page);
        if entry.party() != from {
            return self.violation(page, from, "`Done` from a node without a transfer", sink);
        }
        match entry.phase {
            // It may come while the manager asks because the other end died.
            Phase::Transfer | Phase::Probe => {
                if !exclusive {
                    entry.copyset |= from.bit();
                } else if entry.is(PLACE) {
                    self.record_owner(page, from);
                } else {
                    self.move_owner(page, from);
                }
                self.finish(page, sink);
            }
            Phase::Promote => self.promoted(page, from, sink),
            _ => self.violation(page, from, "`Done` without a transfer", sink),
        }
    }

    /// The transaction is over: the next one begins.
    pub(crate) fn finish<S: Sink>(&mut self, page: Page, sink: &mut S) {
        let entry = self.tables.entry(page);
        entry.idle();
        match entry.owner() {
            Some(owner) if self.is_dead(owner) => self.recover(page, owner, sink),
            _ => self.advance(page, sink),
        }
    }

    /// Serves waiting requests until one of them takes time.
    pub(crate) fn advance<S: Sink>(&mut self, page: Page, sink: &mut S) {
        loop {
            let entry = self.tables.entry(page);
            if entry.busy() {
                return;
            }
            if let Some(heir) = entry.heir() {
                return self.begin_hand(page, heir, sink);
            }
            let Some((node, access)) = entry.next_waiting() else {
                return;
            };
            #[cfg(test)]
            if self.has(Mutant::ForgetWaiting) {
                continue;
            }
            self.serve(page, node, access, sink);
        }
    }

    pub(crate) fn discard_entry(&mut self, page: Page) {
        let entry = self.tables.entry(page);
        let owner = entry.owner();
        let lost = entry.phase == Phase::Lost;
        *entry = Entry::default();
        if let (Some(owner), false) = (owner, lost) {
            let count = &mut self.owned_pages[owner.index()];
            *count = count.saturating_sub(1);
        }
    }

    pub(crate) fn adopt<S: Sink>(&mut self, page: Page, sink: &mut S) {
        let me = self.me;
        let manages = self.manager_of(page) == me;
        let idle = *self.tables.local(page);
        if !manages
            || idle.present()
            || idle.pending().is_some()
            || !self.tables.entry(page).untouched()
            || self.tables.entry(page).busy()
        {
            return sink.act(Action::Refused {
                page,
                reason: Refusal::Adopted,
            });
        }
        self.tables.entry(page).set_owner(me);
        self.owned_pages[me.index()] += 1;
        self.tables.local(page).make_writer(false);
    }

    /// A message about a page that the manager holds, to give to the shell.
    pub(crate) fn about(&mut self, page: Page, body: Body) -> Message {
        Message {
            page,
            generation: self.tables.local(page).generation,
            body,
        }
    }

    #[cfg(test)]
    fn break_early<S: Sink>(&mut self, page: Page, sink: &mut S) {
        if self.has(Mutant::EarlyDone) {
            let entry = self.tables.entry(page);
            let party = entry.party();
            if entry.request() == Access::Write {
                self.move_owner(page, party);
            } else {
                entry.copyset |= party.bit();
            }
            self.finish(page, sink);
        }
    }
}
