//! The end of a machine: devices, vCPUs and requests ask for it, and threads wait for it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use super::lifecycle::{End, MachineReply, MachineRequest, Refusal};

/// Inputs that may wait for the owner.
pub(super) const INPUTS_MAX: usize = 16;

/// How often a full queue is offered [`Input::Quit`] again.
const OFFER_AGAIN: Duration = Duration::from_millis(10);

/// Tells the owner that its machine is dropped; it may be busy, with a full queue, until
/// `deadline`.
pub(super) fn quit(owner: &SyncSender<Input>, deadline: Instant) {
    let mut input = Input::Quit;
    // An error other than a full queue means that the owner has ended already.
    while let Err(TrySendError::Full(refused)) = owner.try_send(input) {
        if Instant::now() >= deadline {
            return;
        }
        input = refused;
        std::thread::sleep(OFFER_AGAIN);
    }
}

/// A request, and where its reply goes.
pub(super) struct Envelope {
    pub request: MachineRequest,
    pub reply: SyncSender<Result<MachineReply, Refusal>>,
}

/// What the machine's thread waits for.
pub(super) enum Input {
    /// A request of a handle.
    Request(Envelope),
    /// [`Shutdown::end`] was called.
    Wake,
    /// The machine is dropped.
    Quit,
}

/// What exists before the machine's owner: both ends of its queue, and what asks for the end.
pub(super) struct OwnerChannel {
    pub shutdown: Arc<Shutdown>,
    /// Set when the end is requested: vCPUs execute no more guest code.
    pub flag: Arc<AtomicBool>,
    pub to_owner: SyncSender<Input>,
    pub inputs: Receiver<Input>,
}

impl OwnerChannel {
    pub fn new() -> Self {
        let (to_owner, inputs) = sync_channel(INPUTS_MAX);
        let flag = Arc::new(AtomicBool::new(false));
        Self {
            shutdown: Arc::new(Shutdown::new(to_owner.clone(), flag.clone())),
            flag,
            to_owner,
            inputs,
        }
    }
}

type Listener = Box<dyn Fn(&End) + Send + Sync>;

/// Requests the end of the machine, from any thread.
pub(super) struct Shutdown {
    /// Called with the first end that is requested.
    listener: OnceLock<Listener>,
    /// The first end that was requested.
    wanted: Mutex<Option<End>>,
    /// Stops vCPUs.
    flag: Arc<AtomicBool>,
    owner: SyncSender<Input>,
}

impl Shutdown {
    pub fn new(owner: SyncSender<Input>, flag: Arc<AtomicBool>) -> Self {
        Self {
            listener: OnceLock::new(),
            wanted: Mutex::default(),
            flag,
            owner,
        }
    }

    /// Requests that the machine ends in this way. Only the first request counts. Never
    /// blocks.
    pub fn end(&self, end: End) {
        let mut wanted = self.lock();
        let first = wanted.is_none().then(|| end.clone());
        wanted.get_or_insert(end);
        drop(wanted);
        self.flag.store(true, Ordering::SeqCst);
        if let (Some(end), Some(listener)) = (first, self.listener.get()) {
            listener(&end);
        }
        // With a full queue the owner is awake, and it checks `wanted` after each input.
        let _ = self.owner.try_send(Input::Wake);
    }

    /// Sets what is called with the first end that is requested, on the requesting thread;
    /// it must not block. Once, before an end can be requested.
    pub fn listen(&self, listener: Box<dyn Fn(&End) + Send + Sync>) {
        // Only the first listener counts.
        let _ = self.listener.set(listener);
    }

    /// The end that was requested, if one was.
    pub fn wanted(&self) -> Option<End> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Option<End>> {
        self.wanted
            .lock()
            .unwrap_or_else(|poison| poison.into_inner())
    }
}

/// How the machine ended, and the threads that wait for it.
#[derive(Default)]
pub(super) struct Ending {
    /// Held only to read or set it.
    end: Mutex<Option<End>>,
    changed: Condvar,
}

impl Ending {
    /// Records the end and wakes all waiting threads. Only the first call counts.
    pub fn set(&self, end: End) {
        self.lock().get_or_insert(end);
        self.changed.notify_all();
    }

    /// How the machine ended; `None` while it has not.
    pub fn get(&self) -> Option<End> {
        self.lock().clone()
    }

    /// Waits for the end, `timeout` at most.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_that_never_takes_its_inputs_is_given_up() {
        let channel = OwnerChannel::new();
        for _ in 0..INPUTS_MAX {
            channel.to_owner.send(Input::Wake).unwrap();
        }
        quit(&channel.to_owner, Instant::now() + OFFER_AGAIN);
        assert_eq!(channel.inputs.try_iter().count(), INPUTS_MAX);
        quit(&channel.to_owner, Instant::now());
        assert!(matches!(channel.inputs.try_recv(), Ok(Input::Quit)));
    }
}
