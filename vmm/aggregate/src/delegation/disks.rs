//! The data of disks between slices.

use std::sync::Arc;

use weft_virtio::block::{Carry, Job, Piece, Reply};

use super::Delegation;
use crate::message::device::{self, Address};

/// One queue's way to a disk on another slice.
pub(super) struct DiskCarry {
    pub queue: Address,
    /// Who has the disk.
    pub slice: usize,
    pub delegation: Arc<Delegation>,
}

impl Carry for DiskCarry {
    fn ask(&self, piece: &Piece, data: &[u8]) {
        let header = device::ask(self.queue, piece);
        self.delegation
            .peers
            .send_frame(self.slice, &header, &[data]);
    }

    fn is_over(&self) -> bool {
        self.delegation.peers.is_over()
    }
}

/// Sends the answers of a disk that is here.
pub(super) fn reply(device: u8, delegation: Arc<Delegation>) -> Reply {
    Box::new(move |job: &Job, status, data: &[u8]| {
        let queue = Address::new(device, job.queue);
        let header = device::answered(queue, &job.piece, status);
        delegation.peers.send_frame(job.from, &header, &[data]);
    })
}
