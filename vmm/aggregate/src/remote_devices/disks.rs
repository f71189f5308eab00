//! The data of disks between slices.

use std::sync::Arc;

use weft_virtio::block::{Chunk, ChunkSender, Job, Reply};

use super::RemoteDevices;
use crate::message::device::{self, Address};

/// One queue's way to a disk on another slice.
pub(super) struct RemoteDisk {
    pub queue: Address,
    /// Who has the disk.
    pub slice: usize,
    pub remote: Arc<RemoteDevices>,
}

impl ChunkSender for RemoteDisk {
    fn ask(&self, chunk: &Chunk, data: &[u8]) {
        let header = device::ask(self.queue, chunk);
        self.remote.peers.send_frame(self.slice, &header, &[data]);
    }

    fn is_over(&self) -> bool {
        self.remote.peers.is_over()
    }
}

/// Sends the answers of a disk that is here.
pub(super) fn reply(device: u8, remote: Arc<RemoteDevices>) -> Reply {
    Box::new(move |job: &Job, status, data: &[u8]| {
        let queue = Address::new(device, job.queue);
        let header = device::answered(queue, &job.chunk, status);
        remote.peers.send_frame(job.from, &header, &[data]);
    })
}
