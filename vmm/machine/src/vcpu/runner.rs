//! The thread that runs one vCPU.
//!
//! ```text
//!                 start-up IPI              HLT
//!  WaitingForStartUp ────────▶ Running ◀────────▶ Halted
//!          ▲                      │   interrupt     │
//!          └──────── INIT ────────┴─────────────────┘
//!
//!  Pause and Run lead from each of these to Paused and back; Finish ends all.
//! ```
//!
//! Invariants: the vCPU and its local APIC are touched by this thread alone;
//! every order is answered exactly once; a paused vCPU executes nothing; every
//! wait ends with a ring or a deadline.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use weft_confine::{ThreadKind, join_until};
use weft_platform::clock::host_tsc;
use weft_platform::interrupts::{LocalApic, LocalApicState, PostedInterrupts};
use weft_vcpu::{CpuState, Exit};

use super::environment::{CpuEnvironment, VcpuContext, VcpuCounters, count};
use super::turns::{QUANTUM, Standing, Turns};
use weft_vcpu::{BackEndCounters, Vcpu, VcpuError};

/// Longest sleep of a halted vCPU before it looks around, whatever its timer says.
const SLEEP_MAX: Duration = Duration::from_secs(10);
/// Orders that may wait for a vCPU: its owner gives one and waits for the answer.
const ORDERS_MAX: usize = 4;

/// What a vCPU's thread is told.
#[derive(Debug)]
pub enum Order {
    /// Execute guest code.
    Run,
    /// Stand.
    Pause,
    /// Say all that the vCPU is. It stands.
    Save,
    /// Be what the state says. It stands.
    Restore(Box<VcpuState>),
    /// End.
    Finish,
}

/// What it answers.
#[derive(Debug)]
pub enum Reply {
    Done,
    Saved(Box<VcpuState>),
    /// It could not.
    Failed(VcpuError),
}

/// What makes a vCPU's thread call its owner by itself.
#[derive(Debug)]
pub enum Event {
    /// The machine must reset.
    TripleFault,
    /// INIT came to the CPU that starts the others: on hardware it runs the
    /// firmware again.
    Init,
    /// The vCPU cannot go on.
    Failed(VcpuError),
}

/// Hears of events. Must not wait.
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
    /// Stands, by order.
    Paused = 3,
    /// Its thread is over.
    Finished = 4,
}

impl Activity {
    fn from_byte(byte: u8) -> Self {
        match byte {
            0 => Self::WaitingForStartUp,
            1 => Self::Running,
            2 => Self::Halted,
            3 => Self::Paused,
            _ => Self::Finished,
        }
    }
}

/// All that a vCPU is, with what belongs to it alone.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VcpuState {
    /// Registers.
    pub cpu: CpuState,
    /// Local APIC.
    pub apic: LocalApicState,
    /// What it wrote to the paravirtual clock's register.
    pub system_time: u64,
    /// What the machine's wall clock register shows: the same for each vCPU.
    pub wall_clock: u64,
    /// INIT came and no start-up since.
    pub waits_for_start_up: bool,
}

/// What a thread is made of.
pub struct RunnerOptions {
    /// Number and local APIC identifier.
    pub id: u32,
    /// The CPU.
    pub vcpu: Box<dyn Vcpu>,
    /// What it is at first; the others wait for a start-up IPI.
    pub bootstrap: Option<CpuState>,
    /// The machine.
    pub around: VcpuContext,
    /// Whose turn it is, where instructions are the clock.
    pub turns: Option<Arc<Turns>>,
    /// Hears of events.
    pub listener: Listener,
    /// How the thread is confined.
    pub kind: ThreadKind,
    /// Set when the first of a machine's vCPUs begins to execute instructions.
    pub first_instruction: Arc<OnceLock<Instant>>,
}

/// A vCPU's thread, as its owner sees it.
pub struct Runner {
    id: u32,
    posted: Arc<PostedInterrupts>,
    orders: SyncSender<Order>,
    ordered: Arc<AtomicBool>,
    replies: Receiver<Reply>,
    activity: Arc<AtomicU8>,
    counters: Arc<VcpuCounters>,
    tally: Option<Arc<dyn BackEndCounters>>,
    thread: Option<JoinHandle<()>>,
}

