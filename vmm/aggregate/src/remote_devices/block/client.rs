//! The remote block client: executes one queue's requests on another slice's disk.
//!
//! Invariants: at most `window` bytes are in flight, in chunks of a known bound,
//! so that what the links hold is bounded, too; each reply is to exactly one chunk that was
//! sent and has no reply yet, so that as many replies wait at most; a request ends when
//! each of its chunks was answered; guest memory is touched by the queue's own thread, or, while
//! a chunk of a read is not answered, by the thread that brings the data, if it need
//! not wait for the guest's pages.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use weft_confine::lock;
use weft_guest_memory::DeviceMemory;
use weft_virtio::block::{BlockBackend, Completion, Operation, QUEUE_SIZE, Request, Status};
use weft_virtio::ring::{Segment, copy_in, copy_in_held, copy_out};
use weft_virtio::worker::{Cause, InlineHandler};

use crate::message::chunk::{Chunk, ChunkReply};

/// Most bytes of data in a chunk that is asked for: while one is copied the next is on
/// its way.
const CHUNK: u32 = 64 << 10;
/// Least bytes that a queue may have in flight.
const WINDOW_MIN: u32 = 64 << 10;
/// Most bytes that a queue may have in flight: some chunks, so that none waits for
/// the one before.
const WINDOW_MAX: u32 = 1 << 20;
/// Bytes that all queues of a slice may have in flight: half of what a link's
/// backlog may hold.
const WINDOWS_TOTAL: u32 = 32 << 20;

/// Sends chunks to the disk's slice. Never waits.
pub trait ChunkSender: Send + Sync {
    /// Sends a chunk with the data of a write; the reply goes to the [`ReplyQueue`].
    fn ask(&self, chunk: &Chunk, data: &[u8]);
    /// No reply comes any more: the machine is over.
    fn is_over(&self) -> bool;
}

/// Where replies wait for the queue's thread.
pub struct ReplyQueue {
    waiting: Mutex<Waiting>,
    arrived: EventFd,
    /// The queue's handler, while it runs.
    inline_handler: Mutex<Option<InlineHandler>>,
}

struct Waiting {
    received: VecDeque<ReceivedReply>,
    slots: Vec<Expected>,
}

/// What the replies to one slot's request may be.
#[derive(Default)]
struct Expected {
    /// Chunks that were sent and have no reply yet: as many as the window holds at most.
    chunks: Vec<Chunk>,
    /// Where what is read goes.
    scatter_list: Option<ScatterList>,
}

/// A reply that waits for the queue's thread.
struct ReceivedReply {
    chunk: Chunk,
    status: Status,
    /// What was read is in guest memory.
    landed: bool,
    /// What was read, if it is not.
    data: Vec<u8>,
}

/// The guest memory that a read fills.
struct ScatterList {
    memory: Arc<DeviceMemory>,
    data: Vec<Segment>,
}

impl Waiting {
    /// Takes the chunk that a reply is to from those without a reply.
    ///
    /// # Errors
    /// The slice that sent the reply did not get such a chunk, or the data has another size.
    fn accept(&mut self, reply: &ChunkReply) -> Result<(), String> {
        let expected = self.slots.get_mut(reply.chunk.slot as usize);
        let found = expected.and_then(|expected| {
            let chunks = &mut expected.chunks;
            let at = chunks.iter().position(|chunk| *chunk == reply.chunk)?;
            Some(chunks.swap_remove(at))
        });
        let chunk = found.ok_or("it replied to a disk request that it did not get")?;
        let read = chunk.operation == Operation::Read && reply.status == Status::Ok;
        let length = if read { chunk.length as usize } else { 0 };
        match reply.data.len() == length {
            true => Ok(()),
            false => Err(format!(
                "it replied with {} bytes to a disk request for {length}",
                reply.data.len()
            )),
        }
    }

    /// Copies what was read into guest memory; whether it is there now.
    fn land(&self, reply: &ChunkReply) -> bool {
        let Chunk { slot, position, .. } = reply.chunk;
        let expected = self.slots.get(slot as usize);
        let list = expected.and_then(|expected| expected.scatter_list.as_ref());
        !reply.data.is_empty()
            && list
                .is_some_and(|list| copy_in_held(&list.memory, &list.data, position, &reply.data))
    }
}

