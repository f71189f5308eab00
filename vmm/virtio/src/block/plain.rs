//! Requests that one system call after another executes, on the calling thread.

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use weft_guest_memory::DeviceMemory;

use super::back_end::Completion;
use super::disk::Disk;
use super::request::{Operation, Request, Status};
use crate::ring::{Segment, copy_in, copy_out};
use crate::vectors::vectors;

/// Bytes that go through a buffer of ours at once.
const BOUNCE: usize = 256 << 10;

/// Whether the kernel cannot use the guest's buffers as they are: direct I/O wants
/// them aligned, and a page of shared memory might leave meanwhile.
pub fn needs_bounce(memory: &DeviceMemory, disk: &Disk, request: &Request) -> bool {
    if memory.is_shared() && request.moves_data() {
        return true;
    }
    let alignment = u64::from(disk.buffer_alignment());
    let odd = |segment: &Segment| {
        !(segment.address | u64::from(segment.length)).is_multiple_of(alignment)
    };
    alignment > 1 && request.data.iter().any(odd)
}

/// Executes a request.
pub fn execute(memory: &DeviceMemory, disk: &Disk, request: Request) -> Completion {
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
    completion(disk, request, done)
}

/// The completion of a request that was executed here; the disk's user is told of errors.
pub fn completion(disk: &Disk, request: Request, done: io::Result<()>) -> Completion {
    disk.ended(request.operation, request.offset, request.length);
    if let Err(error) = &done {
        disk.report(request.operation, request.offset, request.length, error);
    }
    Completion {
        status: Status::of(&done),
        request,
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
