//! Which file of a chain of sets has the bytes of a page.
//!
//! The latest set that does not name a page as unchanged decides: its bytes are in a file of
//! that set, or it is zero. The search goes from the last set to the first. Before each set,
//! the pages that are still open are those that all later sets name as unchanged.

use std::ops::Range;

use crate::pages::Run;

/// Consecutive pages whose bytes are consecutive in one run of one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Number of the first page.
    pub first: u64,
    /// How many pages, at least one.
    pub count: u32,
    /// Index of the file.
    pub file: usize,
    /// Index of the run in its file.
    pub run: u32,
    /// Pages of the run before the first of these.
    pub offset: u32,
}

impl Extent {
    /// The number of the page after the last.
    pub fn end(&self) -> u64 {
        self.first + u64::from(self.count)
    }
}

/// Finds the extents of a chain: for each set, the last one first, [`Search::take`] each of its
/// files, then [`Search::descend`].
pub(crate) struct Search {
    /// Pages that are open: in ascending order, each once.
    open: Vec<Range<u64>>,
    found: Vec<Extent>,
}

impl Search {
    /// For all pages below the end.
    pub fn new(pages_end: u64) -> Self {
        Self {
            open: std::iter::once(0..pages_end).collect(),
            found: Vec::new(),
        }
    }

    /// Adds what the runs of a file have of the open pages; whether that is any. `file`: the
    /// index that the extents get.
    pub fn take(&mut self, runs: &[Run], file: usize) -> bool {
        let mut order: Vec<u32> = (0..runs.len() as u32).collect();
        order.sort_unstable_by_key(|run| runs[*run as usize].first);
        let parts: Vec<_> = order
            .iter()
            .map(|run| runs[*run as usize].first..runs[*run as usize].end())
            .collect();
        let before = self.found.len();
        for (part, pages) in common(&self.open, &parts) {
            self.found.push(Extent {
                first: pages.start,
                count: (pages.end - pages.start) as u32,
                file,
                run: order[part],
                offset: (pages.start - parts[part].start) as u32,
            });
        }
        self.found.len() > before
    }

    /// Goes on in the base: with the pages that all files of this set name as unchanged.
    pub fn descend(&mut self, mut unchanged: Vec<Range<u64>>) {
        unchanged.sort_unstable_by_key(|range| range.start);
        let open = common(&self.open, &unchanged).map(|(_, pages)| pages);
        self.open = open.collect();
    }

    /// In ascending order.
    pub fn finish(self) -> Vec<Extent> {
        let mut found = self.found;
        found.sort_unstable_by_key(|extent| extent.first);
        found
    }
}

/// What two sorted lists have in common, with the index in the second.
fn common(one: &[Range<u64>], two: &[Range<u64>]) -> impl Iterator<Item = (usize, Range<u64>)> {
    let (mut at, mut part) = (0, 0);
    std::iter::from_fn(move || {
        loop {
            let (left, right) = (one.get(at)?, two.get(part)?);
            let both = left.start.max(right.start)..left.end.min(right.end);
            let index = part;
            match left.end <= right.end {
                true => at += 1,
                false => part += 1,
            }
            if !both.is_empty() {
                return Some((index, both));
            }
        }
    })
}

#[cfg(test)]
#[expect(
    clippy::single_range_in_vec_init,
    reason = "these are lists of ranges, some with one"
)]
mod tests {
    use super::*;

    #[test]
    fn lists_have_what_both_have() {
        let found = |one: &[Range<u64>], two: &[Range<u64>]| common(one, two).collect::<Vec<_>>();
        assert_eq!(found(&[0..10], &[]), []);
        assert_eq!(found(&[0..2, 4..9], &[2..4]), []);
        assert_eq!(
            found(&[0..4, 6..9], &[2..7, 8..20]),
            [(0, 2..4), (0, 6..7), (1, 8..9)]
        );
        assert_eq!(
            found(&[0..100], &[5..6, 99..100]),
            [(0, 5..6), (1, 99..100)]
        );
    }
}
