//! The thread that owns a machine's life and takes its requests one after the other.
//!
//! Invariants: vCPUs run only in the stage Running; in every other stage guest time is
//! stopped, no device accesses guest memory, and no interrupt is on its way between slices;
//! after a refused request the stage is as before, or Ended if that was not possible.

pub(super) mod checkpoint;

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use weft_aggregate::{Slice, Timekeeper};
use weft_guest_memory::Ram;
use weft_platform::acpi::power::PowerDevice;
use weft_platform::clock::{Alarms, Clock};
use weft_platform::interrupts::VcpuLocation;

use super::fault_reports::FaultReports;
use super::lifecycle::{Counters, End, MachineReply, MachineRequest, Refusal, Stage, Status};
use super::page_writer::PageWriter;
use super::part::NamedPart;
use super::restoring::SavedMemory;
use super::shutdown::{Ending, Input, Shutdown};
use super::sources::with_sources;
use super::wanted_moves::WantedMoves;
use crate::vcpu::following::Followers;
use crate::vcpu::runner::{Activity, Runner, RunnerError, VcpuCommand, VcpuState};
use weft_aggregate::commands::{SliceCommand, SliceReply, VcpuStage};

/// Longest time in which a vCPU must carry out a command: it must leave guest code or a
/// device's register first, and its host may be busy.
const COMMAND_WAIT: Duration = Duration::from_secs(if cfg!(test) { 4 } else { 10 });
/// Longest time in which a vCPU's thread must end.
const FINISH_WAIT: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 5 });

/// A home that was given away.
pub(super) struct Given {
    /// The machine ran before.
    pub ran: bool,
    /// Other nodes may have another node 0.
    pub to_heir: bool,
}

/// The machine's owner: all that its thread needs.
pub(super) struct Owner {
    pub inputs: Receiver<Input>,
    pub shutdown: Arc<Shutdown>,
    pub ending: Arc<Ending>,
    pub runners: Vec<Runner>,
    /// In the order in which they are restored; paused in the reverse order.
    pub parts: Vec<NamedPart>,
    pub clock: Arc<Clock>,
    pub alarms: Option<Arc<Alarms>>,
    pub back_end: &'static str,
    pub memory_bytes: u64,
    pub stage: Stage,
    /// The counters after the vCPUs had stopped for the end.
    pub collected: Option<Counters>,
    /// Pages and faults of all slices.
    pub reports: FaultReports,
    pub power: Arc<PowerDevice>,
    /// Guest-physical addresses to which all slices subscribe.
    pub updated: Vec<Range<u64>>,
    /// `None` if the machine has one slice that stays alone.
    pub slice: Option<Arc<Slice>>,
    /// With the slice: whose time the clock follows.
    pub timekeeper: Option<Arc<Timekeeper>>,
    /// Moves that vCPUs ask for by themselves.
    pub wanted_moves: Arc<WantedMoves>,
    /// `None`: vCPUs do not move by themselves.
    pub followers: Option<Arc<Followers>>,
    /// Of this host, for this process.
    pub processors: usize,
    /// The guest's memory, as it is here.
    pub ram: Ram,
    /// See [`CheckpointIo::channels`].
    ///
    /// [`CheckpointIo::channels`]: super::CheckpointIo::channels
    pub channels: Vec<Option<OwnedFd>>,
    pub writer: Arc<PageWriter>,
    /// On the primary: what slices on other hosts read from here when the machine is restored.
    pub saved: Option<(Arc<SavedMemory>, weft_checkpoint::Identity)>,
    /// Between [`MachineRequest::GiveHome`] and what follows it.
    pub given: Option<Given>,
    /// On a process that takes the place of node 0 among others, until
    /// [`MachineRequest::SettleHome`]: which of them keeps the time, and since which epoch.
    pub unsettled: Option<(usize, u64)>,
    /// What remains to be done at the end: devices are taken off their buses.
    pub take_down: Box<dyn FnOnce() + Send>,
}