impl ReplyQueue {
    /// An empty one.
    pub fn new() -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            waiting: Mutex::new(Waiting {
                received: VecDeque::new(),
                slots: (0..QUEUE_SIZE).map(|_| Expected::default()).collect(),
            }),
            arrived: EventFd::new(EFD_NONBLOCK)?,
            inline_handler: Mutex::default(),
        }))
    }

    /// Has the queue served on this thread, as far as nothing has to be waited for;
    /// whether its own thread need not be woken.
    pub fn work(&self, cause: Cause) -> bool {
        let inline_handler = lock(&self.inline_handler).clone();
        inline_handler.is_some_and(|handler| handler.work(cause))
    }

    /// Takes a received reply, which completes its request at once if that needs no waiting.
    ///
    /// # Errors
    /// It is no reply to any chunk that was sent.
    pub fn put(&self, reply: ChunkReply) -> Result<(), String> {
        let mut waiting = lock(&self.waiting);
        waiting.accept(&reply)?;
        // The lock is held meanwhile: what has ended is not written to any more.
        let landed = waiting.land(&reply);
        let ChunkReply {
            chunk,
            status,
            data,
        } = reply;
        let first = waiting.received.is_empty();
        waiting.received.push_back(ReceivedReply {
            chunk,
            status,
            landed,
            data: match landed {
                true => Vec::new(),
                false => data.into_owned(),
            },
        });
        drop(waiting);
        // The thread that learned of the first takes all.
        if !self.work(Cause::Ready(0)) && first {
            // A full counter wakes as well.
            let _ = self.arrived.write(1);
        }
        Ok(())
    }

    fn take(&self) -> Option<ReceivedReply> {
        lock(&self.waiting).received.pop_front()
    }

    /// The oldest, if it has nothing left to be copied.
    fn take_landed(&self) -> Option<ReceivedReply> {
        let mut waiting = lock(&self.waiting);
        let ready = waiting.received.front()?.data.is_empty();
        ready.then(|| waiting.received.pop_front()).flatten()
    }

    fn is_empty(&self) -> bool {
        lock(&self.waiting).received.is_empty()
    }

    /// Says where the data of a slot's request goes; `None` once the request has ended.
    fn set_scatter_list(&self, slot: usize, list: Option<ScatterList>) {
        lock(&self.waiting).slots[slot].scatter_list = list;
    }

    /// A chunk is about to be sent.
    fn expect(&self, chunk: &Chunk) {
        let mut waiting = lock(&self.waiting);
        waiting.slots[chunk.slot as usize].chunks.push(*chunk);
    }
}

/// A request without a completion yet.
struct InFlight {
    request: Request,
    /// What there is to ask, and what of it was asked and answered: bytes of a read
    /// or write, 1 of anything else.
    extent: u64,
    asked: u64,
    answered: u64,
    status: Status,
}

/// One queue's client of a disk on another slice.
pub struct RemoteBlock {
    sender: Arc<dyn ChunkSender>,
    replies: Arc<ReplyQueue>,
    window: u32,
    bytes_in_flight: u32,
    slots: Vec<Option<InFlight>>,
    free: Vec<usize>,
    /// Slots of requests with chunks that were not sent yet, in order.
    unasked: VecDeque<usize>,
    buffer: Vec<u8>,
}

impl RemoteBlock {
    /// One of `clients` of this slice.
    pub fn new(sender: Arc<dyn ChunkSender>, replies: Arc<ReplyQueue>, clients: usize) -> Self {
        let share = WINDOWS_TOTAL / u32::try_from(clients.max(1)).unwrap_or(u32::MAX);
        Self {
            sender,
            replies,
            window: share.clamp(WINDOW_MIN, WINDOW_MAX),
            bytes_in_flight: 0,
            slots: (0..QUEUE_SIZE).map(|_| None).collect(),
            free: (0..usize::from(QUEUE_SIZE)).rev().collect(),
            unasked: VecDeque::new(),
            buffer: Vec::new(),
        }
    }

