//! Frames over a connected stream socket, each after its length in four bytes,
//! most significant first: what passt speaks, and QEMU's `-netdev stream`.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;

use weft_guest_memory::DeviceMemory;

use super::{FRAME_MAX, HEADER, Link};
use crate::ring::{Segment, copy_out, total};
use crate::vectors::{IoVector, pieces};

const LENGTH: usize = 4;
/// Bytes that are read ahead of the guest. passt drops what its socket does not
/// take, and then sends a whole window again: so what it sends is read at once,
/// also while the guest has no buffers. As much as Linux lets a TCP window grow.
const INPUT: usize = 6 << 20;
/// Bytes of room below which waiting frames move to the start of the buffer.
const ROOM_MIN: usize = 4 * FRAME_MAX;

/// The connection.
pub struct Stream {
    socket: UnixStream,
    input: Box<[u8]>,
    /// What of `input` was read and not yet given out.
    start: usize,
    end: usize,
    /// The rest of a frame that went out in part: less than one frame.
    output: Vec<u8>,
}

impl Stream {
    /// Over this socket.
    pub fn new(socket: UnixStream) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self {
            socket,
            input: vec![0; INPUT].into(),
            start: 0,
            end: 0,
            output: Vec::new(),
        })
    }

    /// The next whole frame of the input.
    fn next_frame(&self) -> io::Result<Option<&[u8]>> {
        let waiting = &self.input[self.start..self.end];
        let Some((length, rest)) = waiting.split_first_chunk::<LENGTH>() else {
            return Ok(None);
        };
        let length = u32::from_be_bytes(*length) as usize;
        if length > FRAME_MAX {
            let message = format!("a frame of {length} bytes");
            return Err(io::Error::new(ErrorKind::InvalidData, message));
        }
        Ok(rest.get(..length))
    }

    /// Sends a frame of `length` bytes that lies in `pieces`, which are readable;
    /// `copy` copies the rest of it, from that many bytes on.
    fn send_pieces(
        &mut self,
        length: usize,
        pieces: &[IoVector],
        copy: impl FnOnce(usize, &mut [u8]),
    ) -> io::Result<()> {
        self.flush()?;
        let prefix = (length as u32).to_be_bytes();
        let mut list = vec![IoVector::of(&prefix)];
        list.extend(pieces);
        let count = list.len().min(libc::UIO_MAXIOV as usize) as libc::c_int;
        // SAFETY: the first vector is `prefix`, the others are guest RAM or bytes of
        // the caller, which both of them keep in place meanwhile; all are only read.
        let sent = unsafe { libc::writev(self.socket.as_raw_fd(), list.as_ptr().cast(), count) };
        if sent < 0 {
            return Err(io::Error::last_os_error());
        }
        let (sent, whole) = (sent as usize, LENGTH + length);
        if sent < whole {
            let begun = sent.min(LENGTH);
            self.output.extend(&prefix[begun..]);
            let rest = self.output.len();
            self.output
                .resize(rest + (whole - sent) - (LENGTH - begun), 0);
            copy(sent.saturating_sub(LENGTH), &mut self.output[rest..]);
        }
        Ok(())
    }

    /// Reads what there is, as far as there is room.
    fn fill(&mut self) -> io::Result<()> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.input.len() - self.end < ROOM_MIN && self.start > 0 {
            self.input.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        while self.end < self.input.len() {
            match self.socket.read(&mut self.input[self.end..]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.end += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl Link for Stream {
    fn descriptor(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    fn read_ahead(&mut self) -> io::Result<()> {
        self.fill()
    }

    fn receive(&mut self, frame: &mut [u8]) -> io::Result<Option<usize>> {
        if self.next_frame()?.is_none() {
            self.fill()?;
        }
        let Some(found) = self.next_frame()? else {
            return Ok(None);
        };
        let length = found.len();
        if let Some(room) = frame.get_mut(..HEADER + length) {
            let (header, body) = room.split_at_mut(HEADER);
            header.fill(0);
            body.copy_from_slice(found);
        }
        self.start += LENGTH + length;
        Ok(Some(HEADER + length))
    }

    fn flush(&mut self) -> io::Result<()> {
        while !self.output.is_empty() {
            match self.socket.write(&self.output) {
                Ok(sent) => drop(self.output.drain(..sent)),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn send(&mut self, memory: &DeviceMemory, frame: &[Segment]) -> io::Result<()> {
        let length = total(frame) - HEADER as u64;
        let pieces = pieces(memory, frame, HEADER as u64);
        let copy = |skip: usize, rest: &mut [u8]| {
            copy_out(memory, frame, (HEADER + skip) as u64, rest);
        };
        self.send_pieces(length as usize, &pieces.list, copy)
    }

    fn send_bytes(&mut self, frame: &[u8]) -> io::Result<()> {
        let body = frame.get(HEADER..).unwrap_or_default();
        let copy = |skip: usize, rest: &mut [u8]| rest.copy_from_slice(&body[skip..]);
        self.send_pieces(body.len(), &[IoVector::of(body)], copy)
    }
}
