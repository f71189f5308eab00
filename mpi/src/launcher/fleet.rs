//! Hosts and machines of a cluster as its launcher knows them, and what that means for
//! `weft_malleable`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use weft_batch::{Job, JobId};
use weft_malleable::{Cluster, Host, HostId, Machine, MachineId};
use weft_wire::channel::Writer;
use weft_wire::keys::PublicKey;

use super::network;
use super::options::Options;
use crate::control::{Offer, PeerHost, Seen, Task, ToAgent};

/// A reservation, from the moment in which it is asked for.
pub struct LiveHost {
    pub job: Option<JobId>,
    pub secret: String,
    pub key: Option<PublicKey>,
    /// The batch system, the user or the launcher wants it to be left.
    pub leaves: bool,
    /// It was told to end.
    pub closing: Option<Instant>,
    /// Its job was given back.
    pub given_back: Option<Instant>,
    /// As the batch system names its host; with the reservation's number if another one is there.
    pub name: Option<String>,
    pub until: Option<SystemTime>,
    /// Why its job has ended, and when that was seen.
    pub ended: Option<(String, Instant)>,
    /// Why its job waits.
    pub waits: Option<String>,
    /// The newest link, while there is one.
    pub writer: Option<Writer>,
    pub link: u64,
    pub offer: Option<Offer>,
    /// The machines there, once its agent has said so over its newest link.
    pub seen: Option<Vec<Seen>>,
    /// Runnable threads, as a percentage of the processors.
    pub load: u32,
    /// The launcher that asked for it ended before it knew the job, or the batch system's answer
    /// was lost: the job is looked for by its name, to give it back.
    pub is_stray: bool,
}

impl LiveHost {
    pub fn new(secret: String) -> LiveHost {
        LiveHost {
            job: None,
            secret,
            key: None,
            leaves: false,
            closing: None,
            given_back: None,
            name: None,
            until: None,
            ended: None,
            waits: None,
            writer: None,
            link: 0,
            offer: None,
            seen: None,
            load: 0,
            is_stray: false,
        }
    }

    /// Nobody knows whether it has a job: if one is found, it goes back.
    pub fn becomes_stray(&mut self) {
        self.is_stray = true;
        self.closing = Some(Instant::now());
    }

    /// Whether its job is looked for.
    pub fn is_sought(&self) -> bool {
        self.is_stray && self.job.is_none()
    }

    /// Whether its agent has answered, and the batch system has said where it is.
    pub fn has_come(&self) -> bool {
        self.offer.is_some() && self.name.is_some() && self.closing.is_none()
    }

    /// Whether its agent sees the machine, if it has said what it sees.
    pub fn sees(&self, machine: MachineId) -> Option<bool> {
        let seen = self.seen.as_ref()?;
        let mut numbers = seen.iter().map(|seen| network::machine(&seen.name));
        Some(numbers.any(|number| number == Some(machine.0)))
    }

    /// Whether it was asked for and may still come.
    pub fn is_awaited(&self) -> bool {
        !self.has_come() && self.closing.is_none() && self.ended.is_none()
    }

    /// Says when its reservation ends, as far as the batch system has said.
    pub fn tell_end(&mut self) {
        if let Some(until) = self.until {
            let left = until.duration_since(SystemTime::now()).unwrap_or_default();
            self.tell(&ToAgent::EndsAfter(left.as_millis() as u64));
        }
    }

    /// False when no agent answers.
    pub fn tell(&mut self, message: &ToAgent) -> bool {
        let Some(writer) = &mut self.writer else {
            return false;
        };
        if writer.send(message).is_err() {
            // The link's thread says so, too.
            self.writer = None;
        }
        self.writer.is_some()
    }
}

