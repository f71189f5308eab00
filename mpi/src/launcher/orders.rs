//! What a launcher does: with the batch system, with hosts, with machines.

use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime};

use weft_batch::{Job, JobId, Wanted};
use weft_malleable::{HostId, MachineId, Order, decide};

use super::door::AgentEvent;
use super::fleet::{LiveHost, LiveMachine, Underway};
use super::options::SiteOptions;
use super::phases::EXIT_NOT_STARTED;
use super::record::Phase;
use super::site::{Ask, Refusal};
use super::{Launcher, PEERS_SETTLE, network};
use crate::control::{FromAgent, PeerHost, Task, ToAgent};
use crate::token::{self, Token};

/// A reservation is of use if it lasts this many moves: to it, from it, and the time between.
const TIMES_WORTH: u32 = 4;
/// After the batch system has refused a host.
const ASK_AGAIN: Duration = Duration::from_secs(10);
/// After something failed with a machine.
const REST: Duration = Duration::from_secs(2);
/// By then an agent has looked at its machines, and has said what it saw.
const UNSEEN_MAX: Duration = Duration::from_secs(60);
/// How long an agent that was told to end may take, before its job is given back.
const CLOSE_MAX: Duration = Duration::from_secs(5);
/// A job that was given back may not have ended: the batch system may not have answered.
const GIVE_BACK_AGAIN: Duration = Duration::from_secs(10);
/// How long the agent of a reservation is awaited whose launcher ended before it knew the job. The
/// door sends one away that comes later.
const STRAY_MAX: Duration = Duration::from_secs(5);
/// A warning of the batch system comes this much before the end, if it can do that.
const WARNING: Duration = Duration::from_secs(60);
/// A job that has ended is a host that is lost, if no agent answers this long.
const LOST_AFTER: Duration = Duration::from_secs(5);

impl Launcher {
    /// Carries out what is best now.
    pub(super) fn decide(&mut self) {
        if Instant::now() < self.settles_at {
            return;
        }
        let options = &self.record.options;
        let sizes = (options.memory, options.needs());
        let cluster = self.fleet.cluster(self.record.wanted, sizes, self.epoch);
        let now = self.epoch.elapsed();
        for order in decide(&cluster, &self.forecast, &self.rules, now) {
            match order {
                Order::Ask => self.ask(),
                Order::Move { machine, to, why } => {
                    let before = cluster.machines.get(&machine).cloned();
                    self.order_move(machine, to, before, &why);
                }
                Order::Save { machine, why } => self.save(machine, &why),
                Order::GiveBack(host) => self.close(host),
                Order::Stuck { machine, why } => self.stuck(machine, &why),
            }
        }
    }

    // --- The batch system ----------------------------------------------------

    /// Asks for one more host.
    pub(super) fn ask(&mut self) {
        if Instant::now() < self.asks_at || self.fleet.hosts.len() >= super::HOSTS_MAX {
            return;
        }
        let needed = self.rules.margin + self.longest_move() * TIMES_WORTH;
        if self.record.options.time < needed {
            let sentence = format!(
                "no more hosts are asked for: a reservation has {} s, and to be of use it needs {} \
                 s, since a move takes {:.1} s",
                self.record.options.time.as_secs(),
                needed.as_secs(),
                self.longest_move().as_secs_f64()
            );
            self.asks_at = Instant::now() + ASK_AGAIN;
            self.say_once(&sentence);
            return;
        }
        if let Err(error) = self.try_ask() {
            self.asks_at = Instant::now() + ASK_AGAIN;
            self.say(&format!("cannot ask for a host: {error:#}"));
        }
    }

    /// What nine of ten moves do not exceed, of the machine for which that is longest.
    fn longest_move(&self) -> Duration {
        let options = &self.record.options;
        let sizes = (options.memory, options.needs());
        let cluster = self.fleet.cluster(self.record.wanted, sizes, self.epoch);
        let moves = cluster.machines.values();
        let moves = moves.map(|machine| self.forecast.bound(machine));
        moves.max().unwrap_or_default()
    }

