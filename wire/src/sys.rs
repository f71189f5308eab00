//! The system calls that links make, without libc.
//!
//! Every wrapper gives `Err(errno)` as a positive number and never retries:
//! what a retry means is the caller's to know.

use linux_raw_sys::general as sys;
use syscalls::Sysno;
use syscalls::raw::{syscall2, syscall3, syscall4, syscall5, syscall6};

/// `MSG_DONTWAIT` of recv and send.
pub(crate) const MSG_DONTWAIT: u32 = 0x40;
const MSG_NOSIGNAL: u32 = 0x4000;
const SOL_SOCKET: i32 = 1;
const SO_RCVTIMEO: i32 = 20;
const F_GET_SEALS: usize = 1034;

/// One part of a gathered send.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct IoVec {
    pub base: *const u8,
    pub length: usize,
}

#[repr(C)]
struct MsgHdr {
    name: usize,
    name_length: u32,
    iov: *const IoVec,
    iov_count: usize,
    control: usize,
    control_length: usize,
    flags: i32,
}

/// One descriptor of a [`ppoll`].
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct PollFd {
    pub fd: i32,
    pub events: i16,
    pub revents: i16,
}

pub(crate) const POLLIN: i16 = 1;
pub(crate) const POLLOUT: i16 = 4;

fn check(value: usize) -> Result<usize, i32> {
    let signed = value as isize;
    if (-4095..0).contains(&signed) {
        Err(-signed as i32)
    } else {
        Ok(value)
    }
}

/// Nanoseconds of the monotonic clock.
pub(crate) fn now_ns() -> u64 {
    let mut time = sys::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the kernel writes one timespec into a live local.
    unsafe {
        syscall2(
            Sysno::clock_gettime as usize,
            sys::CLOCK_MONOTONIC as usize,
            (&raw mut time) as usize,
        );
    }
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Ticks of the processor's time stamp counter: a clock without a system call.
pub(crate) fn ticks() -> u64 {
    // SAFETY: every x86-64 processor has it; it reads no memory.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Private anonymous memory, touched lazily.
pub(crate) fn map_private(bytes: usize) -> Result<*mut u8, i32> {
    let flags = sys::MAP_PRIVATE | sys::MAP_ANONYMOUS | sys::MAP_NORESERVE;
    map(bytes, flags, -1)
}

/// The first `bytes` of a memory file, shared with the peer.
pub(crate) fn map_shared(fd: i32, bytes: usize) -> Result<*mut u8, i32> {
    map(bytes, sys::MAP_SHARED, fd)
}

fn map(bytes: usize, flags: u32, fd: i32) -> Result<*mut u8, i32> {
    let protection = sys::PROT_READ | sys::PROT_WRITE;
    // SAFETY: without MAP_FIXED the kernel chooses an unused range, so no
    // existing mapping changes.
    let value = unsafe {
        syscall6(
            Sysno::mmap as usize,
            0,
            bytes,
            protection as usize,
            flags as usize,
            fd as usize,
            0,
        )
    };
    check(value).map(|address| address as *mut u8)
}

/// Undoes a map.
///
/// # Safety
/// The range was mapped by this module and nothing refers to it any more.
pub(crate) unsafe fn unmap(base: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        syscall2(Sysno::munmap as usize, base as usize, bytes);
    }
}

/// Gives the pages of a private range back; they read as zero afterwards.
///
/// # Safety
/// The range is private anonymous memory whose content nobody needs.
pub(crate) unsafe fn discard(base: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        syscall3(
            Sysno::madvise as usize,
            base as usize,
            bytes,
            sys::MADV_DONTNEED as usize,
        );
    }
}

/// Receives into raw memory; 0 is the end of the stream.
///
/// # Safety
/// `base..base + bytes` is writable and borrowed by nobody.
pub(crate) unsafe fn receive(
    fd: i32,
    base: *mut u8,
    bytes: usize,
    flags: u32,
) -> Result<usize, i32> {
    // SAFETY: the caller's promise; no address is asked for.
    check(unsafe {
        syscall6(
            Sysno::recvfrom as usize,
            fd as usize,
            base as usize,
            bytes,
            flags as usize,
            0,
            0,
        )
    })
}

