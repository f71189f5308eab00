//! The pages that a vCPU used last, from what was filled into its TLB.
//!
//! Invariants:
//!
//! - One thread adds pages, the vCPU's own; others read at any time, and may miss what is
//!   added meanwhile.
//! - A page is added again at most once in [`REPEAT`] additions, as long as its slot in
//!   `seen` is its own: two pages that share an entry of the TLB do not
//!   displace all others.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use weft_vcpu::{Access, PAGE_SIZE, PageRun};

use crate::zeroed::zeroed_words;

/// Pages that are remembered: 128 MiB of guest memory, in 128 KiB.
const PAGES: usize = 1 << 15;
/// Pages of another vCPU that count as used by it lately.
const OTHERS_PAGES: usize = 1 << 12;
/// Slots of pages that were added lately.
const SLOTS: usize = 1 << 10;
/// After this many additions each page may be added again.
const REPEAT: usize = PAGES / 4;

/// What a vCPU did with a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u32)]
pub enum PageUse {
    /// It read the page.
    Read = 0,
    /// It read the page, and no other node had it: writes that follow are not seen.
    Writable = 1,
    Written = 2,
}

impl PageUse {
    pub fn of_access(is_write: bool, may_write: bool) -> Self {
        match (is_write, may_write) {
            (true, _) => Self::Written,
            (false, true) => Self::Writable,
            (false, false) => Self::Read,
        }
    }
}

/// A page and its use as one word that is not zero. `None` beyond 4 TiB.
fn pack(physical: u64, used: PageUse) -> Option<u32> {
    let number = u32::try_from(physical / PAGE_SIZE + 1).ok()?;
    (number <= u32::MAX >> 2).then_some(number << 2 | used as u32)
}

/// The page's number, and its use.
fn unpack(word: u32) -> (u64, PageUse) {
    let used = match word & 3 {
        0 => PageUse::Read,
        1 => PageUse::Writable,
        _ => PageUse::Written,
    };
    (u64::from(word >> 2) - 1, used)
}

/// The record of one vCPU, which other threads read.
pub struct RecentPages {
    /// A ring of packed pages.
    ring: Box<[AtomicU32]>,
    /// Pages added since the vCPU came.
    added: AtomicUsize,
}

impl Default for RecentPages {
    fn default() -> Self {
        Self {
            ring: zeroed_words(PAGES),
            added: AtomicUsize::new(0),
        }
    }
}

impl RecentPages {
    /// The pages added last, at most `most` additions, the latest first; some come twice.
    fn latest(&self, most: usize) -> impl Iterator<Item = (u64, PageUse)> {
        let added = self.added.load(Ordering::Acquire);
        let oldest = added.saturating_sub(most.min(PAGES));
        let words = (oldest..added).rev();
        let words = words.map(|at| self.ring[at % PAGES].load(Ordering::Relaxed));
        words.filter(|word| *word != 0).map(unpack)
    }

    fn add(&self, word: u32) -> usize {
        let added = self.added.load(Ordering::Relaxed);
        self.ring[added % PAGES].store(word, Ordering::Relaxed);
        self.added.store(added + 1, Ordering::Release);
        added + 1
    }
}

/// The side of the vCPU's own thread.
pub struct PageRecorder {
    pages: Arc<RecentPages>,
    /// By page number: what was added lately.
    seen: Box<[u32; SLOTS]>,
}

impl PageRecorder {
    pub fn new(pages: Arc<RecentPages>) -> Self {
        let seen = Box::new([0; SLOTS]);
        Self { pages, seen }
    }

    /// Whether `pages` is what this one records.
    pub fn is_of(&self, pages: &Arc<RecentPages>) -> bool {
        Arc::ptr_eq(&self.pages, pages)
    }

    /// The page at `physical` is used from now on.
    #[inline]
    pub fn add(&mut self, physical: u64, used: PageUse) {
        let Some(word) = pack(physical, used) else {
            return;
        };
        let seen = &mut self.seen[(physical / PAGE_SIZE) as usize % SLOTS];
        // One that was written stays so.
        if *seen >> 2 == word >> 2 && *seen >= word {
            return;
        }
        *seen = word;
        if self.pages.add(word).is_multiple_of(REPEAT) {
            self.seen.fill(0);
        }
    }

