//! Slices exchange pages, after S-memV, section IV-E: a slice asks the manager of a block
//! that its vCPUs fetch page by page for all of it, and gives as many pages back that nobody here
//! has used lately. `weft_coherent_memory` chooses the blocks.
//!
//! ```text
//!  vCPUs' slice   ── WantsPages ─▶  a slice without vCPUs
//!                 ◀─── drain ─────  pages, with their management
//!                 ◀─ GavePages ───
//!                 ──── drain ────▶  as many pages, with theirs
//! ```
//!
//! Invariants:
//!
//! - Only a slice without vCPUs gives pages when it is asked: a block that two slices use would go
//!   to and fro.
//! - A slice asks for one block at a time, and not before it has given back what it owes. So it
//!   manages at most a block more than without exchanges, and has memory for that: the least that
//!   a slice has to spare is several blocks.
//! - While a migration or a release counts pages, no exchange is under way
//!   ([`Membership::pause_exchanges`]).

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use weft_coherent_memory::{BLOCK_PAGES, BlockMover, DrainTarget, SharedMemory};
use weft_dsm::NodeId;

use super::Membership;
use crate::SLICES_MAX;
use crate::message::SliceMessage;

/// Pages that are pinned, or that others use at the moment, stay after this time.
const DRAIN_MAX: Duration = Duration::from_millis(200);
/// Between two looks for cold pages, where the slice owes some and has none.
const COLD_LOOK: Duration = Duration::from_millis(250);

/// What a slice has to do about exchanges.
#[derive(Default)]
pub(super) struct Exchanges {
    is_paused: bool,
    /// vCPUs here want blocks of others.
    is_wanting: bool,
    /// The slice that this one has asked, and that has not answered.
    asked: Option<usize>,
    /// Pages that other slices want of this one; one request of each at most.
    requests: VecDeque<(usize, Range<u64>)>,
    /// By slice, the pages that this one gives back.
    owed: BTreeMap<usize, u64>,
    /// There are no cold pages before this.
    looks_again: Option<Instant>,
}

/// The next thing to do.
#[derive(Debug, PartialEq)]
pub(super) enum ExchangeStep {
    /// Answer that there are no pages.
    Refuse(usize),
    Give(usize, Range<u64>),
    /// Give back at most as many pages.
    GiveBack(usize, u64),
    /// Ask for a block that is wanted, if there is one.
    Ask,
}

impl Exchanges {
    /// What to do next; `has_vcpus`: the slice has some.
    fn next(&mut self, has_vcpus: bool, now: Instant) -> Option<ExchangeStep> {
        if let Some((to, pages)) = self.requests.pop_front() {
            return Some(match self.is_paused || has_vcpus {
                true => ExchangeStep::Refuse(to),
                false => ExchangeStep::Give(to, pages),
            });
        }
        if self.is_paused {
            return None;
        }
        if let Some((to, pages)) = self.owed.first_key_value() {
            let may_look = self.looks_again.is_none_or(|time| now >= time);
            return may_look.then_some(ExchangeStep::GiveBack(*to, *pages));
        }
        (self.asked.is_none() && std::mem::take(&mut self.is_wanting)).then_some(ExchangeStep::Ask)
    }

    /// Until when there is nothing to do, at the latest.
    pub fn due(&self, now: Instant) -> Option<Duration> {
        let again = self.looks_again.filter(|_| !self.owed.is_empty())?;
        Some(again.saturating_duration_since(now))
    }

