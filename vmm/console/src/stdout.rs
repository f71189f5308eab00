//! Standard output, written to without blocking.
//!
//! The parent process shares the open file description, so O_NONBLOCK cannot be set. Each
//! write follows a poll that reports room, and is no longer than what fits then.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// Bytes that a writable pipe takes without blocking (pipe(7)).
const PIECE: usize = libc::PIPE_BUF;
/// Bytes that a writable terminal takes: it is writable while fewer wait in its driver
/// (WAKEUP_CHARS).
const TERMINAL_PIECE: usize = 256;

/// Standard output, and the bytes that wait for it.
pub(super) struct StandardOutput {
    to: OwnedFd,
    piece: usize,
    waiting: Vec<u8>,
    /// A write failed: the reader has gone.
    broken: bool,
}

impl StandardOutput {
    pub(super) fn new(to: OwnedFd) -> StandardOutput {
        let terminal = io::IsTerminal::is_terminal(&to);
        StandardOutput {
            to,
            piece: if terminal { TERMINAL_PIECE } else { PIECE },
            waiting: Vec::new(),
            broken: false,
        }
    }

    /// The descriptor, if bytes wait for it.
    pub(super) fn waits(&self) -> Option<BorrowedFd<'_>> {
        (!self.waiting.is_empty()).then(|| self.to.as_fd())
    }

    /// Queues bytes, and writes what fits.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.waiting.extend(bytes);
        self.flush();
    }

    /// Writes the waiting bytes that fit.
    pub(super) fn flush(&mut self) {
        let mut done = 0;
        while let Some(piece) = self.waiting.get(done..).filter(|rest| !rest.is_empty())
            && !self.broken
            && self.has_room()
        {
            let piece = piece.get(..self.piece).unwrap_or(piece);
            match nix::unistd::write(&self.to, piece) {
                Ok(count) => done += count,
                Err(nix::Error::EINTR) => {}
                Err(nix::Error::EAGAIN) => break,
                Err(_) => self.broken = true,
            }
        }
        if self.broken {
            self.waiting.clear();
        } else {
            self.waiting.drain(..done);
        }
    }

    /// Whether a write would not block; true also if the reader has gone.
    fn has_room(&self) -> bool {
        let mut polled = [PollFd::new(self.to.as_fd(), PollFlags::POLLOUT)];
        poll(&mut polled, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;

    use super::*;

    fn pipe() -> (File, StandardOutput) {
        let (reader, writer) = nix::unistd::pipe().unwrap();
        (reader.into(), StandardOutput::new(writer))
    }

    #[test]
    fn what_nobody_reads_waits_and_holds_nobody_up() {
        let (mut reader, mut output) = pipe();
        let text: Vec<u8> = (0..300_000_u32).map(|byte| (byte / 7) as u8).collect();
        for piece in text.chunks(10_000) {
            output.push(piece);
        }
        assert!(output.waits().is_some());
        let mut got = Vec::new();
        let mut piece = [0; 1000];
        while output.waits().is_some() {
            let count = reader.read(&mut piece).unwrap();
            got.extend(&piece[..count]);
            output.flush();
        }
        drop(output);
        reader.read_to_end(&mut got).unwrap();
        assert!(got == text);
    }

    #[test]
    fn nothing_waits_for_a_reader_that_has_gone() {
        let (reader, mut output) = pipe();
        output.push(&[0; 200_000]);
        drop(reader);
        output.flush();
        assert!(output.waits().is_none());
        output.push(b"more");
        assert!(output.waits().is_none());
    }
}
