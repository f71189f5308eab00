//! What is done next.
//!
//! In this order: what has to leave, leaves; hosts are asked for; machines are spread evenly;
//! empty hosts go back. One machine at a time leaves a host, and one comes to a host: two share
//! its link, take as long, and their guests stand longer.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::forecast::Forecast;
use crate::state::{Cluster, HostId, MACHINES_ON_HOST_MAX, MachineId, Rules};

/// What a launcher does. Reasons are sentences.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// Asks the batch system for one more host.
    Ask,
    Move {
        machine: MachineId,
        to: HostId,
        why: String,
    },
    /// One machine over several hosts is on these from now on, with its home on the first.
    Reshape { to: Vec<HostId>, why: String },
    /// No host is left in time: writes the machine to the folder that was named.
    Save { machine: MachineId, why: String },
    /// The host is empty, and goes back to the batch system.
    GiveBack(HostId),
    /// The machine cannot leave, and its host ends: what a user should know.
    Stuck { machine: MachineId, why: String },
}

/// The orders of this moment. The caller notes them in `cluster` (a move in `moves_to`, a save in
/// `is_being_saved`, a host that was asked for in `asked`), and calls this again whenever something
/// has happened, and once a second.
pub fn decide(cluster: &Cluster, forecast: &Forecast, rules: &Rules, now: Duration) -> Vec<Order> {
    let mut round = Round::new(cluster, forecast, rules, now);
    match &cluster.one {
        _ if !rules.adaptive => {}
        Some(one) => {
            round.reshape(one);
            round.ask();
        }
        None => {
            round.leave();
            round.ask();
            round.spread();
        }
    }
    round.give_back();
    round.orders
}

/// How many hosts are needed beside those that stay, asked for or not.
pub fn needed(cluster: &Cluster, forecast: &Forecast, rules: &Rules, now: Duration) -> usize {
    Round::new(cluster, forecast, rules, now).needed()
}

/// The hosts that leave so that `count` are left: those whose reservations end first.
pub fn shrink(cluster: &Cluster, count: usize) -> Vec<HostId> {
    let staying = cluster.hosts.iter().filter(|(_, host)| !host.leaves);
    let mut staying: Vec<_> = staying.collect();
    staying.sort_by_key(|(id, host)| (host.until.unwrap_or(Duration::MAX), **id));
    let surplus = staying.len().saturating_sub(count);
    staying.iter().take(surplus).map(|(id, _)| **id).collect()
}

pub(crate) struct Round<'a> {
    pub(crate) cluster: &'a Cluster,
    forecast: &'a Forecast,
    pub(crate) rules: &'a Rules,
    pub(crate) now: Duration,
    /// Where each machine is, or is about to be; orders of this round count.
    pub(crate) goes_to: BTreeMap<MachineId, HostId>,
    /// Hosts from which, and to which, a machine moves.
    sources: BTreeSet<HostId>,
    destinations: BTreeSet<HostId>,
    pub(crate) moving: BTreeSet<MachineId>,
    pub(crate) leaving: BTreeSet<HostId>,
    pub(crate) orders: Vec<Order>,
}

impl<'a> Round<'a> {
    fn new(cluster: &'a Cluster, forecast: &'a Forecast, rules: &'a Rules, now: Duration) -> Self {
        let machines = || {
            cluster
                .machines
                .iter()
                .filter(|(_, machine)| !machine.is_being_saved)
        };
        let moves = || machines().filter(|(_, machine)| machine.moves_to.is_some());
        let mut round = Round {
            cluster,
            forecast,
            rules,
            now,
            goes_to: machines()
                .map(|(id, machine)| (*id, machine.goes_to()))
                .collect(),
            sources: moves().map(|(_, machine)| machine.at).collect(),
            destinations: moves()
                .filter_map(|(_, machine)| machine.moves_to)
                .collect(),
            moving: moves().map(|(id, _)| *id).collect(),
            leaving: BTreeSet::new(),
            orders: Vec::new(),
        };
        round.leaving = round.leaving_within(Duration::ZERO);
        round
    }

