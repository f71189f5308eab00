//! Pages in transition: what the protocol says about a page, done in order.

use std::time::Duration;

use super::transition::{Granted, Operation, QUEUED_MAX, Transition, Work};
use super::{Action, Bytes, Controller, Count, Failure, Look, Mutant, Sink};
use crate::protocol::{self, Body, Content, Keep, Message, Refusal};
use crate::state::Tables;
use crate::types::{Access, NodeId, Page};

/// How long users whose work is not seen keep a page at least that they were given: to
/// wake a thread alone takes a part of that.
const USE_MIN: Duration = Duration::from_micros(100);

/// How long others' requests wait at most for a visitor's first write (the time window of
/// Mirage: Fleisch and Popek, 1989). Waking its thread takes most of that.
const VISIT_MAX: Duration = Duration::from_micros(100);

pub(super) fn fault(page: u64, access: Access, ahead: bool) -> protocol::Event {
    protocol::Event::Fault {
        page: Page(page),
        access,
        ahead,
    }
}

impl<T: Tables, B> Controller<T, B> {
    pub(super) fn is_in_transition(&self, page: u64) -> bool {
        self.transitions.contains_key(&page)
    }

    /// A page in transition learns of a death in its turn.
    pub(super) fn queue_loss(&mut self, page: u64, event: protocol::Event) {
        let skips = self.is(Mutant::LossSkipsTransitions);
        if let Some(transition) = self.transitions.get_mut(&page).filter(|_| !skips) {
            transition.queue.push_back((event, None));
        }
    }

    pub(super) fn message(
        &mut self,
        from: NodeId,
        message: Message,
        now: Duration,
        sink: &mut impl Sink<B>,
    ) {
        let page = message.page.0;
        if !self.is_memory(page) {
            return sink.act(Action::Fail(Failure::NoMemory { from, page }));
        }
        if matches!(
            message.body,
            Body::Get { ahead: false, .. } | Body::Forward { .. }
        ) {
            self.give_way();
        }
        if self.is_precopy_message(from, message, sink) {
            return;
        }
        let event = protocol::Event::Message { from, message };
        let queues = !self.is(Mutant::NoQueue);
        if let Some(transition) = self.transitions.get_mut(&page).filter(|_| queues) {
            if transition.queued(from) == QUEUED_MAX {
                let what = "more messages about a page than a node may have under way";
                return sink.act(Action::Fail(Failure::Violation { from, page, what }));
            }
            let bytes = message.carries_bytes().then(|| sink.keep());
            return transition.queue.push_back((event, bytes));
        }
        if message.body.is_request() && self.is_visited(page, now) {
            return self.defer_to_visit(page, event, sink);
        }
        let actions = self.step_node(event);
        let bytes = message.carries_bytes().then_some(Bytes::Arrived);
        self.carry_out(page, Work::new(actions, bytes), now, sink);
    }

    /// Whether a page came whole for a reader here that has had no time to write it yet.
    fn is_visited(&mut self, page: u64, now: Duration) -> bool {
        self.pins.hold_timed(page, now) && self.node.tables.local(Page(page)).is_unwritten_visit()
    }

    /// Whether a step about a page waits for its pins to go. New pins would defer it for
    /// ever, so only a visit goes on, until its time is over.
    pub(super) fn waits_for_pins(&self, page: u64) -> bool {
        let transition = self.transitions.get(&page);
        transition.is_some_and(|transition| transition.deferred && !transition.visit)
            && !self.is(Mutant::PinDeferred)
    }

    /// A request for a page that a user here is about to write waits for that write, or
    /// until the pin of the visit ends. Answered at once, the other node would get a copy,
    /// and the write would have to invalidate it.
    fn defer_to_visit(&mut self, page: u64, event: protocol::Event, sink: &mut impl Sink<B>) {
        self.suspend(page, None, Work::default(), sink);
        if let Some(transition) = self.transitions.get_mut(&page) {
            transition.visit = true;
            transition.queue.push_back((event, None));
        }
        self.pins.count_deferred(true);
        sink.act(Action::Count(Count::Deferred, 1));
        sink.act(Action::Look(Look::Tick));
    }

