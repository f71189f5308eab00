//! Two byte rings in shared memory, one each way, each with one producer and
//! one consumer.
//!
//! A memory file of 2 × (4096 + capacity) bytes. Each half is a page of
//! [`Indices`] followed by `capacity` bytes of data; side 0 produces into the
//! first half, side 1 into the second. `tail` counts the bytes ever produced,
//! `head` those ever consumed; both only grow. The bytes in the ring are
//! `head..tail`, each at its count modulo the capacity.
//!
//! Invariants, per ring: `0 <= tail - head <= capacity`; only the producer
//! writes `tail` and the data, only the consumer writes `head`.
//!
//! **No lost wake-up.** A side about to block does: (1) store 1 into its sleep
//! flag, (2) a sequentially consistent fence, (3) look at the index once more,
//! (4) block on the door bell. The other side does: (a) store the index, (b) a
//! sequentially consistent fence, (c) read the sleep flag, and if it is set,
//! take it and ring. The two fences are totally ordered. If (2) comes before
//! (b), then (c) sees the flag and rings, and the bell stays readable until it
//! is read. If (b) comes before (2), then (3) sees the index and there is no
//! sleep. There is no third case. A bell that does not fit into its socket is
//! dropped, which is fine: the socket is then readable anyway. A model of this tries
//! all interleavings (`models/src/ring.rs`).
//!
//! **Trust.** The other side's index is checked each time it is read: it must
//! not go back, nor leave the ring. One's own indices are kept in private
//! memory and never read back. The memory file must be sealed against
//! shrinking, so that no access can fault. Both sides start at 0, so a memory
//! file serves one pair of links once. What a hostile peer can do is send
//! bytes, close, or ring for nothing.

mod indices;

use core::sync::atomic;

use crate::{LinkError, sys};
use indices::{Indices, before_last_look};

/// Bytes of data each way, by default.
pub const CAPACITY_DEFAULT: usize = 1 << 20;
/// Least capacity.
pub const CAPACITY_MIN: usize = 4096;
/// Largest capacity.
pub const CAPACITY_MAX: usize = 1 << 28;
/// Bytes before the data of each ring.
const INDICES_BYTES: usize = 4096;
/// `F_SEAL_SHRINK`.
const SEAL_SHRINK: u32 = 2;

/// Bytes of the memory file for two rings of `capacity` bytes.
pub const fn file_bytes(capacity: usize) -> usize {
    2 * (INDICES_BYTES + capacity)
}

const _: () = assert!(size_of::<Indices>() <= INDICES_BYTES);

/// This side of the two rings.
pub(crate) struct Rings {
    base: *mut u8,
    capacity: usize,
    side: usize,
    /// Own index of the ring this side produces into.
    tail: u64,
    /// The consumer's index, as last seen.
    seen_head: u64,
    /// Own index of the ring this side consumes.
    head: u64,
    /// The producer's index, as last seen.
    seen_tail: u64,
}

impl Rings {
    /// Maps the memory file.
    ///
    /// # Safety
    /// `fd` is a memory file that nothing but the peer's rings uses, and no
    /// other value of this process plays the same side.
    pub unsafe fn open(fd: i32, side: u32) -> Result<Rings, LinkError> {
        let bytes = sys::file_bytes(fd).map_err(|errno| system("fstat", errno))? as usize;
        let capacity = (bytes / 2).wrapping_sub(INDICES_BYTES);
        if side > 1
            || !(CAPACITY_MIN..=CAPACITY_MAX).contains(&capacity)
            || !capacity.is_power_of_two()
            || bytes != file_bytes(capacity)
        {
            return Err(LinkError::Configuration(
                "the ring's memory file has an invalid size or side",
            ));
        }
        let seals = sys::seals(fd).map_err(|errno| system("fcntl", errno))?;
        if seals & SEAL_SHRINK == 0 {
            return Err(LinkError::Configuration(
                "the ring's memory file is not sealed against shrinking",
            ));
        }
        let base = sys::map_shared(fd, bytes).map_err(|errno| system("mmap", errno))?;
        Ok(Rings {
            base,
            capacity,
            side: side as usize,
            tail: 0,
            seen_head: 0,
            head: 0,
            seen_tail: 0,
        })
    }

    fn indices(&self, ring: usize) -> &Indices {
        // SAFETY: the mapping holds two rings and `ring` is 0 or 1; the offset
        // is a multiple of a page; all fields are atomics, valid for any bytes.
        unsafe { &*self.base.add(ring * (INDICES_BYTES + self.capacity)).cast() }
    }

    fn out_indices(&self) -> &Indices {
        self.indices(self.side)
    }

    fn in_indices(&self) -> &Indices {
        self.indices(1 - self.side)
    }

    fn data(&self, ring: usize) -> *mut u8 {
        // SAFETY: as in `indices`; the data follows the indices.
        unsafe {
            self.base
                .add(ring * (INDICES_BYTES + self.capacity) + INDICES_BYTES)
        }
    }

