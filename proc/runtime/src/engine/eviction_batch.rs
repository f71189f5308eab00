//! Runs of pages that leave for one node with one system call.
//!
//! The pages of a working set that does not fit lie here and there, so most runs
//! are short, and a system call for each costs more than its pages. What is
//! added is sent and dropped before anything else is sent or changed
//! ([`super::io`]): nobody can tell it from one run after the other.

use weft_dsm::PAGE_BYTES;
use weft_dsm::message::{self, Run};
use weft_wire::{FRAMES_MAX, Header, Link, LinkError};

/// Pages that leave together, at most: what a socket takes at once.
const PAGES_MAX: u64 = 128;

/// The runs. They all go to the same node.
pub struct EvictionBatch {
    runs: [Option<Run>; FRAMES_MAX],
    count: usize,
    pages: u64,
    to: usize,
}

impl EvictionBatch {
    /// Nothing leaves.
    pub const fn new() -> EvictionBatch {
        EvictionBatch {
            runs: [None; FRAMES_MAX],
            count: 0,
            pages: 0,
            to: 0,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub fn to(&self) -> usize {
        self.to
    }

    /// Whether another run may go along.
    pub fn takes(&self, to: usize, run: &Run) -> bool {
        let fits = self.count < FRAMES_MAX && self.pages + u64::from(run.count) <= PAGES_MAX;
        self.is_empty() || self.to == to && fits
    }

    /// One more run, which [`EvictionBatch::takes`].
    pub fn add(&mut self, to: usize, run: &Run) {
        self.to = to;
        self.runs[self.count] = Some(*run);
        self.count += 1;
        self.pages += u64::from(run.count);
    }

    /// Takes a run out.
    pub fn pop(&mut self) -> Option<Run> {
        self.count = self.count.checked_sub(1)?;
        let run = self.runs[self.count].take()?;
        self.pages -= u64::from(run.count);
        Some(run)
    }

    /// Sends all of them.
    ///
    /// # Safety
    /// The pages are present and readable, and nobody writes to them.
    pub unsafe fn send(&self, link: &mut Link) -> Result<(), LinkError> {
        let mut frames = [(Header::new(0), &[][..]); FRAMES_MAX];
        for (frame, run) in frames.iter_mut().zip(self.runs.iter().flatten()) {
            let start = run.first.page.0 as usize * PAGE_BYTES;
            let length = usize::from(run.count) * PAGE_BYTES;
            // SAFETY: the caller's promise.
            let bytes = unsafe { core::slice::from_raw_parts(start as *const u8, length) };
            *frame = (message::encode(run), bytes);
        }
        link.send_frames(&frames[..self.count])
    }
}
