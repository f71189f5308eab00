//! Disks of other slices.
//!
//! ```text
//!  slice that serves a queue                     slice that has the disk
//!  BlockHandler ── RemoteBlock ──── chunks ────▶ Server ── Disk
//!                  ReplyQueue  ◀─── replies ────  threads
//! ```
//!
//! | file | holds |
//! | --- | --- |
//! | `client` | the back end of a queue whose disk is on another slice |
//! | `server` | a disk that is here, for other slices |

mod client;
mod server;

use std::io;
use std::sync::Arc;

use weft_virtio::block::{Block, QUEUE_SIZE};

use super::RemoteDevices;
use super::queue_placement::QueuePlacement;
use crate::message::chunk::{Chunk, ChunkReply};
use crate::message::device::{self, Address};

pub use client::{ChunkSender, RemoteBlock, ReplyQueue};
pub(super) use server::{Job, Server};

/// Sends the chunks of one queue to the slice that has the disk.
struct QueueSender {
    queue: Address,
    slice: usize,
    remote: Arc<RemoteDevices>,
}

impl ChunkSender for QueueSender {
    fn ask(&self, chunk: &Chunk, data: &[u8]) {
        let header = device::ask(self.queue, chunk);
        self.remote.peers.send_frame(self.slice, &header, &[data]);
    }

    fn is_over(&self) -> bool {
        self.remote.peers.is_over()
    }
}

impl RemoteDevices {
    /// The back ends of those queues of another slice's disk that this slice may serve. It
    /// has `clients` remote block clients in all.
    ///
    /// # Errors
    /// No descriptors left.
    pub fn block_clients(
        self: &Arc<Self>,
        device: u8,
        placement: &QueuePlacement,
        clients: usize,
    ) -> io::Result<Vec<Option<RemoteBlock>>> {
        let client = |group| {
            if !placement.may_serve(self.number, group) {
                return Ok(None);
            }
            let queue = Address::new(device, group);
            let replies = ReplyQueue::new()?;
            self.write(|table| table.replies.insert(queue, replies.clone()));
            let sender = QueueSender {
                queue,
                slice: placement.owner(),
                remote: self.clone(),
            };
            Ok(Some(RemoteBlock::new(Arc::new(sender), replies, clients)))
        };
        (0..placement.groups()).map(client).collect()
    }

    /// Has other slices use a disk that is here, if any of them serves its queues.
    ///
    /// # Errors
    /// No thread.
    pub fn serve_disk(
        self: &Arc<Self>,
        device: u8,
        placement: &QueuePlacement,
        block: &Block,
    ) -> io::Result<()> {
        if let Some(disk) = block.disk() {
            self.write(|table| table.disks.insert(device, disk.clone()));
        }
        let others =
            (0..placement.groups()).filter(|group| placement.other_server(*group).is_some());
        // A queue has as many requests as entries, and one long one in chunks.
        let most = others.count() * 2 * usize::from(QUEUE_SIZE);
        if let Some(disk) = block.disk().filter(|_| most > 0) {
            let remote = self.clone();
            let reply = Box::new(move |job: &Job, status, data: &[u8]| {
                let queue = Address::new(device, job.queue);
                let header = device::answered(queue, &job.chunk, status);
                remote.peers.send_frame(job.from, &header, &[data]);
            });
            let server = Server::start(disk.clone(), &format!("disk{device}"), most, reply)?;
            self.write(|table| table.servers.insert(device, server));
        }
        Ok(())
    }

    /// A chunk arrived for a disk that is here.
    pub(super) fn take_chunk(
        &self,
        from: usize,
        address: Address,
        chunk: Chunk,
        data: Vec<u8>,
    ) -> Result<(), String> {
        let server = self.read(|table| table.servers.get(&address.device).cloned());
        let server = server.ok_or("it requests a disk that this node does not have")?;
        let job = Job {
            from,
            queue: address.index(),
            chunk,
            data,
        };
        match server.ask(job) {
            true => Ok(()),
            false => Err("it sends more disk requests than allowed".into()),
        }
    }

    /// A reply arrived for a queue that is served here.
    pub(super) fn take_reply(
        &self,
        from: usize,
        address: Address,
        reply: ChunkReply,
    ) -> Result<(), String> {
        let (replies, owner) = self.read(|table| {
            let owner = table.places.get(address.device);
            let owner = owner.map(QueuePlacement::owner);
            (table.replies.get(&address).cloned(), owner)
        });
        match replies.filter(|_| owner == Some(from)) {
            Some(replies) => replies.put(reply),
            None => Err("it replied to a disk request that it did not get".into()),
        }
    }
}
