//! Carries requests to the slice that has the disk.
//!
//! Invariants: at most `window` bytes are under way, in pieces of a known bound,
//! so that what the links hold is bounded, too; a request ends when each of its
//! pieces was answered; guest memory is touched by the queue's own thread, or, while
//! a piece of a read is not answered, by the thread that brings the data, if it need
//! not wait for the guest's pages.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use weft_confine::lock;
use weft_guest_memory::DeviceMemory;

use super::engine::Ended;
use super::request::{Operation, Request, Status};
use crate::ring::{Segment, copy_in, copy_in_held, copy_out};
use crate::worker::{Cause, Hands};

/// Most bytes of data that a piece may have: less than a frame may carry.
pub const PIECE_MAX: u32 = 256 << 10;
/// Most bytes of data in a piece that is asked for: while one is copied the next is on
/// its way.
pub(super) const PIECE: u32 = 64 << 10;
/// Least bytes that a queue may have under way.
const WINDOW_MIN: u32 = 64 << 10;
/// Most bytes that a queue may have under way: some pieces, so that none waits for
/// the one before.
const WINDOW_MAX: u32 = 1 << 20;
/// Bytes that all queues of a slice may have under way: half of what a link's
/// backlog may hold.
const WINDOWS_TOTAL: u32 = 32 << 20;

/// A part of a request that travels on its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The request's slot at the requesting slice.
    pub slot: u32,
    /// Where in the request it begins, in bytes.
    pub position: u64,
    pub operation: Operation,
    /// Whether a change must be durable when it is answered.
    pub durable: bool,
    /// Where on the disk, in bytes.
    pub offset: u64,
    /// Bytes on the disk; at most [`PIECE_MAX`] of a read or write.
    pub length: u32,
}

/// What became of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer<'a> {
    pub piece: Piece,
    /// How it ended.
    pub status: Status,
    /// What was read.
    pub data: Cow<'a, [u8]>,
}

impl Answer<'_> {
    /// Whether it has all bytes of the read.
    fn is_whole(&self) -> bool {
        self.data.len() == self.piece.length as usize
    }
}

/// The way to the disk's slice. Never waits.
pub trait Carry: Send + Sync {
    /// Sends a piece with the data of a write; it is answered into the [`Inbox`].
    fn ask(&self, piece: &Piece, data: &[u8]);
    /// No answer comes any more: the machine is over.
    fn is_over(&self) -> bool;
}

/// Where answers wait for the queue's thread.
pub struct Inbox {
    waiting: Mutex<Waiting>,
    arrived: EventFd,
    /// The queue's handler, while it runs.
    hands: Mutex<Option<Hands>>,
}

#[derive(Default)]
struct Waiting {
    answers: VecDeque<Arrived>,
    /// By slot: where what is read goes.
    landings: Vec<Option<Landing>>,
}

/// An answer.
struct Arrived {
    piece: Piece,
    status: Status,
    /// What was read is in guest memory.
    landed: bool,
    /// What was read, if it is not.
    data: Vec<u8>,
}

/// Guest memory of a read that is not answered.
struct Landing {
    memory: Arc<DeviceMemory>,
    data: Vec<Segment>,
}

impl Waiting {
    /// Whether what was read is in guest memory now.
    fn land(&self, answer: &Answer) -> bool {
        let Piece { slot, position, .. } = answer.piece;
        let landing = self.landings.get(slot as usize).and_then(Option::as_ref);
        answer.piece.operation == Operation::Read
            && answer.status == Status::Ok
            && answer.is_whole()
            && landing.is_some_and(|landing| {
                copy_in_held(&landing.memory, &landing.data, position, &answer.data)
            })
    }
}