    fn try_ask(&mut self) -> anyhow::Result<()> {
        let number = self.next_number() as u32;
        let host = LiveHost::new(token::secret()?);
        let options = &self.record.options;
        let token = Token {
            key: self.key,
            addresses: self.addresses.clone(),
            secret: host.secret.clone(),
            lasts_s: options.time.as_secs() + 120,
        };
        let path = self.folder.file(&format!("token-{number}"));
        token.write(&path)?;
        let own = std::env::current_exe()?;
        let more = match &options.site {
            SiteOptions::Slurm { options } | SiteOptions::GridEngine { options } => options.clone(),
            SiteOptions::Local(_) => Vec::new(),
        };
        let wanted = Wanted {
            name: format!("weft-{}", self.folder.name()),
            time: options.time,
            warning: WARNING.min(options.time / 4),
            command: [
                own.into_os_string(),
                "mpi".into(),
                "host".into(),
                path.into_os_string(),
            ]
            .into(),
            output: self.folder.file(&format!("job-{number}.log")),
            options: more,
        };
        self.guests.expect(host.secret.clone(), number, None);
        self.fleet.hosts.insert(HostId(number), host);
        // Another launcher must know that there may be a job.
        self.write();
        self.site.send(Ask::Host {
            reservation: number,
            wanted,
        })?;
        Ok(())
    }

    pub(super) fn asked(&mut self, id: HostId, result: Result<JobId, Refusal>) {
        match result {
            Ok(job) => match self.fleet.hosts.get_mut(&id) {
                Some(host) => host.job = Some(job),
                None => drop(self.site.send(Ask::GiveBack(job))),
            },
            Err(Refusal { why, is_lasting }) => {
                self.forget(id);
                self.asks_at = Instant::now() + ASK_AGAIN;
                let has_none = self.fleet.hosts.is_empty() && self.is_in(Phase::Gathering);
                match is_lasting && has_none {
                    // Asking again would not help.
                    true => self.end(EXIT_NOT_STARTED, &format!("no host can be had: {why}")),
                    false => self.say_once(&format!("no host can be had now: {why}")),
                }
            }
        }
    }

    pub(super) fn jobs(&mut self, jobs: Result<BTreeMap<JobId, Job>, String>) {
        let jobs = match jobs {
            Ok(jobs) => jobs,
            Err(why) => {
                if self.trouble.as_ref() != Some(&why) {
                    self.say(&why);
                    self.trouble = Some(why);
                }
                return;
            }
        };
        if self.trouble.take().is_some() {
            self.say("the batch system answers again");
        }
        let of_job: Vec<(HostId, Job)> = self
            .fleet
            .hosts
            .iter()
            .filter_map(|(id, host)| Some((*id, jobs.get(host.job.as_ref()?)?.clone())))
            .collect();
        for (id, job) in of_job {
            self.job(id, job);
        }
    }

    fn job(&mut self, id: HostId, job: Job) {
        let Some(host) = self.fleet.hosts.get(&id) else {
            return;
        };
        let (until, ended, waits) = (host.until, host.ended.is_some(), host.waits.clone());
        self.fleet.heard(id, job);
        let Some(host) = self.fleet.hosts.get_mut(&id) else {
            return;
        };
        if host.until != until {
            tell_end(host);
        }
        let news = match (&host.ended, &host.waits) {
            (Some((how, _)), _) if !ended && host.closing.is_none() => {
                Some(format!("has ended as the batch system says: {how}"))
            }
            (_, Some(why)) if waits.as_ref() != Some(why) => Some(format!("waits: {why}")),
            _ => None,
        };
        if let Some(news) = news {
            let job = host.job.as_ref().map_or("", JobId::as_str);
            let sentence = format!("job {job} {news}");
            self.say(&sentence);
        }
    }

    // --- Hosts ---------------------------------------------------------------

    pub(super) fn agent(&mut self, id: HostId, event: AgentEvent) {
        let Some(host) = self.fleet.hosts.get_mut(&id) else {
            return;
        };
        match event {
            AgentEvent::Up {
                link,
                key,
                writer,
                offer,
            } => {
                let is_new = host.offer.is_none();
                host.key = Some(key);
                host.link = link;
                host.writer = Some(*writer);
                host.offer = Some(offer);
                if host.closing.is_some() {
                    // It has not heard it, or another launcher asked for it.
                    host.tell(&ToAgent::End);
                    return;
                }
                tell_end(host);
                if !is_new {
                    self.say(&format!("{} answers again", self.fleet.name(id)));
                }
                // It is told about all others in the next turn.
                self.peers.clear();
                self.repeat_orders(id);
            }
            AgentEvent::Heard { link, message } if link == host.link => self.heard(id, message),
            AgentEvent::Heard { .. } => {}
            AgentEvent::Down { link, why } if link == host.link => {
                host.writer = None;
                if host.closing.is_none() {
                    let name = self.fleet.name(id);
                    self.say(&format!(
                        "{name} does not answer ({why}); what runs there runs on"
                    ));
                }
            }
            AgentEvent::Down { .. } => {}
            AgentEvent::Unfit(why) => {
                let name = self.fleet.name(id);
                self.say(&format!("{name} cannot be used and goes back: {why}"));
                self.close(id);
            }
        }
    }

