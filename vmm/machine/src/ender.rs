//! How a machine comes to its end: who asks for it, who waits for it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use super::lifecycle::{Answer, End, Refusal, Request};

/// Inputs that may wait for the owner.
pub(super) const INPUTS_MAX: usize = 16;

/// A request with the way back for its answer.
pub(super) struct Envelope {
    pub request: Request,
    pub answer: SyncSender<Result<Answer, Refusal>>,
}

/// What the machine's thread waits for.
pub(super) enum Input {
    /// Somebody asks.
    Request(Envelope),
    /// Somebody called [`Ender::end`].
    Wake,
    /// The machine is dropped.
    Quit,
}

/// The two sides of a machine's end, for the assembly of the machine.
pub(super) struct Ends {
    pub ender: Arc<Ender>,
    /// Set once the machine is about to end.
    pub flag: Arc<AtomicBool>,
    pub to_owner: SyncSender<Input>,
    pub inputs: Receiver<Input>,
}

impl Ends {
    pub fn new() -> Self {
        let (to_owner, inputs) = sync_channel(INPUTS_MAX);
        let flag = Arc::new(AtomicBool::new(false));
        Self {
            ender: Arc::new(Ender::new(to_owner.clone(), flag.clone())),
            flag,
            to_owner,
            inputs,
        }
    }
}

type Listener = Box<dyn Fn(&End) + Send + Sync>;

/// For devices and vCPUs: asks for the end, from any thread.
pub(super) struct Ender {
    /// Hears of the first end that was asked for, at once.
    listener: OnceLock<Listener>,
    /// The first end that was asked for. Held for moments.
    wanted: Mutex<Option<End>>,
    /// Tells vCPUs to stop where they are.
    flag: Arc<AtomicBool>,
    owner: SyncSender<Input>,
}

impl Ender {
    pub fn new(owner: SyncSender<Input>, flag: Arc<AtomicBool>) -> Self {
        Self {
            listener: OnceLock::new(),
            wanted: Mutex::default(),
            flag,
            owner,
        }
    }

    /// The machine shall end like this; the first who says so is heard. Never
    /// waits.
    pub fn end(&self, end: End) {
        let mut wanted = self.lock();
        let first = wanted.is_none().then(|| end.clone());
        wanted.get_or_insert(end);
        drop(wanted);
        self.flag.store(true, Ordering::SeqCst);
        if let (Some(end), Some(listener)) = (first, self.listener.get()) {
            listener(&end);
        }
        // When the queue is full the owner is awake, and looks here after each.
        let _ = self.owner.try_send(Input::Wake);
    }

    /// Has `listener` called with the first end that is requested, on the requesting
    /// thread; it must not wait. Once, before anybody does.
    pub fn listen(&self, listener: Box<dyn Fn(&End) + Send + Sync>) {
        // A second one is a mistake that the first survives.
        let _ = self.listener.set(listener);
    }

    /// The end that was asked for.
    pub fn wanted(&self) -> Option<End> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Option<End>> {
        self.wanted
            .lock()
            .unwrap_or_else(|poison| poison.into_inner())
    }
}

/// How the machine ended, once it did: for all who wait.
#[derive(Default)]
pub(super) struct Ending {
    /// Held only to read or set it.
    end: Mutex<Option<End>>,
    changed: Condvar,
}

impl Ending {
    /// It is over; once.
    pub fn set(&self, end: End) {
        self.lock().get_or_insert(end);
        self.changed.notify_all();
    }

    /// How it ended, if it did.
    pub fn get(&self) -> Option<End> {
        self.lock().clone()
    }

    /// Waits for it, `timeout` at most.
    pub fn wait(&self, timeout: Duration) -> Option<End> {
        let (end, _) = self
            .changed
            .wait_timeout_while(self.lock(), timeout, |end| end.is_none())
            .unwrap_or_else(|poison| poison.into_inner());
        end.clone()
    }

    fn lock(&self) -> MutexGuard<'_, Option<End>> {
        self.end.lock().unwrap_or_else(|poison| poison.into_inner())
    }
}
