//! What the API, the terminal and signals ask of the machine.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use weft_api::{
    BackEndView, BalloonView, ChangeView, ConsoleView, Control, Counters, Failure, Faults,
    LocationView, Pages, SaveBody, SaveFilesBody, Saved, State, VmView,
};
use weft_checkpoint::{Identity, Written};
use weft_confine::lock;
use weft_console::terminal::Size;
use weft_console::{Keys, Output, Port};
use weft_machine::membership::NewNode;
use weft_machine::migration::Migration;
use weft_machine::{
    CheckpointProgress, Configuration, Handle, MachineRequest, NewCheckpoint, PlatformMoveReport,
    Refusal, SavedMachine, Stage, Status, TimeMoveReport, VcpuMoveReport, VcpuStage,
};

use crate::growth::{Changes, Launcher, Wanted};

/// A machine and what is known of it beside its state.
pub struct Controlled {
    pub handle: Handle,
    pub name: String,
    /// Of the process that looks after this one.
    pub parent: u32,
    pub back_end: BackEndView,
    pub console: ConsoleView,
    pub configuration: Configuration,
    pub restarts: u32,
    /// When it was put together.
    pub built: Instant,
    /// See [`Controlled::end_asked`].
    pub end_asked: AtomicBool,
    /// Its guest was started, or goes on where it was saved. A request that came before could
    /// find a machine without its state, or leave it in a stage that its start does not expect.
    pub started: AtomicBool,
    pub changes: Changes,
    pub launcher: Launcher,
    /// The last save for which daemons of other hosts made files, with the nodes that have one.
    pub files: Mutex<Option<(Identity, BTreeMap<usize, String>)>>,
}

impl Controlled {
    fn ask(&self, request: MachineRequest) -> Result<(), Failure> {
        self.handle.request(request).map(drop).map_err(failure)
    }

    fn is_started(&self) -> bool {
        self.started.load(Ordering::SeqCst)
    }

    /// Refuses what a machine can only do once it was started.
    fn check_started(&self, request: &str) -> Result<(), Failure> {
        match self.is_started() {
            true => Ok(()),
            false => Err(Failure::Conflict(format!(
                "cannot {request}: the machine is starting"
            ))),
        }
    }

    /// The machine's end, if it came before the machine was saved, instead of what that led to.
    fn or_end(&self, failure: Failure) -> Failure {
        match self.handle.wait(Duration::ZERO) {
            Some(end) => Failure::Conflict(format!("the machine ended before it was saved: {end}")),
            None => failure,
        }
    }

    /// Pauses the machine, if it runs, and has it write itself to files.
    /// Has daemons of other hosts make files, and lets the nodes there write to them.
    fn make_files(
        &self,
        checkpoint: &mut NewCheckpoint,
        directory: &Path,
    ) -> Result<Vec<Option<String>>, Failure> {
        if !directory.is_absolute() {
            let reason = format!("{} is not absolute", directory.display());
            return Err(Failure::Conflict(reason));
        }
        let members = self.handle.members();
        let others = members.iter().copied().zip(0..).skip(1);
        let made = self.launcher.make_files(directory, others);
        let made = made.map_err(|reason| Failure::Conflict(format!("cannot save: {reason}")))?;
        checkpoint.on_hosts = made.keys().copied().collect();
        let hosts = members.iter().map(|node| made.get(node).cloned());
        let hosts = hosts.collect();
        *lock(&self.files) = Some((checkpoint.identity, made));
        Ok(hosts)
    }

    fn write(&self, checkpoint: NewCheckpoint, leave_paused: bool) -> Result<Saved, Failure> {
        let ran = self.status()?.stage == Stage::Running;
        let begun = Instant::now();
        if ran {
            self.ask(MachineRequest::Pause)?;
        }
        let written = self.handle.write_checkpoint(checkpoint).map_err(failure);
        let resumed = match ran && !(leave_paused && written.is_ok()) {
            true => self.ask(MachineRequest::Resume),
            false => Ok(()),
        };
        let written = *both(written, resumed)?;
        Ok(Saved {
            machine: SavedMachine {
                configuration: self.configuration.clone(),
                updated: written.updated,
                state: written.state,
            },
            back_end: self.back_end.name.clone(),
            pages: written.pages,
            hosts: Vec::new(),
            pause_s: begun.elapsed().as_secs_f64(),
        })
    }

    /// Has daemons keep or remove the files that they made for a save, while no change is under
    /// way.
    fn settle_files(&self, identity: Identity, keep: bool) -> Result<(), Failure> {
        let files = lock(&self.files);
        let made = files.as_ref().filter(|(made_for, _)| *made_for == identity);
        let Some((_, made)) = made else {
            return match keep {
                true => Err(Failure::Conflict(
                    "its files on other hosts are gone".into(),
                )),
                false => Ok(()),
            };
        };
        let settled = self.launcher.keep_files(made.keys().copied(), keep);
        settled.map_err(Failure::Failed)
    }