impl Owner {
    /// Lets no part take anything until the machine runs: what is typed or received before a
    /// state is restored would be lost.
    pub fn stand(&mut self) {
        if let Err(refusal) = self.pause_parts("build") {
            self.shutdown.end(End::Failed {
                reason: refusal.to_string(),
            });
        }
    }

    pub fn run(mut self) {
        // Handles keep the channel open; the machine itself says Quit.
        while let Ok(input) = self.inputs.recv() {
            match input {
                Input::Request(envelope) => {
                    let reply = self.carry_out(envelope.request);
                    // A handle whose wait timed out has dropped the receiver.
                    let _ = envelope.reply.try_send(reply);
                }
                Input::Wake => {}
                Input::Quit => break,
            }
            self.move_wanted();
            if let Some(end) = self.shutdown.wanted() {
                self.end(end);
            }
        }
        self.end(End::Stopped);
        if let Some(slice) = &self.slice {
            slice.close();
        }
        (self.take_down)();
    }

    fn carry_out(&mut self, request: MachineRequest) -> Result<MachineReply, Refusal> {
        let name = request.name();
        match (request, self.stage) {
            (MachineRequest::Status, _) => return Ok(MachineReply::Status(self.status())),
            (MachineRequest::Counters, _) => return Ok(MachineReply::Counters(self.counters())),
            (MachineRequest::Pages, _) => {
                return Ok(MachineReply::Pages(
                    self.reports.pages(self.commanding_slice()),
                ));
            }
            (MachineRequest::TakeHomeBack, _) => self.take_home_back()?,
            (MachineRequest::EndGiven(end), _) => self.end_given(end)?,
            (_, Stage::Running | Stage::Paused) if self.given.is_some() => {
                let reason = "it goes on on another host in a moment".to_owned();
                return Err(Refusal::Impossible {
                    request: name,
                    reason,
                });
            }
            (MachineRequest::AnnounceHome, Stage::Built) => self.announce_home(),
            (MachineRequest::GiveHome { node, heir, ran }, _) => {
                let given = self.give_home((node, heir), ran)?;
                return Ok(MachineReply::HomeGiven(Box::new(given)));
            }
            (MachineRequest::TakeHome(home), Stage::Built) => {
                self.take_home(*home)?;
                self.stage = Stage::Paused;
            }
            (MachineRequest::SettleHome, Stage::Paused) => self.settle_home()?,
            (MachineRequest::Faults(from), _) => {
                return Ok(MachineReply::Faults(
                    self.reports.faults(self.commanding_slice(), from),
                ));
            }
            (MachineRequest::Run, Stage::Built) | (MachineRequest::Resume, Stage::Paused) => {
                self.run_vcpus(name)?
            }
            (MachineRequest::Pause, Stage::Running) => self.pause(name)?,
            (MachineRequest::MoveVcpu { vcpu, to }, _) => {
                return self.move_vcpu(vcpu, to, false).map(MachineReply::Moved);
            }
            (MachineRequest::MoveTime { to }, _) => {
                return self.move_time(to).map(MachineReply::TimeMoved);
            }
            (MachineRequest::MovePlatform { to }, _) => {
                return self.move_platform(to).map(MachineReply::PlatformMoved);
            }
            (MachineRequest::Switch(order), _) => {
                return self.switch(&order).map(MachineReply::Switched);
            }
            (MachineRequest::Platform(command), _) => {
                let done = self.platform_command(&command);
                let reply = done.map_err(|reason| refused(name, reason))?;
                return Ok(MachineReply::OfSlice(reply));
            }
            (MachineRequest::MoveQueues(wanted), _) => {
                return self.move_queues(&wanted).map(MachineReply::QueuesMoved);
            }
            (MachineRequest::Queues(command), _) => {
                let done = self.queues_command(&command);
                let reply = done.map_err(|reason| refused(name, reason))?;
                return Ok(MachineReply::OfSlice(reply));
            }
            (MachineRequest::ChangeMembership { change, node }, Stage::Running | Stage::Paused) => {
                self.change_membership(change, node)?
            }
            (
                MachineRequest::ExpectVcpu {
                    vcpu,
                    back_end,
                    by_itself,
                },
                Stage::Running | Stage::Paused,
            ) => {
                self.expect_vcpu(vcpu, &back_end, by_itself)?;
            }
            (MachineRequest::Stop, Stage::Built | Stage::Running | Stage::Paused) => {
                self.end(End::Stopped);
            }
            (MachineRequest::PressPowerButton, Stage::Running) => {
                self.press_power_button(name)?;
            }
            (
                MachineRequest::Save
                | MachineRequest::Restore(_)
                | MachineRequest::WriteCheckpoint(_),
                _,
            ) if self.slice.as_ref().is_some_and(|slice| !slice.is_primary()) => {
                let reason = "node 0 does this for the whole machine".to_owned();
                return Err(refused(name, reason));
            }
            (MachineRequest::WriteCheckpoint(checkpoint), Stage::Built | Stage::Paused) => {
                let written = self.write_checkpoint(name, *checkpoint)?;
                return Ok(MachineReply::Checkpoint(Box::new(written)));
            }
            (MachineRequest::KeepOwned, Stage::Built | Stage::Paused) => self.keep_owned()?,
            (MachineRequest::CutPages { pages, way }, Stage::Built | Stage::Paused) => {
                self.cut_own_pages(name, (pages, way))?;
            }
            (MachineRequest::SaveVcpu(vcpu), Stage::Built | Stage::Paused) => {
                let state = self.save_here(name, vcpu)?;
                return Ok(MachineReply::Vcpu(Box::new(state)));
            }
            (MachineRequest::RestoreVcpu(vcpu, state), Stage::Built | Stage::Paused) => {
                self.command_vcpu(name, vcpu, VcpuCommand::Restore(state))?;
            }
            (MachineRequest::Save, Stage::Built | Stage::Paused) => {
                return self
                    .save(name)
                    .map(|state| MachineReply::Saved(Box::new(state)));
            }
            (MachineRequest::Restore(state), Stage::Built | Stage::Paused) => {
                self.restore(name, *state)?;
                self.stage = Stage::Paused;
            }
            (_, stage) => {
                let request = name;
                return Err(Refusal::Stage { request, stage });
            }
        }
        Ok(MachineReply::Done(self.stage))
    }

