//! The host's TSC and its rate.
//!
//! The rate is measured against the host's monotonic clock, which takes some milliseconds. A
//! process that starts a machine does other work meanwhile: it calls [`begin_tsc_measurement`]
//! first, and [`measure_host_tsc`] after that work, in the same process or in one that was
//! given the start of the measurement.

use std::arch::x86_64::_rdtsc;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use super::COUNTED_HZ;

/// Shortest measurement: each end has an error of 100 ns at most where reading the monotonic
/// clock takes no system call, so the rate has one of 50 ppm. Measured on a busy host: 0.9 ppm.
const WINDOW: Duration = Duration::from_millis(4);
/// A measurement that began longer ago is begun again: the host may have slept since, which
/// its two clocks count differently.
const WINDOW_MAX: Duration = Duration::from_secs(2);

/// The start of a measurement: both clocks at one moment. Valid in every process of the host
/// until its next boot.
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

/// The start of this process's measurement.
static BEGUN: Mutex<Option<TscMeasurement>> = Mutex::new(None);

/// The host's monotonic clock: nanoseconds since its boot, the same in all processes.
pub fn monotonic() -> Duration {
    // A kernel without this clock does not exist.
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from)
}

pub fn host_tsc() -> u64 {
    // SAFETY: every x86-64 CPU has RDTSC, and Linux does not forbid it to programs
    // that did not ask for that.
    unsafe { _rdtsc() }
}

/// Begins to measure, unless a recent measurement has begun.
pub fn begin_tsc_measurement() -> TscMeasurement {
    begun()
}

/// Continues a measurement that another process of this host began.
pub fn continue_tsc_measurement(measurement: TscMeasurement) {
    *BEGUN.lock().unwrap_or_else(PoisonError::into_inner) = Some(measurement);
}

/// The rate of the host's TSC in ticks per second, with an error of some parts in 100,000.
/// Waits for the rest of 4 ms since the measurement began.
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

/// Both clocks at one moment: the shortest of several tries.
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
