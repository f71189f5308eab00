//! Whether to wait busily before blocking.
//!
//! Spinning saves the wake-up (10 to 50 µs) when the answer is near and a core
//! is free; it is poison when the peer needs this very core. So: a spin that
//! found nothing doubles the number of waits that go straight to sleep (up to
//! [`SKIP_MAX`]); one that found something halves it. A blocked wait that was
//! short counts for more, because then an answer may be near again. A spin during
//! which the processor was taken away says that others want it, among them
//! perhaps the peer: then the next [`SKIP_MAX`] waits sleep at once.

use crate::sys;

/// Most waits without a try at spinning.
const SKIP_MAX: u32 = 127;

/// How long the tick counter is compared with the clock, once per link.
const CALIBRATION_NS: u64 = 50_000;

/// Learns whether spinning pays on one link. Counts time in ticks of the
/// processor, because reading the clock costs a system call here.
#[derive(Debug, Clone, Copy)]
pub(super) struct Spinner {
    limit_ns: u64,
    limit_ticks: u64,
    penalty: u32,
    skip: u32,
}

impl Spinner {
    /// A spinner that never spins longer than `limit_ns`.
    pub fn new(limit_ns: u64) -> Spinner {
        let limit_ticks = if limit_ns == 0 {
            0
        } else {
            (u128::from(limit_ns) * u128::from(ticks_in_calibration()) / u128::from(CALIBRATION_NS))
                .min(u128::from(u64::MAX >> 2)) as u64
        };
        Spinner {
            limit_ns,
            limit_ticks,
            penalty: 0,
            skip: 0,
        }
    }

    /// Calls `ready` until it says something, or the limit passes, or spinning
    /// is not worth a try now. At least one call is made if spinning is tried.
    pub fn spin<T>(&mut self, timeout_ns: u64, mut ready: impl FnMut() -> Option<T>) -> Option<T> {
        // A wait shorter than the limit teaches nothing and is not worth it.
        if self.limit_ns == 0 || timeout_ns < self.limit_ns {
            return None;
        }
        if self.skip > 0 {
            self.skip -= 1;
            return None;
        }
        let start = sys::ticks();
        let mut last = start;
        let mut taken_away = false;
        loop {
            let answer = ready();
            let now = sys::ticks();
            // Between two looks there is no work that takes so long.
            taken_away |= now.wrapping_sub(last) >= self.limit_ticks;
            last = now;
            if answer.is_none() && now.wrapping_sub(start) < self.limit_ticks {
                core::hint::spin_loop();
                continue;
            }
            self.learn(answer.is_some(), taken_away);
            return answer;
        }
    }

    fn learn(&mut self, found: bool, taken_away: bool) {
        if taken_away {
            self.penalty = SKIP_MAX;
            self.skip = SKIP_MAX;
        } else if found {
            self.penalty /= 2;
        } else {
            self.penalty = (self.penalty * 2 + 1).min(SKIP_MAX);
            self.skip = self.penalty;
        }
    }

    /// Takes note of how many ticks a blocked wait took.
    pub fn blocked(&mut self, waited_ticks: u64) {
        if waited_ticks < self.limit_ticks.saturating_mul(2) {
            self.skip = self.skip.saturating_sub(2);
        }
    }
}

fn ticks_in_calibration() -> u64 {
    let (start_ns, start) = (sys::now_ns(), sys::ticks());
    loop {
        let passed_ns = sys::now_ns() - start_ns;
        let passed = sys::ticks().wrapping_sub(start);
        if passed_ns >= CALIBRATION_NS {
            let scaled = u128::from(passed) * u128::from(CALIBRATION_NS) / u128::from(passed_ns);
            return (scaled as u64).max(1);
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

    /// Long enough that nothing between two looks takes that time by itself.
    const LONG_NS: u64 = 1_000_000_000;

    #[test]
    fn a_fruitful_spin_is_tried_every_time() {
        let mut spinner = Spinner::new(LONG_NS);
        for _ in 0..100 {
            assert_eq!(spinner.spin(u64::MAX >> 1, || Some(7)), Some(7));
        }
    }

    /// Whether the next wait spins.
    fn tries(spinner: &mut Spinner) -> bool {
        spinner.spin(u64::MAX >> 1, || Some(7)).is_some()
    }

    #[test]
    fn a_processor_that_is_taken_away_is_not_waited_on() {
        let mut spinner = Spinner::new(LONG_NS);
        spinner.learn(true, true);
        let skipped = (0..1000).take_while(|_| !tries(&mut spinner)).count();
        assert_eq!(skipped, SKIP_MAX as usize);
        assert!(tries(&mut spinner));
    }

    #[test]
    fn one_success_does_not_forgive_all() {
        let mut spinner = Spinner::new(LONG_NS);
        for _ in 0..4 {
            spinner.learn(false, false);
        }
        spinner.skip = 0;
        assert!(tries(&mut spinner));
        spinner.learn(false, false);
        assert_eq!(spinner.skip, 15, "half of fifteen, doubled");
    }
}
