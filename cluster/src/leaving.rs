//! What a drain of a host will come to, and how far it has come.

use crate::costs::MoveRecord;
use crate::work::{Placed, Work, WorkKind};
use std::collections::BTreeMap;
use std::time::Duration;
use weft_place::Costs;

/// What has to leave a host. Parts of machines move to other hosts; slices of programs are asked
/// to leave, and do if the program's other hosts have room.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Leaving {
    /// Names of what can leave.
    pub moves: Vec<String>,
    /// How long that takes, by the scheduler's costs.
    pub takes: Duration,
    /// Names of what cannot leave: it is there until it ends.
    pub stays: Vec<String>,
}

impl Leaving {
    /// `costs`: what moves cost, once some were seen ([`crate::Cluster::move_costs`]).
    pub fn of(work: &Work, costs: Option<&MoveRecord>, host: &str) -> Leaving {
        let departure = Departure::begin(work, costs, host);
        let here = parts_on(work, host);
        let stays = here.filter(|(placed, _)| !can_leave(placed, host));
        Leaving {
            stays: stays
                .map(|(placed, _)| placed.request.name.clone())
                .collect(),
            takes: departure.remaining(Duration::ZERO),
            moves: departure
                .parts
                .into_values()
                .map(|part| part.name)
                .collect(),
        }
    }
}

/// A drain that goes on. Times count from its beginning.
///
/// All that leaves shares the host's link and its processors: what is on its way at once takes as
/// long as one after the other. Each part takes what the costs say, times what those that have
/// left took of that.
#[derive(Clone, Debug)]
pub struct Departure {
    host: String,
    costs: Costs,
    /// By the numbers of what they are of.
    parts: BTreeMap<u64, Part>,
    left: usize,
    machines: Pace,
    programs: Pace,
}

#[derive(Clone, Debug)]
struct Part {
    name: String,
    kind: WorkKind,
    memory_mib: u64,
    /// When it was seen to be on its way.
    since: Option<Duration>,
}

/// How many times as long as predicted all took that have left. The prediction counts like one
/// of them.
#[derive(Clone, Copy, Debug)]
struct Pace {
    sum: f64,
    count: f64,
}

/// Of its prediction, what is left of a part that takes longer than that.
const AT_LEAST: f64 = 0.1;

impl Default for Pace {
    fn default() -> Pace {
        Pace {
            sum: 1.0,
            count: 1.0,
        }
    }
}

impl Pace {
    fn factor(&self) -> f64 {
        self.sum / self.count
    }

    fn learn(&mut self, ratio: f64) {
        self.sum += ratio;
        self.count += 1.0;
    }
}

impl Departure {
    pub fn begin(work: &Work, known: Option<&MoveRecord>, host: &str) -> Departure {
        let mut costs = Costs::default();
        if let Some(known) = known {
            costs.moves = known.costs();
        }
        let mut departure = Departure {
            host: host.to_owned(),
            costs,
            parts: BTreeMap::new(),
            left: 0,
            machines: Pace::default(),
            programs: Pace::default(),
        };
        departure.update(work, Duration::ZERO);
        departure
    }

    /// Learns how the cluster is now. The names of what has left the host, or ended, since the
    /// last time.
    pub fn update(&mut self, work: &Work, now: Duration) -> Vec<String> {
        let at_once = self.at_once();
        let mut known = std::mem::take(&mut self.parts);
        for (placed, memory_mib) in parts_on(work, &self.host) {
            if !can_leave(placed, &self.host) {
                continue;
            }
            let since = known.remove(&placed.id).and_then(|part| part.since);
            let kind = placed.request.kind;
            let is_on_its_way = kind == WorkKind::Program || is_ordered(placed, &self.host);
            let part = Part {
                name: placed.request.name.clone(),
                kind,
                memory_mib,
                since: is_on_its_way.then(|| since.unwrap_or(now)),
            };
            self.parts.insert(placed.id, part);
        }
        for (id, part) in &known {
            let runs = work.placed.get(&part.name).is_some_and(|at| at.id == *id);
            if let Some(since) = part.since.filter(|_| runs) {
                let took = now.saturating_sub(since).as_secs_f64();
                let ratio = took / at_once / self.predicted(part);
                match part.kind {
                    WorkKind::Machine => self.machines.learn(ratio),
                    WorkKind::Program => self.programs.learn(ratio),
                }
            }
        }
        self.left += known.len();
        known.into_values().map(|part| part.name).collect()
    }

    /// How many have left, and of how many.
    pub fn progress(&self) -> (usize, usize) {
        (self.left, self.left + self.parts.len())
    }

    /// How long the rest takes, if it finds room.
    pub fn remaining(&self, now: Duration) -> Duration {
        let at_once = self.at_once();
        let left = self.parts.values().map(|part| {
            let pace = match part.kind {
                WorkKind::Machine => self.machines,
                WorkKind::Program => self.programs,
            };
            let takes = self.predicted(part) * pace.factor();
            let since = part
                .since
                .map_or(Duration::ZERO, |since| now.saturating_sub(since));
            (takes - since.as_secs_f64() / at_once).max(takes * AT_LEAST)
        });
        Duration::try_from_secs_f64(left.sum()).unwrap_or(Duration::MAX)
    }

    /// How many parts are on their way; one at least.
    fn at_once(&self) -> f64 {
        let on_their_way = self.parts.values().filter(|part| part.since.is_some());
        on_their_way.count().max(1) as f64
    }