/// The thread did not answer, or not what was asked for.
#[derive(Debug, thiserror::Error)]
pub enum RunnerError {
    /// In time.
    #[error("vCPU {0} does not answer")]
    Silent(u32),
    /// Its back end failed.
    #[error("vCPU {id}")]
    Failed {
        id: u32,
        /// Why.
        source: VcpuError,
    },
    /// No thread for it.
    #[error("no thread for vCPU {id}")]
    Thread {
        id: u32,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// The machine has no such vCPU.
    #[error("no interrupt controller for vCPU {0}")]
    Unknown(u32),
}

impl Runner {
    /// Starts the thread `weft-vcpuN`; the vCPU stands.
    pub fn start(options: RunnerOptions) -> Result<Self, RunnerError> {
        let id = options.id;
        let posted = options
            .around
            .interrupts
            .posted(id)
            .ok_or(RunnerError::Unknown(id))?
            .clone();
        let (orders, incoming) = sync_channel(ORDERS_MAX);
        let (outgoing, replies) = sync_channel(ORDERS_MAX);
        let ordered = Arc::new(AtomicBool::new(false));
        let activity = Arc::new(AtomicU8::new(Activity::Paused as u8));
        let counters = Arc::new(VcpuCounters::default());
        let kick = options.vcpu.kicker();
        let tally = options.vcpu.tally();
        posted.waker.connect(kick.clone());
        let mut apic = LocalApic::new(
            id as u8,
            options.bootstrap.is_some(),
            posted.clone(),
            options.around.clock.base(),
        );
        if options.vcpu.has_x2apic() {
            apic.offer_x2apic();
        }
        let environment = CpuEnvironment::new(id, options.around, apic, counters.clone(), kick);
        let work = Thread {
            vcpu: options.vcpu,
            waits_for_start_up: options.bootstrap.is_none(),
            bootstrap: options.bootstrap.is_some(),
            initial: options.bootstrap,
            environment,
            posted: posted.clone(),
            turns: options.turns,
            turn: None,
            listener: options.listener,
            orders: incoming,
            ordered: ordered.clone(),
            replies: outgoing,
            activity: activity.clone(),
            paused: true,
            tsc_offset: 0,
            first_instruction: options.first_instruction,
        };
        let name = format!("weft-vcpu{id}");
        let thread = weft_confine::spawn(&name, options.kind, move || work.run())
            .map_err(|source| RunnerError::Thread { id, source })?;
        Ok(Self {
            id,
            posted,
            orders,
            ordered,
            replies,
            activity,
            counters,
            tally,
            thread: Some(thread),
        })
    }

    /// Number of the vCPU.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Gives an order, without waiting for its answer.
    pub fn order(&self, order: Order) -> Result<(), RunnerError> {
        self.orders
            .try_send(order)
            .map_err(|_| RunnerError::Silent(self.id))?;
        self.ordered.store(true, Ordering::SeqCst);
        self.posted.waker.ring();
        Ok(())
    }

    /// Waits for the answer until `deadline`.
    pub fn reply(&self, deadline: Instant) -> Result<Option<Box<VcpuState>>, RunnerError> {
        let patience = deadline.saturating_duration_since(Instant::now());
        match self.replies.recv_timeout(patience) {
            Ok(Reply::Done) => Ok(None),
            Ok(Reply::Saved(state)) => Ok(Some(state)),
            Ok(Reply::Failed(source)) => Err(RunnerError::Failed {
                id: self.id,
                source,
            }),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                Err(RunnerError::Silent(self.id))
            }
        }
    }

    /// What the vCPU does at the moment.
    pub fn activity(&self) -> Activity {
        Activity::from_byte(self.activity.load(Ordering::Relaxed))
    }

    /// How often it did what.
    pub fn counters(&self) -> Vec<(&'static str, u64)> {
        let mut counters = self.counters.list();
        let (kicked, woken) = self.posted.waker.counts();
        counters.extend([("rings-running", kicked), ("rings-waiting", woken)]);
        counters.extend(self.tally.iter().flat_map(|tally| tally.list()));
        counters
    }

    /// Ends the thread, until `deadline`; whether it ended.
    pub fn finish(&mut self, deadline: Instant) -> bool {
        // A thread that has ended already cannot take it, which is as good.
        let _ = self.order(Order::Finish);
        self.thread
            .take()
            .is_none_or(|thread| join_until(thread, deadline))
    }
}

/// What the thread holds.
struct Thread {
    vcpu: Box<dyn Vcpu>,
    initial: Option<CpuState>,
    bootstrap: bool,
    environment: CpuEnvironment,
    posted: Arc<PostedInterrupts>,
    turns: Option<Arc<Turns>>,
    /// Where instructions are the clock: the turn that this vCPU holds.
    turn: Option<Turn>,
    listener: Listener,
    orders: Receiver<Order>,
    /// Something was put into `orders` since the thread looked.
    ordered: Arc<AtomicBool>,
    replies: SyncSender<Reply>,
    activity: Arc<AtomicU8>,
    waits_for_start_up: bool,
    paused: bool,
    /// The vCPU's TSC minus the host's, as set last.
    tsc_offset: u64,
    first_instruction: Arc<OnceLock<Instant>>,
}

