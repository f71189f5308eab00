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
//!        ┌──────────────────────────────────────────▶ held back ──┐
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
//! - Exactly one operation is under way about a page in transition that is not held
//!   back, and none about a page that is idle.
//! - What one step of the protocol says about a page is done before the next event about
//!   that page is looked at.
//! - A right is lowered before the operation begins that takes it from the users, and the
//!   page's bytes are copied after that operation is done.
//! - A page with a pin is not taken. A page that a waiting user was just given has one.
//! - Memory is given back of pages that no user may use, that are in transition
//!   meanwhile, and whose bytes left with a message or belong to another node.
//! - Each request ends in a wake-up with a pin, or in a mapping.

mod budget;
mod evict;
mod pages;
mod pins;
mod requests;
mod rights;
pub mod sim;
mod subscriptions;

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::node::Node;
use crate::protocol::{self, Message, Refusal};
use crate::read_ahead::Streams;
use crate::state::Tables;
use crate::types::{Access, Config, NodeId, Page};

pub use budget::{Budget, Clock, Passed};
pub use pins::Pins;
pub use rights::Rights;

use pages::Transition;
use requests::{AHEAD_PAGES, Asked, Waiter};
use subscriptions::Subscriptions;

/// What a user wants a page for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Anything else.
    Data,
    /// A walk through page tables.
    Table,
    /// Instructions of a kernel.
    KernelCode,
}

/// What happened.
#[derive(Debug)]
pub enum Event {
    /// A message came. Its bytes, if any, stay with the shell until [`Action::Fill`] or
    /// [`Sink::keep`].
    Message { from: NodeId, message: Message },
    /// A thread needs a page and waits for it. Answered by [`Action::Wake`].
    Acquire {
        /// A number that no other waiting thread has.
        waiter: u64,
        page: u64,
        access: Access,
        purpose: Purpose,
    },
    /// A waiting thread was woken without its page.
    Retry {
        /// Its number.
        waiter: u64,
    },
    /// A thread that waited goes on, with its page or because all is over.
    Leave {
        /// Its number.
        waiter: u64,
    },
    /// A user needs a page and sleeps until it is mapped. Answered by [`Action::Map`].
    Ask { page: u64, access: Access },
    /// The users are to ask for a page before they use it next.
    Hide { page: u64 },
    /// The operation about a page is done.
    Done { page: u64 },
    /// The memory of pages was given back.
    GaveBack {
        /// The first page.
        first: u64,
        /// How many.
        count: u64,
    },
    /// The clock's hand moved: pages may be evicted.
    Evict(Passed),
    /// Memory of vacant pages may be given back, and requests that wait for room go on.
    MakeRoom,
    /// Time passed, or a pin went.
    Tick,
}

/// The bytes of a page that came.
#[derive(Debug, PartialEq, Eq)]
pub enum Bytes<B> {
    /// Those that came with the event.
    Arrived,
    /// Those that [`Sink::keep`] gave.
    Kept(B),
}

/// What the shell must do, in this order. The first three are done at once, under the
/// lock; all others after it.
#[derive(Debug, PartialEq, Eq)]
pub enum Action<B> {
    /// Fill the memory of a page.
    Fill {
        page: u64,
        /// With what.
        bytes: Bytes<B>,
    },
    /// Fill the memory of a page with zeros.
    Zero {
        page: u64,
    },
    /// Send a message, behind all others for that node. If it carries bytes, those that
    /// the page has now.
    Send {
        to: NodeId,
        message: Message,
    },
    /// An operation: take a page from all users, down to what is `kept`; then
    /// [`Event::Done`].
    Revoke {
        page: u64,
        /// What they may still do.
        kept: Option<Access>,
    },
    /// An operation: have the users use a page; then [`Event::Done`].
    Map {
        page: u64,
        /// As far as this.
        right: Access,
    },
    /// An operation: take a page out of the users' mapping, as it stays; then
    /// [`Event::Done`].
    Hide {
        page: u64,
    },
    /// An operation: give the memory of pages back to the host; then
    /// [`Event::GaveBack`].
    GiveBack {
        /// The first page.
        first: u64,
        /// How many.
        count: u64,
    },
    /// The users are to ask for a page before they use it next, at any time: it is not
    /// waited for, and a user may be given the page meanwhile.
    Watch {
        page: u64,
    },
    /// Wake a waiting thread.
    Wake {
        /// Its number.
        waiter: u64,
        /// It has the page, pinned. If not: [`Event::Retry`].
        granted: bool,
    },
    /// A thread has something to do.
    Look(Look),
    /// A request goes to another node.
    Remote {
        page: u64,
        access: Access,
        /// The thread that waits, unless users sleep on it.
        waiter: Option<u64>,
    },
    /// A page that a write elsewhere took is asked for again before a fault.
    Renew {
        page: u64,
    },
    /// A page that was asked for is mapped.
    Waited {
        /// When it was asked for.
        since: Duration,
        /// How long it took to ask.
        asking: Duration,
        /// When it was here.
        here: Duration,
    },
    Count(Count, u64),
    /// The memory cannot go on.
    Fail(Failure),
}

/// Which thread has something to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// The one that ticks: [`Controller::deadline`] changed, or a pin may have gone.
    Tick,
    /// The one that makes room.
    Room,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    /// Requests that were settled here.
    Local,
    /// Pages that were not taken because they were pinned.
    HeldBack,
    /// Copies that were evicted.
    EvictedDropped,
    /// Pages that went home.
    EvictedSent,
    /// Pages that home could not take at the moment.
    EvictionDenied,
    /// Pages whose memory was given back.
    GivenBack,
    /// Requests that had to wait for room.
    RoomWait,
}

