//! Access history after S-memV (Suetake, Kashiwagi, Kizu and Kourai, "S-memV:
//! Split Migration of Large-memory Virtual Machines in IaaS Clouds", sections
//! IV-B and IV-C): eight bits per page.
//! An access sets the highest bit; at each epoch the byte is shifted to the
//! right by one. A chunk's history is the OR of its pages'.
//!
//! Ageing is lazy: a chunk remembers the epoch in which it was aged last and
//! catches up when it is touched or looked at.
//!
//! Invariants: a chunk's bits are at least the OR of its pages' bits (a page
//! that leaves keeps its mark until it ages); all-zero tables mean "never
//! touched"; epochs do not go back.

use crate::types::{CHUNK_PAGES, Page};

const RECENT: u8 = 0x80;

/// What is remembered of a chunk. Zero bytes: never touched.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, zerocopy::FromZeros)]
pub struct ChunkHistory {
    /// The epoch to which the bits belong.
    aged: u32,
    /// The epoch of the last touch.
    touched: u32,
    /// OR of the pages' bits.
    bits: u8,
    reserved: [u8; 7],
}

impl ChunkHistory {
    /// The chunk's history as of an epoch.
    pub const fn value(&self, epoch: u32) -> u8 {
        shifted(self.bits, epoch.wrapping_sub(self.aged))
    }
    /// The epoch of the last touch.
    pub const fn touched(&self) -> u32 {
        self.touched
    }
}

const fn shifted(bits: u8, by: u32) -> u8 {
    if by >= 8 { 0 } else { bits >> by }
}

/// The history of pages `0..pages.len()`: tables owned by the engine.
#[derive(Debug)]
pub struct History<'a> {
    pages: &'a mut [u8],
    chunks: &'a mut [ChunkHistory],
}

/// The tables do not fit each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{pages} bytes of page history need {needed} chunk records, not {found}")]
pub struct Mismatch {
    pub pages: usize,
    /// Chunk records for that many pages.
    pub needed: usize,
    /// Chunk records given.
    pub found: usize,
}

/// Whether a page may leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Candidate {
    /// A read-only copy: leaves without traffic, so it goes first.
    Copy,
    /// Owned: must be pushed.
    Owned,
    /// Not here, pending, just faulted, or not to be moved.
    Stays,
}

impl<'a> History<'a> {
    /// A view of the engine's tables.
    ///
    /// # Errors
    /// [`Mismatch`] if there is not one chunk record per 512 pages.
    pub fn new(
        pages: &'a mut [u8],
        chunks: &'a mut [ChunkHistory],
    ) -> Result<History<'a>, Mismatch> {
        let needed = pages.len().div_ceil(CHUNK_PAGES as usize);
        if chunks.len() < needed {
            return Err(Mismatch {
                pages: pages.len(),
                needed,
                found: chunks.len(),
            });
        }
        Ok(History { pages, chunks })
    }

    fn span(&self, chunk: u64) -> core::ops::Range<usize> {
        let first = (chunk * CHUNK_PAGES) as usize;
        first.min(self.pages.len())..(first + CHUNK_PAGES as usize).min(self.pages.len())
    }

    fn age(&mut self, chunk: u64, epoch: u32) {
        let span = self.span(chunk);
        let record = &mut self.chunks[chunk as usize];
        let by = epoch.wrapping_sub(record.aged);
        if by == 0 {
            return;
        }
        record.bits = shifted(record.bits, by);
        record.aged = epoch;
        for bits in &mut self.pages[span] {
            *bits = shifted(*bits, by);
        }
    }

    /// The page was accessed. Pages beyond the tables are ignored.
    pub fn touch(&mut self, page: Page, epoch: u32) {
        let index = page.0 as usize;
        if index >= self.pages.len() {
            return;
        }
        let chunk = page.chunk();
        self.age(chunk, epoch);
        self.pages[index] |= RECENT;
        let record = &mut self.chunks[chunk as usize];
        record.bits |= RECENT;
        record.touched = epoch;
    }

    /// A page's history as of an epoch.
    pub fn page(&self, page: Page, epoch: u32) -> u8 {
        let index = page.0 as usize;
        match (
            self.pages.get(index),
            self.chunks.get(page.chunk() as usize),
        ) {
            (Some(&bits), Some(record)) => shifted(bits, epoch.wrapping_sub(record.aged)),
            _ => 0,
        }
    }

    /// A chunk's history as of an epoch.
    pub fn chunk(&self, chunk: u64, epoch: u32) -> u8 {
        self.chunks
            .get(chunk as usize)
            .map_or(0, |record| record.value(epoch))
    }

    /// The coldest of the given chunks: least history, then touched longest ago.
    pub fn coldest(&self, chunks: impl Iterator<Item = u64>, epoch: u32) -> Option<u64> {
        chunks
            .filter(|&chunk| (chunk as usize) < self.chunks.len())
            .min_by_key(|&chunk| {
                let record = &self.chunks[chunk as usize];
                let age = epoch.wrapping_sub(record.touched);
                (record.value(epoch), u32::MAX - age)
            })
    }

    /// Chooses up to `wanted` pages of a chunk to leave, read-only copies first,
    /// and calls `emit(first, count)` for each run of consecutive ones. Returns
    /// how many were chosen.
    pub fn victims(
        &self,
        chunk: u64,
        wanted: u16,
        mut candidate: impl FnMut(Page) -> Candidate,
        mut emit: impl FnMut(Page, u16),
    ) -> u16 {
        let mut left = wanted;
        for kind in [Candidate::Copy, Candidate::Owned] {
            let mut run: Option<(Page, u16)> = None;
            for page in self.span(chunk).map(|index| Page(index as u64)) {
                if left > 0 && candidate(page) == kind {
                    left -= 1;
                    let (first, count) = run.unwrap_or((page, 0));
                    run = Some((first, count + 1));
                } else if let Some((first, count)) = run.take() {
                    emit(first, count);
                }
            }
            if let Some((first, count)) = run {
                emit(first, count);
            }
        }
        wanted - left
    }
}

