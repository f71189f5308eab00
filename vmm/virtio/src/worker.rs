//! A device's thread: `weft-NAME`, which lives as long as the device and runs a
//! [`Handler`] when it has one.
//!
//! ```text
//! Idle ──start──> Given ──> Running ──request_stop──> Stopping ──quiet──> Back ──take──> Idle
//!                                 any ──drop──> Quit ──> Ended
//! ```
//!
//! Threads are started when the machine is built, so that none has to be made
//! once the process has given up its privileges.
//!
//! While a handler runs, another thread that has its [`InlineHandler`] may run it (*inline
//! completion*) as far as it need not wait, which saves a switch to this thread. One
//! thread at a time is in the handler; a thread that finds another there leaves the work
//! to it.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Condvar, Mutex, TryLockError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use weft_confine::{ThreadKind, lock};

use super::error::DeviceError;
use super::ring::Ring;

/// How long a thread may take to end.
const JOIN_MAX: Duration = Duration::from_secs(5);
/// How long one try at getting quiet takes, before commands are looked at again.
const QUIET_STEP: Duration = Duration::from_millis(50);
const WAKE: u64 = u64::MAX;
/// Token of the first watched descriptor; below are rings.
const WATCHED: u64 = 1 << 32;
const EVENTS_MAX: usize = 16;

/// Why a handler is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// It has just been started, or resumed: everything may be waiting.
    Start,
    /// It said [`Progress::More`].
    Again,
    /// The driver kicked the ring at this place in [`Handler::rings`].
    Kick(usize),
    /// Something happened at this place in [`Handler::watched`].
    Ready(usize),
}

/// What a handler did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// All that it could.
    Idle,
    /// A bounded part: call again.
    More,
}

/// What one thread of a device does. Calls are bounded: they neither block nor
/// go on for as long as a guest keeps a ring filled.
pub trait Handler: Send {
    fn rings(&self) -> Vec<&Ring>;
    /// Descriptors whose events (edge-triggered) it wants to hear of.
    fn watched(&self) -> Vec<(RawFd, EventSet)> {
        Vec::new()
    }
    /// Does what can be done.
    fn work(&mut self, cause: Cause) -> Result<Progress, DeviceError>;
    /// Is given, before it runs, the means by which other threads run it inline.
    fn set_inline_handler(&mut self, handler: InlineHandler) {
        let _ = handler;
    }
    /// Handles `cause` on the thread that brings it, as far as it need not wait;
    /// [`Progress::More`]: the handler's own thread must be woken.
    fn work_inline(&mut self, cause: Cause) -> Result<Progress, DeviceError> {
        let _ = cause;
        Ok(Progress::More)
    }
    /// Ends what is in flight; false when `deadline` came first.
    fn quiesce(&mut self, deadline: Instant) -> bool {
        let _ = deadline;
        true
    }
}

enum State {
    Idle,
    Given(Box<dyn Handler>),
    Running,
    Stopping,
    Back(Box<dyn Handler>),
    Quit,
    Ended,
}

/// Runs a handler on another thread than its own.
#[derive(Clone)]
pub struct InlineHandler(Weak<Shared>);

impl InlineHandler {
    /// Has the handler do what needs no waiting; whether its thread need not be woken.
    /// Never waits.
    pub fn work(&self, cause: Cause) -> bool {
        let Some(shared) = self.0.upgrade() else {
            return false;
        };
        let mut running = match shared.running.try_lock() {
            Ok(running) => running,
            Err(TryLockError::Poisoned(poison)) => poison.into_inner(),
            Err(TryLockError::WouldBlock) => return false,
        };
        let Some(handler) = running.as_mut() else {
            return false;
        };
        if !shared.may_run() || has_stopped(&**handler) {
            return false;
        }
        match handler.work_inline(cause) {
            Ok(progress) => progress == Progress::Idle,
            Err(error) => {
                report(&**handler, &error);
                false
            }
        }
    }
}

/// Tells the driver of an error.
fn report(handler: &dyn Handler, error: &DeviceError) {
    if let Some(ring) = handler.rings().first() {
        ring.interrupt().fail(error);
    }
}

