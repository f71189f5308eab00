//! What a page that comes back tells: by how much the budget was too small, and
//! whether the next page of its chunk should come whole.

use crate::types::Page;

/// When pages left to make room, counted in pages that left: the refault distance of
/// Linux's page reclaim (`mm/workingset.c`).
#[derive(Debug)]
pub struct Departures<'a> {
    /// `count` when each page left; 0: it came back since, or never left.
    left: &'a mut [u32],
    count: u32,
}

impl<'a> Departures<'a> {
    /// Of the pages `0..left.len()`; all zeros to begin with.
    pub fn new(left: &'a mut [u32]) -> Departures<'a> {
        Departures { left, count: 0 }
    }

    /// A page leaves to make room.
    pub fn leave(&mut self, page: Page) {
        self.count = self.count.wrapping_add(1).max(1);
        if let Some(left) = self.left.get_mut(page.0 as usize) {
            *left = self.count;
        }
    }

    /// A page is needed. If it had left: how many have left since, which is how many
    /// pages more had to fit for it to be here still.
    pub fn missing(&mut self, page: Page) -> Option<u64> {
        match self.left.get_mut(page.0 as usize).map(core::mem::take) {
            None | Some(0) => None,
            Some(left) => Some(u64::from(self.count.wrapping_sub(left))),
        }
    }
}

/// From this mark on, pages of a chunk are asked for whole; and the highest mark. It is
/// near: a program that begins to read only soon gets copies again, which need not be
/// sent back.
const WHOLE: u8 = 4;
const MARK_MAX: u8 = 6;
/// Of so many pages that would come whole one comes as a copy, which shows whether it
/// still comes to be written.
const COPY_EVERY: u64 = 8;

/// Chunks where copies are written after they were read: a page that is read there
/// should come whole, because its first write would request it a second time. A chunk's mark rises by two
/// with each copy that was written, and falls by one with each that is asked for; so
/// it stays up while more than half are.
#[derive(Debug)]
pub struct Rewritten<'a> {
    marks: &'a mut [u8],
    asked: u64,
}

impl<'a> Rewritten<'a> {
    /// One mark for each chunk; all zeros to begin with.
    pub fn new(marks: &'a mut [u8]) -> Rewritten<'a> {
        Rewritten { marks, asked: 0 }
    }

    /// A copy of a page came to be written.
    pub fn wrote(&mut self, page: Page) {
        if let Some(mark) = self.marks.get_mut(page.chunk() as usize) {
            *mark = (*mark + 2).min(MARK_MAX);
        }
    }

    /// Whether a page that is requested for reading should come whole.
    pub fn comes_whole(&mut self, page: Page) -> bool {
        let Some(mark) = self.marks.get_mut(page.chunk() as usize) else {
            return false;
        };
        self.asked += 1;
        if *mark >= WHOLE && !self.asked.is_multiple_of(COPY_EVERY) {
            return true;
        }
        *mark = mark.saturating_sub(1);
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_distance_is_what_left_since() {
        let mut left = [0; 8];
        let mut departures = Departures::new(&mut left);
        assert_eq!(departures.missing(Page(1)), None);
        for page in [1, 2, 3, 2] {
            departures.leave(Page(page));
        }
        assert_eq!(departures.missing(Page(1)), Some(3));
        assert_eq!(departures.missing(Page(1)), None, "it came back");
        assert_eq!(departures.missing(Page(2)), Some(0), "it left twice");
        departures.leave(Page(9));
        assert_eq!(departures.missing(Page(9)), None, "beyond the table");
    }

    #[test]
    fn the_count_may_wrap() {
        let mut left = [0; 4];
        let mut departures = Departures::new(&mut left);
        departures.count = u32::MAX - 1;
        for page in 0..3 {
            departures.leave(Page(page));
        }
        assert_eq!(departures.missing(Page(2)), Some(0));
        assert!(departures.missing(Page(0)).is_some());
    }

    /// Of 100 pages of a chunk that are read, how many come whole when those that `are`
    /// written later are as said.
    fn whole(are_written: impl Fn(u64) -> bool) -> usize {
        let mut marks = [0; 1];
        let mut rewritten = Rewritten::new(&mut marks);
        let mut whole = 0;
        for page in 0..100 {
            if rewritten.comes_whole(Page(page)) {
                whole += 1;
            } else if are_written(page) {
                rewritten.wrote(Page(page));
            }
        }
        whole
    }

    #[test]
    fn what_is_written_comes_whole() {
        assert_eq!(whole(|_| false), 0);
        assert_eq!(whole(|page| page % 4 == 0), 0);
        assert!(whole(|_| true) > 80);
    }

    #[test]
    fn what_is_not_written_any_more_comes_as_a_copy() {
        let mut marks = [MARK_MAX; 1];
        let mut rewritten = Rewritten::new(&mut marks);
        let whole = |rewritten: &mut Rewritten<'_>| {
            (0..200)
                .filter(|&page| rewritten.comes_whole(Page(page)))
                .count()
        };
        let still = whole(&mut rewritten);
        assert!((10..30).contains(&still), "{still} pages");
        assert_eq!(whole(&mut rewritten), 0);
    }
}
