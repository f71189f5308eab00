//! Which blocks of its pages a node used least: what it gives away for blocks that it wants, after
//! S-memV, section IV-E. One walk over the chunks of 2 MiB; only in those with a history are the
//! pages looked at.

use std::ops::Range;

use super::Homes;
use crate::types::CHUNK_PAGES;

/// What a node knows of its pages. Blocks are aligned parts of a chunk.
pub struct ColdLook<'a> {
    /// Which pages it manages.
    pub homes: &'a Homes,
    /// By chunk, its history.
    pub chunks: &'a [u8],
    /// By block, how many of its pages have memory. Blocks behind the end count as populated.
    pub populated: &'a [u64],
    /// Pages of a block: a divisor of [`CHUNK_PAGES`].
    pub block_pages: u64,
    /// A block with more history stays.
    pub most: u8,
    /// The history that a block without memory has at least.
    pub free: u8,
}

impl ColdLook<'_> {
    /// The `count` blocks with the least history, the coldest first, of those that the node
    /// manages a page of. `most_used` has the OR of the history of pages.
    pub fn coldest(&self, count: usize, most_used: impl FnMut(Range<u64>) -> u8) -> Vec<u64> {
        let mut found = self.blocks(most_used);
        if found.len() > count {
            // Nothing that stays is sorted.
            found.select_nth_unstable(count);
            found.truncate(count);
        }
        found.sort_unstable();
        found.into_iter().map(|(_, block)| block).collect()
    }

    fn blocks(&self, mut most_used: impl FnMut(Range<u64>) -> u8) -> Vec<(u8, u64)> {
        let mut found = Vec::new();
        for (chunk, used) in (0..).zip(self.chunks) {
            let first = chunk * CHUNK_PAGES;
            if self.homes.count(&(first..first + CHUNK_PAGES)) == 0 {
                continue;
            }
            for block in first / self.block_pages..(first + CHUNK_PAGES) / self.block_pages {
                let pages = block * self.block_pages..(block + 1) * self.block_pages;
                if self.homes.count(&pages) == 0 {
                    continue;
                }
                let mut history = match used {
                    0 => 0,
                    _ => most_used(pages),
                };
                if self.populated.get(block as usize) == Some(&0) {
                    history = self.free.max(history);
                }
                if history <= self.most {
                    found.push((history, block));
                }
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: u64 = CHUNK_PAGES / 8;

    /// The coldest blocks of a node that manages all of three chunks but block 1. Block 23 has no
    /// memory.
    fn coldest(count: usize) -> Vec<u64> {
        let homes = Homes::new(0..3 * CHUNK_PAGES, 3 * CHUNK_PAGES);
        (BLOCK..2 * BLOCK).for_each(|page| homes.set(page, false));
        let mut populated = [BLOCK; 24];
        populated[23] = 0;
        let look = ColdLook {
            homes: &homes,
            chunks: &[0, 0xff, 0],
            populated: &populated,
            block_pages: BLOCK,
            most: 0x3f,
            free: 0x3f,
        };
        // Of the second chunk: block 8 was used a while ago, the others now.
        look.coldest(count, |pages| match pages.start / BLOCK {
            8 => 1,
            _ => 0x80,
        })
    }

    #[test]
    fn used_blocks_and_those_of_others_stay() {
        let all = [0, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 8, 23];
        assert_eq!(coldest(24), all, "free blocks last");
    }

    #[test]
    fn the_coldest_are_chosen() {
        assert_eq!(coldest(14), coldest(24)[..14]);
        assert_eq!(coldest(15).last(), Some(&8));
        assert!(coldest(0).is_empty());
    }
}
