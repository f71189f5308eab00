//! What this host lends, and how much of it is lent now.
//!
//! Invariants: `used_pages <= limit_pages`; a slot belongs to at most one
//! reservation; a reservation gives back exactly what it took, when dropped.

use std::sync::{Arc, Mutex, MutexGuard};

use crate::options::MEMORY_BYTES_MIN;
use crate::size::{PAGE_BYTES, format_pages};

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
    /// Pages asked for.
    pub asked_pages: u64,
    /// Pages not lent.
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

    /// Pages that are lent at most, and pages not lent now.
    pub fn pages(&self) -> (u64, u64) {
        let state = self.lock();
        (state.limit_pages, state.limit_pages - state.used_pages)
    }

    /// Slices running now.
    pub fn slots_used(&self) -> u32 {
        self.lock().slots.iter().filter(|used| **used).count() as u32
    }

    /// Reserves `wanted` pages, or half of what is free when the borrower leaves
    /// it open.
    pub fn reserve(self: &Arc<Budget>, wanted: Option<u64>) -> Result<Reservation, NoRoom> {
        let minimum = MEMORY_BYTES_MIN / PAGE_BYTES;
        let mut state = self.lock();
        let free_pages = state.limit_pages - state.used_pages;
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
                "it lends {} in all",
                format_pages(state.limit_pages)
            )));
        }
        let Some(slot) = state.slots.iter().position(|used| !used) else {
            return Err(refuse(format!(
                "all its {} slices are in use",
                state.slots.len()
            )));
        };
        state.slots[slot] = true;
        state.used_pages += pages;
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
        state.used_pages -= self.pages;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reservation_gives_back_what_it_took() {
        let budget = Budget::new(1000, 2);
        let first = budget.reserve(Some(600)).unwrap();
        assert_eq!(budget.pages(), (1000, 400));
        let refusal = budget.reserve(Some(600)).err().unwrap();
        assert_eq!((refusal.asked_pages, refusal.free_pages), (600, 400));
        let second = budget.reserve(None).unwrap();
        assert_eq!((second.pages, second.slot), (256, 1));
        drop(first);
        assert_eq!(budget.pages(), (1000, 744));
        assert_eq!(budget.reserve(Some(300)).unwrap().slot, 0);
    }

    #[test]
    fn slices_run_out_before_memory() {
        let budget = Budget::new(10_000, 1);
        let _one = budget.reserve(Some(256)).unwrap();
        assert!(
            budget
                .reserve(Some(256))
                .err()
                .unwrap()
                .why
                .contains("slices")
        );
        assert_eq!(budget.slots_used(), 1);
    }

    #[test]
    fn less_than_a_workable_set_is_refused() {
        let budget = Budget::new(10_000, 1);
        assert!(
            budget
                .reserve(Some(255))
                .err()
                .unwrap()
                .why
                .contains("1.0 MiB")
        );
    }
}
