//! What the shell keeps under its lock, and the steps of the protocol there.

use std::borrow::Cow;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use weft_dsm::read_ahead::Streams;
use weft_dsm::{Action, Config, Event, Node, Page};
use weft_vcpu::Access;

use super::ahead::AHEAD_PAGES;
use super::asked::Asked;
use super::outbox::Outbox;
use super::standing::Standing;
use super::tables::PageTables;
use super::waiters::Waiter;

/// Changed under the shell's lock alone.
pub(super) struct State {
    pub node: Node<PageTables>,
    pub waiters: Vec<Arc<Waiter>>,
    /// By page: what users asked for and go on without. One entry for each page that
    /// a vCPU faults on.
    pub asked: HashMap<u64, Asked>,
    /// By page: what has to be done about it before anything else.
    pub busy: HashMap<u64, Busy>,
    /// Leaves after the lock was given up.
    pub outbox: Outbox,
    /// First touches one after the other.
    pub streams: Streams,
    /// The page that came last and was never touched before.
    pub fresh: Option<u64>,
    /// Pages that this slice offered to their homes, which have not answered.
    pub leaving: u64,
    /// Pages whose memory may be given back to the host.
    pub vacant: Vec<u64>,
    /// Pages that are kept up to date, which a write elsewhere took.
    pub standing: Standing,
    /// Pages that were asked for and wait for room; each is in `asked`, too.
    pub kept_waiting: VecDeque<u64>,
}

/// A page in the middle of a step.
#[derive(Default)]
pub(super) struct Busy {
    /// What is left of the step; none while a thread is at it.
    pub held_back: Option<Work<'static>>,
    /// What came meanwhile.
    pub events: VecDeque<(Event, Option<Box<[u8]>>)>,
}

/// What is left to do of a step.
#[derive(Default)]
pub(super) struct Work<'a> {
    pub actions: VecDeque<Action>,
    /// The page that came with the message.
    pub bytes: Option<Cow<'a, [u8]>>,
}

impl Work<'_> {
    pub fn owned(self) -> Work<'static> {
        Work {
            actions: self.actions,
            bytes: self.bytes.map(|bytes| Cow::Owned(bytes.into_owned())),
        }
    }
}

impl State {
    /// Of a node of which nothing is known.
    pub fn new(config: &Config, pages: usize) -> Self {
        Self {
            node: Node::new(config, PageTables::new(pages)),
            waiters: Vec::new(),
            asked: HashMap::new(),
            busy: HashMap::new(),
            outbox: Outbox::default(),
            streams: Streams::new(AHEAD_PAGES),
            fresh: None,
            leaving: 0,
            vacant: Vec::new(),
            standing: Standing::default(),
            kept_waiting: VecDeque::new(),
        }
    }

    /// Steps the node; what it says.
    pub fn step<'a>(&mut self, event: Event, bytes: Option<Cow<'a, [u8]>>) -> Work<'a> {
        let mut actions = VecDeque::new();
        self.node
            .step(event, &mut |action| actions.push_back(action));
        Work { actions, bytes }
    }

    /// Wakes those who wait for a page; `grant` says whether they have it.
    pub fn wake(&mut self, page: u64, mut grant: impl FnMut(&Waiter) -> bool) {
        for waiter in self.waiters.iter().filter(|waiter| waiter.page == page) {
            if !waiter.granted() {
                waiter.wake(grant(waiter));
            }
        }
        if let Some(asked) = self.asked.get_mut(&page) {
            asked.again = true;
        }
    }

    /// Whether somebody waits for a page.
    pub fn is_awaited(&self, page: u64) -> bool {
        self.asked.contains_key(&page) || self.waiters.iter().any(|waiter| waiter.page == page)
    }

    /// What is to be looked at next about a page whose last step is done: what came
    /// meanwhile, and then what users still want.
    pub fn next_event(&mut self, page: u64) -> Option<(Event, Option<Box<[u8]>>)> {
        if let Some(busy) = self.busy.get_mut(&page) {
            if let Some(event) = busy.events.pop_front() {
                return Some(event);
            }
            self.busy.remove(&page);
            self.wake(page, |_| false);
        }
        let asked = self.asked.get_mut(&page)?;
        std::mem::take(&mut asked.again).then(|| (fault(page, asked.access), None))
    }
}

pub(super) fn fault(page: u64, access: Access) -> Event {
    Event::Fault {
        page: Page(page),
        access: to_protocol(access),
        ahead: false,
    }
}

pub(super) fn to_protocol(access: Access) -> weft_dsm::Access {
    match access {
        Access::Read => weft_dsm::Access::Read,
        Access::Write => weft_dsm::Access::Write,
    }
}

pub(super) fn from_protocol(access: weft_dsm::Access) -> Access {
    match access {
        weft_dsm::Access::Read => Access::Read,
        weft_dsm::Access::Write => Access::Write,
    }
}