impl Inbox {
    /// An empty one.
    pub fn new() -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            waiting: Mutex::default(),
            arrived: EventFd::new(EFD_NONBLOCK)?,
            hands: Mutex::default(),
        }))
    }

    /// The thread that serves the queue.
    pub(super) fn lend(&self, hands: Hands) {
        *lock(&self.hands) = Some(hands);
    }

    /// Has the queue served on this thread, as far as nothing has to be waited for;
    /// whether its own need not be woken.
    pub fn work(&self, cause: Cause) -> bool {
        let hands = lock(&self.hands).clone();
        hands.is_some_and(|hands| hands.work(cause))
    }

    /// An answer came, which ends its request here and now where that needs no waiting.
    pub fn put(&self, answer: Answer) {
        let mut waiting = lock(&self.waiting);
        // The lock is held meanwhile: what has ended is not written to any more.
        let landed = waiting.land(&answer);
        let Answer {
            piece,
            status,
            data,
        } = answer;
        let first = waiting.answers.is_empty();
        waiting.answers.push_back(Arrived {
            piece,
            status,
            landed,
            data: match landed {
                true => Vec::new(),
                false => data.into_owned(),
            },
        });
        drop(waiting);
        // Whoever was told of the first takes all.
        if !self.work(Cause::Ready(0)) && first {
            // A full counter wakes as well.
            let _ = self.arrived.write(1);
        }
    }

    fn take(&self) -> Option<Arrived> {
        lock(&self.waiting).answers.pop_front()
    }

    /// The oldest, if it has nothing left to be copied.
    fn take_landed(&self) -> Option<Arrived> {
        let mut waiting = lock(&self.waiting);
        let ready = waiting.answers.front()?.data.is_empty();
        ready.then(|| waiting.answers.pop_front()).flatten()
    }

    fn is_empty(&self) -> bool {
        lock(&self.waiting).answers.is_empty()
    }

    fn expect(&self, slot: usize, landing: Option<Landing>) {
        let landings = &mut lock(&self.waiting).landings;
        if landings.len() <= slot {
            landings.resize_with(slot + 1, || None);
        }
        landings[slot] = landing;
    }
}

/// A request that is not answered yet.
struct Flying {
    request: Request,
    /// What there is to ask, and what of it was asked and answered: bytes of a read
    /// or write, 1 of anything else.
    extent: u64,
    asked: u64,
    answered: u64,
    status: Status,
}

/// One queue's way to a disk elsewhere.
pub struct Carrier {
    carry: Arc<dyn Carry>,
    inbox: Arc<Inbox>,
    window: u32,
    under_way: u32,
    flying: Vec<Option<Flying>>,
    free: Vec<usize>,
    /// Slots of requests of which not all was asked, in order.
    unasked: VecDeque<usize>,
    buffer: Vec<u8>,
}

impl Carrier {
    /// For `size` requests at once; one of `carriers` of this slice.
    pub fn new(carry: Arc<dyn Carry>, inbox: Arc<Inbox>, size: u16, carriers: usize) -> Self {
        let share = WINDOWS_TOTAL / u32::try_from(carriers.max(1)).unwrap_or(u32::MAX);
        Self {
            carry,
            inbox,
            window: share.clamp(WINDOW_MIN, WINDOW_MAX),
            under_way: 0,
            flying: (0..size).map(|_| None).collect(),
            free: (0..usize::from(size)).rev().collect(),
            unasked: VecDeque::new(),
            buffer: Vec::new(),
        }
    }

    /// Gets an event when answers come. Nobody reads it, so it must be waited on
    /// for edges.
    pub fn descriptor(&self) -> RawFd {
        self.inbox.arrived.as_raw_fd()
    }

    /// Requests that have not ended; none when the machine is over.
    pub fn in_flight(&self) -> usize {
        match self.carry.is_over() {
            true => 0,
            false => self.flying.len() - self.free.len(),
        }
    }