    /// Whether somebody outside asked for the end: then the guest's own restart is one.
    pub fn end_asked(&self) -> bool {
        self.end_asked.load(Ordering::Relaxed)
    }

    /// The machine's own view of itself.
    pub fn status(&self) -> Result<Status, Failure> {
        self.handle.status().map_err(failure)
    }

    fn uptime_s(&self) -> f64 {
        self.built.elapsed().as_secs_f64()
    }
}

fn failure(refusal: Refusal) -> Failure {
    let sentence = refusal.to_string();
    match refusal {
        Refusal::Stage { .. } | Refusal::Impossible { .. } | Refusal::Gone { .. } => {
            Failure::Conflict(sentence)
        }
        Refusal::Busy { .. } => Failure::Busy(sentence),
        Refusal::TimedOut { .. } => Failure::TimedOut(sentence),
        Refusal::Failed { .. } => Failure::Failed(sentence),
    }
}

/// What was written, if the machine runs again; what failed first, then what else did.
fn both<T>(written: Result<T, Failure>, resumed: Result<(), Failure>) -> Result<T, Failure> {
    match (written, resumed) {
        (Err(first), Err(second)) => Err(Failure::Failed(format!(
            "{first}; then it could not continue: {second}"
        ))),
        (written, resumed) => resumed.and(written),
    }
}

fn state(stage: Stage) -> State {
    match stage {
        Stage::Built => State::Starting,
        Stage::Running => State::Running,
        Stage::Paused => State::Paused,
        Stage::Ended => State::Ended,
    }
}

/// The word that the machine's own description uses.
fn word(stage: VcpuStage) -> &'static str {
    match stage {
        VcpuStage::WaitingForStartUp => "waiting-for-start-up",
        VcpuStage::Running => "running",
        VcpuStage::Halted => "halted",
        VcpuStage::Paused => "paused",
        VcpuStage::Finished => "finished",
    }
}

impl Control for Controlled {
    fn view(&self) -> Result<VmView, Failure> {
        let status = self.status()?;
        Ok(VmView {
            name: self.name.clone(),
            pid: self.parent,
            machine_pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            state: match status.stage {
                // Restored, and not resumed yet.
                Stage::Paused if !self.is_started() => State::Starting,
                stage => state(stage),
            },
            end: status.end.map(|end| end.to_string()),
            back_end: self.back_end.clone(),
            uptime_s: self.uptime_s(),
            guest_time_s: status.guest_time_ns as f64 / 1e9,
            restarts: self.restarts,
            vcpus: (0..)
                .zip(&status.locations)
                .map(|(vcpu, _)| {
                    // After the end nobody tells of those that were elsewhere.
                    let stage = status.vcpus.get(&vcpu).copied();
                    word(stage.unwrap_or(VcpuStage::Finished)).to_owned()
                })
                .collect(),
            locations: status
                .locations
                .iter()
                .map(|location| LocationView {
                    node: location.slice,
                    epoch: location.epoch,
                })
                .collect(),
            console: self.console.clone(),
            configuration: self.configuration.clone(),
        })
    }

    fn counters(&self) -> Result<Counters, Failure> {
        Ok(Counters {
            uptime_s: self.uptime_s(),
            counters: self.handle.counters().map_err(failure)?,
        })
    }

    fn pages(&self) -> Result<Pages, Failure> {
        Ok(Pages {
            uptime_s: self.uptime_s(),
            slices: self.handle.pages().map_err(failure)?,
        })
    }

    fn faults(&self, from: Vec<Option<u64>>) -> Result<Faults, Failure> {
        Ok(Faults {
            uptime_s: self.uptime_s(),
            slices: self.handle.faults(from).map_err(failure)?,
        })
    }

    fn pause(&self) -> Result<(), Failure> {
        self.check_started("pause")?;
        self.ask(MachineRequest::Pause)
    }

    fn resume(&self) -> Result<(), Failure> {
        self.check_started("resume")?;
        self.ask(MachineRequest::Resume)
    }

    fn move_time(&self, node: usize) -> Result<TimeMoveReport, Failure> {
        self.handle.move_time(node).map_err(failure)
    }

    fn move_platform(&self, node: usize) -> Result<PlatformMoveReport, Failure> {
        self.handle.move_platform(node).map_err(failure)
    }

    fn move_vcpu(&self, vcpu: u32, node: usize) -> Result<VcpuMoveReport, Failure> {
        self.check_started("move a vCPU")?;
        self.handle.move_vcpu(vcpu, node).map_err(failure)
    }

    fn set_balloon(&self, bytes: u64) -> Result<BalloonView, Failure> {
        let memory_bytes = self.configuration.memory_bytes;
        let Some(balloon) = self.handle.balloon() else {
            return Err(Failure::Conflict(
                "the machine has no balloon: it was started with --balloon off, or is \
                 deterministic"
                    .into(),
            ));
        };
        if bytes > memory_bytes {
            return Err(Failure::Conflict(format!(
                "a balloon of {bytes} bytes: the machine has {memory_bytes}"
            )));
        }
        balloon.set_target(bytes);
        Ok(BalloonView {
            target_bytes: balloon.target(),
            actual_bytes: balloon.actual(),
        })
    }