/// A turn that was begun.
#[derive(Clone, Copy)]
struct Turn {
    /// The vCPU's count of instructions when it began, had it executed all of
    /// what was used of it.
    began: u64,
}

impl Thread {
    fn run(mut self) {
        if let Some(state) = self.initial.take()
            && let Err(error) = self.vcpu.restore(&state)
        {
            self.fail(error);
        }
        while let Some(order) = self.next_order() {
            let Some(order) = order else {
                self.step();
                continue;
            };
            let reply = self.obey(order);
            let over = reply.is_none();
            // An owner that is gone needs no answer.
            let _ = self.replies.try_send(reply.unwrap_or(Reply::Done));
            if over {
                break;
            }
        }
        self.environment.set_alarm(false);
        self.show(Activity::Finished);
    }

    /// `None` when nobody is left to give orders; `Some(None)` when there is no
    /// order and the vCPU shall run.
    fn next_order(&mut self) -> Option<Option<Order>> {
        if self.paused {
            return self.orders.recv().ok().map(Some);
        }
        if !self.ordered.swap(false, Ordering::SeqCst) {
            return Some(None);
        }
        match self.orders.try_recv() {
            Ok(order) => {
                // There may be another behind it.
                self.ordered.store(true, Ordering::SeqCst);
                Some(Some(order))
            }
            Err(TryRecvError::Empty) => Some(None),
            Err(TryRecvError::Disconnected) => None,
        }
    }

    /// The answer; `None` to `Finish`.
    fn obey(&mut self, order: Order) -> Option<Reply> {
        let outcome = match order {
            Order::Finish => return None,
            Order::Run => self.go(),
            Order::Pause => {
                self.stand();
                Ok(Reply::Done)
            }
            Order::Save => self.save().map(|state| Reply::Saved(Box::new(state))),
            Order::Restore(state) => self.restore(*state).map(|()| Reply::Done),
        };
        Some(outcome.unwrap_or_else(Reply::Failed))
    }

    fn go(&mut self) -> Result<Reply, VcpuError> {
        if self.turns.is_none() {
            self.tsc_offset = self.environment.around.clock.offset();
            self.vcpu.set_tsc_offset(self.tsc_offset)?;
        }
        self.paused = false;
        if self.bootstrap {
            self.first_instruction.get_or_init(Instant::now);
        }
        Ok(Reply::Done)
    }

    fn stand(&mut self) {
        self.paused = true;
        self.environment.set_alarm(false);
        if let (Some(turns), Some(turn)) = (&self.turns, self.turn.take()) {
            let used = self.vcpu.instructions().wrapping_sub(turn.began);
            turns.interrupt(self.environment.id, used);
        }
        self.show(Activity::Paused);
    }

    fn save(&mut self) -> Result<VcpuState, VcpuError> {
        Ok(VcpuState {
            cpu: self.vcpu.save()?,
            apic: self.environment.apic.save(),
            system_time: self
                .environment
                .around
                .kvmclock
                .system_time(self.environment.id),
            wall_clock: self.environment.around.kvmclock.wall_clock(),
            waits_for_start_up: self.waits_for_start_up,
        })
    }

    fn restore(&mut self, state: VcpuState) -> Result<(), VcpuError> {
        self.vcpu.restore(&state.cpu)?;
        self.environment.apic.restore(state.apic);
        self.waits_for_start_up = state.waits_for_start_up;
        // Where it names no memory, the guest has no clock there either way.
        let kvmclock = &self.environment.around.kvmclock;
        kvmclock.set_system_time(self.environment.id, state.system_time);
        kvmclock.set_wall_clock(state.wall_clock);
        self.turn = None;
        Ok(())
    }

