//! Threads that are starting: how many are not confined yet.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::ConfineError;

/// Longest wait for threads that start.
const WAIT: Duration = Duration::from_secs(20);

struct Starting {
    threads: usize,
    /// What went wrong, the first time; nothing mends it.
    failed: Option<String>,
}

/// Held for moments.
static STARTING: Mutex<Starting> = Mutex::new(Starting {
    threads: 0,
    failed: None,
});
static CHANGED: Condvar = Condvar::new();

fn with<T>(body: impl FnOnce(&mut Starting) -> T) -> T {
    let mut starting = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
    body(&mut starting)
}

/// One more starts.
pub(super) fn add() {
    with(|starting| starting.threads += 1);
}

/// One of them is confined, or is not and ends.
pub(super) fn remove(result: Result<(), ConfineError>) {
    let last = with(|starting| {
        if let Err(error) = result {
            starting.failed.get_or_insert(super::sentence(&error));
        }
        starting.threads -= 1;
        starting.threads == 0
    });
    if last {
        CHANGED.notify_all();
    }
}

/// Waits for all of them.
pub(super) fn wait() -> Result<(), String> {
    let starting = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
    let (starting, waited) = CHANGED
        .wait_timeout_while(starting, WAIT, |starting| starting.threads > 0)
        .unwrap_or_else(PoisonError::into_inner);
    match &starting.failed {
        Some(error) => Err(error.clone()),
        None if waited.timed_out() => Err(format!(
            "{} threads were not confined within {} s",
            starting.threads,
            WAIT.as_secs()
        )),
        None => Ok(()),
    }
}
