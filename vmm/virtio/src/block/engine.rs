//! How requests are carried out: through io_uring, one after the other, or by
//! another slice.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use weft_guest_memory::DeviceMemory;

use super::disk::Disk;
use super::remote::RemoteBlock;
use super::request::{Operation, Request, Status};
use super::uring::Uring;
use crate::Ring;
use crate::ring::{Segment, copy_in, copy_out};
use crate::vectors::vectors;

/// Bytes that go through a buffer of ours at once.
const BOUNCE: usize = 256 << 10;

/// A request that ended.
pub struct Completion {
    pub request: Request,
    pub status: Status,
}

/// The ways.
pub enum Engine {
    /// Many at once.
    Uring(Arc<Disk>, Box<Uring>),
    /// One after the other, and why.
    Plain(Arc<Disk>, io::Error),
    /// By the slice that has the disk.
    Remote(Box<RemoteBlock>),
}

impl Engine {
    /// io_uring when `wanted` and permitted.
    pub fn new(disk: Arc<Disk>, wanted: bool, size: u16) -> io::Result<Self> {
        if !wanted {
            return Ok(Self::Plain(disk, io::Error::other("not wanted")));
        }
        match Uring::new(disk.file().as_raw_fd(), size) {
            Ok(uring) => Ok(Self::Uring(disk, Box::new(uring))),
            Err(error) if error.raw_os_error() == Some(libc::EMFILE) => Err(error),
            Err(error) => Ok(Self::Plain(disk, error)),
        }
    }

    /// Why io_uring is not used for a disk that is here, if it is not.
    pub fn why_plain(&self) -> Option<&io::Error> {
        match self {
            Self::Uring(..) | Self::Remote(_) => None,
            Self::Plain(_, reason) => Some(reason),
        }
    }

    /// What tells that requests ended.
    pub fn descriptor(&self) -> Option<RawFd> {
        match self {
            Self::Uring(_, uring) => Some(uring.descriptor()),
            Self::Plain(..) => None,
            Self::Remote(remote) => Some(remote.descriptor()),
        }
    }

    /// Requests that have not ended.
    pub fn in_flight(&self) -> usize {
        match self {
            Self::Uring(_, uring) => uring.in_flight(),
            Self::Plain(..) => 0,
            Self::Remote(remote) => remote.in_flight(),
        }
    }

    /// Whether another request can be begun.
    pub fn has_room(&self) -> bool {
        match self {
            Self::Uring(_, uring) => uring.has_room(),
            Self::Plain(..) => true,
            Self::Remote(remote) => remote.has_room(),
        }
    }

    /// Begins a request, or does all of it.
    pub fn begin(&mut self, ring: &Ring, request: Request) -> Option<Completion> {
        match self {
            Self::Uring(disk, uring)
                if !needs_bounce(ring.memory(), disk, &request) && !request.sync_after() =>
            {
                uring.begin(ring, request)
            }
            Self::Uring(disk, _) | Self::Plain(disk, _) => {
                Some(carry_out(ring.memory(), disk, request))
            }
            Self::Remote(remote) => remote.begin(&ring.shared_memory(), request),
        }
    }

    /// Lets the kernel see what was begun; false: call again, for it did not take
    /// all of it.
    pub fn submit(&mut self) -> io::Result<bool> {
        match self {
            Self::Uring(_, uring) => uring.submit(),
            Self::Plain(..) | Self::Remote(_) => Ok(true),
        }
    }

    /// A request that has ended.
    pub fn next_ended(&mut self, ring: &Ring) -> Option<Completion> {
        match self {
            Self::Uring(disk, uring) => uring.next_ended(ring, disk),
            Self::Plain(..) => None,
            Self::Remote(remote) => remote.next_ended(ring.memory()),
        }
    }
}

