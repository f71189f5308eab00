//! Seeded simulator of controllers: several nodes whose users read and write at random,
//! operations that take any time, frames that leave after the lock, links that overtake
//! each other, budgets far below what is used, subscriptions. The seed decides
//! everything, time included, so a seed replays a run exactly.
//!
//! The judges look at what anybody can see: what users have mapped, which bytes are in
//! memory, which threads hold a page, what is answered. They do not ask the controller.
//!
//! 1. While a node may write a page, no other may read it.
//! 2. What a node may read is what was written last; so a copy that a subscription
//!    brought is never older than what was read before.
//! 3. A page that a thread holds is not taken from it, and its memory stays.
//! 4. No page is filled, zeroed or given back under its users.
//! 5. A node fills no more memory than its budget and what it had asked for.
//! 6. A subscription brings no more than a few copies that no user looks at.
//! 7. When nothing is in flight, each request was answered, each page has exactly one
//!    owner, and each page can be read, everywhere, with its last bytes.

mod host;

use std::collections::VecDeque;
use std::time::Duration;

use super::{Controller, Event, Purpose, Rights};
use crate::checker::{Flaw, Frame, Judge, ZERO_VERSION, idle_node};
use crate::protocol::Message;
use crate::ranges::Ranges;
use crate::sim::{Failure, Random};
use crate::state::{Phase, VecTables};
use crate::types::{Access, Config, ManagerOf, NodeId, Page, Policy};

use super::Budget;
use host::{Host, Kind, Operation, Thread};

/// Events that a failure shows.
const SHOWN_MAX: usize = 60;
/// No run takes more steps than this after the users have stopped.
const DRAIN_STEPS_MAX: u32 = 200_000;
/// Threads and sleepers of a node at a time.
const USERS_MAX: usize = 4;
/// Pages beyond its budget that a node may fill: what was asked for ahead of its users.
const AHEAD_MAX: usize = 16;

/// What a run did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Events that controllers handled.
    pub events: u64,
    /// Messages that were delivered.
    pub messages: u64,
    /// Reads and writes of users.
    pub accesses: u64,
    /// Operations that were carried out outside the lock.
    pub operations: u64,
    /// Pages that were not taken because they were pinned.
    pub held_back: u64,
    /// Pages that were evicted.
    pub evicted: u64,
    /// Pages whose memory was given back.
    pub given_back: u64,
    /// Requests that waited for room.
    pub room_waits: u64,
    /// Pages that were asked for by a subscription.
    pub subscriptions: u64,
}

impl Outcome {
    /// Adds what another run did.
    pub fn add(&mut self, other: &Outcome) {
        self.events += other.events;
        self.messages += other.messages;
        self.accesses += other.accesses;
        self.operations += other.operations;
        self.held_back += other.held_back;
        self.evicted += other.evicted;
        self.given_back += other.given_back;
        self.room_waits += other.room_waits;
        self.subscriptions += other.subscriptions;
    }
}

/// What a seed stands for.
#[derive(Debug, Clone)]
pub struct Scenario {
    nodes: u8,
    pages: u64,
    /// The first pages are used more often than all others.
    hot_pages: u64,
    /// Per mille of accesses to those.
    hot: u64,
    manager: ManagerOf,
    budgets: Vec<Budget>,
    /// By node, whether its users sleep until their page is mapped.
    kinds: Vec<Kind>,
    steps: u32,
    /// Per mille of accesses to one page after the other.
    walks: u64,
    /// Per mille of accesses that write.
    writes: u64,
    /// Pages that are kept up to date, a bit for each of the first.
    updated: u64,
    /// Longest time between two steps.
    tick_max: Duration,
    /// Per mille of its turns in which the thread that makes room runs, until the users
    /// have stopped.
    evictor: u64,
}

