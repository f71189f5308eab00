//! Time inside a fault, from the time-stamp counter: two reads a fault have to
//! be cheap. Only differences on one node are used.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::own_calls;

/// Ticks per 1024 ns.
static RATE: AtomicU64 = AtomicU64::new(1024);
/// How long the rate is measured, nanoseconds.
const MEASURE_NS: u64 = 200_000;

/// Ticks.
pub fn now() -> u64 {
    // SAFETY: the instruction only reads a counter.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Compares the counter with the kernel's clock; takes a fifth of a millisecond.
pub fn calibrate() {
    let (start_ns, start) = (own_calls::monotonic_ns(), now());
    let mut elapsed_ns = 0;
    while elapsed_ns < MEASURE_NS {
        elapsed_ns = own_calls::monotonic_ns() - start_ns;
    }
    let rate = (now() - start) * 1024 / elapsed_ns;
    RATE.store(rate.max(1), Ordering::Relaxed);
}

/// Ticks as nanoseconds.
pub fn ns(ticks: u64) -> u64 {
    (u128::from(ticks) * 1024 / u128::from(RATE.load(Ordering::Relaxed))) as u64
}
