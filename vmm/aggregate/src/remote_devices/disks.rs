//! The data of disks between slices.

use std::sync::Arc;

use weft_virtio::block::{Carry, Job, Piece, Reply};

use super::RemoteDevices;
use crate::message::device::{self, Address};

/// One queue's way to a disk on another slice.
pub(super) struct DiskCarry {
    pub queue: Address,
    /// Who has the disk.
    pub slice: usize,
    pub remote: Arc<RemoteDevices>,
}

impl Carry for DiskCarry {
    fn ask(&self, piece: &Piece, data: &[u8]) {
        let header = device::ask(self.queue, piece);
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
        let header = device::answered(queue, &job.piece, status);
        remote.peers.send_frame(job.from, &header, &[data]);
    })
}
