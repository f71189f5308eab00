//! What a run of the simulation shows.

use crate::hosts::Hosts;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use weft_place::{AggregateId, Decision, HostId, Scheduler};

/// The figures of one policy. Times are in seconds of the simulation but for those of
/// decisions.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    pub policy: String,
    pub requests: usize,
    pub refused: usize,
    /// Of all that were not refused, in percent.
    pub at_once_percent: f64,
    pub delayed: usize,
    pub never_placed: usize,
    /// Of those that were delayed and placed.
    pub wait_mean_s: f64,
    pub wait_p50_s: f64,
    pub wait_p99_s: f64,
    pub wait_max_s: f64,
    /// Waited core-seconds of all, those never placed until the end counted, in hours.
    pub waited_core_hours: f64,
    /// Cores promised to aggregates when the first one was delayed, in percent of all.
    pub packing_at_first_delay_percent: Option<f64>,
    /// Mean over the time from the first delay to the end, in percent.
    pub used_after_percent: Option<f64>,
    pub spread_aggregates: usize,
    /// How long an aggregate was on several hosts, those that still are until the end.
    pub spread_life_mean_s: f64,
    pub hosts_of_spread_mean: f64,
    pub made_whole: usize,
    pub moves: usize,
    pub moves_an_hour: f64,
    pub moved_gib: f64,
    /// Core-hours of work that spreading or overcommitting cost.
    pub lost_core_hours: f64,
    pub done_core_hours: f64,
    pub lost_percent: f64,
    pub decisions_a_second: f64,
    pub decision_p50_us: f64,
    pub decision_p99_us: f64,
    pub decision_max_us: f64,
    #[serde(skip)]
    pub samples: Vec<Sample>,
}

/// The state at one moment.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    pub at_s: f64,
    pub used_percent: f64,
    pub waiting: usize,
    pub spread: usize,
}

struct Spread {
    since: Duration,
    changed: Duration,
    cores: f64,
    slow_down: f64,
}

#[derive(Default)]
struct Busy {
    used: u32,
    changed: Duration,
}

pub struct Meter {
    hosts: Hosts,
    requests: usize,
    refused: usize,
    asked: BTreeMap<AggregateId, Duration>,
    delayed: BTreeSet<AggregateId>,
    waits: Vec<f64>,
    waited_core_s: f64,
    first_delay: Option<(Duration, f64)>,
    used_core_s: f64,
    used_core_s_at_first_delay: f64,
    used: f64,
    used_changed: Duration,
    running: BTreeMap<AggregateId, (HostId, u32)>,
    spread: BTreeMap<AggregateId, Spread>,
    spread_lives: Vec<f64>,
    spread_count: usize,
    spread_hosts: usize,
    made_whole: usize,
    moves: usize,
    moved_mib: u64,
    lost_core_s: f64,
    busy: Vec<Busy>,
    end: Duration,
    never_placed: usize,
    samples: Vec<Sample>,
}

impl Meter {
    pub fn new(hosts: Hosts, requests: usize) -> Meter {
        Meter {
            hosts,
            requests,
            refused: 0,
            asked: BTreeMap::new(),
            delayed: BTreeSet::new(),
            waits: Vec::new(),
            waited_core_s: 0.0,
            first_delay: None,
            used_core_s: 0.0,
            used_core_s_at_first_delay: 0.0,
            used: 0.0,
            used_changed: Duration::ZERO,
            running: BTreeMap::new(),
            spread: BTreeMap::new(),
            spread_lives: Vec::new(),
            spread_count: 0,
            spread_hosts: 0,
            made_whole: 0,
            moves: 0,
            moved_mib: 0,
            lost_core_s: 0.0,
            busy: (0..hosts.count).map(|_| Busy::default()).collect(),
            end: Duration::ZERO,
            never_placed: 0,
            samples: Vec::new(),
        }
    }

    fn capacity(&self) -> f64 {
        f64::from(self.hosts.count) * f64::from(self.hosts.room.cores)
    }

    pub fn asked(&mut self, id: AggregateId, now: Duration) {
        self.asked.insert(id, now);
    }