    fn heard(&mut self, id: HostId, message: FromAgent) {
        match message {
            FromAgent::Machines(seen) => {
                for seen in &seen {
                    let Some(machine) = machine_of(&seen.name) else {
                        continue;
                    };
                    let Some(live) = self.fleet.machines.get_mut(&machine) else {
                        continue;
                    };
                    if live.at == Some(id) && seen.state.is_some() {
                        live.resident = seen.resident;
                        live.unseen_since = None;
                    }
                }
                if let Some(host) = self.fleet.hosts.get_mut(&id) {
                    host.seen = seen;
                }
                self.settle(id);
            }
            FromAgent::Done { id: order, result } => self.done(order, result),
            FromAgent::Leaves(why) => {
                if let Some(host) = self.fleet.hosts.get_mut(&id)
                    && !host.leaves
                {
                    host.leaves = true;
                    let name = self.fleet.name(id);
                    self.say(&format!("{name} has to be left: {why}"));
                }
            }
        }
    }

    /// A machine that its agent has seen, and does not see any more, has ended. One that was never
    /// seen after it came is given more time: on a busy host a look takes long.
    fn settle(&mut self, id: HostId) {
        let Some(host) = self.fleet.hosts.get(&id) else {
            return;
        };
        let is_there = |machine: MachineId| {
            let mut seen = host.seen.iter();
            seen.any(|seen| machine_of(&seen.name) == Some(machine))
        };
        let ended = self.fleet.machines.iter().find(|(machine, live)| {
            let unseen = live.unseen_since.map(|since| since.elapsed());
            live.at == Some(id)
                && live.task.is_none()
                && unseen.is_none_or(|unseen| unseen > UNSEEN_MAX)
                && !is_there(**machine)
        });
        if let Some(machine) = ended.map(|(machine, _)| *machine) {
            let name = self.fleet.name(id);
            self.lose(machine, &format!("it ended on {name}"));
        }
    }

    /// All hosts are told about each other, if something has changed.
    pub(super) fn tell_peers(&mut self) {
        let mut peers = self.fleet.peers();
        if peers == self.peers {
            self.keep_alive();
            return;
        }
        self.peers = peers.clone();
        let switches = peers.iter().map(|peer| (peer.key, peer.switch.clone()));
        if let Err(error) = self.switch.know(switches.collect()) {
            self.trouble = Some(format!("{error:#}"));
        }
        peers.push(PeerHost {
            name: "launcher".into(),
            key: self.key,
            node: None,
            switch: format!(":{}", self.switch_port),
        });
        let message = ToAgent::Peers(peers);
        for host in self.fleet.hosts.values_mut() {
            host.tell(&message);
        }
        self.settles_at = Instant::now() + PEERS_SETTLE;
    }

    /// Each agent hears something within its patience.
    fn keep_alive(&mut self) {
        for host in self.fleet.hosts.values_mut() {
            host.tell(&ToAgent::Alive);
        }
    }

    /// The agent of an empty host ends, and its job goes back.
    pub(super) fn close(&mut self, id: HostId) {
        let Some(host) = self.fleet.hosts.get_mut(&id) else {
            return;
        };
        if host.closing.is_none() {
            host.closing = Some(Instant::now());
            // What was on it is elsewhere, and another launcher must know that.
            self.write();
            let Some(host) = self.fleet.hosts.get_mut(&id) else {
                return;
            };
            host.tell(&ToAgent::End);
            if host.name.is_some() && !self.is_in(Phase::Ending) {
                let name = self.fleet.name(id);
                self.say(&format!("{name} is empty and goes back"));
            }
        }
    }

