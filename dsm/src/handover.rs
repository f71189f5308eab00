//! The manager of a page changes. `docs/membership.md` has the sequences and the reasons.
//!
//! ```text
//! M --Freeze N--> all,  all --Frozen--> M --Entry--> N --Moved N--> all but M
//! ```
//!
//! * The hand-over begins between two transactions ([`Phase::Hand`]), so no content is on
//!   its way from node to node.
//! * A frozen node sends nothing about the page; what it asked for and did not get, it
//!   asks for again. The manager therefore forgets who waits.
//! * When all others are frozen, no message about the page is in flight. The entry then
//!   goes: **that is the switch**. Before it, M stays the manager whatever happens to N.
//! * N announces itself before it sends anything else about the page, on the same
//!   channels. So whatever a node receives comes from the manager on its record, but for
//!   one message: a push between two other nodes may reach a node that is still frozen.
//!   Its `Done` waits until the node knows who the manager is.
//! * When one end dies, a frozen node asks the other, which then accepts nothing more
//!   from the dead one, so its answer stays true.
//!
//! Invariant: every page has one manager, a record in flight to the next one included,
//! or its manager died.

use crate::config::ManagerOf;
use crate::node::Node;
use crate::protocol::{Action, Body, Message, Refusal, Sink};
use crate::state::{Entry, EntryRecord, LOST, Phase, Tables};
use crate::types::{NodeId, Page, Policy};

#[cfg(test)]
use crate::node::Mutant;

impl<T: Tables> Node<T> {
    pub(crate) fn hand_over<S: Sink>(&mut self, page: Page, to: NodeId, sink: &mut S) {
        if let Some(reason) = self.hand_over_refused(page, to) {
            return sink.act(Action::Refused { page, reason });
        }
        self.handing += 1;
        self.tables.entry(page).set_heir(Some(to));
        #[cfg(test)]
        if self.has(Mutant::HandBusy) {
            return self.begin_hand(page, to, sink);
        }
        self.advance(page, sink);
    }

    fn hand_over_refused(&mut self, page: Page, to: NodeId) -> Option<Refusal> {
        if self.hands_nothing_over() || self.manager_of(page) != self.me {
            return Some(Refusal::NotManager);
        }
        if self.tables.policy(page) == Policy::Private {
            return Some(Refusal::Private);
        }
        if self.held {
            return Some(Refusal::Held);
        }
        if to == self.me || !self.takes_pages(to) {
            return Some(Refusal::NotHeir);
        }
        let entry = self.tables.entry(page);
        (entry.phase == Phase::Hand || entry.heir().is_some()).then_some(Refusal::NotManager)
    }

    /// Managers are fixed for good.
    pub(crate) fn hands_nothing_over(&self) -> bool {
        matches!(self.manager, ManagerOf::Fixed(_))
    }

    pub(crate) fn recall<S: Sink>(&mut self, page: Page, sink: &mut S) {
        let me = self.me;
        if self.hands_nothing_over() || self.manager_of(page) != me {
            return;
        }
        let entry = self.tables.entry(page);
        if entry.phase == Phase::Hand {
            entry.party = me.0;
        } else if entry.heir().is_some() {
            self.kept(page, sink);
        }
    }

    /// The hand-over ends before it began.
    fn kept<S: Sink>(&mut self, page: Page, sink: &mut S) {
        self.tables.entry(page).set_heir(None);
        sink.act(Action::Kept { page });
        self.one_hand_over_less(sink);
    }

    fn one_hand_over_less<S: Sink>(&mut self, sink: &mut S) {
        self.handing -= 1;
        if self.held && self.handing == 0 {
            sink.act(Action::Quiet);
        }
    }

    /// At an entry between two transactions that shall go to `to`.
    #[cold]
    pub(crate) fn begin_hand<S: Sink>(&mut self, page: Page, to: NodeId, sink: &mut S) {
        if !self.takes_pages(to) {
            self.kept(page, sink);
            return self.advance(page, sink);
        }
        let others = self.others();
        let entry = self.tables.entry(page);
        let kind = if entry.phase == Phase::Lost { LOST } else { 0 };
        entry.begin(Phase::Hand, kind, to);
        entry.set_heir(None);
        entry.acks = others;
        // These nodes ask again when they know whom.
        entry.wait_read = 0;
        entry.wait_write = 0;
        self.tell(others, page, Body::Freeze { to }, sink);
        #[cfg(test)]
        if self.has(Mutant::EntryEarly) {
            self.tables.entry(page).acks = 0;
            self.conclude(page, sink);
        }
    }

