//! How other threads talk to a machine.

use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use super::lifecycle::{Answer, End, Refusal, Request};

/// Longest wait for the answer to one request. Save and restore are the longest:
/// they wait for every vCPU and every device thread.
pub const ANSWER_SECONDS_MAX: u64 = 30;

/// Requests that may wait for the owner.
pub(super) const REQUESTS_MAX: usize = 16;

/// A request with the way back for its answer.
pub(super) struct Envelope {
    pub request: Request,
    pub answer: SyncSender<Result<Answer, Refusal>>,
}

/// How the machine ended, once it did: what [`Handle::wait`] waits for.
#[derive(Default)]
pub(super) struct Ending {
    /// Held only to read or set it.
    end: Mutex<Option<End>>,
    changed: Condvar,
}

impl Ending {
    /// The first end counts.
    pub fn set(&self, end: End) {
        let mut current = self.end.lock().unwrap_or_else(|poison| poison.into_inner());
        current.get_or_insert(end);
        self.changed.notify_all();
    }

    /// How it ended, if it did.
    pub fn get(&self) -> Option<End> {
        let current = self.end.lock().unwrap_or_else(|poison| poison.into_inner());
        current.clone()
    }

    fn wait(&self, timeout: Duration) -> Option<End> {
        let current = self.end.lock().unwrap_or_else(|poison| poison.into_inner());
        let (current, _) = self
            .changed
            .wait_timeout_while(current, timeout, |end| end.is_none())
            .unwrap_or_else(|poison| poison.into_inner());
        current.clone()
    }
}

/// Where bytes typed by the user go.
pub(super) trait Input: Send + Sync {
    /// Takes as many as its bounded queue has room for; says how many.
    fn type_in(&self, bytes: &[u8]) -> usize;
}

/// A machine, from outside. Clones are the same machine.
#[derive(Clone)]
pub struct Handle {
    pub(super) requests: SyncSender<Envelope>,
    pub(super) ending: Arc<Ending>,
    pub(super) serial: Arc<dyn Input>,
    pub(super) console: Option<Arc<dyn Input>>,
}

impl Handle {
    /// Asks, and waits for the answer, [`ANSWER_SECONDS_MAX`] at most.
    pub fn request(&self, request: Request) -> Result<Answer, Refusal> {
        let name = request.name();
        let (answer, answered) = sync_channel(1);
        let envelope = Envelope { request, answer };
        match self.requests.try_send(envelope) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => return Err(Refusal::Busy { request: name }),
            Err(TrySendError::Disconnected(_)) => return Err(Refusal::Gone { request: name }),
        }
        use std::sync::mpsc::RecvTimeoutError;
        match answered.recv_timeout(Duration::from_secs(ANSWER_SECONDS_MAX)) {
            Ok(answer) => answer,
            Err(RecvTimeoutError::Timeout) => Err(Refusal::TimedOut {
                request: name,
                seconds: ANSWER_SECONDS_MAX,
            }),
            Err(RecvTimeoutError::Disconnected) => Err(Refusal::Gone { request: name }),
        }
    }

    /// Types into the serial port; says how many bytes were taken. The rest may
    /// be offered again a little later.
    pub fn serial_input(&self, bytes: &[u8]) -> usize {
        self.serial.type_in(bytes)
    }

    /// Types into the virtio console; none is taken where there is none.
    pub fn console_input(&self, bytes: &[u8]) -> usize {
        self.console
            .as_ref()
            .map_or(0, |console| console.type_in(bytes))
    }

    /// Waits for the end, `timeout` at most.
    pub fn wait(&self, timeout: Duration) -> Option<End> {
        self.ending.wait(timeout)
    }

    /// Waits for the end until `deadline`.
    pub fn wait_until(&self, deadline: Instant) -> Option<End> {
        self.wait(deadline.saturating_duration_since(Instant::now()))
    }
}