/// Splits pages into hot and cold without sorting: counts per history value,
/// then a threshold (S-memV, section IV-C).
#[derive(Debug, Clone)]
pub struct Histogram {
    counts_pages: [u64; 256],
}

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram {
            counts_pages: [0; 256],
        }
    }
}

/// Which pages are cold: all below the threshold, and some at it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Split {
    /// Pages with less history than this are cold.
    pub threshold: u8,
    /// So many pages with exactly that history are cold too.
    pub at_threshold_pages: u64,
}

impl Histogram {
    /// Counts `pages` pages (of one chunk, say) with a history.
    pub fn add(&mut self, value: u8, pages: u64) {
        self.counts_pages[usize::from(value)] += pages;
    }

    /// The split that makes `cold_pages` pages cold, or all if there are fewer.
    pub fn split(&self, cold_pages: u64) -> Split {
        let mut left = cold_pages;
        for (value, &count) in self.counts_pages.iter().enumerate() {
            if count >= left {
                return Split {
                    threshold: value as u8,
                    at_threshold_pages: left,
                };
            }
            left -= count;
        }
        Split {
            threshold: u8::MAX,
            at_threshold_pages: self.counts_pages[255],
        }
    }
}

impl Split {
    /// How many of `pages` pages with a history are cold. Called once for each
    /// group that was added, in any order.
    pub fn cold_pages(&mut self, value: u8, pages: u64) -> u64 {
        if value < self.threshold {
            return pages;
        }
        if value > self.threshold {
            return 0;
        }
        let taken = pages.min(self.at_threshold_pages);
        self.at_threshold_pages -= taken;
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tables(chunks: usize) -> (Vec<u8>, Vec<ChunkHistory>) {
        (
            vec![0; chunks * CHUNK_PAGES as usize],
            vec![ChunkHistory::default(); chunks],
        )
    }

    #[test]
    fn accesses_age_and_are_gone_after_eight_epochs() {
        let (mut pages, mut chunks) = tables(1);
        let mut history = History::new(&mut pages, &mut chunks).unwrap();
        history.touch(Page(3), 1);
        history.touch(Page(4), 3);
        assert_eq!(history.page(Page(3), 3), 0x20);
        assert_eq!(history.page(Page(4), 3), 0x80);
        assert_eq!(history.chunk(0, 3), 0xA0);
        history.touch(Page(3), 4);
        assert_eq!(history.page(Page(3), 4), 0x90);
        assert_eq!(history.chunk(0, 4), 0xD0);
        assert_eq!(history.page(Page(3), 11), 1);
        assert_eq!(history.chunk(0, 12), 0);
        history.touch(Page(511), 400);
        assert_eq!(history.page(Page(3), 400), 0);
        history.touch(Page(512), 400);
    }

    #[test]
    fn the_coldest_chunk_by_history_then_age() {
        let (mut pages, mut chunks) = tables(4);
        let mut history = History::new(&mut pages, &mut chunks).unwrap();
        history.touch(Page(0), 1);
        history.touch(Page(512), 2);
        history.touch(Page(1024), 30);
        assert_eq!(history.coldest(0..3, 30), Some(0));
        assert_eq!(history.coldest(1..3, 30), Some(1));
        assert_eq!(history.coldest(2..9, 30), Some(3));
        assert_eq!(history.coldest(9..12, 30), None);
    }

    #[test]
    fn victims_are_runs_and_copies_go_first() {
        let (mut pages, mut chunks) = tables(1);
        let history = History::new(&mut pages, &mut chunks).unwrap();
        let candidate = |page: Page| match page.0 {
            0..4 | 8..10 => Candidate::Owned,
            4..6 | 100 => Candidate::Copy,
            _ => Candidate::Stays,
        };
        let mut runs = Vec::new();
        let chosen = history.victims(0, 8, candidate, |first, count| runs.push((first.0, count)));
        assert_eq!(chosen, 8);
        assert_eq!(runs, [(4, 2), (100, 1), (0, 4), (8, 1)]);
        let chosen = history.victims(0, 500, candidate, |_, _| {});
        assert_eq!(chosen, 9);
    }

    #[test]
    fn the_split_takes_exactly_what_is_asked() {
        let groups = [
            (0, 10),
            (0x80, 512),
            (1, 30),
            (0x80, 100),
            (0xFF, 512),
            (1, 7),
        ];
        let mut histogram = Histogram::default();
        let mut total = 0;
        for (value, pages) in groups {
            histogram.add(value, pages);
            total += pages;
        }
        for wanted in 0..=total {
            let mut split = histogram.split(wanted);
            let cold: u64 = groups
                .iter()
                .map(|&(value, pages)| split.cold_pages(value, pages))
                .sum();
            assert_eq!(cold, wanted);
        }
        let mut split = histogram.split(total + 5);
        let cold: u64 = groups
            .iter()
            .map(|&(value, pages)| split.cold_pages(value, pages))
            .sum();
        assert_eq!(cold, total);
    }

    #[test]
    fn tables_that_do_not_fit_are_refused() {
        let (mut pages, _) = tables(2);
        let mut chunks = [ChunkHistory::default(); 1];
        let mismatch = History::new(&mut pages, &mut chunks).err();
        assert_eq!(mismatch.map(|mismatch| mismatch.needed), Some(2));
    }
}
