//! What a launcher hears of its hosts, and tells them: their agents come, answer, and end.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use weft_checkpoint::Set;
use weft_malleable::{HostId, MachineId};

use super::door::AgentEvent;
use super::fleet::{LiveMachine, Underway};
use super::record::Phase;
use super::site::Ask;
use super::{Launcher, PEERS_SETTLE, network};
use crate::control::{FromAgent, PeerHost, Task, ToAgent};
use crate::switch::PeerSwitch;

/// By then an agent has looked at its machines, and has said what it saw.
const UNSEEN_MAX: Duration = Duration::from_secs(60);
/// By then it is known where a machine is whose host is gone, or which an order that failed has
/// taken away.
const DOUBT_MAX: Duration = Duration::from_secs(20);
/// How long an agent that was told to end may take, before its job is given back.
const CLOSE_MAX: Duration = Duration::from_secs(5);
/// A job that was given back may not have ended: the batch system may not have answered.
const GIVE_BACK_AGAIN: Duration = Duration::from_secs(10);
/// A job that has ended is a host that is lost, if no agent answers this long.
const LOST_AFTER: Duration = Duration::from_secs(5);

/// What became of an order whose agent is gone.
enum Unheard {
    /// The machine is there.
    Moved(HostId),
    /// It is whole in this folder.
    Saved(PathBuf),
    NotKnown,
    Lost,
}

