//! The thread that runs one vCPU.
//!
//! ```text
//!                 start-up IPI              HLT
//!  WaitingForStartUp ────────▶ Running ◀────────▶ Halted
//!          ▲                      │   interrupt     │
//!          └──────── INIT ────────┴─────────────────┘
//!
//!  Pause and Run lead from each of these to Paused and back; Finish ends the thread.
//!  Leave leads to Away, where the vCPU is on another slice, and Arrive back to what it was
//!  there (docs/mobility.md).
//! ```
//!
//! Invariants: the vCPU and its local APIC are touched by this thread alone;
//! every command is answered exactly once; a vCPU that is paused or away executes nothing;
//! every wait ends with a ring or a deadline.

mod moves;

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use weft_confine::{ThreadKind, join_until};
use weft_platform::clock::host_tsc;
use weft_platform::interrupts::{LocalApic, PostedInterrupts};
use weft_platform::part::Version;
use weft_vcpu::{CpuState, Exit};

use super::environment::{CpuEnvironment, VcpuContext, VcpuCounters, count};
use super::scheduler::{QUANTUM, RunState, TurnScheduler};
pub use super::state::VcpuState;
use super::travel::{Arrival, Departure, DepartureReport};
use weft_vcpu::{BackEndCounters, Vcpu, VcpuError};

/// Longest sleep of a halted vCPU before it checks again, even without a timer.
const SLEEP_MAX: Duration = Duration::from_secs(10);
/// Commands that may wait for a vCPU: its owner sends one and waits for the reply.
const COMMANDS_MAX: usize = 4;

/// What the machine's owner tells a vCPU's thread.
#[derive(Debug)]
pub enum VcpuCommand {
    /// Execute guest code.
    Run,
    /// Execute no guest code.
    Pause,
    /// Reply with the state of the vCPU, which is paused.
    Save,
    /// Replace the state of the vCPU, which is paused.
    Restore(Box<VcpuState>),
    /// Go to another slice, and report it. Has no reply.
    Leave(Departure),
    /// Come from another slice, and report it. Has no reply.
    Arrive(Box<Arrival>),
    /// End the thread; without a reply.
    Finish,
}

/// The reply to a [`VcpuCommand`].
#[derive(Debug)]
pub enum VcpuReply {
    Done,
    Saved(Box<VcpuState>),
    Failed(VcpuError),
}

/// What a vCPU's thread reports without being asked.
#[derive(Debug)]
pub enum Event {
    /// The machine must reset.
    TripleFault,
    /// The first vCPU received an INIT: on hardware it would run the firmware again.
    Init,
    /// The vCPU cannot continue.
    Failed(VcpuError),
}

/// Called with the vCPU's number and the event. Must not block.
pub type Listener = Arc<dyn Fn(u32, Event) + Send + Sync>;

/// What a vCPU does at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Activity {
    /// Not started by another CPU yet.
    WaitingForStartUp = 0,
    /// Executes instructions.
    Running = 1,
    /// Waits for an interrupt after HLT.
    Halted = 2,
    /// Executes nothing until the next [`VcpuCommand::Run`].
    Paused = 3,
    /// The thread has ended.
    Finished = 4,
    /// The vCPU is on another slice.
    Away = 5,
}

impl Activity {
    fn from_byte(byte: u8) -> Self {
        match byte {
            0 => Self::WaitingForStartUp,
            1 => Self::Running,
            2 => Self::Halted,
            3 => Self::Paused,
            5 => Self::Away,
            _ => Self::Finished,
        }
    }
}

/// What a vCPU's thread is started with.
pub struct RunnerOptions {
    /// Number and local APIC identifier.
    pub id: u32,
    pub vcpu: Box<dyn Vcpu>,
    /// The first vCPU, which does not wait for a start-up IPI.
    pub bootstrap: bool,
    /// Its state, if not that after power-on.
    pub initial: Option<CpuState>,
    /// The vCPU is on another slice.
    pub away: bool,
    pub context: VcpuContext,
    /// If instructions are the clock: decides which vCPU runs.
    pub scheduler: Option<Arc<TurnScheduler>>,
    /// Called with events of the vCPU.
    pub listener: Listener,
    /// Selects the thread's seccomp filter.
    pub kind: ThreadKind,
    /// Set when the first of a machine's vCPUs begins to execute instructions.
    pub first_instruction: Arc<OnceLock<Instant>>,
}

/// Sends commands to a vCPU's thread.
#[derive(Clone)]
pub struct CommandPort {
    id: u32,
    posted: Arc<PostedInterrupts>,
    commands: SyncSender<VcpuCommand>,
    command_waits: Arc<AtomicBool>,
}

