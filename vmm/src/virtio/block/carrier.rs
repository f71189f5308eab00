//! Carries requests to the slice that has the disk.
//!
//! Invariants: at most `window` bytes are under way, in pieces of a known bound,
//! so that what the links hold is bounded, too; a request ends when each of its
//! pieces was answered; guest memory is touched by the queue's own thread only.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::engine::Ended;
use super::request::{Operation, Request, Status};
use crate::memory::DeviceMemory;
use crate::pci::lock;
use crate::virtio::ring::{copy_in, copy_out};

/// Most bytes of data that a piece may have: less than a frame may carry.
pub const PIECE_MAX: u32 = 256 << 10;
/// Least bytes that a queue may have under way.
/// Most bytes of data in a piece that is asked for: while one is copied the next is on
/// its way.
const PIECE: u32 = 64 << 10;
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
    /// The request's place at who asked.
    pub slot: u32,
    /// Where in the request it begins, in bytes.
    pub position: u64,
    /// What is to be done.
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
pub struct Answer {
    /// Which.
    pub piece: Piece,
    /// How it ended.
    pub status: Status,
    /// What was read.
    pub data: Vec<u8>,
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
    answers: Mutex<VecDeque<Answer>>,
    arrived: EventFd,
}

impl Inbox {
    /// An empty one.
    pub fn new() -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            answers: Mutex::default(),
            arrived: EventFd::new(EFD_NONBLOCK)?,
        }))
    }

    /// An answer came.
    pub fn put(&self, answer: Answer) {
        lock(&self.answers).push_back(answer);
        // A full counter wakes as well.
        let _ = self.arrived.write(1);
    }

    fn take(&self) -> Option<Answer> {
        lock(&self.answers).pop_front()
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
    pub fn begin(&mut self, memory: &DeviceMemory, request: Request) -> Option<Ended> {
        let Some(slot) = self.free.pop() else {
            let status = Status::IoError;
            return Some(Ended { request, status });
        };
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
        while let Some(answer) = self.inbox.take() {
            let slot = answer.piece.slot as usize;
            let Some(flying) = self.flying.get_mut(slot).and_then(Option::as_mut) else {
                continue;
            };
            let moves = flying.request.moves_data();
            if moves {
                self.under_way = self.under_way.saturating_sub(answer.piece.length);
            }
            flying.answered += if moves {
                u64::from(answer.piece.length)
            } else {
                1
            };
            if answer.status != Status::Ok {
                flying.status = answer.status;
            } else if flying.request.operation == Operation::Read {
                let whole = answer.data.len() == answer.piece.length as usize;
                let (data, position) = (&flying.request.data, answer.piece.position);
                if !whole || copy_in(memory, data, position, &answer.data) != answer.data.len() {
                    flying.status = Status::IoError;
                }
            }
            let over = flying.answered >= flying.extent;
            let ended = match over {
                true => self.flying[slot].take(),
                false => None,
            };
            self.ask(memory);
            if let Some(Flying {
                request, status, ..
            }) = ended
            {
                self.free.push(slot);
                return Some(Ended { request, status });
            }
        }
        None
    }
}