    pub fn decided(&mut self, decision: &Decision, now: Duration, scheduler: &Scheduler) {
        match decision {
            Decision::Start { id, placement, .. } => {
                let cores = placement.room().cores;
                let asked = self.asked.remove(id).expect("it was asked for");
                if self.delayed.remove(id) {
                    let wait = (now - asked).as_secs_f64();
                    self.waits.push(wait);
                    self.waited_core_s += wait * f64::from(cores);
                }
                self.use_more(now, f64::from(cores));
                self.running.insert(*id, (placement.parts[0].host, cores));
                if placement.parts.len() > 1 {
                    self.spread_count += 1;
                    self.spread_hosts += placement.parts.len();
                    let slow_down = scheduler.costs().slow_down(scheduler.cluster(), placement);
                    let spread = Spread {
                        since: now,
                        changed: now,
                        cores: f64::from(cores),
                        slow_down,
                    };
                    self.spread.insert(*id, spread);
                } else {
                    self.load(placement.parts[0].host, now, i64::from(cores));
                }
            }
            Decision::Delay { id, .. } => {
                self.delayed.insert(*id);
                if self.first_delay.is_none() {
                    self.use_more(now, 0.0);
                    self.used_core_s_at_first_delay = self.used_core_s;
                    self.first_delay = Some((now, self.used / self.capacity() * 100.0));
                }
            }
            Decision::Refuse { id, .. } => {
                self.asked.remove(id);
                self.refused += 1;
            }
            Decision::Move { moving, .. } => {
                self.moves += 1;
                self.moved_mib += moving.memory_mib();
            }
            Decision::Whole { .. } => self.made_whole += 1,
            Decision::NotMoved { .. }
            | Decision::Stuck { .. }
            | Decision::TooLate { .. }
            | Decision::Lost { .. } => {}
        }
    }

    /// A move has ended: the aggregate may be slower or faster now.
    pub fn moved(&mut self, id: AggregateId, now: Duration, scheduler: &Scheduler) {
        let Some(aggregate) = scheduler.cluster().aggregate(id) else {
            return;
        };
        let placement = &aggregate.placement;
        let Some(mut spread) = self.spread.remove(&id) else {
            // A whole one: its load is on another host now.
            let (host, cores) = self.running[&id];
            self.load(host, now, -i64::from(cores));
            self.load(placement.parts[0].host, now, i64::from(cores));
            self.running.insert(id, (placement.parts[0].host, cores));
            return;
        };
        self.lose(&spread, now);
        if placement.parts.len() > 1 {
            spread.changed = now;
            spread.slow_down = scheduler.costs().slow_down(scheduler.cluster(), placement);
            self.spread.insert(id, spread);
        } else {
            self.spread_lives.push((now - spread.since).as_secs_f64());
            let (_, cores) = self.running[&id];
            self.running.insert(id, (placement.parts[0].host, cores));
            self.load(placement.parts[0].host, now, i64::from(cores));
        }
    }

    pub fn ended(&mut self, id: AggregateId, now: Duration) {
        let Some((host, cores)) = self.running.remove(&id) else {
            return;
        };
        self.use_more(now, -f64::from(cores));
        match self.spread.remove(&id) {
            Some(spread) => {
                self.lose(&spread, now);
                self.spread_lives.push((now - spread.since).as_secs_f64());
            }
            None => self.load(host, now, -i64::from(cores)),
        }
    }

    /// What an aggregate did not get done because it was on several hosts.
    fn lose(&mut self, spread: &Spread, now: Duration) {
        let time = (now - spread.changed).as_secs_f64();
        self.lost_core_s += spread.cores * time * (1.0 - 1.0 / spread.slow_down);
    }

    fn use_more(&mut self, now: Duration, cores: f64) {
        self.used_core_s += self.used * (now - self.used_changed).as_secs_f64();
        self.used_changed = now;
        self.used += cores;
    }

    /// The cores that whole aggregates on a host have. What is more than the host has is
    /// work that nobody does.
    fn load(&mut self, host: HostId, now: Duration, cores: i64) {
        if self.hosts.overcommit <= 1.0 {
            return;
        }
        let physical = self.hosts.room.cores;
        let busy = &mut self.busy[host.0 as usize];
        let over = busy.used.saturating_sub(physical);
        self.lost_core_s += f64::from(over) * (now - busy.changed).as_secs_f64();
        busy.changed = now;
        busy.used = u32::try_from(i64::from(busy.used) + cores).expect("less ends than ran");
    }

