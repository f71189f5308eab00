//! What home's budget should be, by what its host has free for its owner. Decides only: no
//! clock, no process.
//!
//! ```text
//!           three looks find less         ten looks find more, and a margin
//! whole ──────────────────────▶ lowered ──────────────────────▶ raised by a step ─▶ … ─▶ whole
//!                                  ▲                                │
//!                                  └──── three looks find less ─────┘
//! ```
//!
//! What a look finds is what home may hold: what it holds, and what the host has free beyond
//! what is kept for its owner; less than it holds while the owner lacks memory.
//!
//! Invariants: the budget is at most the first one, and at least [`LEAST_BYTES`] or the first
//! one; it is never below what home holds by more than other hosts have room for.

use std::collections::VecDeque;

/// Less is no budget: reading ahead takes a 32nd part, and by default reads 512 KiB.
const LEAST_BYTES: u64 = 16 << 20;
/// Looks after which a lack of memory counts: it is no moment's affair.
const LOWER_AFTER: usize = 3;
/// Looks after which free memory counts.
const RAISE_AFTER: usize = 10;
/// What has to be free beyond that before the budget rises. The pages that come back take it.
const MARGIN_BYTES: u64 = 64 << 20;
/// By how much the budget rises at a time: by this part of the first one, or by so much.
const RAISE_PART: u64 = 16;
const RAISE_BYTES: u64 = 64 << 20;
/// Less than this has to leave: not worth that the program is interrupted.
const CRUMB_BYTES: u64 = 8 << 20;
/// Looks without a word to home, when the last one was of no use.
const PAUSE: usize = 10;
/// Looks between two times that the user is told.
const QUIET: usize = 60;

/// The memory of home and its host, in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Found {
    /// What the host could give to programs without swapping.
    pub available: u64,
    /// What home holds of it.
    pub held: u64,
    /// Room on other hosts; none where no node is on another host.
    pub room: Option<u64>,
}

