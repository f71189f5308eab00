//! The coherence controller: everything that one node decides about its pages, around
//! the protocol of [`Node`]. A pure state machine.
//!
//! ```text
//!  a user needs a page ─▶ ┌────────────┐ ─▶ messages, copies of pages
//!  a message came ──────▶ │ Controller │ ─▶ wake-ups
//!  an operation is done ▶ │   ::step   │ ─▶ operations: revoke, map, hide, give back
//!  time passed ─────────▶ └────────────┘ ─▶ what to count, why to end
//! ```
//!
//! [`Controller::step`] takes an [`Event`] and the time, changes the controller, and
//! hands [`Action`]s to a [`Sink`] in order. It knows no thread, clock, socket or mapping;
//! its shell keeps the lock around it and does what it says. `sim` runs
//! several of them by seed.
//!
//! # One page
//!
//! ```text
//!            an action takes the page from its users, which have it pinned
//!        ┌──────────────────────────────────────────▶ deferred ───┐
//!        │                                                        │ the last pin went
//!      idle ◀─── nothing is left ───┐                             ▼
//!        │                          └──────────────────── operation under way
//!        └── an operation is needed ────────────────────────▶ (outside the lock)
//! ```
//!
//! A page that is not idle is *in transition*: messages about it queue up, in order.
//!
//! # Invariants
//!
//! - Exactly one operation is under way about a page in transition that is not deferred,
//!   and none about a page that is idle.
//! - What one step of the protocol says about a page is done before the next event about
//!   that page is looked at.
//! - A right is lowered before the operation begins that takes it from the users, and the
//!   page's bytes are copied after that operation is done.
//! - A page with a pin is not taken. A page that a waiting user was just given has one.
//! - A page that waits for its pins to go gets no new one, except during a visit, and for a
//!   user that has it pinned already.
//! - Memory is given back of pages that no user may use, that are in transition
//!   meanwhile, and whose bytes left with a message or belong to another node.
//! - Each request ends in a wake-up with a pin, in a mapping, or in a report that its page
//!   is lost.

mod absent;
mod budget;
mod cold;
mod drain;
mod events;
mod evict;
mod homes;
mod losses;
mod membership;
mod mutant;
mod pages;
mod pins;
mod precopy;
mod prefetch;
mod relocation;
mod requests;
mod rest;
mod rights;
mod save;
pub mod sim;
mod split;
mod subscriptions;
mod transition;

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::config::{Config, ManagerOf};
use crate::node::Node;
use crate::protocol::{self, Refusal};
use crate::read_ahead::Streams;
use crate::state::Tables;
use crate::types::{Access, Page};

pub use budget::{Budget, Clock, Passed};
pub use cold::ColdLook;
pub use drain::{DrainPlan, DrainProgress, DrainTarget};
pub use events::{
    Action, Bytes, Count, Event, Failure, Look, PrefetchList, PrefetchRun, Purpose, Sink,
};
pub use homes::Homes;
pub use membership::{Holdings, ManagerRun, ManagerRunError};
pub use pins::Pins;
pub use precopy::PrecopyProgress;
pub use prefetch::{UNDER_WAY_MAX, WAITED_MAX};
pub use relocation::{RelocatedRun, RelocationError};
pub use rest::{RestReport, Unrest, unrest};
pub use rights::Rights;
pub use save::SaveProgress;
pub use split::{BINS, Choice, Histogram, Threshold, thresholds};

use drain::Drain;
use mutant::Mutant;
use precopy::Precopies;
use prefetch::Prefetches;
use requests::{AHEAD_PAGES, AsyncFault, Waiter};
use rest::{Counted, Traffic};
use save::Saves;
use subscriptions::Subscriptions;
use transition::Transition;

/// The controller of one node. `B`: bytes of a page that the shell keeps.
pub struct Controller<T, B> {
    node: Node<T>,
    rights: Arc<Rights>,
    pins: Arc<Pins>,
    homes: Arc<Homes>,
    budget: Budget,
    /// Pages that are memory.
    parts: Vec<Range<u64>>,
    /// Pages in transition. In order, so that a seed replays.
    transitions: BTreeMap<u64, Transition<B>>,
    waiters: Vec<Waiter>,
    /// By page: what users that do not wait here asked for.
    async_faults: BTreeMap<u64, AsyncFault>,
    /// Pages that were asked for and wait for room.
    room_waits: VecDeque<u64>,
    subscriptions: Subscriptions,
    prefetches: Prefetches,
    /// First touches one after the other.
    streams: Streams,
    /// The page that came last and was never touched before.
    fresh: Option<u64>,
    /// Pages that this node offered to their homes, which have not answered.
    leaving: u64,
    /// Pages whose memory may be given back to the host.
    vacant: Vec<u64>,
    /// The drain that is under way.
    drain: Option<Drain>,
    drained: DrainProgress,
    precopies: Precopies,
    saves: Saves,
    /// Which target of a split a page goes to, while one is under way.
    choice: Option<Choice>,
    /// The hand-overs of this node are over, since it was told to hold.
    quiet: bool,
    /// Nothing is begun: see `rest`.
    rests: bool,
    traffic: Traffic,
    #[cfg(test)]
    mutant: Option<Mutant>,
}