    fn request(&mut self, from: usize, pages: Range<u64>) -> Result<(), &'static str> {
        let is_second = self.requests.iter().any(|(other, _)| *other == from);
        if is_second || self.requests.len() == SLICES_MAX {
            return Err("it wants two blocks at a time");
        }
        if pages.end.saturating_sub(pages.start) > BLOCK_PAGES || pages.is_empty() {
            return Err("it wants more pages than a block has, or none");
        }
        self.requests.push_back((from, pages));
        Ok(())
    }

    fn given(&mut self, from: usize, pages: u64) -> Result<(), &'static str> {
        if self.asked != Some(from) || pages > BLOCK_PAGES {
            return Err("it gave pages that nobody asked for");
        }
        self.asked = None;
        self.is_wanting = true;
        if pages > 0 {
            *self.owed.entry(from).or_default() += pages;
        }
        Ok(())
    }

    fn gave_back(&mut self, to: usize, pages: u64) {
        if let Some(owed) = self.owed.get_mut(&to) {
            *owed = owed.saturating_sub(pages);
        }
        self.owed.retain(|_, pages| *pages > 0);
        self.is_wanting = true;
    }

    /// A slice left: it answers nothing, and gets nothing back.
    fn departed(&mut self, slice: usize) {
        self.owed.remove(&slice);
        self.requests.retain(|(from, _)| *from != slice);
        self.asked = self.asked.filter(|asked| *asked != slice);
    }
}

/// The thread that moves pages, as the memory sees it.
struct Mover(Weak<Membership>);

impl BlockMover for Mover {
    fn gives(&self, slice: usize) -> bool {
        let membership = self.0.upgrade();
        membership.is_some_and(|membership| !membership.has_vcpus(slice))
    }

    fn wanted(&self) {
        if let Some(membership) = self.0.upgrade() {
            membership.moves().exchanges.is_wanting = true;
            membership.ordered.notify_all();
        }
    }
}

impl Membership {
    /// From now on pages are exchanged that vCPUs here fetch.
    pub(crate) fn exchange(self: &Arc<Self>, memory: &SharedMemory) {
        memory.exchange_by(Box::new(Mover(Arc::downgrade(self))));
    }

