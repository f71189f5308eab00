//! The end of a secondary, which the primary must hear of before the links do.
//!
//! A secondary that ends by itself, since the guest powers off by a device there for example,
//! tells the primary why. If it closed its links at once, another slice could report it as
//! lost first, and the machine would end with that reason. So it keeps them until the primary
//! has told it to stop, or has gone.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use weft_confine::lock;

use super::Slice;

/// Longest wait for the primary.
const WAIT_MAX: Duration = Duration::from_secs(2);

/// Whether the primary has said that the machine stops, or has gone, or the links are closed.
#[derive(Default)]
pub(crate) struct StopSignal {
    is_set: Mutex<bool>,
    changed: Condvar,
}

impl StopSignal {
    pub fn set(&self) {
        *lock(&self.is_set) = true;
        self.changed.notify_all();
    }

    fn is_set(&self) -> bool {
        *lock(&self.is_set)
    }

    fn wait(&self, patience: Duration) {
        let waited = self
            .changed
            .wait_timeout_while(lock(&self.is_set), patience, |is_set| !*is_set);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}

impl Slice {
    /// On a secondary: the primary has said that the machine stops.
    pub fn hear_stop(&self) {
        self.stop.set();
    }

    /// On a secondary: whether the machine stops everywhere, or this slice is closed.
    pub fn has_heard_stop(&self) -> bool {
        self.stop.is_set()
    }

    /// On a secondary that ends: waits until the primary knows, within a bound.
    pub fn wait_for_stop(&self) {
        if !self.is_primary() {
            self.stop.wait(self.lease.min(WAIT_MAX));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_ends_with_the_signal_or_its_bound() {
        let signal = StopSignal::default();
        signal.wait(Duration::from_millis(1));
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| signal.wait(Duration::from_secs(3600)));
            signal.set();
            waits.join().unwrap();
        });
        signal.wait(Duration::from_secs(3600));
    }
}
