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

    /// The page was used elsewhere as these bits say, which are as of the epoch. Pages beyond
    /// the tables are ignored.
    pub fn learn(&mut self, page: Page, bits: u8, epoch: u32) {
        let index = page.0 as usize;
        if index >= self.pages.len() || bits == 0 {
            return;
        }
        let chunk = page.chunk();
        self.age(chunk, epoch);
        self.pages[index] |= bits;
        self.chunks[chunk as usize].bits |= bits;
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
    fn what_was_learned_ages_like_the_rest() {
        let (mut pages, mut chunks) = tables(1);
        let mut history = History::new(&mut pages, &mut chunks).unwrap();
        history.touch(Page(3), 1);
        history.learn(Page(3), 0x81, 2);
        history.learn(Page(4), 0x20, 2);
        history.learn(Page(512), 0x80, 2);
        assert_eq!(history.page(Page(3), 2), 0xC1);
        assert_eq!(history.page(Page(4), 3), 0x10);
        assert_eq!(history.chunk(0, 3), 0x70);
        history.learn(Page(5), 0, 200);
        assert_eq!(history.chunk(0, 3), 0x70);
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
    fn tables_that_do_not_fit_are_refused() {
        let (mut pages, _) = tables(2);
        let mut chunks = [ChunkHistory::default(); 1];
        let mismatch = History::new(&mut pages, &mut chunks).err();
        assert_eq!(mismatch.map(|mismatch| mismatch.needed), Some(2));
    }
}
