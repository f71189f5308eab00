//! Requests through io_uring (io_uring(7)).
//!
//! Invariant: a request is in `slots` from the moment that the kernel may know
//! its buffers until its completion was read; so are the vectors that name
//! them, and guest RAM is held as long.
//!
//! What goes through a ring passes by the thread's system call filter. So the ring
//! itself allows only [`OPERATIONS`], whatever is put into it.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use io_uring::register::Restriction;
use io_uring::types::{Fd, FsyncFlags};
use io_uring::{IoUring, opcode, squeue};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use weft_guest_memory::DeviceMemory;

use super::back_end::Completion;
use super::disk::{Disk, unsupported};
use super::plain::{completion, execute};
use super::request::{Operation, Request, Status};
use crate::vectors::{IoVector, vectors};

/// What a ring of ours may be asked for; no registration may follow.
const OPERATIONS: [u8; 4] = [
    opcode::Readv::CODE,
    opcode::Writev::CODE,
    opcode::Fsync::CODE,
    opcode::Fallocate::CODE,
];

/// A request that the kernel works on.
struct InFlight {
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
    slots: Vec<Option<InFlight>>,
    free: Vec<usize>,
    /// What the buffers in flight are part of.
    memory: Option<Arc<DeviceMemory>>,
}

impl Uring {
    /// For `size` requests at once (a power of two) on an open disk. An error on
    /// kernels before 5.10, which cannot restrict a ring.
    pub fn new(disk: RawFd, size: u16) -> io::Result<Self> {
        let uring = IoUring::builder()
            .setup_r_disabled()
            .build(u32::from(size))?;
        let mut probe = io_uring::Probe::new();
        uring.submitter().register_probe(&mut probe)?;
        if !probe.is_supported(opcode::Fallocate::CODE) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let ended = EventFd::new(EFD_NONBLOCK)?;
        // Not register_eventfd_async: it tells of what the kernel's own workers
        // ended only, not of what the disk's interrupt did.
        uring.submitter().register_eventfd(ended.as_raw_fd())?;
        let mut allowed = OPERATIONS.map(Restriction::sqe_op);
        uring.submitter().register_restrictions(&mut allowed)?;
        uring.submitter().register_enable_rings()?;
        Ok(Self {
            uring,
            ended,
            disk,
            slots: (0..size).map(|_| None).collect(),
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
        self.slots.len() - self.free.len()
    }

    /// Whether there is room for another.
    pub fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// Begins a request; back at once only when there is no room.
    pub fn begin(&mut self, memory: &Arc<DeviceMemory>, request: Request) -> Option<Completion> {
        let Some(slot) = self.free.pop() else {
            let status = Status::IoError;
            return Some(Completion { request, status });
        };
        if self.memory.is_none() {
            self.memory = Some(memory.clone());
        }
        let vectors = vectors(memory, &request.data, 0);
        let in_flight = InFlight {
            request,
            vectors,
            done: 0,
        };
        self.push(slot, in_flight)
    }

    /// Submits a request to the kernel and remembers it.
    fn push(&mut self, slot: usize, in_flight: InFlight) -> Option<Completion> {
        let entry = entry(self.disk, &in_flight).user_data(slot as u64);
        // SAFETY: the vectors' heap block does not move and lives in `slots`
        // until the completion; the RAM that they name is held by `memory`.
        let pushed = unsafe { self.uring.submission().push(&entry) };
        if pushed.is_err() {
            // As many entries as slots, so it cannot be full.
            self.free.push(slot);
            let status = Status::IoError;
            let request = in_flight.request;
            return Some(Completion { request, status });
        }
        self.slots[slot] = Some(in_flight);
        None
    }

    /// Lets the kernel see what was begun; whether it took all of it. What it did
    /// not take goes with the next call, which somebody must make: nothing tells
    /// when.
    pub fn submit(&mut self) -> io::Result<bool> {
        if self.uring.submission().is_empty() {
            return Ok(true);
        }
        match self.uring.submit() {
            Ok(_) => {}
            Err(error) if busy(&error) => {}
            Err(error) => return Err(error),
        }
        Ok(self.uring.submission().is_empty())
    }

    /// The next completion. Requests that the kernel executed only in part begin again,
    /// and need a [`Uring::submit`].
    pub fn next_completion(&mut self, memory: &DeviceMemory, disk: &Disk) -> Option<Completion> {
        loop {
            let entry = self.uring.completion().next()?;
            let slot = entry.user_data() as usize;
            let in_flight = self.slots.get_mut(slot).and_then(Option::take)?;
            let next = self.judge(in_flight, entry.result(), slot, memory, disk);
            if next.is_some() {
                return next;
            }
        }
    }

    fn judge(
        &mut self,
        mut in_flight: InFlight,
        result: i32,
        slot: usize,
        memory: &DeviceMemory,
        disk: &Disk,
    ) -> Option<Completion> {
        let moves = matches!(
            in_flight.request.operation,
            Operation::Read | Operation::Write
        );
        if result < 0 {
            let error = io::Error::from_raw_os_error(-result);
            self.free.push(slot);
            // Asked again it might say the same for ever.
            if busy(&error) || !moves && unsupported(&error) {
                return Some(execute(memory, disk, in_flight.request));
            }
            return Some(completion(disk, in_flight.request, Err(error)));
        }
        in_flight.done += result as u64;
        if moves && result > 0 && in_flight.done < in_flight.request.length {
            in_flight.vectors = vectors(memory, &in_flight.request.data, in_flight.done);
            return self.push(slot, in_flight);
        }
        self.free.push(slot);
        let done = match moves && in_flight.done < in_flight.request.length {
            true => Err(io::ErrorKind::UnexpectedEof.into()),
            false => Ok(()),
        };
        Some(completion(disk, in_flight.request, done))
    }
}

fn busy(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EAGAIN | libc::EINTR | libc::EBUSY)
    )
}

