//! A slice's sign of life.
//!
//! A timer signals the process a few times in each lease, and the handler counts.
//! Whatever the slice does, it counts while its process runs: computing for hours
//! without a fault, too, when nobody waits for it. The launcher, or the daemon that
//! reports to it, sees the count stand when the process is stopped or frozen.

use core::sync::atomic::Ordering;

use weft_proc::boot::{Boot, KICK_SIGNAL};
use weft_proc::stats::beat_ns;

use crate::control;
use crate::own_calls::{Result, call};

const CLOCK_MONOTONIC: usize = 1;
const SIGEV_SIGNAL: i32 = 0;

/// `struct sigevent`.
#[repr(C)]
struct Event {
    value: usize,
    signal: i32,
    notify: i32,
    padding: [u64; 6],
}

/// Starts the timer. Before the slice is confined, which forbids this call.
pub fn start(boot: &Boot) -> Result<()> {
    let event = Event {
        value: 0,
        signal: KICK_SIGNAL,
        notify: SIGEV_SIGNAL,
        padding: [0; 6],
    };
    let mut timer = 0i32;
    call!(
        timer_create,
        CLOCK_MONOTONIC,
        &raw const event,
        &raw mut timer
    )?;
    let period_ns = beat_ns(boot.lease_ms);
    let period = [period_ns / 1_000_000_000, period_ns % 1_000_000_000];
    // Interval and first expiry.
    let times = [period, period];
    call!(timer_settime, timer, 0, times.as_ptr(), 0)?;
    Ok(())
}

/// Counts. For the signal handler: touches nothing but the count.
pub fn count() {
    if let Some(shared) = control::shared() {
        shared.stats.beats.fetch_add(1, Ordering::Relaxed);
    }
}