    /// The pages that this vCPU used since the last call, the latest first, and then those of
    /// `cached`. Without the pages that one of `others` wrote lately: they would be taken from
    /// it. A page that only this vCPU used, and that no other node had, will be written.
    pub fn take<'a>(
        &mut self,
        cached: impl Iterator<Item = (u64, PageUse)>,
        others: impl Iterator<Item = &'a RecentPages>,
    ) -> Vec<PageRun> {
        let mut order = Vec::new();
        let mut uses = HashMap::new();
        for (page, used) in self.pages.latest(PAGES).chain(cached) {
            match uses.entry(page) {
                Entry::Vacant(entry) => {
                    order.push(page);
                    entry.insert(Some(used));
                }
                Entry::Occupied(mut entry) => {
                    let before = *entry.get();
                    entry.insert(before.max(Some(used)));
                }
            }
        }
        for (page, theirs) in others.flat_map(|other| other.latest(OTHERS_PAGES)) {
            if let Some(used) = uses.get_mut(&page) {
                let is_left = used.is_none() || theirs == PageUse::Written;
                *used = (!is_left).then_some(PageUse::Read);
            }
        }
        self.seen.fill(0);
        self.pages.added.store(0, Ordering::Release);
        let access = |page: u64| match uses.get(&page).copied().flatten()? {
            PageUse::Read => Some((page, Access::Read)),
            PageUse::Writable | PageUse::Written => Some((page, Access::Write)),
        };
        runs(order.into_iter().filter_map(access))
    }
}

/// Neighbours in the order, if they are neighbours in memory, as one run.
fn runs(pages: impl Iterator<Item = (u64, Access)>) -> Vec<PageRun> {
    let mut runs: Vec<PageRun> = Vec::new();
    for (page, access) in pages {
        match runs.last_mut().filter(|run| run.access == access) {
            Some(run) if page == run.first + run.count => run.count += 1,
            Some(run) if page + 1 == run.first => {
                run.first = page;
                run.count += 1;
            }
            _ => runs.push(PageRun {
                first: page,
                count: 1,
                access,
            }),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    use PageUse::{Read, Writable, Written};

    fn recorder() -> PageRecorder {
        PageRecorder::new(Arc::default())
    }

    fn add(recorder: &mut PageRecorder, pages: &[(u64, PageUse)]) {
        for (page, used) in pages {
            recorder.add(page * PAGE_SIZE, *used);
        }
    }

    fn taken(
        recorder: &mut PageRecorder,
        cached: &[(u64, PageUse)],
        others: &[&PageRecorder],
    ) -> Vec<(u64, u64, Access)> {
        let others = others.iter().map(|other| &*other.pages);
        let runs = recorder.take(cached.iter().copied(), others);
        let runs = runs.iter().map(|run| (run.first, run.count, run.access));
        runs.collect()
    }

    #[test]
    fn the_latest_pages_come_first_and_once() {
        let mut recorder = recorder();
        add(&mut recorder, &[(7, Read), (8, Read), (3, Read), (9, Read)]);
        add(&mut recorder, &[(0, Written), (1, Writable), (7, Read)]);
        let expected = [
            (0, 2, Access::Write),
            (9, 1, Access::Read),
            (3, 1, Access::Read),
            (7, 2, Access::Read),
        ];
        assert_eq!(taken(&mut recorder, &[], &[]), expected);
        assert_eq!(taken(&mut recorder, &[], &[]), [], "it is forgotten");
        add(&mut recorder, &[(7, Read)]);
        assert_eq!(taken(&mut recorder, &[], &[]), [(7, 1, Access::Read)]);
    }

    #[test]
    fn a_page_that_was_read_and_written_is_one_to_write() {
        let mut recorder = recorder();
        add(&mut recorder, &[(5, Read), (5, Written), (5, Read)]);
        add(&mut recorder, &[(6, Read)]);
        let expected = [(5, 2, Access::Write), (2, 1, Access::Read)];
        let cached = [(6, Writable), (2, Read)];
        assert_eq!(taken(&mut recorder, &cached, &[]), expected);
    }

    #[test]
    fn pages_of_other_vcpus_are_left_to_them() {
        let (mut recorder, mut other) = (recorder(), recorder());
        let own = [(1, Written), (20, Written), (40, Read), (60, Read)];
        add(&mut recorder, &own);
        add(&mut other, &[(1, Written), (20, Writable), (20, Read)]);
        add(&mut other, &[(40, Written), (40, Read), (60, Read)]);
        let expected = [(60, 1, Access::Read), (20, 1, Access::Read)];
        assert_eq!(taken(&mut recorder, &[], &[&other]), expected);
        // Of a vCPU that left, nothing is known here.
        assert_eq!(taken(&mut other, &[], &[&recorder]).len(), 4);
    }

    #[test]
    fn two_pages_in_turns_displace_no_others() {
        let mut recorder = recorder();
        add(&mut recorder, &[(70_000, Read)]);
        for _ in 0..2 * PAGES {
            add(&mut recorder, &[(1, Read), (2, Read)]);
        }
        let pages = taken(&mut recorder, &[], &[]);
        assert_eq!(pages, [(1, 2, Access::Read), (70_000, 1, Access::Read)]);
    }

    #[test]
    fn the_record_is_bounded() {
        let mut recorder = recorder();
        let many = 3 * PAGES as u64;
        (0..many).for_each(|page| recorder.add(page * PAGE_SIZE, Read));
        recorder.add(u64::MAX, Read);
        let expected = [(many - PAGES as u64, PAGES as u64, Access::Read)];
        assert_eq!(taken(&mut recorder, &[], &[]), expected);
    }
}
