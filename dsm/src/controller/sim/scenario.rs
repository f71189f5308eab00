//! The scenario of a seed: nodes, pages, budgets, and how likely what is.

use std::time::Duration;

use crate::config::ManagerOf;
use crate::controller::Budget;
use crate::ranges::Ranges;
use crate::sim::Random;
use crate::types::NodeId;

/// How a node's users get their pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A thread waits, and tells when it is at work.
    Waits,
    /// A user sleeps until its page is mapped.
    Sleeps,
}

/// What a seed stands for.
#[derive(Debug, Clone)]
pub struct Scenario {
    pub(super) nodes: u8,
    pub(super) pages: u64,
    /// The first pages are used more often than all others.
    pub(super) hot_pages: u64,
    /// Per mille of accesses to those.
    pub(super) hot: u64,
    pub(super) manager: ManagerOf,
    pub(super) budgets: Vec<Budget>,
    /// By node, whether its users sleep until their page is mapped.
    pub(super) kinds: Vec<Kind>,
    pub(super) steps: u32,
    /// Per mille of accesses to one page after the other.
    pub(super) walks: u64,
    /// The node whose users pin a page in turns.
    pub(super) turns_at: usize,
    /// Per mille of steps in which one of them does something.
    pub(super) turns: u64,
    /// Per mille of those that write.
    pub(super) turn_writes: u64,
    /// Per mille of accesses that write.
    pub(super) writes: u64,
    /// Pages that are kept up to date, a bit for each of the first.
    pub(super) updated: u64,
    /// Longest time between two steps.
    pub(super) tick_max: Duration,
    /// Per mille of its turns in which the thread that makes room runs, until the users
    /// have stopped.
    pub(super) evictor: u64,
    /// Nodes that may die.
    pub(super) deaths: u32,
    /// Pages of other nodes' parts that fit beside a node's own.
    pub(super) others: u64,
    /// Nodes that are not there at first, a bit for each.
    pub(super) absent: u32,
    /// Nodes that join or leave, or hand pages over.
    pub(super) changes: u32,
    /// Per mille of steps in which the authority does something.
    pub(super) authority: u64,
    /// Per mille of steps in which a user comes that pages follow, or leaves.
    pub(super) follows: u64,
    /// Per mille of pages that are not zero at first.
    pub(super) adopted: u64,
    /// Per mille of steps in which a pre-copy begins or ends.
    pub(super) precopies: u64,
    /// Per mille of steps in which all nodes rest.
    pub(super) rests: u64,
    /// Per mille of rests at which pages are relocated.
    pub(super) relocations: u64,
    /// Per mille of rests at which a save begins.
    pub(super) saves: u64,
    /// Per mille of pages that are not zero at first whose bytes are in a file.
    pub(super) absent_pages: u64,
    /// Per mille of turns in which one of these is read that nobody asked for.
    pub(super) loads: u64,
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
        let mut others = 0;
        if ranges.is_some() {
            let starts = std::iter::once(0).chain(ends.iter().copied());
            others = 1 + random.below(32);
            let own = starts.zip(&ends).map(|(start, end)| end - start);
            budgets = own.map(|own| Budget::new(own, others)).collect();
        }
        let scenario = Scenario {
            nodes,
            pages,
            hot_pages: 1 + random.below(6),
            hot: [500, 950][random.below(2) as usize],
            manager: ranges.map_or(fixed, ManagerOf::Ranges),
            budgets,
            kinds,
            steps: 300 + random.below(1500) as u32,
            walks: [0, 100, 900][random.below(3) as usize],
            turns_at: 0,
            turns: 0,
            turn_writes: 0,
            writes: random.below(1000),
            updated: match random.per_mille(400) {
                true => random.bits(),
                false => 0,
            },
            tick_max: Duration::from_nanos(1 + random.below(60_000)),
            evictor: [0, 20, 200, 1000][random.below(4) as usize],
            deaths: [0, 0, 1, 2][random.below(4) as usize],
            others,
            absent: 0,
            changes: 0,
            authority: 1000,
            follows: 0,
            adopted: 200,
            precopies: 0,
            rests: 0,
            relocations: 0,
            saves: 0,
            absent_pages: 0,
            loads: 0,
        };
        scenario
            .with_changes(seed)
            .with_turns(seed)
            .with_follows(seed)
            .with_precopies(seed)
            .with_rests(seed)
            .with_saves(seed)
            .with_absent(seed)
    }

    /// Whether managers may change.
    pub(super) fn spreads(&self) -> bool {
        matches!(self.manager, ManagerOf::Ranges(_))
    }

    /// In one seed of eight users of a node pin a page in turns. From a sequence of its own.
    fn with_turns(mut self, seed: u64) -> Scenario {
        let mut random = Random::new(seed ^ 0x7021_5000);
        if random.per_mille(125) {
            self.turns_at = random.below(self.nodes.into()) as usize;
            self.turns = 100 + random.below(600);
            self.turn_writes = [20, random.below(1000)][random.below(2) as usize];
            self.tick_max = self
                .tick_max
                .min(Duration::from_micros(1 + random.below(60)));
            self.steps += random.below(3000) as u32;
        }
        self
    }

    /// In one seed of four pages follow users. From a sequence of its own.
    fn with_follows(mut self, seed: u64) -> Scenario {
        let mut random = Random::new(seed ^ 0xF011_0300);
        if random.per_mille(250) {
            self.follows = [5, 20, 100][random.below(3) as usize];
        }
        self
    }

    /// In one seed of four nodes send pages ahead. From a sequence of its own.
    fn with_precopies(mut self, seed: u64) -> Scenario {
        let mut random = Random::new(seed ^ 0x93EC_0900);
        if random.per_mille(250) {
            self.precopies = [2, 5, 20][random.below(3) as usize];
            self.steps += random.below(3000) as u32;
            self.adopted = 900;
            self.writes = self.writes.min([100, 400, 1000][random.below(3) as usize]);
            self.relocations = 800;
        }
        self
    }

    /// In one seed of three all nodes rest now and then. From a sequence of its own.
    fn with_rests(mut self, seed: u64) -> Scenario {
        let mut random = Random::new(seed ^ 0x2E57_0600);
        if random.per_mille(333) {
            self.rests = 1 + random.below(3);
        }
        self
    }

    /// In one seed of three pages are saved behind their users. From a sequence of its own.
    fn with_saves(mut self, seed: u64) -> Scenario {
        let mut random = Random::new(seed ^ 0x5A7E_0A00);
        if random.per_mille(333) {
            self.saves = 300 + random.below(700);
            self.rests = self.rests.max(2 + random.below(10));
            self.adopted = self.adopted.max(random.below(1000));
        }
        self
    }

    /// In one seed of four pages are read from a file when they are needed. From a sequence of
    /// its own.
    fn with_absent(mut self, seed: u64) -> Scenario {
        let mut random = Random::new(seed ^ 0xAB5E_0700);
        if random.per_mille(250) {
            self.absent_pages = [200, 1000][random.below(2) as usize];
            self.loads = [0, 2, 50][random.below(3) as usize];
            self.adopted = self.adopted.max(random.below(1000));
        }
        self
    }

    /// Two seeds in three whose managers may change have changes of membership. From a
    /// sequence of its own, so that the other draws of a seed stay what they were.
    fn with_changes(mut self, seed: u64) -> Scenario {
        let mut random = Random::new(seed ^ 0x3E3B_E200);
        if matches!(self.manager, ManagerOf::Fixed(_)) || random.per_mille(333) {
            return self;
        }
        self.changes = 1 + random.below(6) as u32;
        self.authority = [1000, 300, 100][random.below(3) as usize];
        for _ in 0..random.below(3) {
            self.absent |= 1 << self.nodes;
            self.nodes += 1;
            self.budgets.push(Budget::new(0, self.others));
            self.kinds.push(self.kinds[0]);
        }
        self
    }
}
