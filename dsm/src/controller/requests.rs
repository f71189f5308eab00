//! Requests: threads that wait for a page, users that sleep until one is mapped, and what
//! is asked for ahead of them.

use std::time::Duration;

use super::pages::fault;
use super::transition::{Granted, Operation};
use super::{Action, Controller, Count, Look, Mutant, Purpose, Sink};
use crate::protocol;
use crate::state::Tables;
use crate::types::{Access, Page};

/// Pages that are asked for ahead, at most.
pub(super) const AHEAD_PAGES: u64 = 32;
/// Pages of the kernel's code that are asked for together.
const CODE_PAGES: u64 = 8;

/// A thread that waits for a page.
#[derive(Debug)]
pub(super) struct Waiter {
    number: u64,
    page: u64,
    access: Access,
    purpose: Purpose,
    granted: bool,
    /// Another node was asked for it.
    remote: bool,
}

impl Waiter {
    pub fn new(number: u64, page: u64, access: Access, purpose: Purpose) -> Self {
        Self {
            number,
            page,
            access,
            purpose,
            granted: false,
            remote: false,
        }
    }
}

/// A page that users sleep on until it is mapped.
#[derive(Debug)]
pub(super) struct AsyncFault {
    access: Access,
    since: Duration,
    /// How long it took to ask.
    asking: Duration,
    /// The protocol has to be asked again: its last answer was not enough.
    again: bool,
}

impl<T: Tables, B> Controller<T, B> {
    /// Gives a waiting thread its page, or asks for it.
    pub(super) fn fetch(&mut self, number: u64, now: Duration, sink: &mut impl Sink<B>) {
        let Some(index) = self.waiting(number) else {
            return;
        };
        let Waiter {
            page,
            access,
            purpose,
            ..
        } = self.waiters[index];
        if self.hold(page, access) {
            self.waiters[index].granted = true;
            return sink.act(Action::Wake {
                waiter: number,
                granted: true,
            });
        }
        if self.lacks_room(page) {
            return self.wait_for_room(page, sink);
        }
        self.request(page, self.expected(page, access), now, sink);
        let Some(index) = self.waiting(number) else {
            return;
        };
        if !std::mem::replace(&mut self.waiters[index].remote, true) {
            sink.act(Action::Remote {
                page,
                access,
                waiter: Some(number),
            });
            self.ask_back_if_read(page, access, now, sink);
            if purpose == Purpose::KernelCode {
                self.ask_for_code(page, now, sink);
            }
        }
    }

    /// The place of a thread that has not got its page.
    fn waiting(&self, number: u64) -> Option<usize> {
        let mut waiters = self.waiters.iter();
        waiters.position(|waiter| waiter.number == number && !waiter.granted)
    }

    /// A thread goes on. What it waited for tells what is needed next.
    pub(super) fn leave(&mut self, number: u64, now: Duration, sink: &mut impl Sink<B>) {
        let mut waiters = self.waiters.iter();
        let Some(index) = waiters.position(|waiter| waiter.number == number) else {
            return;
        };
        let Waiter {
            page,
            purpose,
            remote,
            ..
        } = self.waiters.swap_remove(index);
        if remote && self.fresh == Some(page) && !self.rests() {
            self.ask_for_more(page, now, sink, |this, next| this.rights.of(next).is_none());
        }
        // Other walkers only read it, too, though the kernel here is about to write
        // an entry that was missing: a page that is read, then written, looks like
        // one to hand over.
        if remote && purpose == Purpose::Table {
            self.node.settle(Page(page));
        }
    }

    pub(super) fn ask(
        &mut self,
        page: u64,
        access: Access,
        now: Duration,
        sink: &mut impl Sink<B>,
    ) {
        if !self.is_memory(page) {
            return;
        }
        if let (true, Some(right)) = (self.rights.allow_use(page, access), self.rights.of(page)) {
            sink.act(Action::Count(Count::Local, 1));
            // One that is about to go is not kept once more.
            let pin = !self.is_in_transition(page);
            let request = None;
            let anyway = self.is(Mutant::MapInTransition);
            if self.start(page, Operation::Map { pin, request }) || anyway {
                return sink.act(Action::Map { page, right });
            }
        }
        if let Some(asked) = self.async_faults.get_mut(&page) {
            asked.access = asked.access.max(access);
            return;
        }
        let asked = AsyncFault {
            access,
            since: now,
            asking: Duration::ZERO,
            again: false,
        };
        self.async_faults.insert(page, asked);
        if self.lacks_room(page) {
            return self.wait_for_room(page, sink);
        }
        self.request(page, self.expected(page, access), now, sink);
        if !self.async_faults.contains_key(&page) {
            return sink.act(Action::Count(Count::Local, 1));
        }
        sink.act(Action::Remote {
            page,
            access,
            waiter: None,
        });
        self.ask_back_if_read(page, access, now, sink);
    }