    /// Sends chunks, as many as may be in flight.
    fn ask(&mut self, memory: &DeviceMemory) {
        while let Some(slot) = self.unasked.front().copied() {
            let Some(in_flight) = self.slots[slot].as_mut() else {
                self.unasked.pop_front();
                continue;
            };
            let request = &in_flight.request;
            let moves = request.moves_data();
            let mut chunk = Chunk {
                slot: slot as u32,
                position: in_flight.asked,
                operation: request.operation,
                durable: request.durable,
                offset: request.offset,
                // A range that is discarded or zeroed has 32 MiB at most.
                length: request.length as u32,
            };
            if moves {
                let most = CHUNK.min(self.window);
                let left = request.length - in_flight.asked;
                chunk.offset += in_flight.asked;
                chunk.length = left.min(u64::from(most)) as u32;
                if self.bytes_in_flight > 0 && self.bytes_in_flight + chunk.length > self.window {
                    return;
                }
                self.bytes_in_flight += chunk.length;
            }
            self.buffer.clear();
            if request.operation == Operation::Write {
                self.buffer.resize(chunk.length as usize, 0);
                copy_out(memory, &request.data, in_flight.asked, &mut self.buffer);
            }
            in_flight.asked += if moves { u64::from(chunk.length) } else { 1 };
            if in_flight.asked == in_flight.extent {
                self.unasked.pop_front();
            }
            self.replies.expect(&chunk);
            self.sender.ask(&chunk, &self.buffer);
        }
    }

    /// Accounts for a reply; returns the completion of its request if it was the last.
    fn account(&mut self, memory: &DeviceMemory, received: ReceivedReply) -> Option<Completion> {
        let ReceivedReply {
            chunk,
            status,
            landed,
            data,
        } = received;
        let slot = chunk.slot as usize;
        let in_flight = self.slots.get_mut(slot).and_then(Option::as_mut)?;
        let moves = in_flight.request.moves_data();
        if moves {
            self.bytes_in_flight = self.bytes_in_flight.saturating_sub(chunk.length);
        }
        in_flight.answered += if moves { u64::from(chunk.length) } else { 1 };
        if status != Status::Ok {
            in_flight.status = status;
        } else if in_flight.request.operation == Operation::Read && !landed {
            let segments = &in_flight.request.data;
            if copy_in(memory, segments, chunk.position, &data) != data.len() {
                in_flight.status = Status::IoError;
            }
        }
        if in_flight.answered < in_flight.extent {
            return None;
        }
        let InFlight {
            request, status, ..
        } = self.slots[slot].take()?;
        self.replies.set_scatter_list(slot, None);
        self.free.push(slot);
        Some(Completion { request, status })
    }
}

impl BlockBackend for RemoteBlock {
    fn descriptor(&self) -> Option<RawFd> {
        Some(self.replies.arrived.as_raw_fd())
    }

    /// None when the machine is over, because no reply comes then.
    fn in_flight(&self) -> usize {
        match self.sender.is_over() {
            true => 0,
            false => self.slots.len() - self.free.len(),
        }
    }

    fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    fn begin(&mut self, memory: &Arc<DeviceMemory>, request: Request) -> Option<Completion> {
        let Some(slot) = self.free.pop() else {
            let status = Status::IoError;
            return Some(Completion { request, status });
        };
        let scatter_list = (request.operation == Operation::Read).then(|| ScatterList {
            memory: memory.clone(),
            data: request.data.clone(),
        });
        self.replies.set_scatter_list(slot, scatter_list);
        self.slots[slot] = Some(InFlight {
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

    fn next_completion(&mut self, memory: &DeviceMemory) -> Option<Completion> {
        while let Some(received) = self.replies.take() {
            let completion = self.account(memory, received);
            self.ask(memory);
            if completion.is_some() {
                return completion;
            }
        }
        None
    }

    fn set_inline_handler(&mut self, handler: InlineHandler) {
        *lock(&self.replies.inline_handler) = Some(handler);
    }

    /// A request of one chunk.
    fn begins_inline_max(&self) -> u64 {
        u64::from(CHUNK)
    }

    /// Not while a request has chunks that were not sent yet: then a reply makes room for
    /// more, whose pages may have to be waited for.
    fn completes_inline(&self) -> bool {
        self.unasked.is_empty()
    }

    fn next_inline_completion(&mut self, memory: &DeviceMemory) -> Option<Completion> {
        while let Some(received) = self.replies.take_landed() {
            if let Some(completion) = self.account(memory, received) {
                return Some(completion);
            }
        }
        None
    }

    fn has_results(&self) -> bool {
        !self.replies.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::borrow::Cow;
    use weft_guest_memory::Ram;
    use weft_test_support::Random;
    use weft_virtio::ring::Chain;

    /// Keeps the chunks that were sent.
    #[derive(Default)]
    struct Kept(Mutex<Vec<Chunk>>);

    impl ChunkSender for Kept {
        fn ask(&self, chunk: &Chunk, _: &[u8]) {
            lock(&self.0).push(*chunk);
        }

        fn is_over(&self) -> bool {
            false
        }
    }

    fn request(operation: Operation, length: u32) -> Request {
        let data = match operation {
            Operation::Read | Operation::Write => vec![Segment {
                address: 0x1000,
                length,
            }],
            _ => Vec::new(),
        };
        Request {
            chain: Chain::default(),
            operation,
            offset: 0,
            length: length.into(),
            data,
            durable: false,
        }
    }

    fn damage(chunk: &mut Chunk, random: &mut Random) {
        match random.below(6) {
            0 => chunk.slot ^= 1 << random.below(32),
            1 => chunk.position ^= 512 << random.below(20),
            2 => chunk.offset ^= 512 << random.below(20),
            3 => chunk.length ^= 1 << random.below(32),
            4 => chunk.durable = !chunk.durable,
            _ => chunk.operation = Operation::Flush,
        }
    }

    /// Replies that are damaged, repeated or of another size are refused and change nothing:
    /// each request ends once, when the true ones came.
    #[test]
    fn only_replies_to_chunks_that_were_sent_are_accepted() {
        let ram = Ram::new(8 << 20).unwrap();
        let memory = Arc::new(DeviceMemory::whole(&ram));
        let mut random = Random::new(7);
        let operations = [Operation::Read, Operation::Write, Operation::Discard];
        for _ in 0..200 {
            let sender = Arc::new(Kept::default());
            let replies = ReplyQueue::new().unwrap();
            let mut client = RemoteBlock::new(sender.clone(), replies.clone(), 1);
            let begun = 1 + random.below(5) as usize;
            for _ in 0..begun {
                let operation = operations[random.below(3) as usize];
                let length = 512 * (1 + random.below(512) as u32);
                assert!(client.begin(&memory, request(operation, length)).is_none());
            }
            let mut ended = 0;
            while client.in_flight() > 0 {
                let chunk = {
                    let mut sent = lock(&sender.0);
                    let at = random.below(sent.len() as u64) as usize;
                    sent.swap_remove(at)
                };
                let length = match chunk.operation {
                    Operation::Read => chunk.length as usize,
                    _ => 0,
                };
                let reply = |chunk, length| ChunkReply {
                    chunk,
                    status: Status::Ok,
                    data: Cow::Owned(vec![1; length]),
                };
                let mut damaged = chunk;
                damage(&mut damaged, &mut random);
                // Another chunk that was sent is no damage.
                if !lock(&sender.0).contains(&damaged) {
                    assert!(replies.put(reply(damaged, length)).is_err());
                }
                assert_eq!(replies.put(reply(chunk, length)), Ok(()));
                assert!(replies.put(reply(chunk, length)).is_err());
                while let Some(completion) = client.next_completion(&memory) {
                    assert_eq!(completion.status, Status::Ok);
                    ended += 1;
                }
            }
            assert_eq!(ended, begun);
            assert!(lock(&sender.0).is_empty());
        }
    }

    #[test]
    fn data_of_another_size_is_refused() {
        let ram = Ram::new(8 << 20).unwrap();
        let memory = Arc::new(DeviceMemory::whole(&ram));
        for (operation, size) in [(Operation::Read, 511), (Operation::Write, 1)] {
            let sender = Arc::new(Kept::default());
            let replies = ReplyQueue::new().unwrap();
            let mut client = RemoteBlock::new(sender.clone(), replies.clone(), 1);
            assert!(client.begin(&memory, request(operation, 512)).is_none());
            let chunk = lock(&sender.0)[0];
            let reply = ChunkReply {
                chunk,
                status: Status::Ok,
                data: Cow::Owned(vec![0; size]),
            };
            assert!(
                replies
                    .put(reply)
                    .unwrap_err()
                    .contains("bytes to a disk request")
            );
        }
    }
}
