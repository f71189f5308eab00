//! A window of requests to another slice: several of them are under way at once.

use std::collections::VecDeque;
use std::io;
use std::time::Duration;

use super::message::SliceMessage;
use super::registers::RemoteAccess;

/// Requests of one window that may be under way.
pub(super) const UNDER_WAY_MAX: usize = 8;
/// Longest wait for a disk.
pub(super) const DISK_WAIT: Duration = Duration::from_secs(600);

/// Sends requests to one slice, and lets [`UNDER_WAY_MAX`] of them be without a reply. A reply
/// that is an error is returned by a later call.
pub(super) struct Window {
    way: RemoteAccess,
    slice: usize,
    /// Requests without a reply, the oldest first.
    tickets: VecDeque<u64>,
}

impl Window {
    pub fn new(way: RemoteAccess, slice: usize) -> Self {
        Self {
            way,
            slice,
            tickets: VecDeque::new(),
        }
    }

    /// Sends one more, when there is room.
    pub fn send<'a>(&mut self, message: impl FnOnce(u64) -> SliceMessage<'a>) -> io::Result<()> {
        if self.tickets.len() == UNDER_WAY_MAX {
            self.wait_for_oldest()?;
        }
        let ticket = self.way.pending.open(self.slice);
        self.tickets.push_back(ticket);
        self.way.peers.send(self.slice, &message(ticket));
        Ok(())
    }

    fn wait_for_oldest(&mut self) -> io::Result<()> {
        match self.tickets.pop_front() {
            Some(ticket) => outcome(self.way.pending.wait(ticket, DISK_WAIT)),
            None => Ok(()),
        }
    }

    /// Waits for all replies.
    pub fn finish(&mut self) -> io::Result<()> {
        while !self.tickets.is_empty() {
            self.wait_for_oldest()?;
        }
        Ok(())
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // Replies that still come are for nobody.
        for ticket in self.tickets.drain(..) {
            self.way.pending.wait(ticket, Duration::ZERO);
        }
    }
}

/// What a reply says: an error number, or zero; none if the slice is lost or does not reply.
pub(super) fn outcome(answer: Option<u64>) -> io::Result<()> {
    match answer {
        Some(0) => Ok(()),
        Some(error) => Err(io::Error::from_raw_os_error(error as i32)),
        None => Err(io::ErrorKind::NotConnected.into()),
    }
}
