//! What a launcher has agents do with machines, and what comes of it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use weft_malleable::{HostId, MachineId, Order, decide};

use super::fleet::{LiveHost, Underway};
use super::phases::EXIT_NOT_STARTED;
use super::{Launcher, network};
use crate::control::{Outcome, Task, ToAgent};

/// After something failed with a machine.
const REST: Duration = Duration::from_secs(2);
/// A machine that could not go on from its file so often, before the program runs, is given up.
const RESTORES_MAX: u32 = 5;

impl Launcher {
    /// Carries out what is best now.
    pub(super) fn decide(&mut self) {
        if Instant::now() < self.settles_at {
            return;
        }
        let cluster = self.cluster();
        let now = self.epoch.elapsed();
        for order in decide(&cluster, &self.forecast, &self.rules, now) {
            match order {
                Order::Ask => self.ask(),
                Order::Move { machine, to, why } => {
                    let before = cluster.machines.get(&machine).cloned();
                    self.order_move(machine, to, before, &why);
                }
                Order::Reshape { to, why } => self.reshape(&to, &cluster, &why),
                Order::Save { machine, why } => self.save(machine, &why),
                // A machine may be on its way there from a host whose agent does not answer.
                Order::GiveBack(host) if self.on(host).is_empty() => self.close(host),
                Order::GiveBack(_) => {}
                Order::Stuck { machine, why } => self.stuck(machine, &why),
            }
        }
    }

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
    pub(super) fn repeat_orders(&mut self, id: HostId) {
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
            others: Vec::new(),
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
            others: Vec::new(),
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
    pub(super) fn done(&mut self, order: u64, result: Result<Outcome, String>) {
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
        let outcome = match result {
            Ok(outcome) => outcome,
            Err(why) => {
                live.rests_until = Some(Instant::now() + REST);
                self.failed(machine, &underway, &why);
                if let Some(live) = self.fleet.machines.get_mut(&machine) {
                    live.doubt = Some((underway, Instant::now()));
                }
                return;
            }
        };
        live.doubt = None;
        // A look of its agents at their machines will show it.
        live.unseen_since = Some(Instant::now());
        match &underway.task {
            Task::Start(_) | Task::Restore { .. } => {
                live.nodes = match underway.others.is_empty() {
                    true => BTreeMap::new(),
                    false => underway.hosts().zip(0..).collect(),
                };
                live.at = underway.to;
                live.failures = 0;
                live.went_on_from = live.saved.take();
                self.record.used_saves.extend(live.went_on_from.clone());
            }
            Task::Reshape { .. } => self.reshaped(&underway, &outcome),
            Task::Move { to, .. } => {
                live.at = underway.to;
                let sentence = self.moved(machine, to, &underway, &outcome);
                self.say(&sentence);
            }
            Task::Save { folder, .. } => {
                live.is_in(folder.clone());
            }
        }
    }

    /// A machine has gone to `hosts`: what it took is learned and counted. A sentence without end.
    pub(super) fn moved(
        &mut self,
        machine: MachineId,
        hosts: &str,
        underway: &Underway,
        outcome: &Outcome,
    ) -> String {
        let (name, took) = (network::name(machine.0), underway.since.elapsed());
        let mut sentence = format!("{name} is on {hosts} after {:.2} s", took.as_secs_f64());
        if let Some((before, expected)) = &underway.before {
            sentence += &format!(", {:.2} s were expected", expected.as_secs_f64());
            self.forecast.learn(before, took);
        }
        let stood: Vec<String> = outcome.stood_ms.iter().map(ToString::to_string).collect();
        if !stood.is_empty() {
            sentence += &format!("; it stood for {} ms", stood.join(" and "));
        }
        self.record.moves += 1;
        sentence
    }

    /// While the program waits for it, it is not tried for ever: all stay saved then.
    fn not_restored(&mut self, machine: MachineId, why: &str) {
        let live = self.fleet.machines.get_mut(&machine);
        let failures = live.map_or(0, |live| {
            live.failures += 1;
            live.failures
        });
        match failures >= RESTORES_MAX && self.can_stay_saved() {
            true => self.end(EXIT_NOT_STARTED, why),
            false => self.say(why),
        }
    }

    fn failed(&mut self, machine: MachineId, underway: &Underway, why: &str) {
        let name = network::name(machine.0);
        match &underway.task {
            Task::Start(_) => self.end(EXIT_NOT_STARTED, &format!("{name} did not start: {why}")),
            Task::Restore { .. } => {
                self.not_restored(machine, &format!("{name} did not go on: {why}"))
            }
            Task::Move { to, .. } => self.say(&format!("{name} did not move to {to}: {why}")),
            Task::Reshape { .. } => self.say(&format!("{name} did not change its hosts: {why}")),
            Task::Save { .. } => self.say(&format!("{name} was not saved: {why}")),
        }
    }
}
