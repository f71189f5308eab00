//! Making room: what leaves when the budget is full, and when.
//!
//! A fault that waits for a page has time to spare: the pages that have to make
//! room for it leave then, a few at a time, and some are kept free for the next
//! ([`Engine::make_room_ahead`]). What was not enough is made up for after it
//! ([`Engine::make_room`]), which waits until the budget holds.
//!
//! Pages leave from the coldest chunk until this many have left, or none is left in it
//! ([`Drain`]); then the coldest is looked for anew.
//!
//! At home most pages leave at once. Elsewhere the manager is asked first, and
//! at home a holder of a copy is, when the ownership goes to it: these are
//! *offers*. A fault does not wait for the answers to those that it made ahead,
//! but the execution leaves, and a program forks, only when there are none.

use core::ops::Range;

use weft_dsm::{CHUNK_PAGES, Event, Page, Phase};
use weft_proc::layout::{Kind, PAGE};

use super::machine::Engine;

/// Smallest and largest number of pages that leave one chunk before the coldest
/// is looked for again.
const DRAIN_MIN: u64 = 16;
const DRAIN_MAX: u64 = CHUNK_PAGES;
/// Rounds of choosing victims before the node counts as full of busy pages.
const ROUNDS_MAX: usize = 64;
/// Pages that leave during one wait: enough for a system call to pay, few enough
/// to be gone when the reply comes; and at most.
const AHEAD_MIN: u64 = 32;
const AHEAD_MAX: u64 = 128;
/// Pages kept free, as far as that is a small part of the budget.
const RESERVE: u64 = 16;

/// The chunk that pages leave: its read-only copies first, then what is owned.
#[derive(Default)]
pub struct Drain {
    first: u64,
    /// Pages of the chunk looked at, in both turns together.
    looked: u64,
    /// Pages that may still leave it.
    left: u64,
}

impl Drain {
    fn start(chunk: u64, pages: u64) -> Drain {
        Drain {
            first: chunk * CHUNK_PAGES,
            looked: 0,
            left: pages,
        }
    }

    /// The next page to look at, and whether copies are looked for.
    fn next(&mut self) -> Option<(u64, bool)> {
        if self.left == 0 || self.looked == 2 * CHUNK_PAGES {
            self.left = 0;
            return None;
        }
        let looked = self.looked;
        self.looked += 1;
        Some((self.first + looked % CHUNK_PAGES, looked < CHUNK_PAGES))
    }
}

/// Offers made ahead that may be without an answer.
pub struct Offers {
    pages: [u64; AHEAD_MAX as usize],
    count: usize,
}

impl Offers {
    /// No offers.
    pub const fn new() -> Offers {
        Offers {
            pages: [0; AHEAD_MAX as usize],
            count: 0,
        }
    }
}

impl Engine {
    /// Sends a few pages away while a reply is on its way, if room is short.
    pub fn make_room_ahead(&mut self) {
        let reserve = RESERVE.min(self.budget_pages() / 64);
        let needed = self.io.resident_pages + self.requests + reserve;
        let Some(missing) = needed.checked_sub(self.budget_pages()).filter(|&m| m > 0) else {
            return;
        };
        if !self.offers_are_answered() {
            return;
        }
        let mut chosen = [0; AHEAD_MAX as usize];
        let wanted = missing.clamp(AHEAD_MIN, AHEAD_MAX) as usize;
        let count = self.choose(&mut chosen[..wanted]);
        self.evict(&chosen[..count]);
        let unanswered = chosen[..count]
            .iter()
            .filter(|&&page| !self.has_settled(page));
        let mut offers = Offers::new();
        for &page in unanswered {
            offers.pages[offers.count] = page;
            offers.count += 1;
        }
        self.offers = offers;
    }

    fn offers_are_answered(&self) -> bool {
        let pages = &self.offers.pages[..self.offers.count];
        pages.iter().all(|&page| self.has_settled(page))
    }

    /// Waits until no page that was offered to make room is on its way.
    pub fn finish_offers(&mut self) {
        self.wait_until("room on another node", Engine::offers_are_answered);
        self.offers.count = 0;
    }

    /// Sends pages away until the budget holds again.
    pub fn make_room(&mut self) {
        self.follow_budget();
        if self.is_past_budget() {
            self.finish_offers();
        }
        let mut rounds = 0;
        while self.is_past_budget() {
            rounds += 1;
            let goal = self.io.resident_pages + self.requests - self.budget_pages();
            let run = self.drain_pages().max(goal.min(DRAIN_MAX));
            if !self.evict_some(run) && rounds > ROUNDS_MAX {
                return;
            }
        }
    }

    fn is_past_budget(&self) -> bool {
        self.io.resident_pages + self.requests > self.budget_pages()
    }

    /// Pages that leave one chunk.
    fn drain_pages(&self) -> u64 {
        (self.budget_pages() / 64).clamp(DRAIN_MIN, DRAIN_MAX)
    }

