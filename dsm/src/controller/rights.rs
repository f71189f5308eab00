//! What the users of a node may do with its pages, one byte for each.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use crate::types::{Access, CHUNK_PAGES};

/// Nothing may be done.
const NOTHING: u8 = 0;
const READ: u8 = 1;
const WRITE: u8 = 2;
/// Nothing may be done: the page is this node's, and its bytes are in a file.
const ABSENT: u8 = 3;
const RIGHT: u8 = 3;
/// Memory is filled with the page, also while no user may use it: it may not be zero bytes.
const USED: u8 = 4;
/// A user looked for the page since the clock's hand passed it.
const REFERENCED: u8 = 8;
/// The page was here and was evicted.
const EVICTED: u8 = 16;
/// The page came before a user asked for it, and no user has looked for it since.
const UNUSED: u8 = 32;
/// Memory is filled with a pre-copy, which no user may use.
const PRECOPY: u8 = 64;
/// A user looked for the page since [`Rights::take_touched`].
const TOUCHED: u8 = 128;

/// What the clock's hand finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// Nothing that could be evicted.
    None,
    /// Memory of a page that no user may use.
    Vacant,
    /// A page that was used since the hand passed it.
    Recent,
    /// A page that was not.
    Old,
}

/// The rights, shared by the controller, which alone changes them, and its users, who
/// read them without its lock.
///
/// A right is lowered here first; then the users are told to give up what they hold by
/// it. Marks of use are set and cleared by any thread; one may get lost.
pub struct Rights {
    pages: Box<[AtomicU8]>,
    /// By chunk: not zero if one of its pages is [`TOUCHED`].
    touched: Box<[AtomicU8]>,
    /// Pages whose memory is filled.
    resident: AtomicU64,
    /// Pages that came before a user asked for them and were looked for then.
    found: AtomicU64,
    /// Pages that are absent.
    absent: AtomicU64,
}

impl Rights {
    /// Over one byte for each page, all of them zero: no right to any.
    pub fn new(pages: Box<[AtomicU8]>) -> Self {
        let chunks = pages.len().div_ceil(CHUNK_PAGES as usize);
        Self {
            pages,
            touched: (0..chunks).map(|_| AtomicU8::new(0)).collect(),
            resident: AtomicU64::new(0),
            found: AtomicU64::new(0),
            absent: AtomicU64::new(0),
        }
    }

    /// What may be done with a page; `None` beyond the last page, too.
    pub fn of(&self, page: u64) -> Option<Access> {
        right(self.pages.get(page as usize)?.load(Ordering::SeqCst))
    }

    /// Whether `access` is allowed. Marks the page as used if it is.
    pub fn allow_use(&self, page: u64, access: Access) -> bool {
        let Some(place) = self.pages.get(page as usize) else {
            return false;
        };
        let byte = place.load(Ordering::SeqCst);
        let allowed = right(byte) >= Some(access);
        if allowed && byte & (REFERENCED | TOUCHED) != REFERENCED | TOUCHED {
            place.fetch_or(REFERENCED | TOUCHED, Ordering::Relaxed);
            self.mark_chunk(page);
        }
        if allowed && byte & UNUSED != 0 {
            let before = place.fetch_and(!UNUSED, Ordering::Relaxed);
            self.found
                .fetch_add((before & UNUSED != 0).into(), Ordering::Relaxed);
        }
        allowed
    }

    /// A user looked for a page that was not here.
    pub fn touch(&self, page: u64) {
        if let Some(place) = self.pages.get(page as usize) {
            place.fetch_or(TOUCHED, Ordering::Relaxed);
            self.mark_chunk(page);
        }
    }

    fn mark_chunk(&self, page: u64) {
        if let Some(chunk) = self.touched.get((page / CHUNK_PAGES) as usize) {
            chunk.store(1, Ordering::Relaxed);
        }
    }

    /// Calls `touched` for each page that a user looked for since the last call. Its cost is
    /// in proportion to the chunks with such a page.
    pub fn take_touched(&self, mut touched: impl FnMut(u64)) {
        for (chunk, mark) in self.touched.iter().enumerate() {
            if mark.load(Ordering::Relaxed) == 0 {
                continue;
            }
            // First the chunk's: a page that is marked meanwhile marks it again.
            mark.store(0, Ordering::SeqCst);
            let first = chunk * CHUNK_PAGES as usize;
            let end = self.pages.len().min(first + CHUNK_PAGES as usize);
            for (page, place) in (first..end).zip(&self.pages[first..end]) {
                if place.load(Ordering::Relaxed) & TOUCHED != 0 {
                    place.fetch_and(!TOUCHED, Ordering::Relaxed);
                    touched(page as u64);
                }
            }
        }
    }

