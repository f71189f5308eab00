//! Requests through io_uring (io_uring(7)).
//!
//! Invariant: a request is in `flying` from the moment that the kernel may know
//! its buffers until its completion was read; so are the vectors that name
//! them, and guest RAM is held as long.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use io_uring::types::{Fd, FsyncFlags};
use io_uring::{IoUring, opcode, squeue};
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::disk::{Disk, unsupported};
use super::engine::{Ended, carry_out};
use super::request::{Operation, Request, Status};
use crate::virtio::Ring;
use crate::virtio::vectors::{IoVector, vectors};

/// A request that the kernel works on.
struct Flying {
    request: Request,
    vectors: Vec<IoVector>,
    /// Bytes that are done.
    done: u64,
}

/// One ring, used by one thread at a time.
pub struct Uring {
    uring: IoUring,
    ended: EventFd,
    disk: RawFd,
    flying: Vec<Option<Flying>>,
    free: Vec<usize>,
    /// What the buffers in flight are part of.
    memory: Option<Arc<GuestMemoryMmap>>,
}

impl Uring {
    /// For `size` requests at once (a power of two) on an open disk.
    pub fn new(disk: RawFd, size: u16) -> io::Result<Self> {
        let uring = IoUring::new(u32::from(size))?;
        let mut probe = io_uring::Probe::new();
        uring.submitter().register_probe(&mut probe)?;
        // Since Linux 5.6.
        if !probe.is_supported(opcode::Fallocate::CODE) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let ended = EventFd::new(EFD_NONBLOCK)?;
        // Not register_eventfd_async: it tells of what the kernel's own workers
        // ended only, not of what the disk's interrupt did.
        uring.submitter().register_eventfd(ended.as_raw_fd())?;
        Ok(Self {
            uring,
            ended,
            disk,
            flying: (0..size).map(|_| None).collect(),
            free: (0..usize::from(size)).collect(),
            memory: None,
        })
    }

    /// Gets an event when requests end. Nobody reads it, so it must be waited
    /// on for edges.
    pub fn descriptor(&self) -> RawFd {
        self.ended.as_raw_fd()
    }

    /// Requests that have not ended.
    pub fn in_flight(&self) -> usize {
        self.flying.len() - self.free.len()
    }

    /// Whether there is room for another.
    pub fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// Begins a request; back at once only when there is no room.
    pub fn begin(&mut self, ring: &Ring, request: Request) -> Option<Ended> {
        let Some(slot) = self.free.pop() else {
            let status = Status::IoError;
            return Some(Ended { request, status });
        };
        if self.memory.is_none() {
            self.memory = Some(ring.shared_memory());
        }
        let vectors = vectors(ring.memory(), &request.data, 0);
        let flying = Flying {
            request,
            vectors,
            done: 0,
        };
        self.push(slot, flying)
    }

    /// Hands a request to the kernel and remembers it.
    fn push(&mut self, slot: usize, flying: Flying) -> Option<Ended> {
        let entry = entry(self.disk, &flying).user_data(slot as u64);
        // SAFETY: the vectors' heap block does not move and lives in `flying`
        // until the completion; the RAM that they name is held by `memory`.
        let pushed = unsafe { self.uring.submission().push(&entry) };
        if pushed.is_err() {
            // As many entries as slots, so it cannot be full.
            self.free.push(slot);
            let status = Status::IoError;
            let request = flying.request;
            return Some(Ended { request, status });
        }
        self.flying[slot] = Some(flying);
        None
    }

    /// Lets the kernel see what was begun.
    pub fn submit(&mut self) -> io::Result<()> {
        if self.uring.submission().is_empty() {
            return Ok(());
        }
        match self.uring.submit() {
            Ok(_) => Ok(()),
            // What did not go now goes with the next call.
            Err(error) if busy(&error) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// The next request that has ended. Those that the kernel did only in part
    /// are begun again, and want a [`Uring::submit`].
    pub fn next_ended(&mut self, ring: &Ring, disk: &Disk) -> Option<Ended> {
        loop {
            let completion = self.uring.completion().next()?;
            let slot = completion.user_data() as usize;
            let flying = self.flying.get_mut(slot).and_then(Option::take)?;
            let next = self.judge(flying, completion.result(), slot, ring, disk);
            if next.is_some() {
                return next;
            }
        }
    }

    fn judge(
        &mut self,
        mut flying: Flying,
        result: i32,
        slot: usize,
        ring: &Ring,
        disk: &Disk,
    ) -> Option<Ended> {
        let moves = matches!(flying.request.operation, Operation::Read | Operation::Write);
        if result < 0 {
            let error = io::Error::from_raw_os_error(-result);
            if busy(&error) {
                return self.push(slot, flying);
            }
            self.free.push(slot);
            if !moves && unsupported(&error) {
                return Some(carry_out(ring.memory(), disk, flying.request));
            }
            let (request, status) = (flying.request, Status::IoError);
            return Some(Ended { request, status });
        }
        flying.done += result as u64;
        if moves && result > 0 && flying.done < flying.request.length {
            flying.vectors = vectors(ring.memory(), &flying.request.data, flying.done);
            return self.push(slot, flying);
        }
        self.free.push(slot);
        let short = moves && flying.done < flying.request.length;
        Some(Ended {
            request: flying.request,
            status: if short { Status::IoError } else { Status::Ok },
        })
    }
}

fn busy(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EAGAIN | libc::EINTR | libc::EBUSY)
    )
}

fn entry(disk: RawFd, flying: &Flying) -> squeue::Entry {
    let disk = Fd(disk);
    let Request { offset, length, .. } = flying.request;
    let list = flying.vectors.as_ptr().cast::<libc::iovec>();
    let count = flying.vectors.len() as u32;
    let at = offset + flying.done;
    let allocate = |mode: i32| {
        opcode::Fallocate::new(disk, length)
            .offset(offset)
            .mode(mode | libc::FALLOC_FL_KEEP_SIZE)
            .build()
    };
    match flying.request.operation {
        Operation::Read => opcode::Readv::new(disk, list, count).offset(at).build(),
        Operation::Write => opcode::Writev::new(disk, list, count).offset(at).build(),
        Operation::Flush => opcode::Fsync::new(disk).flags(FsyncFlags::DATASYNC).build(),
        Operation::Discard | Operation::Zero { unmap: true } => {
            allocate(libc::FALLOC_FL_PUNCH_HOLE)
        }
        Operation::Zero { unmap: false } => allocate(libc::FALLOC_FL_ZERO_RANGE),
    }
}

impl Drop for Uring {
    /// Only reached with requests in flight when a thread could not be made
    /// quiet: then their buffers stay, for the kernel may still use them.
    fn drop(&mut self) {
        if self.in_flight() > 0 {
            std::mem::forget(std::mem::take(&mut self.flying));
            std::mem::forget(self.memory.take());
        }
    }
}
