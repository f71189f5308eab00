//! The host's TSC, and how many ticks it has in a second.
//!
//! That is measured against the host's monotonic clock, which takes some
//! milliseconds. Whoever starts a machine has other work for that time:
//! [`begin_tsc_measurement`] first, then the work, then [`measure_host_tsc`], in the
//! same process or in one that was told when it began.

use std::arch::x86_64::_rdtsc;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use super::COUNTED_HZ;

/// Measured at least so long: both ends are good to some 100 ns.
const WINDOW: Duration = Duration::from_millis(10);
/// A measurement that began longer ago is begun again: the host may have slept
/// since, during which its clocks do not agree.
const WINDOW_MAX: Duration = Duration::from_secs(2);

/// When a measurement began: both clocks at one moment. It holds in every process of
/// the host until the host's next boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TscMeasurement {
    monotonic: Duration,
    tsc: u64,
}

impl TscMeasurement {
    fn elapsed(&self) -> Duration {
        monotonic().saturating_sub(self.monotonic)
    }
}

/// When the measurement of this process began. Held for moments.
static BEGUN: Mutex<Option<TscMeasurement>> = Mutex::new(None);

/// The host's monotonic clock: since its boot, alike in all processes.
pub fn monotonic() -> Duration {
    // A kernel without this clock does not exist.
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from)
}

pub fn host_tsc() -> u64 {
    // SAFETY: every x86-64 CPU has RDTSC, and Linux does not forbid it to programs
    // that did not ask for that.
    unsafe { _rdtsc() }
}

/// Begins to measure; does nothing when that was done a moment ago.
pub fn begin_tsc_measurement() -> TscMeasurement {
    begun()
}

/// Goes on with what another process of this host began.
pub fn continue_tsc_measurement(measurement: TscMeasurement) {
    *BEGUN.lock().unwrap_or_else(PoisonError::into_inner) = Some(measurement);
}

/// Ticks of the host's TSC in a second. Good to some parts in 100,000. Waits for
/// what is left of 10 ms since the measurement began.
pub fn measure_host_tsc() -> u64 {
    let start = begun();
    std::thread::sleep(WINDOW.saturating_sub(start.elapsed()));
    let end = tight_pair();
    let passed = end.monotonic.saturating_sub(start.monotonic);
    let nanoseconds = passed.as_nanos().max(1);
    let ticks = u128::from(end.tsc.wrapping_sub(start.tsc));
    u64::try_from(ticks * 1_000_000_000 / nanoseconds).unwrap_or(COUNTED_HZ)
}

fn begun() -> TscMeasurement {
    let mut begun = BEGUN.lock().unwrap_or_else(PoisonError::into_inner);
    match *begun {
        Some(measurement) if measurement.elapsed() < WINDOW_MAX => measurement,
        _ => *begun.insert(tight_pair()),
    }
}

/// Both clocks at one moment: of several tries, the one that took least.
fn tight_pair() -> TscMeasurement {
    let look = || {
        let before = host_tsc();
        let monotonic = monotonic();
        let width = host_tsc().wrapping_sub(before);
        let tsc = before.wrapping_add(width / 2);
        (width, TscMeasurement { monotonic, tsc })
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
