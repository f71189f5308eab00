//! One machine over all hosts (`--one-machine`): it starts on those that came, and changes its
//! hosts in one step.
//!
//! A host that it leaves hands its vCPUs and pages to those that stay. On one that comes a node
//! joins, gets its share of the vCPUs, and their pages follow. `docs/membership.md` (Migrate and
//! consolidate) says how, and `docs/roles.md` how the home moves.

use std::cmp::Reverse;
use std::time::{Duration, Instant};

use weft_malleable::{Cluster, HostId, Machine as Moving, MachineId};
use weft_node::size::format_bytes;

use super::fleet::Underway;
use super::{Launcher, network};
use crate::control::{Machine, Outcome, Part, Task};

/// The only one.
const MACHINE: MachineId = MachineId(0);
/// What a node may use beyond its share, at least: pages of others.
const SPARE_LEAST: u64 = 64 << 20;
/// Memory of nodes is given in steps.
const STEP: u64 = 1 << 20;
/// After its home could not move.
const REST: Duration = Duration::from_secs(5);

impl Launcher {
    /// With fewer hosts nothing starts.
    pub(super) fn least_hosts(&self) -> usize {
        let mut machines = self.fleet.machines.values();
        let is_saved = machines.any(|live| live.saved.is_some());
        match is_saved && self.record.began_on_several {
            true => 2,
            false => 1,
        }
    }

    /// Starts it, if it is nowhere.
    pub(super) fn place_one(&mut self, usable: &[(HostId, u64)]) -> Result<(), String> {
        let live = self.fleet.machines.get(&MACHINE);
        let Some(live) = live.filter(|live| live.at.is_none() && live.task.is_none()) else {
            return Ok(());
        };
        let saved = live.saved.clone();
        let one = self.record.options.one();
        let mut hosts: Vec<(HostId, u64)> = usable.to_vec();
        // Those with little room are left out first.
        hosts.sort_by_key(|(id, room)| (Reverse(*room), *id));
        let goes_on_alone = saved.is_some() && !self.record.began_on_several;
        hosts.truncate(if goes_on_alone { 1 } else { one.hosts_max });
        while hosts
            .last()
            .is_some_and(|(_, room)| *room < one.part(hosts.len()))
        {
            hosts.pop();
        }
        let is_enough = hosts.len() >= self.least_hosts();
        let Some((_, least_room)) = hosts.last().copied().filter(|_| is_enough) else {
            return Err(format!(
                "the machine needs {} on each of {} hosts, with what its monitors need, and they \
                 have less: use a smaller one, or more hosts",
                format_bytes(one.part(usable.len())),
                usable.len()
            ));
        };
        let own = one.memory / hosts.len() as u64;
        let spare = (least_room - one.overhead)
            .min(one.memory)
            .saturating_sub(own);
        let mut ids = hosts.into_iter().map(|(id, _)| id);
        let home = ids.next();
        let others: Vec<HostId> = ids.collect();
        if saved.is_none() {
            self.record.began_on_several = !others.is_empty();
        }
        let on: Vec<String> = others.iter().map(|id| self.fleet.name(*id)).collect();
        let name = network::name(MACHINE.0);
        let task = match saved {
            Some(folder) => Task::Restore {
                machine: name,
                folder,
                on,
            },
            None => Task::Start(Machine {
                spare: match on.is_empty() {
                    true => 0,
                    false => spare.max(SPARE_LEAST).next_multiple_of(STEP),
                },
                on,
                ..self.machine(MACHINE)
            }),
        };
        let underway = Underway {
            order: self.next_number(),
            task,
            since: Instant::now(),
            to: home,
            others,
            before: None,
        };
        if let Some(home) = home {
            // If its agent does not answer just now, it is placed again in the next turn.
            self.order(home, MACHINE, underway);
        }
        Ok(())
    }

    /// Has it be on these hosts, with its home on the first.
    pub(super) fn reshape(&mut self, to: &[HostId], cluster: &Cluster, why: &str) {
        let (Some(live), Some(&home)) = (self.fleet.machines.get(&MACHINE), to.first()) else {
            return;
        };
        let Some(at) = live.at else {
            return;
        };
        let one = self.record.options.one();
        let share = one.memory.div_ceil(to.len() as u64).next_multiple_of(STEP);
        let part = |id: &HostId| {
            // Where the home is there is a node 0.
            let node = live.nodes.get(id).copied().or((*id == at).then_some(0));
            let room = cluster.hosts.get(id).map_or(0, |host| host.room);
            // A node that joins may have all, where there is room: it keeps what it reserves.
            let most = room.saturating_sub(one.overhead) / STEP * STEP;
            let whole = one.memory + SPARE_LEAST;
            Part {
                host: self.fleet.name(*id),
                node,
                memory: if node.is_some() {
                    share
                } else {
                    most.min(whole)
                },
            }
        };
        let task = Task::Reshape {
            machine: network::name(MACHINE.0),
            to: to.iter().map(part).collect(),
            keeps_home: home == at,
        };
        let before = leaving(cluster, to).map(|leaving| {
            let expected = self.forecast.expected(&leaving);
            (leaving, expected)
        });
        let underway = Underway {
            order: self.next_number(),
            task,
            since: Instant::now(),
            to: Some(home),
            others: to[1..].to_vec(),
            before,
        };
        if self.order(at, MACHINE, underway) {
            let names = self.fleet.names(to);
            let name = network::name(MACHINE.0);
            self.say(&format!("{name} goes to {names}: {why}"));
        }
    }

    /// It is on other hosts now.
    pub(super) fn reshaped(&mut self, underway: &Underway, outcome: &Outcome) {
        let hosts: Vec<HostId> = underway.hosts().collect();
        let names = self.fleet.names(&hosts);
        let Some(live) = self.fleet.machines.get_mut(&MACHINE) else {
            return;
        };
        let is_home_new = live.at != underway.to && outcome.stays.is_none();
        let nodes = outcome.nodes.iter().copied();
        live.nodes = match outcome.is_alone {
            // Whatever its node was, it is node 0 of its new home.
            true => hosts.into_iter().zip([0]).collect(),
            false => hosts.into_iter().zip(nodes).collect(),
        };
        if let Some(home) = underway.to.filter(|_| is_home_new) {
            live.at = Some(home);
            // The node that it went to there gives node 0 what it has, and leaves.
            live.nodes.insert(home, 0);
        }
        live.rests_until = outcome.stays.as_ref().map(|_| Instant::now() + REST);
        let mut sentence = self.moved(MACHINE, &names, underway, outcome);
        if let Some(why) = &outcome.stays {
            sentence += &format!("; what else it has stays where it was: {why}");
        }
        self.say(&sentence);
    }
}

/// What its parts on hosts that it leaves are together, if there are some.
fn leaving(cluster: &Cluster, to: &[HostId]) -> Option<Moving> {
    let mut parts = cluster
        .machines
        .values()
        .filter(|part| !to.contains(&part.at));
    let first = parts.next()?.clone();
    let resident = first.resident + parts.map(|part| part.resident).sum::<u64>();
    Some(Moving { resident, ..first })
}