impl<T: Tables, B> Controller<T, B> {
    /// Of a node that has nothing yet. `parts`: pages that are memory.
    pub fn new(
        config: &Config,
        tables: T,
        rights: Arc<Rights>,
        pins: Arc<Pins>,
        budget: Budget,
        parts: Vec<Range<u64>>,
    ) -> Self {
        let own = match config.manager {
            ManagerOf::Ranges(ranges) => ranges.of(config.me),
            ManagerOf::Fixed(node) if node == config.me => 0..u64::MAX,
            ManagerOf::Fixed(_) | ManagerOf::Interleaved => 0..0,
        };
        let end = parts.iter().map(|part| part.end).max().unwrap_or(0);
        Self {
            homes: Homes::new(own, end).into(),
            node: Node::new(config, tables),
            rights,
            pins,
            budget,
            parts,
            transitions: BTreeMap::new(),
            waiters: Vec::new(),
            async_faults: BTreeMap::new(),
            room_waits: VecDeque::new(),
            subscriptions: Subscriptions::default(),
            prefetches: Prefetches::default(),
            streams: Streams::new(AHEAD_PAGES),
            fresh: None,
            leaving: 0,
            vacant: Vec::new(),
            drain: None,
            drained: DrainProgress::default(),
            precopies: Precopies::default(),
            saves: Saves::default(),
            choice: None,
            quiet: false,
            rests: false,
            traffic: Traffic::default(),
            #[cfg(test)]
            mutant: None,
        }
    }

    /// Handles one event. `now` never goes back.
    pub fn step(&mut self, event: Event, now: Duration, sink: &mut impl Sink<B>) {
        let sent = std::mem::take(&mut self.traffic.sent);
        let mut counted = Counted { sink, sent };
        if let Event::Message { from, .. } = event {
            self.count_received(from);
        }
        let left = match event {
            Event::Member { node, standing } => Some((node, standing)),
            _ => None,
        };
        self.handle(event, now, &mut counted);
        self.traffic.sent = counted.sent;
        if let Some((node, standing)) = left {
            self.forget_traffic(node, standing);
        }
    }

    fn handle(&mut self, event: Event, now: Duration, sink: &mut impl Sink<B>) {
        match event {
            Event::Message { from, message } => self.message(from, message, now, sink),
            Event::Acquire {
                waiter,
                page,
                access,
                purpose,
            } => {
                self.waiters
                    .push(Waiter::new(waiter, page, access, purpose));
                self.fetch(waiter, now, sink);
            }
            Event::Retry { waiter } => self.fetch(waiter, now, sink),
            Event::Leave { waiter } => self.leave(waiter, now, sink),
            Event::Ask { page, access } => self.ask(page, access, now, sink),
            Event::Hide { page } => self.hide(page, sink),
            Event::Done { page } => self.done(page, now, sink),
            Event::GaveBack { first, count } => {
                for page in first..first + count {
                    self.done(page, now, sink);
                }
                sink.act(Action::Count(Count::GivenBack, count));
                self.admit(now, sink);
            }
            Event::Evict(passed) => self.evict(passed, now, sink),
            Event::MakeRoom => {
                self.give_back(sink);
                self.admit(now, sink);
            }
            Event::Tick => {
                self.look_at_save(now);
                self.look_at_deferred(now, sink);
                self.look_at_subscriptions(now, sink);
            }
            Event::Prefetch { user, list } => self.begin_prefetch(user, list),
            Event::EndPrefetch { user } => self.end_prefetch(user),
            Event::HoldPrefetches => self.hold_prefetches(true),
            Event::ResumePrefetches => self.hold_prefetches(false),
            Event::Rest => self.rest(),
            Event::EndRest => self.end_rest(now, sink),
            Event::PeerLost { node } => self.peer_lost(node, now, sink),
            Event::Hold => self.hold_managers(sink),
            Event::Resume => self.resume_managers(),
            Event::Member { node, standing } => self.member(node, standing, now, sink),
            Event::Drain => return self.go_on_draining(now, sink),
            Event::Precopy => return self.go_on_precopying(now, sink),
        }
        self.look_at_prefetches(now, sink);
        self.look_at_drain(sink);
    }