    /// The hosts that have to leave by then.
    fn leaving_within(&self, ahead: Duration) -> BTreeSet<HostId> {
        self.leaving_if(ahead, |host| self.takes(host))
    }

    /// The hosts that would have to leave by then, if each had its share of the machines. Without
    /// those that have left it a host that ends has time again: it gets no machine back for that.
    fn leaving_with_shares(&self, ahead: Duration) -> BTreeSet<HostId> {
        let hosts = self.cluster.hosts.len() - self.leaving.len();
        let share = self.goes_to.len().div_ceil(hosts.max(1)) as u32;
        let takes = self.longest_bound().saturating_mul(share);
        self.leaving_if(ahead, |_| takes)
    }

    fn longest_bound(&self) -> Duration {
        let machines = self.goes_to.keys();
        let bounds = machines.map(|machine| self.release_bound(*machine));
        bounds.max().unwrap_or_default()
    }

    fn machines_on(&self, host: HostId) -> Vec<MachineId> {
        let there = self.goes_to.iter().filter(|(_, at)| **at == host);
        there.map(|(machine, _)| *machine).collect()
    }

    pub(crate) fn bound(&self, machine: MachineId) -> Duration {
        self.forecast.bound(&self.cluster.machines[&machine])
    }

    fn release_bound(&self, machine: MachineId) -> Duration {
        self.forecast
            .release_bound(&self.cluster.machines[&machine])
    }

    /// What it takes to empty a host.
    fn takes(&self, host: HostId) -> Duration {
        let there = self.machines_on(host);
        there.iter().fold(Duration::ZERO, |sum, machine| {
            sum.saturating_add(self.release_bound(*machine))
        })
    }

    /// The hosts that have to leave by then, where `takes` says how long that takes a host. Hosts
    /// that end one soon after the other share the hosts that stay, and a host that stays takes
    /// one machine at a time.
    fn leaving_if(&self, ahead: Duration, takes: impl Fn(HostId) -> Duration) -> BTreeSet<HostId> {
        let mut leaving: BTreeSet<HostId> = BTreeSet::new();
        let mut ending = Vec::new();
        for (id, host) in &self.cluster.hosts {
            match host.until {
                _ if host.leaves => drop(leaving.insert(*id)),
                Some(until) => ending.push((until, *id)),
                None => {}
            }
        }
        ending.sort();
        // A move that is under way may have taken the place at the only host that stays.
        let machines = self.goes_to.keys();
        let longest = match self.cluster.one {
            // Several of its parts may be moving in one step.
            Some(_) => machines
                .map(|machine| self.release_bound(*machine))
                .fold(Duration::ZERO, Duration::saturating_add),
            None => self.longest_bound(),
        };
        // From the last to the first: each has to be empty before its own end, and before those
        // that end later need the hosts that stay.
        let mut last_start = Duration::MAX;
        let all = self.cluster.hosts.len();
        for (place, (until, id)) in ending.iter().enumerate().rev() {
            let stay = (all - leaving.len()).saturating_sub(place + 1).max(1) as u32;
            let empty_at = until.saturating_sub(self.rules.margin);
            let alone = empty_at.saturating_sub(takes(*id));
            let crowded = empty_at.min(last_start).saturating_sub(takes(*id) / stay);
            let start = alone.min(crowded).saturating_sub(longest);
            if start <= self.now.saturating_add(ahead) {
                last_start = start;
                leaving.insert(*id);
            }
        }
        leaving
    }

    /// Room for machines that is not spoken for: of one that moves, both hosts have its memory.
    fn room(&self, host: HostId) -> u64 {
        let taken = self.cluster.machines.iter().filter(|(id, machine)| {
            machine.at == host || self.goes_to.get(id).is_some_and(|to| *to == host)
        });
        let taken: Vec<u64> = taken.map(|(_, machine)| machine.memory).collect();
        match taken.len() < MACHINES_ON_HOST_MAX {
            true => self.cluster.hosts[&host]
                .room
                .saturating_sub(taken.iter().sum()),
            false => 0,
        }
    }