    /// From Built or Paused to Running.
    pub(super) fn run_vcpus(&mut self, request: &'static str) -> Result<(), Refusal> {
        if let Err(error) = weft_confine::settle() {
            let refusal = refused(request, error.to_string());
            self.fail(&refusal);
            return Err(refusal);
        }
        self.resume_parts(request)?;
        let (tsc_offset, tsc_zero) = self.start_time(request)?;
        if let Some(alarms) = &self.alarms {
            alarms.resume();
        }
        if let Some(slice) = &self.slice {
            slice.memory().resume_prefetches();
        }
        self.stage = Stage::Running;
        let run = self.run_command((tsc_offset, tsc_zero));
        self.command_secondaries(request, &run)?;
        self.command_all_vcpus(request, |_| VcpuCommand::Run)
            .map(drop)
    }

    /// What has a secondary's vCPUs run, with the timekeeper's offset and time zero.
    pub(super) fn run_command(&self, (tsc_offset, tsc_zero): (u64, u64)) -> SliceCommand {
        SliceCommand::Run {
            tsc_offset,
            tsc_zero,
            updated: self.updated.clone(),
        }
    }

    /// From Running to Paused. Then no interrupt is on its way: those between the primary and
    /// a secondary are ahead of its replies and of the next command, and those between two
    /// secondaries are waited for. What the I/O APIC of a secondary sends because of the last
    /// EOIs and pins of the primary is waited for at the end.
    pub(super) fn pause(&mut self, request: &'static str) -> Result<(), Refusal> {
        if let Some(slice) = &self.slice {
            slice.memory().hold_prefetches();
        }
        self.command_secondaries(request, &SliceCommand::Pause)?;
        let slices = self.slice.as_ref().map(|slice| slice.members().len());
        if slices > Some(2) {
            self.command_secondaries(request, &SliceCommand::Settle)?;
        }
        self.command_all_vcpus(request, |_| VcpuCommand::Pause)?;
        self.clock.stop();
        self.stage = Stage::Paused;
        if let Err(refusal) = self.pause_parts(request) {
            // Back to Running, if that is possible.
            self.run_vcpus(request)?;
            return Err(refusal);
        }
        self.settle_platform(request)
    }

