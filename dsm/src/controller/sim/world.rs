//! All nodes of a run, the links between them, and what happens next.

use std::collections::VecDeque;
use std::time::Duration;

use super::authority::Authority;
use super::host::{Host, Packet};
use super::saved::Saves;
use super::{BadAuthority, BadShell, DRAIN_STEPS_MAX, Outcome, Scenario};
use crate::checker::{Flaw, ZERO_VERSION};
use crate::config::Config;
use crate::controller::Event;
use crate::sim::{Failure, Random};
use crate::state::VecTables;
use crate::types::{Access, NodeId, Page, Policy};

pub(super) struct World {
    pub(super) seed: u64,
    pub(super) random: Random,
    pub(super) scenario: Scenario,
    pub(super) hosts: Vec<Host>,
    /// By pair of nodes: frames that a lock's holder put together, not yet sent.
    pub(super) queued: Vec<VecDeque<Packet>>,
    /// By pair of nodes: frames on the link.
    pub(super) links: Vec<VecDeque<Packet>>,
    pub(super) latest: Vec<u32>,
    pub(super) versions: u32,
    pub(super) now: Duration,
    pub(super) threads: u64,
    /// The page that was used last of those that are used one after the other.
    pub(super) walker: u64,
    /// A node whose users do nothing.
    pub(super) resting: Option<usize>,
    /// All users do nothing.
    pub(super) stands: bool,
    /// Dead nodes, a bit for each.
    pub(super) killed: u32,
    /// By node, the dead nodes that it has not learned of.
    pub(super) unaware: Vec<u32>,
    pub(super) shown: VecDeque<String>,
    pub(super) outcome: Outcome,
    pub(super) bad: Option<BadShell>,
    pub(super) bad_authority: Option<BadAuthority>,
    /// Numbers of nodes that are not there, a bit for each.
    pub(super) absent: u32,
    pub(super) authority: Authority,
    pub(super) saves: Saves,
}

impl World {
    pub(super) fn new(seed: u64, scenario: &Scenario) -> World {
        let pairs = usize::from(scenario.nodes).pow(2);
        World {
            seed,
            random: Random::new(seed),
            scenario: scenario.clone(),
            hosts: (0..scenario.nodes.into())
                .map(|node| host_of(scenario, node, scenario.absent))
                .collect(),
            queued: vec![VecDeque::new(); pairs],
            links: vec![VecDeque::new(); pairs],
            latest: vec![ZERO_VERSION; scenario.pages as usize],
            versions: ZERO_VERSION,
            now: Duration::ZERO,
            threads: 0,
            walker: 0,
            resting: None,
            stands: false,
            killed: 0,
            unaware: vec![0; scenario.nodes.into()],
            shown: VecDeque::new(),
            outcome: Outcome::default(),
            bad: None,
            bad_authority: None,
            absent: scenario.absent,
            authority: Authority::default(),
            saves: Saves::default(),
        }
    }

    /// A node that joins, as it is at first: it counts itself as present.
    pub(super) fn new_host(&self, node: usize) -> Host {
        let mut host = host_of(&self.scenario, node, self.absent & !(1 << node));
        #[cfg(test)]
        {
            host.controller.mutant = self.hosts[node].controller.mutant;
        }
        host.lower_budget(0);
        host
    }