impl Launcher {
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
                let mtus = offer.mtu.zip(self.record.mtu);
                let is_new = host.offer.is_none();
                self.misses = 0;
                host.key = Some(key);
                host.link = link;
                host.seen = None;
                host.writer = Some(*writer);
                host.offer = Some(offer);
                if host.closing.is_some() {
                    // It has not heard it, or another launcher asked for it.
                    host.tell(&ToAgent::End);
                    return;
                }
                if let Some((theirs, ours)) = mtus.filter(|(theirs, ours)| theirs < ours) {
                    let why = format!(
                        "its tap device carries packets of {theirs} bytes, and machines send {ours}"
                    );
                    return self.unfit(id, &why);
                }
                host.tell_end();
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
            AgentEvent::Unfit(why) => self.unfit(id, &why),
        }
    }

    fn unfit(&mut self, id: HostId, why: &str) {
        // Its agent may dial once more while it ends.
        let host = self.fleet.hosts.get(&id);
        if host.is_none_or(|host| host.closing.is_some()) {
            return;
        }
        let name = self.fleet.name(id);
        let why = format!("{name} cannot be used and goes back: {why}");
        self.close(id);
        self.missed(&why);
    }

    fn heard(&mut self, id: HostId, message: FromAgent) {
        match message {
            FromAgent::Machines(seen) => {
                for seen in &seen {
                    let Some(machine) = network::machine(&seen.name).map(MachineId) else {
                        continue;
                    };
                    let Some(live) = self.fleet.machines.get_mut(&machine) else {
                        continue;
                    };
                    if live.at == Some(id) {
                        live.resident = seen.resident;
                        live.unseen_since = None;
                    }
                }
                if let Some(host) = self.fleet.hosts.get_mut(&id) {
                    host.seen = Some(seen);
                }
                self.settle(id);
            }
            FromAgent::Load(percent) => {
                if let Some(host) = self.fleet.hosts.get_mut(&id) {
                    host.load = percent;
                }
                let busiest = self.fleet.hosts.values().map(|host| host.load).max();
                let load = f64::from(busiest.unwrap_or_default()) / 100.0;
                self.forecast.note_load(load);
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

    /// A machine that its agent has seen, and does not see any more, has ended, unless an order that
    /// failed has taken it away. One that was never seen after it came is given more time: on a busy
    /// host a look takes long.
    fn settle(&mut self, id: HostId) {
        let Some(host) = self.fleet.hosts.get(&id) else {
            return;
        };
        let unseen = self.fleet.machines.iter().filter(|(machine, live)| {
            let unseen = live.unseen_since.map(|since| since.elapsed());
            live.at == Some(id)
                && live.task.is_none()
                && unseen.is_none_or(|unseen| unseen > UNSEEN_MAX)
                && host.sees(**machine) == Some(false)
        });
        let unheard = unseen.map(|(machine, live)| match doubt(live) {
            Some((underway, since)) => (*machine, self.unheard(*machine, underway, since)),
            None => (*machine, Unheard::Lost),
        });
        let name = self.fleet.name(id);
        for (machine, unheard) in unheard.collect::<Vec<_>>() {
            match unheard {
                Unheard::Lost => self.lose(machine, &format!("it ended on {name}")),
                unheard => drop(self.complete(machine, &name, unheard)),
            }
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
        let switches = peers.iter().map(|peer| PeerSwitch {
            key: peer.key,
            address: peer.switch.clone(),
            detour: false,
        });
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
        self.seek();
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
            if self.complete_unheard(id) {
                self.lose_host(id);
                gone.push(id);
            }
        }
        for id in gone {
            self.forget(id);
        }
        let nowhere = self.fleet.machines.iter().find(|(_, live)| {
            let at = live.at.filter(|at| !self.fleet.hosts.contains_key(at));
            live.task.is_none() && at.is_some()
        });
        // It came there when the host was known to be gone.
        if let Some((&machine, _)) = nowhere {
            self.lose(machine, "its host is gone");
        }
    }

    /// A host is gone. Moves from there, and saves there, may have ended without the launcher
    /// hearing it, as while no launcher was there. False while it is not known of all.
    fn complete_unheard(&mut self, id: HostId) -> bool {
        let gone = self.fleet.name(id);
        let host = self.fleet.hosts.get(&id);
        let ended = host.and_then(|host| Some(host.ended.as_ref()?.1));
        let ended = ended.unwrap_or_else(Instant::now);
        let machines = self.fleet.machines.iter();
        let there = machines.filter(|(_, live)| live.at == Some(id));
        let underway = there.filter_map(|(machine, live)| {
            let task = live.task.as_ref().map(|underway| (underway, ended));
            let (underway, since) = task.or_else(|| doubt(live))?;
            Some((*machine, self.unheard(*machine, underway, since)))
        });
        let mut is_known = true;
        for (machine, unheard) in underway.collect::<Vec<_>>() {
            is_known &= self.complete(machine, &gone, unheard);
        }
        is_known
    }

    /// False if it is not known yet. `from`: the host that has the machine no more.
    fn complete(&mut self, machine: MachineId, from: &str, unheard: Unheard) -> bool {
        let name = network::name(machine.0);
        let Some(live) = self.fleet.machines.get_mut(&machine) else {
            return true;
        };
        let is_known = !matches!(unheard, Unheard::NotKnown);
        let sentence = match unheard {
            Unheard::Lost => return true,
            Unheard::NotKnown => format!(
                "{name} is not on {from} any more, and whether it had left is known when the agent \
                 of the host answers where it moved to"
            ),
            Unheard::Moved(to) => {
                live.is_found(to);
                live.task = None;
                format!("{name} had left {from}, and is on {}", self.fleet.name(to))
            }
            Unheard::Saved(folder) => {
                live.is_in(folder);
                live.task = None;
                format!("{name} had been saved on {from}")
            }
        };
        self.say_once(&sentence);
        is_known
    }

    /// `since`: when its host was gone, or the order failed.
    fn unheard(&self, machine: MachineId, underway: &Underway, since: Instant) -> Unheard {
        match (&underway.task, underway.to) {
            (Task::Move { .. }, Some(to)) => {
                let at = self.fleet.machines.get(&machine).and_then(|live| live.at);
                let sees = |id: &HostId| {
                    let host = self.fleet.hosts.get(id).filter(|_| at != Some(*id));
                    host.is_some_and(|host| host.sees(machine) == Some(true))
                };
                // An earlier order may have taken it to another one.
                let mut all = std::iter::once(&to).chain(self.fleet.hosts.keys());
                if let Some(seen) = all.find(|id| sees(id)) {
                    return Unheard::Moved(*seen);
                }
                let host = self.fleet.hosts.get(&to);
                let host = host.filter(|host| host.ended.is_none());
                match host.map(|host| host.sees(machine)) {
                    Some(None) => Unheard::NotKnown,
                    // What it has said may be older than the move.
                    Some(Some(_)) if since.elapsed() < DOUBT_MAX => Unheard::NotKnown,
                    _ => Unheard::Lost,
                }
            }
            (Task::Save { folder, .. }, _) if Set::open(folder).is_ok() => {
                Unheard::Saved(folder.clone())
            }
            _ => Unheard::Lost,
        }
    }

    fn lose_host(&mut self, id: HostId) {
        let name = self.fleet.name(id);
        let host = self.fleet.hosts.get(&id);
        let how = host.and_then(|host| Some(host.ended.as_ref()?.0.clone()));
        let why = format!("{name} is gone: {}", how.as_deref().unwrap_or_default());
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
            .filter(|(_, live)| live.is_on(id) || restores(live))
            .map(|(machine, _)| *machine)
            .collect();
        // Perhaps to an earlier launcher.
        let has_come = host.is_some_and(|host| host.key.is_some());
        if !has_come {
            let log = self.folder.file(&format!("job-{}.log", id.0));
            let how = how.unwrap_or_default();
            self.missed(&format!(
                "the job on {name} ended before its agent answered: {how}; its log is {}",
                log.display()
            ));
        } else if there.is_empty() {
            self.say(&why);
        }
        for machine in there {
            self.lose(machine, &why);
        }
    }

    pub(super) fn forget(&mut self, id: HostId) {
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
        self.watch();
    }
}

/// The order that failed last, if it may have been carried out. After a save that failed long ago
/// the machine has gone on: the files are not what it was.
fn doubt(live: &LiveMachine) -> Option<(&Underway, Instant)> {
    let (underway, since) = live.doubt.as_ref()?;
    let is_old = matches!(underway.task, Task::Save { .. }) && since.elapsed() >= DOUBT_MAX;
    (!is_old).then_some((underway, *since))
}
