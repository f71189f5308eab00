//! Frames over a connected stream socket, each after its length in four bytes,
//! most significant first: what passt speaks, and QEMU's `-netdev stream`.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Write};
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
    /// Frames that come before what is in `input`, with their headers.
    first: VecDeque<Vec<u8>>,
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
            first: VecDeque::new(),
            start: 0,
            end: 0,
            output: Vec::new(),
        })
    }

    /// The next whole frame of the input.
    fn next_frame(&self) -> io::Result<Option<&[u8]>> {
        self.frame_at(self.start)
    }

    fn frame_at(&self, start: usize) -> io::Result<Option<&[u8]>> {
        let waiting = &self.input[start..self.end];
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

    /// By `read`, which all threads may call: a machine that is saved has another one ask.
    fn read(&mut self) -> io::Result<usize> {
        let room = &mut self.input[self.end..];
        // SAFETY: the bytes are ours alone, and the descriptor is the socket's.
        let read = unsafe {
            libc::read(
                self.socket.as_raw_fd(),
                room.as_mut_ptr().cast(),
                room.len(),
            )
        };
        usize::try_from(read).map_err(|_| io::Error::last_os_error())
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
            match self.read() {
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
        if let Some(first) = self.first.pop_front() {
            if let Some(room) = frame.get_mut(..first.len()) {
                room.copy_from_slice(&first);
            }
            return Ok(Some(first.len()));
        }
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

    fn give_back(&mut self, frame: Option<&[u8]>) -> bool {
        self.first.extend(frame.map(<[u8]>::to_vec));
        self.first.rotate_right(usize::from(frame.is_some()));
        true
    }

    fn waiting(&mut self) -> Vec<Vec<u8>> {
        // What does not come now is lost, as is a frame that is malformed.
        let _ = self.fill();
        let mut all: Vec<Vec<u8>> = self.first.iter().cloned().collect();
        let mut start = self.start;
        while let Ok(Some(frame)) = self.frame_at(start) {
            start += LENGTH + frame.len();
            all.push([&[0; HEADER], frame].concat());
        }
        all
    }

    fn put_first(&mut self, frames: Vec<Vec<u8>>) {
        let after = std::mem::replace(&mut self.first, frames.into());
        self.first.extend(after);
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

#[cfg(test)]
mod tests {
    use super::*;

    fn message(body: u8) -> Vec<u8> {
        [&3_u32.to_be_bytes()[..], &[body; 3]].concat()
    }

    fn frame(body: u8) -> Vec<u8> {
        [&[0; HEADER][..], &[body; 3]].concat()
    }

    fn next(stream: &mut Stream) -> Option<Vec<u8>> {
        let mut room = vec![0; HEADER + FRAME_MAX];
        let length = stream.receive(&mut room).unwrap()?;
        Some(room[..length].to_vec())
    }

    #[test]
    fn what_was_not_used_comes_first_elsewhere() {
        let (near, mut far) = UnixStream::pair().unwrap();
        let mut stream = Stream::new(near).unwrap();
        far.write_all(&[message(1), message(2)].concat()).unwrap();
        let taken = next(&mut stream).unwrap();
        assert!(stream.give_back(Some(&taken)));
        assert!(stream.give_back(None));
        // The last one has come in part only.
        far.write_all(&[&message(3), &message(4)[..5]].concat())
            .unwrap();
        let along = stream.waiting();
        assert_eq!(along, [frame(1), frame(2), frame(3)]);
        let (near, mut far) = UnixStream::pair().unwrap();
        let mut there = Stream::new(near).unwrap();
        far.write_all(&message(5)).unwrap();
        there.put_first(along);
        // And here, if it does not go.
        for (stream, bodies) in [(&mut there, [1, 2, 3, 5]), (&mut stream, [1, 2, 3, 0])] {
            for body in bodies.into_iter().filter(|body| *body > 0) {
                assert_eq!(next(stream), Some(frame(body)));
            }
            assert_eq!(next(stream), None);
        }
    }
}
