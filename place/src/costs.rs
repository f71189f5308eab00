//! What a spread and a move cost, from measured figures.

use crate::inventory::Inventory;
use crate::placement::{Move, Placement};
use std::time::Duration;

/// How much slower an aggregate is on several hosts.
///
/// The part of accesses that may meet another host's page is taken as the probability that
/// two of its cores are on different hosts, `1 - Σ share²`. FragVisor's web server (Fig. 14)
/// needs 299 ms instead of 215 ms on 2+2 hosts: 1.39 at 0.5, so a slope of 0.78. Weft's own
/// figures for its programs are in `bench/RESULTS.md`; a program that shares nothing has 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SpreadCosts {
    /// The slow-down of an aggregate whose cores are all on different hosts, minus 1.
    pub near: f64,
    /// The same for hosts that are not in one group.
    pub far: f64,
}

/// What a move costs while it runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MoveCosts {
    /// From the decision to the first byte.
    pub start: Duration,
    pub mib_per_s: f64,
    /// The moves from which both were learned.
    pub seen: u32,
}

/// The newest move counts for one part in `NEWEST_COUNTS`, once there were more.
const NEWEST_COUNTS: u32 = 4;
/// A single move, however long it took, changes a prediction by this factor at most.
const RATIO_MAX: f64 = 16.0;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    pub spread: SpreadCosts,
    pub moves: MoveCosts,
    /// A move for an aggregate's own sake has to save more time within this than it takes.
    pub payback: Duration,
}

impl Default for Costs {
    /// The slow-down is that of FragVisor's web server. A move copies at seven tenths of a
    /// link of 10 Gbit/s.
    fn default() -> Costs {
        Costs {
            spread: SpreadCosts {
                near: 0.78,
                far: 1.56,
            },
            moves: MoveCosts {
                start: Duration::from_millis(100),
                mib_per_s: 830.0,
                seen: 0,
            },
            payback: Duration::from_secs(600),
        }
    }
}

impl Costs {
    /// How many times as long the aggregate needs as on one host; 1 or more.
    pub fn slow_down(&self, cluster: &Inventory, placement: &Placement) -> f64 {
        let cores = f64::from(placement.room().cores);
        let share = |cores_there: u32| f64::from(cores_there) / cores;
        let apart = 1.0
            - placement
                .parts
                .iter()
                .map(|p| share(p.room.cores).powi(2))
                .sum::<f64>();
        // A memory server's pages are as remote as another core's.
        let memory = placement.room().memory_mib as f64;
        let servers = placement.parts.iter().filter(|part| part.room.cores == 0);
        let served = servers.map(|part| part.room.memory_mib as f64).sum::<f64>() / memory;
        let home = placement.parts[0].host;
        let near = placement
            .parts
            .iter()
            .all(|part| cluster.near(home, part.host));
        let slope = if near {
            self.spread.near
        } else {
            self.spread.far
        };
        1.0 + slope * (apart + served).min(1.0)
    }

    pub fn move_time(&self, moving: &Move) -> Duration {
        self.copy_time(moving.memory_mib())
    }

    /// How long a move of so much memory takes.
    pub fn copy_time(&self, memory_mib: u64) -> Duration {
        let seconds = memory_mib as f64 / self.moves.mib_per_s;
        self.moves.start + Duration::from_secs_f64(seconds)
    }

    /// What a move took, so that the next prediction is nearer: all the way to the first one, half
    /// of the way to the second, and a quarter of it from the fourth on. A single time does not
    /// tell what was the start and what the rate, so both change by the same factor.
    pub fn learn(&mut self, moving: &Move, took: Duration) {
        let predicted = self.move_time(moving).as_secs_f64();
        let ratio = took.as_secs_f64() / predicted;
        if !ratio.is_finite() || ratio <= 0.0 {
            return;
        }
        let moves = &mut self.moves;
        moves.seen = moves.seen.saturating_add(1);
        let way = 1.0 / f64::from(moves.seen.min(NEWEST_COUNTS));
        let factor = 1.0 + way * (ratio.clamp(1.0 / RATIO_MAX, RATIO_MAX) - 1.0);
        moves.start = moves.start.mul_f64(factor);
        moves.mib_per_s /= factor;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::HostId;
    use crate::placement::Transfer;
    use crate::request::AggregateId;
    use crate::room::Room;

    #[test]
    fn predictions_come_nearer() {
        let moving = Move {
            aggregate: AggregateId(1),
            transfers: vec![Transfer {
                from: HostId(1),
                to: HostId(2),
                room: Room::new(1, 415),
            }],
        };
        let mut costs = Costs::default();
        let seconds = |costs: &Costs| costs.move_time(&moving).as_secs_f64();
        assert!((seconds(&costs) - 0.6).abs() < 0.01);
        let learn = |costs: &mut Costs, took| costs.learn(&moving, Duration::from_secs_f64(took));
        // All the way to the first one, half of the way to the second.
        learn(&mut costs, 1.2);
        assert!((seconds(&costs) - 1.2).abs() < 0.01);
        learn(&mut costs, 2.4);
        assert!((seconds(&costs) - 1.8).abs() < 0.01);
        // The start and the rate change alike.
        assert!((costs.moves.start.as_secs_f64() - 0.3).abs() < 0.01);
        // A time that nobody measured teaches nothing.
        let before = costs;
        learn(&mut costs, 0.0);
        assert_eq!(costs, before);
        for _ in 0..40 {
            learn(&mut costs, 0.9);
        }
        assert!((seconds(&costs) - 0.9).abs() < 0.01);
    }
}