    pub(super) fn run(mut self) -> Result<Outcome, Box<Failure>> {
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

    pub(super) fn play(&mut self) -> Result<(), Flaw> {
        self.adopt_some();
        if self.scenario.absent_pages > 0 {
            // They are as in the save that they came from.
            self.saves.last = Some(self.latest.clone());
        }
        for step in 0..self.scenario.steps {
            if step == self.scenario.steps / 4 && self.random.per_mille(500) {
                self.resting = Some(self.any_node());
            }
            if self.scenario.deaths > 0 && self.random.per_mille(5) {
                self.drop_save()?;
                self.kill();
            }
            if self.scenario.turns > 0 && self.random.per_mille(self.scenario.turns) {
                self.pin_in_turns()?;
            }
            if self.scenario.follows > 0 && self.random.per_mille(self.scenario.follows) {
                self.follow()?;
            }
            if self.scenario.precopies > 0 && self.random.per_mille(self.scenario.precopies) {
                self.begin_or_end_precopy();
            }
            if self.scenario.rests > 0 && self.random.per_mille(self.scenario.rests) {
                self.rest_all()?;
            }
            match self.random.below(4) {
                0 => self.begin_access()?,
                _ => self.work()?,
            }
            self.go_on_saving()?;
            self.load_some()?;
            let changes = self.scenario.changes > 0 && !self.saves() || !self.authority.is_over();
            if changes && self.random.per_mille(self.scenario.authority) {
                self.change_membership(true)?;
            }
        }
        self.end_drains();
        self.end_precopies();
        self.resume_prefetches()?;
        self.scenario.evictor = 1000;
        // What is due comes within the bound on steps.
        self.scenario.tick_max = self.scenario.tick_max.max(Duration::from_micros(1));
        self.resting = None;
        self.finish_save()?;
        self.drain()?;
        // Every page is somewhere, with its last bytes, or is reported as lost.
        for page in 0..self.scenario.pages {
            let node = self.any_node();
            self.access(node, page, Access::Read)?;
            self.drain()?;
        }
        self.judge_idle()
    }

    /// A node that is alive.
    pub(super) fn any_node(&mut self) -> usize {
        loop {
            let node = self.random.below(self.hosts.len() as u64) as usize;
            if self.is_alive(node) {
                return node;
            }
        }
    }

    pub(super) fn any_page(&mut self) -> u64 {
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

    pub(super) fn adopt_some(&mut self) {
        for page in 0..self.scenario.pages {
            let manager = self.hosts[0].manager_of(page);
            if self.scenario.absent_pages > 0 && self.random.per_mille(self.scenario.absent_pages) {
                self.adopt_absent(manager, page);
            } else if self.random.per_mille(self.scenario.adopted)
                && self.hosts[manager].controller.adopt(page).is_ok()
            {
                self.versions += 1;
                self.latest[page as usize] = self.versions;
                self.hosts[manager].fill(page, self.versions);
            }
        }
    }

    fn adopt_absent(&mut self, manager: usize, page: u64) {
        let host = &mut self.hosts[manager];
        if host.controller.adopt_absent(page).is_ok() {
            self.versions += 1;
            self.latest[page as usize] = self.versions;
            host.file.insert(page, self.versions);
            host.has_cut = true;
        }
    }

    /// Perhaps a page is read that nobody has asked for.
    fn load_some(&mut self) -> Result<(), Flaw> {
        if self.scenario.loads == 0 || !self.random.per_mille(self.scenario.loads) {
            return Ok(());
        }
        let node = self.any_node();
        let host = &mut self.hosts[node];
        let mut absent = host.file.keys().copied();
        let Some(page) = absent.find(|page| host.controller.may_load(*page)) else {
            return Ok(());
        };
        host.load(NodeId(node as u8), page)?;
        host.controller.loaded(page);
        self.outcome.loaded += 1;
        self.judge(page)
    }

    /// One thing that any thread or link of any node does.
    pub(super) fn work(&mut self) -> Result<(), Flaw> {
        self.now +=
            Duration::from_nanos(self.random.below(self.scenario.tick_max.as_nanos() as u64));
        let node = self.any_node();
        if self.unaware[node] != 0 && self.random.per_mille(50) {
            return self.learn(node);
        }
        if self.hosts[node].controller.drains() && self.random.per_mille(600) {
            return self.drain_on(node);
        }
        if self.hosts[node].controller.is_precopying() && self.random.per_mille(500) {
            return self.precopy_on(node);
        }
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

    pub(super) fn drain(&mut self) -> Result<(), Flaw> {
        for _ in 0..DRAIN_STEPS_MAX {
            self.work()?;
            if !self.authority.is_over() {
                self.change_membership(false)?;
                continue;
            }
            let in_flight = self
                .queued
                .iter()
                .chain(&self.links)
                .any(|link| !link.is_empty());
            let unaware = self.alive().any(|node| self.unaware[node] != 0);
            if !in_flight && !unaware && self.alive().all(|node| self.is_idle(node)) {
                return Ok(());
            }
        }
        let stuck = self.alive().find_map(|node| {
            let page = self.hosts[node].unanswered()?;
            Some(Flaw::Unanswered {
                page: Page(page),
                node: NodeId(node as u8),
                what: "a request of a user was not answered",
            })
        });
        Err(stuck.unwrap_or(Flaw::Endless("messages and operations do not cease")))
    }
}

/// A node that has nothing yet.
fn host_of(scenario: &Scenario, node: usize, absent: u32) -> Host {
    let mut tables = VecTables::new(scenario.pages as usize);
    for page in (0..scenario.pages.min(64)).filter(|page| scenario.updated & 1 << page != 0) {
        tables.set_policy(Page(page), Policy::Update);
    }
    let mut config = Config::new(NodeId(node as u8), scenario.nodes, scenario.manager);
    config.absent = absent;
    let (budget, kind) = (scenario.budgets[node], scenario.kinds[node]);
    Host::new(
        &config,
        tables,
        scenario.pages,
        budget,
        kind,
        scenario.others,
    )
}