/// Sends what fits now of the gathered parts; never blocks, never raises SIGPIPE.
///
/// # Safety
/// Every part points to readable memory.
pub(crate) unsafe fn send_gathered(fd: i32, parts: &[IoVec]) -> Result<usize, i32> {
    if let [part] = parts {
        // SAFETY: the caller's promise.
        return unsafe { send_one(fd, part) };
    }
    let message = MsgHdr {
        name: 0,
        name_length: 0,
        iov: parts.as_ptr(),
        iov_count: parts.len(),
        control: 0,
        control_length: 0,
        flags: 0,
    };
    // SAFETY: the caller's promise for the parts; the header is a live local.
    check(unsafe {
        syscall3(
            Sysno::sendmsg as usize,
            fd as usize,
            (&raw const message) as usize,
            (MSG_DONTWAIT | MSG_NOSIGNAL) as usize,
        )
    })
}

/// As [`send_gathered`] for a single part.
///
/// # Safety
/// The part points to readable memory.
unsafe fn send_one(fd: i32, part: &IoVec) -> Result<usize, i32> {
    // SAFETY: the caller's promise; no address is given.
    check(unsafe {
        syscall6(
            Sysno::sendto as usize,
            fd as usize,
            part.base as usize,
            part.length,
            (MSG_DONTWAIT | MSG_NOSIGNAL) as usize,
            0,
            0,
        )
    })
}

/// Whether the descriptor has `O_NONBLOCK`.
pub(crate) fn never_blocks(fd: i32) -> bool {
    const F_GETFL: usize = 3;
    // SAFETY: the command takes no pointer.
    let flags = unsafe { syscall3(Sysno::fcntl as usize, fd as usize, F_GETFL, 0) };
    check(flags).is_ok_and(|flags| flags as u32 & sys::O_NONBLOCK != 0)
}

/// Waits for events, with `mask` as the signal mask for the time of the wait.
pub(crate) fn ppoll(fds: &mut [PollFd], timeout_ns: u64, mask: Option<u64>) -> Result<usize, i32> {
    let mut time = sys::timespec {
        tv_sec: (timeout_ns / 1_000_000_000) as _,
        tv_nsec: (timeout_ns % 1_000_000_000) as _,
    };
    let mask_pointer = mask
        .as_ref()
        .map_or(core::ptr::null(), |mask| mask as *const u64);
    // SAFETY: the descriptors, the time and the mask are live locals of the
    // sizes that the kernel is told.
    check(unsafe {
        syscall5(
            Sysno::ppoll as usize,
            fds.as_mut_ptr() as usize,
            fds.len(),
            (&raw mut time) as usize,
            mask_pointer as usize,
            size_of::<u64>(),
        )
    })
}

/// Sets how long a blocking receive on the socket waits.
pub(crate) fn set_receive_timeout(fd: i32, timeout_ns: u64) -> Result<usize, i32> {
    // Zero would mean forever; a microsecond is the least the kernel counts.
    let timeout_us = (timeout_ns / 1000).max(1);
    let value = [timeout_us / 1_000_000, timeout_us % 1_000_000];
    // SAFETY: the kernel reads one timeval (two 64-bit words) from a live local.
    check(unsafe {
        syscall5(
            Sysno::setsockopt as usize,
            fd as usize,
            SOL_SOCKET as usize,
            SO_RCVTIMEO as usize,
            value.as_ptr() as usize,
            size_of_val(&value),
        )
    })
}

/// The seals of a memory file.
pub(crate) fn seals(fd: i32) -> Result<u32, i32> {
    // SAFETY: the command takes no pointer.
    check(unsafe { syscall3(Sysno::fcntl as usize, fd as usize, F_GET_SEALS, 0) })
        .map(|seals| seals as u32)
}

/// The size of a file, bytes.
pub(crate) fn file_bytes(fd: i32) -> Result<u64, i32> {
    // SAFETY: `stat` is plain data for which all zeroes are valid.
    let mut status: sys::stat = unsafe { core::mem::zeroed() };
    // SAFETY: the kernel writes one `stat` into a live local.
    check(unsafe {
        syscall4(
            Sysno::fstat as usize,
            fd as usize,
            (&raw mut status) as usize,
            0,
            0,
        )
    })?;
    Ok(status.st_size as u64)
}