    /// Runs the guest, or waits for a reason to, once.
    fn step(&mut self) {
        if self.environment.around.ending.load(Ordering::Relaxed) {
            self.stand();
            return;
        }
        if self.turns.is_some() && !self.take_turn() {
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
        self.show(Activity::Running);
        match self.execute() {
            Ok(Exit::Kicked) => {
                count(&self.environment.counters.kicks);
            }
            Ok(Exit::Deadline) => {
                count(&self.environment.counters.deadlines);
                self.pass_turn(Standing::Ready);
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
            let now = self.environment.around.clock.now();
            let mut left = QUANTUM.saturating_sub(used);
            if let Some(deadline) = self.environment.apic.deadline() {
                left = left.min(deadline.saturating_sub(now));
            }
            if left == 0 {
                return Ok(Exit::Deadline);
            }
            self.vcpu.set_budget(Some(left))?;
        }
        self.take_time_over()?;
        let exit = self.vcpu.run(&mut self.environment)?;
        if let Some(turn) = self.turn {
            let executed = self.vcpu.instructions();
            let counter = &self.environment.counters.instructions;
            counter.store(executed, Ordering::Relaxed);
            self.tell_time(turn);
        }
        Ok(exit)
    }

    /// Takes over an offset that was corrected since. One that is smaller waits until
    /// the guest's TSC shows what it had shown already: corrections are of some
    /// microseconds.
    fn take_time_over(&mut self) -> Result<(), VcpuError> {
        let offset = self.environment.around.clock.offset();
        if offset == self.tsc_offset || self.turns.is_some() {
            return Ok(());
        }
        let shown = host_tsc().wrapping_add(self.tsc_offset);
        while (host_tsc().wrapping_add(offset).wrapping_sub(shown) as i64) < 0 {
            std::hint::spin_loop();
        }
        self.vcpu.set_tsc_offset(offset)?;
        self.tsc_offset = offset;
        Ok(())
    }

    /// After HLT: waits, unless something came meanwhile.
    fn halt(&mut self) {
        self.environment.advance_timer();
        if !self.environment.apic.wakes() {
            self.wait(Activity::Halted);
        }
    }

    /// Sleeps until there is mail, an order, or the timer is due. Gives the turn
    /// away instead where there are turns.
    fn wait(&mut self, activity: Activity) {
        self.show(activity);
        let deadline = self.environment.apic.deadline();
        if self.turns.is_some() {
            self.pass_turn(Standing::Asleep(deadline));
        } else {
            self.environment.set_alarm(false);
            self.sleep(deadline);
        }
    }

    fn sleep(&mut self, deadline: Option<u64>) {
        let latest = Instant::now() + SLEEP_MAX;
        let until = deadline.map_or(latest, |tsc| {
            self.environment.around.clock.when(tsc).min(latest)
        });
        let id = self.environment.id;
        self.posted.waker.wait(until, || {
            self.ordered.load(Ordering::SeqCst)
                || match &self.turns {
                    Some(turns) => turns.may_claim(id),
                    None => self.posted.has_pending(),
                }
        });
    }

    /// INIT: waits for a start-up from now on. Whether there is more to do.
    fn init(&mut self) -> bool {
        if self.bootstrap {
            self.report(Event::Init);
            return false;
        }
        self.environment.apic.reset();
        self.waits_for_start_up = true;
        true
    }

    /// Starts in real mode at page `vector`. What INIT does not change stays
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

    /// Holds the turn now, if it is this vCPU's.
    fn take_turn(&mut self) -> bool {
        let Some(turns) = &self.turns else {
            return true;
        };
        if self.turn.is_none() {
            let Some((now, used)) = turns.claim(self.environment.id) else {
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
                .around
                .clock
                .set_counted(now.wrapping_add(used));
        }
        true
    }

    fn pass_turn(&mut self, standing: Standing) {
        let Some(turns) = &self.turns else { return };
        let Some(turn) = self.turn else { return };
        let used = self.vcpu.instructions().wrapping_sub(turn.began);
        let early = standing == Standing::Ready && used < QUANTUM;
        if early {
            // Its timer was due: the turn goes on.
            return;
        }
        self.turn = None;
        turns.pass(self.environment.id, used, standing);
    }

    /// Guest time after what was executed of the turn.
    fn tell_time(&self, turn: Turn) {
        let Some((began_at, _)) = self
            .turns
            .as_ref()
            .and_then(|turns| turns.claim(self.environment.id))
        else {
            return;
        };
        let used = self.vcpu.instructions().wrapping_sub(turn.began);
        let clock = &self.environment.around.clock;
        clock.set_counted(began_at.wrapping_add(used));
    }

    fn fail(&mut self, error: VcpuError) {
        self.report(Event::Failed(error));
    }

    /// Tells the owner, and stands: it decides.
    fn report(&mut self, event: Event) {
        self.stand();
        (self.listener)(self.environment.id, event);
    }

    fn show(&self, activity: Activity) {
        self.activity.store(activity as u8, Ordering::Relaxed);
    }
}

#[cfg(test)]
#[path = "runner_tests.rs"]
mod tests;
