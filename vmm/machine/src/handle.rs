//! How other threads talk to a machine.

use std::sync::mpsc::{RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use weft_coherent_memory::{SliceFaults, SlicePages};
use weft_platform::devices::serial::SerialPort;
use weft_virtio::console::ConsoleHandle;

use super::ender::{Ending, Envelope, Input};
use super::lifecycle::{Answer, Counters, End, Refusal, Request, Status};
use super::state::MachineState;

/// Longest wait for the answer to one request. Save and restore are the longest:
/// they wait for every vCPU and every device thread.
pub const ANSWER_SECONDS_MAX: u64 = 30;

/// A machine, from outside. Clones are the same machine.
#[derive(Clone)]
pub struct Handle {
    pub(super) owner: SyncSender<Input>,
    pub(super) ending: Arc<Ending>,
    /// None on a secondary.
    pub(super) serial: Option<Arc<SerialPort>>,
    pub(super) console: Option<ConsoleHandle>,
    pub(super) first_instruction: Arc<OnceLock<Instant>>,
}

impl Handle {
    /// Asks, and waits for the answer, [`ANSWER_SECONDS_MAX`] at most.
    pub fn request(&self, request: Request) -> Result<Answer, Refusal> {
        let name = request.name();
        let (answer, answered) = sync_channel(1);
        let envelope = Envelope { request, answer };
        match self.owner.try_send(Input::Request(envelope)) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => return Err(Refusal::Busy { request: name }),
            Err(TrySendError::Disconnected(_)) => return Err(Refusal::Gone { request: name }),
        }
        match answered.recv_timeout(Duration::from_secs(ANSWER_SECONDS_MAX)) {
            Ok(answer) => answer,
            Err(RecvTimeoutError::Timeout) => Err(Refusal::TimedOut {
                request: name,
                seconds: ANSWER_SECONDS_MAX,
            }),
            Err(RecvTimeoutError::Disconnected) => Err(Refusal::Gone { request: name }),
        }
    }

    /// The pages that slices asked each other for most often, slice by slice; none
    /// where there is one slice.
    pub fn pages(&self) -> Result<Vec<SlicePages>, Refusal> {
        match self.request(Request::Pages)? {
            Answer::Pages(pages) => Ok(pages),
            other => Err(misfit("pages", &other)),
        }
    }

    /// Faults one by one: see [`Request::Faults`].
    pub fn faults(&self, from: Vec<Option<u64>>) -> Result<Vec<SliceFaults>, Refusal> {
        match self.request(Request::Faults(from))? {
            Answer::Faults(faults) => Ok(faults),
            other => Err(misfit("faults", &other)),
        }
    }

    /// What the machine and its vCPUs are doing.
    pub fn status(&self) -> Result<Status, Refusal> {
        match self.request(Request::Status)? {
            Answer::Status(status) => Ok(status),
            other => Err(misfit("status", &other)),
        }
    }

    /// What was counted so far.
    pub fn counters(&self) -> Result<Counters, Refusal> {
        match self.request(Request::Counters)? {
            Answer::Counters(counters) => Ok(counters),
            other => Err(misfit("counters", &other)),
        }
    }

    /// The state of a machine that stands, without its memory.
    pub fn save(&self) -> Result<Box<MachineState>, Refusal> {
        match self.request(Request::Save)? {
            Answer::Saved(state) => Ok(state),
            other => Err(misfit("save", &other)),
        }
    }

    /// When the guest's first instruction was about to be executed.
    pub fn first_instruction(&self) -> Option<Instant> {
        self.first_instruction.get().copied()
    }

    /// Types into the serial port; says how many bytes were taken. The rest may
    /// be offered again a little later.
    pub fn serial_input(&self, bytes: &[u8]) -> usize {
        let serial = self.serial.as_ref();
        serial.map_or(0, |serial| serial.type_in(bytes))
    }

    /// Types into the virtio console; none is taken where there is none.
    pub fn console_input(&self, bytes: &[u8]) -> usize {
        self.console
            .as_ref()
            .map_or(0, |console| console.input(bytes))
    }

    /// Tells the virtio console the size of the terminal.
    pub fn console_resize(&self, columns: u16, rows: u16) {
        if let Some(console) = &self.console {
            console.resize(columns, rows);
        }
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

fn misfit(request: &'static str, answer: &Answer) -> Refusal {
    Refusal::Failed {
        request,
        reason: format!("the machine sent a reply that does not match the request: {answer:?}"),
    }
}