impl CommandPort {
    /// Sends a command without waiting for its reply.
    pub fn command(&self, command: VcpuCommand) -> Result<(), RunnerError> {
        self.commands
            .try_send(command)
            .map_err(|_| RunnerError::Silent(self.id))?;
        self.command_waits.store(true, Ordering::SeqCst);
        self.posted.waker.ring();
        Ok(())
    }
}

/// The owner's side of a vCPU's thread.
pub struct Runner {
    id: u32,
    port: CommandPort,
    /// The vCPU is or was on this slice.
    visited: Arc<AtomicBool>,
    replies: Receiver<VcpuReply>,
    activity: Arc<AtomicU8>,
    counters: Arc<VcpuCounters>,
    back_end_counters: Option<Arc<dyn BackEndCounters>>,
    thread: Option<JoinHandle<()>>,
}

/// Why a vCPU's thread could not be started, or did not carry out a command.
#[derive(Debug, thiserror::Error)]
pub enum RunnerError {
    /// No reply came in time.
    #[error("vCPU {0} does not answer")]
    Silent(u32),
    /// Its back end failed.
    #[error("vCPU {id}")]
    Failed { id: u32, source: VcpuError },
    /// The kernel refused a thread.
    #[error("no thread for vCPU {id}")]
    Thread { id: u32, source: std::io::Error },
    /// The machine has no such vCPU.
    #[error("no interrupt controller for vCPU {0}")]
    Unknown(u32),
}

impl Runner {
    /// Starts the thread `weft-vcpuN`; the vCPU is paused.
    pub fn start(options: RunnerOptions) -> Result<Self, RunnerError> {
        let id = options.id;
        let posted = options
            .context
            .interrupts
            .posted(id)
            .ok_or(RunnerError::Unknown(id))?
            .clone();
        let (commands, incoming) = sync_channel(COMMANDS_MAX);
        let (outgoing, replies) = sync_channel(COMMANDS_MAX);
        let command_waits = Arc::new(AtomicBool::new(false));
        let activity = match options.away {
            true => Activity::Away,
            false => Activity::Paused,
        };
        let activity = Arc::new(AtomicU8::new(activity as u8));
        let visited = Arc::new(AtomicBool::new(!options.away));
        let counters = Arc::new(VcpuCounters::default());
        let kick = options.vcpu.kicker();
        let back_end_counters = options.vcpu.back_end_counters();
        posted.waker.connect(kick.clone());
        let mut apic = LocalApic::new(
            id as u8,
            options.bootstrap,
            posted.clone(),
            options.context.clock.base(),
        );
        if options.vcpu.has_x2apic() {
            apic.offer_x2apic();
        }
        let environment = CpuEnvironment::new(id, options.context, apic, counters.clone(), kick);
        let work = Thread {
            vcpu: options.vcpu,
            waits_for_start_up: !options.bootstrap,
            bootstrap: options.bootstrap,
            initial: options.initial,
            environment,
            posted: posted.clone(),
            scheduler: options.scheduler,
            turn: None,
            listener: options.listener,
            commands: incoming,
            command_waits: command_waits.clone(),
            replies: outgoing,
            activity: activity.clone(),
            paused: true,
            away: options.away,
            departed: None,
            visited: visited.clone(),
            tsc_offset: 0,
            first_instruction: options.first_instruction,
        };
        let name = format!("weft-vcpu{id}");
        let thread = weft_confine::spawn(&name, options.kind, move || work.run())
            .map_err(|source| RunnerError::Thread { id, source })?;
        Ok(Self {
            id,
            port: CommandPort {
                id,
                posted,
                commands,
                command_waits,
            },
            visited,
            replies,
            activity,
            counters,
            back_end_counters,
            thread: Some(thread),
        })
    }

    /// Number of the vCPU.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Sends a command without waiting for its reply.
    pub fn command(&self, command: VcpuCommand) -> Result<(), RunnerError> {
        self.port.command(command)
    }

    /// The same for other threads.
    pub fn port(&self) -> &CommandPort {
        &self.port
    }

    /// Whether the vCPU is or was on this slice: otherwise its counters are zero.
    pub fn was_here(&self) -> bool {
        self.visited.load(Ordering::Relaxed)
    }