/// Why the memory cannot go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// A message about a page that there is not.
    #[error("{from} speaks of page {page:#x}, which is no memory")]
    NoMemory {
        from: NodeId,
        /// About which.
        page: u64,
    },
    /// A page without its bytes.
    #[error("page {page:#x} came without its bytes")]
    NoBytes { page: u64 },
    /// The only copy of a page died.
    #[error("page {page:#x} was lost with {node}")]
    Lost {
        page: u64,
        /// With whom.
        node: NodeId,
    },
    /// A message that no correct node sends.
    #[error("{from} broke the protocol about page {page:#x}: {what}")]
    Violation {
        from: NodeId,
        /// About which page.
        page: u64,
        /// What was wrong.
        what: &'static str,
    },
    /// The protocol refused what this node asked.
    #[error("the protocol refused a request for page {page:#x}: {reason}")]
    Refused {
        page: u64,
        /// Why.
        reason: Refusal,
    },
}

/// The shell's side of a step.
pub trait Sink<B> {
    fn act(&mut self, action: Action<B>);
    /// Keeps the bytes that came with the event, because their page is in transition.
    fn keep(&mut self) -> B;
}

/// Ways to be wrong on purpose: the simulator must find each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutant {
    /// Takes a page although it is pinned.
    IgnorePins,
    /// Does not wait until the users gave the page up.
    RevokeLate,
    /// Leaves the right as it was while the users give the page up.
    KeepRight,
    /// Looks at messages about a page in transition at once.
    NoQueue,
    /// Forgets what queued up behind an operation.
    ForgetQueue,
    /// Looks at the youngest message about a page first.
    QueueBackwards,
    /// Maps a page while it is being taken.
    MapInTransition,
    /// Wakes no waiting thread when its page comes.
    ForgetWaiter,
    /// Forgets a request that waits for room.
    ForgetRoomWait,
    /// Gives memory back of pages that are in use.
    GiveBackUsed,
    /// Does not put pages in transition while their memory is given back.
    GiveBackAnyTime,
    /// Never waits for room.
    NoBudget,
    /// Lets the page that a write elsewhere took be read on.
    KeepOutdated,
    /// Asks again for a page that no user looks at, for ever.
    NeverUnsubscribe,
}

/// The controller of one node. `B`: bytes of a page that the shell keeps.
pub struct Controller<T, B> {
    node: Node<T>,
    rights: Arc<Rights>,
    pins: Arc<Pins>,
    budget: Budget,
    /// Pages that are memory.
    parts: Vec<Range<u64>>,
    /// Pages in transition. In order, so that a seed replays.
    transitions: BTreeMap<u64, Transition<B>>,
    waiters: Vec<Waiter>,
    /// By page: what users that do not wait here asked for.
    asked: BTreeMap<u64, Asked>,
    /// Pages that were asked for and wait for room.
    room_waits: VecDeque<u64>,
    subscriptions: Subscriptions,
    /// First touches one after the other.
    streams: Streams,
    /// The page that came last and was never touched before.
    fresh: Option<u64>,
    /// Pages that this node offered to their homes, which have not answered.
    leaving: u64,
    /// Pages whose memory may be given back to the host.
    vacant: Vec<u64>,
    #[cfg(test)]
    pub(crate) mutant: Option<Mutant>,
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
        Self {
            node: Node::new(config, tables),
            rights,
            pins,
            budget,
            parts,
            transitions: BTreeMap::new(),
            waiters: Vec::new(),
            asked: BTreeMap::new(),
            room_waits: VecDeque::new(),
            subscriptions: Subscriptions::default(),
            streams: Streams::new(AHEAD_PAGES),
            fresh: None,
            leaving: 0,
            vacant: Vec::new(),
            #[cfg(test)]
            mutant: None,
        }
    }

    /// Handles one event. `now` never goes back.
    pub fn step(&mut self, event: Event, now: Duration, sink: &mut impl Sink<B>) {
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
                self.let_in(now, sink);
            }
            Event::Evict(passed) => self.evict(passed, now, sink),
            Event::MakeRoom => {
                self.give_back(sink);
                self.let_in(now, sink);
            }
            Event::Tick => {
                self.look_at_held_back(now, sink);
                self.look_at_subscriptions(now, sink);
            }
        }
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
                self.rights.set(page, Some(Access::Write));
                Ok(())
            }
        }
    }

    /// Pins a page if it may be used now.
    pub fn hold(&mut self, page: u64, access: Access) -> bool {
        self.rights.allow_use(page, access) && self.pins.add(page)
    }

    /// Pins all of these pages if they may be used now, or none.
    pub fn hold_all(&mut self, pages: impl Iterator<Item = u64> + Clone, access: Access) -> bool {
        let held = pages.clone().take_while(|page| self.hold(*page, access));
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

    /// Pages that should be evicted now: then [`Clock::pass`] and [`Event::Evict`].
    pub fn wanted(&self) -> usize {
        self.budget.wanted(self.rights.resident(), self.leaving)
    }

    /// Whether a request for a page waits for room.
    pub fn waits_for_room(&self, page: u64) -> bool {
        self.room_waits.contains(&page)
    }

    /// How long until there is something to do that only [`Event::Tick`] does.
    pub fn deadline(&self, now: Duration) -> Option<Duration> {
        let due = self.subscriptions.next_due();
        let due = due.map(|due| due.saturating_sub(now));
        let pin = self.pins.next_end(now).filter(|_| self.pins.hold_back());
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

    /// Whether a page has to wait until others are gone.
    fn lacks_room(&self, page: u64) -> bool {
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