    /// Makes a page this node's own, as it lies in memory. Before any other node runs, at
    /// the node that manages it.
    ///
    /// # Errors
    /// Why the protocol refused.
    pub fn adopt(&mut self, page: u64) -> Result<(), Refusal> {
        let event = protocol::Event::Adopt { page: Page(page) };
        match self.step_node(event).front() {
            Some(protocol::Action::Refused { reason, .. }) => Err(*reason),
            _ => {
                self.set_right(page, Some(Access::Write));
                Ok(())
            }
        }
    }

    /// Pins a page if it may be used now. False also for a page that waits for its pins to
    /// go: users that pin it in turns would keep it for ever. A user that has the page
    /// pinned already calls [`Controller::hold_again`].
    pub fn hold(&mut self, page: u64, access: Access) -> bool {
        !self.waits_for_pins(page) && self.hold_again(page, access)
    }

    /// Pins a page once more for a user that has it pinned, if it may be used so.
    pub fn hold_again(&mut self, page: u64, access: Access) -> bool {
        self.rights.allow_use(page, access) && self.pins.add(page)
    }

    /// Pins all of these pages, or none. `has_pinned`: whether the user has a page pinned.
    pub fn hold_all(
        &mut self,
        pages: impl Iterator<Item = u64> + Clone,
        access: Access,
        has_pinned: impl Fn(u64) -> bool,
    ) -> bool {
        let hold = |page: &u64| match has_pinned(*page) {
            true => self.hold_again(*page, access),
            false => self.hold(*page, access),
        };
        let held = pages.clone().take_while(hold);
        let held = held.count();
        let all = pages.clone().count() == held;
        if !all {
            pages.take(held).for_each(|page| self.pins.remove(page));
        }
        all
    }

    /// The protocol's records.
    pub fn tables(&mut self) -> &mut T {
        &mut self.node.tables
    }

    /// The pages that this node manages.
    pub fn homes(&self) -> Arc<Homes> {
        self.homes.clone()
    }

    /// How many pages this node may fill.
    pub fn budget(&self) -> Budget {
        self.budget
    }

    /// Changes how many pages this node may fill, before it is handed pages to manage, or
    /// after it handed some over.
    pub fn set_budget(&mut self, budget: Budget) {
        self.budget = budget;
    }

    /// Pages that should be evicted now: then [`Clock::pass`] and [`Event::Evict`].
    pub fn wanted(&self) -> usize {
        if self.rests() && !self.is(Mutant::RestEvicts) {
            return 0;
        }
        self.budget.wanted(self.rights.resident(), self.leaving)
    }

    /// Whether a request for a page waits for room.
    pub fn waits_for_room(&self, page: u64) -> bool {
        self.room_waits.contains(&page)
    }

    /// How long until there is something to do that only [`Event::Tick`] does.
    pub fn deadline(&self, now: Duration) -> Option<Duration> {
        let due = self.subscriptions.next_due();
        let due = due.filter(|_| !self.rests());
        let due = due.map(|due| due.saturating_sub(now));
        let pin = self.pins.next_end(now).filter(|_| self.pins.has_deferred());
        [due, pin].into_iter().flatten().min()
    }

    fn step_node(&mut self, event: protocol::Event) -> VecDeque<protocol::Action> {
        let mut actions = VecDeque::new();
        let mut sink = |action| actions.push_back(action);
        self.node.step(event, &mut sink);
        actions
    }

    fn is_memory(&self, page: u64) -> bool {
        self.parts.iter().any(|part| part.contains(&page))
    }

    /// Whether a page has to wait until others are gone, until this node stays, or until its
    /// rest ends.
    fn lacks_room(&self, page: u64) -> bool {
        let rests = self.rests() && !self.is(Mutant::RestRequests);
        if self.is_leaving() || rests {
            return true;
        }
        let full = self.rights.resident() >= self.budget.pages();
        full && !self.rights.used(page) && !self.is(Mutant::NoBudget)
    }

    #[cfg(test)]
    fn is(&self, mutant: Mutant) -> bool {
        self.mutant == Some(mutant)
    }

    #[cfg(not(test))]
    const fn is(&self, _: Mutant) -> bool {
        false
    }
}

#[cfg(test)]
mod tests;