    /// Whether there is room for another.
    pub fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// Begins a request; back at once only when there is no room.
    pub fn begin(&mut self, memory: &Arc<DeviceMemory>, request: Request) -> Option<Ended> {
        let Some(slot) = self.free.pop() else {
            let status = Status::IoError;
            return Some(Ended { request, status });
        };
        let landing = (request.operation == Operation::Read).then(|| Landing {
            memory: memory.clone(),
            data: request.data.clone(),
        });
        self.inbox.expect(slot, landing);
        self.flying[slot] = Some(Flying {
            extent: if request.moves_data() {
                request.length
            } else {
                1
            },
            request,
            asked: 0,
            answered: 0,
            status: Status::Ok,
        });
        self.unasked.push_back(slot);
        self.ask(memory);
        None
    }

    /// Sends pieces, as many as may be under way.
    fn ask(&mut self, memory: &DeviceMemory) {
        while let Some(slot) = self.unasked.front().copied() {
            let Some(flying) = self.flying[slot].as_mut() else {
                self.unasked.pop_front();
                continue;
            };
            let request = &flying.request;
            let moves = request.moves_data();
            let mut piece = Piece {
                slot: slot as u32,
                position: flying.asked,
                operation: request.operation,
                durable: request.durable,
                offset: request.offset,
                // A range that is discarded or zeroed has 32 MiB at most.
                length: request.length as u32,
            };
            if moves {
                let most = PIECE.min(self.window);
                let left = request.length - flying.asked;
                piece.offset += flying.asked;
                piece.length = left.min(u64::from(most)) as u32;
                if self.under_way > 0 && self.under_way + piece.length > self.window {
                    return;
                }
                self.under_way += piece.length;
            }
            self.buffer.clear();
            if request.operation == Operation::Write {
                self.buffer.resize(piece.length as usize, 0);
                copy_out(memory, &request.data, flying.asked, &mut self.buffer);
            }
            flying.asked += if moves { u64::from(piece.length) } else { 1 };
            if flying.asked == flying.extent {
                self.unasked.pop_front();
            }
            self.carry.ask(&piece, &self.buffer);
        }
    }

    /// A request that has ended.
    pub fn next_ended(&mut self, memory: &DeviceMemory) -> Option<Ended> {
        while let Some(arrived) = self.inbox.take() {
            let ended = self.account(memory, arrived);
            self.ask(memory);
            if ended.is_some() {
                return ended;
            }
        }
        None
    }

    /// Whoever serves the queue.
    pub fn lend(&self, hands: Hands) {
        self.inbox.lend(hands);
    }

    /// Whether there are requests of which not all was asked: then an answer makes room
    /// for more, whose pages may have to be waited for.
    pub fn is_asking(&self) -> bool {
        !self.unasked.is_empty()
    }

    /// A request that has ended with nothing left to copy.
    pub fn next_landed(&mut self, memory: &DeviceMemory) -> Option<Ended> {
        while let Some(arrived) = self.inbox.take_landed() {
            if let Some(ended) = self.account(memory, arrived) {
                return Some(ended);
            }
        }
        None
    }

    /// Whether no answer waits.
    pub fn is_idle(&self) -> bool {
        self.inbox.is_empty()
    }

    /// Takes an answer; the request that it ends, if it does.
    fn account(&mut self, memory: &DeviceMemory, arrived: Arrived) -> Option<Ended> {
        let Arrived {
            piece,
            status,
            landed,
            data,
        } = arrived;
        let slot = piece.slot as usize;
        let flying = self.flying.get_mut(slot).and_then(Option::as_mut)?;
        let moves = flying.request.moves_data();
        if moves {
            self.under_way = self.under_way.saturating_sub(piece.length);
        }
        flying.answered += if moves { u64::from(piece.length) } else { 1 };
        if status != Status::Ok {
            flying.status = status;
        } else if flying.request.operation == Operation::Read && !landed {
            let whole = data.len() == piece.length as usize;
            let segments = &flying.request.data;
            if !whole || copy_in(memory, segments, piece.position, &data) != data.len() {
                flying.status = Status::IoError;
            }
        }
        if flying.answered < flying.extent {
            return None;
        }
        let Flying {
            request, status, ..
        } = self.flying[slot].take()?;
        self.inbox.expect(slot, None);
        self.free.push(slot);
        Some(Ended { request, status })
    }
}
