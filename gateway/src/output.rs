//! Frames that wait for the switch.
//!
//! Invariant: at most [`FRAMES_MAX`] frames and [`BYTES_MAX`] bytes wait; a frame whose first
//! bytes are out is never dropped.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSlice, Write};
use std::os::unix::net::UnixStream;

use weft_switch::frames::LENGTH;

/// As many as wait at a port of the switch.
const FRAMES_MAX: usize = 1000;
const BYTES_MAX: usize = 16 << 20;
/// Bytes from which on stacks send nothing of their own. Replies still come.
const ROOM: usize = 1 << 20;
/// Frames that are written at once.
const BATCH: usize = 64;

/// The queue, each frame with its length before it.
#[derive(Debug, Default)]
pub struct Output {
    frames: VecDeque<Vec<u8>>,
    bytes: usize,
    /// What of the first frame is out.
    begun: usize,
}

impl Output {
    /// Appends a frame of that many bytes, which `fill` writes. If too many wait the oldest is
    /// dropped.
    pub fn push<R>(&mut self, length: usize, fill: impl FnOnce(&mut [u8]) -> R) -> R {
        let mut frame = vec![0; LENGTH + length];
        frame[..LENGTH].copy_from_slice(&(length as u32).to_be_bytes());
        let result = fill(&mut frame[LENGTH..]);
        self.bytes += frame.len();
        self.frames.push_back(frame);
        while self.frames.len() > FRAMES_MAX || self.bytes > BYTES_MAX {
            let oldest = usize::from(self.begun > 0);
            let dropped = self.frames.remove(oldest).unwrap_or_default();
            self.bytes -= dropped.len();
        }
        result
    }

    /// For a connection that is new: what waited is sent from its first byte on, behind this
    /// frame.
    pub fn restart(&mut self, first: &[u8]) {
        self.begun = 0;
        let waited = std::mem::take(self);
        self.push(first.len(), |frame| frame.copy_from_slice(first));
        self.bytes += waited.bytes;
        self.frames.extend(waited.frames);
    }

    /// Whether a stack may send something of its own.
    pub fn has_room(&self) -> bool {
        self.bytes < ROOM
    }

    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Writes what the socket takes; what it does not take waits.
    ///
    /// # Errors
    /// It is closed, or fails.
    pub fn flush(&mut self, mut socket: &UnixStream) -> io::Result<()> {
        while let Some(first) = self.frames.front() {
            let mut pieces = vec![IoSlice::new(&first[self.begun..])];
            let others = self.frames.iter().skip(1).take(BATCH - 1);
            pieces.extend(others.map(|frame| IoSlice::new(frame)));
            match socket.write_vectored(&pieces) {
                Ok(count) => self.take_off(count),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn take_off(&mut self, count: usize) {
        self.begun += count;
        while let Some(first) = self.frames.front()
            && self.begun >= first.len()
        {
            self.begun -= first.len();
            self.bytes -= first.len();
            self.frames.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    fn push(output: &mut Output, length: usize, byte: u8) {
        output.push(length, |frame| frame.fill(byte));
    }

    fn check(output: &Output) {
        let bytes: usize = output.frames.iter().map(Vec::len).sum();
        assert_eq!(bytes, output.bytes);
        assert!(bytes <= BYTES_MAX && output.frames.len() <= FRAMES_MAX);
    }

    #[test]
    fn the_oldest_that_is_not_begun_is_dropped() {
        let (near, mut far) = UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        let mut output = Output::default();
        // More than a socket takes.
        for number in 0..40 {
            push(&mut output, 50_000, number);
        }
        output.flush(&near).unwrap();
        assert!(output.begun > 0);
        let begun = output.frames[0][LENGTH];
        for _ in 0..FRAMES_MAX {
            push(&mut output, 50_000, 200);
            check(&output);
        }
        assert_eq!(output.frames[0][LENGTH], begun);
        assert_eq!(output.frames[1][LENGTH], 200);
        assert!(!output.has_room());
        // What arrives is whole frames.
        let reader = std::thread::spawn(move || {
            let (mut length, mut frames) = ([0; LENGTH], Vec::new());
            while far.read_exact(&mut length).is_ok() {
                let mut frame = vec![0; u32::from_be_bytes(length) as usize];
                far.read_exact(&mut frame).unwrap();
                assert!(frame.iter().all(|byte| *byte == frame[0]));
                frames.push(frame[0]);
            }
            frames
        });
        near.set_nonblocking(false).unwrap();
        output.flush(&near).unwrap();
        assert!(output.is_empty());
        assert_eq!(output.bytes, 0);
        drop(near);
        let frames = reader.join().unwrap();
        assert_eq!(
            frames[..=usize::from(begun)],
            (0..=begun).collect::<Vec<u8>>()
        );
        assert!(
            frames[usize::from(begun) + 1..]
                .iter()
                .all(|byte| *byte == 200)
        );
    }

    #[test]
    fn a_new_connection_gets_whole_frames_behind_the_announcement() {
        let (near, _far) = UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        let mut output = Output::default();
        for number in 0..40 {
            push(&mut output, 50_000, number);
        }
        output.flush(&near).unwrap();
        let waited = output.frames.len();
        output.restart(&[7; 42]);
        check(&output);
        assert_eq!((output.begun, output.frames.len()), (0, waited + 1));
        assert_eq!(output.frames[0], [&[0, 0, 0, 42][..], &[7; 42]].concat());
        assert_eq!(output.frames[1].len(), LENGTH + 50_000);
    }
}