    /// Asks the protocol for a page; not while it is in transition, except for the write
    /// that ends a visit.
    pub(super) fn request(
        &mut self,
        page: u64,
        access: Access,
        now: Duration,
        sink: &mut impl Sink<B>,
    ) {
        let event = fault(page, access, false);
        match self.transitions.get_mut(&page) {
            None => self.carry_out_event(page, event, now, sink),
            Some(transition) if transition.visit && access == Access::Write => {
                transition.visit = false;
                transition.deferred = false;
                transition.queue.push_front((event, None));
                let idle = transition.operation.is_none();
                self.pins.count_deferred(false);
                if idle {
                    self.carry_out(page, Work::default(), now, sink);
                }
            }
            Some(_) => {}
        }
    }

    /// Has the protocol look at an event that is not a message.
    pub(super) fn carry_out_event(
        &mut self,
        page: u64,
        event: protocol::Event,
        now: Duration,
        sink: &mut impl Sink<B>,
    ) {
        let actions = self.step_node(event);
        self.carry_out(page, Work::new(actions, None), now, sink);
    }

    /// Carries out `work` about a page, and what came about it meanwhile, up to the next
    /// operation.
    pub(super) fn carry_out(
        &mut self,
        page: u64,
        mut work: Work<B>,
        now: Duration,
        sink: &mut impl Sink<B>,
    ) {
        loop {
            while let Some(action) = work.actions.pop_front() {
                if self.needs_load(page, &action) {
                    work.actions.push_front(action);
                    let operation = self.load_first(page, sink);
                    return self.suspend(page, Some(operation), work, sink);
                } else if self.spoils(page, &action) {
                    work.actions.push_front(action);
                    if !self.save_first(page, &mut work, now, sink) {
                        return;
                    }
                } else if let Some(kept) = self.taken_by(page, &action) {
                    work.actions.push_front(action);
                    if !self.take(page, kept, &mut work, now, sink) {
                        return;
                    }
                } else if let Some(operation) = self.act(page, action, &mut work, now, sink) {
                    return self.suspend(page, Some(operation), work, sink);
                }
            }
            let Some((event, bytes)) = self.next_event(page, sink) else {
                return;
            };
            work = Work::new(self.step_node(event), bytes.map(Bytes::Kept));
        }
    }

    /// The rest of the step waits for an operation, or for a pin to go.
    pub(super) fn suspend(
        &mut self,
        page: u64,
        operation: Option<Operation>,
        work: Work<B>,
        sink: &mut impl Sink<B>,
    ) {
        let work = work.kept(sink);
        let transition = self.transitions.entry(page).or_default();
        transition.deferred = operation.is_none();
        transition.operation = operation;
        transition.work = work;
    }

    /// What an action leaves of the page, if it takes something that is here.
    pub(super) fn taken_by(&self, page: u64, action: &protocol::Action) -> Option<Option<Access>> {
        let kept = match action {
            protocol::Action::Give {
                keep: Keep::Shared | Keep::AsIs,
                ..
            } => Some(Access::Read),
            protocol::Action::Give {
                keep: Keep::Nothing,
                ..
            }
            | protocol::Action::Drop { .. } => None,
            _ => return None,
        };
        (self.rights.of(page) > kept).then_some(kept)
    }

    /// Takes the page from its users, down to what is `kept`, unless it is pinned.
    /// Whether the step goes on at once.
    fn take(
        &mut self,
        page: u64,
        kept: Option<Access>,
        work: &mut Work<B>,
        now: Duration,
        sink: &mut impl Sink<B>,
    ) -> bool {
        let rest = std::mem::take(work);
        if self.pins.hold(page, now) && !self.is(Mutant::IgnorePins) {
            self.suspend(page, None, rest, sink);
            self.pins.count_deferred(true);
            sink.act(Action::Count(Count::Deferred, 1));
            // A pin may have gone between the look at it and the word that a page waits,
            // or go by itself.
            if !self.pins.hold(page, now) || self.pins.next_end(now).is_some() {
                sink.act(Action::Look(Look::Tick));
            }
            return false;
        }
        if !self.is(Mutant::KeepRight) {
            self.set_right(page, kept);
        }
        sink.act(Action::Revoke { page, kept });
        if self.is(Mutant::RevokeLate) {
            *work = rest;
            return true;
        }
        self.suspend(page, Some(Operation::Revoke), rest, sink);
        false
    }

