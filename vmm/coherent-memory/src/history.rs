//! What a slice's users did with its pages lately: one byte for each page, after S-memV
//! ([`weft_dsm::history`]). A byte is shifted after each [`LOOKS`] looks that found a use:
//! while a machine is paused, its history stays as it was.

use std::ops::Range;
use std::time::Duration;

use weft_dsm::controller::Rights;
use weft_dsm::history::{ChunkHistory, History};
use weft_dsm::{CHUNK_PAGES, Page};

use super::tables::zeroed;

/// Between two looks at the marks.
const LOOK: Duration = Duration::from_secs(1);
/// Looks that found a use, for which the bytes are shifted once.
const LOOKS: u32 = 4;

/// What a free part counts as at least: used 8 to 12 s ago, and all the time before: it is what the
/// guest allocates next.
pub(super) const FREE_HISTORY: u8 = 0x3f;

/// Consecutive pages with the same history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HistoryRun {
    /// The first page.
    pub first: u64,
    /// How many.
    pub count: u64,
    /// Eight bits, the highest for the latest use.
    pub bits: u8,
}

/// The history of a slice's pages. Its tables are sparse.
pub(super) struct PageHistory {
    pages: Box<[u8]>,
    chunks: Box<[ChunkHistory]>,
    epoch: u32,
    /// Looks of this epoch that found a use.
    looks: u32,
    /// When it looked last.
    looked: Duration,
    /// By chunk, when a split was asked for: its history, and how many of its pages this slice
    /// managed.
    pub split: Vec<(u8, u64)>,
}

impl PageHistory {
    pub fn new(pages: usize) -> Self {
        let chunks = pages.div_ceil(CHUNK_PAGES as usize);
        // SAFETY: zero bytes are valid bytes, and a chunk that was never touched.
        let (pages, chunks) = unsafe { (zeroed(pages), zeroed(chunks)) };
        Self {
            pages,
            chunks,
            epoch: 0,
            looks: 0,
            looked: Duration::ZERO,
            split: Vec::new(),
        }
    }

    fn tables(&mut self) -> Option<History<'_>> {
        // They fit: both are made for the same pages.
        History::new(&mut self.pages, &mut self.chunks).ok()
    }

    /// Takes the marks of use if it has not for a second; whether it did.
    pub fn look_in_time(&mut self, rights: &Rights, now: Duration) -> bool {
        let is_due = now >= self.looked + LOOK;
        if is_due {
            self.looked = now;
            self.look(rights);
        }
        is_due
    }

    /// Takes the marks of use.
    pub fn look(&mut self, rights: &Rights) {
        let (epoch, mut any) = (self.epoch, false);
        let Some(mut history) = self.tables() else {
            return;
        };
        rights.take_touched(|page| {
            history.touch(Page(page), epoch);
            any = true;
        });
        self.looks += u32::from(any);
        if self.looks == LOOKS {
            (self.looks, self.epoch) = (0, self.epoch + 1);
        }
    }

    /// The history of each chunk.
    pub fn chunks(&mut self) -> Vec<u8> {
        let (epoch, count) = (self.epoch, self.chunks.len() as u64);
        let history = self.tables();
        let history =
            history.map(|history| (0..count).map(|at| history.chunk(at, epoch)).collect());
        history.unwrap_or_default()
    }

    /// The OR of the history of these pages.
    pub fn most_used(&mut self, pages: Range<u64>) -> u8 {
        let epoch = self.epoch;
        let history = self.tables();
        let bits = |history: History<'_>| {
            pages.fold(0, |bits, page| bits | history.page(Page(page), epoch))
        };
        history.map_or(0, bits)
    }

    /// Other users used these pages so. Pages that there are not are ignored.
    pub fn learn(&mut self, runs: &[HistoryRun]) {
        let (epoch, end) = (self.epoch, self.pages.len() as u64);
        let Some(mut tables) = self.tables() else {
            return;
        };
        for run in runs {
            for page in run.first..run.first.saturating_add(run.count).min(end) {
                tables.learn(Page(page), run.bits, epoch);
            }
        }
    }

    /// Those of `pages` with a history.
    pub fn used(&mut self, pages: Range<u64>) -> Vec<(u64, u8)> {
        let epoch = self.epoch;
        let mut used = Vec::new();
        let Some(history) = self.tables() else {
            return used;
        };
        for chunk in pages.start / CHUNK_PAGES..pages.end.div_ceil(CHUNK_PAGES) {
            if history.chunk(chunk, epoch) == 0 {
                continue;
            }
            let first = chunk * CHUNK_PAGES;
            let pages = first.max(pages.start)..(first + CHUNK_PAGES).min(pages.end);
            let with_bits = pages.map(|page| (page, history.page(Page(page), epoch)));
            used.extend(with_bits.filter(|(_, bits)| *bits != 0));
        }
        used
    }
}

/// Pages in ascending order as runs.
pub(super) fn runs(pages: Vec<(u64, u8)>) -> Vec<HistoryRun> {
    let mut runs: Vec<HistoryRun> = Vec::new();
    for (page, bits) in pages {
        match runs.last_mut() {
            Some(run) if run.bits == bits && run.first + run.count == page => run.count += 1,
            _ => runs.push(HistoryRun {
                first: page,
                count: 1,
                bits,
            }),
        }
    }
    runs
}
