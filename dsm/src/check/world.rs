//! One state of the model: the nodes, their memories, what is in flight and
//! what may still happen; its successors, its judgement and its fingerprint.

use super::authority::{Authority, Move};
use super::{Bounds, Change};
use crate::checker::{Flaw, Frame, Judge, ZERO_VERSION, carries_ownership, idle_node, one_manager};
use crate::config::{Config, ManagerOf};
use crate::node::Node;
use crate::protocol::{Action, Body, Event, Message};
use crate::state::{Entry, EntryRecord, Local, Phase, Tables};
use crate::types::{Access, CHUNK_PAGES, NodeId, Page, Policy};
use std::hash::Hasher;

pub(super) const NODES: usize = 3;
pub(super) const PAGES: usize = 2;
/// Versions of this abstraction: zero, written last, and anything older.
const FRESH: u32 = 1;
const STALE: u32 = 2;

#[derive(Debug, Clone, Copy)]
pub(super) struct SmallTables {
    pub(super) locals: [Local; PAGES],
    pub(super) entries: [Entry; PAGES],
    spread: bool,
    policy: Policy,
}

impl SmallTables {
    fn slot(&self, page: Page) -> usize {
        if self.spread {
            page.chunk() as usize
        } else {
            page.0 as usize
        }
    }
}