    /// An operation is done: the step goes on.
    pub(super) fn done(&mut self, page: u64, now: Duration, sink: &mut impl Sink<B>) {
        let Some(transition) = self.transitions.get_mut(&page) else {
            return;
        };
        match transition.operation.take() {
            Some(Operation::Map { pin, request }) => {
                if pin {
                    self.pins.add_for(page, USE_MIN, now);
                }
                if let Some(Granted {
                    since,
                    asking,
                    here,
                }) = request
                {
                    sink.act(Action::Waited {
                        since,
                        asking,
                        here,
                    });
                }
            }
            Some(Operation::GiveBack) => self.rights.forget(page),
            Some(Operation::Protect) => self.protected(page, sink),
            Some(Operation::Load) => self.load_done(page),
            Some(Operation::Revoke | Operation::Hide) => {}
            None => return,
        }
        self.go_on(page, now, sink);
    }

    /// Goes on with a page that no operation is about, unless a pin defers it.
    fn go_on(&mut self, page: u64, now: Duration, sink: &mut impl Sink<B>) {
        let forgets = self.is(Mutant::ForgetQueue);
        let stays = self.is(Mutant::StayForEver);
        let extends = self.is(Mutant::ExtendVisit);
        let waits_for_buffer = self.waits_for_buffer(page, now);
        let Some(transition) = self.transitions.get_mut(&page) else {
            return;
        };
        if transition.deferred {
            if self.pins.hold(page, now) {
                // Pins of others do not extend a visit.
                transition.visit &= self.pins.hold_timed(page, now) || extends;
                return;
            }
            if transition.visit && stays || waits_for_buffer && !transition.visit {
                return;
            }
            transition.deferred = false;
            transition.visit = false;
            self.pins.count_deferred(false);
        }
        if forgets {
            transition.queue.clear();
        }
        let work = std::mem::take(&mut transition.work);
        self.carry_out(page, work, now, sink);
    }

    /// Goes on with the pages whose last pin went.
    pub(super) fn look_at_deferred(&mut self, now: Duration, sink: &mut impl Sink<B>) {
        if !self.pins.has_deferred() {
            return;
        }
        let waits = |(_, transition): &(&u64, &Transition<B>)| {
            transition.deferred && transition.operation.is_none()
        };
        let pages: Vec<u64> = self
            .transitions
            .iter()
            .filter(waits)
            .map(|(page, _)| *page)
            .collect();
        for page in pages {
            self.go_on(page, now, sink);
        }
    }

    /// The next event about a page whose last step is done: what came
    /// meanwhile, and then what users still want.
    fn next_event(
        &mut self,
        page: u64,
        sink: &mut impl Sink<B>,
    ) -> Option<(protocol::Event, Option<B>)> {
        let backwards = self.is(Mutant::QueueBackwards);
        if let Some(transition) = self.transitions.get_mut(&page) {
            let next = match backwards {
                true => transition.queue.pop_back(),
                false => transition.queue.pop_front(),
            };
            if next.is_some() {
                return next;
            }
            self.transitions.remove(&page);
            self.wake_without_page(page, sink);
        }
        self.asked_again(page, sink).map(|event| (event, None))
    }

    /// Starts an operation about a page at once. False if one is under way.
    pub(super) fn start(&mut self, page: u64, operation: Operation) -> bool {
        let transition = self.transitions.entry(page).or_default();
        let idle = transition.operation.is_none();
        if idle {
            transition.operation = Some(operation);
        }
        idle
    }

    pub(super) fn hide(&mut self, page: u64, sink: &mut impl Sink<B>) {
        // The next one hides it, if it is in transition now.
        if self.is_memory(page) && !self.is_in_transition(page) && self.start(page, Operation::Hide)
        {
            sink.act(Action::Hide { page });
        }
    }