impl Scenario {
    /// The scenario of a seed.
    pub fn from_seed(seed: u64) -> Scenario {
        let mut random = Random::new(seed ^ 0xC0_47A0);
        let nodes = 2 + random.below(3) as u8;
        let pages = 4 + random.below(200);
        let kinds = (0..nodes)
            .map(|_| match random.per_mille(500) {
                true => Kind::Sleeps,
                false => Kind::Waits,
            })
            .collect();
        let mut ends: Vec<u64> = (1..nodes).map(|_| random.below(pages)).collect();
        ends.push(pages);
        ends.sort_unstable();
        let small = random.per_mille(600);
        let ranges = Ranges::new(&ends).ok().filter(|_| small);
        let fixed = ManagerOf::Fixed(NodeId(random.below(u64::from(nodes)) as u8));
        let mut budgets = vec![Budget::UNLIMITED; nodes.into()];
        if ranges.is_some() {
            let starts = std::iter::once(0).chain(ends.iter().copied());
            let others = 1 + random.below(32);
            let own = starts.zip(&ends).map(|(start, end)| end - start);
            budgets = own.map(|own| Budget::new(own, others)).collect();
        }
        Scenario {
            nodes,
            pages,
            hot_pages: 1 + random.below(6),
            hot: [500, 950][random.below(2) as usize],
            manager: ranges.map_or(fixed, ManagerOf::Ranges),
            budgets,
            kinds,
            steps: 300 + random.below(1500) as u32,
            walks: [0, 100, 900][random.below(3) as usize],
            writes: random.below(1000),
            updated: match random.per_mille(400) {
                true => random.bits(),
                false => 0,
            },
            tick_max: Duration::from_nanos(1 + random.below(60_000)),
            evictor: [0, 20, 200, 1000][random.below(4) as usize],
        }
    }
}

/// Runs a seed.
///
/// # Errors
/// What a judge found, with the seed and the last events.
pub fn run(seed: u64) -> Result<Outcome, Box<Failure>> {
    World::new(seed, &Scenario::from_seed(seed)).run()
}

/// A message under way, with the version of its page's bytes.
#[derive(Debug, Clone, Copy)]
struct Packet {
    message: Message,
    version: Option<u32>,
}

/// Ways of a shell to be wrong: the judges must find them, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BadShell {
    /// Copies a page's bytes when the frame is sent.
    CopiesLate,
    /// Sends the frames of a link in any order.
    SendsInAnyOrder,
    /// Says that an operation is done before it is.
    SaysDoneEarly,
    /// Lets a thread's pin go before it used its page.
    UnpinsEarly,
}

struct World {
    seed: u64,
    random: Random,
    scenario: Scenario,
    hosts: Vec<Host>,
    /// By pair of nodes: frames that a lock's holder put together, not yet sent.
    queued: Vec<VecDeque<Packet>>,
    /// By pair of nodes: frames on the link.
    links: Vec<VecDeque<Packet>>,
    latest: Vec<u32>,
    versions: u32,
    now: Duration,
    threads: u64,
    /// The page that was used last of those that are used one after the other.
    walker: u64,
    /// A node whose users do nothing.
    resting: Option<usize>,
    shown: VecDeque<String>,
    outcome: Outcome,
    bad: Option<BadShell>,
}

impl World {
    fn new(seed: u64, scenario: &Scenario) -> World {
        let mut tables = VecTables::new(scenario.pages as usize);
        for page in (0..scenario.pages.min(64)).filter(|page| scenario.updated & 1 << page != 0) {
            tables.set_policy(Page(page), Policy::Update);
        }
        let host = |index: usize| {
            let config = Config::new(NodeId(index as u8), scenario.nodes, scenario.manager);
            let own = match scenario.manager {
                ManagerOf::Ranges(ranges) => ranges.of(config.me),
                _ => 0..0,
            };
            let (budget, kind) = (scenario.budgets[index], scenario.kinds[index]);
            Host::new(&config, tables.clone(), scenario.pages, budget, own, kind)
        };
        let pairs = usize::from(scenario.nodes).pow(2);
        World {
            seed,
            random: Random::new(seed),
            scenario: scenario.clone(),
            hosts: (0..scenario.nodes.into()).map(host).collect(),
            queued: vec![VecDeque::new(); pairs],
            links: vec![VecDeque::new(); pairs],
            latest: vec![ZERO_VERSION; scenario.pages as usize],
            versions: ZERO_VERSION,
            now: Duration::ZERO,
            threads: 0,
            walker: 0,
            resting: None,
            shown: VecDeque::new(),
            outcome: Outcome::default(),
            bad: None,
        }
    }

    fn run(mut self) -> Result<Outcome, Box<Failure>> {
        match self.play() {
            Ok(()) => Ok(self.outcome),
            Err(flaw) => Err(Box::new(Failure {
                seed: self.seed,
                replay: "--controller",
                flaw,
                events: self.shown.into(),
            })),
        }
    }

    fn play(&mut self) -> Result<(), Flaw> {
        self.adopt_some();
        for step in 0..self.scenario.steps {
            if step == self.scenario.steps / 4 && self.random.per_mille(500) {
                self.resting = Some(self.any_node());
            }
            match self.random.below(4) {
                0 => self.begin_access()?,
                _ => self.work()?,
            }
        }
        self.scenario.evictor = 1000;
        // What is due comes within the bound on steps.
        self.scenario.tick_max = self.scenario.tick_max.max(Duration::from_micros(1));
        self.resting = None;
        self.drain()?;
        // Every page is somewhere, with its last bytes.
        for page in 0..self.scenario.pages {
            let node = self.any_node();
            self.access(node, page, Access::Read)?;
            self.drain()?;
        }
        self.judge_idle()
    }

