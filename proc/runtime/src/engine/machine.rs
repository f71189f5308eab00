//! The engine's state on one node, and the loop that everything waits in:
//! receive a frame, hand it to the protocol or to the call that waits for it.
//!
//! States of a node: *alone* (home only, before the stretch) → *stretched*. A
//! stretched node is *executing* or *serving*; exactly one node of an aggregate
//! executes, or a jump is on its way.

use core::sync::atomic::{AtomicBool, Ordering};

use weft_dsm::message;
use weft_dsm::{
    Access, Body, Config, Content, Event, ManagerOf, Message as PageMessage, Node, NodeId,
    PAGE_BYTES, Page, Policy as PagePolicy,
};
use weft_jump::Policy;
use weft_proc::boot::{Boot, MAX_NODES};
use weft_proc::context::Context;
use weft_proc::layout::{Kind, PAGE};
use weft_proc::message::Message;
use weft_wire::frame::KINDS_DSM;
use weft_wire::{Header, LinkError, Received, Wake, wait_any};

use super::calls::Collected;
use super::clock;
use super::fault::TOUCHES_MAX;
use super::io::{Failure, Io, ReceivedPages};
use super::room::{Drain, Offers};
use super::tables::FlatTables;
use super::working_set::WorkingSet;
use crate::lock::Lock;
use crate::{log, own_calls};
use weft_dsm::read_ahead::Streams;

/// One stay in this many of a page that nodes in turn read and then write begins
/// write-protected. Each of these costs a fault, which takes
/// a third as long as the pull itself; what it tells (that the page is not
/// written any more, and may be shared again) is worth little while it has one
/// visitor.
const PROBE_EVERY: u8 = 8;

/// The engine of this process; none while alone.
pub static ENGINE: Lock<Option<Engine>> = Lock::new(None);
/// Whether there is one; read without the lock.
pub static STRETCHED: AtomicBool = AtomicBool::new(false);

/// Everything that the lock guards.
pub struct Engine {
    /// What the launcher said.
    pub boot: &'static Boot,
    /// This node; home is 0.
    pub me: usize,
    /// Nodes of the aggregate.
    pub nodes: usize,
    /// The protocol.
    pub core: Node<FlatTables>,
    /// Memory and links.
    pub io: Io,
    /// The context that arrived last, or that is about to leave. One execution
    /// exists, so one is enough.
    pub travelling: &'static mut Context,
    /// Home: the system call that another node is sending.
    pub collected: Collected,
    /// The jump policy, while the execution is here.
    pub policy: Policy,
    /// Sequential faults.
    pub streams: Streams,
    /// What is here, by age.
    pub working_set: WorkingSet,
    /// Where pages leave to make room.
    pub drain: Drain,
    /// Offers of pages that nobody has waited for.
    pub offers: Offers,
    /// Requests under way: pages that will be here soon.
    pub requests: u64,
    /// Ticks when the program was last let go.
    pub left_at: u64,
    /// Ticks when the execution last left.
    pub departed_at: u64,
    /// What a pull took lately, ticks.
    pub pull_ticks: u64,
    /// Home: the node that executes, if it is another.
    pub away: Option<usize>,
    /// A touch of memory that only home has, by the runtime itself.
    pub home_only_touched: bool,
    /// A slice: home's vdso is the same as the one here.
    pub same_vdso: bool,
    /// Home: nodes that have not yet said that they did what they were told.
    pub unsynced: u32,
    /// Runs of first touches.
    pub first_touches: Streams,
    /// Runs of first writes to pages that are here with all rights.
    pub first_writes: Streams,
    /// Each node's budget, pages: the launcher's, but for home's, which changes.
    pub budgets: [u64; MAX_NODES],
}

/// What [`Engine::receive`] found.
pub enum Incoming {
    /// Nothing within the time.
    Timeout,
    /// A signal.
    Interrupted,
    /// A frame of the coherence protocol, dealt with.
    Handled,
    /// A message for the caller, and its payload, valid until the next receive.
    Message(usize, Message, &'static [u8]),
}

/// A number of pages, as the protocol counts them.
pub fn counted(pages: u64) -> u32 {
    u32::try_from(pages).unwrap_or(u32::MAX)
}

impl Engine {
    /// An engine over links and memory that are ready.
    pub fn new(boot: &'static Boot, io: Io) -> own_calls::Result<Engine> {
        let me = boot.node as usize;
        let tables = FlatTables::new(me == 0)?;
        let mut config = Config::new(
            NodeId(me as u8),
            boot.nodes as u8,
            ManagerOf::Fixed(NodeId(0)),
        );
        for (budget, pages) in config.budgets_pages.iter_mut().zip(boot.budget_pages) {
            *budget = counted(pages);
        }
        config.probe_every = PROBE_EVERY;
        let budget = boot.budget_pages[me];
        let window_max = u64::from(boot.read_ahead_pages).min(budget / 32);
        Ok(Engine {
            boot,
            me,
            nodes: boot.nodes as usize,
            core: Node::new(&config, tables),
            io,
            travelling: own_calls::zeroed()?,
            collected: Collected::new()?,
            policy: Policy::new(boot.jump, boot.jump_threshold),
            streams: Streams::new(window_max),
            working_set: WorkingSet::new()?,
            drain: Drain::default(),
            offers: Offers::new(),
            requests: 0,
            left_at: clock::now(),
            departed_at: 0,
            pull_ticks: 0,
            away: None,
            home_only_touched: false,
            same_vdso: false,
            unsynced: 0,
            first_touches: Streams::new(TOUCHES_MAX),
            first_writes: Streams::new(TOUCHES_MAX),
            budgets: boot.budget_pages,
        })
    }