    pub(crate) fn until(&self, host: HostId) -> Duration {
        self.cluster.hosts[&host].until.unwrap_or(Duration::MAX)
    }

    /// Where a machine could go now: the fewest machines, then the latest end.
    fn destination(&self, machine: MachineId, avoid: &BTreeSet<HostId>) -> Option<HostId> {
        let (memory, from) = (
            self.cluster.machines[&machine].memory,
            self.goes_to[&machine],
        );
        let bound = self.bound(machine);
        // It has to be able to leave again.
        let needed = self.now.saturating_add(bound).saturating_add(bound) + self.rules.margin;
        let hosts = self.cluster.hosts.keys().copied();
        let fits = hosts.filter(|host| {
            *host != from
                && !self.leaving.contains(host)
                && !avoid.contains(host)
                && !self.destinations.contains(host)
                && self.until(*host) > needed
                && self.room(*host) >= memory
        });
        fits.min_by_key(|host| {
            let end = self.until(*host);
            (self.machines_on(*host).len(), std::cmp::Reverse(end), *host)
        })
    }

    /// All hosts have to be left, nothing can be saved, and there is just time enough for a move: of
    /// those that end later, the last. Another host may come before its end.
    fn later_end(&self, machine: MachineId) -> Option<HostId> {
        let from = self.goes_to[&machine];
        let moves_at = self.until(from).saturating_sub(self.rules.margin);
        let is_time = moves_at <= self.now.saturating_add(self.takes(from));
        if !is_time || self.rules.saves.is_some() {
            return None;
        }
        let gone_at = self.now.saturating_add(self.bound(machine));
        let later = self.cluster.hosts.iter().filter(|(id, host)| {
            !host.leaves
                && !self.destinations.contains(id)
                && self.until(**id) > gone_at.max(self.until(from))
                && self.room(**id) >= self.cluster.machines[&machine].memory
        });
        let latest = later.max_by_key(|(id, _)| (self.until(**id), **id));
        latest.map(|(id, _)| *id)
    }

    fn order_move(&mut self, machine: MachineId, to: HostId, why: String) {
        let from = self.goes_to[&machine];
        self.sources.insert(from);
        self.destinations.insert(to);
        self.moving.insert(machine);
        self.goes_to.insert(machine, to);
        self.orders.push(Order::Move { machine, to, why });
    }

