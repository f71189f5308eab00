//! Frames over a connected stream socket, each after its length in four bytes,
//! most significant first: what passt speaks, and QEMU's `-netdev stream`.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;

use vm_memory::GuestMemoryMmap;

use super::{FRAME_MAX, HEADER, Link};
use crate::virtio::ring::{Segment, total};
use crate::virtio::vectors::{IoVector, vectors};

const LENGTH: usize = 4;
/// Room for two of the largest frames, so that one read brings many small ones.
const INPUT: usize = 2 * (LENGTH + FRAME_MAX);

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

    fn fill(&mut self) -> io::Result<()> {
        self.input.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        match self.socket.read(&mut self.input[self.end..])? {
            0 => Err(ErrorKind::UnexpectedEof.into()),
            count => {
                self.end += count;
                Ok(())
            }
        }
    }
}

impl Link for Stream {
    fn descriptor(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    fn receive(&mut self, frame: &mut [u8]) -> io::Result<Option<usize>> {
        loop {
            if let Some(found) = self.next_frame()? {
                let length = found.len();
                if let Some(room) = frame.get_mut(..HEADER + length) {
                    let (header, body) = room.split_at_mut(HEADER);
                    header.fill(0);
                    body.copy_from_slice(found);
                }
                self.start += LENGTH + length;
                return Ok(Some(HEADER + length));
            }
            match self.fill() {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
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

    fn send(&mut self, memory: &GuestMemoryMmap, frame: &[Segment]) -> io::Result<()> {
        self.flush()?;
        let length = total(frame) - HEADER as u64;
        let prefix = (length as u32).to_be_bytes();
        let mut list = vec![IoVector::of(&prefix)];
        list.extend(vectors(memory, frame, HEADER as u64));
        let count = list.len().min(libc::UIO_MAXIOV as usize) as libc::c_int;
        // SAFETY: the first vector is `prefix`, the others are guest RAM, mapped
        // while `memory` is borrowed; all are only read.
        let sent = unsafe { libc::writev(self.socket.as_raw_fd(), list.as_ptr().cast(), count) };
        if sent < 0 {
            return Err(io::Error::last_os_error());
        }
        let sent = sent as u64;
        let whole = LENGTH as u64 + length;
        if sent < whole {
            let begun = (sent as usize).min(LENGTH);
            self.output.extend(&prefix[begun..]);
            let skip = HEADER as u64 + sent.saturating_sub(LENGTH as u64);
            let rest = self.output.len();
            self.output
                .resize(rest + (whole - sent) as usize - (LENGTH - begun), 0);
            crate::virtio::ring::copy_out(memory, frame, skip, &mut self.output[rest..]);
        }
        Ok(())
    }
}
