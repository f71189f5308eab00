//! How much this host may lend now: what its owner says, and no more than leaves the owner the
//! memory that stays free, if all slices fill what was lent to them.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::budget::Budget;
use crate::host;
use crate::lending::{LendRequest, LendState};
use crate::size::PAGE_BYTES;

/// The host lacks memory for this long before slices are asked to leave.
const SHORT_FOR: Duration = Duration::from_secs(5);
/// Steps of what is lent where the host's free memory sets it: each is news for the cluster.
const STEP_BYTES: u64 = 64 << 20;

pub(super) struct Limit {
    state: Mutex<State>,
}

struct State {
    wanted: Wanted,
    /// Since when the host lacks memory.
    short_since: Option<Instant>,
}

/// What the owner wants.
#[derive(Clone, Copy)]
struct Wanted {
    memory_bytes: u64,
    keep_free_bytes: u64,
}

/// The memory of slices and of the host, in bytes.
#[derive(Clone, Copy)]
struct Found {
    /// What slices may hold, and what they hold.
    lent_bytes: u64,
    held_bytes: u64,
    available_bytes: u64,
}

impl Found {
    fn of(budget: &Budget) -> Found {
        Found {
            lent_bytes: budget.used_pages() * PAGE_BYTES,
            held_bytes: budget.held_pages() * PAGE_BYTES,
            available_bytes: host::available_memory_bytes(),
        }
    }
}

impl Wanted {
    /// What may be lent in all. Slices will take what they do not hold yet.
    fn limit_bytes(self, found: Found) -> u64 {
        if self.keep_free_bytes == 0 {
            return self.memory_bytes;
        }
        let spare = (found.held_bytes + found.available_bytes).saturating_sub(self.keep_free_bytes);
        match spare < self.memory_bytes {
            true => spare / STEP_BYTES * STEP_BYTES,
            false => self.memory_bytes,
        }
    }

    /// What the owner waits for. A loan that is within what it lets the host lend, and that slices
    /// do not hold, is none of it.
    fn excess_bytes(self, found: Found) -> u64 {
        let lent = found.lent_bytes.saturating_sub(self.memory_bytes);
        lent.max(self.lacks_bytes(found).min(found.held_bytes))
    }

    /// What the host lacks for its owner.
    fn lacks_bytes(self, found: Found) -> u64 {
        self.keep_free_bytes.saturating_sub(found.available_bytes)
    }
}

impl Limit {
    pub(super) fn new(memory_bytes: u64, keep_free_bytes: u64) -> Limit {
        let wanted = Wanted {
            memory_bytes,
            keep_free_bytes,
        };
        Limit {
            state: Mutex::new(State {
                wanted,
                short_since: None,
            }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What its owner lets this host lend.
    pub(super) fn may_lend_bytes(&self) -> u64 {
        self.lock().wanted.memory_bytes
    }

    pub(super) fn change(&self, request: &LendRequest) {
        let wanted = &mut self.lock().wanted;
        wanted.memory_bytes = request.memory_bytes.unwrap_or(wanted.memory_bytes);
        wanted.keep_free_bytes = request.keep_free_bytes.unwrap_or(wanted.keep_free_bytes);
    }

    /// Sets the budget's limit to what may be lent now.
    pub(super) fn apply(&self, budget: &Budget) {
        let found = Found::of(budget);
        let mut state = self.lock();
        let wanted = state.wanted;
        let now = Instant::now();
        let lacks = wanted.lacks_bytes(found);
        let since = *state.short_since.get_or_insert(now);
        if lacks == 0 {
            state.short_since = None;
        }
        drop(state);
        let is_short = now.duration_since(since) >= SHORT_FOR;
        budget.set_limit(
            wanted.limit_bytes(found) / PAGE_BYTES,
            wanted.memory_bytes / PAGE_BYTES,
            if is_short { lacks / PAGE_BYTES } else { 0 },
        );
    }

    pub(super) fn state(&self, budget: &Budget) -> LendState {
        let wanted = self.lock().wanted;
        let found = Found::of(budget);
        LendState {
            memory_bytes: wanted.memory_bytes,
            keep_free_bytes: wanted.keep_free_bytes,
            lends_bytes: budget.pages().0 * PAGE_BYTES,
            lent_bytes: found.lent_bytes,
            excess_bytes: wanted.excess_bytes(found),
            slices: budget.slots_used(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn found(lent: u64, held: u64, available: u64) -> Found {
        Found {
            lent_bytes: lent * GIB,
            held_bytes: held * GIB,
            available_bytes: available * GIB,
        }
    }

    #[test]
    fn the_owner_keeps_what_stays_free() {
        let wanted = Wanted {
            memory_bytes: 4 * GIB,
            keep_free_bytes: 2 * GIB,
        };
        // Much is free: what the owner lets it lend.
        assert_eq!(wanted.limit_bytes(found(1, 1, 9)), 4 * GIB);
        // 3 GiB are free, one of them may be lent beside the one that is.
        assert_eq!(wanted.limit_bytes(found(1, 1, 3)), 2 * GIB);
        // What was lent will be filled: it is no room for more.
        assert_eq!(wanted.limit_bytes(found(3, 0, 5)), 3 * GIB);
        assert_eq!(wanted.limit_bytes(found(1, 1, 0)), 0);
        let odd = Found {
            available_bytes: 3 * GIB + 12345,
            ..found(1, 1, 0)
        };
        assert_eq!(wanted.limit_bytes(odd), 2 * GIB);
        let none = Wanted {
            keep_free_bytes: 0,
            ..wanted
        };
        assert_eq!(none.limit_bytes(found(1, 1, 0)), 4 * GIB);
    }

    #[test]
    fn an_owner_waits_for_what_has_to_leave() {
        let wanted = Wanted {
            memory_bytes: 2 * GIB,
            keep_free_bytes: 2 * GIB,
        };
        assert_eq!(wanted.excess_bytes(found(3, 1, 9)), GIB);
        assert_eq!(wanted.excess_bytes(found(2, 1, 0)), GIB);
        // New loans are refused then, and nothing has to leave.
        let promised = found(2, 0, 3);
        assert_eq!(wanted.limit_bytes(promised), GIB);
        assert_eq!(wanted.excess_bytes(promised), 0);
    }
}
