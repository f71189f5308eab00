//! How much this host may lend now: what its owner says, and no more than leaves the owner the
//! memory that stays free.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::budget::Budget;
use crate::host;
use crate::lending::{LendRequest, LendState};
use crate::size::PAGE_BYTES;

/// What the owner wants.
pub(super) struct Limit {
    wanted: Mutex<Wanted>,
}

#[derive(Clone, Copy)]
struct Wanted {
    memory_bytes: u64,
    keep_free_bytes: u64,
}

impl Wanted {
    /// What may be lent while slices may hold `lent_bytes` and the host has `available_bytes`.
    fn limit_bytes(self, lent_bytes: u64, available_bytes: u64) -> u64 {
        if self.keep_free_bytes == 0 {
            return self.memory_bytes;
        }
        let spare = (lent_bytes + available_bytes).saturating_sub(self.keep_free_bytes);
        self.memory_bytes.min(spare)
    }
}

impl Limit {
    pub(super) fn new(memory_bytes: u64, keep_free_bytes: u64) -> Limit {
        let wanted = Wanted {
            memory_bytes,
            keep_free_bytes,
        };
        Limit {
            wanted: Mutex::new(wanted),
        }
    }

    fn wanted(&self) -> MutexGuard<'_, Wanted> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn change(&self, request: &LendRequest) {
        let mut wanted = self.wanted();
        wanted.memory_bytes = request.memory_bytes.unwrap_or(wanted.memory_bytes);
        wanted.keep_free_bytes = request.keep_free_bytes.unwrap_or(wanted.keep_free_bytes);
    }

    /// Sets the budget's limit to what may be lent now.
    pub(super) fn apply(&self, budget: &Budget) {
        let lent_bytes = budget.used_pages() * PAGE_BYTES;
        let limit = self
            .wanted()
            .limit_bytes(lent_bytes, host::available_memory_bytes());
        budget.set_limit(limit / PAGE_BYTES);
    }

    pub(super) fn state(&self, budget: &Budget) -> LendState {
        let wanted = *self.wanted();
        LendState {
            memory_bytes: wanted.memory_bytes,
            keep_free_bytes: wanted.keep_free_bytes,
            lends_bytes: budget.pages().0 * PAGE_BYTES,
            lent_bytes: budget.used_pages() * PAGE_BYTES,
            slices: budget.slots_used(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_owner_keeps_what_stays_free() {
        const GIB: u64 = 1 << 30;
        let wanted = Wanted {
            memory_bytes: 4 * GIB,
            keep_free_bytes: 2 * GIB,
        };
        // Much is free: what the owner lets it lend.
        assert_eq!(wanted.limit_bytes(GIB, 9 * GIB), 4 * GIB);
        // 3 GiB are free, one of them may be lent beside the one that is.
        assert_eq!(wanted.limit_bytes(GIB, 3 * GIB), 2 * GIB);
        // The owner lacks one.
        assert_eq!(wanted.limit_bytes(3 * GIB, GIB), 2 * GIB);
        assert_eq!(wanted.limit_bytes(GIB, 0), 0);
        let none = Wanted {
            keep_free_bytes: 0,
            ..wanted
        };
        assert_eq!(none.limit_bytes(GIB, 0), 4 * GIB);
    }
}
