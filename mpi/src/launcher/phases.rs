//! A cluster's life: hosts are gathered, machines boot, the program runs, everything goes back.

use std::time::{Duration, Instant};

use weft_malleable::{HostId, MACHINES_ON_HOST_MAX, MachineId};
use weft_node::size::format_bytes;

use super::fleet::{LiveMachine, Underway};
use super::program::{self, ProgramEvent};
use super::record::Phase;
use super::{EXIT_LOST, EXIT_SAVED, Launcher, network};
use crate::control::{Machine, Task};

/// The exit code if the machines, or the program, did not start.
pub const EXIT_NOT_STARTED: u8 = 125;
/// The exit code if the user ended the cluster before its program ended.
pub const EXIT_INTERRUPTED: u8 = 130;
/// A boot that takes longer is a slow one.
const BOOT_USUAL: Duration = Duration::from_secs(30);
/// After a program has failed: by then a link that broke shows, and a machine that ended.
const DOUBT_LEAST: Duration = Duration::from_secs(3);
/// By then the batch system has said that the job of a silent host has ended.
const DOUBT_MAX: Duration = Duration::from_secs(30);
/// Of the guest's kernel: it asks for the address of a machine that does not answer for 120 s, as
/// long as its TCP repeats what is lost. Otherwise who opens a connection to a machine that stands
/// in a move, or is cut off, hears after 3 s that there is no route.
const PATIENT: &str = "sysctl.net.ipv4.neigh.eth0.mcast_solicit=120 \
                       sysctl.net.ipv4.neigh.eth0.ucast_solicit=120";
/// How long the end may take, until the batch system has all hosts back.
const END_MAX: Duration = Duration::from_secs(90);

/// Everything goes back.
pub struct Ending {
    code: u8,
    since: Instant,
    /// What was saved, or went wrong, is kept for a user to look at.
    keeps: bool,
}

impl Ending {
    /// The launcher's exit code.
    pub fn code(&self) -> u8 {
        self.code
    }
}

impl Launcher {
    /// One step of the life.
    pub(super) fn advance(&mut self) {
        match self.record.phase {
            Phase::Gathering => self.gather(),
            Phase::Booting => self.boot(),
            Phase::Running => self.run(),
            Phase::Saved => self.end(EXIT_SAVED, ""),
            Phase::Ending => {
                // Unless this is the launcher that has begun it.
                self.end(EXIT_LOST, "");
                let hosts: Vec<HostId> = self.fleet.hosts.keys().copied().collect();
                for host in hosts {
                    self.close(host);
                }
            }
        }
    }

    fn gather(&mut self) {
        let usable = self.usable();
        if usable.is_empty() {
            self.gathering_since = Instant::now();
        }
        self.ask_for_hosts(usable.len());
        let is_late = self.gathering_since.elapsed() > self.record.options.wait;
        let have = usable.len();
        let waits = have < self.record.wanted && !is_late;
        if have < self.least_hosts() || waits || Instant::now() < self.settles_at {
            return;
        }
        let wanted = self.record.wanted;
        if have < wanted && !self.record.options.adaptive {
            let why = format!("{have} of {wanted} hosts came in time, and --static wants all");
            return self.end(EXIT_NOT_STARTED, &why);
        }
        if have < wanted {
            self.say(&format!(
                "{have} of {wanted} hosts came in time: it starts with these"
            ));
        }
        if let Err(why) = self.place(&usable) {
            return self.end(EXIT_NOT_STARTED, &why);
        }
        self.record.phase = Phase::Booting;
    }

    /// Asks for hosts until the usable ones, and those that are awaited, are as many as wanted.
    fn ask_for_hosts(&mut self, usable: usize) {
        let awaited = self.fleet.hosts.values().filter(|host| host.is_awaited());
        let wanted = self.record.wanted.max(self.least_hosts());
        for _ in usable + awaited.count()..wanted {
            self.ask();
        }
    }

    /// Hosts for machines, with the bytes that are free there.
    fn usable(&self) -> Vec<(HostId, u64)> {
        let hosts = self.fleet.hosts.iter();
        let usable = hosts.filter(|(_, host)| {
            host.has_come() && host.writer.is_some() && !host.leaves && host.ended.is_none()
        });
        let needs = self.record.options.needs();
        let with_room = usable.map(|(id, host)| {
            let room = host.offer.as_ref().map_or(0, |offer| offer.memory);
            let used = self.on(*id).len() as u64 * needs;
            (*id, room.saturating_sub(used))
        });
        with_room.collect()
    }

