//! Whether to wait busily before blocking.
//!
//! Spinning saves the wake-up (10 to 50 µs) when the answer is near and a core
//! is free; it is poison when the peer needs this very core. So: a spin that
//! found nothing doubles the number of waits that go straight to sleep (up to
//! [`SKIP_MAX`]); one that found something ends the penalty. A blocked wait that
//! was short counts for more, because then an answer may be near again.

use crate::sys;

/// Most waits without a try at spinning.
const SKIP_MAX: u32 = 127;

/// Learns whether spinning pays on one link.
#[derive(Debug, Clone, Copy)]
pub(super) struct Spinner {
    limit_ns: u64,
    penalty: u32,
    skip: u32,
}

impl Spinner {
    pub fn new(limit_ns: u64) -> Spinner {
        Spinner {
            limit_ns,
            penalty: 0,
            skip: 0,
        }
    }

    /// Calls `ready` until it says something, or the limit passes, or spinning
    /// is not worth a try now. At least one call is made if spinning is tried.
    pub fn spin<T>(&mut self, timeout_ns: u64, mut ready: impl FnMut() -> Option<T>) -> Option<T> {
        if self.limit_ns == 0 || timeout_ns == 0 {
            return None;
        }
        if self.skip > 0 {
            self.skip -= 1;
            return None;
        }
        let end_ns = sys::now_ns().saturating_add(self.limit_ns.min(timeout_ns));
        loop {
            for _ in 0..8 {
                if let Some(answer) = ready() {
                    self.penalty = 0;
                    return Some(answer);
                }
                core::hint::spin_loop();
            }
            if sys::now_ns() >= end_ns {
                self.penalty = (self.penalty * 2 + 1).min(SKIP_MAX);
                self.skip = self.penalty;
                return None;
            }
        }
    }

    /// Takes note of how long a blocked wait took.
    pub fn blocked(&mut self, waited_ns: u64) {
        if waited_ns < self.limit_ns.saturating_mul(2) {
            self.skip = self.skip.saturating_sub(2);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fruitless_spin_is_tried_less_and_less() {
        let mut spinner = Spinner::new(1000);
        let mut tries = 0;
        for _ in 0..1000 {
            let mut tried = false;
            let _: Option<()> = spinner.spin(u64::MAX >> 1, || {
                tried = true;
                None
            });
            tries += u32::from(tried);
        }
        assert!((8..=16).contains(&tries), "{tries} tries of 1000");
    }

    #[test]
    fn a_fruitful_spin_is_tried_every_time() {
        let mut spinner = Spinner::new(1000);
        for _ in 0..100 {
            assert_eq!(spinner.spin(u64::MAX >> 1, || Some(7)), Some(7));
        }
    }
}
