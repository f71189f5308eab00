//! What the switch says: JSON lines on standard output, and sentences on standard error.
//! Neither waits for its reader: what does not fit is left out.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::Serialize;
use weft_wire::keys::PublicKey;

use crate::core::{Counters, Totals};

/// Bytes that wait for the reader of standard output.
const WAITING_MAX: usize = 1 << 20;
/// A pipe that is writable takes as much without a wait (`PIPE_BUF`).
const PIECE: usize = 4096;
/// Sentences on standard error in [`PERIOD`]: strangers and machines can cause them.
const SENTENCES: usize = 10;
const PERIOD: Duration = Duration::from_secs(10);

/// A line on standard output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Report {
    /// The switch runs.
    Listening {
        /// Where other switches dial in.
        address: SocketAddr,
        /// By which peers know it.
        key: PublicKey,
        /// Of its tap device, if it has one: the largest frame without the header, bytes.
        #[serde(skip_serializing_if = "Option::is_none")]
        mtu: Option<u32>,
    },
    /// There is a link to a peer.
    Up(PublicKey),
    /// There is no link to a peer any more.
    Down {
        /// The peer.
        key: PublicKey,
        /// What ended it.
        why: String,
    },
    /// An order cannot be carried out, or the switch does not start.
    Error(String),
    /// What was asked for.
    Counters {
        totals: Totals,
        /// Addresses that are known.
        addresses: usize,
        /// Frames that wait.
        waiting: usize,
        /// Connections that were turned away.
        strangers: u64,
        machines: Vec<MachineReport>,
        peers: Vec<PeerReport>,
    },
}

/// The counters of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MachineReport {
    /// As `02:00:00:00:00:01`.
    pub addresses: Vec<String>,
    /// Frames that wait for it.
    pub waiting: usize,
    #[serde(flatten)]
    pub counters: Counters,
}

/// The counters of a peer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PeerReport {
    pub key: PublicKey,
    pub address: String,
    /// It is on the bridge of the tap device.
    pub detour: bool,
    /// Whether there is a link.
    pub up: bool,
    /// Links since the start.
    pub links: u64,
    /// Addresses that are behind it.
    pub addresses: usize,
    /// Frames that wait for it.
    pub waiting: usize,
    #[serde(flatten)]
    pub counters: Counters,
}

/// Standard output, and what waits for it.
#[derive(Debug, Default)]
pub struct Output {
    waiting: VecDeque<u8>,
}

impl Output {
    /// Adds a line.
    pub fn say(&mut self, report: &Report) {
        if let Ok(line) = serde_json::to_vec(report)
            && self.waiting.len() + line.len() < WAITING_MAX
        {
            self.waiting.extend(line);
            self.waiting.push_back(b'\n');
        }
    }

    /// Whether something waits.
    pub fn waits(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Writes while that needs no wait.
    ///
    /// # Errors
    /// Its reader is gone.
    pub fn flush(&mut self, output: BorrowedFd<'_>) -> io::Result<()> {
        while self.waits() && is_writable(output) {
            let (piece, _) = self.waiting.as_slices();
            let piece = &piece[..piece.len().min(PIECE)];
            match nix::unistd::write(output, piece) {
                Ok(count) => drop(self.waiting.drain(..count)),
                Err(nix::Error::EINTR) => {}
                Err(nix::Error::EAGAIN) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

fn is_writable(descriptor: BorrowedFd<'_>) -> bool {
    let mut polled = [PollFd::new(descriptor, PollFlags::POLLOUT)];
    matches!(poll(&mut polled, PollTimeout::ZERO), Ok(1))
}

/// Standard error.
#[derive(Debug)]
pub struct Log {
    since: Instant,
    said: usize,
    left_out: u64,
}

impl Log {
    /// With nothing said.
    pub fn new(now: Instant) -> Log {
        Log {
            since: now,
            said: 0,
            left_out: 0,
        }
    }

    /// Says a sentence, unless there were too many of late.
    pub fn say(&mut self, now: Instant, sentence: &str) {
        if now.duration_since(self.since) >= PERIOD {
            let left_out = std::mem::take(&mut self.left_out);
            *self = Log::new(now);
            if left_out > 0 {
                write(&format!("{left_out} more messages were left out"));
            }
        }
        if self.said < SENTENCES {
            self.said += 1;
            write(sentence);
        } else {
            self.left_out += 1;
        }
    }
}

fn write(sentence: &str) {
    let error = io::stderr();
    if is_writable(std::os::fd::AsFd::as_fd(&error)) {
        let mut line = format!("weft switch: {sentence}").into_bytes();
        line.truncate(PIECE - 1);
        line.push(b'\n');
        // Its reader may be gone; the switch goes on.
        let _ = nix::unistd::write(&error, &line);
    }
}