    /// Has the machine stand while `act` is carried out. One that ran goes on, also after a
    /// refusal, but not after a failure, which ends it; one that was paused stays so. Returns
    /// how long it stood, too: zero if it was paused before.
    pub(super) fn while_standing<T>(
        &mut self,
        request: &'static str,
        act: impl FnOnce(&mut Self) -> Result<T, Refusal>,
    ) -> Result<(T, Duration), Refusal> {
        let stage = self.stage;
        if !matches!(stage, Stage::Running | Stage::Paused) {
            return Err(Refusal::Stage { request, stage });
        }
        let begun = Instant::now();
        if stage == Stage::Running {
            self.pause(request)?;
        }
        let done = act(self);
        if stage == Stage::Paused {
            return done.map(|done| (done, Duration::ZERO));
        }
        if !matches!(done, Err(Refusal::Failed { .. })) {
            self.run_vcpus(request)?;
        }
        done.map(|done| (done, begun.elapsed()))
    }

    /// On the primary: waits for what the platform of a secondary sends to others.
    fn settle_platform(&self, request: &'static str) -> Result<(), Refusal> {
        let Some(slice) = self.commanding_slice() else {
            return Ok(());
        };
        let holder = slice.platform().holder();
        if holder == slice.number() {
            return Ok(());
        }
        let settled = slice.command(holder, &SliceCommand::Settle);
        settled.map(drop).map_err(|reason| {
            let refusal = refused(request, reason);
            self.fail(&refusal);
            refusal
        })
    }

    fn press_power_button(&self, request: &'static str) -> Result<(), Refusal> {
        let holder = self.slice.as_deref().map(|slice| slice.platform().holder());
        match self.commanding_slice().zip(holder) {
            Some((slice, holder)) if holder != slice.number() => slice
                .command(holder, &SliceCommand::PressPowerButton)
                .map(drop)
                .map_err(|reason| refused(request, reason)),
            _ => {
                self.power.press_button();
                Ok(())
            }
        }
    }

    /// On the primary: sends a command to all secondaries and waits for their replies. A
    /// secondary that fails ends the machine.
    fn command_secondaries(
        &self,
        request: &'static str,
        command: &SliceCommand,
    ) -> Result<(), Refusal> {
        let Some(slice) = self.slice.as_ref().filter(|slice| slice.is_primary()) else {
            return Ok(());
        };
        slice.command_all(command).map(drop).map_err(|reason| {
            let refusal = refused(request, reason);
            self.fail(&refusal);
            refusal
        })
    }

    /// The slice, where it may command secondaries.
    fn commanding_slice(&self) -> Option<&Slice> {
        let slice = self.slice.as_deref().filter(|slice| slice.is_primary());
        slice.filter(|_| self.stage != Stage::Ended && self.given.is_none())
    }

    /// The replies of the secondaries to a query; nothing from those that do not reply.
    fn ask_secondaries(&self, command: &SliceCommand) -> Vec<(usize, SliceReply)> {
        let asked = self.commanding_slice();
        asked.map_or_else(Vec::new, |slice| {
            slice.command_all(command).unwrap_or_default()
        })
    }