    /// Sends up to `run` pages of cold chunks away; false when none left.
    fn evict_some(&mut self, run: u64) -> bool {
        self.io.left = 0;
        self.io.no_room = false;
        let mut chosen = [0u64; DRAIN_MAX as usize];
        let count = self.choose(&mut chosen[..run as usize]);
        let chosen = &chosen[..count];
        if chosen.is_empty() {
            return false;
        }
        self.evict(chosen);
        self.wait_until("room on another node", |engine| {
            chosen.iter().all(|&page| engine.has_settled(page))
        });
        let full = self.io.no_room && self.io.left == 0 && !self.drop_copies(run);
        if full && !self.take_budget_back() {
            self.no_room();
        }
        self.io.left > 0
    }

    fn evict(&mut self, pages: &[u64]) {
        for &page in pages {
            self.working_set.departures.leave(Page(page));
            self.step(Event::Evict {
                page: Page(page),
                to: None,
            });
        }
        self.settle();
    }

    /// Fills `chosen` with pages to send away, from the chunk that pages leave
    /// and, when that has no more, from one other; says how many there were.
    fn choose(&mut self, chosen: &mut [u64]) -> usize {
        let mut count = self.drain(chosen);
        if count < chosen.len() && self.drain_coldest() {
            count += self.drain(&mut chosen[count..]);
        }
        count
    }

    fn drain(&mut self, chosen: &mut [u64]) -> usize {
        let mut count = 0;
        while count < chosen.len()
            && let Some((page, copies)) = self.drain.next()
        {
            if self.core.tables.look(page).owner() != copies && self.may_leave(page) {
                chosen[count] = page;
                count += 1;
                self.drain.left -= 1;
            }
        }
        count
    }

    /// From now on pages leave the coldest chunk of those that have some that
    /// can; false when there is none.
    fn drain_coldest(&mut self) -> bool {
        let can = |engine: &Engine, chunk| engine.pages_of(chunk).any(|p| engine.may_leave(p));
        while let Some(chunk) = self.working_set.coldest(|_| true) {
            if can(self, chunk) {
                self.drain = Drain::start(chunk, self.drain_pages());
                return true;
            }
            if !self.forget_if_empty(chunk) {
                break;
            }
        }
        // The coldest has pages that cannot leave now.
        let warmer = self.working_set.coldest(|chunk| can(self, chunk));
        if let Some(chunk) = warmer {
            self.drain = Drain::start(chunk, self.drain_pages());
        }
        warmer.is_some()
    }

    /// Gives up copies of pages that others own, wherever they are; false when
    /// there are none. For when no node has room for more than it owns.
    fn drop_copies(&mut self, run: u64) -> bool {
        self.io.left = 0;
        for index in 0..self.working_set.len() {
            let first = self.working_set.chunk(index) * CHUNK_PAGES;
            for page in first..first + CHUNK_PAGES {
                let local = self.core.tables.look(page);
                if local.evictable() && !local.owner() && page != self.io.awaited {
                    self.working_set.departures.leave(Page(page));
                    self.step(Event::Evict {
                        page: Page(page),
                        to: None,
                    });
                }
            }
            self.settle();
            if self.io.left >= run {
                break;
            }
        }
        self.io.left > 0
    }

    /// Whether no eviction of the page is under way: neither an offer of this
    /// node's nor, at home, an ownership that is moving.
    fn has_settled(&self, page: u64) -> bool {
        let moving = self.is_home() && self.core.tables.look_entry(page).phase() != Phase::Idle;
        !moving && !self.core.tables.look(page).offered()
    }

    fn pages_of(&self, chunk: u64) -> Range<u64> {
        let first = chunk * CHUNK_PAGES;
        first..first + CHUNK_PAGES
    }

    /// Takes a chunk off the list when nothing of it is here; false otherwise.
    fn forget_if_empty(&mut self, chunk: u64) -> bool {
        let empty = !self
            .pages_of(chunk)
            .any(|page| self.core.tables.look(page).present());
        if empty {
            self.working_set.forget(chunk);
        }
        empty
    }

    fn may_leave(&self, page: u64) -> bool {
        self.core.tables.look(page).evictable() && page != self.io.awaited && !self.is_native(page)
    }

    /// Home: a page of a file, which the kernel keeps.
    fn is_native(&self, page: u64) -> bool {
        self.is_home()
            && self
                .io
                .layout
                .lookup(page * PAGE)
                .is_some_and(|r| r.kind == Kind::FileReadOnly)
    }

    /// A serving node over its budget gives up read-only copies, which costs
    /// nobody anything.
    pub fn trim_copies(&mut self) {
        if self.io.resident_pages > self.budget_pages() {
            self.drop_copies(self.io.resident_pages - self.budget_pages());
        }
    }
}