    /// Machines that are on a host, or about to be.
    pub(super) fn on(&self, host: HostId) -> Vec<MachineId> {
        let machines = self.fleet.machines.iter();
        let there = machines.filter(|(_, live)| live.hosts().contains(&host));
        there.map(|(id, _)| *id).collect()
    }

    /// Starts all machines that are nowhere, evenly.
    fn place(&mut self, usable: &[(HostId, u64)]) -> Result<(), String> {
        if self.record.mtu.is_none() {
            let offers = self
                .fleet
                .hosts
                .values()
                .filter_map(|host| host.offer.as_ref());
            self.record.mtu = offers.filter_map(|offer| offer.mtu).min();
        }
        if self.record.options.one_machine {
            return self.place_one(usable);
        }
        let needs = self.record.options.needs();
        let mut rooms: Vec<(usize, HostId, u64)> = usable
            .iter()
            .map(|(id, room)| (self.on(*id).len(), *id, *room))
            .collect();
        let machines = self.fleet.machines.iter();
        let nowhere: Vec<MachineId> = machines
            .filter(|(_, live)| live.at.is_none() && live.task.is_none())
            .map(|(id, _)| *id)
            .collect();
        for machine in nowhere {
            let fits = rooms
                .iter_mut()
                .filter(|(count, _, room)| *room >= needs && *count < MACHINES_ON_HOST_MAX);
            let Some(emptiest) = fits.min() else {
                return Err(format!(
                    "{} machines need {} each with what their monitors need, a host takes \
                     {MACHINES_ON_HOST_MAX} at most, and the {} hosts have no room for all: use \
                     fewer, smaller ones, or more hosts",
                    self.record.options.machines,
                    format_bytes(needs),
                    usable.len()
                ));
            };
            emptiest.0 += 1;
            emptiest.2 -= needs;
            let host = emptiest.1;
            self.start_machine(machine, host);
        }
        Ok(())
    }

    fn start_machine(&mut self, machine: MachineId, host: HostId) {
        let name = network::name(machine.0);
        let saved = self.fleet.machines.get(&machine);
        let task = match saved.and_then(|live| live.saved.clone()) {
            Some(folder) => Task::Restore {
                machine: name,
                folder,
                on: Vec::new(),
            },
            None => Task::Start(self.machine(machine)),
        };
        let underway = Underway {
            order: self.next_number(),
            task,
            since: Instant::now(),
            to: Some(host),
            others: Vec::new(),
            before: None,
        };
        // If its agent does not answer just now, it is placed again in the next turn.
        self.order(host, machine, underway);
    }

    pub(super) fn machine(&self, machine: MachineId) -> Machine {
        let options = &self.record.options;
        let number = machine.0;
        let mut command_line = format!(
            "console=ttyS0 quiet {PATIENT} weft.address={}/{} weft.name={} weft.peers={} \
             weft.slots={}",
            network::address(number),
            network::PREFIX,
            network::name(number),
            options.machines,
            options.slots,
        );
        if let Some(mtu) = self.record.mtu {
            command_line += &format!(" weft.mtu={mtu}");
        }
        Machine {
            name: network::name(number),
            kernel: options.image.join("vmlinux"),
            initrd: self.folder.file("initrd"),
            command_line,
            memory: options.memory,
            cpus: options.cpus,
            cpu: options.cpu.clone(),
            on: Vec::new(),
            spare: 0,
            address: network::mac(number),
        }
    }

    fn boot(&mut self) {
        let usable = self.usable();
        // One that could not go on there may go on elsewhere.
        if !usable.is_empty()
            && let Err(why) = self.place(&usable)
        {
            return self.end(EXIT_NOT_STARTED, &why);
        }
        let mut machines = self.fleet.machines.values();
        if machines.any(|live| live.at.is_none() && live.task.is_none()) {
            self.ask_for_hosts(usable.len());
        }
        let mut new = Vec::new();
        for (id, live) in &mut self.fleet.machines {
            if live.at.is_some() && !live.is_awaited {
                live.is_awaited = true;
                new.push(*id);
            }
        }
        for machine in new {
            if let Err(error) = self.shell.await_machine(machine, self.sender.clone()) {
                return self.end(EXIT_NOT_STARTED, &format!("{error:#}"));
            }
        }
        let all_are_placed = self.fleet.machines.values().all(|live| live.at.is_some());
        // A host may have to be left before. Moves for load alone can wait.
        if all_are_placed && self.epoch.elapsed() > BOOT_USUAL {
            self.decide();
        }
        if all_are_placed && self.fleet.machines.values().all(|live| live.ready) {
            self.record.phase = Phase::Running;
            // From now on others hear of what they do.
            let machines = self.fleet.machines.values_mut();
            machines.for_each(|live| live.went_on_from = None);
            let seconds = self.epoch.elapsed().as_secs_f64();
            self.say(&format!("all machines are ready after {seconds:.1} s"));
        }
    }

