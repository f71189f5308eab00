//! Which pages a node manages at the moment: these are never evicted from it.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// Pages of a word of marks.
const WORD: u64 = u64::BITS as u64;

/// The pages that a node manages, read by the clock's hand without the controller's lock.
pub struct Homes {
    /// Those of the configuration.
    own: Range<u64>,
    /// Pages that are not as the configuration says, a bit for each.
    changed: Box<[AtomicU64]>,
}

impl Homes {
    /// Of a node that manages `own` of the pages below `end`.
    pub fn new(own: Range<u64>, end: u64) -> Self {
        let words = 0..end.div_ceil(WORD);
        Self {
            own,
            changed: words.map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Whether the node manages a page.
    pub fn manages(&self, page: u64) -> bool {
        let word = self.changed.get((page / WORD) as usize);
        let changed =
            word.is_some_and(|word| word.load(Ordering::Relaxed) & 1 << (page % WORD) != 0);
        self.own.contains(&page) != changed
    }

    /// How many of `pages` the node manages.
    pub fn count(&self, pages: &Range<u64>) -> u64 {
        let words = pages.start / WORD..pages.end.div_ceil(WORD);
        let managed = words.map(|word| {
            let changed = self.changed.get(word as usize);
            let changed = changed.map_or(0, |changed| changed.load(Ordering::Relaxed));
            let managed = bits_in(&self.own, word) ^ changed;
            u64::from((managed & bits_in(pages, word)).count_ones())
        });
        managed.sum()
    }

    /// The node manages a page from now on, or does not. Only the controller says so.
    pub(super) fn set(&self, page: u64, manages: bool) {
        if let Some(word) = self.changed.get((page / WORD) as usize) {
            let bit = 1 << (page % WORD);
            match self.own.contains(&page) == manages {
                true => word.fetch_and(!bit, Ordering::Relaxed),
                false => word.fetch_or(bit, Ordering::Relaxed),
            };
        }
    }
}

/// Which bits of a word are pages of a range.
fn bits_in(pages: &Range<u64>, word: u64) -> u64 {
    let first = word * WORD;
    let below = |page: u64| match page.saturating_sub(first) {
        bits if bits >= WORD => u64::MAX,
        bits => (1 << bits) - 1,
    };
    below(pages.end) & !below(pages.start)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_managed_as_it_was_said_last() {
        let homes = Homes::new(10..100, 200);
        assert!(homes.manages(10) && homes.manages(99));
        assert!(!homes.manages(9) && !homes.manages(100) && !homes.manages(1000));
        for (page, manages) in [(10, false), (64, false), (64, true), (130, true)] {
            homes.set(page, manages);
            assert_eq!(homes.manages(page), manages);
        }
        assert!(!homes.manages(10) && homes.manages(11) && !homes.manages(131));
        for pages in [0..200, 10..11, 11..64, 0..129, 130..131, 64..64, 100..130] {
            let one_by_one = pages.clone().filter(|page| homes.manages(*page)).count();
            assert_eq!(homes.count(&pages), one_by_one as u64, "{pages:?}");
        }
    }
}
