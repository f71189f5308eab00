//! Which chunks are here, and which was needed least recently.
//!
//! User space sees no accessed bits, so what is known of a chunk is when it
//! last had a fault. A chunk is listed from its first page that arrives until a
//! search finds nothing in it that may leave.

use weft_dsm::{CHUNK_PAGES, PAGES_MAX};

use crate::kernel::{self, Result};

const CHUNKS: usize = (PAGES_MAX / CHUNK_PAGES) as usize;

#[derive(Clone, Copy)]
#[repr(C)]
struct Listed {
    chunk: u32,
    /// Time of the last fault in it, faults so far.
    touched: u64,
}

/// The chunks with pages here.
pub struct WorkingSet {
    /// Place in the list, plus one; 0: not listed.
    places: *mut u32,
    list: *mut Listed,
    count: usize,
    clock: u64,
}

// SAFETY: the arrays belong to the engine, whose lock guards every access.
unsafe impl Send for WorkingSet {}

impl WorkingSet {
    /// An empty set; its arrays take memory as they are touched.
    pub fn new() -> Result<WorkingSet> {
        Ok(WorkingSet {
            places: kernel::allocate(CHUNKS * size_of::<u32>())?.cast(),
            list: kernel::allocate(CHUNKS * size_of::<Listed>())?.cast(),
            count: 0,
            clock: 0,
        })
    }

    fn place(&mut self, chunk: u64) -> &mut u32 {
        assert!((chunk as usize) < CHUNKS);
        // SAFETY: in bounds (asserted).
        unsafe { &mut *self.places.add(chunk as usize) }
    }

    fn listed(&mut self, index: usize) -> &mut Listed {
        assert!(index < self.count);
        // SAFETY: below `count`, which is at most CHUNKS.
        unsafe { &mut *self.list.add(index) }
    }

    /// A page of the chunk arrived, or was needed.
    pub fn touch(&mut self, chunk: u64) {
        self.clock += 1;
        let touched = self.clock;
        let place = *self.place(chunk) as usize;
        if place > 0 {
            self.listed(place - 1).touched = touched;
            return;
        }
        self.count += 1;
        let index = self.count - 1;
        *self.listed(index) = Listed {
            chunk: chunk as u32,
            touched,
        };
        *self.place(chunk) = self.count as u32;
    }

    /// The chunk needed least recently.
    pub fn coldest(&mut self) -> Option<u64> {
        (0..self.count)
            .map(|index| *self.listed(index))
            .min_by_key(|listed| listed.touched)
            .map(|listed| u64::from(listed.chunk))
    }

    /// Nothing of the chunk is here any more.
    pub fn forget(&mut self, chunk: u64) {
        let place = *self.place(chunk) as usize;
        if place == 0 {
            return;
        }
        let last = *self.listed(self.count - 1);
        *self.listed(place - 1) = last;
        *self.place(u64::from(last.chunk)) = place as u32;
        *self.place(chunk) = 0;
        self.count -= 1;
    }

    /// The chunk at a place of the list, which has no order.
    pub fn chunk(&mut self, index: usize) -> u64 {
        u64::from(self.listed(index).chunk)
    }

    /// How many chunks are listed.
    pub fn len(&self) -> usize {
        self.count
    }
}