/// What has to be done after a look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Verdict {
    /// Home's budget from now on, in bytes.
    pub wanted: u64,
    /// Pages have to leave home for it.
    pub gives_way: bool,
    /// What the user is told.
    pub news: Option<News>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum News {
    GivesWay,
    TakesBack,
    /// The host lacks memory, and nothing can leave.
    Stays(Why),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Why {
    NoHost,
    NoRoom,
}

pub(super) struct HomeBudget {
    first: u64,
    keep_free: u64,
    wanted: u64,
    /// What the last looks found, the last one at the end.
    may_hold: VecDeque<u64>,
    /// Whether home has given way, and has taken nothing back.
    gave_way: bool,
    /// The user was told so.
    told: bool,
    /// Looks until the user may be told again.
    quiet: usize,
    said_stays: bool,
    /// What home held when it was last told to give way, while it has to.
    asked: Option<u64>,
    pause: usize,
}

impl HomeBudget {
    pub(super) fn new(first: u64, keep_free: u64) -> HomeBudget {
        HomeBudget {
            first,
            keep_free,
            wanted: first,
            may_hold: VecDeque::with_capacity(RAISE_AFTER),
            gave_way: false,
            told: false,
            quiet: 0,
            said_stays: false,
            asked: None,
            pause: 0,
        }
    }

    pub(super) fn keep_free(&self) -> u64 {
        self.keep_free
    }

    /// The first look is made before the program starts, and counts alone.
    pub(super) fn look(&mut self, found: Found) -> Verdict {
        if self.may_hold.len() == RAISE_AFTER {
            self.may_hold.pop_front();
        }
        let may_hold = (found.held + found.available).saturating_sub(self.keep_free);
        self.may_hold.push_back(may_hold);
        self.quiet = self.quiet.saturating_sub(1);
        let lasting = self.may_hold.iter().rev().take(LOWER_AFTER);
        let lasting = lasting.max().copied().unwrap_or(self.first);
        let news = match found.room {
            None => self.stay_whole(found, lasting),
            Some(room) if lasting < self.wanted => self.lower(found, lasting, room),
            Some(_) => self.raise(),
        };
        // Where no node had room, home holds more than it should.
        let has_room = found.room.is_some_and(|room| room >= CRUMB_BYTES);
        let too_much = has_room && found.held > self.wanted.saturating_add(CRUMB_BYTES);
        let news = news.or_else(|| too_much.then(|| self.give_way()).flatten());
        Verdict {
            wanted: self.wanted,
            gives_way: self.is_worth_asking(too_much, found.held),
            news,
        }
    }

    /// Nothing of home can be on another host: a smaller budget would help nobody.
    fn stay_whole(&mut self, found: Found, lasting: u64) -> Option<News> {
        self.wanted = self.first;
        let lacks = lasting.saturating_add(CRUMB_BYTES) < found.held;
        lacks.then(|| self.stays(Why::NoHost)).flatten()
    }

    fn lower(&mut self, found: Found, lasting: u64, room: u64) -> Option<News> {
        let least = LEAST_BYTES.min(self.first);
        let stays = found.held.saturating_sub(room);
        self.wanted = lasting.max(least).max(stays).min(self.wanted);
        let lacks = lasting.max(least).saturating_add(CRUMB_BYTES) < found.held;
        let full = lacks && room < CRUMB_BYTES;
        full.then(|| self.stays(Why::NoRoom)).flatten()
    }

    fn raise(&mut self) -> Option<News> {
        let lasting = self.may_hold.iter().min().copied().unwrap_or(0);
        let lasting = lasting.saturating_sub(MARGIN_BYTES).min(self.first);
        if self.may_hold.len() < RAISE_AFTER || lasting <= self.wanted {
            return None;
        }
        let step = (self.first / RAISE_PART).max(RAISE_BYTES);
        self.wanted = lasting.min(self.wanted + step);
        self.gave_way.then(|| self.take_back()).flatten()
    }

    /// Whether home, which holds too much or not, is told to give way now.
    fn is_worth_asking(&mut self, too_much: bool, held: u64) -> bool {
        if !too_much {
            self.asked = None;
            return false;
        }
        if self.pause > 0 {
            self.pause -= 1;
            return false;
        }
        if self.asked.is_some_and(|before| held >= before) {
            self.asked = None;
            self.pause = PAUSE;
            return false;
        }
        self.asked = Some(held);
        true
    }

    fn give_way(&mut self) -> Option<News> {
        if self.gave_way {
            return None;
        }
        self.gave_way = true;
        self.told = self.quiet == 0;
        self.told.then(|| {
            self.quiet = QUIET;
            News::GivesWay
        })
    }

    fn take_back(&mut self) -> Option<News> {
        self.gave_way = false;
        self.told.then_some(News::TakesBack)
    }

    fn stays(&mut self, why: Why) -> Option<News> {
        let first = !self.said_stays;
        self.said_stays = true;
        first.then_some(News::Stays(why))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const ROOM: Option<u64> = Some(4096 * MIB);

    fn found(available: u64, held: u64) -> Found {
        Found {
            available: available * MIB,
            held: held * MIB,
            room: ROOM,
        }
    }

    /// A budget of 1000 MiB, 2000 MiB kept free, on a host that has much.
    fn plenty() -> HomeBudget {
        let mut budget = HomeBudget::new(1000 * MIB, 2000 * MIB);
        let verdict = budget.look(found(9000, 0));
        let whole = Verdict {
            wanted: 1000 * MIB,
            gives_way: false,
            news: None,
        };
        assert_eq!(verdict, whole);
        for _ in 0..20 {
            assert_eq!(budget.look(found(8400, 600)), whole);
        }
        budget
    }

    #[test]
    fn a_program_starts_with_what_its_host_has() {
        let mut budget = HomeBudget::new(1000 * MIB, 2000 * MIB);
        let verdict = budget.look(found(2064, 0));
        assert_eq!((verdict.wanted, verdict.gives_way), (64 * MIB, false));
        let mut budget = HomeBudget::new(1000 * MIB, 2000 * MIB);
        assert_eq!(budget.look(found(100, 0)).wanted, LEAST_BYTES);
        let mut budget = HomeBudget::new(2 * MIB, 2000 * MIB);
        assert_eq!(budget.look(found(100, 0)).wanted, 2 * MIB);
    }

    #[test]
    fn a_moment_is_no_shortage() {
        let mut budget = plenty();
        for _ in 0..10 {
            assert!(!budget.look(found(1500, 600)).gives_way);
            assert!(!budget.look(found(1500, 600)).gives_way);
            assert_eq!(budget.look(found(8400, 600)).wanted, 1000 * MIB);
        }
    }

    #[test]
    fn home_gives_what_the_owner_lacks_and_takes_it_back() {
        let mut budget = plenty();
        // 200 MiB are missing.
        let verdicts = [(); 3].map(|()| budget.look(found(1800, 600)));
        assert_eq!(verdicts.map(|v| v.gives_way), [false, false, true]);
        assert_eq!(verdicts[2].wanted, 400 * MIB);
        assert_eq!(verdicts[2].news, Some(News::GivesWay));
        // They have left.
        for _ in 0..30 {
            let verdict = budget.look(found(2000, 400));
            assert_eq!((verdict.wanted, verdict.news), (400 * MIB, None));
            assert!(!verdict.gives_way);
        }
        // Memory is free again: not at once, and not all at once.
        let mut wanted = Vec::new();
        let mut news = Vec::new();
        for _ in 0..30 {
            let verdict = budget.look(found(5000, 400));
            assert!(!verdict.gives_way);
            wanted.push(verdict.wanted / MIB);
            news.extend(verdict.news);
        }
        assert_eq!(wanted[8..12], [400, 464, 528, 592]);
        assert_eq!(wanted[29], 1000);
        assert_eq!(news, [News::TakesBack]);
    }

    #[test]
    fn the_budget_rises_to_what_is_free_and_no_further() {
        let mut budget = plenty();
        for _ in 0..3 {
            budget.look(found(1800, 600));
        }
        // 200 MiB beyond what is kept: less the margin, they may be used.
        let mut held = 400;
        for _ in 0..60 {
            let verdict = budget.look(found(2600 - held, held));
            assert!(!verdict.gives_way);
            held = verdict.wanted / MIB;
        }
        assert_eq!(held, 600 - MARGIN_BYTES / MIB);
    }

    #[test]
    fn no_more_leaves_than_others_have_room_for() {
        let mut budget = plenty();
        let short = |room: u64, held: u64| Found {
            room: Some(room * MIB),
            ..found(1000, held)
        };
        let verdicts = [(); 3].map(|()| budget.look(short(100, 600)));
        assert_eq!(verdicts[2].wanted, 500 * MIB);
        assert!(verdicts[2].gives_way);
        // Those are full now, and it is said once.
        let verdicts = [(); 3].map(|()| budget.look(short(0, 500)));
        assert_eq!(verdicts.map(|v| v.gives_way), [false; 3]);
        assert_eq!(verdicts[0].news, Some(News::Stays(Why::NoRoom)));
        assert_eq!((verdicts[1].news, verdicts[2].news), (None, None));
        assert_eq!(budget.look(short(0, 500)).wanted, 500 * MIB);
    }

    #[test]
    fn without_another_host_the_budget_stays() {
        let mut budget = HomeBudget::new(1000 * MIB, 2000 * MIB);
        let alone = |available, held| Found {
            room: None,
            ..found(available, held)
        };
        assert_eq!(budget.look(alone(2010, 0)).wanted, 1000 * MIB);
        let mut news = Vec::new();
        for _ in 0..10 {
            let verdict = budget.look(alone(1500, 600));
            assert_eq!((verdict.wanted, verdict.gives_way), (1000 * MIB, false));
            news.extend(verdict.news);
        }
        assert_eq!(news, [News::Stays(Why::NoHost)]);
    }

    #[test]
    fn a_host_without_end_of_want_takes_all_but_the_least() {
        let mut budget = plenty();
        let mut held = 600;
        for _ in 0..20 {
            held = held.min(budget.look(found(10, held)).wanted / MIB);
        }
        assert_eq!(held, LEAST_BYTES / MIB);
    }

    #[test]
    fn home_is_asked_again_as_long_as_it_helps() {
        let mut budget = plenty();
        let mut asked = |held| budget.look(found(100, held)).gives_way;
        assert_eq!([600; 3].map(&mut asked), [false, false, true]);
        assert_eq!([500, 400, 300].map(&mut asked), [true; 3]);
        let turns = (0..30).filter(|_| asked(300)).count();
        assert_eq!(turns, 2);
    }

    #[test]
    fn crumbs_do_not_interrupt() {
        let mut budget = plenty();
        for _ in 0..20 {
            assert!(!budget.look(found(1993, 600)).gives_way);
        }
    }

    #[test]
    fn the_user_is_told_seldom() {
        let mut budget = plenty();
        let mut news = Vec::new();
        for _ in 0..10 {
            for _ in 0..5 {
                news.extend(budget.look(found(1800, 600)).news);
            }
            for _ in 0..12 {
                news.extend(budget.look(found(5000, 400)).news);
            }
        }
        let told = |what| news.iter().filter(|&&news| news == what).count();
        assert_eq!((told(News::GivesWay), told(News::TakesBack)), (3, 3));
    }
}
