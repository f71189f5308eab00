//! Outgoing messages. Their order is fixed under the lock of all guest memory; a thread that
//! does not hold the lock seals the frames and passes them to the kernel.
//!
//! ```text
//!  step ──message, copy of the page──▶ Outbox ──unlock──▶ Links ──one thread──▶ Transport
//!         (under the lock)             (under the lock)   (a queue for each link)
//! ```
//!
//! Invariants:
//!
//! - Exactly one thread at a time sends on a link. It continues until the link's queue is
//!   empty, so it also sends frames that other threads queue meanwhile.
//! - Frames of one link leave in the order in which their messages were put into the outbox,
//!   because they enter the link's queue before the unlock.
//! - The bytes of a page are copied under the lock, when the page is sent. A later write to
//!   the page changes no frame.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use weft_dsm::message::{self, Run};
use weft_dsm::{Message, NODES_MAX, NodeId, PAGE_BYTES};
use weft_wire::Header;

/// Buffers of sent frames that a link keeps for the next ones.
const SPARE_MAX: usize = 4;
/// A larger buffer is freed after use: 16 pages.
const SPARE_BYTES_MAX: usize = 16 * PAGE_BYTES;

/// Sends frames to other slices. Never blocks.
pub trait Transport: Send + Sync {
    /// Sends a frame to `to`, in order with all others to it. The owner of the links handles
    /// errors.
    fn transmit(&self, to: NodeId, header: &Header, parts: &[&[u8]]);
}

/// Equal messages about consecutive pages, with the pages' bytes.
struct Batch {
    run: Run,
    bytes: Vec<u8>,
}

/// Messages of the steps since the lock was taken.
#[derive(Default)]
pub(super) struct Outbox {
    batches: Vec<(NodeId, Batch)>,
    /// Buffers of frames that were sent.
    spare: Vec<Vec<u8>>,
}

impl Outbox {
    /// Appends a message for `to`, with a copy of `page` if the message carries one.
    pub fn put(&mut self, to: NodeId, message: Message, page: Option<&[u8]>) {
        debug_assert_eq!(message.carries_bytes(), page.is_some());
        let mut batches = self.batches.iter_mut().rev();
        if let Some((_, last)) = batches.find(|(node, _)| *node == to)
            && last.run.extend(&message)
        {
            last.bytes.extend_from_slice(page.unwrap_or_default());
            return;
        }
        let mut bytes = page.and_then(|_| self.spare.pop()).unwrap_or_default();
        bytes.extend_from_slice(page.unwrap_or_default());
        let run = Run::one(message);
        self.batches.push((to, Batch { run, bytes }));
    }
}

/// The batches of one link.
#[derive(Default)]
struct Link {
    waiting: VecDeque<Batch>,
    spare: Vec<Vec<u8>>,
    /// A thread is sending.
    sending: bool,
}

/// One queue for each other slice.
pub(super) struct Links([Mutex<Link>; NODES_MAX]);

impl Default for Links {
    fn default() -> Self {
        Self(std::array::from_fn(|_| Mutex::default()))
    }
}

impl Links {
    /// Queues the outbox's batches for [`Links::send`]. Under the lock, which orders the
    /// queues. Returns the receiving nodes, a bit for each.
    pub fn queue(&self, outbox: &mut Outbox) -> u32 {
        let mut nodes = 0;
        for (to, batch) in outbox.batches.drain(..) {
            nodes |= 1 << to.index();
            let mut link = self.link(to);
            link.waiting.push_back(batch);
            if let Some(spare) = link.spare.pop()
                && outbox.spare.len() < SPARE_MAX
            {
                outbox.spare.push(spare);
            }
        }
        nodes
    }

    /// Sends the queued batches for `nodes`, if no other thread does. Without the lock.
    /// Returns how many pages this thread sent.
    pub fn send(&self, nodes: u32, transport: &dyn Transport) -> u64 {
        let bits = (0..NODES_MAX as u8).filter(|node| nodes & 1 << node != 0);
        bits.map(|node| self.send_to(NodeId(node), transport)).sum()
    }

    fn send_to(&self, to: NodeId, transport: &dyn Transport) -> u64 {
        let mut sent_pages = 0;
        let mut link = self.link(to);
        if link.sending {
            return 0;
        }
        while let Some(Batch { run, mut bytes }) = link.waiting.pop_front() {
            link.sending = true;
            drop(link);
            let header = message::encode(&run);
            match bytes.is_empty() {
                true => transport.transmit(to, &header, &[]),
                false => transport.transmit(to, &header, &[&bytes]),
            }
            sent_pages += (bytes.len() / PAGE_BYTES) as u64;
            bytes.clear();
            link = self.link(to);
            if (1..=SPARE_BYTES_MAX).contains(&bytes.capacity()) && link.spare.len() < SPARE_MAX {
                link.spare.push(bytes);
            }
        }
        link.sending = false;
        sent_pages
    }

