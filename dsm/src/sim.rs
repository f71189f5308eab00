//! Seeded simulator: many nodes and pages, a program that reads and writes at
//! random, evictions, discards, channels that delay and, after a reconnect,
//! repeat themselves, and nodes that die. The seed decides everything, so a seed
//! replays a run exactly.
//!
//! Channels are first-in first-out per ordered pair of nodes; which channel
//! delivers next is random, so messages on different channels overtake each
//! other freely. Content is a version number: a write makes a new one, a read
//! must find the newest.

mod inbox;
mod scenario;

use inbox::{Arrival, Inbox, Outbox};
pub use scenario::{Random, Scenario};

use crate::checker::{Flaw, Frame, Judge, ZERO_VERSION, carries_ownership, idle_node, one_manager};
use crate::config::{Config, ManagerOf};
use crate::node::Node;
use crate::protocol::{Action, Body, Event, Message};
use crate::state::{Entry, EntryRecord, Phase, VecTables};
use crate::types::{Access, CHUNK_PAGES, NodeId, Page, Policy};
use std::collections::VecDeque;

/// Messages that a reconnect repeats at most.
const REPEATED_MAX: usize = 4;
/// Events that a failure shows.
const SHOWN_MAX: usize = 60;
/// No run takes more steps than this after the program has stopped.
const DRAIN_STEPS_MAX: u32 = 200_000;

/// What a run did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Events that were handled.
    pub events: u64,
    /// Messages that were delivered.
    pub messages: u64,
    /// Reads and writes of the program that were carried out.
    pub accesses: u64,
    /// Accesses that ended in a named loss.
    pub losses: u64,
    /// Repeated messages that were thrown away.
    pub duplicates: u64,
    /// Pages that were asked for again because a write elsewhere took them.
    pub standing: u64,
    /// Pages whose manager was handed over.
    pub handed_over: u64,
}

/// A run that went wrong.
#[derive(Debug, Clone)]
pub struct Failure {
    /// Replays it.
    pub seed: u64,
    /// With this option of `weft-dsm-sim`.
    pub replay: &'static str,
    /// What was wrong.
    pub flaw: Flaw,
    /// The last events, oldest first.
    pub events: Vec<String>,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "seed {}: {}", self.seed, self.flaw)?;
        for event in &self.events {
            writeln!(f, "  {event}")?;
        }
        write!(
            f,
            "replay with: weft-dsm-sim {2} {0}..{1}",
            self.seed,
            self.seed + 1,
            self.replay
        )
    }
}

impl std::error::Error for Failure {}

/// Runs a seed.
///
/// # Errors
/// What a judge found, with the seed and the last events.
pub fn run(seed: u64) -> Result<Outcome, Box<Failure>> {
    Simulation::new(seed, &Scenario::from_seed(seed)).run()
}

#[derive(Debug, Clone, Copy)]
struct Packet {
    number: u64,
    message: Message,
    version: Option<u32>,
}