    /// The request for a page was put together by `now`, if it did not wait for room.
    pub fn asked_by(&mut self, page: u64, now: Duration) {
        let waits = self.waits_for_room(page);
        if let Some(asked) = self.async_faults.get_mut(&page)
            && asked.asking.is_zero()
            && !waits
        {
            asked.asking = now.saturating_sub(asked.since);
        }
    }

    /// A page that was asked for longer ago than `patience`.
    pub fn overdue(&self, now: Duration, patience: Duration) -> Option<u64> {
        let late = |(page, asked): (&u64, &AsyncFault)| {
            (now.saturating_sub(asked.since) > patience).then_some(*page)
        };
        self.async_faults.iter().find_map(late)
    }

    /// A page is here as far as it was asked for last: those who wait go on. The
    /// operation that gives it to those who sleep.
    pub(super) fn resolved(
        &mut self,
        page: u64,
        now: Duration,
        sink: &mut impl Sink<B>,
    ) -> Option<Operation> {
        self.subscriptions.answered(page);
        self.end_protection(page);
        if self.returns_right(page) {
            self.set_right(page, Some(Access::Write));
        }
        let forgets = self.is(Mutant::ForgetWaiter);
        for index in 0..self.waiters.len() {
            let Waiter {
                number,
                access,
                granted,
                ..
            } = self.waiters[index];
            if self.waiters[index].page == page && !granted && !forgets {
                let granted = self.hold_again(page, access);
                self.waiters[index].granted = granted;
                let waiter = number;
                sink.act(Action::Wake { waiter, granted });
            }
        }
        let asked = self.async_faults.get_mut(&page)?;
        asked.again = true;
        let (since, asking) = (asked.since, asked.asking);
        let enough = self.rights.allow_use(page, asked.access);
        if enough {
            self.async_faults.remove(&page);
        }
        let right = self.rights.of(page)?;
        sink.act(Action::Map { page, right });
        // What was here at once was not waited for.
        let request = (enough && !asking.is_zero()).then_some(Granted {
            since,
            asking,
            here: now,
        });
        Some(Operation::Map { pin: true, request })
    }

    /// A page is idle again: those who wait for it look.
    pub(super) fn wake_without_page(&mut self, page: u64, sink: &mut impl Sink<B>) {
        let mut waiters = self.waiters.iter();
        let waits = |waiter: &&Waiter| waiter.page == page && !waiter.granted;
        for waiter in waiters.by_ref().filter(waits) {
            sink.act(Action::Wake {
                waiter: waiter.number,
                granted: false,
            });
        }
        if let Some(asked) = self.async_faults.get_mut(&page) {
            asked.again = true;
        }
    }

    /// What users that sleep on a page still want of it.
    pub(super) fn asked_again(
        &mut self,
        page: u64,
        sink: &mut impl Sink<B>,
    ) -> Option<protocol::Event> {
        let rests = self.rests() && !self.is(Mutant::RestRequests);
        let asked = self.async_faults.get_mut(&page)?;
        if !std::mem::take(&mut asked.again) {
            return None;
        }
        let event = fault(page, asked.access, false);
        if rests {
            self.wait_for_room(page, sink);
            return None;
        }
        Some(event)
    }

    /// A page that a thread waits for, or has been given and not used, unless the request is
    /// put off.
    pub(super) fn waits_for_answer(&self) -> Option<u64> {
        let is_put_off = |waiter: &Waiter| !waiter.granted && self.waits_for_room(waiter.page);
        let mut waiters = self.waiters.iter();
        let waiter = waiters.find(|waiter| !is_put_off(waiter));
        waiter.map(|waiter| waiter.page)
    }

