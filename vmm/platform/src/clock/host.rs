//! The host's TSC, and how many ticks it has in a second.
//!
//! That is measured against the host's monotonic clock, which takes some
//! milliseconds. Whoever starts a machine has other work for that time:
//! [`begin_tsc_measurement`] first, then the work, then [`measure_host_tsc`].

use std::arch::x86_64::_rdtsc;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::COUNTED_HZ;

/// Measured at least so long: both ends are good to some 100 ns.
const WINDOW: Duration = Duration::from_millis(10);
/// A measurement that began longer ago is begun again: the host may have slept
/// since, during which its clocks do not agree.
const WINDOW_MAX: Duration = Duration::from_secs(2);

/// Both clocks at one moment.
#[derive(Clone, Copy)]
struct Pair {
    instant: Instant,
    tsc: u64,
}

/// When the measurement of this process began. Held for moments.
static BEGUN: Mutex<Option<Pair>> = Mutex::new(None);

pub fn host_tsc() -> u64 {
    // SAFETY: every x86-64 CPU has RDTSC, and Linux does not forbid it to programs
    // that did not ask for that.
    unsafe { _rdtsc() }
}

/// Begins to measure; does nothing when that was done a moment ago.
pub fn begin_tsc_measurement() {
    begun();
}

/// Ticks of the host's TSC in a second. Good to some parts in 100,000. Waits for
/// what is left of 10 ms since the measurement began.
pub fn measure_host_tsc() -> u64 {
    let start = begun();
    std::thread::sleep(WINDOW.saturating_sub(start.instant.elapsed()));
    let end = tight_pair();
    let nanoseconds = end.instant.duration_since(start.instant).as_nanos().max(1);
    let ticks = u128::from(end.tsc.wrapping_sub(start.tsc));
    u64::try_from(ticks * 1_000_000_000 / nanoseconds).unwrap_or(COUNTED_HZ)
}

fn begun() -> Pair {
    let mut begun = BEGUN.lock().unwrap_or_else(PoisonError::into_inner);
    match *begun {
        Some(pair) if pair.instant.elapsed() < WINDOW_MAX => pair,
        _ => *begun.insert(tight_pair()),
    }
}

/// Both clocks at one moment: of several tries, the one that took least.
fn tight_pair() -> Pair {
    let look = || {
        let before = host_tsc();
        let instant = Instant::now();
        let width = host_tsc().wrapping_sub(before);
        let tsc = before.wrapping_add(width / 2);
        (width, Pair { instant, tsc })
    };
    let mut best = look();
    for _ in 0..16 {
        let next = look();
        if next.0 < best.0 {
            best = next;
        }
    }
    best.1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measurements_agree() {
        begin_tsc_measurement();
        let first = measure_host_tsc();
        std::thread::sleep(Duration::from_millis(20));
        let second = measure_host_tsc();
        assert!(first.abs_diff(second) < first / 2000, "{first} {second}");
    }
}