    fn run(&mut self) {
        if !self.follows {
            self.follows = true;
            self.start_program();
        }
        let grow = self.record.options.grow;
        if let Some((hosts, _)) = grow.filter(|(_, after)| self.record.age() > *after) {
            self.record.options.grow = None;
            self.record.wanted = hosts;
            self.say(&format!("{hosts} hosts are wanted from now on"));
        }
        self.decide();
        self.judge_failure();
        let mut machines = self.fleet.machines.values();
        if !machines.any(|live| live.saved.is_some()) {
            return;
        }
        if self.all_saved() {
            self.record.phase = Phase::Saved;
            self.say_saved();
            return;
        }
        // A host came after some were saved. While others are being saved, no host has room.
        let is_saving = self
            .fleet
            .machines
            .values()
            .any(LiveMachine::is_being_saved);
        let stays = |(id, _): &(HostId, u64)| {
            let until = self.fleet.hosts.get(id).and_then(|host| host.until);
            let least = std::time::SystemTime::now() + self.rules.margin * 12;
            until.is_none_or(|until| until > least)
        };
        let usable: Vec<(HostId, u64)> = self.usable().into_iter().filter(stays).collect();
        if !is_saving && !usable.is_empty() {
            // If not all fit, the others go on waiting.
            let _ = self.place(&usable);
        }
    }

    fn start_program(&mut self) {
        let options = &self.record.options;
        if options.program.is_empty() {
            let name = self.folder.name().to_owned();
            self.say(&format!(
                "no program was given: `weft mpi ssh {name}` logs in, `weft mpi exit {name}` ends \
                 the cluster"
            ));
            return;
        }
        let all = options.machines * options.slots;
        let processes = options.processes.unwrap_or(all);
        let command = program::mpirun(processes, &options.mpirun, &options.program);
        let followed = program::follow(
            self.shell.clone(),
            self.folder.clone(),
            command,
            self.sender.clone(),
        );
        if let Err(error) = followed {
            self.end(EXIT_NOT_STARTED, &format!("{error:#}"));
        }
    }

    pub(super) fn program(&mut self, event: ProgramEvent) {
        match event {
            ProgramEvent::Ready(machine) => {
                if let Some(live) = self.fleet.machines.get_mut(&machine) {
                    live.ready = true;
                }
            }
            ProgramEvent::NotReady(machine, why) => {
                let name = network::name(machine.0);
                let why = format!("{name} did not boot: its ssh server does not answer: {why}");
                self.end(EXIT_NOT_STARTED, &why);
            }
            ProgramEvent::Ended { code, unshown } => {
                self.unshown = unshown;
                let seconds = self.epoch.elapsed().as_secs_f64();
                let moves = self.record.moves;
                self.say(&format!(
                    "the program ended with {code} after {seconds:.1} s; its machines moved {moves} \
                     times"
                ));
                match code {
                    0 => self.end(0, ""),
                    _ => self.program_failed = Some((code, Instant::now())),
                }
            }
            ProgramEvent::Unreachable(why) => {
                let name = network::name(0);
                self.say_once(&format!(
                    "{name}, which has the program's output, does not answer and is asked again: {why}"
                ));
            }
            ProgramEvent::Failed(why) => self.end(EXIT_NOT_STARTED, &why),
        }
    }

    /// A program fails if one of its machines is lost, and may see that before its launcher does.
    fn judge_failure(&mut self) {
        let Some((code, at)) = self.program_failed else {
            return;
        };
        let is_silent = |id: HostId| {
            let host = self.fleet.hosts.get(&id);
            host.is_some_and(|host| host.writer.is_none())
        };
        let mut machines = self.fleet.machines.values();
        let in_doubt = machines.any(|live| live.hosts().into_iter().any(is_silent));
        let elapsed = at.elapsed();
        if elapsed > DOUBT_MAX || (!in_doubt && elapsed > DOUBT_LEAST) {
            self.end(code, "");
        }
    }

    /// A machine is no more, and the program cannot go on without it.
    pub(super) fn lose(&mut self, machine: MachineId, why: &str) {
        let name = network::name(machine.0);
        if let Some(live) = self.fleet.machines.get_mut(&machine) {
            live.at = None;
        }
        self.end(EXIT_LOST, &format!("{name} is lost: {why}"));
    }