fn entry(disk: RawFd, in_flight: &InFlight) -> squeue::Entry {
    let disk = Fd(disk);
    let Request { offset, length, .. } = in_flight.request;
    let list = in_flight.vectors.as_ptr().cast::<libc::iovec>();
    let count = in_flight.vectors.len() as u32;
    let at = offset + in_flight.done;
    let allocate = |mode: i32| {
        opcode::Fallocate::new(disk, length)
            .offset(offset)
            .mode(mode | libc::FALLOC_FL_KEEP_SIZE)
            .build()
    };
    match in_flight.request.operation {
        Operation::Read => opcode::Readv::new(disk, list, count).offset(at).build(),
        Operation::Write => opcode::Writev::new(disk, list, count)
            .offset(at)
            .rw_flags(in_flight.request.write_flags())
            .build(),
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
            std::mem::forget(std::mem::take(&mut self.slots));
            std::mem::forget(self.memory.take());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel says to one entry.
    fn answer(uring: &mut Uring, entry: &squeue::Entry) -> i32 {
        // SAFETY: the entries here name no memory, or memory that is constant.
        unsafe { uring.uring.submission().push(entry) }.unwrap();
        uring.uring.submit_and_wait(1).unwrap();
        uring.uring.completion().next().unwrap().result()
    }

    #[test]
    fn a_ring_does_what_disks_need_and_nothing_else() {
        let file = std::fs::File::open(std::env::current_exe().unwrap()).unwrap();
        let mut uring = match Uring::new(file.as_raw_fd(), 4) {
            Ok(uring) => uring,
            Err(error) => {
                eprintln!("skipped: no io_uring here ({error})");
                return;
            }
        };
        let disk = Fd(file.as_raw_fd());
        let flush = opcode::Fsync::new(disk).build();
        assert_eq!(answer(&mut uring, &flush), 0);
        let here = Fd(libc::AT_FDCWD);
        let refused = [
            opcode::Nop::new().build(),
            opcode::OpenAt::new(here, c"/dev/null".as_ptr()).build(),
            opcode::Socket::new(libc::AF_UNIX, libc::SOCK_STREAM, 0).build(),
            opcode::Close::new(disk).build(),
        ];
        for entry in &refused {
            assert_eq!(answer(&mut uring, entry), -libc::EACCES, "{entry:?}");
        }
        let more = uring
            .uring
            .submitter()
            .register_eventfd(uring.ended.as_raw_fd());
        assert_eq!(more.unwrap_err().raw_os_error(), Some(libc::EACCES));
    }
}
