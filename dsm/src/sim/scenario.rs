//! What a seed stands for: its generator and its scenario.

use crate::config::ManagerOf;
use crate::ranges::Ranges;
use crate::types::NodeId;

/// A small generator whose sequence will never change (SplitMix64).
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// Starts a sequence.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }
    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
    /// A number below `bound`, which is not 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(bound)) >> 64) as u64
    }
    /// True in this many of a thousand cases.
    pub fn per_mille(&mut self, chance: u64) -> bool {
        self.below(1000) < chance
    }
}

/// What a seed stands for.
#[derive(Debug, Clone)]
pub struct Scenario {
    pub nodes: u8,
    /// Pages, spread over chunks when management is interleaved.
    pub pages: usize,
    pub manager: ManagerOf,
    /// The migratory rule.
    pub migratory: bool,
    /// One stay of a migratory page in this many is probed.
    pub probe_every: u8,
    /// Steps in which the program runs.
    pub steps: u32,
    /// Pages that each node may own before pushes to it stop.
    pub budget_pages: u32,
    /// Per mille of steps that are evictions.
    pub evictions: u64,
    /// Per mille of steps that are discards.
    pub discards: u64,
    /// Per mille of steps that are reconnects.
    pub reconnects: u64,
    /// Nodes that may die.
    pub deaths: u32,
    /// Per mille of program accesses that write.
    pub writes: u64,
    /// Per mille of steps that hand a manager over, or recall that.
    pub hand_overs: u64,
    /// Pages of policy `Update`, a bit for each.
    pub updated: u32,
}

impl Scenario {
    /// The scenario of a seed.
    pub fn from_seed(seed: u64) -> Scenario {
        let mut random = Random::new(seed ^ 0x5CE0_A210);
        let nodes = 2 + random.below(if random.clone().per_mille(100) { 31 } else { 5 }) as u8;
        let pages = 1 + random.below(12) as usize;
        let interleaved = random.per_mille(400);
        let manager = if interleaved {
            ManagerOf::Interleaved
        } else {
            ManagerOf::Fixed(NodeId(random.below(u64::from(nodes)) as u8))
        };
        let manager = ranges(seed, nodes, pages).unwrap_or(manager);
        Scenario {
            nodes,
            pages,
            manager,
            hand_overs: hand_overs(seed, manager),
            migratory: random.per_mille(700),
            probe_every: probe_every(seed),
            steps: 200 + random.below(1200) as u32,
            budget_pages: match random.below(4) {
                0 => u32::MAX,
                1 => 1,
                _ => 1 + random.below(pages as u64) as u32,
            },
            evictions: random.below(150),
            discards: if random.per_mille(400) {
                random.below(30)
            } else {
                0
            },
            reconnects: random.below(40),
            deaths: if random.per_mille(350) {
                1 + random.below(2) as u32
            } else {
                0
            },
            writes: random.below(1000),
            updated: updated(seed),
        }
    }
}

/// Two seeds in three whose managers may change hand them over. From a sequence of its
/// own, as below.
fn hand_overs(seed: u64, manager: ManagerOf) -> u64 {
    let mut random = Random::new(seed ^ 0x4A2D_0E00);
    match manager {
        ManagerOf::Fixed(_) => 0,
        _ if random.per_mille(333) => 0,
        _ => 1 + random.below(120),
    }
}

/// One seed in two probes every stay. From a sequence of its own, as below.
fn probe_every(seed: u64) -> u8 {
    let mut random = Random::new(seed ^ 0x9E0B_E000);
    match random.per_mille(500) {
        true => 1,
        false => 2 + random.below(7) as u8,
    }
}

/// Some pages of two seeds in five are kept up to date. From a sequence of its own, so
/// that the other draws of a seed stay what they were.
fn updated(seed: u64) -> u32 {
    let mut random = Random::new(seed ^ 0x0DA7_E000);
    match random.per_mille(400) {
        true => random.bits() as u32,
        false => 0,
    }
}

/// Ranges of random lengths, some of them empty, for one seed in four. From a
/// sequence of its own, so that the other draws of a seed stay what they were.
fn ranges(seed: u64, nodes: u8, pages: usize) -> Option<ManagerOf> {
    let mut random = Random::new(seed ^ 0x7A26_E500);
    if !random.per_mille(250) {
        return None;
    }
    let mut ends: Vec<u64> = (0..nodes).map(|_| random.below(pages as u64 + 1)).collect();
    ends.sort_unstable();
    // All empty is no layout: then the seed stays as it was.
    Ranges::new(&ends).ok().map(ManagerOf::Ranges)
}
