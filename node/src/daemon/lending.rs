//! How much this host lends now: what its owner says, while the daemon runs as well, and no more
//! than leaves the owner the memory that stays free.
//!
//! One thread answers at the daemon's socket ([`crate::lending`]) and looks at the host's free
//! memory every second. A limit below what is lent has slices of programs leave
//! ([`super::budget`]); what machines have of it, the cluster moves.

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::budget::Budget;
use super::shared::Shared;
use crate::lending::{LendRequest, LendState, socket};
use crate::rundir::Entry;
use crate::size::{PAGE_BYTES, format_bytes};
use crate::{host, sys};

/// How often the host's free memory is looked at.
const TURN: Duration = Duration::from_secs(1);

/// What the owner wants.
pub(super) struct Lending {
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

impl Lending {
    pub(super) fn new(memory_bytes: u64, keep_free_bytes: u64) -> Lending {
        let wanted = Wanted {
            memory_bytes,
            keep_free_bytes,
        };
        Lending {
            wanted: Mutex::new(wanted),
        }
    }

    fn wanted(&self) -> MutexGuard<'_, Wanted> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, request: &LendRequest) {
        let mut wanted = self.wanted();
        wanted.memory_bytes = request.memory_bytes.unwrap_or(wanted.memory_bytes);
        wanted.keep_free_bytes = request.keep_free_bytes.unwrap_or(wanted.keep_free_bytes);
    }

    /// Sets the budget's limit to what may be lent now.
    fn apply(&self, budget: &Budget) {
        let lent_bytes = budget.used_pages() * PAGE_BYTES;
        let limit = self
            .wanted()
            .limit_bytes(lent_bytes, host::available_memory_bytes());
        budget.set_limit(limit / PAGE_BYTES);
    }

    fn state(&self, budget: &Budget) -> LendState {
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

/// Starts the thread. The daemon works without the socket.
pub(super) fn start(shared: &Arc<Shared>, directory: &Path) -> io::Result<()> {
    let path = socket(directory);
    let entry = match Entry::at(path.clone()) {
        Ok(entry) => Some(entry),
        Err(error) => {
            shared.say(&format!(
                "`weft node lend` cannot reach this daemon: cannot listen at {}: {error}",
                path.display()
            ));
            None
        }
    };
    let shared = shared.clone();
    std::thread::Builder::new()
        .name("weft-lending".into())
        .spawn(move || run(&shared, entry.as_ref()))?;
    Ok(())
}

fn run(shared: &Shared, entry: Option<&Entry>) {
    loop {
        shared.lending.apply(&shared.budget);
        let mut waited = vec![shared.ending()];
        waited.extend(entry.map(Entry::descriptor));
        match sys::wait_readable(&waited, TURN) {
            Ok(ready) if !ready[0] => {}
            _ => return,
        }
        while let Some((request, client)) = entry.and_then(Entry::accept::<LendRequest>) {
            if request != LendRequest::default() {
                shared.lending.change(&request);
                shared.lending.apply(&shared.budget);
            }
            let state = shared.lending.state(&shared.budget);
            if request != LendRequest::default() {
                shared.say(&format!(
                    "lends {} from now on ({} are lent), by its owner",
                    format_bytes(state.lends_bytes),
                    format_bytes(state.lent_bytes)
                ));
            }
            client.answer(&state);
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