    /// How many pages came before a user asked for them and were looked for then.
    pub fn found(&self) -> u64 {
        self.found.load(Ordering::Relaxed)
    }

    /// Pages whose memory is filled.
    pub fn resident(&self) -> u64 {
        self.resident.load(Ordering::SeqCst)
    }

    /// Pages whose bytes are in a file.
    pub fn absent(&self) -> u64 {
        self.absent.load(Ordering::SeqCst)
    }

    /// The first page whose bytes are in a file.
    pub fn any_absent(&self) -> Option<u64> {
        match self.absent() {
            0 => None,
            _ => (0..self.pages()).find(|page| self.is_absent(*page)),
        }
    }

    /// Whether a page is this node's, and its bytes are in a file.
    pub(super) fn is_absent(&self, page: u64) -> bool {
        self.byte(page) & RIGHT == ABSENT
    }

    /// The page is this node's, and its bytes are in a file. It has its place in memory.
    pub(super) fn set_absent(&self, page: u64) {
        if let Some(place) = self.pages.get(page as usize) {
            place.store(ABSENT | USED, Ordering::SeqCst);
            self.resident.fetch_add(1, Ordering::SeqCst);
            self.absent.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// The bytes of an absent page are here: it may be read.
    pub(super) fn set_loaded(&self, page: u64) {
        if self.is_absent(page) {
            self.put(page, Some(Access::Read), 0);
            self.absent.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Pages that there are.
    pub(super) fn pages(&self) -> u64 {
        self.pages.len() as u64
    }

    /// Whether a page that left had come before a user asked for it, and none looked for
    /// it. True once.
    pub(super) fn left_unused(&self, page: u64) -> bool {
        let place = self.pages.get(page as usize);
        place.is_some_and(|place| place.fetch_and(!UNUSED, Ordering::Relaxed) & UNUSED != 0)
    }

    /// Changes the right to a page. A page that may be used fills memory.
    pub(super) fn set(&self, page: u64, right: Option<Access>) {
        self.put(page, right, REFERENCED);
    }

    /// Lets a page be read that no user has asked for yet.
    pub(super) fn set_unasked(&self, page: u64) {
        self.put(page, Some(Access::Read), UNUSED);
    }

    /// In one store: users look at the page as soon as they may.
    fn put(&self, page: u64, right: Option<Access>, mark: u8) {
        let Some(place) = self.pages.get(page as usize) else {
            return;
        };
        let before = place.load(Ordering::Relaxed);
        let after = match right {
            None => before & (USED | EVICTED | UNUSED | TOUCHED),
            Some(Access::Read) => READ | USED | mark | before & TOUCHED,
            Some(Access::Write) => WRITE | USED | mark | before & TOUCHED,
        };
        place.store(after, Ordering::SeqCst);
        if before & USED == 0 && after & USED != 0 {
            self.resident.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Whether memory is filled with the page: it may not be zero.
    pub(super) fn used(&self, page: u64) -> bool {
        self.byte(page) & USED != 0
    }

    /// Whether it is, and no user may use the page.
    pub(super) fn is_vacant(&self, page: u64) -> bool {
        self.byte(page) & (USED | RIGHT | PRECOPY) == USED
    }

    /// Memory of a page that no user may use is filled with a pre-copy.
    pub(super) fn set_precopy(&self, page: u64) {
        if let (None, Some(place)) = (self.of(page), self.pages.get(page as usize)) {
            let before = place.fetch_or(USED | PRECOPY, Ordering::SeqCst);
            let fills = u64::from(before & USED == 0);
            self.resident.fetch_add(fills, Ordering::SeqCst);
        }
    }

    /// The pre-copy is not wanted: the memory is vacant.
    pub(super) fn drop_precopy(&self, page: u64) {
        if let Some(place) = self.pages.get(page as usize) {
            place.fetch_and(!PRECOPY, Ordering::SeqCst);
        }
    }

    /// Whether memory is filled with a pre-copy.
    pub(super) fn is_precopy(&self, page: u64) -> bool {
        self.byte(page) & PRECOPY != 0
    }

    /// The memory of a vacant page was given back: it is zero again.
    pub(super) fn forget(&self, page: u64) {
        if let (true, Some(place)) = (self.is_vacant(page), self.pages.get(page as usize)) {
            let left = place.load(Ordering::Relaxed) & (EVICTED | UNUSED | TOUCHED);
            place.store(left, Ordering::SeqCst);
            self.resident.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// A page that no user may use any more was evicted.
    pub(super) fn mark_evicted(&self, page: u64) {
        if let (None, Some(place)) = (self.of(page), self.pages.get(page as usize)) {
            place.fetch_or(EVICTED, Ordering::Relaxed);
        }
    }

    /// Whether a page was evicted and did not come back.
    pub(super) fn is_evicted(&self, page: u64) -> bool {
        self.byte(page) & EVICTED != 0
    }

    /// The hand passes a page; `foreign`: one that may be evicted while it is used.
    pub(super) fn pass(&self, page: u64, foreign: bool) -> Use {
        let byte = self.byte(page);
        match (byte & USED != 0, right(byte)) {
            (false, _) => Use::None,
            (true, None) if byte & PRECOPY != 0 || byte & RIGHT == ABSENT => Use::None,
            (true, None) => Use::Vacant,
            (true, Some(_)) if !foreign => Use::None,
            (true, Some(_)) if byte & REFERENCED == 0 => Use::Old,
            (true, Some(_)) => {
                if let Some(place) = self.pages.get(page as usize) {
                    place.fetch_and(!REFERENCED, Ordering::Relaxed);
                }
                Use::Recent
            }
        }
    }

    fn byte(&self, page: u64) -> u8 {
        let place = self.pages.get(page as usize);
        place.map_or(NOTHING, |place| place.load(Ordering::Relaxed))
    }
}

fn right(byte: u8) -> Option<Access> {
    match byte & RIGHT {
        READ => Some(Access::Read),
        WRITE => Some(Access::Write),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rights() -> Rights {
        Rights::new((0..4).map(|_| AtomicU8::new(0)).collect())
    }

    #[test]
    fn memory_stays_filled_until_it_is_given_back() {
        let rights = rights();
        rights.set(1, Some(Access::Write));
        rights.set(2, Some(Access::Read));
        assert_eq!(rights.resident(), 2);
        rights.set(1, None);
        assert!(rights.is_vacant(1) && !rights.is_vacant(2));
        rights.forget(2);
        assert_eq!(rights.resident(), 2);
        rights.forget(1);
        assert_eq!((rights.resident(), rights.used(1)), (1, false));
        assert_eq!(rights.of(4), None);
    }

    #[test]
    fn the_hand_gives_a_page_in_use_a_second_chance() {
        let rights = rights();
        rights.set(0, Some(Access::Read));
        assert_eq!(rights.pass(0, false), Use::None);
        assert_eq!(rights.pass(0, true), Use::Recent);
        assert_eq!(rights.pass(0, true), Use::Old);
        assert!(rights.allow_use(0, Access::Read) && !rights.allow_use(0, Access::Write));
        assert_eq!(rights.pass(0, true), Use::Recent);
        rights.set(0, None);
        assert_eq!(rights.pass(0, true), Use::Vacant);
    }

    #[test]
    fn what_users_looked_for_is_told_once() {
        let rights = Rights::new((0..1100).map(|_| AtomicU8::new(0)).collect());
        let taken = || {
            let mut pages = Vec::new();
            rights.take_touched(|page| pages.push(page));
            pages
        };
        // What a page's arrival or a pre-copy does is no use of it.
        for page in [1, 600, 1099] {
            rights.set(page, Some(Access::Write));
        }
        assert!(taken().is_empty());
        assert!(rights.allow_use(1099, Access::Read) && rights.allow_use(1, Access::Write));
        assert!(!rights.allow_use(2, Access::Read));
        rights.touch(700);
        rights.set(1, Some(Access::Read));
        rights.set(1099, None);
        assert_eq!(taken(), [1, 700, 1099]);
        assert!(taken().is_empty());
        assert!(rights.allow_use(1, Access::Read) && rights.allow_use(1, Access::Read));
        assert_eq!(taken(), [1]);
    }

    #[test]
    fn a_copy_that_came_unasked_is_found_once() {
        let rights = rights();
        rights.set_unasked(0);
        assert!(rights.allow_use(0, Access::Read) && rights.allow_use(0, Access::Read));
        assert_eq!(rights.found(), 1);
        assert!(!rights.left_unused(0));
        rights.set_unasked(1);
        assert!(rights.left_unused(1) && !rights.left_unused(1));
    }
}
