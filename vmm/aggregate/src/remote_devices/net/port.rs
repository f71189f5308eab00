//! The link of a queue pair whose network is on another slice.
//!
//! Invariants: at most a window of frames is in flight each way, so that what the
//! links hold is bounded; a frame of the driver is given back to it only when it
//! was sent on, and never lost here; guest memory is touched by the pair's own
//! thread, or by the one that brings frames, as far as it need not wait.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use weft_confine::lock;
use weft_guest_memory::DeviceMemory;
use weft_virtio::net::Link;
use weft_virtio::ring::{Segment, copy_out, total};
use weft_virtio::worker::{Cause, InlineHandler};

use super::frames::{self, Batch, Credit, Debt, cost};

/// Sends to the slice at the other end. Never waits.
pub trait FrameSender: Send + Sync {
    /// Sends a batch of frames.
    fn frames(&self, batch: &[u8]);
    /// This many bytes of received batches are done with.
    fn taken(&self, bytes: u64);
}

struct Received {
    /// How often the way began anew.
    beginnings: u64,
    /// Frames that were received before and given back; they count no more.
    given_back: VecDeque<Vec<u8>>,
    batches: VecDeque<Vec<u8>>,
    debt: Debt,
    credit: Credit,
    /// The pair waits for room.
    blocked: bool,
}

impl Received {
    fn new(window: usize, beginnings: u64) -> Self {
        Self {
            beginnings,
            given_back: VecDeque::new(),
            batches: VecDeque::new(),
            debt: Debt::new(window),
            credit: Credit::new(window),
            blocked: false,
        }
    }
}

/// The frames that a link's thread received for a pair's thread.
pub struct FrameQueue {
    window: usize,
    state: Mutex<Received>,
    arrived: EventFd,
    /// The handle of the thread that serves the pair.
    inline_handler: Mutex<Option<InlineHandler>>,
}

impl FrameQueue {
    /// An empty queue with this [window](frames::window).
    ///
    /// # Errors
    /// No descriptors left.
    pub fn new(window: usize) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            window,
            state: Mutex::new(Received::new(window, 0)),
            arrived: EventFd::new(EFD_NONBLOCK)?,
            inline_handler: Mutex::default(),
        }))
    }

    /// Frames for the guest came: it gets them here and now where that needs no
    /// waiting.
    ///
    /// # Errors
    /// They are malformed, or too many.
    pub fn put(&self, batch: Vec<u8>) -> Result<(), String> {
        frames::check(&batch)?;
        let mut state = lock(&self.state);
        state.debt.receive(batch.len())?;
        state.batches.push_back(batch);
        drop(state);
        let inline_handler = lock(&self.inline_handler).clone();
        if !inline_handler.is_some_and(|handler| handler.work(Cause::Ready(0))) {
            self.wake();
        }
        Ok(())
    }

    /// The other end accepted this many bytes.
    ///
    /// # Errors
    /// It never got them.
    pub fn taken(&self, bytes: u64) -> Result<(), String> {
        let mut state = lock(&self.state);
        state.credit.taken(bytes)?;
        let waited_for = std::mem::take(&mut state.blocked);
        drop(state);
        if waited_for {
            self.wake();
        }
        Ok(())
    }

    /// The pair, which stands, goes to another slice or comes from there: both ends of the way
    /// count anew. Returns the batches that the guest has not got.
    pub fn begin_anew(&self) -> Vec<Vec<u8>> {
        let mut state = lock(&self.state);
        let new = Received::new(self.window, state.beginnings + 1);
        let before = std::mem::replace(&mut *state, new);
        let given_back = before.given_back.into_iter().map(|frame| {
            let mut batch = Vec::new();
            frames::add(&mut batch, &frame);
            batch
        });
        given_back.chain(before.batches).collect()
    }

    fn wake(&self) {
        // A full counter wakes as well.
        let _ = self.arrived.write(1);
    }
}