    /// A slice wants pages of this one.
    ///
    /// # Errors
    /// It contradicts itself.
    pub(crate) fn wanted(&self, from: usize, pages: Range<u64>) -> Result<(), &'static str> {
        self.moves().exchanges.request(from, pages)?;
        self.ordered.notify_all();
        Ok(())
    }

    /// A slice gave `pages` of those that this one asked it for.
    ///
    /// # Errors
    /// It was not asked.
    pub(crate) fn given(&self, from: usize, pages: u64) -> Result<(), &'static str> {
        self.moves().exchanges.given(from, pages)?;
        self.ordered.notify_all();
        Ok(())
    }

    pub(crate) fn departed(&self, slice: usize) {
        self.moves().exchanges.departed(slice);
    }

    /// From now on no pages are exchanged, or they are again. Returns when none is under way: that
    /// takes [`DRAIN_MAX`] at most, and the answer of a round trip.
    pub(crate) fn pause_exchanges(&self, is_paused: bool) {
        let mut moves = self.moves();
        moves.exchanges.is_paused = is_paused;
        moves.exchanges.is_wanting = true;
        self.ordered.notify_all();
        if is_paused {
            self.wait_until_idle(moves);
        }
    }

    /// What the thread that moves pages does next, if nothing was ordered.
    pub(super) fn next_exchange(&self, exchanges: &mut Exchanges) -> Option<ExchangeStep> {
        exchanges.next(self.has_vcpus(self.number), Instant::now())
    }

    pub(super) fn do_exchange(&self, memory: &SharedMemory, step: ExchangeStep) {
        match step {
            ExchangeStep::Refuse(to) => self.say_given(to, 0),
            ExchangeStep::Give(to, pages) => {
                let given = match memory.has_absent() {
                    true => 0,
                    false => self.give(memory, to, pages, BLOCK_PAGES),
                };
                self.say_given(to, given);
            }
            ExchangeStep::GiveBack(to, owed) => {
                let Some(pages) = memory.take_cold() else {
                    self.moves().exchanges.looks_again = Some(Instant::now() + COLD_LOOK);
                    return;
                };
                let given = self.give(memory, to, pages, owed);
                self.moves().exchanges.gave_back(to, given);
            }
            ExchangeStep::Ask => self.ask(memory),
        }
    }

    /// Asks for the first block that a slice without vCPUs has, if there is one to give for it.
    fn ask(&self, memory: &SharedMemory) {
        if memory.has_absent() {
            return;
        }
        while let Some((manager, pages)) = memory.take_wanted() {
            let manager = manager.index();
            if manager == self.number || self.has_vcpus(manager) {
                continue;
            }
            if !memory.has_cold() {
                // Later faults want it again.
                return;
            }
            self.moves().exchanges.asked = Some(manager);
            let (first, count) = (pages.start, pages.end - pages.start);
            let wanted = SliceMessage::WantsPages { first, count };
            self.peers.send(manager, &wanted);
            return;
        }
    }

    fn say_given(&self, to: usize, pages: u64) {
        self.peers.send(to, &SliceMessage::GavePages { pages });
    }

    /// Moves at most `most` of these pages; how many have another manager now.
    fn give(&self, memory: &SharedMemory, to: usize, pages: Range<u64>, most: u64) -> u64 {
        let until = Instant::now() + DRAIN_MAX;
        let to = DrainTarget {
            node: NodeId(to as u8),
            pages: most,
        };
        memory.give_block(to, pages, || {
            self.moves().ordered.is_some() || Instant::now() > until
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asks() -> Exchanges {
        let mut exchanges = Exchanges {
            is_wanting: true,
            ..Exchanges::default()
        };
        assert_eq!(
            exchanges.next(true, Instant::now()),
            Some(ExchangeStep::Ask)
        );
        exchanges.asked = Some(2);
        exchanges
    }

    #[test]
    fn a_block_is_asked_for_when_the_one_before_is_paid() {
        let now = Instant::now();
        let mut exchanges = asks();
        exchanges.is_wanting = true;
        assert_eq!(exchanges.next(true, now), None, "it waits for the answer");
        exchanges.given(2, 60).unwrap();
        assert_eq!(
            exchanges.next(true, now),
            Some(ExchangeStep::GiveBack(2, 60))
        );
        exchanges.gave_back(2, 40);
        exchanges.looks_again = Some(now + COLD_LOOK);
        assert_eq!(exchanges.next(true, now), None, "nothing is cold");
        assert_eq!(exchanges.due(now), Some(COLD_LOOK));
        let later = now + COLD_LOOK;
        assert_eq!(
            exchanges.next(true, later),
            Some(ExchangeStep::GiveBack(2, 20))
        );
        exchanges.gave_back(2, 20);
        assert_eq!(exchanges.due(now), None);
        assert_eq!(exchanges.next(true, now), Some(ExchangeStep::Ask));
        assert_eq!(exchanges.next(true, now), None);
    }

    #[test]
    fn a_refusal_costs_nothing() {
        let mut exchanges = asks();
        exchanges.given(2, 0).unwrap();
        assert_eq!(
            exchanges.next(true, Instant::now()),
            Some(ExchangeStep::Ask)
        );
    }

    #[test]
    fn only_a_slice_without_vcpus_gives_unless_it_is_paused() {
        let now = Instant::now();
        let mut exchanges = Exchanges::default();
        let mut asked = |has_vcpus, is_paused| {
            exchanges.is_paused = is_paused;
            exchanges.request(3, 64..128).unwrap();
            exchanges.next(has_vcpus, now)
        };
        assert_eq!(asked(false, false), Some(ExchangeStep::Give(3, 64..128)));
        assert_eq!(asked(true, false), Some(ExchangeStep::Refuse(3)));
        assert_eq!(asked(false, true), Some(ExchangeStep::Refuse(3)));
        exchanges.is_wanting = true;
        exchanges.owed.insert(3, 7);
        assert_eq!(exchanges.next(false, now), None);
    }

    #[test]
    fn contradictions_are_refused() {
        let mut exchanges = asks();
        assert!(exchanges.given(1, 5).is_err(), "another slice was asked");
        assert!(exchanges.given(2, BLOCK_PAGES + 1).is_err());
        assert!(exchanges.request(2, 5..5).is_err());
        assert!(exchanges.request(2, 0..BLOCK_PAGES + 1).is_err());
        exchanges.request(2, 0..BLOCK_PAGES).unwrap();
        assert!(exchanges.request(2, 0..BLOCK_PAGES).is_err());
        exchanges.request(3, 0..1).unwrap();
        exchanges.departed(2);
        assert_eq!(exchanges.requests, [(3, 0..1)]);
        assert!(exchanges.given(2, 5).is_err(), "it left");
    }
}