    /// Waits for the reply until `deadline`.
    pub fn reply(&self, deadline: Instant) -> Result<Option<Box<VcpuState>>, RunnerError> {
        let patience = deadline.saturating_duration_since(Instant::now());
        match self.replies.recv_timeout(patience) {
            Ok(VcpuReply::Done) => Ok(None),
            Ok(VcpuReply::Saved(state)) => Ok(Some(state)),
            Ok(VcpuReply::Failed(source)) => Err(RunnerError::Failed {
                id: self.id,
                source,
            }),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                Err(RunnerError::Silent(self.id))
            }
        }
    }

    /// Whether it executes instructions now.
    pub fn is_running(&self) -> bool {
        self.activity() == Activity::Running
    }

    /// The vCPU's activity at the moment.
    pub fn activity(&self) -> Activity {
        Activity::from_byte(self.activity.load(Ordering::Relaxed))
    }

    /// All counters of the vCPU, its waker and its back end.
    pub fn counters(&self) -> Vec<(&'static str, u64)> {
        let mut counters = self.counters.list();
        let (kicked, woken) = self.port.posted.waker.counts();
        counters.extend([("rings-running", kicked), ("rings-waiting", woken)]);
        counters.extend(
            self.back_end_counters
                .iter()
                .flat_map(|back_end_counters| back_end_counters.list()),
        );
        counters
    }

    /// Ends the thread and waits for it until `deadline`; whether it has ended.
    pub fn finish(&mut self, deadline: Instant) -> bool {
        // A thread that has ended already has no receiver.
        let _ = self.command(VcpuCommand::Finish);
        self.thread
            .take()
            .is_none_or(|thread| join_until(thread, deadline))
    }
}

/// The thread's side.
struct Thread {
    vcpu: Box<dyn Vcpu>,
    initial: Option<CpuState>,
    bootstrap: bool,
    environment: CpuEnvironment,
    posted: Arc<PostedInterrupts>,
    scheduler: Option<Arc<TurnScheduler>>,
    /// If instructions are the clock: the turn that this vCPU holds.
    turn: Option<Turn>,
    listener: Listener,
    commands: Receiver<VcpuCommand>,
    /// A command was sent since the thread last checked.
    command_waits: Arc<AtomicBool>,
    replies: SyncSender<VcpuReply>,
    activity: Arc<AtomicU8>,
    waits_for_start_up: bool,
    paused: bool,
    /// The vCPU is on another slice. Independent of `paused`, which is the same on all slices.
    away: bool,
    /// The vCPU left, and its pages do not follow it yet.
    departed: Option<Box<dyn DepartureReport>>,
    visited: Arc<AtomicBool>,
    /// The vCPU's TSC minus the host's, as set last.
    tsc_offset: u64,
    first_instruction: Arc<OnceLock<Instant>>,
}

/// A turn of the scheduler that this vCPU holds.
#[derive(Clone, Copy)]
struct Turn {
    /// The vCPU's instruction count at the start of the turn, as if it had executed all
    /// instructions of the turn that are used.
    began: u64,
}

impl Thread {
    fn run(mut self) {
        if let Some(state) = self.initial.take()
            && let Err(error) = self.vcpu.restore(&state)
        {
            self.fail(error);
        }
        while let Some(command) = self.next_command() {
            let Some(command) = command else {
                self.step();
                continue;
            };
            let command = match command {
                VcpuCommand::Leave(departure) => {
                    self.leave(departure);
                    continue;
                }
                VcpuCommand::Arrive(arrival) => {
                    self.arrive(*arrival);
                    continue;
                }
                command => command,
            };
            let reply = self.carry_out(command);
            let over = reply.is_none();
            // The owner may be gone.
            let _ = self.replies.try_send(reply.unwrap_or(VcpuReply::Done));
            if over {
                break;
            }
        }
        self.environment.set_alarm(false);
        self.set_activity(Activity::Finished);
    }

    /// The next command; `Some(None)` if no command waits and the vCPU runs; `None` if the
    /// owner is gone.
    fn next_command(&mut self) -> Option<Option<VcpuCommand>> {
        if self.away {
            return self.next_while_away().map(Some);
        }
        if self.paused {
            return self.commands.recv().ok().map(Some);
        }
        if !self.command_waits.swap(false, Ordering::SeqCst) {
            return Some(None);
        }
        match self.commands.try_recv() {
            Ok(command) => {
                // Another command may follow.
                self.command_waits.store(true, Ordering::SeqCst);
                Some(Some(command))
            }
            Err(TryRecvError::Empty) => Some(None),
            Err(TryRecvError::Disconnected) => None,
        }
    }