impl Tables for SmallTables {
    fn local(&mut self, page: Page) -> &mut Local {
        &mut self.locals[self.slot(page)]
    }
    fn entry(&mut self, page: Page) -> &mut Entry {
        &mut self.entries[self.slot(page)]
    }
    fn policy(&self, _: Page) -> Policy {
        self.policy
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Flight {
    slot: u8,
    from: NodeId,
    to: NodeId,
    message: Message,
    version: Option<u32>,
}

impl Flight {
    fn channel(&self) -> (u8, u8, u8) {
        (self.slot, self.from.0, self.to.0)
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Step {
    Deliver(usize),
    Fault(NodeId, u8, Access, bool),
    /// Asks again for a page that a write took.
    AskAgain(NodeId, u8),
    Evict(NodeId, u8),
    BeginDiscard(u8),
    Discard(NodeId, u8),
    HandOver(NodeId, u8, NodeId),
    Recall(NodeId, u8),
    Change(Move),
    Kill(NodeId),
    Learn(NodeId),
}

#[derive(Clone)]
pub(super) struct World {
    pub(super) nodes: [Node<SmallTables>; NODES],
    frames: [[Frame; PAGES]; NODES],
    latest: [u32; PAGES],
    flights: Vec<Flight>,
    faults: [u8; NODES],
    evictions: [u8; NODES],
    discards: u8,
    hand_overs: u8,
    recalls: u8,
    losses: u8,
    /// Nodes that have a discard of the page before them.
    discarding: [u32; PAGES],
    /// Nodes that may ask for the page again.
    outdated: [u32; PAGES],
    /// The node that died, and the nodes that have not heard of it.
    pub(super) killed: Option<NodeId>,
    pub(super) unaware: u32,
    pub(super) authority: Authority,
}

impl World {
    pub(super) fn new(bounds: &Bounds) -> World {
        let tables = SmallTables {
            locals: Default::default(),
            entries: Default::default(),
            spread: bounds.manager == ManagerOf::Interleaved,
            policy: match bounds.update {
                true => Policy::Update,
                false => Policy::Invalidate,
            },
        };
        let node = |index: usize| {
            let me = NodeId(index.min(bounds.nodes - 1) as u8);
            let mut config = Config::new(me, bounds.nodes as u8, bounds.manager);
            config.migratory = bounds.migratory;
            config.probe_every = bounds.probe_every;
            if let Some(Change::Join(joins)) = bounds.change
                && joins != me
            {
                config.absent = joins.bit();
            }
            if bounds.full {
                config.budgets_pages[1..].fill(0);
            }
            Node::new(&config, tables)
        };
        World {
            nodes: [node(0), node(1), node(2)],
            frames: Default::default(),
            latest: [ZERO_VERSION; PAGES],
            flights: Vec::new(),
            faults: [bounds.faults; NODES],
            evictions: [bounds.evictions; NODES],
            discards: bounds.discards,
            hand_overs: bounds.hand_overs,
            recalls: bounds.recalls,
            losses: bounds.losses,
            discarding: [0; PAGES],
            outdated: [0; PAGES],
            killed: None,
            unaware: 0,
            authority: Authority::new(bounds),
        }
    }

    pub(super) fn page(&self, slot: u8) -> Page {
        if self.nodes[0].tables.spread {
            Page(u64::from(slot) * CHUNK_PAGES)
        } else {
            Page(u64::from(slot))
        }
    }
    fn alive(&self, node: NodeId) -> bool {
        self.killed != Some(node)
    }
    /// Whether a message from or to `node` is in flight that will be accepted, about a page
    /// whose manager lives. Of other pages nobody can tell.
    pub(super) fn in_flight(&self, node: NodeId) -> bool {
        let mut flights = self.flights.iter().filter(|flight| self.alive(flight.from));
        flights.any(|flight| {
            let managed = self.manager(flight.slot).is_some();
            managed && (flight.from == node || flight.to == node)
        })
    }
    /// Whether a message is on its way from one node to another.
    pub(super) fn is_sending(&self, from: NodeId, to: NodeId) -> bool {
        let mut flights = self.flights.iter();
        flights.any(|flight| flight.from == from && flight.to == to)
    }
    /// Live nodes that take part.
    fn active(&self, bounds: &Bounds) -> impl Iterator<Item = NodeId> + use<> {
        let authority = self.authority;
        #[cfg(test)]
        let hasty = self.nodes[0].mutant == Some(crate::node::Mutant::JoinEarly);
        #[cfg(not(test))]
        let hasty = false;
        self.live(bounds)
            .filter(move |&node| authority.takes_part(node, hasty))
    }
    pub(super) fn live(&self, bounds: &Bounds) -> impl Iterator<Item = NodeId> + use<> {
        let killed = self.killed;
        (0..bounds.nodes as u8)
            .map(NodeId)
            .filter(move |&node| killed != Some(node))
    }
    /// The live node that manages the page; `None` while its entry is in flight, and
    /// after the death of a manager.
    fn manager(&self, slot: u8) -> Option<NodeId> {
        self.managers(slot).next()
    }
    fn managers(&self, slot: u8) -> impl Iterator<Item = NodeId> {
        let page = self.page(slot);
        let manages = move |&(index, node): &(usize, &Node<SmallTables>)| {
            let local = node.tables.locals[slot as usize];
            // Beyond the last node, the array is filled up.
            let is_node = index == node.me().index() && self.alive(node.me());
            is_node && node.manager_by(page, local) == node.me()
        };
        let nodes = self.nodes.iter().enumerate();
        nodes.filter(manages).map(|(_, node)| node.me())
    }
    /// Whether a hand-over of the page is not over.
    fn handed(&self, slot: u8) -> bool {
        let at = slot as usize;
        let frozen = |node: &Node<SmallTables>| {
            let entry = &node.tables.entries[at];
            node.tables.locals[at].frozen()
                || entry.phase() == Phase::Hand
                || entry.heir().is_some()
        };
        self.nodes.iter().any(frozen) || self.entries_in_flight(slot).next().is_some()
    }
    fn entries_in_flight(&self, slot: u8) -> impl Iterator<Item = EntryRecord> {
        self.flights.iter().filter_map(move |flight| {
            let accepted = !self.nodes[flight.to.index()].is_dead(flight.from);
            match flight.message.body {
                Body::Entry { record } if flight.slot == slot && accepted => Some(record),
                _ => None,
            }
        })
    }

    pub(super) fn steps(&self, bounds: &Bounds) -> Vec<Step> {
        let mut steps = Vec::with_capacity(32);
        for (index, flight) in self.flights.iter().enumerate() {
            let first = index == 0 || self.flights[index - 1].channel() != flight.channel();
            if first && !self.behind_discard(flight) {
                steps.push(Step::Deliver(index));
            }
        }
        steps.extend(self.moves(bounds).into_iter().map(Step::Change));
        for node in self.active(bounds) {
            for slot in 0..bounds.pages as u8 {
                self.local_steps(node, slot, bounds, &mut steps);
            }
        }
        for node in self.live(bounds) {
            if self.losses > 0 && !self.authority.is_gone(node) {
                steps.push(Step::Kill(node));
            }
            if self.unaware & node.bit() != 0 {
                steps.push(Step::Learn(node));
            }
        }
        if self.discards > 0 {
            for slot in 0..bounds.pages as u8 {
                if self.discarding[slot as usize] == 0
                    && self.manager(slot).is_some()
                    && !self.handed(slot)
                {
                    steps.push(Step::BeginDiscard(slot));
                }
            }
        }
        steps
    }

    /// The manager sent it after an order to discard that has not arrived.
    fn behind_discard(&self, flight: &Flight) -> bool {
        let at = flight.slot as usize;
        let here = self.nodes[flight.to.index()].tables.locals[at].generation();
        Some(flight.from) == self.manager(flight.slot)
            && self.discarding[at] & flight.to.bit() != 0
            && flight.message.generation != here
    }

    /// Nobody but the manager has the page, as far as the manager knows.
    fn unshared(&self, slot: u8) -> bool {
        let Some(manager) = self.manager(slot) else {
            return false;
        };
        let entry = &self.nodes[manager.index()].tables.entries[slot as usize];
        entry.phase() == Phase::Idle
            && entry.copyset() == 0
            && entry.owner().is_none_or(|owner| owner == manager)
    }

    fn local_steps(&self, node: NodeId, slot: u8, bounds: &Bounds, steps: &mut Vec<Step>) {
        let index = node.index();
        let local = self.nodes[index].tables.locals[slot as usize];
        let mapped = self.frames[index][slot as usize].mapped;
        if self.faults[index] > 0 && (local.pending().is_none() || local.ahead()) {
            if mapped.is_none() {
                steps.push(Step::Fault(node, slot, Access::Read, false));
            }
            if mapped != Some(Access::Write) {
                steps.push(Step::Fault(node, slot, Access::Write, false));
            }
            if bounds.ahead && mapped.is_none() && local.pending().is_none() {
                steps.push(Step::Fault(node, slot, Access::Read, true));
            }
        }
        let is_outdated = self.outdated[slot as usize] & node.bit() != 0;
        if is_outdated && mapped.is_none() && local.pending().is_none() {
            steps.push(Step::AskAgain(node, slot));
        }
        let at_home = bounds.home && local.owner() && self.manager(slot) == Some(node);
        if self.evictions[index] > 0 && local.evictable() && !at_home {
            steps.push(Step::Evict(node, slot));
        }
        let before_me = self.discarding[slot as usize];
        if before_me & node.bit() != 0 {
            let last = before_me == node.bit() || bounds.hasty && self.unshared(slot);
            if last || Some(node) != self.manager(slot) {
                steps.push(Step::Discard(node, slot));
            }
        }
        if self.manager(slot) == Some(node) && before_me == 0 {
            self.hand_steps(node, slot, bounds, steps);
        }
    }

    fn hand_steps(&self, node: NodeId, slot: u8, bounds: &Bounds, steps: &mut Vec<Step>) {
        let entry = &self.nodes[node.index()].tables.entries[slot as usize];
        let begun = entry.phase() == Phase::Hand && entry.party() != node;
        if begun || entry.heir().is_some() {
            if self.recalls > 0 {
                steps.push(Step::Recall(node, slot));
            }
        } else if entry.phase() != Phase::Hand && self.hand_overs > 0 {
            let others = self.active(bounds).filter(|&other| other != node);
            steps.extend(others.map(|other| Step::HandOver(node, slot, other)));
        }
    }

    pub(super) fn take(&mut self, step: Step, bounds: &Bounds) -> Result<(), Flaw> {
        match step {
            Step::Deliver(index) => {
                let flight = self.flights.remove(index);
                let event = Event::Message {
                    from: flight.from,
                    message: flight.message,
                };
                self.step(flight.to, flight.slot, event, flight.version)?;
            }
            Step::Fault(node, slot, access, ahead) => {
                self.faults[node.index()] -= 1;
                self.outdated[slot as usize] &= !node.bit();
                let page = self.page(slot);
                let event = Event::Fault {
                    page,
                    access,
                    ahead,
                };
                self.step(node, slot, event, None)?;
            }
            Step::AskAgain(node, slot) => {
                self.outdated[slot as usize] &= !node.bit();
                let event = Event::Fault {
                    page: self.page(slot),
                    access: Access::Read,
                    ahead: false,
                };
                self.step(node, slot, event, None)?;
            }
            Step::Evict(node, slot) => {
                self.evictions[node.index()] -= 1;
                let page = self.page(slot);
                let manager = self.manager(slot);
                let to = if bounds.home { manager } else { None };
                self.step(node, slot, Event::Evict { page, to }, None)?;
            }
            Step::BeginDiscard(slot) => {
                self.discards -= 1;
                let nodes: u32 = self.live(bounds).map(NodeId::bit).sum();
                self.discarding[slot as usize] = nodes;
            }
            Step::Discard(node, slot) => self.discard(node, slot)?,
            Step::HandOver(node, slot, to) => {
                self.hand_overs -= 1;
                let page = self.page(slot);
                self.step(node, slot, Event::HandOver { page, to }, None)?;
            }
            Step::Recall(node, slot) => {
                self.recalls -= 1;
                let page = self.page(slot);
                self.step(node, slot, Event::Recall { page }, None)?;
            }
            Step::Change(step) => self.make(step, bounds)?,
            Step::Kill(node) => {
                self.kill(node, bounds);
                self.end_of_change(bounds);
            }
            Step::Learn(node) => self.learn(node, bounds)?,
        }
        self.go_on(bounds);
        self.write_all_the_time(bounds);
        Ok(())
    }

    fn discard(&mut self, node: NodeId, slot: u8) -> Result<(), Flaw> {
        let at = slot as usize;
        self.discarding[at] &= !node.bit();
        self.frames[node.index()][at] = Frame::default();
        if Some(node) == self.manager(slot) {
            self.latest[at] = ZERO_VERSION;
            for flight in &mut self.flights {
                if flight.slot == slot && flight.version.is_some() {
                    flight.version = Some(STALE);
                }
            }
        }
        let page = self.page(slot);
        self.step(node, slot, Event::Discard { page }, None)
    }

    fn kill(&mut self, node: NodeId, bounds: &Bounds) {
        let managed: Vec<bool> = (0..bounds.pages as u8)
            .map(|slot| self.manager(slot) == Some(node))
            .collect();
        self.losses -= 1;
        self.killed = Some(node);
        self.unaware = self.live(bounds).map(NodeId::bit).sum();
        self.flights.retain(|flight| flight.to != node);
        for slot in 0..bounds.pages as u8 {
            let at = slot as usize;
            self.discarding[at] &= !node.bit();
            self.outdated[at] &= !node.bit();
            // Nobody will ever discard what the manager cannot.
            if managed[at] {
                self.discarding[at] = 0;
            }
        }
        self.frames[node.index()] = Default::default();
    }

    fn learn(&mut self, node: NodeId, bounds: &Bounds) -> Result<(), Flaw> {
        self.unaware &= !node.bit();
        let Some(dead) = self.killed else {
            return Ok(());
        };
        self.flights
            .retain(|flight| flight.from != dead || flight.to != node);
        for slot in 0..bounds.pages as u8 {
            let page = self.page(slot);
            self.step(node, slot, Event::PeerLost { node: dead, page }, None)?;
        }
        Ok(())
    }

    pub(super) fn step(
        &mut self,
        node: NodeId,
        slot: u8,
        event: Event,
        incoming: Option<u32>,
    ) -> Result<(), Flaw> {
        let mut outcome = Ok(());
        let killed = self.killed;
        let frame = &mut self.frames[node.index()][slot as usize];
        let flights = &mut self.flights;
        let outdated = &mut self.outdated[slot as usize];
        let quiet = &mut self.authority.quiet;
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
            if action == Action::Quiet {
                *quiet |= node.bit();
            }
            if let Action::Outdated { .. } = action {
                *outdated |= node.bit();
            }
            let (Action::Send { to, message } | Action::Give { to, message, .. }) = action else {
                return;
            };
            if killed == Some(to) {
                return;
            }
            let flight = Flight {
                slot,
                from: node,
                to,
                message,
                version,
            };
            let channel = flight.channel();
            let at = flights.partition_point(|other| other.channel() <= channel);
            flights.insert(at, flight);
        };
        self.nodes[node.index()].step(event, &mut sink);
        outcome
    }

    fn write_all_the_time(&mut self, bounds: &Bounds) {
        for slot in 0..bounds.pages {
            let writer = self
                .live(bounds)
                .find(|node| self.frames[node.index()][slot].mapped == Some(Access::Write));
            let Some(writer) = writer else {
                continue;
            };
            self.latest[slot] = FRESH;
            for node in self.live(bounds) {
                let frame = &mut self.frames[node.index()][slot];
                if node == writer {
                    frame.version = FRESH;
                } else if frame.mapped.is_some() {
                    frame.version = STALE;
                }
            }
            for flight in &mut self.flights {
                if flight.slot as usize == slot && flight.version.is_some() {
                    flight.version = Some(STALE);
                }
            }
        }
    }

    pub(super) fn judge(&self, bounds: &Bounds) -> Result<(), Flaw> {
        self.judge_gone(bounds)?;
        let quiet = self.flights.is_empty() && self.unaware == 0;
        for slot in 0..bounds.pages as u8 {
            let at = slot as usize;
            let discarding = self.discarding[at] != 0;
            let page = self.page(slot);
            let in_flight = self.entries_in_flight(slot).count() as u32;
            let managers = self.managers(slot).count() as u32;
            one_manager(page, managers, in_flight, self.killed.is_some())?;
            let manager = self.manager(slot);
            let mut judge = Judge::new(page, self.latest[at]);
            for node in self.live(bounds) {
                let local = self.nodes[node.index()].tables.locals[at];
                judge.node(node, self.frames[node.index()][at], local)?;
                if quiet && !discarding {
                    idle_node(page, node, local)?;
                }
            }
            let directory = match manager {
                Some(node) => Some(self.nodes[node.index()].tables.entries[at]),
                None => self.entries_in_flight(slot).next().map(Entry::restore),
            };
            let Some(entry) = directory else {
                judge.verdict(self.ownerships_in_flight(slot), 0, u32::MAX)?;
                continue;
            };
            let lost = entry.lost();
            let one = u32::from(!entry.untouched() && !lost);
            let unclear = discarding || self.killed.is_some() && !quiet;
            let least = if unclear { 0 } else { one };
            let most = if discarding { u32::MAX } else { one };
            judge.verdict(self.ownerships_in_flight(slot), least, most)?;
            if lost {
                judge.lost()?;
            }
            if let (Some(manager), true) = (manager, quiet && !discarding) {
                judge.idle(manager, &entry)?;
            }
        }
        Ok(())
    }

    /// Messages that carry the ownership and will be accepted.
    fn ownerships_in_flight(&self, slot: u8) -> u32 {
        let carries = |flight: &&Flight| {
            let receiver = &self.nodes[flight.to.index()];
            flight.slot == slot
                && carries_ownership(&flight.message)
                && !receiver.is_dead(flight.from)
                && receiver.tables.locals[slot as usize].generation() == flight.message.generation
        };
        self.flights.iter().filter(carries).count() as u32
    }

    pub(super) fn fingerprint(&self, bounds: &Bounds) -> u64 {
        let plain = self.fingerprint_of(bounds, [0, 1]);
        if bounds.pages == 2 && matches!(bounds.manager, ManagerOf::Fixed(_)) {
            plain.min(self.fingerprint_of(bounds, [1, 0]))
        } else {
            plain
        }
    }

    fn fingerprint_of(&self, bounds: &Bounds, order: [usize; PAGES]) -> u64 {
        let mut mixer = Mixer(0x9E37_79B9_7F4A_7C15);
        for &slot in order.iter().take(bounds.pages.max(1)) {
            self.mix_page(bounds, slot, &mut mixer);
        }
        for node in 0..bounds.nodes {
            mixer.add(u64::from(self.faults[node]) << 8 | u64::from(self.evictions[node]));
            let core = &self.nodes[node];
            mixer.add(u64::from(core.dead) << 32 | u64::from(core.closed));
            mixer.add(u64::from(core.handing) << 8 | u64::from(core.held));
            mixer.add(u64::from(core.absent) << 8 | u64::from(core.leaving));
            for other in 0..bounds.nodes {
                mixer.add(u64::from(self.nodes[node].owned_pages[other]));
            }
        }
        mixer.add(u64::from(self.discards) << 8 | u64::from(self.losses));
        mixer.add(self.authority.bits());
        mixer.add(u64::from(self.hand_overs) << 8 | u64::from(self.recalls));
        mixer.add(self.killed.map_or(99, |node| u64::from(node.0)) << 32 | u64::from(self.unaware));
        mixer.finish()
    }

    fn mix_page(&self, bounds: &Bounds, slot: usize, mixer: &mut Mixer) {
        for node in 0..bounds.nodes {
            let tables = &self.nodes[node].tables;
            let frame = self.frames[node][slot];
            mixer.add(u64::from(tables.locals[slot].bits()) << 32 | u64::from(frame.version));
            mixer.add(frame.mapped.map_or(0, |access| 1 + access as u64));
        }
        for node in 0..bounds.nodes {
            let entry = &self.nodes[node].tables.entries[slot];
            if *entry != Entry::default() {
                mixer.add(node as u64 | 1 << 41);
                mixer.add_hash(entry);
            }
        }
        mixer.add(u64::from(self.latest[slot]) << 32 | u64::from(self.discarding[slot]));
        mixer.add(u64::from(self.outdated[slot]));
        for flight in &self.flights {
            if flight.slot as usize == slot {
                mixer.add(u64::from(flight.from.0) << 8 | u64::from(flight.to.0) | 1 << 40);
                mixer.add_hash(&(flight.message.generation, flight.message.body));
                mixer.add(flight.version.map_or(77, u64::from));
            }
        }
        mixer.add(u64::MAX);
    }

    pub(super) fn describe(&self, step: Step) -> String {
        match step {
            Step::Deliver(index) => {
                let flight = &self.flights[index];
                let message = flight.message;
                format!(
                    "{} -> {}: {} generation {} {:?}",
                    flight.from, flight.to, message.page, message.generation, message.body
                )
            }
            other => format!("{other:?}"),
        }
    }
}

/// A multiply-and-fold hash, for fingerprints.
struct Mixer(u64);

impl Mixer {
    fn add(&mut self, value: u64) {
        let product = u128::from(self.0 ^ value) * 0xD6E8_FEB8_6659_FD93_u128 + u128::from(value);
        self.0 = (product as u64) ^ ((product >> 64) as u64).rotate_left(17);
    }
    fn add_hash(&mut self, value: &impl std::hash::Hash) {
        value.hash(self);
    }
}

impl Hasher for Mixer {
    fn finish(&self) -> u64 {
        let mut last = Mixer(self.0);
        last.add(0x2545_F491_4F6C_DD1D);
        last.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for part in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..part.len()].copy_from_slice(part);
            self.add(u64::from_le_bytes(word) ^ (part.len() as u64) << 56);
        }
    }
    fn write_u8(&mut self, value: u8) {
        self.add(u64::from(value));
    }
    fn write_u32(&mut self, value: u32) {
        self.add(u64::from(value));
    }
    fn write_u64(&mut self, value: u64) {
        self.add(value);
    }
    fn write_isize(&mut self, value: isize) {
        self.add(value as u64);
    }
}
