//! Blocks of pages that a slice wants of others, and those that it can give away: what
//! [`super::exchange`] goes by.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// Pages that are exchanged at a time, and aligned to this: 256 KiB.
pub const BLOCK_PAGES: u64 = 64;

/// Faults in a block, within [`PERIOD`], that make it wanted.
const FAULTS: u32 = 2;
/// Blocks that are wanted at most, and that are known to be cold.
pub(super) const BLOCKS_MAX: usize = 1024;
/// The time for which faults count, and between two looks for cold blocks.
const PERIOD: Duration = Duration::from_secs(1);

/// Moves blocks between slices.
pub trait BlockMover: Send + Sync {
    /// Whether a slice gives blocks that are wanted.
    fn gives(&self, slice: usize) -> bool;

    /// A block is wanted. Must not block: the thread is one that faulted.
    fn wanted(&self);
}

/// Blocks of one slice that it wants, or can give away.
#[derive(Default)]
pub(super) struct ExchangedBlocks {
    /// `None`: nothing is exchanged.
    pub mover: OnceLock<Box<dyn BlockMover>>,
    /// Nothing else is locked meanwhile.
    blocks: Mutex<Blocks>,
}

#[derive(Default)]
pub(super) struct Blocks {
    /// When the faults began to count.
    since: Duration,
    /// Remote faults of vCPUs, by block.
    faults: BTreeMap<u64, u32>,
    pub wanted: VecDeque<u64>,
    /// The coldest last.
    pub cold: Vec<u64>,
    /// When it looked for cold ones; `None`: not yet.
    looked: Option<Duration>,
}

impl Blocks {
    /// Whether a block is wanted since this fault.
    pub fn fault(&mut self, block: u64, now: Duration) -> bool {
        if now >= self.since + PERIOD {
            self.since = now;
            self.faults.clear();
        }
        let faults = self.faults.entry(block).or_default();
        *faults += 1;
        let is_new = *faults == FAULTS && self.wanted.len() < BLOCKS_MAX;
        if is_new {
            self.wanted.push_back(block);
        }
        is_new
    }

    /// Whether it is time to look for cold blocks.
    pub fn must_look(&self, now: Duration) -> bool {
        self.cold.is_empty() && self.looked.is_none_or(|looked| now >= looked + PERIOD)
    }

    /// These are cold, the coldest first.
    pub fn found(&mut self, blocks: Vec<u64>, now: Duration) {
        self.looked = Some(now);
        self.cold = blocks;
        self.cold.reverse();
    }
}

impl ExchangedBlocks {
    pub fn blocks(&self) -> MutexGuard<'_, Blocks> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) fn pages_of(block: u64) -> Range<u64> {
    block * BLOCK_PAGES..(block + 1) * BLOCK_PAGES
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(9);

    #[test]
    fn a_block_is_wanted_once_in_a_period() {
        let mut blocks = Blocks::default();
        let faults = [7, 8, 7, 7, 8].map(|block| blocks.fault(block, NOW));
        assert_eq!(faults, [false, false, true, false, true]);
        assert_eq!(blocks.wanted, [7, 8]);
        assert!(!blocks.fault(7, NOW + PERIOD), "the first in this period");
        assert!(blocks.fault(7, NOW + PERIOD));
    }

    #[test]
    fn the_coldest_block_goes_first() {
        let mut blocks = Blocks::default();
        assert!(blocks.must_look(NOW));
        blocks.found(vec![4, 5, 2, 1], NOW);
        assert_eq!(blocks.cold.last(), Some(&4));
        assert!(!blocks.must_look(NOW + PERIOD));
        blocks.cold.clear();
        assert!(!blocks.must_look(NOW), "it has just looked");
        assert!(blocks.must_look(NOW + PERIOD));
    }

    #[test]
    fn wanted_blocks_are_bounded() {
        let mut blocks = Blocks::default();
        for block in 0..2 * BLOCKS_MAX as u64 {
            let is_wanted = (0..FAULTS).any(|_| blocks.fault(block, NOW));
            assert_eq!(is_wanted, block < BLOCKS_MAX as u64);
        }
        assert_eq!(blocks.wanted.len(), BLOCKS_MAX);
    }
}