    /// Carries out a command; the reply, or `None` for `Finish`.
    fn carry_out(&mut self, command: VcpuCommand) -> Option<VcpuReply> {
        let outcome = match command {
            // The two that move the vCPU have been carried out.
            VcpuCommand::Finish | VcpuCommand::Leave(_) | VcpuCommand::Arrive(_) => return None,
            VcpuCommand::Run => self.run_guest(),
            VcpuCommand::Pause => {
                self.pause();
                Ok(VcpuReply::Done)
            }
            VcpuCommand::Save => self.save().map(|state| VcpuReply::Saved(Box::new(state))),
            VcpuCommand::Restore(state) => self.restore(*state).map(|()| VcpuReply::Done),
        };
        Some(outcome.unwrap_or_else(VcpuReply::Failed))
    }

    fn run_guest(&mut self) -> Result<VcpuReply, VcpuError> {
        if self.scheduler.is_none() && !self.away {
            self.tsc_offset = self.environment.context.clock.offset();
            self.vcpu.set_tsc_offset(self.tsc_offset)?;
        }
        self.paused = false;
        if self.bootstrap && !self.away {
            self.first_instruction.get_or_init(Instant::now);
        }
        Ok(VcpuReply::Done)
    }

    fn pause(&mut self) {
        self.paused = true;
        self.environment.set_alarm(false);
        if let (Some(scheduler), Some(turn)) = (&self.scheduler, self.turn.take()) {
            let used = self.vcpu.instructions().wrapping_sub(turn.began);
            scheduler.interrupt(self.environment.id, used);
        }
        self.set_activity(match self.away {
            true => Activity::Away,
            false => Activity::Paused,
        });
    }

    fn save(&mut self) -> Result<VcpuState, VcpuError> {
        Ok(VcpuState {
            version: Version,
            cpu: self.vcpu.save()?,
            apic: self.environment.apic.save(),
            system_time: self
                .environment
                .context
                .kvmclock
                .system_time(self.environment.id),
            wall_clock: self.environment.context.kvmclock.wall_clock(),
            waits_for_start_up: self.waits_for_start_up,
        })
    }

    fn restore(&mut self, state: VcpuState) -> Result<(), VcpuError> {
        self.vcpu.restore(&state.cpu)?;
        self.environment.apic.restore(state.apic);
        self.waits_for_start_up = state.waits_for_start_up;
        // Where it names no memory, the guest has no clock there either way.
        let kvmclock = &self.environment.context.kvmclock;
        kvmclock.set_system_time(self.environment.id, state.system_time);
        kvmclock.set_wall_clock(state.wall_clock);
        self.turn = None;
        Ok(())
    }

    /// Runs the guest, or waits for a reason to, once.
    fn step(&mut self) {
        if self.environment.context.ending.load(Ordering::Relaxed) {
            self.pause();
            return;
        }
        if self.scheduler.is_some() && !self.take_turn() {
            self.sleep(None);
            return;
        }
        self.environment.advance_timer();
        let (init, start_up) = self.environment.apic.take_start();
        if init && !self.init() {
            return;
        }
        if self.waits_for_start_up {
            match start_up {
                Some(vector) => self.start_up(vector),
                None => self.wait(Activity::WaitingForStartUp),
            }
            return;
        }
        self.environment.set_alarm(true);
        self.set_activity(Activity::Running);
        match self.execute() {
            Ok(Exit::Kicked) => {
                count(&self.environment.counters.kicks);
            }
            Ok(Exit::Deadline) => {
                count(&self.environment.counters.deadlines);
                self.pass_turn(RunState::Ready);
            }
            Ok(Exit::Halted) => {
                count(&self.environment.counters.halts);
                self.halt();
            }
            Ok(Exit::TripleFault) => self.report(Event::TripleFault),
            Err(error) => self.fail(error),
        }
    }

    fn execute(&mut self) -> Result<Exit, VcpuError> {
        if let Some(turn) = self.turn {
            let used = self.vcpu.instructions().wrapping_sub(turn.began);
            let now = self.environment.context.clock.now();
            let mut left = QUANTUM.saturating_sub(used);
            if let Some(deadline) = self.environment.apic.deadline() {
                left = left.min(deadline.saturating_sub(now));
            }
            if left == 0 {
                return Ok(Exit::Deadline);
            }
            self.vcpu.set_budget(Some(left))?;
        }
        self.apply_tsc_offset()?;
        let exit = self.vcpu.run(&mut self.environment)?;
        if let Some(turn) = self.turn {
            let executed = self.vcpu.instructions();
            let counter = &self.environment.counters.instructions;
            counter.store(executed, Ordering::Relaxed);
            self.set_guest_time(turn);
        }
        Ok(exit)
    }