    fn any_node(&mut self) -> usize {
        self.random.below(self.hosts.len() as u64) as usize
    }

    fn any_page(&mut self) -> u64 {
        if self.random.per_mille(self.scenario.walks) {
            self.walker = (self.walker + 1) % self.scenario.pages;
            return self.walker;
        }
        let pages = match self.random.per_mille(self.scenario.hot) {
            true => self.scenario.hot_pages.min(self.scenario.pages),
            false => self.scenario.pages,
        };
        self.random.below(pages)
    }

    fn adopt_some(&mut self) {
        for page in 0..self.scenario.pages {
            let manager = self.hosts[0].manager_of(page);
            if self.random.per_mille(200) && self.hosts[manager].controller.adopt(page).is_ok() {
                self.versions += 1;
                self.latest[page as usize] = self.versions;
                self.hosts[manager].fill(page, self.versions);
            }
        }
    }

    /// One thing that any thread or link of any node does.
    fn work(&mut self) -> Result<(), Flaw> {
        self.now +=
            Duration::from_nanos(self.random.below(self.scenario.tick_max.as_nanos() as u64));
        let node = self.any_node();
        match self.random.below(12) {
            0..4 => self.deliver(),
            4..6 => self.send(),
            6 => self.operate(node),
            7 => self.run_thread(node),
            8 => self.release(node),
            9 => self.event(node, Event::Tick, None),
            10 => self.make_room(node),
            _ => self.use_mapping(node),
        }
    }

    fn drain(&mut self) -> Result<(), Flaw> {
        for _ in 0..DRAIN_STEPS_MAX {
            self.work()?;
            let in_flight = self
                .queued
                .iter()
                .chain(&self.links)
                .any(|link| !link.is_empty());
            if !in_flight && self.hosts.iter().all(|host| host.is_idle(self.now)) {
                return Ok(());
            }
        }
        let stuck = self.hosts.iter().enumerate().find_map(|(node, host)| {
            let page = host.unanswered()?;
            Some(Flaw::Unanswered {
                page: Page(page),
                node: NodeId(node as u8),
                what: "a request of a user was not answered",
            })
        });
        Err(stuck.unwrap_or(Flaw::Endless("messages and operations do not cease")))
    }

    /// A user begins to read or write a page.
    fn begin_access(&mut self) -> Result<(), Flaw> {
        let (node, page) = (self.any_node(), self.any_page());
        let access = match self.random.per_mille(self.scenario.writes) {
            true => Access::Write,
            false => Access::Read,
        };
        if self.hosts[node].users() >= USERS_MAX || self.resting == Some(node) {
            return Ok(());
        }
        if self.random.per_mille(30) {
            return self.event(node, Event::Hide { page }, None);
        }
        if self.random.per_mille(50) {
            return self.hold_both(node, page, access);
        }
        self.access(node, page, access)
    }

    fn access(&mut self, node: usize, page: u64, access: Access) -> Result<(), Flaw> {
        let host = &mut self.hosts[node];
        host.look(page);
        if host.mapped(page) >= Some(access) {
            return self.use_page(node, page, access);
        }
        // A device's thread waits on any node.
        if host.kind == Kind::Sleeps && !self.random.per_mille(150) {
            host.sleepers.push((page, access));
            return self.event(node, Event::Ask { page, access }, None);
        }
        self.threads += 1;
        let waiter = self.threads;
        host.threads.push(Thread::new(waiter, page, access));
        let purpose = match self.random.below(4) {
            0 => Purpose::KernelCode,
            1 => Purpose::Table,
            _ => Purpose::Data,
        };
        let event = Event::Acquire {
            waiter,
            page,
            access,
            purpose,
        };
        self.event(node, event, None)
    }

    /// A thread that pins two pages at once, if both are here.
    fn hold_both(&mut self, node: usize, page: u64, access: Access) -> Result<(), Flaw> {
        let other = (page + 1) % self.scenario.pages;
        let host = &mut self.hosts[node];
        if other == page || !host.controller.hold_all([page, other].into_iter(), access) {
            return Ok(());
        }
        for page in [page, other] {
            host.threads.push(Thread::holding(page, access));
        }
        self.judge(page)?;
        self.judge(other)
    }