    fn predicted(&self, part: &Part) -> f64 {
        self.costs.copy_time(part.memory_mib).as_secs_f64()
    }
}

/// What has a part on a host, and that part's memory.
fn parts_on<'a>(work: &'a Work, host: &'a str) -> impl Iterator<Item = (&'a Placed, u64)> {
    work.placed.values().filter_map(move |placed| {
        let mut parts = placed.parts.iter();
        let part = parts.find(|part| part.host == host)?;
        Some((placed, part.memory_mib))
    })
}

/// All but the home.
fn can_leave(placed: &Placed, host: &str) -> bool {
    placed.request.home != host
}

fn is_ordered(placed: &Placed, host: &str) -> bool {
    let order = placed.order.as_ref();
    order.is_some_and(|order| order.parts.iter().all(|part| part.host != host))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::work::{Mark, MoveOrder, WorkPart, WorkRequest};
    use weft_place::MoveCosts;

    const MIB: u64 = 200;

    fn part(host: &str) -> WorkPart {
        WorkPart {
            host: host.into(),
            cores: 1,
            memory_mib: MIB,
            reserved_mib: MIB,
        }
    }

    fn placed(id: u64, kind: WorkKind, hosts: &[&str]) -> Placed {
        Placed {
            id,
            request: WorkRequest {
                name: format!("w{id}"),
                kind,
                home: hosts[0].into(),
                anywhere: false,
                caller: None,
                user: "root".into(),
                cores: 2,
                memory_mib: 2 * MIB,
                hosts_max: 2,
                priority: 0,
                mark: Mark {
                    boot: String::new(),
                    namespace: String::new(),
                    nonce: String::new(),
                },
            },
            parts: hosts.iter().map(|host| part(host)).collect(),
            why: String::new(),
            order: None,
            orders: 0,
            wish: None,
            failure: None,
            stood_us: None,
            revision: 0,
        }
    }

    fn work(all: impl IntoIterator<Item = Placed>) -> Work {
        let placed = all.into_iter();
        Work {
            placed: placed.map(|of| (of.request.name.clone(), of)).collect(),
            ..Work::default()
        }
    }

    /// Each part takes a second.
    fn costs() -> MoveRecord {
        MoveRecord::of(&MoveCosts {
            start: Duration::from_millis(500),
            mib_per_s: MIB as f64 * 2.0,
            seen: 1,
        })
    }

    fn begin(work: &Work) -> Departure {
        Departure::begin(work, Some(&costs()), "old")
    }

    fn order(placed: &mut Placed) {
        placed.order = Some(MoveOrder {
            parts: vec![part("home"), part("spare")],
            why: String::new(),
            called_off: false,
        });
    }

    fn about(found: Duration, seconds: f64) {
        assert!((found.as_secs_f64() - seconds).abs() < 0.02, "{found:?}");
    }

    #[test]
    fn all_that_leaves_takes_as_long_as_one_after_the_other() {
        let machines = (1..=3).map(|id| placed(id, WorkKind::Machine, &["home", "old"]));
        let programs = (4..=9).map(|id| placed(id, WorkKind::Program, &["home", "old"]));
        let stays = placed(10, WorkKind::Program, &["old"]);
        let work = work(machines.chain(programs).chain([stays]));
        let leaving = Leaving::of(&work, Some(&costs()), "old");
        let stays = ["w10".to_owned()];
        assert_eq!((leaving.moves.len(), &leaving.stays[..]), (9, &stays[..]));
        about(leaving.takes, 9.0);
        assert_eq!(begin(&work).progress(), (0, 9));
    }

    #[test]
    fn the_rest_takes_as_long_as_what_has_left() {
        let mut all = [1, 2, 3].map(|id| placed(id, WorkKind::Machine, &["home", "old"]));
        let mut departure = begin(&work(all.clone()));
        let seconds = Duration::from_secs_f64;
        order(&mut all[0]);
        order(&mut all[1]);
        assert!(
            departure
                .update(&work(all.clone()), seconds(0.0))
                .is_empty()
        );
        // Each of the two is half as fast.
        about(departure.remaining(seconds(1.0)), 2.0);
        // One has left after six seconds instead of two: the mean with the prediction is twice.
        all[0] = placed(1, WorkKind::Machine, &["home", "spare"]);
        order(&mut all[2]);
        assert_eq!(departure.update(&work(all.clone()), seconds(6.0)), ["w1"]);
        assert_eq!(departure.progress(), (1, 3));
        about(departure.remaining(seconds(6.0)), 0.2 + 2.0);
        // A part that is late is not gone.
        about(departure.remaining(seconds(60.0)), 0.2 + 0.2);
        // What ends has left, and tells nothing of the pace.
        let rest = [all[2].clone()];
        assert_eq!(departure.update(&work(rest), seconds(6.1)), ["w2"]);
        about(departure.remaining(seconds(6.0)), 2.0);
        assert_eq!(departure.update(&Work::default(), seconds(7.0)), ["w3"]);
        assert_eq!(departure.progress(), (3, 3));
        about(departure.remaining(seconds(7.0)), 0.0);
    }

    #[test]
    fn an_order_that_failed_begins_again() {
        let mut all = [placed(1, WorkKind::Machine, &["home", "old"])];
        let seconds = Duration::from_secs_f64;
        order(&mut all[0]);
        let mut departure = begin(&work(all.clone()));
        about(departure.remaining(seconds(0.7)), 0.3);
        all[0].order = None;
        departure.update(&work(all), seconds(0.8));
        about(departure.remaining(seconds(0.9)), 1.0);
    }
}
