//! What this host lends, and how much of it is lent now.
//!
//! A slice may hold more than its budget ([`bound_bytes`]), and counts with all that it
//! may hold: so slices together never hold more than the limit.
//!
//! The limit may be lowered below what is lent. Then nothing more is lent. Slices that can
//! leave are asked to, no more of them than needed, if the host's owner wants to lend less
//! than is lent, or if the host lacks memory: counted by what they may hold, or by what they
//! hold.
//!
//! Invariants: no reservation is made past the limit; `used_pages` is the sum of what the
//! reservations may hold; a slot belongs to at most one reservation; a reservation gives
//! back exactly what it took, when dropped.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::options::MEMORY_BYTES_MIN;
use crate::size::{PAGE_BYTES, format_bytes, format_pages};

/// What a slice may hold beside its budget: its own code, tables and buffers.
pub(super) const OVERHEAD_BYTES: u64 = 64 << 20;
/// The part of its budget that a slice may hold beyond it.
const MARGIN_PART: u64 = 4;

/// Most that a slice may hold to which `lent_bytes` were lent.
pub(super) const fn bound_bytes(lent_bytes: u64) -> u64 {
    lent_bytes
        .saturating_add(lent_bytes / MARGIN_PART)
        .saturating_add(OVERHEAD_BYTES)
}

/// What a reservation of `pages` takes of the limit.
fn bound_pages(pages: u64) -> u64 {
    bound_bytes(pages.saturating_mul(PAGE_BYTES)).div_ceil(PAGE_BYTES)
}

/// The largest reservation that takes `free_pages` at most.
fn lendable_pages(free_pages: u64) -> u64 {
    let free_pages = free_pages.saturating_sub(OVERHEAD_BYTES / PAGE_BYTES);
    free_pages - free_pages.div_ceil(MARGIN_PART + 1)
}

/// Shared by all sessions of a daemon.
pub struct Budget {
    /// Guards the bookkeeping alone; nothing is done under it but arithmetic.
    state: Mutex<State>,
}

struct State {
    limit_pages: u64,
    used_pages: u64,
    /// What the owner lets the host lend: as much as the limit, or more.
    owner_pages: u64,
    /// What the host lacks, less what slices gave back since that was found.
    lacks_pages: u64,
    slots: Vec<Option<Slot>>,
    /// All slices that can leave should.
    all_leave: bool,
}

/// What has to leave, in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Shortage {
    /// What is lent beyond what the owner lets the host lend: of what slices may hold.
    lent: u64,
    /// What the host lacks: of what slices hold.
    held: u64,
}

impl Shortage {
    /// What is left of it when a slice has left.
    fn without(self, slot: &Slot) -> Shortage {
        Shortage {
            lent: self.lent.saturating_sub(slot.pages),
            held: self.held.saturating_sub(slot.held),
        }
    }

    /// Of a slice, what counts.
    fn of(self, slot: &Slot) -> u64 {
        if self.lent > 0 { slot.pages } else { slot.held }
    }

    fn amount(self) -> u64 {
        if self.lent > 0 { self.lent } else { self.held }
    }
}

/// What a slice takes of the limit.
struct Slot {
    pages: u64,
    /// What it held last.
    held: u64,
    /// Whether it leaves when it is asked to: it is a program's, and runs.
    can_leave: bool,
    /// When it was asked last, and how often it was.
    asked: Option<(Instant, u32)>,
}

/// How long a slice that was asked to leave counts as good as gone: a launcher gives up after
/// [`SHRINK_BOUND`](crate::rundir::SHRINK_BOUND). Then others are asked.
const LEAVES_WITHIN: Duration = Duration::from_secs(65);
/// One that has not left is asked again after twice as long each time, up to this power of two.
const DOUBLINGS_MAX: u32 = 6;

impl Slot {
    /// It was asked for the first time, and may be about to leave.
    fn leaves(&self, now: Instant) -> bool {
        matches!(self.asked, Some((at, 1)) if now < at + LEAVES_WITHIN)
    }

    fn may_be_asked(&self, now: Instant) -> bool {
        let again = |(at, times): (Instant, u32)| {
            let doublings = times.min(DOUBLINGS_MAX);
            now >= at + LEAVES_WITHIN * 2_u32.pow(doublings)
        };
        self.can_leave && self.asked.is_none_or(again)
    }
}

impl State {
    /// What has to leave, without slices of which `leaves` says so.
    fn shortage(&self, leaves: impl Fn(&Slot) -> bool) -> Shortage {
        let leaving = self.slots.iter().flatten().filter(|slot| leaves(slot));
        let shortage = Shortage {
            lent: self.used_pages.saturating_sub(self.owner_pages),
            held: self.lacks_pages,
        };
        leaving.fold(shortage, |shortage, slot| shortage.without(slot))
    }