    /// The load or store itself.
    fn use_page(&mut self, node: usize, page: u64, access: Access) -> Result<(), Flaw> {
        self.outcome.accesses += 1;
        let host = &mut self.hosts[node];
        host.look(page);
        let version = host.version(page);
        if version != self.latest[page as usize] {
            return Err(Flaw::Stale {
                page: Page(page),
                node: NodeId(node as u8),
                version,
                latest: self.latest[page as usize],
            });
        }
        if access == Access::Write {
            self.versions += 1;
            self.latest[page as usize] = self.versions;
        }
        host.fill(page, self.latest[page as usize]);
        self.judge(page)
    }

    /// A user goes on using what it has mapped. Users that look for a page again find it
    /// by its right, without the controller.
    fn use_mapping(&mut self, node: usize) -> Result<(), Flaw> {
        let page = self.any_page();
        if self.resting == Some(node) {
            return Ok(());
        }
        let host = &mut self.hosts[node];
        if host.kind == Kind::Waits && host.rights.allow_use(page, Access::Read) {
            host.map_at_least(page, Access::Read);
            self.judge(page)?;
        }
        let host = &self.hosts[node];
        let Some(mapped) = host.mapped(page) else {
            return Ok(());
        };
        let write = self.random.per_mille(self.scenario.writes);
        self.use_page(
            node,
            page,
            mapped.min(if write { Access::Write } else { Access::Read }),
        )
    }

    /// A thread that was woken goes on.
    fn run_thread(&mut self, node: usize) -> Result<(), Flaw> {
        let host = &mut self.hosts[node];
        let Some(thread) = host.threads.iter_mut().find(|thread| thread.woken) else {
            return Ok(());
        };
        thread.woken = false;
        let (waiter, page, access) = (thread.number, thread.page, thread.access);
        if !thread.holds {
            return self.event(node, Event::Retry { waiter }, None);
        }
        thread.works = true;
        if self.bad == Some(BadShell::UnpinsEarly) {
            host.pins.remove(page);
        }
        if host.kind == Kind::Waits {
            host.map_at_least(page, access);
        }
        self.use_page(node, page, access)?;
        self.event(node, Event::Leave { waiter }, None)
    }

    /// A thread that is done gives its pin back.
    fn release(&mut self, node: usize) -> Result<(), Flaw> {
        let host = &mut self.hosts[node];
        let Some(index) = host.threads.iter().position(|thread| thread.works) else {
            return Ok(());
        };
        let thread = host.threads.swap_remove(index);
        if self.bad != Some(BadShell::UnpinsEarly) {
            host.pins.remove(thread.page);
        }
        Ok(())
    }

    /// A thread carries out an operation, outside the lock.
    fn operate(&mut self, node: usize) -> Result<(), Flaw> {
        let host = &mut self.hosts[node];
        if host.operations.is_empty() {
            return Ok(());
        }
        let which = self.random.below(host.operations.len() as u64) as usize;
        let operation = host.operations.swap_remove(which);
        self.outcome.operations += 1;
        let me = NodeId(node as u8);
        self.hosts[node].operate(me, operation)?;
        let mut woken = Vec::new();
        for page in operation.pages() {
            self.judge(page)?;
            woken.extend(self.hosts[node].wake_sleepers(page));
        }
        let early = self.bad == Some(BadShell::SaysDoneEarly);
        if let Some(done) = operation.done().filter(|_| !early) {
            self.event(node, done, None)?;
        }
        for (page, access) in woken {
            self.access(node, page, access)?;
        }
        Ok(())
    }

    /// The thread that keeps a node within its budget.
    fn make_room(&mut self, node: usize) -> Result<(), Flaw> {
        if !self.random.per_mille(self.scenario.evictor) {
            return Ok(());
        }
        self.event(node, Event::MakeRoom, None)?;
        let host = &mut self.hosts[node];
        if host.evicts() {
            let passed = host.clock.pass(&host.rights);
            self.event(node, Event::Evict(passed), None)?;
        }
        Ok(())
    }

    /// A thread sends the next frame of a link.
    fn send(&mut self) -> Result<(), Flaw> {
        let Some(index) = self.any_link(false) else {
            return Ok(());
        };
        let queue = &mut self.queued[index];
        let which = match self.bad == Some(BadShell::SendsInAnyOrder) {
            true => self.random.below(queue.len() as u64) as usize,
            false => 0,
        };
        if let Some(mut packet) = queue.remove(which) {
            if self.bad == Some(BadShell::CopiesLate) && packet.version.is_some() {
                let host = &self.hosts[index / self.hosts.len()];
                packet.version = Some(host.version(packet.message.page.0));
            }
            self.links[index].push_back(packet);
        }
        Ok(())
    }

