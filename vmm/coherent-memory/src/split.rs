//! A split of a slice's pages, by what it knows of their use.
//!
//! Each second the evictor's thread takes the marks that users left in the rights
//! ([`Rights::take_touched`]), whether a migration is asked for or not, and has vCPUs look for
//! their pages anew, so that one which stays in a TLB leaves a mark again.
//!
//! [`Rights::take_touched`]: weft_dsm::controller::Rights::take_touched

use std::ops::Range;
use std::sync::{MutexGuard, PoisonError};

use weft_dsm::controller::{Choice, Histogram, Threshold};
use weft_dsm::{CHUNK_PAGES, NodeId};

use super::history::{FREE_HISTORY, HistoryRun, PageHistory, runs};
use super::shell::{PAGE_SHIFT, SharedMemory};

/// Most pages of a free chunk that have memory.
const FREE_PAGES: u64 = CHUNK_PAGES / 8;
/// One page of this many of a chunk says whether they are free.
const SAMPLED: usize = 32;

impl SharedMemory {
    pub(super) fn page_history(&self) -> MutexGuard<'_, PageHistory> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The evictor's thread, at least once a second.
    pub(super) fn look_at_history(&self) {
        let now = self.now();
        let has_looked = self.page_history().look_in_time(&self.rights, now);
        if let (true, Some(notifier)) = (has_looked, self.notifier.get()) {
            notifier.look_anew();
        }
    }

    /// The pages that this slice manages, by the history of their chunk as it is now. What
    /// [`SharedMemory::split`] then goes by. A free chunk comes before
    /// those that were not used for 8 s: it is what the guest allocates next.
    pub fn histogram(&self) -> Histogram {
        let mut histogram = Histogram::default();
        let populated = self.populated_pages(CHUNK_PAGES);
        let mut history = self.page_history();
        history.look(&self.rights);
        let values = history.chunks().into_iter();
        let mut chunks: Vec<(u8, u64)> = values.map(|bits| (bits, 0)).collect();
        for part in self.memory_pages() {
            for chunk in part.start / CHUNK_PAGES..part.end.div_ceil(CHUNK_PAGES) {
                let first = chunk * CHUNK_PAGES;
                let pages = first.max(part.start)..(first + CHUNK_PAGES).min(part.end);
                chunks[chunk as usize].1 += self.homes.count(&pages);
            }
        }
        for ((bits, pages), (chunk, populated)) in chunks.iter_mut().zip((0..).zip(populated)) {
            if *pages > 0 && populated <= FREE_PAGES && self.is_free(chunk) {
                *bits = FREE_HISTORY.max(*bits);
            }
            histogram.add(*bits, *pages);
        }
        history.split = chunks;
        histogram
    }

    /// Whether a chunk without memory here has none elsewhere, by a sample of its pages.
    fn is_free(&self, chunk: u64) -> bool {
        let first = chunk * CHUNK_PAGES;
        let mut pages = (first..first + CHUNK_PAGES).step_by(SAMPLED);
        self.locked(|state| {
            !pages.any(|page| self.homes.manages(page) && state.controller.is_owned_elsewhere(page))
        })
    }

    /// From now on, pages that leave this slice go to `first`, or to other slices, as the
    /// threshold says: by the history at the last [`SharedMemory::histogram`].
    pub fn split(&self, first: NodeId, threshold: Threshold) {
        let chunks = std::mem::take(&mut self.page_history().split);
        let choice = Choice::new(first, threshold, chunks.into_iter());
        self.locked(|state| state.controller.choose(Some(choice)));
    }

    /// Ends [`SharedMemory::split`].
    pub fn end_split(&self) {
        self.locked(|state| state.controller.choose(None));
    }

    /// The history of the pages that go to `node`, as far as that is known.
    pub fn history_for(&self, node: NodeId) -> Vec<HistoryRun> {
        let mut used = Vec::new();
        for pages in self.walk() {
            let some = self.page_history().used(pages);
            self.locked(|state| {
                let goes = |(page, _): &(u64, u8)| state.controller.chooses(*page, node);
                used.extend(some.into_iter().filter(goes));
            });
        }
        runs(used)
    }

    /// The history of the pages that other slices manage, by the slice that does.
    pub fn history_of_others(&self) -> Vec<(NodeId, Vec<HistoryRun>)> {
        let mut used: Vec<(NodeId, Vec<(u64, u8)>)> = Vec::new();
        for pages in self.walk() {
            let some = self.page_history().used(pages);
            self.locked(|state| {
                let others = some
                    .into_iter()
                    .filter(|(page, _)| !self.homes.manages(*page));
                for (page, bits) in others {
                    let manager = state.controller.manager(page);
                    match used.iter_mut().find(|(node, _)| *node == manager) {
                        Some((_, pages)) => pages.push((page, bits)),
                        None => used.push((manager, vec![(page, bits)])),
                    }
                }
            });
        }
        let by_node = used.into_iter();
        by_node.map(|(node, pages)| (node, runs(pages))).collect()
    }

    /// Another slice had these pages, and its users used them so. Pages that there are not
    /// are ignored.
    pub fn learn_history(&self, runs: &[HistoryRun]) {
        self.page_history().learn(runs);
    }

    /// The pages that are memory.
    fn memory_pages(&self) -> impl Iterator<Item = Range<u64>> {
        let parts = self.ram().parts().into_iter();
        parts.map(|(start, length, _)| start >> PAGE_SHIFT..(start + length) >> PAGE_SHIFT)
    }
}