    /// Whether this is home.
    pub fn is_home(&self) -> bool {
        self.me == 0
    }

    /// How long anything may be waited for, nanoseconds.
    pub fn lease_ns(&self) -> u64 {
        u64::from(self.boot.lease_ms) * 1_000_000
    }

    /// This node's budget, pages.
    pub fn budget_pages(&self) -> u64 {
        self.budgets[self.me]
    }

    /// Tells the protocol something and does what it says.
    pub fn step(&mut self, event: Event) {
        self.core.step(event, &mut self.io);
    }

    /// A fault, or the expectation of one. Counts it while it is under way.
    pub fn ask(&mut self, page: u64, access: Access, ahead: bool) {
        let asked = self.core.tables.look(page).pending().is_some();
        self.step(Event::Fault {
            page: Page(page),
            access,
            ahead,
        });
        if !asked && self.core.tables.look(page).pending().is_some() {
            self.requests += 1;
        }
    }

    /// Does what was decided and ends the aggregate if something failed.
    pub fn settle(&mut self) {
        self.io.flush();
        match self.io.failure.take() {
            None => {}
            Some(Failure::Link(node, error)) => self.link_ended(node, error),
            Some(failure) => self.fail(failure),
        }
    }

    /// Waits for one frame.
    pub fn receive(&mut self, timeout_ns: u64, mask: Option<u64>) -> Incoming {
        let nodes = self.nodes;
        let links = &mut self.io.links[..nodes];
        let mut present = links.iter().enumerate().filter(|(_, link)| link.is_some());
        let first = present.next().map(|(node, _)| node);
        let several = present.next().is_some();
        let Some(only) = first else {
            return Incoming::Timeout;
        };
        let from = if several {
            // What was read together with an earlier frame comes first.
            match self.buffered() {
                Some(found) => return found,
                None => match wait_any(&mut self.io.links[..nodes], timeout_ns, mask) {
                    Ok(Wake::Ready(node)) => node,
                    Ok(Wake::Interrupted) => return Incoming::Interrupted,
                    Ok(Wake::Timeout) => return Incoming::Timeout,
                    Err(error) => {
                        self.link_ended(only, error);
                        return Incoming::Handled;
                    }
                },
            }
        } else {
            only
        };
        let Some(link) = &mut self.io.links[from] else {
            return Incoming::Timeout;
        };
        let timeout_ns = if several { 0 } else { timeout_ns };
        let received = link.receive_masked(timeout_ns, mask);
        let taken = match received {
            Ok(Received::Frame(frame)) => Ok((frame.header, frame.payload.as_ptr())),
            Ok(Received::Timeout) => return Incoming::Timeout,
            Ok(Received::Interrupted) => return Incoming::Interrupted,
            Err(error) => Err(error),
        };
        self.took(from, taken)
    }

    fn buffered(&mut self) -> Option<Incoming> {
        for node in 0..self.nodes {
            let Some(link) = &mut self.io.links[node] else {
                continue;
            };
            let taken = match link.try_receive() {
                Ok(None) => continue,
                Ok(Some(frame)) => Ok((frame.header, frame.payload.as_ptr())),
                Err(error) => Err(error),
            };
            return Some(self.took(node, taken));
        }
        None
    }

    fn took(&mut self, from: usize, taken: Result<(Header, *const u8), LinkError>) -> Incoming {
        match taken {
            Ok((header, bytes)) => {
                let incoming = self.dispatch(from, &header, bytes);
                self.count_traffic();
                incoming
            }
            Err(error) => {
                self.link_ended(from, error);
                Incoming::Handled
            }
        }
    }

    /// Brings the traffic counters up to date.
    pub fn count_traffic(&self) {
        let (mut sent, mut received) = (0, 0);
        for link in self.io.links.iter().flatten() {
            let traffic = link.traffic();
            sent += traffic.sent_bytes;
            received += traffic.received_bytes;
        }
        let stats = self.io.stats;
        stats.bytes_sent.store(sent, Ordering::Relaxed);
        stats.bytes_received.store(received, Ordering::Relaxed);
        if self.is_home() {
            for node in 0..self.nodes {
                let owned = u64::from(self.core.owned_pages(NodeId(node as u8)));
                stats.owned_pages[node].store(owned, Ordering::Relaxed);
            }
        }
    }

