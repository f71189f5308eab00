//! Which pages a slice exchanges with those that manage them, after S-memV, section IV-E: what
//! its vCPUs fetch page by page comes as a block, with its management, and a block that nobody
//! here uses goes there for it.
//!
//! This file chooses the blocks; `weft_aggregate::membership` moves them. Blocks are smaller than
//! the chunks of a split: one costs as much as some ten single faults.

use std::ops::{ControlFlow, Range};

use weft_dsm::NodeId;
use weft_dsm::controller::{ColdLook, DrainPlan, DrainTarget};

use super::blocks::{BLOCK_PAGES, BLOCKS_MAX, BlockMover, pages_of};
use super::counters::MemoryCounters;
use super::history::FREE_HISTORY;
use super::shell::{PAGE_SHIFT, SharedMemory};

/// Pages of a block that are under way at a time: a fault's message waits behind them.
const WINDOW_PAGES: usize = 16;
/// A block with more history was used in the last 4 to 8 s, and stays: blocks that are used in
/// turns would go to and fro.
const COLD: u8 = 0x3f;

impl SharedMemory {
    /// From now on faults of vCPUs make blocks wanted. Once.
    pub fn exchange_by(&self, mover: Box<dyn BlockMover>) {
        // Only the first counts.
        let _ = self.exchange.mover.set(mover);
    }

    /// A vCPU waited for a page that `from` served.
    pub(super) fn count_for_exchange(&self, page: u64, from: Option<usize>) {
        let mover = self.exchange.mover.get();
        let Some((mover, from)) = mover.zip(from) else {
            return;
        };
        if self.homes.manages(page) || !mover.gives(from) {
            return;
        }
        let now = self.now();
        let is_wanted = self.exchange.blocks().fault(page / BLOCK_PAGES, now);
        if is_wanted {
            mover.wanted();
        }
    }

    /// A block that is wanted, as far as one slice manages it, and which that is.
    pub fn take_wanted(&self) -> Option<(NodeId, Range<u64>)> {
        loop {
            let block = self.exchange.blocks().wanted.pop_front()?;
            let pages = pages_of(block);
            let mut others = pages.clone().filter(|page| !self.homes.manages(*page));
            if let Some(page) = others.find(|page| self.host(*page).is_some()) {
                return Some((self.locked(|state| state.controller.manager(page)), pages));
            }
        }
    }

    /// The block of this slice that was used least, if one was not used lately. Each is told once.
    pub fn take_cold(&self) -> Option<Range<u64>> {
        match self.has_cold() {
            true => self.exchange.blocks().cold.pop().map(pages_of),
            false => None,
        }
    }

    /// Whether there is one. The thread that drains alone calls this.
    pub fn has_cold(&self) -> bool {
        let now = self.now();
        if self.exchange.blocks().must_look(now) {
            let found = self.cold_blocks();
            self.exchange.blocks().found(found, now);
        }
        loop {
            let last = self.exchange.blocks().cold.last().copied();
            match last {
                None => return false,
                Some(block) if self.is_cold(block) => return true,
                // It was used since.
                Some(_) => drop(self.exchange.blocks().cold.pop()),
            }
        }
    }

    fn is_cold(&self, block: u64) -> bool {
        let pages = pages_of(block);
        self.homes.count(&pages) > 0 && self.page_history().most_used(pages) <= COLD
    }

    /// Blocks that can go, the coldest first. Free ones are last: that is what the guest allocates
    /// next.
    fn cold_blocks(&self) -> Vec<u64> {
        let chunks = self.page_history().chunks();
        let look = ColdLook {
            homes: &self.homes,
            chunks: &chunks,
            populated: &self.populated_pages(BLOCK_PAGES),
            block_pages: BLOCK_PAGES,
            most: COLD,
            free: FREE_HISTORY,
        };
        look.coldest(BLOCKS_MAX, |pages| self.page_history().most_used(pages))
    }

    /// Moves these pages to another slice, with their management, as far as this one manages them
    /// and `is_over` does not say so; how many have another manager now. The calling thread is the
    /// one that drains.
    pub fn give_block(
        &self,
        to: DrainTarget,
        pages: Range<u64>,
        mut is_over: impl FnMut() -> bool,
    ) -> u64 {
        let plan = DrainPlan {
            pages: vec![pages],
            targets: vec![to],
            window_pages: WINDOW_PAGES,
        };
        let progress = self.drain(plan, |progress| match progress.lacks_target || is_over() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        });
        MemoryCounters::add(&self.counters.exchanged_out, progress.handed_over);
        progress.handed_over
    }

    /// Whether bytes of pages are still in files.
    pub fn has_absent(&self) -> bool {
        self.rights.absent() > 0
    }

    /// By consecutive parts of `part_pages` pages, how many have memory here; all of them where that
    /// is not known.
    pub(super) fn populated_pages(&self, part_pages: u64) -> Vec<u64> {
        let parts = (self.end >> PAGE_SHIFT).div_ceil(part_pages) as usize;
        let Ok(ranges) = self.ram().populated() else {
            return vec![part_pages; parts];
        };
        let mut pages = vec![0; parts];
        for range in ranges {
            let end = range.end >> PAGE_SHIFT;
            let mut at = range.start >> PAGE_SHIFT;
            while at < end {
                let part = at / part_pages;
                let next = ((part + 1) * part_pages).min(end);
                if let Some(pages) = pages.get_mut(part as usize) {
                    *pages += next - at;
                }
                at = next;
            }
        }
        pages
    }
}
