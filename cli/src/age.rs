//! When this process began: before `main`, its program was mapped and linked.

use std::time::{Duration, Instant};

/// What the scheduler counted of this process so far: nanoseconds that it ran,
/// nanoseconds that it waited for a CPU (Documentation/scheduler/sched-stats.rst).
const COUNTED: &str = "/proc/self/schedstat";

/// Called first in `main`. Where the kernel does not count, `main` is the start.
pub fn process_started() -> Instant {
    let now = Instant::now();
    let counted = std::fs::read_to_string(COUNTED).unwrap_or_default();
    now.checked_sub(age(&counted)).unwrap_or(now)
}

fn age(counted: &str) -> Duration {
    let numbers = counted.split_whitespace().take(2);
    numbers
        .filter_map(|number| number.parse().ok())
        .map(Duration::from_nanos)
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn running_and_waiting_are_counted() {
        assert_eq!(age("1500000 300000 7\n"), Duration::from_micros(1800));
        assert_eq!(age(""), Duration::ZERO);
    }
}