    pub fn sample(&mut self, at: Duration, scheduler: &Scheduler) {
        self.samples.push(Sample {
            at_s: at.as_secs_f64(),
            used_percent: self.used / self.capacity() * 100.0,
            waiting: scheduler.waiting().len(),
            spread: self.spread.len(),
        });
    }

    pub fn finish(&mut self, end: Duration, scheduler: &Scheduler) {
        self.end = end;
        self.use_more(end, 0.0);
        for host in 0..self.hosts.count {
            self.load(HostId(host), end, 0);
        }
        for spread in std::mem::take(&mut self.spread).into_values() {
            self.lose(&spread, end);
            self.spread_lives.push((end - spread.since).as_secs_f64());
        }
        for request in scheduler.waiting() {
            let asked = self.asked[&request.id];
            self.never_placed += 1;
            self.waited_core_s += (end - asked).as_secs_f64() * f64::from(request.room.cores);
        }
    }

    pub fn outcome(self, policy: String, mut decision_times: Vec<u32>) -> Outcome {
        let mut waits = self.waits.clone();
        waits.sort_by(f64::total_cmp);
        decision_times.sort_unstable();
        let total_ns: u64 = decision_times.iter().map(|&ns| u64::from(ns)).sum();
        let at = |part: f64| {
            let place = ((decision_times.len() as f64 * part) as usize)
                .min(decision_times.len().saturating_sub(1));
            decision_times
                .get(place)
                .map_or(0.0, |&ns| f64::from(ns) / 1000.0)
        };
        let delayed = waits.len() + self.never_placed;
        let wanted = self.requests - self.refused;
        let hours = self.end.as_secs_f64() / 3600.0;
        let capacity = self.capacity();
        let after = self.first_delay.map(|(at, _)| {
            let seconds = (self.end - at).as_secs_f64();
            (self.used_core_s - self.used_core_s_at_first_delay) / seconds / capacity * 100.0
        });
        Outcome {
            policy,
            requests: self.requests,
            refused: self.refused,
            at_once_percent: percent((wanted - delayed) as f64, wanted as f64),
            delayed,
            never_placed: self.never_placed,
            wait_mean_s: mean(&waits),
            wait_p50_s: quantile(&waits, 0.5),
            wait_p99_s: quantile(&waits, 0.99),
            wait_max_s: waits.last().copied().unwrap_or(0.0),
            waited_core_hours: self.waited_core_s / 3600.0,
            packing_at_first_delay_percent: self.first_delay.map(|(_, packing)| packing),
            used_after_percent: after,
            spread_aggregates: self.spread_count,
            spread_life_mean_s: mean(&self.spread_lives),
            hosts_of_spread_mean: self.spread_hosts as f64 / self.spread_count.max(1) as f64,
            made_whole: self.made_whole,
            moves: self.moves,
            moves_an_hour: if hours > 0.0 {
                self.moves as f64 / hours
            } else {
                0.0
            },
            moved_gib: self.moved_mib as f64 / 1024.0,
            lost_core_hours: self.lost_core_s / 3600.0,
            done_core_hours: (self.used_core_s - self.lost_core_s) / 3600.0,
            lost_percent: percent(self.lost_core_s, self.used_core_s),
            decisions_a_second: decision_times.len() as f64 / (total_ns.max(1) as f64 / 1e9),
            decision_p50_us: at(0.5),
            decision_p99_us: at(0.99),
            decision_max_us: at(1.0),
            samples: self.samples,
        }
    }
}

fn percent(part: f64, whole: f64) -> f64 {
    if whole > 0.0 {
        part / whole * 100.0
    } else {
        0.0
    }
}

fn mean(values: &[f64]) -> f64 {
    // The sum of nothing is -0.
    (values.iter().sum::<f64>() + 0.0) / values.len().max(1) as f64
}

/// Of sorted values.
fn quantile(values: &[f64], part: f64) -> f64 {
    let place = ((values.len() as f64 * part) as usize).min(values.len().saturating_sub(1));
    values.get(place).copied().unwrap_or(0.0)
}