#[derive(Debug, Default)]
struct Channel {
    outbox: Outbox,
    inbox: Inbox,
    queue: VecDeque<Packet>,
    delivered: VecDeque<Packet>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Want {
    node: NodeId,
    slot: usize,
    access: Access,
}

struct Simulation {
    seed: u64,
    random: Random,
    scenario: Scenario,
    nodes: Vec<Node<VecTables>>,
    frames: Vec<Vec<Frame>>,
    latest: Vec<u32>,
    versions: u32,
    channels: Vec<Channel>,
    wants: Vec<Want>,
    /// Nodes that still have to discard the page.
    discarding: Vec<u32>,
    /// Pages of policy `Update` that their nodes are about to ask for again.
    standing: Vec<(NodeId, usize)>,
    killed: u32,
    /// Per node, the dead nodes it has not heard of.
    unaware: Vec<u32>,
    resolved: Vec<(NodeId, usize)>,
    shown: VecDeque<(NodeId, Event)>,
    outcome: Outcome,
}

impl Simulation {
    fn new(seed: u64, scenario: &Scenario) -> Simulation {
        let count = usize::from(scenario.nodes);
        let spread = scenario.manager == ManagerOf::Interleaved;
        let table_pages = if spread {
            (scenario.pages - 1) * CHUNK_PAGES as usize + 1
        } else {
            scenario.pages
        };
        let mut random = Random::new(seed);
        let mut tables = VecTables::new(table_pages);
        for slot in 0..scenario.pages {
            let page = page_of(slot, spread);
            if random.per_mille(60) {
                tables.set_policy(page, Policy::ReadOnly);
            } else if random.per_mille(40) {
                tables.set_policy(page, Policy::Private);
            } else if scenario.updated & 1 << slot != 0 {
                tables.set_policy(page, Policy::Update);
            }
        }
        let node = |index: usize| {
            let mut config = Config::new(NodeId(index as u8), scenario.nodes, scenario.manager);
            config.migratory = scenario.migratory;
            config.probe_every = scenario.probe_every;
            config.budgets_pages = [scenario.budget_pages; crate::NODES_MAX];
            Node::new(&config, tables.clone())
        };
        Simulation {
            seed,
            random,
            scenario: scenario.clone(),
            nodes: (0..count).map(node).collect(),
            frames: vec![vec![Frame::default(); scenario.pages]; count],
            latest: vec![ZERO_VERSION; scenario.pages],
            versions: ZERO_VERSION,
            channels: (0..count * count).map(|_| Channel::default()).collect(),
            wants: Vec::new(),
            discarding: vec![0; scenario.pages],
            standing: Vec::new(),
            killed: 0,
            unaware: vec![0; count],
            resolved: Vec::new(),
            shown: VecDeque::new(),
            outcome: Outcome::default(),
        }
    }

    fn run(mut self) -> Result<Outcome, Box<Failure>> {
        match self.play() {
            Ok(()) => Ok(self.outcome),
            Err(flaw) => Err(Box::new(Failure {
                seed: self.seed,
                replay: "--seeds",
                flaw,
                events: self
                    .shown
                    .iter()
                    .map(|(node, event)| format!("{node}: {event:?}"))
                    .collect(),
            })),
        }
    }

    fn play(&mut self) -> Result<(), Flaw> {
        self.adopt_some()?;
        for _ in 0..self.scenario.steps {
            self.random_step()?;
        }
        let mut steps = 0;
        while self.drain_step()? {
            steps += 1;
            if steps > DRAIN_STEPS_MAX {
                return Err(Flaw::Endless("messages and retries do not cease"));
            }
        }
        self.judge_idle()
    }

    fn spread(&self) -> bool {
        self.scenario.manager == ManagerOf::Interleaved
    }
    fn page(&self, slot: usize) -> Page {
        page_of(slot, self.spread())
    }
    fn slot(&self, page: Page) -> usize {
        if self.spread() {
            page.chunk() as usize
        } else {
            page.0 as usize
        }
    }
    fn policy(&self, slot: usize) -> Policy {
        use crate::state::Tables;
        self.nodes[0].tables.policy(self.page(slot))
    }
    /// The live node that manages the page; `None` while its entry is in flight, and
    /// after the death of a manager.
    fn manager(&self, slot: usize) -> Option<NodeId> {
        self.managers(slot).next()
    }
    fn managers(&self, slot: usize) -> impl Iterator<Item = NodeId> {
        let page = self.page(slot);
        let manages = move |node: &&Node<VecTables>| {
            let local = node.tables.look(page);
            self.alive(node.me()) && node.manager_by(page, local) == node.me()
        };
        self.nodes.iter().filter(manages).map(Node::me)
    }
    /// Entries on their way to the next manager, which will accept them.
    fn entries_in_flight(&self, slot: usize) -> impl Iterator<Item = EntryRecord> {
        let page = self.page(slot);
        self.arriving()
            .filter_map(move |message| match message.body {
                Body::Entry { record } if message.page == page => Some(record),
                _ => None,
            })
    }
    /// Messages that will be accepted, of an earlier generation or not.
    fn arriving(&self) -> impl Iterator<Item = Message> {
        let nodes = self.nodes.len();
        let channels = self.channels.iter().enumerate();
        let accepted = channels.filter(move |(index, _)| {
            let from = NodeId((index / nodes) as u8);
            !self.nodes[index % nodes].is_dead(from)
        });
        accepted.flat_map(|(_, channel)| {
            let next = channel.inbox.expected();
            let packets = channel.queue.iter();
            packets
                .filter(move |packet| packet.number >= next)
                .map(|packet| packet.message)
        })
    }
    /// Whether a hand-over of the page is not over.
    fn handed(&self, slot: usize) -> bool {
        let page = self.page(slot);
        let frozen = |node: &Node<VecTables>| {
            let entry = node.tables.look_entry(page);
            node.tables.look(page).frozen()
                || entry.phase() == Phase::Hand
                || entry.heir().is_some()
        };
        let mut live = self.nodes.iter().filter(|node| self.alive(node.me()));
        live.any(frozen) || self.entries_in_flight(slot).next().is_some()
    }
    fn alive(&self, node: NodeId) -> bool {
        self.killed & node.bit() == 0
    }
    fn live_mask(&self) -> u32 {
        let all = (1u64 << self.scenario.nodes) - 1;
        all as u32 & !self.killed
    }
    fn any_live(&mut self) -> NodeId {
        loop {
            let node = NodeId(self.random.below(u64::from(self.scenario.nodes)) as u8);
            if self.alive(node) {
                return node;
            }
        }
    }
    fn any_slot(&mut self) -> usize {
        self.random.below(self.scenario.pages as u64) as usize
    }