    /// The slot that should leave: of those that were asked least often, of those that suffice
    /// the smallest, else the largest.
    fn next_to_leave(&self, now: Instant) -> Option<usize> {
        let wanted = self.shortage(|slot| slot.leaves(now));
        if wanted == Shortage::default() && !self.all_leave {
            return None;
        }
        let slots = self.slots.iter().enumerate();
        let open: Vec<(u32, u64, usize)> = slots
            .filter_map(|(number, slot)| {
                let slot = slot.as_ref()?;
                let times = slot.asked.map_or(0, |(_, times)| times);
                let may = slot.may_be_asked(now);
                may.then_some((times, wanted.of(slot), number))
            })
            .collect();
        let least = open.iter().map(|&(times, ..)| times).min()?;
        let open = open.into_iter().filter(|&(times, ..)| times == least);
        let open = open.map(|(_, pages, number)| (pages, number));
        let (sufficient, less): (Vec<_>, Vec<_>) =
            open.partition(|&(pages, _)| pages >= wanted.amount());
        let next = sufficient.into_iter().min().or(less.into_iter().max());
        next.map(|(_, number)| number)
    }
}

/// Part of the budget, held by one slice.
pub struct Reservation {
    budget: Arc<Budget>,
    /// Pages reserved.
    pub pages: u64,
    /// The slice's slot: its user id counts from here.
    pub slot: u32,
}

/// Why there is no room.
#[derive(Debug, PartialEq, Eq)]
pub struct NoRoom {
    pub asked_pages: u64,
    /// Most that could be asked for.
    pub free_pages: u64,
    /// What ran out.
    pub why: String,
}