    /// Gives jobs back whose agents have ended, and forgets those that have ended.
    pub(super) fn tidy(&mut self) {
        let now = Instant::now();
        let mut gone = Vec::new();
        let mut lost = Vec::new();
        for (id, host) in &mut self.fleet.hosts {
            let silent = host.writer.is_none();
            if let Some(since) = host.closing
                && (silent || now - since > CLOSE_MAX)
                && let Some(job) = &host.job
                && host.ended.is_none()
                && host.given_back.is_none_or(|at| now - at > GIVE_BACK_AGAIN)
            {
                host.given_back = Some(now);
                let _ = self.site.send(Ask::GiveBack(job.clone()));
            }
            if host.is_stray && host.closing.is_some_and(|since| now - since > STRAY_MAX) {
                gone.push(*id);
            }
            if let Some((_, since)) = host.ended
                && silent
            {
                match host.closing {
                    Some(_) => gone.push(*id),
                    None if now - since > LOST_AFTER => lost.push(*id),
                    None => {}
                }
            }
        }
        for id in lost {
            self.lose_host(id);
            gone.push(id);
        }
        for id in gone {
            self.forget(id);
        }
    }

    fn lose_host(&mut self, id: HostId) {
        let name = self.fleet.name(id);
        let host = self.fleet.hosts.get(&id);
        let how = host.and_then(|host| Some(host.ended.as_ref()?.0.clone()));
        let why = format!("{name} is gone: {}", how.unwrap_or_default());
        let machines = self.fleet.machines.iter();
        // One that went on from a file there may have talked with others: the file is not what it
        // was any more.
        let restores = |live: &LiveMachine| {
            let task = live
                .task
                .as_ref()
                .filter(|underway| underway.to == Some(id));
            task.is_some_and(|underway| matches!(underway.task, Task::Restore { .. }))
        };
        let there: Vec<MachineId> = machines
            .filter(|(_, live)| live.at == Some(id) || restores(live))
            .map(|(machine, _)| *machine)
            .collect();
        if there.is_empty() && host.is_some_and(|host| host.name.is_some()) {
            self.say(&why);
        }
        for machine in there {
            self.lose(machine, &why);
        }
    }

    fn forget(&mut self, id: HostId) {
        self.fleet.hosts.remove(&id);
        for live in self.fleet.machines.values_mut() {
            let task = live.task.as_ref();
            if task.is_some_and(|underway| underway.agent(live.at) == Some(id)) {
                live.task = None;
            }
        }
        self.guests.forget(id.0);
        // It may have been read by its agent or not: it is of no use any more.
        let _ = std::fs::remove_file(self.folder.file(&format!("token-{}", id.0)));
        let jobs = self.fleet.hosts.values();
        let jobs = jobs.filter_map(|host| host.job.clone()).collect();
        let _ = self.site.send(Ask::Watch(jobs));
    }

    // --- Machines ------------------------------------------------------------

    /// Has an agent do something with a machine.
    pub(super) fn order(&mut self, host: HostId, machine: MachineId, underway: Underway) -> bool {
        let now = Instant::now();
        let Some(live) = self.fleet.machines.get_mut(&machine) else {
            return false;
        };
        if live.task.is_some() || live.rests_until.is_some_and(|until| now < until) {
            return false;
        }
        let answers = |host: &LiveHost| host.writer.is_some();
        if !self.fleet.hosts.get(&host).is_some_and(answers) {
            return false;
        }
        let message = underway.message();
        live.task = Some(underway);
        // Another launcher must not give a number twice, nor miss what becomes of this order.
        self.write();
        let host = self.fleet.hosts.get_mut(&host);
        // If the link has just broken, it is said again over the next one.
        host.is_some_and(|host| host.tell(&message))
    }

    /// Orders whose results were not heard are given again: over a new link, or by a new launcher.
    /// An agent that has carried one out says so again.
    fn repeat_orders(&mut self, id: HostId) {
        let machines = self.fleet.machines.values();
        let messages: Vec<ToAgent> = machines
            .filter_map(|live| {
                let underway = live.task.as_ref()?;
                (underway.agent(live.at) == Some(id)).then(|| underway.message())
            })
            .collect();
        if let Some(host) = self.fleet.hosts.get_mut(&id) {
            for message in messages {
                host.tell(&message);
            }
        }
    }