    fn tell<S: Sink>(&mut self, mut nodes: u32, page: Page, body: Body, sink: &mut S) {
        while let Some(node) = NodeId::lowest(nodes) {
            nodes &= !node.bit();
            self.send(node, page, body, sink);
        }
    }

    /// At the manager, a node died while a page is handed over.
    pub(crate) fn hand_lost<S: Sink>(&mut self, page: Page, node: NodeId, sink: &mut S) {
        let me = self.me;
        let entry = self.tables.entry(page);
        if entry.party() == node {
            entry.party = me.0;
        }
        if entry.acks == 0 {
            return;
        }
        entry.acks &= !node.bit();
        if entry.acks == 0 {
            self.conclude(page, sink);
        }
    }

    /// All others are silent about the page.
    fn conclude<S: Sink>(&mut self, page: Page, sink: &mut S) {
        let entry = *self.tables.entry(page);
        if entry.party() == self.me {
            self.keep(page, entry, sink);
        } else {
            self.give_entry(page, entry, sink);
        }
        self.one_hand_over_less(sink);
    }

    fn keep<S: Sink>(&mut self, page: Page, entry: Entry, sink: &mut S) {
        self.tell(self.others(), page, Body::Thaw, sink);
        sink.act(Action::Kept { page });
        *self.tables.entry(page) = Entry::restore(entry.record());
        self.begin_as_manager(page, sink);
    }

    fn give_entry<S: Sink>(&mut self, page: Page, entry: Entry, sink: &mut S) {
        let to = entry.party();
        let record = entry.record();
        if record.owned() {
            self.count_owner(entry.owner(), false);
        }
        *self.tables.entry(page) = Entry::default();
        self.set_manager(page, to);
        self.send(to, page, Body::Entry { record }, sink);
        sink.act(Action::HandedOver { page, to });
        self.ask_again(page, sink);
    }

    /// Of a page that is not owned yet, or not any more, among those managed here.
    pub(crate) fn count_owner(&mut self, owner: Option<NodeId>, more: bool) {
        if let Some(owner) = owner {
            let count = &mut self.owned_pages[owner.index()];
            *count = match more {
                true => *count + 1,
                false => count.saturating_sub(1),
            };
        }
    }

    pub(crate) fn set_manager(&mut self, page: Page, manager: NodeId) {
        let configured = self.configured_manager(page);
        self.tables.local(page).set_manager(manager, configured);
    }

    /// The entry is here and idle, or lost: requests of this node, and a dead owner.
    fn begin_as_manager<S: Sink>(&mut self, page: Page, sink: &mut S) {
        let me = self.me;
        let pending = self.tables.local(page).pending();
        let entry = self.tables.entry(page);
        if let Some(access) = pending {
            entry.wait(me, access);
        }
        if entry.phase == Phase::Lost {
            self.advance(page, sink);
        } else {
            self.finish(page, sink);
        }
    }

    /// A request that waited, or forgotten by the manager before.
    fn ask_again<S: Sink>(&mut self, page: Page, sink: &mut S) {
        #[cfg(test)]
        if self.has(Mutant::ForgetHeld) {
            return;
        }
        let local = *self.tables.local(page);
        let Some(access) = local.pending() else {
            return;
        };
        let manager = self.manager_of(page);
        let ahead = local.ahead();
        #[cfg(test)]
        if self.has(Mutant::AskTwice) {
            self.send(manager, page, Body::Get { access, ahead }, sink);
        }
        self.send(manager, page, Body::Get { access, ahead }, sink);
    }

