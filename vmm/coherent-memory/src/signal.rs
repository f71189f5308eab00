//! Threads that wait for a signal.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Wakes the threads that wait for a step of the controller.
#[derive(Default)]
pub(super) struct Signal {
    given: Mutex<u64>,
    condition: Condvar,
}

impl Signal {
    pub fn give(&self) {
        *self.given.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.condition.notify_all();
    }

    /// How often it was given.
    pub fn given(&self) -> u64 {
        *self.given.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until it was given more often than `before`, `patience` at most.
    pub fn wait(&self, before: u64, patience: Duration) {
        let given = self.given.lock().unwrap_or_else(PoisonError::into_inner);
        let waits = |given: &mut u64| *given == before;
        let waited = self.condition.wait_timeout_while(given, patience, waits);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}