    /// Sends a command to every vCPU, then waits for all replies. A vCPU that does not carry
    /// it out ends the machine, because its state is unknown.
    fn command_all_vcpus(
        &mut self,
        request: &'static str,
        mut command: impl FnMut(usize) -> VcpuCommand,
    ) -> Result<Vec<Option<Box<VcpuState>>>, Refusal> {
        let deadline = Instant::now() + COMMAND_WAIT;
        let given: Result<Vec<()>, RunnerError> = self
            .runners
            .iter()
            .enumerate()
            .map(|(index, runner)| runner.command(command(index)))
            .collect();
        let outcome = given.and_then(|_| {
            let replies = self.runners.iter().map(|runner| runner.reply(deadline));
            replies.collect()
        });
        outcome.map_err(|error| {
            let refusal = refused(request, with_sources(&error));
            self.fail(&refusal);
            refusal
        })
    }

    fn pause_parts(&mut self, request: &'static str) -> Result<(), Refusal> {
        for (index, (name, part)) in self.parts.iter().enumerate().rev() {
            if let Err(error) = part.as_part().pause() {
                let refusal = refused(request, format!("{name}: {error}"));
                let slice = self.slice.as_deref();
                let paused = self.parts[index + 1..].iter();
                for (_, paused) in paused.filter(|part| Self::is_used(part, slice)) {
                    if paused.as_part().resume().is_err() {
                        self.fail(&refusal);
                        return Err(refusal);
                    }
                }
                return Err(refusal);
            }
        }
        Ok(())
    }

    fn resume_parts(&mut self, request: &'static str) -> Result<(), Refusal> {
        let slice = self.slice.as_deref();
        for (name, part) in self.parts.iter().filter(|part| Self::is_used(part, slice)) {
            if let Err(error) = part.as_part().resume() {
                let refusal = refused(request, format!("{name}: {error}"));
                self.fail(&refusal);
                return Err(refusal);
            }
        }
        Ok(())
    }

    /// What failed ends the machine.
    pub(super) fn failed(&self, request: &'static str, error: &dyn std::fmt::Display) -> Refusal {
        let refusal = refused(request, error.to_string());
        self.fail(&refusal);
        refusal
    }

    pub(super) fn fail(&self, refusal: &Refusal) {
        self.shutdown.end(End::Failed {
            reason: refusal.to_string(),
        });
    }

    /// Ends the machine in any stage; a second call does nothing.
    fn end(&mut self, end: End) {
        if self.stage == Stage::Ended {
            return;
        }
        // Makes vCPUs stop, also inside guest code.
        self.shutdown.end(end.clone());
        for runner in &self.runners {
            // A thread that has ended already has no receiver.
            let _ = runner.command(VcpuCommand::Finish);
        }
        let deadline = Instant::now() + FINISH_WAIT;
        let mut stuck = Vec::new();
        for (id, runner) in self.runners.iter_mut().enumerate() {
            if !runner.finish(deadline) {
                stuck.push(id);
            }
        }
        self.collected = Some(self.counters());
        // After a failure a slice may be lost: do not wait for its reports.
        let lost = matches!(end, End::Failed { .. });
        let mut reports = std::mem::take(&mut self.reports);
        reports.collect(self.commanding_slice().filter(|_| !lost));
        self.reports = reports;
        // The other nodes go on with another node 0, or are ended by their hosts.
        let is_alone = self.given.is_some() || self.unsettled.is_some();
        if let Some(slice) = self.slice.as_ref().filter(|_| !is_alone) {
            if slice.is_primary() {
                // A secondary that does not reply ends when its links do.
                let _ = slice.command_all(&SliceCommand::Stop);
            }
            // One that ends by itself keeps its links: see `Handle::wait_for_stop`.
            if slice.is_primary() || slice.has_heard_stop() {
                slice.close();
            }
        }
        self.clock.stop();
        // A device that is still busy is dropped with the machine.
        let _ = self.pause_parts("stop");
        self.stage = Stage::Ended;
        self.ending.set(if stuck.is_empty() {
            end
        } else {
            End::Failed {
                reason: format!("{end}, but vCPUs {stuck:?} did not come back"),
            }
        });
    }

