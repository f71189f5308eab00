//! The runtime's own file descriptors, out of the program's sight.
//!
//! They live above the program's limit, so that it can have as many descriptors
//! as the limit says; where the limit cannot be raised for a moment, or is so high
//! that no program reaches it, at numbers from [`LOWEST`] up. The program's
//! `close`, `dup`, `fcntl` and `close_range` find nothing there.
//! Bounded: at most [`KEPT_MAX`].

use core::sync::atomic::{AtomicI32, Ordering};

use crate::own_calls::{Errno, Result, call};

/// First number used where they cannot be above the limit.
const LOWEST: usize = 4096;
/// From this limit on they are not put above it: the kernel's table of a process,
/// which a fork copies, reaches up to the highest number.
const LIMIT_MAX: usize = 32768;
/// Most descriptors kept: links, rings, control and userfaultfd of 16 nodes.
pub const KEPT_MAX: usize = 64;

const RLIMIT_NOFILE: usize = 7;
const F_DUPFD_CLOEXEC: usize = 1030;
const F_SETFD: usize = 2;
const FD_CLOEXEC: usize = 1;

static KEPT: [AtomicI32; KEPT_MAX] = [const { AtomicI32::new(-1) }; KEPT_MAX];

/// Moves a descriptor out of the program's way and hides it; returns its new
/// number. It closes on exec.
pub fn keep(descriptor: i32) -> Result<i32> {
    let mut limits = [0usize; 2];
    call!(prlimit64, 0, RLIMIT_NOFILE, 0, limits.as_mut_ptr())?;
    let moved = above(descriptor, limits).or_else(|_| {
        // Near the limit there is room for what will be kept and little else.
        let lowest = LOWEST.min(limits[0].saturating_sub(KEPT_MAX));
        call!(fcntl, descriptor, F_DUPFD_CLOEXEC, lowest)
    })? as i32;
    let _ = call!(close, descriptor);
    for slot in &KEPT {
        let taken = slot.compare_exchange(-1, moved, Ordering::AcqRel, Ordering::Relaxed);
        if taken.is_ok() {
            return Ok(moved);
        }
    }
    let _ = call!(close, moved);
    Err(Errno::EMFILE)
}

/// Duplicates a descriptor above the program's limit, which is raised for that.
fn above(descriptor: i32, limits: [usize; 2]) -> Result<usize> {
    let [limit, most] = limits;
    if limit > LIMIT_MAX {
        return Err(Errno::EMFILE);
    }
    let raised = [limit + KEPT_MAX, most.max(limit + KEPT_MAX)];
    call!(prlimit64, 0, RLIMIT_NOFILE, raised.as_ptr(), 0)?;
    let moved = call!(fcntl, descriptor, F_DUPFD_CLOEXEC, limit);
    call!(prlimit64, 0, RLIMIT_NOFILE, limits.as_ptr(), 0)?;
    moved
}

/// Opens a file for a moment, also when the program has as many descriptors as it
/// may have.
pub fn open(path: *const u8, flags: usize) -> Result<i32> {
    const AT_FDCWD: isize = -100;
    let open = || call!(openat, AT_FDCWD, path, flags, 0).map(|descriptor| descriptor as i32);
    match open() {
        Err(Errno::EMFILE) => {}
        other => return other,
    }
    let mut limits = [0usize; 2];
    call!(prlimit64, 0, RLIMIT_NOFILE, 0, limits.as_mut_ptr())?;
    let [limit, most] = limits;
    // Above what is kept: the program's numbers are all taken.
    let raised = [limit + 2 * KEPT_MAX, most.max(limit + 2 * KEPT_MAX)];
    call!(prlimit64, 0, RLIMIT_NOFILE, raised.as_ptr(), 0).map_err(|_| Errno::EMFILE)?;
    let opened = open();
    call!(prlimit64, 0, RLIMIT_NOFILE, limits.as_ptr(), 0)?;
    opened
}

/// Closes a kept descriptor.
pub fn drop_kept(descriptor: i32) {
    for slot in &KEPT {
        let found = slot.compare_exchange(descriptor, -1, Ordering::AcqRel, Ordering::Relaxed);
        if found.is_ok() {
            let _ = call!(close, descriptor);
        }
    }
}

/// Closes every kept descriptor: a forked child has no use for them.
pub fn drop_all() {
    for slot in &KEPT {
        let descriptor = slot.swap(-1, Ordering::AcqRel);
        if descriptor >= 0 {
            let _ = call!(close, descriptor);
        }
    }
}

/// Whether a number is the runtime's.
pub fn is_kept(descriptor: usize) -> bool {
    // The kernel takes descriptors as 32-bit numbers.
    let number = descriptor as u32 as i32;
    number >= 0
        && KEPT
            .iter()
            .any(|kept| kept.load(Ordering::Relaxed) == number)
}

/// Lets a kept descriptor survive an exec, or not.
pub fn set_close_on_exec(descriptor: i32, close: bool) {
    let flag = if close { FD_CLOEXEC } else { 0 };
    let _ = call!(fcntl, descriptor, F_SETFD, flag);
}

/// `close_range` of the program, around what is kept.
pub fn close_range(first: usize, last: usize, flags: usize) -> Result<usize> {
    let (mut first, last) = (first as u32, last as u32);
    if first > last {
        return Err(Errno::EINVAL);
    }
    loop {
        let next = KEPT
            .iter()
            .map(|kept| kept.load(Ordering::Relaxed))
            .filter(|&kept| kept >= 0 && (first..=last).contains(&(kept as u32)))
            .min();
        let Some(kept) = next else {
            return call!(close_range, first, last, flags);
        };
        let kept = kept as u32;
        if kept > first {
            call!(close_range, first, kept - 1, flags)?;
        }
        if kept == last {
            return Ok(0);
        }
        first = kept + 1;
    }
}