    /// The messages of a hand-over.
    #[cold]
    pub(crate) fn hand_message<S: Sink>(&mut self, from: NodeId, message: Message, sink: &mut S) {
        let page = message.page;
        let manager = self.manager_of(page);
        let local = *self.tables.local(page);
        let managed = manager == from && manager != self.me;
        let fits = !self.hands_nothing_over()
            && match message.body {
                Body::Freeze { .. } => managed && !local.frozen(),
                Body::Thaw => managed && local.frozen(),
                Body::Entry { .. } => managed && local.frozen() && local.heir() == self.me,
                Body::Moved { to } => {
                    let ends = [manager, local.heir()];
                    let known = ends.contains(&from) && ends.contains(&to);
                    local.frozen() && known && (from, to) != (manager, manager)
                }
                Body::Frozen => manager == self.me,
                _ => true,
            };
        if !fits {
            let what = "a message of a hand-over that does not fit";
            return self.violation(page, from, what, sink);
        }
        match message.body {
            Body::Freeze { to } => self.freeze(page, from, to, sink),
            Body::Frozen => self.frozen(page, from, sink),
            Body::Entry { record } => self.entry_arrived(page, from, record, sink),
            Body::Moved { to } => {
                self.set_manager(page, to);
                self.thawed(page, sink);
            }
            Body::Thaw => self.thawed(page, sink),
            Body::Ask { dead } => self.asked(page, from, dead, sink),
            _ => {}
        }
    }

    fn freeze<S: Sink>(&mut self, page: Page, from: NodeId, to: NodeId, sink: &mut S) {
        let local = self.tables.local(page);
        local.freeze(to);
        // An offer that the manager answered was answered before: this one it ignores.
        if local.offered() {
            local.set_offered(false);
            let reason = Refusal::Busy;
            sink.act(Action::Refused { page, reason });
        }
        // The manager should hear of the death before it counts this node's answer.
        if self.is_dead(to) {
            self.frozen_peer_lost(to, page, sink);
        }
        self.send(from, page, Body::Frozen, sink);
    }

    fn frozen<S: Sink>(&mut self, page: Page, from: NodeId, sink: &mut S) {
        #[cfg(test)]
        if self.has(Mutant::EntryEarly) {
            return;
        }
        let entry = self.tables.entry(page);
        if entry.phase != Phase::Hand || entry.acks & from.bit() == 0 {
            return self.violation(page, from, "an unexpected `Frozen`", sink);
        }
        entry.acks &= !from.bit();
        if entry.acks == 0 {
            self.conclude(page, sink);
        }
    }

    fn entry_arrived<S: Sink>(
        &mut self,
        page: Page,
        from: NodeId,
        record: EntryRecord,
        sink: &mut S,
    ) {
        let mut entry = Entry::restore(record);
        entry.copyset &= !self.dead;
        if record.owned() {
            self.count_owner(entry.owner(), true);
        }
        *self.tables.entry(page) = entry;
        self.tables.local(page).thaw();
        self.set_manager(page, self.me);
        sink.act(Action::TookOver { page });
        let to = self.me;
        let others = self.others() & !from.bit();
        self.tell(others, page, Body::Moved { to }, sink);
        self.begin_as_manager(page, sink);
    }

    /// The manager is known again.
    fn thawed<S: Sink>(&mut self, page: Page, sink: &mut S) {
        let owes = self.tables.local(page).thaw();
        let manager = self.manager_of(page);
        if self.is_dead(manager) {
            return self.manager_lost(page, manager, sink);
        }
        if owes {
            let exclusive = true;
            self.send(manager, page, Body::Done { exclusive }, sink);
        }
        self.ask_again(page, sink);
    }

    /// One end of a hand-over died, and a frozen node wants to know who manages.
    fn asked<S: Sink>(&mut self, page: Page, from: NodeId, dead: NodeId, sink: &mut S) {
        self.peer_lost(dead, page, sink);
        // A manager has announced itself, thawed the page, or is about to. Any other end
        // has given the entry to the dead node, or waits for it in vain.
        if self.manager_of(page) != self.me {
            self.send(from, page, Body::Moved { to: dead }, sink);
        }
    }

    /// At a node that is frozen, one of the nodes died.
    pub(crate) fn frozen_peer_lost<S: Sink>(&mut self, node: NodeId, page: Page, sink: &mut S) {
        let manager = self.manager_of(page);
        let heir = self.tables.local(page).heir();
        let other = if node == manager {
            heir
        } else if node == heir {
            manager
        } else {
            return;
        };
        #[cfg(test)]
        if self.has(Mutant::NoAsk) {
            return;
        }
        if other == self.me || self.is_dead(other) {
            self.tables.local(page).thaw();
            self.manager_lost(page, manager, sink);
        } else if !self.tables.local(page).ask() {
            self.send(other, page, Body::Ask { dead: node }, sink);
        }
    }
}