impl Budget {
    /// A budget of `limit_pages`, for at most `slots` slices.
    pub fn new(limit_pages: u64, slots: u32) -> Arc<Budget> {
        Arc::new(Budget {
            state: Mutex::new(State {
                limit_pages,
                used_pages: 0,
                owner_pages: limit_pages,
                lacks_pages: 0,
                slots: (0..slots).map(|_| None).collect(),
                all_leave: false,
            }),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic aborts the process, so the lock cannot be poisoned.
        self.state
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Pages that all slices may hold at most, and those of them that no slice may hold now.
    pub fn pages(&self) -> (u64, u64) {
        let state = self.lock();
        let free = state.limit_pages.saturating_sub(state.used_pages);
        (state.limit_pages, free)
    }

    /// Pages that slices may hold now, those beyond the limit included.
    pub fn used_pages(&self) -> u64 {
        self.lock().used_pages
    }

    /// Lends more or less than before. What is lent stays lent until its slice leaves: what is
    /// beyond `owner_pages`, or held while the host lacks `lacks_pages`, should.
    pub fn set_limit(&self, pages: u64, owner_pages: u64, lacks_pages: u64) {
        let mut state = self.lock();
        state.limit_pages = pages;
        (state.owner_pages, state.lacks_pages) = (owner_pages, lacks_pages);
    }

    /// What slices hold now.
    pub fn held_pages(&self) -> u64 {
        self.lock()
            .slots
            .iter()
            .flatten()
            .map(|slot| slot.held)
            .sum()
    }

    /// Has all slices leave that can, or no more than [`Budget::set_limit`] wants.
    pub fn set_all_leave(&self, all_leave: bool) {
        self.lock().all_leave = all_leave;
    }

    /// Pages that have to leave, without those of slices that may leave by themselves.
    pub fn wanted_back(&self, now: Instant) -> u64 {
        let may_leave = |slot: &Slot| slot.can_leave && slot.asked.is_none() || slot.leaves(now);
        self.lock().shortage(may_leave).amount()
    }

    /// Slices running now.
    pub fn slots_used(&self) -> u32 {
        self.lock().slots.iter().flatten().count() as u32
    }

    /// Reserves `wanted` pages, or half of what can be lent when the borrower leaves
    /// it open.
    pub fn reserve(self: &Arc<Budget>, wanted: Option<u64>) -> Result<Reservation, NoRoom> {
        let minimum = MEMORY_BYTES_MIN / PAGE_BYTES;
        let mut state = self.lock();
        let free_pages = lendable_pages(state.limit_pages.saturating_sub(state.used_pages));
        let pages = wanted.unwrap_or((free_pages / 2).max(minimum));
        let refuse = |why: String| NoRoom {
            asked_pages: pages,
            free_pages,
            why,
        };
        if pages < minimum {
            return Err(refuse(format!(
                "a slice needs at least {}",
                format_pages(minimum)
            )));
        }
        if pages > free_pages {
            return Err(refuse(format!(
                "it lends {} in all; a slice takes its budget, a quarter more, and {}",
                format_pages(state.limit_pages),
                format_bytes(OVERHEAD_BYTES)
            )));
        }
        let Some(slot) = state.slots.iter().position(Option::is_none) else {
            return Err(refuse(format!(
                "all its {} slices are in use",
                state.slots.len()
            )));
        };
        let bound = bound_pages(pages);
        state.slots[slot] = Some(Slot {
            pages: bound,
            held: 0,
            can_leave: false,
            asked: None,
        });
        state.used_pages += bound;
        Ok(Reservation {
            budget: self.clone(),
            pages,
            slot: slot as u32,
        })
    }
}

impl Reservation {
    /// Its slice leaves when it is asked to, from now on, or not.
    pub fn set_can_leave(&self, can_leave: bool) {
        let mut state = self.budget.lock();
        if let Some(slot) = &mut state.slots[self.slot as usize] {
            slot.can_leave = can_leave;
            slot.asked = None;
        }
    }

    /// Notes what its slice holds now.
    pub fn set_held(&self, pages: u64) {
        let mut state = self.budget.lock();
        if let Some(slot) = &mut state.slots[self.slot as usize] {
            slot.held = pages;
        }
    }

    /// Whether its slice should be asked to leave now. It counts as asked then.
    pub fn is_wanted_back(&self, now: Instant) -> bool {
        let mut state = self.budget.lock();
        let own = self.slot as usize;
        if state.next_to_leave(now) != Some(own) {
            return false;
        }
        if let Some(slot) = &mut state.slots[own] {
            let times = slot.asked.map_or(0, |(_, times)| times);
            slot.asked = Some((now, times.saturating_add(1)));
        }
        true
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut state = self.budget.lock();
        if let Some(slot) = state.slots[self.slot as usize].take() {
            state.used_pages -= slot.pages;
            state.lacks_pages = state.lacks_pages.saturating_sub(slot.held);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a slice takes beside its budget and a quarter of that.
    const OVERHEAD_PAGES: u64 = OVERHEAD_BYTES / PAGE_BYTES;

    #[test]
    fn a_reservation_gives_back_what_it_took() {
        let limit = 1000 + 2 * OVERHEAD_PAGES;
        let budget = Budget::new(limit, 2);
        let first = budget.reserve(Some(400)).unwrap();
        assert_eq!(budget.pages(), (limit, 500 + OVERHEAD_PAGES));
        let refusal = budget.reserve(Some(401)).err().unwrap();
        assert_eq!((refusal.asked_pages, refusal.free_pages), (401, 400));
        let second = budget.reserve(None).unwrap();
        assert_eq!((second.pages, second.slot), (256, 1));
        drop(first);
        assert_eq!(budget.pages(), (limit, 680 + OVERHEAD_PAGES));
        assert_eq!(budget.reserve(Some(300)).unwrap().slot, 0);
    }

    #[test]
    fn slices_together_hold_no_more_than_the_limit() {
        let budget = Budget::new(1 << 20, 256);
        let mut held_bytes = 0;
        let mut slices = Vec::new();
        for pages in (256..).step_by(37) {
            let Ok(slice) = budget.reserve(Some(pages)) else {
                break;
            };
            held_bytes += bound_bytes(slice.pages * PAGE_BYTES);
            slices.push(slice);
        }
        assert!(slices.len() > 50);
        assert!(held_bytes <= (1 << 20) * PAGE_BYTES);
        drop(slices);
        assert_eq!(budget.pages(), (1 << 20, 1 << 20));
    }

    #[test]
    fn what_is_free_can_be_lent_and_no_page_more() {
        for free in (OVERHEAD_PAGES..OVERHEAD_PAGES + 100).chain([1 << 20, (1 << 30) + 3]) {
            let pages = lendable_pages(free);
            assert!(bound_pages(pages) <= free && bound_pages(pages + 1) > free);
        }
        assert_eq!(lendable_pages(0), 0);
        assert_eq!(lendable_pages(OVERHEAD_PAGES - 1), 0);
    }

    #[test]
    fn no_more_than_needed_is_wanted_back() {
        let now = Instant::now();
        let budget = Budget::new(1 << 20, 4);
        let [small, middle, large, machine] =
            [1000, 2000, 3000, 9000].map(|pages| budget.reserve(Some(pages)).unwrap());
        for program in [&small, &middle, &large] {
            program.set_can_leave(true);
        }
        let all = [&small, &middle, &large, &machine];
        let asked = |now| all.map(|slice| slice.is_wanted_back(now));
        assert_eq!(asked(now), [false; 4]);
        let used = budget.used_pages();
        let limit = used - bound_pages(1500);
        budget.set_limit(limit, limit, 0);
        assert_eq!(budget.pages(), (used - bound_pages(1500), 0));
        assert!(budget.reserve(Some(256)).is_err());
        // Machines need not move: programs may suffice.
        assert_eq!(budget.wanted_back(now), 0);
        // The smallest that suffices, once.
        assert_eq!(asked(now), [false, true, false, false]);
        assert_eq!(asked(now), [false; 4]);
        // It has not left in time: the next one is asked, and it itself later than that.
        let at = |turns: u32| now + turns * LEAVES_WITHIN;
        assert_eq!(asked(at(1)), [false, false, true, false]);
        assert_eq!(asked(at(1)), [false; 4]);
        // Nor has that one: all are asked, and what they leave is wanted of machines.
        assert_eq!(asked(at(2)), [true, true, false, false]);
        assert_eq!(
            budget.wanted_back(at(2)),
            bound_pages(1500) - bound_pages(1000)
        );
        assert_eq!(budget.wanted_back(at(3)), bound_pages(1500));
        // The pause doubles from one request to the next.
        let turns = (4..64).filter(|turn| asked(at(*turn))[1]);
        assert_eq!(turns.collect::<Vec<u32>>(), [6, 14, 30, 62]);
        drop(large);
        assert_eq!(budget.used_pages(), used - bound_pages(3000));
        // A host that is drained is left by all, within the limit, too.
        let last = at(200);
        budget.set_limit(used, used, 0);
        budget.set_all_leave(true);
        let asked = |now| [&small, &middle, &machine].map(|slice| slice.is_wanted_back(now));
        assert_eq!(asked(last), [true, true, false]);
        assert_eq!(asked(last), [false; 3]);
        budget.set_all_leave(false);
        assert_eq!(asked(last + 100 * LEAVES_WITHIN), [false; 3]);
    }

    /// What a slice may hold and does not gives the host nothing.
    #[test]
    fn a_host_that_lacks_memory_asks_those_that_hold_it() {
        let now = Instant::now();
        let budget = Budget::new(1 << 20, 4);
        let [idle, busy, busier] = [9000, 2000, 3000].map(|pages| {
            let slice = budget.reserve(Some(pages)).unwrap();
            slice.set_can_leave(true);
            slice
        });
        idle.set_held(10);
        busy.set_held(1500);
        busier.set_held(2500);
        assert_eq!(budget.held_pages(), 4010);
        let lacks = |pages| budget.set_limit(100, 1 << 20, pages);
        let asked = |now| [&idle, &busy, &busier].map(|slice| slice.is_wanted_back(now));
        // A promise that could not be kept is no reason to leave.
        lacks(0);
        assert_eq!(asked(now), [false; 3]);
        lacks(1200);
        assert_eq!(asked(now), [false, true, false]);
        assert_eq!(budget.wanted_back(now), 0);
        // It has left before the host is looked at again: no other is asked for it.
        drop(busy);
        let asked = |now| [&idle, &busier].map(|slice| slice.is_wanted_back(now));
        assert_eq!(asked(now), [false; 2]);
        lacks(1600);
        assert_eq!(asked(now), [false, true]);
    }

    #[test]
    fn slices_run_out_before_memory() {
        let budget = Budget::new(100_000, 1);
        let _one = budget.reserve(Some(256)).unwrap();
        let refusal = budget.reserve(Some(256)).err().unwrap();
        assert!(refusal.why.contains("slices"));
        assert_eq!(budget.slots_used(), 1);
    }

    #[test]
    fn less_than_a_workable_set_is_refused() {
        let budget = Budget::new(100_000, 1);
        let refusal = budget.reserve(Some(255)).err().unwrap();
        assert!(refusal.why.contains("1.0 MiB"));
    }

    #[test]
    fn a_bound_has_room_for_weft_itself() {
        assert_eq!(bound_bytes(64 << 20), 144 << 20);
        assert_eq!(bound_bytes(u64::MAX), u64::MAX);
    }

    /// The cluster counts what a machine's slice takes by its own formula.
    #[test]
    fn the_cluster_counts_what_a_slice_of_a_machine_takes() {
        use crate::launch::machine::reservation_bytes;
        for (memory_mib, cpus) in [(2, 0), (100, 1), (256, 3), (4096, 0), (6000, 16)] {
            let memory_bytes = (memory_mib + (memory_mib / 4).max(64)) << 20;
            let bytes = bound_bytes(reservation_bytes(memory_bytes, cpus));
            let counted = weft_cluster::lent_mib(memory_mib, cpus) << 20;
            assert!(
                counted.abs_diff(bytes) < 1 << 20,
                "{memory_mib} MiB, {cpus}"
            );
        }
    }
}