    /// Whether a user waits for a page.
    pub(super) fn is_awaited(&self, page: u64) -> bool {
        self.async_faults.contains_key(&page)
            || self.waiters.iter().any(|waiter| waiter.page == page)
    }

    /// Whether a user waits for a page that has not got it.
    pub(super) fn is_waited_for(&self, page: u64) -> bool {
        let waits = |waiter: &Waiter| waiter.page == page && !waiter.granted;
        self.async_faults.contains_key(&page) || self.waiters.iter().any(waits)
    }

    /// Whether a user waits for any page.
    pub(super) fn any_waits(&self) -> bool {
        !self.async_faults.is_empty() || self.waiters.iter().any(|waiter| !waiter.granted)
    }

    fn wait_for_room(&mut self, page: u64, sink: &mut impl Sink<B>) {
        sink.act(Action::Look(Look::Room));
        if !self.room_waits.contains(&page) && !self.is(Mutant::ForgetRoomWait) {
            self.room_waits.push_back(page);
            sink.act(Action::Count(Count::RoomWait, 1));
        }
    }

    /// This node leaves, and asks for nothing. Users wait until it stays.
    pub(super) fn refused_while_leaving(&mut self, page: u64, sink: &mut impl Sink<B>) {
        self.subscriptions.answered(page);
        if self.is_waited_for(page) {
            self.wait_for_room(page, sink);
        }
    }

    /// Requests that wait for room go on, as far as there is some.
    pub(super) fn admit(&mut self, now: Duration, sink: &mut impl Sink<B>) {
        while let Some(page) = self.room_waits.front().copied() {
            if self.lacks_room(page) {
                return;
            }
            self.room_waits.pop_front();
            let waits = |waiter: &&Waiter| waiter.page == page && !waiter.granted;
            let waiters: Vec<u64> = self
                .waiters
                .iter()
                .filter(waits)
                .map(|waiter| waiter.number)
                .collect();
            for waiter in waiters {
                self.fetch(waiter, now, sink);
            }
            self.ask_now(page, now, sink);
        }
    }

    /// Asks the protocol for a page that users sleep on.
    fn ask_now(&mut self, page: u64, now: Duration, sink: &mut impl Sink<B>) {
        let in_transition = self.is_in_transition(page);
        let Some(asked) = self.async_faults.get_mut(&page) else {
            return;
        };
        match in_transition {
            true => asked.again = true,
            false => {
                let event = fault(page, asked.access, false);
                self.carry_out_event(page, event, now, sink);
            }
        }
    }

    /// Asks for the pages behind `page` if this node had them, and it, and is about to
    /// read them again. Others are left alone: to read one ahead would take it from its
    /// writer.
    fn ask_back_if_read(
        &mut self,
        page: u64,
        access: Access,
        now: Duration,
        sink: &mut impl Sink<B>,
    ) {
        if access == Access::Read && self.rights.is_evicted(page) {
            self.ask_for_more(page, now, sink, |this, next| this.rights.is_evicted(next));
        }
    }

    /// Asks for the pages around `page`: a kernel's code lies together, and to read it
    /// takes it from nobody.
    fn ask_for_code(&mut self, page: u64, now: Duration, sink: &mut impl Sink<B>) {
        let first = page - page % CODE_PAGES;
        let room = self.budget.room(self.rights.resident());
        for next in first..first + CODE_PAGES.min(room) {
            let is_here = self.rights.of(next).is_some() || self.is_in_transition(next);
            if self.is_memory(next) && !is_here && next != page {
                self.carry_out_event(next, fault(next, Access::Read, true), now, sink);
            }
        }
    }

    /// Asks for as many pages behind `page` as there is room for, up to the first that is
    /// not wanted.
    fn ask_for_more(
        &mut self,
        page: u64,
        now: Duration,
        sink: &mut impl Sink<B>,
        wanted: impl Fn(&Self, u64) -> bool,
    ) {
        let ahead = self.streams.fault(page);
        let room = self.budget.room(self.rights.resident());
        for next in ahead.from..ahead.from + ahead.count.min(room) {
            if !self.is_memory(next) || self.is_in_transition(next) || !wanted(self, next) {
                return;
            }
            self.carry_out_event(next, fault(next, Access::Read, true), now, sink);
        }
    }
}