/// Whether the kernel cannot use the guest's buffers as they are: direct I/O wants
/// them aligned, and a page that slices share might leave meanwhile.
fn needs_bounce(memory: &DeviceMemory, disk: &Disk, request: &Request) -> bool {
    if memory.is_shared() && request.moves_data() {
        return true;
    }
    let alignment = u64::from(disk.buffer_alignment());
    let odd = |segment: &Segment| {
        !(segment.address | u64::from(segment.length)).is_multiple_of(alignment)
    };
    alignment > 1 && request.data.iter().any(odd)
}

/// Does all of a request, here and now.
pub fn carry_out(memory: &DeviceMemory, disk: &Disk, request: Request) -> Completion {
    let Request { offset, length, .. } = request;
    let done = match request.operation {
        Operation::Flush => disk.file().sync_data(),
        Operation::Discard => disk.discard(offset, length),
        Operation::Zero { unmap } => disk.zero(offset, length, unmap),
        Operation::Read | Operation::Write if needs_bounce(memory, disk, &request) => {
            bounce(memory, disk, &request)
        }
        Operation::Read | Operation::Write => transfer(memory, disk, &request),
    };
    let done = match done {
        Ok(()) if request.sync_after() => disk.file().sync_data(),
        done => done,
    };
    ended(disk, request, done)
}

/// A request that was carried out here; its disk's user hears of what went wrong.
pub fn ended(disk: &Disk, request: Request, done: io::Result<()>) -> Completion {
    if let Err(error) = &done {
        disk.tell(request.operation, request.offset, request.length, error);
    }
    Completion {
        status: status(&done),
        request,
    }
}

/// What a driver hears of an outcome.
pub fn status(done: &io::Result<()>) -> Status {
    match done {
        Ok(()) => Status::Ok,
        Err(_) => Status::IoError,
    }
}

/// Direct I/O through a buffer of our own, aligned as the host wants it.
fn bounce(memory: &DeviceMemory, disk: &Disk, request: &Request) -> io::Result<()> {
    let alignment = disk.buffer_alignment().max(1) as usize;
    let size = BOUNCE.min(request.length as usize);
    let mut buffer = vec![0; size + alignment];
    let skip = buffer.as_ptr().align_offset(alignment);
    let buffer = &mut buffer[skip..skip + size];
    let mut done = 0;
    while done < request.length {
        let count = size.min((request.length - done) as usize);
        let chunk = &mut buffer[..count];
        let at = request.offset + done;
        if request.operation == Operation::Write {
            copy_out(memory, &request.data, done, chunk);
            disk.file().write_all_at(chunk, at)?;
        } else {
            disk.file().read_exact_at(chunk, at)?;
            copy_in(memory, &request.data, done, chunk);
        }
        done += count as u64;
    }
    if request.operation == Operation::Write && request.durable {
        disk.file().sync_data()?;
    }
    Ok(())
}

/// preadv(2) or pwritev2(2) until all of it is there.
fn transfer(memory: &DeviceMemory, disk: &Disk, request: &Request) -> io::Result<()> {
    let descriptor = disk.file().as_raw_fd();
    let mut done = 0;
    while done < request.length {
        let vectors = vectors(memory, &request.data, done);
        let list = vectors.as_ptr().cast::<libc::iovec>();
        let count = vectors.len() as libc::c_int;
        let offset = (request.offset + done) as i64;
        let result = if request.operation == Operation::Write {
            // SAFETY: the vectors name guest RAM, which stays mapped while
            // `memory` is borrowed; the guest may change it, nobody else uses it.
            unsafe { libc::pwritev2(descriptor, list, count, offset, request.write_flags()) }
        } else {
            // SAFETY: the vectors name guest RAM, which stays mapped while
            // `memory` is borrowed; the guest may change it, nobody else uses it.
            unsafe { libc::preadv(descriptor, list, count, offset) }
        };
        match result {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            moved if moved > 0 => done += moved as u64,
            _ => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
    Ok(())
}
