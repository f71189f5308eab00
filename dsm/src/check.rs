//! Exhaustive model check: every interleaving of a bounded number of faults,
//! evictions, discards and node losses, for a few nodes and pages.
//!
//! * The search goes depth first and keeps 64-bit fingerprints of the states it
//!   has seen (a stack of states, not a frontier, is all the memory it needs
//!   beside them). A state that is reached again while still on the path is an
//!   endless exchange of messages, and reported.
//! * Channels are first-in first-out per pair of nodes *and page*: weaker than
//!   the per-pair order of production, so every production order is covered.
//! * A node that may write writes all the time: after each step every other
//!   copy, in memory or in flight, counts as stale.
//! * Pages are alike where one node manages all, so there a state and the same
//!   with pages exchanged are one state.
//! * A dead node's last messages: any prefix of them arrives, since a survivor
//!   may hear of the death at any moment.

mod authority;
mod membership;
mod world;

use crate::checker::Flaw;
use crate::config::ManagerOf;
use crate::ranges::Ranges;
use crate::types::NodeId;
use std::collections::HashMap;
use std::fmt::Write as _;
use std::hash::{BuildHasherDefault, Hasher};
use world::{NODES, PAGES, Step, World};

/// A change of membership.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// A node that is not there at first joins.
    Join(NodeId),
    /// A node leaves.
    Leave(NodeId),
}

/// How much is explored.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Nodes, 1 to 3.
    pub nodes: usize,
    /// Pages, 1 or 2.
    pub pages: usize,
    pub manager: ManagerOf,
    /// Whether the migratory rule is on.
    pub migratory: bool,
    /// One stay of a migratory page in this many is probed.
    pub probe_every: u8,
    /// Faults per node, over all pages.
    pub faults: u8,
    /// Whether some of the faults may be read-ahead.
    pub ahead: bool,
    /// Whether pages are of policy `Update`: a node that had one taken by a write may
    /// ask for it again, at any time or never.
    pub update: bool,
    /// Evictions per node, over all pages.
    pub evictions: u8,
    /// Whether pages that are owned leave for their managers only, as the memory of an
    /// Aggregate VM's slices does.
    pub home: bool,
    /// Whether no node but the first has room for what others push.
    pub full: bool,
    /// Discards, over all pages.
    pub discards: u8,
    /// Whether the manager may discard first when nobody else has the page, its
    /// order to the others being on its way.
    pub hasty: bool,
    /// Hand-overs of a page's manager to another node, over all pages.
    pub hand_overs: u8,
    /// Hand-overs that are recalled.
    pub recalls: u8,
    /// A node that joins or leaves.
    pub change: Option<Change>,
    /// Whether the leave may be cancelled.
    pub cancels: bool,
    /// Nodes that die.
    pub losses: u8,
    /// The search gives up beyond this many states.
    pub states_max: u64,
}

impl Bounds {
    /// The searches too large for a test run: 3 nodes and 2 pages, with two
    /// faults per node; the same with evictions, to whom has room and to the manager,
    /// with room at one node only, and with a discard; 2 nodes and 2 pages with a
    /// death; 3 nodes and 1 page with a death, and with room at one node only. Then
    /// managers that are handed over from the first node: with evictions, twice, two
    /// pages, and with a death. Then changes of membership: a join with a death and with
    /// evictions, the manager's leave, and leaves that are cancelled, with a death.
    pub fn large(manager: ManagerOf) -> [Bounds; 21] {
        let base = Bounds {
            nodes: 3,
            pages: 2,
            manager,
            migratory: true,
            probe_every: 1,
            faults: 2,
            ahead: false,
            update: false,
            evictions: 1,
            home: false,
            full: false,
            discards: 0,
            hasty: false,
            hand_overs: 0,
            recalls: 0,
            change: None,
            cancels: false,
            losses: 0,
            states_max: 100_000_000,
        };
        let handed = Bounds {
            pages: 1,
            manager: Ranges::new(&[2]).map_or(manager, ManagerOf::Ranges),
            hand_overs: 1,
            ..base
        };
        [
            base,
            Bounds { home: true, ..base },
            Bounds {
                evictions: 0,
                full: true,
                ..base
            },
            Bounds {
                evictions: 0,
                ahead: true,
                ..base
            },
            Bounds {
                evictions: 0,
                update: true,
                ..base
            },
            Bounds {
                pages: 1,
                faults: 3,
                update: true,
                ..base
            },
            Bounds {
                evictions: 0,
                discards: 1,
                ..base
            },
            Bounds {
                nodes: 2,
                faults: 3,
                losses: 1,
                ..base
            },
            Bounds {
                pages: 1,
                losses: 1,
                ..base
            },
            Bounds {
                pages: 1,
                full: true,
                losses: 1,
                ..base
            },
            handed,
            Bounds {
                evictions: 0,
                hand_overs: 2,
                recalls: 1,
                ..handed
            },
            Bounds {
                pages: 2,
                evictions: 0,
                ..handed
            },
            Bounds {
                faults: 1,
                losses: 1,
                ..handed
            },
            Bounds {
                evictions: 0,
                recalls: 1,
                losses: 1,
                ..handed
            },
            Bounds {
                faults: 1,
                evictions: 0,
                hand_overs: 2,
                losses: 1,
                ..handed
            },
            Bounds {
                change: Some(Change::Join(NodeId(2))),
                losses: 1,
                faults: 1,
                evictions: 0,
                ..handed
            },
            Bounds {
                change: Some(Change::Join(NodeId(2))),
                faults: 1,
                ..handed
            },
            Bounds {
                change: Some(Change::Leave(NodeId(0))),
                faults: 1,
                ..handed
            },
            Bounds {
                nodes: 2,
                change: Some(Change::Leave(NodeId(0))),
                cancels: true,
                losses: 1,
                ..handed
            },
            Bounds {
                change: Some(Change::Leave(NodeId(2))),
                cancels: true,
                faults: 1,
                evictions: 0,
                hand_overs: 0,
                losses: 1,
                ..handed
            },
        ]
    }
}