    /// Everything goes back. The first reason counts.
    pub(super) fn end(&mut self, code: u8, why: &str) {
        if self.ending.is_some() {
            return;
        }
        if !why.is_empty() {
            self.say(why);
        }
        // An earlier launcher's reason was before this one.
        let code = self.record.code.unwrap_or(code);
        let code = match self.can_stay_saved() {
            true => {
                self.stay_saved();
                if code == EXIT_INTERRUPTED {
                    code
                } else {
                    EXIT_SAVED
                }
            }
            false => code,
        };
        let is_saved = self.is_in(Phase::Saved);
        self.ending = Some(Ending {
            code,
            since: Instant::now(),
            keeps: is_saved
                || self.unshown.is_some()
                || matches!(code, EXIT_LOST | EXIT_NOT_STARTED),
        });
        if !is_saved {
            self.record.code = Some(code);
            self.record.phase = Phase::Ending;
        }
    }

    fn all_saved(&self) -> bool {
        let mut machines = self.fleet.machines.values();
        machines.all(|live| live.saved.is_some())
    }

    /// Whether nothing is lost if all go back to the files that they were saved in: nobody outside
    /// has heard of what those have done that went on from there.
    pub(super) fn can_stay_saved(&self) -> bool {
        let mut machines = self.fleet.machines.values();
        matches!(self.record.phase, Phase::Gathering | Phase::Booting)
            && machines.all(|live| live.saved.is_some() || live.went_on_from.is_some())
    }

    fn stay_saved(&mut self) {
        for live in self.fleet.machines.values_mut() {
            // What an agent says of it from now on is of no use.
            live.task = None;
            live.at = None;
            live.nodes.clear();
            if let Some(saved) = live.went_on_from.take() {
                self.record.used_saves.retain(|used| *used != saved);
                live.saved = Some(saved);
            }
        }
        self.record.phase = Phase::Saved;
        self.say_saved();
    }

    fn say_saved(&mut self) {
        let name = self.folder.name();
        self.say(&format!(
            "all machines are saved: `weft mpi resume {name}` goes on from there"
        ));
    }

    pub(super) fn interrupted(&mut self) {
        self.interrupts += 1;
        match self.interrupts {
            1 => self.end(EXIT_INTERRUPTED, "interrupted"),
            _ => {
                if let Some(ending) = &mut self.ending {
                    ending.since = Instant::now().checked_sub(END_MAX).unwrap_or(ending.since);
                }
            }
        }
    }

    /// The exit code, once everything has gone back.
    pub(super) fn ended(&mut self) -> Option<u8> {
        let ending = self.ending.as_ref()?;
        let (code, keeps, is_late) = (ending.code, ending.keeps, ending.since.elapsed() >= END_MAX);
        if self.is_in(Phase::Saved) {
            let hosts: Vec<HostId> = self.fleet.hosts.keys().copied().collect();
            for host in hosts {
                self.close(host);
            }
        }
        let name = self.folder.name().to_owned();
        if !self.fleet.hosts.is_empty() {
            if is_late {
                self.say(&format!(
                    "the batch system has not taken all hosts back: `weft mpi attach {name}` tries \
                     it again"
                ));
                return Some(code);
            }
            return None;
        }
        // Without a job nothing was written that a user could look at.
        let has_logs = || self.folder.has_logs();
        if !keeps {
            for saved in self.record.saved_files() {
                // It may have been removed by hand.
                let _ = std::fs::remove_dir_all(saved);
            }
        }
        if !keeps || (!self.is_in(Phase::Saved) && !has_logs()) {
            if let Err(error) = self.folder.remove() {
                self.say(&format!("{error:#}"));
            }
            self.note();
            self.written = Some(self.record.clone());
        } else if !self.is_in(Phase::Saved) {
            let logs = self.folder.file("job-*.log");
            if let Some(why) = self.unshown.take() {
                let output = self.folder.file("stdout");
                self.say(&format!(
                    "the program's output could not all be written here ({why}): all of it is in \
                     {} and beside it, in stderr",
                    output.display()
                ));
            }
            self.say(&format!(
                "the logs of its jobs are {}; `weft mpi forget {name}` removes what is left",
                logs.display()
            ));
        }
        Some(code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_has_as_many_machines_as_its_switch_has_places() {
        assert_eq!(MACHINES_ON_HOST_MAX, weft_switch::core::MACHINES_MAX);
    }
}
