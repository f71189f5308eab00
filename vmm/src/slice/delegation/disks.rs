//! The data of disks between slices.

use std::sync::Arc;

use super::Delegation;
use super::note::{self, Address};
use crate::virtio::block::{Answer, Carry, Job, Piece, Reply, Status};

/// One queue's way to a disk on another slice.
pub(super) struct DiskCarry {
    pub queue: Address,
    /// Who has the disk.
    pub slice: usize,
    pub delegation: Arc<Delegation>,
}

impl Carry for DiskCarry {
    fn ask(&self, piece: &Piece, data: &[u8]) {
        let delegation = &self.delegation;
        if !self.is_at_home() {
            let header = note::ask(self.queue, piece);
            return delegation.peers.send(self.slice, &header, &[data]);
        }
        let asked = delegation.ask_disk(delegation.number, self.queue, *piece, data.to_vec());
        if asked.is_err() {
            let answer = Answer {
                piece: *piece,
                status: Status::IoError,
                data: (&[]).into(),
            };
            delegation.answered(self.queue, answer);
        }
    }

    fn is_over(&self) -> bool {
        self.delegation.peers.is_over()
    }

    fn is_at_home(&self) -> bool {
        self.slice == self.delegation.number
    }
}

/// Gives the answers of a disk that is here to whoever asked.
pub(super) fn reply(device: u8, delegation: Arc<Delegation>) -> Reply {
    Box::new(move |job: &Job, status, data: &[u8]| {
        let queue = Address::new(device, job.queue);
        if job.from != delegation.number {
            let header = note::answered(queue, &job.piece, status);
            return delegation.peers.send(job.from, &header, &[data]);
        }
        let answer = Answer {
            piece: job.piece,
            status,
            data: data.into(),
        };
        delegation.answered(queue, answer);
    })
}

impl Delegation {
    /// `from` asks for a piece of a disk that is here.
    ///
    /// # Errors
    /// It is not here, or that was more than a slice may ask.
    pub(super) fn ask_disk(
        &self,
        from: usize,
        queue: Address,
        piece: Piece,
        data: Vec<u8>,
    ) -> Result<(), String> {
        let server = self.read(|table| table.servers.get(&queue.device).cloned());
        let server = server.ok_or("it asks for a disk that is not here")?;
        let job = Job {
            from,
            queue: queue.index(),
            piece,
            data,
        };
        match server.ask(job) {
            true => Ok(()),
            false => Err("it asks more of a disk than it may".into()),
        }
    }

    /// The answer for a queue that is served here.
    pub(super) fn answered(&self, queue: Address, answer: Answer<'_>) {
        if let Some(inbox) = self.read(|table| table.inboxes.get(&queue).cloned()) {
            inbox.put(answer);
        }
    }
}