    fn link(&self, to: NodeId) -> MutexGuard<'_, Link> {
        let link = &self.0[to.index()];
        link.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicBool, Ordering};
    use weft_dsm::{Access, Body, Content, Page, Right};

    fn get(page: u64) -> Message {
        Message {
            page: Page(page),
            generation: 0,
            body: Body::Get {
                access: Access::Read,
                ahead: false,
            },
        }
    }

    fn data(page: u64) -> Message {
        let body = Body::Data {
            right: Right::Shared,
            content: Content::Bytes,
            migratory: false,
        };
        Message { body, ..get(page) }
    }

    /// The receiver, the first page, the number of pages, and the bytes.
    type Sent = (NodeId, u64, u16, Vec<u8>);

    /// Keeps what was sent; finds two threads at work.
    #[derive(Default)]
    struct Kept {
        frames: Mutex<Vec<Sent>>,
        busy: [AtomicBool; 2],
    }

    impl Transport for Kept {
        fn transmit(&self, to: NodeId, header: &Header, parts: &[&[u8]]) {
            let busy = &self.busy[to.index()];
            assert!(!busy.swap(true, Ordering::SeqCst), "two send to {to}");
            let frame = (to, header.words[0], header.count, parts.concat());
            self.frames.lock().unwrap().push(frame);
            std::thread::yield_now();
            busy.store(false, Ordering::SeqCst);
        }
    }

    #[test]
    fn equal_messages_about_consecutive_pages_are_one_frame() {
        let (links, kept) = (Links::default(), Kept::default());
        let mut outbox = Outbox::default();
        let page = |byte| [byte; PAGE_BYTES];
        outbox.put(NodeId(1), data(7), Some(&page(1)));
        outbox.put(NodeId(0), get(8), None);
        outbox.put(NodeId(1), data(8), Some(&page(2)));
        outbox.put(NodeId(1), get(9), None);
        let nodes = links.queue(&mut outbox);
        assert_eq!((nodes, links.send(nodes, &kept)), (0b11, 2));
        let frames = kept.frames.lock().unwrap();
        let both = [page(1), page(2)].concat();
        assert_eq!(
            *frames,
            [
                (NodeId(0), 8, 1, Vec::new()),
                (NodeId(1), 7, 2, both),
                (NodeId(1), 9, 1, Vec::new())
            ]
        );
    }

    /// The bytes are those of the moment when the page was given away.
    #[test]
    fn a_frame_has_the_bytes_that_the_page_had() {
        let (links, kept) = (Links::default(), Kept::default());
        let mut outbox = Outbox::default();
        let mut page = [3; PAGE_BYTES];
        outbox.put(NodeId(1), data(7), Some(&page));
        page.fill(4);
        links.send(links.queue(&mut outbox), &kept);
        assert_eq!(kept.frames.lock().unwrap()[0].3, [3; PAGE_BYTES]);
    }

    /// Threads that queue under one lock and send after it: each link's order is that of
    /// the lock, one thread at a time is at a link, and nothing stays behind.
    #[test]
    fn frames_leave_in_the_order_of_the_lock() {
        const THREADS: u64 = 4;
        const ROUNDS: u64 = 300;
        let (links, kept) = (Links::default(), Kept::default());
        let state = Mutex::new((Outbox::default(), 0));
        let barrier = Barrier::new(THREADS as usize);
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    barrier.wait();
                    for _ in 0..ROUNDS {
                        let mut state = state.lock().unwrap();
                        let (outbox, next) = &mut *state;
                        // Every other page: no two are a run.
                        *next += 2;
                        outbox.put(NodeId(0), get(*next), None);
                        outbox.put(NodeId(1), get(*next), None);
                        let nodes = links.queue(outbox);
                        drop(state);
                        links.send(nodes, &kept);
                    }
                });
            }
        });
        let frames = kept.frames.lock().unwrap();
        for node in [NodeId(0), NodeId(1)] {
            let sent = frames.iter().filter(|(to, ..)| *to == node);
            let pages: Vec<u64> = sent.map(|(_, page, ..)| *page).collect();
            assert!(
                pages
                    .iter()
                    .copied()
                    .eq((1..=THREADS * ROUNDS).map(|n| 2 * n))
            );
        }
    }
}