struct Shared {
    /// Never held while a handler works.
    state: Mutex<State>,
    /// The handler while it runs. Held while it works: its own thread may wait for it,
    /// others may not.
    running: Mutex<Option<Box<dyn Handler>>>,
    changed: Condvar,
    wake: EventFd,
}

/// The thread, seen from outside.
pub struct Worker {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Starts the thread, idle and confined to what its kind needs. Names longer
    /// than 15 bytes are cut by the kernel.
    pub fn new(name: &str, kind: ThreadKind) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            state: Mutex::new(State::Idle),
            running: Mutex::new(None),
            changed: Condvar::new(),
            wake: EventFd::new(EFD_NONBLOCK)?,
        });
        let inside = shared.clone();
        let thread = weft_confine::spawn(name, kind, move || {
            inside.live();
            *lock(&inside.state) = State::Ended;
            inside.changed.notify_all();
        })?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// Gives the idle thread a handler to run.
    pub fn start(&self, handler: Box<dyn Handler>) {
        *lock(&self.shared.state) = State::Given(handler);
        self.shared.changed.notify_all();
    }

    /// Asks for the handler back; see [`Worker::take`].
    pub fn request_stop(&self) {
        {
            let mut state = lock(&self.shared.state);
            *state = match std::mem::replace(&mut *state, State::Idle) {
                State::Running => State::Stopping,
                State::Given(handler) => State::Back(handler),
                other => other,
            };
        }
        self.shared.changed.notify_all();
        // A full counter wakes as well.
        let _ = self.shared.wake.write(1);
    }

    /// Waits until [`Worker::take`] has an answer; false when `deadline` came first.
    pub fn wait_quiet(&self, deadline: Instant) -> bool {
        let mut state = lock(&self.shared.state);
        while !matches!(*state, State::Idle | State::Back(_)) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.shared.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(|poison| poison.into_inner()).0;
        }
        true
    }

    /// The handler that was stopped, if there is one.
    pub fn take(&self) -> Option<Box<dyn Handler>> {
        let mut state = lock(&self.shared.state);
        match std::mem::replace(&mut *state, State::Idle) {
            State::Back(handler) => Some(handler),
            other => {
                *state = other;
                None
            }
        }
    }

    /// Takes back a stop that was not in time.
    pub fn cancel_stop(&self) {
        let mut state = lock(&self.shared.state);
        *state = match std::mem::replace(&mut *state, State::Idle) {
            State::Stopping => State::Running,
            State::Back(handler) => State::Given(handler),
            other => other,
        };
        self.shared.changed.notify_all();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        *lock(&self.shared.state) = State::Quit;
        self.shared.changed.notify_all();
        let _ = self.shared.wake.write(1);
        let goes_on = |state: &mut State| !matches!(state, State::Ended);
        let state = lock(&self.shared.state);
        let waited = self
            .shared
            .changed
            .wait_timeout_while(state, JOIN_MAX, goes_on)
            .unwrap_or_else(|poison| poison.into_inner());
        let in_time = !waited.1.timed_out();
        drop(waited);
        if let Some(thread) = self.thread.take()
            && in_time
        {
            // It panicked only if something here is wrong; the process says so itself.
            let _ = thread.join();
        }
    }
}

/// What becomes of a handler that was stopped.
enum Next {
    GoOn(Box<dyn Handler>),
    Wait,
    End,
}

impl Shared {
    fn live(self: &Arc<Self>) {
        while let Some(mut handler) = self.next_handler() {
            loop {
                handler.set_inline_handler(InlineHandler(Arc::downgrade(self)));
                *lock(&self.running) = Some(handler);
                let outcome = self.run();
                let Some(same) = lock(&self.running).take() else {
                    return;
                };
                handler = same;
                if let Err(error) = outcome {
                    report(&*handler, &error);
                }
                match self.hand_back(handler) {
                    Next::GoOn(same) => handler = same,
                    Next::Wait => break,
                    Next::End => return,
                }
            }
        }
    }

