//! Making room: the thread that gives pages back to the host when there are many.
//!
//! A page goes in one of three ways, the cheapest first:
//!
//! - *Vacant* memory, of pages that other slices took, costs nobody anything.
//! - A *copy* is dropped; its owner has the page.
//! - A page that this slice *owns* goes home, to the slice in whose part of RAM it
//!   lies: there, nobody evicts it.
//!
//! Pages of the slice's own part of RAM stay. Of the others those go that were not
//! used since the hand passed them last (a second chance): `REFERENCED` in `tables`.
//!
//! Invariants:
//!
//! - Memory is given back under the shell's lock, of pages that nobody here may use
//!   and about which nothing is to be done; the bytes that leave were copied.
//! - A page that is pinned or busy is no victim.
//! - Nothing here waits for another slice; the offers that are under way are counted.

use std::time::Duration;

use weft_dsm::{Action, Body, Event, Page, Tables};

use super::counters::MemoryCounters;
use super::shell::{Guard, PAGE_SHIFT, SharedMemory};
use super::state::fault;
use super::tables::Use;

/// Pages that are evicted at a time.
const BATCH: usize = 64;
/// Pages that are looked at to find them: among those, copies go first.
const WINDOW: usize = 2 * BATCH;
/// Pages in use that the hand passes at a time: the users are told about each, and the
/// shell's lock is held meanwhile.
const PASSED_MAX: usize = 4 * WINDOW;
/// How often the evictor looks when nobody calls.
const IDLE_LOOK: Duration = Duration::from_millis(500);
/// How long it waits for answers of other slices, or for pins to end.
const ANSWER_LOOK: Duration = Duration::from_millis(1);

/// Pages that the hand passed.
#[derive(Default)]
struct Passed {
    vacant: Vec<u64>,
    used: Vec<u64>,
    unused: Vec<u64>,
}

impl SharedMemory {
    /// The thread that keeps the memory within its budget; runs until the machine is
    /// over.
    pub fn keep_to_budget(&self) {
        self.room.serve();
        let mut hand = 0;
        while !self.is_over() {
            if self.rights.resident() > self.budget.high() {
                self.make_room(&mut hand);
            }
            self.give_back();
            self.let_in();
            self.room.wait_for_call(IDLE_LOOK);
        }
        self.room.tell();
    }

    fn make_room(&self, hand: &mut u64) {
        while self.is_tight() && !self.is_over() {
            let before = self.rights.resident();
            self.give_back();
            let leaving = self.lock().leaving;
            let many = before.saturating_sub(self.budget.low());
            let wanted = many.saturating_sub(leaving).min(BATCH as u64) as usize;
            let mut more = false;
            if wanted > 0 {
                more = self.evict_some(hand, wanted);
                self.give_back();
            }
            self.let_in();
            if self.rights.resident() >= before && !more {
                self.room.wait_for_call(ANSWER_LOOK);
            }
        }
    }

    /// Moves the hand on until it has passed enough pages, once around at most.
    fn pass(&self, hand: &mut u64) -> Passed {
        let mut passed = Passed::default();
        let end = self.end >> PAGE_SHIFT;
        let mut left = end;
        while left > 0
            && passed.unused.len() + passed.vacant.len() < WINDOW
            && passed.used.len() < PASSED_MAX
        {
            if *hand >= end {
                *hand = 0;
            }
            let page = *hand;
            match self.rights.pass(page, !self.own.contains(&page)) {
                Use::None => {}
                Use::Vacant => passed.vacant.push(page),
                Use::Recent => passed.used.push(page),
                Use::Old => passed.unused.push(page),
            }
            *hand += 1;
            left -= 1;
        }
        passed
    }

    /// Evicts so many pages at most; whether those that the hand passed may go when it
    /// comes by again.
    fn evict_some(&self, hand: &mut u64, wanted: usize) -> bool {
        let Passed {
            vacant,
            used,
            unused,
        } = self.pass(hand);
        let mut state = self.lock();
        state.vacant.extend(vacant);
        for page in &used {
            self.watch_for_use(*page);
        }
        let (mut victims, mut owned) = (Vec::new(), Vec::new());
        for page in unused {
            match state.node.tables.local(Page(page)).owner() {
                true => owned.push(page),
                false => victims.push(page),
            }
        }
        victims.extend(owned);
        victims.truncate(wanted);
        for page in victims {
            state = self.evict(state, page);
        }
        !used.is_empty()
    }

    /// Has the users come by when they use a page next.
    fn watch_for_use(&self, page: u64) {
        if let (Some(_), Some(users)) = (self.rights.of(page), self.users.get())
            && let Err(error) = users.watch_for_use(page << PAGE_SHIFT)
        {
            self.fail(format!("a page could not be watched for use: {error}"));
        }
    }

    fn evict<'a>(&'a self, mut state: Guard<'a>, page: u64) -> Guard<'a> {
        let local = *state.node.tables.local(Page(page));
        let home = state.node.manager_of(Page(page));
        let stays = !local.evictable()
            || local.owner() && home == state.node.me()
            || state.busy.contains_key(&page)
            || self.pins.hold(page);
        if stays {
            return state;
        }
        let event = Event::Evict {
            page: Page(page),
            to: local.owner().then_some(home),
        };
        let mut work = state.step(event, None);
        match work.actions.front() {
            // Not now: this slice is at work with the page as its manager.
            Some(Action::Refused { .. }) => work.actions.clear(),
            Some(Action::Drop { .. }) => {
                MemoryCounters::add(&self.counters.evicted_dropped, 1);
                state = self.carry_out(state, page, work);
                self.rights.mark_evicted(page);
                state.vacant.push(page);
                return state;
            }
            Some(Action::Send { message, .. }) if matches!(message.body, Body::Offer { .. }) => {
                state.leaving += 1;
            }
            _ => {}
        }
        self.carry_out(state, page, work)
    }

    /// Gives the memory of vacant pages back to the host.
    fn give_back(&self) {
        let mut state = self.lock();
        let mut vacant = std::mem::take(&mut state.vacant);
        vacant.retain(|page| self.rights.is_vacant(*page) && !state.busy.contains_key(page));
        vacant.sort_unstable();
        vacant.dedup();
        for run in vacant.chunk_by(|page, next| page + 1 == *next) {
            let address = run[0] << PAGE_SHIFT;
            if let Err(error) = self.ram().give_back(address, run.len() << PAGE_SHIFT) {
                self.fail(format!("memory cannot be given back to the host: {error}"));
                return;
            }
            for page in run {
                self.rights.forget(*page);
            }
        }
        MemoryCounters::add(&self.counters.given_back, vacant.len() as u64);
    }

    /// Whoever waits for room goes on, as far as there is some.
    fn let_in(&self) {
        self.room.tell();
        let mut state = self.lock();
        while let Some(page) = state.kept_waiting.front().copied() {
            if self.lacks_room(page) && !self.is_over() {
                return;
            }
            state.kept_waiting.pop_front();
            state = self.ask_now(state, page);
        }
    }

    /// Asks the protocol for a page that was asked for while there was no room.
    fn ask_now<'a>(&'a self, mut state: Guard<'a>, page: u64) -> Guard<'a> {
        let busy = state.busy.contains_key(&page);
        let Some(asked) = state.asked.get_mut(&page) else {
            return state;
        };
        // Whoever is at the page asks when he is done.
        asked.again |= busy;
        let access = asked.access;
        if self.rights.allow_use(page, access) {
            self.grant_asked(&mut state, page);
        } else if !busy {
            let work = state.step(fault(page, access), None);
            state = self.carry_out(state, page, work);
        }
        state
    }
}