/// What a search found out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Explored {
    /// Different states.
    pub states: u64,
    /// Steps from state to state.
    pub transitions: u64,
    /// Longest path.
    pub depth_max: usize,
    /// States in which the change of membership was carried out.
    pub changed: u64,
    /// Whether nothing was left out.
    pub complete: bool,
}

/// A flaw and how to get there.
#[derive(Debug, Clone)]
pub struct Counterexample {
    /// What is wrong.
    pub flaw: Flaw,
    /// The steps, one per line.
    pub trace: String,
}

/// Explores everything within the bounds.
///
/// # Errors
/// The first flaw, with the path to it.
pub fn explore(bounds: &Bounds) -> Result<Explored, Box<Counterexample>> {
    Search::new(bounds, World::new(bounds)).run()
}

struct Search<'a> {
    bounds: &'a Bounds,
    seen: HashMap<u64, bool, BuildHasherDefault<Identity>>,
    stack: Vec<(World, Vec<Step>, u64)>,
    explored: Explored,
}

impl<'a> Search<'a> {
    fn new(bounds: &'a Bounds, world: World) -> Search<'a> {
        assert!((1..=NODES).contains(&bounds.nodes) && (1..=PAGES).contains(&bounds.pages));
        let fingerprint = world.fingerprint(bounds);
        let steps = world.steps(bounds);
        let mut seen = HashMap::default();
        seen.insert(fingerprint, true);
        Search {
            bounds,
            seen,
            stack: vec![(world, steps, fingerprint)],
            explored: Explored {
                states: 1,
                transitions: 0,
                depth_max: 1,
                changed: 0,
                complete: true,
            },
        }
    }

    fn run(mut self) -> Result<Explored, Box<Counterexample>> {
        while let Some((world, steps, fingerprint)) = self.stack.last_mut() {
            let Some(step) = steps.pop() else {
                self.seen.insert(*fingerprint, false);
                self.stack.pop();
                continue;
            };
            let mut next = world.clone();
            self.explored.transitions += 1;
            let outcome = next
                .take(step, self.bounds)
                .and_then(|()| next.judge(self.bounds));
            if let Err(flaw) = outcome {
                return Err(self.counterexample(flaw, step));
            }
            let fingerprint = next.fingerprint(self.bounds);
            match self.seen.get(&fingerprint) {
                Some(true) => {
                    let flaw = Flaw::Endless("the same state again on one path");
                    return Err(self.counterexample(flaw, step));
                }
                Some(false) => continue,
                None => {}
            }
            if self.explored.states >= self.bounds.states_max {
                self.explored.complete = false;
                return Ok(self.explored);
            }
            self.explored.changed += u64::from(next.authority.done);
            self.seen.insert(fingerprint, true);
            let steps = next.steps(self.bounds);
            self.stack.push((next, steps, fingerprint));
            self.explored.states += 1;
            self.explored.depth_max = self.explored.depth_max.max(self.stack.len());
        }
        Ok(self.explored)
    }

    /// Replays the path from the start, since the stack holds only states.
    fn counterexample(&self, flaw: Flaw, last: Step) -> Box<Counterexample> {
        let mut trace = String::new();
        for pair in self.stack.windows(2) {
            let (before, after) = (&pair[0], &pair[1]);
            let step = before
                .0
                .steps(self.bounds)
                .into_iter()
                .find(|&step| {
                    let mut world = before.0.clone();
                    world.take(step, self.bounds).is_ok()
                        && world.fingerprint(self.bounds) == after.2
                })
                .map(|step| before.0.describe(step));
            let _ = writeln!(trace, "{}", step.unwrap_or_else(|| "?".into()));
        }
        if let Some((world, _, _)) = self.stack.last() {
            let _ = writeln!(trace, "{}", world.describe(last));
        }
        Box::new(Counterexample { flaw, trace })
    }
}

/// Fingerprints are hashes already.
#[derive(Default)]
struct Identity(u64);

impl Hasher for Identity {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, _: &[u8]) {}
    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
}

#[cfg(test)]
mod tests;
