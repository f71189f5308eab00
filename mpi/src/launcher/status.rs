//! A cluster at one moment, for its user.

use std::time::SystemTime;

use weft_malleable::{HostId, Machine};

use super::fleet::{LiveMachine, Underway};
use super::phases::Ending;
use super::record::Phase;
use super::{Launcher, network};
use crate::control::Task;
use crate::request::{HostStatus, MachineStatus, Status, TaskStatus, WaitingJob};

impl Launcher {
    pub(super) fn status(&self) -> Status {
        let options = &self.record.options;
        let cluster = self.cluster();
        let now = SystemTime::now();
        let bounds = cluster.machines.values();
        let bounds = bounds.map(|machine| self.forecast.release_bound(machine).as_secs_f64());
        // A move that is under way may have taken the place where the first one would go.
        let longest = bounds.fold(0.0, f64::max);
        let margin = options.margin.as_secs_f64();
        let host = |(id, host): (&weft_malleable::HostId, &super::fleet::LiveHost)| {
            let there = cluster
                .machines
                .values()
                .filter(|machine| machine.at == *id);
            let takes = |machine: &Machine| self.forecast.release_bound(machine).as_secs_f64();
            let left = |until: SystemTime| match until.duration_since(now) {
                Ok(left) => left.as_secs_f64(),
                Err(_) => 0.0,
            };
            let offer = host.offer.as_ref();
            let until = host.until.map(left);
            // The sum of nothing is -0.
            let leaving_takes = there.map(takes).sum::<f64>() + 0.0;
            HostStatus {
                name: self.fleet.name(*id),
                job: host
                    .job
                    .as_ref()
                    .map(ToString::to_string)
                    .unwrap_or_default(),
                left: until,
                leaving_takes,
                begins: until.map(|left| left - margin - leaving_takes - longest),
                answers: host.writer.is_some(),
                leaves: host.leaves || host.closing.is_some() || host.ended.is_some(),
                memory: offer.map_or(0, |offer| offer.memory),
                cores: offer.map_or(0, |offer| offer.cores),
            }
        };
        let hosts = self
            .fleet
            .hosts
            .iter()
            .filter(|(_, host)| host.offer.is_some());
        let machine = |(id, live): (&weft_malleable::MachineId, &super::fleet::LiveMachine)| {
            let to: Vec<HostId> = live.task.iter().flat_map(Underway::hosts).collect();
            MachineStatus {
                name: network::name(id.0),
                address: network::address(id.0).to_string(),
                host: live.at.map(|at| self.fleet.name(at)),
                others: others(live).map(|id| self.fleet.name(id)).collect(),
                moves_to: (!to.is_empty()).then(|| self.fleet.names(&to)),
                task: live.task.as_ref().map(|underway| self.task(underway)),
                ready: live.ready,
                resident: live.resident,
                memory: options.memory,
            }
        };
        Status {
            name: self.folder.name().to_owned(),
            phase: name_of(self.record.phase).to_owned(),
            program: (!options.program.is_empty()).then(|| options.program.join(" ")),
            seconds: self.epoch.elapsed().as_secs_f64(),
            wanted: self.record.wanted,
            asked: cluster.asked,
            waiting: self.waiting(),
            hosts: hosts.map(host).collect(),
            machines: self.fleet.machines.iter().map(machine).collect(),
            moves: self.record.moves,
            log: self.log.iter().cloned().collect(),
            trouble: self.trouble.clone(),
            exit_code: self.ending.as_ref().map(Ending::code),
        }
    }

    fn task(&self, underway: &Underway) -> TaskStatus {
        let expected = underway.before.as_ref();
        TaskStatus {
            does: does(&underway.task).to_owned(),
            seconds: underway.since.elapsed().as_secs_f64(),
            expected: expected.map(|(_, expected)| expected.as_secs_f64()),
        }
    }

    fn waiting(&self) -> Vec<WaitingJob> {
        let awaited = self.fleet.hosts.values().filter(|host| host.is_awaited());
        let waiting = awaited.filter_map(|host| {
            Some(WaitingJob {
                job: host.job.as_ref()?.to_string(),
                why: host.waits.clone()?,
            })
        });
        waiting.collect()
    }
}

/// Beside that of its home.
fn others(live: &LiveMachine) -> impl Iterator<Item = HostId> {
    let nodes = live.nodes.keys().copied();
    nodes.filter(|host| live.at != Some(*host))
}

fn does(task: &Task) -> &'static str {
    match task {
        Task::Start(_) => "starts",
        Task::Move { .. } | Task::Reshape { .. } => "moves",
        Task::Save { .. } => "is saved",
        Task::Restore { .. } => "is restored",
    }
}

fn name_of(phase: Phase) -> &'static str {
    match phase {
        Phase::Gathering => "gathering",
        Phase::Booting => "booting",
        Phase::Running => "running",
        Phase::Saved => "saved",
        Phase::Ending => "ending",
    }
}