/// Exchanges frames between a pair here and the switch of another slice.
pub struct RemotePort {
    sender: Arc<dyn FrameSender>,
    queue: Arc<FrameQueue>,
    /// The batch whose frames are being given to the driver, and how far.
    current: Vec<u8>,
    at: usize,
    /// As the queue's, when the batch was taken.
    beginnings: u64,
    /// Frames of the driver that were not sent yet.
    batch: Batch,
}

impl RemotePort {
    /// Sends with `sender`; what the other end sends arrives in `queue`.
    pub fn new(sender: Arc<dyn FrameSender>, queue: Arc<FrameQueue>) -> Self {
        Self {
            sender,
            queue,
            current: Vec::new(),
            at: 0,
            beginnings: 0,
            batch: Batch::new(),
        }
    }

    fn send_batch(&mut self) {
        let bytes = self.batch.bytes();
        if !bytes.is_empty() {
            lock(&self.queue.state).credit.send(bytes.len());
            self.sender.frames(bytes);
            self.batch.clear();
        }
    }

    /// Whether `bytes` more may go; if not, there will be word when they may.
    fn has_room(&self, bytes: usize) -> bool {
        let mut state = lock(&self.queue.state);
        let room = state.credit.has_room(self.batch.bytes().len() + bytes);
        state.blocked = !room;
        room
    }
}

impl Link for RemotePort {
    fn descriptor(&self) -> RawFd {
        self.queue.arrived.as_raw_fd()
    }

    fn receive(&mut self, frame: &mut [u8]) -> io::Result<Option<usize>> {
        let mut state = lock(&self.queue.state);
        if let Some(found) = state.given_back.pop_front() {
            if let Some(room) = frame.get_mut(..found.len()) {
                room.copy_from_slice(&found);
            }
            return Ok(Some(found.len()));
        }
        if self.at >= self.current.len() || self.beginnings != state.beginnings {
            self.beginnings = state.beginnings;
            (self.current, self.at) = (Vec::new(), 0);
            let Some(next) = state.batches.pop_front() else {
                return Ok(None);
            };
            self.current = next;
        }
        drop(state);
        let mut rest = &self.current[self.at..];
        let before = rest.len();
        // It was checked when it came.
        let found = frames::next(&mut rest).unwrap_or_default();
        let length = found.len();
        if let Some(room) = frame.get_mut(..length) {
            room.copy_from_slice(found);
        }
        let used = before - rest.len();
        self.at += used;
        let taken = lock(&self.queue.state).debt.take(used);
        if let Some(bytes) = taken {
            self.sender.taken(bytes);
        }
        Ok(Some(length))
    }

    fn send(&mut self, memory: &DeviceMemory, frame: &[Segment]) -> io::Result<()> {
        let length = total(frame) as usize;
        if !self.has_room(cost(length)) {
            self.send_batch();
            return Err(ErrorKind::WouldBlock.into());
        }
        if !self.batch.fits(length) {
            self.send_batch();
        }
        let room = self.batch.add(length);
        let copied = copy_out(memory, frame, 0, room);
        // Nothing of an earlier frame goes with one whose pages did not come.
        room[copied..].fill(0);
        Ok(())
    }

    fn finish(&mut self) {
        self.send_batch();
    }

    fn give_back(&mut self, frame: Option<&[u8]>) -> bool {
        let mut state = lock(&self.queue.state);
        // What is left of the batch counts still.
        let current = std::mem::take(&mut self.current);
        let rest = current.get(self.at..).unwrap_or_default();
        if !rest.is_empty() && self.beginnings == state.beginnings {
            state.batches.push_front(rest.to_vec());
        }
        self.at = 0;
        if let Some(frame) = frame {
            state.given_back.push_front(frame.to_vec());
        }
        true
    }

    fn set_inline_handler(&mut self, handler: InlineHandler) {
        *lock(&self.queue.inline_handler) = Some(handler);
    }
}