    fn adopt_some(&mut self) -> Result<(), Flaw> {
        for slot in 0..self.scenario.pages {
            let adopted = match self.policy(slot) {
                Policy::ReadOnly => true,
                Policy::Invalidate | Policy::Update => self.random.per_mille(200),
                Policy::Private => false,
            };
            if !adopted {
                continue;
            }
            let Some(manager) = self.manager(slot) else {
                continue;
            };
            self.versions += 1;
            self.latest[slot] = self.versions;
            self.frames[manager.index()][slot] = Frame {
                mapped: Some(Access::Write),
                version: self.versions,
            };
            let page = self.page(slot);
            self.step(manager, slot, Event::Adopt { page }, None)?;
        }
        Ok(())
    }

    fn random_step(&mut self) -> Result<(), Flaw> {
        if self.random.per_mille(self.scenario.evictions) {
            let (node, slot) = (self.any_live(), self.any_slot());
            let to = self.random.per_mille(200).then(|| self.any_live());
            let page = self.page(slot);
            return self.step(node, slot, Event::Evict { page, to }, None);
        }
        if !self.standing.is_empty() && self.random.per_mille(300) {
            return self.ask_again();
        }
        if self.scenario.hand_overs > 0 && self.random.per_mille(self.scenario.hand_overs) {
            return self.hand_over();
        }
        if self.random.per_mille(self.scenario.discards) {
            self.begin_discard();
        }
        if self.random.per_mille(self.scenario.reconnects) {
            self.reconnect();
        }
        if self.scenario.deaths > 0 && self.random.per_mille(3) && self.live_mask().count_ones() > 2
        {
            self.kill();
        }
        match self.random.below(5) {
            0 | 1 => self.access(),
            2 => self.progress().map(|_| ()),
            _ => self.deliver_some().map(|_| ()),
        }
    }

    /// A page's manager changes, or is called back.
    fn hand_over(&mut self) -> Result<(), Flaw> {
        let (slot, to) = (self.any_slot(), self.any_live());
        let page = self.page(slot);
        let Some(manager) = self.manager(slot).filter(|_| self.discarding[slot] == 0) else {
            return Ok(());
        };
        let event = match self.random.per_mille(150) {
            true => Event::Recall { page },
            false => Event::HandOver { page, to },
        };
        self.step(manager, slot, event, None)
    }

    /// One step without new work of the program; `false` when all is done.
    fn drain_step(&mut self) -> Result<bool, Flaw> {
        if !self.standing.is_empty() && self.random.per_mille(300) {
            self.ask_again()?;
            return Ok(true);
        }
        if self.random.per_mille(500) && self.progress()? {
            return Ok(true);
        }
        Ok(self.deliver_some()? || self.progress()?)
    }

    /// A node asks again for a page that a write took from it.
    fn ask_again(&mut self) -> Result<(), Flaw> {
        let which = self.random.below(self.standing.len() as u64) as usize;
        let (node, slot) = self.standing.swap_remove(which);
        let event = self.standing_request(slot);
        self.step(node, slot, event, None)
    }

    /// A request for a page that a write took, as a fault or as one ahead.
    fn standing_request(&mut self, slot: usize) -> Event {
        self.outcome.standing += 1;
        Event::Fault {
            page: self.page(slot),
            access: Access::Read,
            ahead: self.random.per_mille(500),
        }
    }