    /// Waits for one; `None` at the end.
    fn next_handler(&self) -> Option<Box<dyn Handler>> {
        let mut state = lock(&self.state);
        loop {
            match std::mem::replace(&mut *state, State::Running) {
                State::Given(handler) => return Some(handler),
                State::Quit => return None,
                other => *state = other,
            }
            let waited = self.changed.wait(state);
            state = waited.unwrap_or_else(|poison| poison.into_inner());
        }
    }

    fn may_run(&self) -> bool {
        matches!(*lock(&self.state), State::Running)
    }

    /// Does something with the handler that runs.
    fn with<T>(&self, work: impl FnOnce(&mut dyn Handler) -> T) -> Option<T> {
        lock(&self.running)
            .as_mut()
            .map(|handler| work(&mut **handler))
    }

    fn work(&self, cause: Cause) -> Result<Progress, DeviceError> {
        self.with(|handler| handler.work(cause))
            .unwrap_or(Ok(Progress::Idle))
    }

    /// Runs the handler until it is to stop, or there is a fault.
    fn run(&self) -> Result<(), DeviceError> {
        let failed = |source| DeviceError::Host {
            what: "cannot wait for events",
            source,
        };
        let epoll = self.with(|handler| self.listen(handler));
        let Some(epoll) = epoll.transpose().map_err(failed)? else {
            return Ok(());
        };
        let mut events = [EpollEvent::default(); EVENTS_MAX];
        let mut progress = Progress::More;
        let mut cause = Cause::Start;
        let goes_on = || self.may_run() && self.with(|handler| !has_stopped(handler)) == Some(true);
        while goes_on() {
            let timeout = if progress == Progress::More { 0 } else { -1 };
            let count = match epoll.wait(timeout, &mut events) {
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
                Err(source) => return Err(failed(source)),
            };
            if progress == Progress::More {
                progress = self.work(cause)?;
                cause = Cause::Again;
            }
            for event in events.iter().take(count) {
                let cause = match event.data() {
                    WAKE => continue,
                    token if token >= WATCHED => Cause::Ready((token - WATCHED) as usize),
                    token => Cause::Kick(token as usize),
                };
                if self.work(cause)? == Progress::More {
                    progress = Progress::More;
                }
            }
        }
        Ok(())
    }

    fn listen(&self, handler: &dyn Handler) -> io::Result<Epoll> {
        let epoll = Epoll::new()?;
        let add = |descriptor, events, token| {
            let event = EpollEvent::new(events | EventSet::EDGE_TRIGGERED, token);
            epoll.ctl(ControlOperation::Add, descriptor, event)
        };
        add(self.wake.as_raw_fd(), EventSet::IN, WAKE)?;
        for (token, ring) in (0..).zip(handler.rings()) {
            add(ring.kick().as_raw_fd(), EventSet::IN, token)?;
        }
        for (token, (descriptor, events)) in (WATCHED..).zip(handler.watched()) {
            add(descriptor, events, token)?;
        }
        Ok(epoll)
    }

    /// Waits until the handler is wanted back and quiet.
    fn hand_back(&self, mut handler: Box<dyn Handler>) -> Next {
        let mut state = lock(&self.state);
        loop {
            match *state {
                State::Stopping => {
                    drop(state);
                    let quiet = handler.quiesce(Instant::now() + QUIET_STEP);
                    state = lock(&self.state);
                    if quiet && matches!(*state, State::Stopping) {
                        *state = State::Back(handler);
                        self.changed.notify_all();
                        return Next::Wait;
                    }
                }
                State::Quit => {
                    drop(state);
                    if !handler.quiesce(Instant::now() + JOIN_MAX / 2) {
                        // The kernel may still write where the handler said.
                        std::mem::forget(handler);
                    }
                    return Next::End;
                }
                // The stop was taken back.
                _ if !has_stopped(&*handler) => return Next::GoOn(handler),
                // After a fault: nothing happens until it is wanted back.
                _ => {
                    let waited = self.changed.wait(state);
                    state = waited.unwrap_or_else(|poison| poison.into_inner());
                }
            }
        }
    }
}

/// Whether the device waits for a reset.
fn has_stopped(handler: &dyn Handler) -> bool {
    let rings = handler.rings();
    rings
        .first()
        .is_none_or(|ring| ring.interrupt().needs_reset())
}