    fn dispatch(&mut self, from: usize, header: &Header, bytes: *const u8) -> Incoming {
        // SAFETY: the payload lies in the link's buffer and stays until the
        // next receive on it; every user is done with it before that.
        let payload = unsafe { core::slice::from_raw_parts(bytes, header.length as usize) };
        if KINDS_DSM.contains(&header.kind) {
            match message::decode(header) {
                Ok(run) => self.pages(from, run.first, u64::from(run.count), payload),
                Err(_) => self.fail(Failure::Violation(from, "a malformed page message")),
            }
            return Incoming::Handled;
        }
        match Message::decode(header) {
            Ok(Message::Failed { code }) if self.is_home() => self.peer_failed(from, code, payload),
            Ok(message) => Incoming::Message(from, message, payload),
            Err(error) => {
                log::line(format_args!("node {from}: {error}"));
                self.fail(Failure::Violation(from, "a malformed message"))
            }
        }
    }

    /// A run of page messages.
    fn pages(&mut self, from: usize, first: PageMessage, count: u64, payload: &'static [u8]) {
        let content = match first.body {
            Body::Data { content, .. } | Body::Push { content, .. } => content,
            _ => Content::Held,
        };
        self.io.source = from;
        self.io.arrived = (content == Content::Bytes).then_some(ReceivedPages {
            first: first.page.0,
            bytes: payload.as_ptr(),
            length: payload.len(),
        });
        let first_page = first.page.0;
        for page in first_page..first_page + count {
            if matches!(first.body, Body::Get { .. }) {
                self.adopt_file_page(page);
            }
            let message = PageMessage {
                page: Page(page),
                ..first
            };
            let asked = self.core.tables.look(page).pending().is_some();
            self.step(Event::Message {
                from: NodeId(from as u8),
                message,
            });
            if asked && self.core.tables.look(page).pending().is_none() {
                self.requests = self.requests.saturating_sub(1);
            }
        }
        self.io.flush();
        self.io.arrived = None;
        if matches!(
            first.body,
            Body::Data { .. } | Body::Push { .. } | Body::Grant { .. }
        ) {
            self.arrived(first_page, count);
        }
        self.settle();
    }

    /// Pages came: each chunk of them was accessed.
    fn arrived(&mut self, first: u64, count: u64) {
        let mut page = first;
        while page < first + count {
            self.working_set.touch(page);
            page = (Page(page).chunk() + 1) * weft_dsm::CHUNK_PAGES;
        }
    }

    /// A page of a file mapped at home is home's own from the first time that
    /// somebody asks for it.
    fn adopt_file_page(&mut self, page: u64) {
        if !self.is_home() || !self.core.tables.look_entry(page).untouched() {
            return;
        }
        let address = page * PAGE;
        let region = self.io.layout.lookup(address);
        if region.is_some_and(|r| r.kind == Kind::FileReadOnly) {
            self.step(Event::Adopt { page: Page(page) });
        }
    }

    /// The policy of the pages of a region.
    pub fn page_policy(kind: Kind) -> PagePolicy {
        match kind {
            Kind::FileReadOnly => PagePolicy::ReadOnly,
            _ => PagePolicy::Invalidate,
        }
    }

    /// Messages that any node answers whatever else it waits for.
    pub fn serve_aside(&mut self, from: usize, message: Message) {
        match message {
            Message::Vdso { .. }
            | Message::Map { .. }
            | Message::Unmap { .. }
            | Message::Protect { .. }
            | Message::Move { .. }
            | Message::Discard { .. }
                if from == 0 =>
            {
                self.change_layout(&message);
            }
            Message::HomeBudget { pages } if from == 0 => {
                self.budgets[0] = pages.min(self.boot.budget_pages[0]);
            }
            Message::Sync if from == 0 => self.io.send(0, &Message::Synced.header(0), &[]),
            Message::Arrived => {
                let took = clock::now() - self.departed_at;
                self.io.stats.jump_ns.record(clock::ns(took));
            }
            Message::Synced if self.is_home() => self.synced(from),
            Message::Ping { length } => {
                let zeros = [0u8; PAGE_BYTES];
                let length = length as usize;
                self.io
                    .send(from, &Message::Pong.header(length), &[&zeros[..length]]);
            }
            // Of a wait that is over.
            Message::Pong if from == 0 => {}
            Message::Peek { page, count } if from == 0 => self.peek(page, count),
            _ => self.fail(Failure::Violation(from, "an unexpected message")),
        }
    }

    /// A fault, here and now, for the engine's own purposes.
    pub fn fetch(&mut self, page: u64, access: Access) {
        self.io.awaited = page;
        self.io.resolved = false;
        self.ask(page, access, false);
        self.settle();
        self.wait_until("a page", |engine| engine.io.resolved);
    }
}