/// A machine of the cluster.
#[derive(Default)]
pub struct LiveMachine {
    /// `None`: it has not started, or is saved. Of one machine over several hosts, where its home
    /// is.
    pub at: Option<HostId>,
    /// The nodes of one machine that have its vCPUs and memory.
    pub nodes: BTreeMap<HostId, usize>,
    pub task: Option<Underway>,
    /// Its ssh server has answered.
    pub ready: bool,
    /// Somebody waits for that.
    pub is_awaited: bool,
    pub resident: u64,
    /// Nothing is tried with it before, since something failed.
    pub rests_until: Option<Instant>,
    /// Since when it should be on its host, and no look of the agent there has shown it yet.
    pub unseen_since: Option<Instant>,
    /// The last order failed, and when: it may have been carried out nevertheless.
    pub doubt: Option<(Underway, Instant)>,
    /// Where it was saved.
    pub saved: Option<PathBuf>,
    /// Where it went on from. Of use until the program runs again.
    pub went_on_from: Option<PathBuf>,
    /// How often it could not go on from there, one time after the other.
    pub failures: u32,
}

impl LiveMachine {
    pub fn is_being_saved(&self) -> bool {
        let task = self.task.as_ref().map(|underway| &underway.task);
        matches!(task, Some(Task::Save { .. }))
    }

    /// It was saved there, and is on no host.
    pub fn is_in(&mut self, folder: PathBuf) {
        self.at = None;
        self.nodes.clear();
        self.ready = false;
        self.saved = Some(folder);
        self.went_on_from = None;
        self.doubt = None;
    }

    /// Its agents have shown it there, although they had not said that it went there.
    pub fn is_found(&mut self, host: HostId) {
        self.at = Some(host);
        self.unseen_since = Some(Instant::now());
        self.doubt = None;
    }

    /// Whether it needs the host.
    pub fn is_on(&self, host: HostId) -> bool {
        self.at == Some(host) || self.nodes.contains_key(&host)
    }

    /// The hosts that it is on, or about to be; its home's first.
    pub fn hosts(&self) -> Vec<HostId> {
        let comes_to = self.task.iter().flat_map(|underway| underway.hosts());
        let all = self.at.into_iter().chain(self.nodes.keys().copied());
        let mut hosts = Vec::new();
        for host in all.chain(comes_to) {
            if !hosts.contains(&host) {
                hosts.push(host);
            }
        }
        hosts
    }
}

/// What an agent does with a machine.
pub struct Underway {
    pub order: u64,
    pub task: Task,
    pub since: Instant,
    /// Where it moves to; of one machine over several hosts, where its home will be.
    pub to: Option<HostId>,
    /// Further hosts that it will be on then.
    pub others: Vec<HostId>,
    /// As it was when a move began, and what the move should take.
    pub before: Option<(Machine, Duration)>,
}

impl Underway {
    /// For the agent.
    pub fn message(&self) -> ToAgent {
        ToAgent::Order {
            id: self.order,
            task: self.task.clone(),
        }
    }

    /// All that it comes to, or stays on.
    pub fn hosts(&self) -> impl Iterator<Item = HostId> {
        self.to.into_iter().chain(self.others.iter().copied())
    }

    /// The host whose agent has the order. `at`: where the machine is.
    pub fn agent(&self, at: Option<HostId>) -> Option<HostId> {
        match self.task {
            Task::Start(_) | Task::Restore { .. } => self.to,
            Task::Move { .. } | Task::Reshape { .. } | Task::Save { .. } => at,
        }
    }
}

/// A cluster as it is now: what is written down, and what agents and batch system said.
#[derive(Default)]
pub struct Fleet {
    pub hosts: BTreeMap<HostId, LiveHost>,
    pub machines: BTreeMap<MachineId, LiveMachine>,
}

impl Fleet {
    /// What the batch system says of the job of a reservation.
    pub fn heard(&mut self, id: HostId, job: Job) {
        let named = |name: &str| {
            let is_twin = |(other, host): (&HostId, &LiveHost)| {
                *other != id && host.name.as_deref() == Some(name)
            };
            match self.hosts.iter().any(is_twin) {
                true => format!("{name}.{}", id.0),
                false => name.to_owned(),
            }
        };
        let name = match &job {
            Job::Runs { host, .. } => Some(named(host)),
            _ => None,
        };
        let Some(host) = self.hosts.get_mut(&id) else {
            return;
        };
        match job {
            Job::Waits { why } => host.waits = Some(why),
            Job::Runs { until, .. } => {
                host.waits = None;
                host.name = host.name.take().or(name);
                host.until = until;
                host.ended = None;
            }
            Job::Ended { how } => {
                host.ended.get_or_insert((how, Instant::now()));
            }
        }
    }