    /// Applies an offset that was corrected since. Before a smaller offset it waits until the
    /// guest's TSC would not go back: corrections are some microseconds.
    fn apply_tsc_offset(&mut self) -> Result<(), VcpuError> {
        let offset = self.environment.context.clock.offset();
        if offset == self.tsc_offset || self.scheduler.is_some() {
            return Ok(());
        }
        let shown = host_tsc().wrapping_add(self.tsc_offset);
        self.tsc_offset = offset;
        self.wait_for_tsc(shown);
        self.vcpu.set_tsc_offset(offset)?;
        Ok(())
    }

    /// After HLT: waits, unless an interrupt came meanwhile.
    fn halt(&mut self) {
        self.environment.advance_timer();
        if !self.environment.apic.wakes() {
            self.wait(Activity::Halted);
        }
    }

    /// Sleeps until an interrupt or a command comes or the timer is due. With a scheduler it
    /// passes the turn instead.
    fn wait(&mut self, activity: Activity) {
        self.set_activity(activity);
        let deadline = self.environment.apic.deadline();
        if self.scheduler.is_some() {
            self.pass_turn(RunState::Asleep(deadline));
        } else {
            self.environment.set_alarm(false);
            self.sleep(deadline);
        }
    }

    fn sleep(&mut self, deadline: Option<u64>) {
        let latest = Instant::now() + SLEEP_MAX;
        let until = deadline.map_or(latest, |tsc| {
            self.environment.context.clock.when(tsc).min(latest)
        });
        let id = self.environment.id;
        self.posted.waker.wait(until, || {
            self.command_waits.load(Ordering::SeqCst)
                || match &self.scheduler {
                    Some(scheduler) => scheduler.may_claim(id),
                    None => self.posted.has_pending(),
                }
        });
    }

    /// Handles an INIT: the vCPU waits for a start-up. `false` if the machine resets instead.
    fn init(&mut self) -> bool {
        if self.bootstrap {
            self.report(Event::Init);
            return false;
        }
        self.environment.apic.reset();
        self.waits_for_start_up = true;
        true
    }

    /// Starts in real mode at page `vector`, with the registers that INIT does not change
    /// (Intel SDM volume 3, table 10-1).
    fn start_up(&mut self, vector: u8) {
        let outcome = self.vcpu.save().and_then(|before| {
            let state = CpuState {
                fpu: before.fpu,
                xcr0: before.xcr0,
                msrs: before.msrs,
                tsc_offset: before.tsc_offset,
                instructions: before.instructions,
                ..CpuState::started_at(vector)
            };
            self.vcpu.restore(&state)
        });
        match outcome {
            Ok(()) => self.waits_for_start_up = false,
            Err(error) => self.fail(error),
        }
    }

    /// Takes the turn if the scheduler gives it; whether this vCPU may run.
    fn take_turn(&mut self) -> bool {
        let Some(scheduler) = &self.scheduler else {
            return true;
        };
        if self.turn.is_none() {
            let Some((now, used)) = scheduler.claim(self.environment.id) else {
                return false;
            };
            let began = self.vcpu.instructions().wrapping_sub(used);
            if let Err(error) = self.vcpu.set_tsc_offset(now.wrapping_sub(began)) {
                self.fail(error);
                return false;
            }
            let turn = Turn { began };
            self.turn = Some(turn);
            self.environment
                .context
                .clock
                .set_counted(now.wrapping_add(used));
        }
        true
    }

    fn pass_turn(&mut self, run_state: RunState) {
        let Some(scheduler) = &self.scheduler else {
            return;
        };
        let Some(turn) = self.turn else { return };
        let used = self.vcpu.instructions().wrapping_sub(turn.began);
        let early = run_state == RunState::Ready && used < QUANTUM;
        if early {
            // The timer was due: the turn continues.
            return;
        }
        self.turn = None;
        scheduler.pass(self.environment.id, used, run_state);
    }

    /// Sets guest time to the instructions of the turn that are executed.
    fn set_guest_time(&self, turn: Turn) {
        let Some((began_at, _)) = self
            .scheduler
            .as_ref()
            .and_then(|scheduler| scheduler.claim(self.environment.id))
        else {
            return;
        };
        let used = self.vcpu.instructions().wrapping_sub(turn.began);
        let clock = &self.environment.context.clock;
        clock.set_counted(began_at.wrapping_add(used));
    }

    fn fail(&mut self, error: VcpuError) {
        self.report(Event::Failed(error));
    }

    /// Reports an event and pauses: the owner decides what follows.
    fn report(&mut self, event: Event) {
        self.pause();
        (self.listener)(self.environment.id, event);
    }

    fn set_activity(&self, activity: Activity) {
        self.activity.store(activity as u8, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;
