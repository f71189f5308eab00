//! The receive buffer of a link: one lazily touched mapping, filled at the end,
//! consumed at the front.
//!
//! ```text
//! front .. start    consumed
//! start .. end      plaintext, not yet consumed
//! end   .. raw      left over by sealing (tags, lengths); nothing
//! raw   .. limit    sealed bytes, not yet opened
//! limit .. CAPACITY free
//! ```
//!
//! Invariants: `start <= end <= raw <= limit <= CAPACITY`; in the clear
//! `end == raw == limit` always. Bytes in `front..limit` were written by the
//! kernel or by this process, so they are initialised.

use super::LinkError;
use crate::frame::{HEADER_BYTES, Header, MAX_FRAME};
use crate::sys;

/// Bytes of address space: the backlog that a blocked sender may pile up here.
pub(super) const CAPACITY: usize = 8 << 20;
/// Most bytes that one read asks for. A frame with 64 pages fits.
const READ_MAX: usize = 512 << 10;
/// Past this the content moves to the front, so that the same pages stay warm
/// in the cache.
const COMPACT_ABOVE: usize = 1 << 20;

/// See the module.
pub(super) struct Buffer {
    base: *mut u8,
    /// Where the first frame starts: so that its payload is page-aligned.
    front: usize,
    start: usize,
    end: usize,
    raw: usize,
    limit: usize,
    touched: usize,
}

impl Buffer {
    /// A buffer whose frames are preceded by `prefix` bytes (a record's length).
    pub fn new(prefix: usize) -> Result<Buffer, LinkError> {
        let base = sys::map_private(CAPACITY).map_err(|errno| LinkError::System {
            call: "mmap",
            errno,
        })?;
        let front = 4096 - HEADER_BYTES - prefix;
        Ok(Buffer {
            base,
            front,
            start: front,
            end: front,
            raw: front,
            limit: front,
            touched: front,
        })
    }

    /// Makes room and gives it: where to write and at most how many bytes. No
    /// room means that the backlog is as large as it may get.
    pub fn room(&mut self) -> (*mut u8, usize) {
        if self.start == self.limit {
            self.reset();
        } else {
            let held = self.limit - self.start;
            let roomy = self.limit <= COMPACT_ABOVE || held > self.start - self.front;
            let fits = self.start + MAX_FRAME + READ_MAX <= CAPACITY;
            if !roomy || (!fits && self.start > self.front) {
                self.compact();
            }
        }
        let bytes = (CAPACITY - self.limit).min(READ_MAX);
        // SAFETY: `limit <= CAPACITY`, so the pointer is within the mapping or
        // one past it.
        (unsafe { self.base.add(self.limit) }, bytes)
    }

    fn reset(&mut self) {
        self.start = self.front;
        self.end = self.front;
        self.raw = self.front;
        self.limit = self.front;
        if self.touched > 2 * COMPACT_ABOVE {
            // SAFETY: everything above `front` was consumed; the range is page
            // aligned, inside the mapping and borrowed by nobody.
            unsafe {
                sys::discard(self.base.add(COMPACT_ABOVE), CAPACITY - COMPACT_ABOVE);
            }
            self.touched = COMPACT_ABOVE;
        }
    }

    fn compact(&mut self) {
        let shift = self.start - self.front;
        // SAFETY: source and destination lie in the mapping; `copy` allows the
        // overlap; `&mut self` says that nobody borrows the bytes.
        unsafe {
            core::ptr::copy(
                self.base.add(self.start),
                self.base.add(self.front),
                self.limit - self.start,
            );
        }
        self.start -= shift;
        self.end -= shift;
        self.raw -= shift;
        self.limit -= shift;
    }

    /// Takes note of bytes in the clear that were written into the room.
    pub fn commit_plain(&mut self, bytes: usize) {
        self.commit_raw(bytes);
        self.end = self.limit;
        self.raw = self.limit;
    }

    /// Takes note of sealed bytes that were written into the room.
    pub fn commit_raw(&mut self, bytes: usize) {
        self.limit += bytes;
        assert!(self.limit <= CAPACITY);
        self.touched = self.touched.max(self.limit);
    }

    /// The sealed bytes that were not opened yet.
    pub fn sealed(&mut self) -> &mut [u8] {
        // SAFETY: `raw..limit` is inside the mapping and initialised; the
        // borrow of `self` makes it exclusive.
        unsafe { core::slice::from_raw_parts_mut(self.base.add(self.raw), self.limit - self.raw) }
    }

    /// Takes note that the first `record` sealed bytes were opened, and that
    /// their plaintext lies `offset` bytes into them and is `plain` bytes long.
    /// Moves it next to the plaintext before it, if there is any.
    pub fn opened(&mut self, record: usize, offset: usize, plain: usize) {
        assert!(offset + plain <= record && record <= self.limit - self.raw);
        let from = self.raw + offset;
        if self.start == self.end {
            self.start = from;
            self.end = from + plain;
        } else {
            // SAFETY: both ranges lie in the mapping (`end <= raw`); `copy`
            // allows the overlap; nobody borrows the bytes.
            unsafe { core::ptr::copy(self.base.add(from), self.base.add(self.end), plain) };
            self.end += plain;
        }
        self.raw += record;
    }

    /// Drops the sealed bytes: nothing behind a record that does not open is
    /// looked at.
    pub fn forget_sealed(&mut self) {
        self.raw = self.end;
        self.limit = self.end;
    }

    /// The plaintext that was not consumed yet.
    pub fn plain(&self) -> &[u8] {
        // SAFETY: `start..end` is inside the mapping, initialised, and changes
        // only through `&mut self`.
        unsafe { core::slice::from_raw_parts(self.base.add(self.start), self.end - self.start) }
    }

    /// Whether a header is here whose payload is here too; an impossible header
    /// is an error as soon as it is here.
    pub fn complete(&self) -> Result<Option<Header>, LinkError> {
        let Some((bytes, payload)) = self.plain().split_first_chunk::<HEADER_BYTES>() else {
            return Ok(None);
        };
        let header = Header::decode(bytes)?;
        Ok((payload.len() >= header.length as usize).then_some(header))
    }

    /// Consumes a frame that [`Buffer::complete`] found; its payload stays
    /// readable until the buffer changes.
    pub fn take(&mut self, header: &Header) -> &[u8] {
        let from = self.start + HEADER_BYTES;
        let to = from + header.length as usize;
        assert!(to <= self.end);
        self.start = to;
        // SAFETY: as in `plain`; the bytes were part of `start..end`.
        unsafe { core::slice::from_raw_parts(self.base.add(from), to - from) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and every borrow ended with `self`.
        unsafe { sys::unmap(self.base, CAPACITY) };
    }
}