    fn status(&self) -> Status {
        let mut vcpus = self.own_vcpus();
        for (_, reply) in self.ask_secondaries(&SliceCommand::Status) {
            if let SliceReply::Status(theirs) = reply {
                vcpus.extend(theirs);
            }
        }
        Status {
            stage: self.stage,
            end: self.ending.get(),
            back_end: self.back_end.to_owned(),
            vcpus,
            locations: match &self.slice {
                Some(slice) => slice.locations().all(),
                None => vec![VcpuLocation::default(); self.runners.len()],
            },
            memory_bytes: self.memory_bytes,
            guest_time_ns: self.clock.nanoseconds(),
        }
    }

    fn own_vcpus(&self) -> BTreeMap<u32, VcpuStage> {
        // The threads of vCPUs that are elsewhere end as well.
        let is_here = |id| {
            let is_at = |slice: &Arc<Slice>| slice.locations().at(slice.number()).contains(&id);
            self.slice.as_ref().is_none_or(is_at)
        };
        let stage = |runner: &Runner| match runner.activity() {
            Activity::WaitingForStartUp => Some(VcpuStage::WaitingForStartUp),
            Activity::Running => Some(VcpuStage::Running),
            Activity::Halted => Some(VcpuStage::Halted),
            Activity::Paused => Some(VcpuStage::Paused),
            Activity::Finished => is_here(runner.id()).then_some(VcpuStage::Finished),
            Activity::Away => None,
        };
        let vcpus = self.runners.iter();
        vcpus
            .filter_map(|runner| Some((runner.id(), stage(runner)?)))
            .collect()
    }

    fn counters(&self) -> Counters {
        if let Some(collected) = &self.collected {
            return collected.clone();
        }
        let mut counters = self.own_counters();
        for (_, reply) in self.ask_secondaries(&SliceCommand::Counters) {
            if let SliceReply::Counters(theirs) = reply {
                // A vCPU that moved was counted on several slices.
                for (name, count) in theirs {
                    *counters.entry(name).or_default() += count;
                }
            }
        }
        counters
    }

    fn own_counters(&self) -> Counters {
        let mut counters = Counters::new();
        for runner in self.runners.iter().filter(|runner| runner.was_here()) {
            let memory = self.slice.as_ref().map(|slice| slice.memory());
            let faults = memory.map(|memory| memory.vcpu_counters(runner.id()));
            let id = runner.id();
            let served = memory.map_or_else(Vec::new, |memory| memory.served_counters(id));
            for (name, count) in served {
                counters.insert(format!("vcpu{id}.{name}"), count);
            }
            for (name, count) in (self.followers.iter()).flat_map(|all| all.counters(id)) {
                counters.insert(format!("vcpu{id}.{name}"), count);
            }
            for (name, count) in runner
                .counters()
                .into_iter()
                .chain(faults.into_iter().flatten())
            {
                counters.insert(format!("vcpu{}.{name}", runner.id()), count);
            }
        }
        if let Some(slice) = &self.slice {
            let number = slice.number();
            let memory = slice.memory().figures();
            for (name, count) in memory.into_iter().chain(slice.mapping_counters()) {
                counters.insert(format!("slice{number}.memory.{name}"), count);
            }
            for (name, count) in slice.traffic() {
                counters.insert(format!("slice{number}.{name}"), count);
            }
            let figures = slice.time_counters().into_iter();
            for (name, count) in figures.chain(slice.vcpu_moves().counters()) {
                counters.insert(format!("slice{number}.{name}"), count);
            }
        }
        let number = self.slice.as_ref().map_or(0, |slice| slice.number());
        if let Ok(bytes) = self.ram.host_bytes() {
            counters.insert(format!("slice{number}.memory.host-bytes"), bytes);
        }
        for (part, device) in &self.parts {
            for (name, count) in device.as_part().counters() {
                counters.insert(format!("{part}.{name}"), count);
            }
        }
        counters
    }
}

pub(super) fn refused(request: &'static str, reason: String) -> Refusal {
    Refusal::Failed { request, reason }
}
