//! What this host lends, and how much of it is lent now.
//!
//! A slice may hold more than its budget ([`bound_bytes`]), and counts with all that it
//! may hold: so slices together never hold more than the limit.
//!
//! Invariants: `used_pages <= limit_pages`; `used_pages` is the sum of what the
//! reservations may hold; a slot belongs to at most one reservation; a reservation gives
//! back exactly what it took, when dropped.

use std::sync::{Arc, Mutex, MutexGuard};

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
    slots: Vec<bool>,
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
                slots: vec![false; slots as usize],
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
        (state.limit_pages, state.limit_pages - state.used_pages)
    }

    /// Slices running now.
    pub fn slots_used(&self) -> u32 {
        self.lock().slots.iter().filter(|used| **used).count() as u32
    }

    /// Reserves `wanted` pages, or half of what can be lent when the borrower leaves
    /// it open.
    pub fn reserve(self: &Arc<Budget>, wanted: Option<u64>) -> Result<Reservation, NoRoom> {
        let minimum = MEMORY_BYTES_MIN / PAGE_BYTES;
        let mut state = self.lock();
        let free_pages = lendable_pages(state.limit_pages - state.used_pages);
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
        let Some(slot) = state.slots.iter().position(|used| !used) else {
            return Err(refuse(format!(
                "all its {} slices are in use",
                state.slots.len()
            )));
        };
        state.slots[slot] = true;
        state.used_pages += bound_pages(pages);
        Ok(Reservation {
            budget: self.clone(),
            pages,
            slot: slot as u32,
        })
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut state = self.budget.lock();
        state.slots[self.slot as usize] = false;
        state.used_pages -= bound_pages(self.pages);
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