    fn deliver(&mut self) -> Result<(), Flaw> {
        let Some(index) = self.any_link(true) else {
            return Ok(());
        };
        let Some(packet) = self.links[index].pop_front() else {
            return Ok(());
        };
        self.outcome.messages += 1;
        let nodes = self.hosts.len();
        let event = Event::Message {
            from: NodeId((index / nodes) as u8),
            message: packet.message,
        };
        self.event(index % nodes, event, packet.version)
    }

    /// A link, or its queue, that has something.
    fn any_link(&mut self, sent: bool) -> Option<usize> {
        let links = if sent { &self.links } else { &self.queued };
        let start = self.random.below(links.len() as u64) as usize;
        let mut all = (start..links.len()).chain(0..start);
        all.find(|index| !links[*index].is_empty())
    }

    /// One step of a controller, what it says, and the judgement.
    fn event(&mut self, node: usize, event: Event, version: Option<u32>) -> Result<(), Flaw> {
        self.outcome.events += 1;
        if self.shown.len() == SHOWN_MAX {
            self.shown.pop_front();
        }
        self.shown
            .push_back(format!("{:?} {}: {event:?}", self.now, NodeId(node as u8)));
        let mut actions = host::Actions::new(version);
        self.hosts[node]
            .controller
            .step(event, self.now, &mut actions);
        for action in actions.list {
            let page = self.hosts[node].carry_out(
                NodeId(node as u8),
                action,
                &mut |to, packet| {
                    let index = node * usize::from(self.scenario.nodes) + to.index();
                    self.queued[index].push_back(packet);
                },
                version,
                &mut self.outcome,
            )?;
            if let Some(page) = page {
                self.judge(page)?;
            }
        }
        if self.bad == Some(BadShell::SaysDoneEarly) {
            self.say_done(node)?;
        }
        self.judge_budget(node)
    }

    /// Says that operations are done that nobody has begun.
    fn say_done(&mut self, node: usize) -> Result<(), Flaw> {
        let host = &mut self.hosts[node];
        let unsaid: Vec<Event> = host
            .operations
            .iter_mut()
            .filter_map(Operation::say)
            .collect();
        for done in unsaid {
            self.event(node, done, None)?;
        }
        Ok(())
    }

    /// Judges 1 and 2.
    fn judge(&self, page: u64) -> Result<(), Flaw> {
        let latest = self.latest[page as usize];
        let (mut holders, mut writers) = (0, 0);
        for (node, host) in self.hosts.iter().enumerate() {
            let me = NodeId(node as u8);
            let Some(access) = host.used(page) else {
                continue;
            };
            holders |= me.bit();
            if access == Access::Write {
                writers |= me.bit();
            }
            let version = host.version(page);
            if version != latest {
                return Err(Flaw::Stale {
                    page: Page(page),
                    node: me,
                    version,
                    latest,
                });
            }
        }
        match writers != 0 && holders.count_ones() > 1 {
            true => Err(Flaw::Writer {
                page: Page(page),
                holders,
                writers,
            }),
            false => Ok(()),
        }
    }

    /// Judge 5.
    fn judge_budget(&self, node: usize) -> Result<(), Flaw> {
        let budget = self.scenario.budgets[node].pages();
        let most = budget.saturating_add((USERS_MAX + AHEAD_MAX) as u64);
        let filled = self.hosts[node].filled();
        match filled > most {
            true => Err(Flaw::Budget {
                node: NodeId(node as u8),
                filled,
                most,
            }),
            false => Ok(()),
        }
    }

    /// Judge 7, as far as the drain has not judged it.
    fn judge_idle(&mut self) -> Result<(), Flaw> {
        for page in (0..self.scenario.pages).map(Page) {
            let mut judge = Judge::new(page, self.latest[page.0 as usize]);
            for (node, host) in self.hosts.iter_mut().enumerate() {
                let me = NodeId(node as u8);
                let frame = Frame {
                    mapped: host.rights.of(page.0),
                    version: host.version(page.0),
                };
                let local = host.controller.tables().look(page);
                idle_node(page, me, local)?;
                judge.node(me, frame, local)?;
            }
            let manager = self.hosts[0].manager_of(page.0);
            let entry = *self.hosts[manager].controller.tables().look_entry(page);
            let one = u32::from(!entry.untouched() && entry.phase() != Phase::Lost);
            judge.verdict(0, one, one)?;
            judge.idle(NodeId(manager as u8), &entry)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