    fn grow(&self, node: NewNode) -> Result<ChangeView, Failure> {
        self.changes.begin(Wanted::Grow(node))
    }

    fn release(&self, node: usize) -> Result<ChangeView, Failure> {
        self.changes.begin(Wanted::Release(node))
    }

    fn migrate(&self, migration: Migration) -> Result<ChangeView, Failure> {
        self.changes.begin(Wanted::Migrate(migration))
    }

    fn change(&self) -> Result<ChangeView, Failure> {
        self.changes.view()
    }

    fn cancel(&self) -> Result<ChangeView, Failure> {
        self.changes.cancel()
    }

    fn save(&self, files: Vec<File>, body: &SaveBody) -> Result<Saved, Failure> {
        self.check_started("save")?;
        self.changes.give_way();
        let mut checkpoint = NewCheckpoint {
            identity: body.identity,
            base: body.base,
            files,
            on_hosts: BTreeSet::new(),
            is_live: body.live,
        };
        // What daemons are asked does not go with a change, either.
        let is_alone = body.live || body.each_host.is_some();
        match is_alone {
            true => self.changes.begin_save(body.identity)?,
            false => self.changes.check_not_saving()?,
        }
        let directory = body.each_host.as_deref();
        let made = directory.map(|directory| self.make_files(&mut checkpoint, directory));
        let saved = made.transpose().and_then(|hosts| {
            let saved = self.write(checkpoint, body.leave_paused)?;
            let hosts = hosts.unwrap_or_default();
            Ok(Saved { hosts, ..saved })
        });
        match &saved {
            Err(_) => self.end_save(body.identity),
            Ok(saved) if saved.pages.is_empty() => {}
            Ok(_) => drop(self.changes.end_save(body.identity)),
        }
        saved.map_err(|failure| self.or_end(failure))
    }

    fn save_files(&self, body: &SaveFilesBody) -> Result<(), Failure> {
        self.changes.begin_save(body.identity)?;
        let done = self.settle_files(body.identity, body.keep);
        self.changes.end_save(body.identity);
        done
    }

    fn unread_pages(&self) -> Result<u64, Failure> {
        let counters = self.handle.counters().map_err(failure)?;
        let absent = counters
            .iter()
            .filter(|(name, _)| name.ends_with(".memory.absent-pages"));
        Ok(absent.map(|(_, pages)| pages).sum())
    }

    fn save_progress(&self, identity: Identity) -> Result<Option<Vec<Written>>, Failure> {
        if !self.changes.is_saving(identity) {
            return Err(Failure::Conflict("the save was given up".into()));
        }
        let failure = match self.handle.save_progress() {
            Ok(CheckpointProgress::Left(_)) => return Ok(None),
            Ok(CheckpointProgress::Written(pages)) => {
                self.changes.end_save(identity);
                return Ok(Some(pages));
            }
            Err(reason) => Failure::Failed(format!("cannot save: {reason}")),
        };
        self.end_save(identity);
        Err(self.or_end(failure))
    }

    fn end_save(&self, identity: Identity) {
        if self.changes.is_saving(identity) {
            self.handle.end_save();
            // A daemon that does not answer removes them when it finds the machine gone.
            let _ = self.settle_files(identity, false);
            self.changes.end_save(identity);
        }
    }

    fn power_button(&self) -> Result<bool, Failure> {
        self.end_asked.store(true, Ordering::Relaxed);
        self.ask(MachineRequest::PressPowerButton).map(|()| true)
    }

    fn stop(&self) -> Result<(), Failure> {
        self.end_asked.store(true, Ordering::Relaxed);
        self.ask(MachineRequest::Stop)
    }
}

/// Typed bytes go to the port that the guest wrote to last.
pub struct Typed {
    pub handle: Handle,
    pub output: Output,
}

impl Keys for Typed {
    fn type_in(&self, bytes: &[u8]) -> usize {
        match self.output.latest() {
            Port::Virtio => self.handle.console_input(bytes),
            Port::Serial => self.handle.serial_input(bytes),
        }
    }

    fn resize(&self, size: Size) {
        self.handle.console_resize(size.columns, size.rows);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_save_that_fails_says_why_even_if_the_machine_cannot_resume() {
        let full = || Err::<u32, _>(Failure::Failed("the disk is full".into()));
        let stuck = || Err(Failure::TimedOut("no reply".into()));
        let said = |outcome: Result<u32, Failure>| outcome.map_err(|failure| failure.to_string());
        assert_eq!(said(both(Ok(7), Ok(()))), Ok(7));
        assert_eq!(said(both(full(), Ok(()))), Err("the disk is full".into()));
        assert_eq!(said(both(Ok(7), stuck())), Err("no reply".into()));
        let whole = said(both(full(), stuck())).unwrap_err();
        assert!(
            whole.contains("the disk is full") && whole.contains("no reply"),
            "{whole}"
        );
    }
}