    /// Carries out an action that takes nothing from a user any more. What the rest of the
    /// step has to wait for.
    fn act(
        &mut self,
        page: u64,
        action: protocol::Action,
        work: &mut Work<B>,
        now: Duration,
        sink: &mut impl Sink<B>,
    ) -> Option<Operation> {
        match action {
            protocol::Action::Send { to, message } => sink.act(Action::Send { to, message }),
            protocol::Action::Give { to, message, keep } => {
                let message = self.with_precopy(to, message);
                sink.act(Action::Send { to, message });
                let pushed = matches!(message.body, Body::Push { .. });
                if pushed {
                    self.leaving = self.leaving.saturating_sub(1);
                    sink.act(Action::Count(Count::EvictedSent, 1));
                }
                if keep == Keep::Nothing {
                    self.vacated(page, pushed, sink);
                }
            }
            protocol::Action::Drop { .. } => {
                if work.evicts {
                    sink.act(Action::Count(Count::EvictedDropped, 1));
                }
                self.vacated(page, work.evicts, sink);
            }
            protocol::Action::Allow { .. } => {
                self.set_right(page, Some(Access::Write));
                self.pins.end_timed(page);
            }
            protocol::Action::Install {
                access, content, ..
            } => {
                self.install(page, access, content, work, sink);
                if access == Access::Read
                    && self.is_waited_for(page)
                    && self.node.tables.local(Page(page)).is_unwritten_visit()
                {
                    self.pins.add_for(page, VISIT_MAX, now);
                }
            }
            protocol::Action::Resolved { .. } => return self.resolved(page, now, sink),
            protocol::Action::Outdated { .. } => self.outdated(page, now, sink),
            protocol::Action::HandedOver { .. }
            | protocol::Action::TookOver { .. }
            | protocol::Action::Kept { .. }
            | protocol::Action::Quiet => self.membership(action, sink),
            // Home was busy with a page that was offered to it, or died, or another node
            // has the page meanwhile: others go.
            protocol::Action::NoRoom { .. } => self.offer_failed(None, sink),
            protocol::Action::Refused {
                reason: reason @ (Refusal::Busy | Refusal::NotHere | Refusal::ManagerLost),
                ..
            } => self.offer_failed(Some(reason), sink),
            protocol::Action::Refused {
                reason: Refusal::Leaving,
                ..
            } => self.refused_while_leaving(page, sink),
            protocol::Action::Lost { node, .. } => self.lost(page, node, sink),
            protocol::Action::Violation { from, what, .. } => {
                sink.act(Action::Fail(Failure::Violation { from, page, what }));
            }
            protocol::Action::Refused { reason, .. } => {
                sink.act(Action::Fail(Failure::Refused { page, reason }));
            }
        }
        None
    }

    fn install(
        &mut self,
        page: u64,
        access: Access,
        content: Content,
        work: &mut Work<B>,
        sink: &mut impl Sink<B>,
    ) {
        match (content, work.bytes.take()) {
            (Content::Bytes, Some(bytes)) => sink.act(Action::Fill { page, bytes }),
            (Content::Zero, _) if self.rights.used(page) => sink.act(Action::Zero { page }),
            (Content::Zero, _) => {}
            (Content::Precopied, _) if self.rights.is_precopy(page) => {}
            (Content::Precopied, _) | (Content::Bytes, None) | (Content::Held, _) => {
                sink.act(Action::Fail(Failure::NoBytes { page }));
            }
        }
        self.fresh = (content == Content::Zero).then_some(page);
        match access == Access::Read && self.subscriptions.is_asked(page) {
            true => self.rights.set_unasked(page),
            false => self.set_right(page, Some(access)),
        }
        if self.budget.is_exceeded(self.rights.resident()) {
            sink.act(Action::Look(Look::Room));
        }
    }

    fn outdated(&mut self, page: u64, now: Duration, sink: &mut impl Sink<B>) {
        if self.is(Mutant::KeepOutdated) {
            self.set_right(page, Some(Access::Read));
        }
        let unread = self.rights.left_unused(page) && !self.is(Mutant::NeverUnsubscribe);
        if self.subscriptions.outdated(page, unread, now) {
            sink.act(Action::Look(Look::Tick));
        }
    }

    pub(super) fn look_at_subscriptions(&mut self, now: Duration, sink: &mut impl Sink<B>) {
        // What is due stays so.
        if self.rests() {
            return;
        }
        while let Some(page) = self.subscriptions.pop_due(now) {
            // A fault may have brought it, or be at it.
            let is_here = self.rights.of(page).is_some() || self.is_in_transition(page);
            if is_here || self.lacks_room(page) || self.is_awaited(page) {
                continue;
            }
            sink.act(Action::Renew { page });
            self.subscriptions.ask(page);
            // As a fault that nobody waits for: one ahead would be given up where several
            // nodes ask at the same moment.
            self.carry_out_event(page, fault(page, Access::Read, false), now, sink);
        }
    }

    /// A page left. Its memory stays for when it comes back, unless there is little or
    /// the page was evicted.
    fn vacated(&mut self, page: u64, evicted: bool, sink: &mut impl Sink<B>) {
        self.left(page);
        if evicted {
            self.rights.mark_evicted(page);
        }
        if evicted || self.budget.is_exceeded(self.rights.resident()) {
            self.vacant.push(page);
            sink.act(Action::Look(Look::Room));
        }
    }
}