    fn access(&mut self) -> Result<(), Flaw> {
        let (node, slot) = (self.any_live(), self.any_slot());
        let write = self.random.per_mille(self.scenario.writes);
        let access = if write { Access::Write } else { Access::Read };
        if self.random.per_mille(50) {
            let page = self.page(slot);
            self.nodes[node.index()].settle(page);
        }
        if self.random.per_mille(100) {
            let page = self.page(slot);
            let access = Access::Read;
            let ahead = true;
            let event = Event::Fault {
                page,
                access,
                ahead,
            };
            return self.step(node, slot, event, None);
        }
        self.attempt(Want { node, slot, access })
    }

    /// The program's load or store: carried out if memory allows, else a fault.
    fn attempt(&mut self, want: Want) -> Result<(), Flaw> {
        let Want { node, slot, access } = want;
        let page = self.page(slot);
        let policy = self.policy(slot);
        if policy == Policy::ReadOnly && access == Access::Write {
            let ahead = false;
            let event = Event::Fault {
                page,
                access,
                ahead,
            };
            return self.step(node, slot, event, None);
        }
        let frame = &mut self.frames[node.index()][slot];
        if frame.mapped >= Some(access) {
            self.outcome.accesses += 1;
            if policy == Policy::Private {
                return Ok(());
            }
            if access == Access::Write {
                self.versions += 1;
                self.latest[slot] = self.versions;
                frame.version = self.versions;
            } else if frame.version != self.latest[slot] {
                return Err(Flaw::Stale {
                    page,
                    node,
                    version: frame.version,
                    latest: self.latest[slot],
                });
            }
            return Ok(());
        }
        if !self.wants.contains(&want) {
            self.wants.push(want);
        }
        let ahead = false;
        let event = Event::Fault {
            page,
            access,
            ahead,
        };
        self.step(node, slot, event, None)
    }