    /// What a host is called.
    pub fn name(&self, id: HostId) -> String {
        let name = self.hosts.get(&id).and_then(|host| host.name.clone());
        name.unwrap_or_else(|| format!("reservation {}", id.0))
    }

    /// All of them, in their order.
    pub fn names(&self, ids: &[HostId]) -> String {
        let names: Vec<String> = ids.iter().map(|id| self.name(*id)).collect();
        names.join(", ")
    }

    pub fn by_name(&self, name: &str) -> Option<HostId> {
        let mut come = self.hosts.iter().filter(|(_, host)| host.has_come());
        come.find(|(id, _)| self.name(**id) == name)
            .map(|(id, _)| *id)
    }

    /// All hosts that have come, for their agents.
    pub fn peers(&self) -> Vec<PeerHost> {
        let peer = |(id, host): (&HostId, &LiveHost)| {
            let offer = host.offer.as_ref()?;
            Some(PeerHost {
                name: self.name(*id),
                key: host.key?,
                node: Some(offer.node.clone()),
                switch: offer.switch.clone(),
            })
        };
        self.hosts
            .iter()
            .filter(|(_, host)| host.has_come())
            .filter_map(peer)
            .collect()
    }

    /// As `weft_malleable` sees it. `epoch`: the moment from which its times are measured.
    pub fn cluster(&self, wanted: usize, options: &Options, epoch: Instant) -> Cluster {
        let come = self.hosts.iter().filter(|(_, host)| host.has_come());
        let host = |(id, host): (&HostId, &LiveHost)| {
            let room = host.offer.as_ref().map_or(0, |offer| offer.memory);
            let known = Host {
                name: self.name(*id),
                until: host.until.map(|until| since(until, epoch)),
                // Nothing goes to a host whose agent does not answer.
                room: if host.writer.is_some() { room } else { 0 },
                leaves: host.leaves || host.ended.is_some(),
            };
            (*id, known)
        };
        let hosts: BTreeMap<HostId, Host> = come.map(host).collect();
        if options.one_machine {
            return Cluster {
                wanted,
                asked: self.asked(),
                machines: self.parts(options, &hosts),
                hosts,
                one: Some(options.one()),
            };
        }
        let machines = self.machines.iter().filter_map(|(id, live)| {
            let at = live.at.filter(|at| hosts.contains_key(at))?;
            let moves_to = live.task.as_ref().and_then(|underway| underway.to);
            let machine = Machine {
                memory: options.needs(),
                resident: if live.resident > 0 {
                    live.resident
                } else {
                    options.memory
                },
                dirties: 0.0,
                at,
                moves_to: moves_to.filter(|to| hosts.contains_key(to)),
                is_being_saved: live.is_being_saved(),
            };
            Some((*id, machine))
        });
        Cluster {
            wanted,
            asked: self.asked(),
            machines: machines.collect(),
            hosts,
            one: None,
        }
    }

    fn asked(&self) -> usize {
        self.hosts.values().filter(|host| host.is_awaited()).count()
    }

    /// One machine over several hosts, as parts. While it changes its hosts, all of them are
    /// needed.
    fn parts(
        &self,
        options: &Options,
        hosts: &BTreeMap<HostId, Host>,
    ) -> BTreeMap<MachineId, Machine> {
        let mut parts = BTreeMap::new();
        for live in self.machines.values() {
            let over = live.hosts();
            let changes = live.task.is_some();
            for (number, at) in (0..).zip(&over) {
                let part = Machine {
                    memory: options.one().part(over.len()),
                    resident: options.memory / over.len() as u64,
                    dirties: 0.0,
                    at: *at,
                    moves_to: changes.then_some(*at),
                    is_being_saved: live.is_being_saved(),
                };
                if hosts.contains_key(at) {
                    parts.insert(MachineId(number), part);
                }
            }
        }
        parts
    }
}

/// A time of the system's clock, measured from `epoch`.
fn since(time: SystemTime, epoch: Instant) -> Duration {
    let now = SystemTime::now();
    match time.duration_since(now) {
        Ok(left) => epoch.elapsed() + left,
        Err(past) => epoch.elapsed().saturating_sub(past.duration()),
    }
}