    pub(crate) fn name(&self, host: HostId) -> &'a str {
        &self.cluster.hosts[&host].name
    }

    fn leave(&mut self) {
        // Whatever ends first, first.
        let mut leaving: Vec<HostId> = self.leaving.iter().copied().collect();
        leaving.sort_by_key(|host| (self.until(*host), *host));
        for host in leaving {
            let is_leaving = |id: &&MachineId| self.cluster.machines[*id].at == host;
            let on_their_way = self.moving.iter().filter(is_leaving);
            // When the machines before this one have left.
            let mut free_at =
                on_their_way.fold(self.now, |at, id| at.saturating_add(self.bound(*id)));
            for machine in self.machines_on(host) {
                if self.moving.contains(&machine) {
                    continue;
                }
                let gone_at = free_at.saturating_add(self.bound(machine));
                let to = self.destination(machine, &BTreeSet::new());
                match to.or_else(|| self.later_end(machine)) {
                    Some(to) if self.is_in_time(host, gone_at) => {
                        free_at = gone_at;
                        if !self.sources.contains(&host) {
                            let why = self.why_it_leaves(host, to);
                            self.order_move(machine, to, why);
                        }
                    }
                    _ => self.last_resort(machine, host),
                }
            }
        }
    }

    /// Whether a machine that leaves the host by then may do so. Without a folder it tries to.
    fn is_in_time(&self, host: HostId, gone_at: Duration) -> bool {
        self.rules.saves.is_none() || gone_at.saturating_add(self.rules.margin) <= self.until(host)
    }

    fn why_it_leaves(&self, host: HostId, to: HostId) -> String {
        let (from, to) = (self.name(host), self.name(to));
        match self.cluster.hosts[&host].until {
            Some(until) if !self.cluster.hosts[&host].leaves => {
                let left = until.saturating_sub(self.now).as_secs();
                let takes = self.takes(host).as_secs_f64();
                format!("{from} ends in {left} s, and to leave it takes {takes:.1} s; to {to}.")
            }
            _ => format!("{from} was told to leave; to {to}."),
        }
    }

    /// No host can take the machine now. A host may come free or come new while there is time;
    /// then it is saved, if there is a folder for that.
    pub(crate) fn last_resort(&mut self, machine: MachineId, host: HostId) {
        let empty_at = self.until(host).saturating_sub(self.rules.margin);
        let name = self.name(host);
        match self.rules.saves {
            Some(rate) => {
                // All write to the folder at the same time, and one machine writes all its parts.
                let writes = self.cluster.machines.values().filter(|other| {
                    self.cluster.one.is_some()
                        || self.leaving.contains(&other.at) && other.moves_to.is_none()
                });
                let bytes: u64 = writes.map(|other| other.resident).sum();
                let takes = Duration::try_from_secs_f64(2.0 * bytes as f64 / rate.max(1.0));
                let begins = empty_at.saturating_sub(takes.unwrap_or(Duration::MAX));
                if begins <= self.now {
                    let why = format!("{name} ends, and no other host has room in time.");
                    self.goes_to.remove(&machine);
                    self.orders.push(Order::Save { machine, why });
                }
            }
            None if empty_at <= self.now => {
                let why = format!(
                    "{name} ends, no other host has room, and no folder to save machines to was \
                     named."
                );
                self.orders.push(Order::Stuck { machine, why });
            }
            None => {}
        }
    }

    fn needed(&self) -> usize {
        let gone = self.leaving_within(self.rules.ask_ahead);
        let staying = self
            .cluster
            .hosts
            .keys()
            .filter(|host| !gone.contains(host))
            .count();
        self.cluster.wanted.saturating_sub(staying)
    }

    fn ask(&mut self) {
        let missing = self.needed().saturating_sub(self.cluster.asked);
        self.orders.extend(std::iter::repeat_n(Order::Ask, missing));
    }

    /// From the fullest host to the emptiest, while that makes them more even.
    fn spread(&mut self) {
        loop {
            let hosts = self
                .cluster
                .hosts
                .keys()
                .filter(|host| !self.leaving.contains(host));
            let full = hosts.clone().filter(|host| !self.sources.contains(host));
            let full = full.max_by_key(|host| (self.machines_on(**host).len(), **host));
            let Some(full) = full.copied() else {
                return;
            };
            let there = self.machines_on(full);
            let mut candidates = there
                .iter()
                .filter(|machine| !self.moving.contains(machine));
            let Some(&machine) = candidates.next() else {
                return;
            };
            let end_soon = self.leaving_with_shares(self.bound(machine).saturating_mul(2));
            let Some(to) = self.destination(machine, &end_soon) else {
                return;
            };
            if self.machines_on(to).len() + 2 > there.len() || !self.is_worth(machine, to) {
                return;
            }
            let why = format!(
                "{} has {} machines, and {} has {}.",
                self.name(full),
                there.len(),
                self.name(to),
                self.machines_on(to).len()
            );
            self.order_move(machine, to, why);
        }
    }

    /// Whether the machine can stay there long enough.
    pub(crate) fn is_worth(&self, machine: MachineId, to: HostId) -> bool {
        let moves = self.bound(machine).as_secs_f64() * 2.0;
        let stays = self.until(to).saturating_sub(self.now).as_secs_f64();
        stays >= moves * self.rules.worth
    }

    fn give_back(&mut self) {
        let hosts = self.cluster.hosts.iter();
        let gone = hosts.filter(|(id, _)| {
            let mut machines = self.cluster.machines.values();
            let is_used =
                machines.any(|machine| machine.at == **id || machine.moves_to == Some(**id));
            self.leaving.contains(id) && !is_used && !self.destinations.contains(id)
        });
        self.orders.extend(gone.map(|(id, _)| Order::GiveBack(*id)));
    }
}