    /// Discards, and deaths that somebody has not heard of. `false`: nothing to do.
    fn progress(&mut self) -> Result<bool, Flaw> {
        let start = self.random.below(64) as usize;
        for turn in 0..self.scenario.pages {
            let slot = (start + turn) % self.scenario.pages;
            let before = self.discarding[slot];
            if before != 0 {
                let last = self.manager(slot).map_or(0, NodeId::bit);
                let others = NodeId::lowest(before & !last);
                if let Some(node) = others.or(NodeId::lowest(last)) {
                    self.discard(node, slot)?;
                    return Ok(true);
                }
            }
        }
        let count = self.nodes.len();
        for turn in 0..count {
            let node = NodeId(((start + turn) % count) as u8);
            if let (true, Some(dead)) =
                (self.alive(node), NodeId::lowest(self.unaware[node.index()]))
            {
                self.learn(node, dead)?;
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn deliver_some(&mut self) -> Result<bool, Flaw> {
        let count = self.channels.len();
        let start = self.random.below(count as u64) as usize;
        let Some(index) = (0..count)
            .map(|turn| (start + turn) % count)
            .find(|&index| !self.channels[index].queue.is_empty())
        else {
            return Ok(false);
        };
        let nodes = self.nodes.len();
        let (from, to) = (NodeId((index / nodes) as u8), NodeId((index % nodes) as u8));
        let channel = &mut self.channels[index];
        let Some(packet) = channel.queue.pop_front() else {
            return Ok(false);
        };
        match channel.inbox.accept(packet.number) {
            Ok(Arrival::Deliver) => {}
            Ok(Arrival::Duplicate) => {
                self.outcome.duplicates += 1;
                return Ok(true);
            }
            Err(_) => return Err(Flaw::Endless("the simulator's channel lost a message")),
        }
        channel.delivered.push_back(packet);
        if channel.delivered.len() > REPEATED_MAX {
            channel.delivered.pop_front();
        }
        self.outcome.messages += 1;
        let message = packet.message;
        let slot = self.slot(message.page);
        let event = Event::Message { from, message };
        self.step(to, slot, event, packet.version)?;
        Ok(true)
    }

    /// The sender does not know what arrived and sends the tail again.
    fn reconnect(&mut self) {
        let index = self.random.below(self.channels.len() as u64) as usize;
        let channel = &mut self.channels[index];
        let again = self.random.below(1 + channel.delivered.len() as u64) as usize;
        for packet in channel.delivered.iter().rev().take(again) {
            channel.queue.push_front(*packet);
        }
    }

    fn begin_discard(&mut self) {
        let slot = self.any_slot();
        let movable = matches!(self.policy(slot), Policy::Invalidate | Policy::Update);
        if movable
            && self.discarding[slot] == 0
            && self.manager(slot).is_some()
            && !self.handed(slot)
        {
            self.discarding[slot] = self.live_mask();
        }
    }

    fn discard(&mut self, node: NodeId, slot: usize) -> Result<(), Flaw> {
        self.discarding[slot] &= !node.bit();
        self.frames[node.index()][slot] = Frame::default();
        if Some(node) == self.manager(slot) {
            self.latest[slot] = ZERO_VERSION;
        }
        let page = self.page(slot);
        self.step(node, slot, Event::Discard { page }, None)
    }

    fn kill(&mut self) {
        self.scenario.deaths -= 1;
        let node = self.any_live();
        let managed: Vec<bool> = (0..self.scenario.pages)
            .map(|slot| self.manager(slot) == Some(node))
            .collect();
        self.killed |= node.bit();
        let nodes = self.nodes.len();
        for other in 0..nodes {
            self.channels[other * nodes + node.index()].queue.clear();
            self.unaware[other] |= node.bit();
        }
        self.frames[node.index()].fill(Frame::default());
        self.wants.retain(|want| want.node != node);
        self.standing.retain(|(asker, _)| *asker != node);
        for (slot, managed) in managed.into_iter().enumerate() {
            self.discarding[slot] &= !node.bit();
            if managed {
                self.discarding[slot] = 0;
            }
        }
    }

    fn learn(&mut self, node: NodeId, dead: NodeId) -> Result<(), Flaw> {
        self.unaware[node.index()] &= !dead.bit();
        let nodes = self.nodes.len();
        self.channels[dead.index() * nodes + node.index()]
            .queue
            .clear();
        for slot in 0..self.scenario.pages {
            let page = self.page(slot);
            self.step(node, slot, Event::PeerLost { node: dead, page }, None)?;
        }
        Ok(())
    }

    /// One event, all its consequences in memory, and the judgement.
    fn step(
        &mut self,
        node: NodeId,
        slot: usize,
        event: Event,
        incoming: Option<u32>,
    ) -> Result<(), Flaw> {
        self.outcome.events += 1;
        if self.shown.len() == SHOWN_MAX {
            self.shown.pop_front();
        }
        self.shown.push_back((node, event));
        self.act(node, slot, event, incoming)?;
        self.judge(slot)?;
        // Some ask as soon as they may, before anything else happens.
        if self.standing.contains(&(node, slot)) && self.random.per_mille(300) {
            self.standing.retain(|asker| *asker != (node, slot));
            let event = self.standing_request(slot);
            self.act(node, slot, event, None)?;
            self.judge(slot)?;
        }
        while let Some((node, slot)) = self.resolved.pop() {
            let (again, rest) = std::mem::take(&mut self.wants)
                .into_iter()
                .partition::<Vec<_>, _>(|want| want.node == node && want.slot == slot);
            self.wants = rest;
            for want in again {
                self.attempt(want)?;
            }
        }
        Ok(())
    }

    fn act(
        &mut self,
        node: NodeId,
        slot: usize,
        event: Event,
        incoming: Option<u32>,
    ) -> Result<(), Flaw> {
        let nodes = self.nodes.len();
        let killed = self.killed;
        let private = self.policy(slot) == Policy::Private;
        let frame = &mut self.frames[node.index()][slot];
        let (channels, resolved) = (&mut self.channels, &mut self.resolved);
        let (wants, losses) = (&mut self.wants, &mut self.outcome.losses);
        let handed_over = &mut self.outcome.handed_over;
        let standing = &mut self.standing;
        let mut outcome = Ok(());
        let mut sink = |action: Action| {
            if outcome.is_err() {
                return;
            }
            let version = match frame.apply(node, &action, incoming) {
                Ok(version) => version,
                Err(flaw) => {
                    outcome = Err(flaw);
                    return;
                }
            };
            match action {
                Action::Send { to, message } | Action::Give { to, message, .. } => {
                    if private || to == node {
                        outcome = Err(Flaw::Memory {
                            page: message.page,
                            node,
                            action: "a message to itself, or about a private page,",
                        });
                    } else if killed & to.bit() == 0 {
                        let channel = &mut channels[node.index() * nodes + to.index()];
                        let number = channel.outbox.number();
                        channel.queue.push_back(Packet {
                            number,
                            message,
                            version,
                        });
                    }
                }
                Action::Resolved { .. } => resolved.push((node, slot)),
                Action::Outdated { .. } if !standing.contains(&(node, slot)) => {
                    standing.push((node, slot));
                }
                Action::HandedOver { .. } => *handed_over += 1,
                Action::Lost { .. } => {
                    let before = wants.len();
                    wants.retain(|want| want.node != node || want.slot != slot);
                    *losses += (before - wants.len()) as u64;
                }
                _ => {}
            }
        };
        self.nodes[node.index()].step(event, &mut sink);
        outcome
    }

    fn judge(&self, slot: usize) -> Result<(), Flaw> {
        if self.policy(slot) == Policy::Private {
            return Ok(());
        }
        let judge = self.observe(slot)?;
        let page = self.page(slot);
        let managers = self.managers(slot).count() as u32;
        let in_flight = self.entries_in_flight(slot).count() as u32;
        one_manager(page, managers, in_flight, self.killed != 0)?;
        let directory = match self.manager(slot) {
            Some(manager) => Some(*self.nodes[manager.index()].tables.look_entry(page)),
            None => self.entries_in_flight(slot).next().map(Entry::restore),
        };
        let directory = directory.filter(|_| self.discarding[slot] == 0);
        let (least, most) = directory.map_or((0, u32::MAX), |entry| {
            let one = u32::from(!entry.untouched() && !entry.lost());
            (if self.killed == 0 { one } else { 0 }, one)
        });
        judge.verdict(self.ownerships_in_flight(slot), least, most)?;
        if directory.is_some_and(|entry| entry.lost()) {
            judge.lost()?;
        }
        Ok(())
    }

    fn observe(&self, slot: usize) -> Result<Judge, Flaw> {
        let page = self.page(slot);
        let mut judge = Judge::new(page, self.latest[slot]);
        for node in (0..self.scenario.nodes).map(NodeId) {
            if self.alive(node) {
                let local = self.nodes[node.index()].tables.look(page);
                judge.node(node, self.frames[node.index()][slot], local)?;
            }
        }
        Ok(judge)
    }

    fn ownerships_in_flight(&self, slot: usize) -> u32 {
        let page = self.page(slot);
        let nodes = self.nodes.len();
        let mut found = 0;
        for (index, channel) in self.channels.iter().enumerate() {
            let receiver = &self.nodes[index % nodes];
            if receiver.is_dead(NodeId((index / nodes) as u8)) {
                continue;
            }
            let generation = receiver.tables.look(page).generation();
            let next = channel.inbox.expected();
            found += channel
                .queue
                .iter()
                .filter(|packet| {
                    packet.message.page == page
                        && packet.number >= next
                        && packet.message.generation == generation
                        && carries_ownership(&packet.message)
                })
                .count() as u32;
        }
        found
    }

    fn judge_idle(&self) -> Result<(), Flaw> {
        for slot in 0..self.scenario.pages {
            if self.policy(slot) == Policy::Private {
                continue;
            }
            let page = self.page(slot);
            let judge = self.observe(slot)?;
            for node in (0..self.scenario.nodes).map(NodeId) {
                if self.alive(node) {
                    idle_node(page, node, self.nodes[node.index()].tables.look(page))?;
                }
            }
            if let Some(manager) = self.manager(slot) {
                let entry = self.nodes[manager.index()].tables.look_entry(page);
                let one = u32::from(!entry.untouched() && entry.phase() != Phase::Lost);
                judge.verdict(0, one, one)?;
                judge.idle(manager, entry)?;
            }
        }
        match self.wants.first() {
            Some(want) => Err(Flaw::Unanswered {
                page: self.page(want.slot),
                node: want.node,
                what: "an access of the program was neither carried out nor refused",
            }),
            None => Ok(()),
        }
    }
}

fn page_of(slot: usize, spread: bool) -> Page {
    if spread {
        Page(slot as u64 * CHUNK_PAGES)
    } else {
        Page(slot as u64)
    }
}

#[cfg(test)]
mod tests;