    /// Bytes that may be produced now.
    pub fn room(&mut self) -> Result<usize, LinkError> {
        let head = self.out_indices().head();
        if head < self.seen_head || head > self.tail {
            return Err(LinkError::RingCorrupt);
        }
        let used = self.tail - head;
        if used > self.capacity as u64 {
            return Err(LinkError::RingCorrupt);
        }
        self.seen_head = head;
        Ok(self.capacity - used as usize)
    }

    /// Copies as much of `bytes` as fits; the consumer sees it after
    /// [`Rings::publish`]. Gives how much.
    pub fn produce(&mut self, bytes: &[u8]) -> Result<usize, LinkError> {
        let mut room = self.capacity - (self.tail - self.seen_head) as usize;
        if room < bytes.len() {
            room = self.room()?;
        }
        let count = bytes.len().min(room);
        let at = self.tail as usize & (self.capacity - 1);
        let first = count.min(self.capacity - at);
        let data = self.data(self.side);
        // SAFETY: `at < capacity`, `first <= capacity - at` and
        // `count - first <= at`, so both copies stay in the data; the peer
        // does not read these bytes before `publish` (and if it does, only it
        // is the worse for it).
        unsafe {
            core::ptr::copy_nonoverlapping(bytes.as_ptr(), data.add(at), first);
            core::ptr::copy_nonoverlapping(bytes.as_ptr().add(first), data, count - first);
        }
        self.tail += count as u64;
        Ok(count)
    }

    /// Shows what was produced; says whether the consumer must be woken.
    pub fn publish(&self) -> bool {
        self.out_indices().produced(self.tail)
    }

    /// Bytes that may be consumed now.
    pub fn available(&mut self) -> Result<usize, LinkError> {
        let tail = self.in_indices().tail();
        if tail < self.seen_tail || tail - self.head > self.capacity as u64 {
            return Err(LinkError::RingCorrupt);
        }
        self.seen_tail = tail;
        Ok((tail - self.head) as usize)
    }

    /// Copies at most `room` of the available bytes to `to` and gives their
    /// place to the producer. Gives how many, and whether the producer must be
    /// woken.
    ///
    /// # Safety
    /// `to..to + room` is writable and borrowed by nobody.
    pub unsafe fn consume(&mut self, to: *mut u8, room: usize) -> Result<(usize, bool), LinkError> {
        let count = self.available()?.min(room);
        if count == 0 {
            return Ok((0, false));
        }
        let at = self.head as usize & (self.capacity - 1);
        let first = count.min(self.capacity - at);
        let data = self.data(1 - self.side);
        // SAFETY: the ranges stay in the data as in `produce`, and in the room
        // by the caller's promise. A hostile producer may change the bytes
        // while they are copied; the copy is then any bytes, which is what a
        // hostile producer may send anyway. They are never looked at in place.
        unsafe {
            core::ptr::copy_nonoverlapping(data.add(at), to, first);
            core::ptr::copy_nonoverlapping(data, to.add(first), count - first);
        }
        self.head += count as u64;
        Ok((count, self.in_indices().consumed(self.head)))
    }

    /// Announces that this side is about to block until there is something to
    /// consume (and, if `for_room`, room to produce). The caller must look once
    /// more before it blocks, and call [`Rings::awake`] afterwards.
    pub fn asleep(&self, for_room: bool) {
        self.in_indices().consumer_sleeps(true);
        if for_room {
            self.out_indices().producer_sleeps(true);
        }
        before_last_look();
    }

    /// Takes the announcement back.
    pub fn awake(&self) {
        self.in_indices().consumer_sleeps(false);
        self.out_indices().producer_sleeps(false);
    }
}

fn system(call: &'static str, errno: i32) -> LinkError {
    LinkError::System { call, errno }
}

impl Drop for Rings {
    fn drop(&mut self) {
        // SAFETY: mapped by `open`, and every borrow ended with `self`.
        unsafe { sys::unmap(self.base, file_bytes(self.capacity)) };
    }
}

/// Makes the memory file of two rings of `capacity` bytes each, sealed against
/// changes of its size.
///
/// # Errors
/// A capacity that is no power of two between [`CAPACITY_MIN`] and
/// [`CAPACITY_MAX`], or no memory.
#[cfg(feature = "std")]
pub fn create(capacity: usize) -> std::io::Result<std::os::fd::OwnedFd> {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
    if !capacity.is_power_of_two() || !(CAPACITY_MIN..=CAPACITY_MAX).contains(&capacity) {
        return Err(std::io::Error::new(
            std::io::ErrorKind::InvalidInput,
            format!("a ring of {capacity} bytes: must be a power of two, 4 KiB to 256 MiB"),
        ));
    }
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = memfd_create("weft-ring", flags)?;
    ftruncate(&file, file_bytes(capacity) as u64)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}