    fn order_move(
        &mut self,
        machine: MachineId,
        to: HostId,
        before: Option<weft_malleable::Machine>,
        why: &str,
    ) {
        let Some(from) = self.fleet.machines.get(&machine).and_then(|live| live.at) else {
            return;
        };
        let task = Task::Move {
            machine: network::name(machine.0),
            to: self.fleet.name(to),
        };
        let expected = |before: weft_malleable::Machine| {
            let expected = self.forecast.expected(&before);
            (before, expected)
        };
        let before = before.map(expected);
        let underway = Underway {
            order: self.next_number(),
            task,
            since: Instant::now(),
            to: Some(to),
            before,
        };
        if self.order(from, machine, underway) {
            let name = network::name(machine.0);
            let (from, to) = (self.fleet.name(from), self.fleet.name(to));
            self.say(&format!("{name} moves from {from} to {to}: {why}"));
        }
    }

    fn save(&mut self, machine: MachineId, why: &str) {
        let at = self.fleet.machines.get(&machine).and_then(|live| live.at);
        let (Some(at), Some(folder)) = (at, self.record.options.save_to.clone()) else {
            return;
        };
        let name = network::name(machine.0);
        let order = self.next_number();
        // A folder that an attempt left half full is not used again.
        let folder = folder.join(format!("{}-{name}-{order}", self.folder.name()));
        let task = Task::Save {
            machine: name.clone(),
            folder,
        };
        let underway = Underway {
            order,
            task,
            since: Instant::now(),
            to: None,
            before: None,
        };
        if self.order(at, machine, underway) {
            self.say(&format!("{name} is saved: {why}"));
        }
    }

    fn stuck(&mut self, machine: MachineId, why: &str) {
        let name = network::name(machine.0);
        self.say_once(&format!("{name} is stuck: {why}"));
    }

    /// An order has been carried out, or has failed.
    fn done(&mut self, order: u64, result: Result<(), String>) {
        let mut machines = self.fleet.machines.iter_mut();
        let found = machines.find(|(_, live)| {
            live.task
                .as_ref()
                .is_some_and(|underway| underway.order == order)
        });
        let Some((&machine, live)) = found else {
            return;
        };
        let Some(underway) = live.task.take() else {
            return;
        };
        let name = network::name(machine.0);
        let took = underway.since.elapsed();
        if let Err(why) = result {
            live.rests_until = Some(Instant::now() + REST);
            self.failed(machine, &underway, &why);
            return;
        }
        // A look of its agents at their machines will show it.
        live.unseen_since = Some(Instant::now());
        match underway.task {
            Task::Start(_) | Task::Restore { .. } => {
                live.at = underway.to;
                live.saved = None;
            }
            Task::Move { to, .. } => {
                live.at = underway.to;
                self.record.moves += 1;
                let mut sentence = format!("{name} is on {to} after {:.2} s", took.as_secs_f64());
                if let Some((before, expected)) = underway.before {
                    sentence += &format!(", {:.2} s were expected", expected.as_secs_f64());
                    self.forecast.learn(&before, took);
                }
                self.say(&sentence);
            }
            Task::Save { folder, .. } => {
                live.at = None;
                live.ready = false;
                live.saved = Some(folder);
            }
        }
    }

    fn failed(&mut self, machine: MachineId, underway: &Underway, why: &str) {
        let name = network::name(machine.0);
        match &underway.task {
            Task::Start(_) => self.end(EXIT_NOT_STARTED, &format!("{name} did not start: {why}")),
            Task::Restore { .. } => self.say(&format!("{name} did not go on: {why}")),
            Task::Move { to, .. } => self.say(&format!("{name} did not move to {to}: {why}")),
            Task::Save { .. } => self.say(&format!("{name} was not saved: {why}")),
        }
    }
}

/// Of `vm-N`.
fn machine_of(name: &str) -> Option<MachineId> {
    Some(MachineId(name.strip_prefix("vm-")?.parse().ok()?))
}

/// When its reservation ends, as far as the batch system says.
fn tell_end(host: &mut LiveHost) {
    if let Some(until) = host.until {
        let left = until.duration_since(SystemTime::now()).unwrap_or_default();
        host.tell(&ToAgent::EndsAfter(left.as_millis() as u64));
    }
}
