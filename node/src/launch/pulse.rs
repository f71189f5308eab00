//! Whether a slice's process runs, by the beats that it counts.
//!
//! A daemon answers for a host, not for the slice on it, and a slice that computes
//! may have nothing to say for hours. So each counts beats while it runs
//! ([`weft_proc::stats::beat_ns`]); one whose count stands for a lease counts as
//! lost. What passes while the launcher itself does not run does not count.

use std::time::{Duration, Instant};

/// How often the count is looked at, or comes with a daemon's answer.
const LOOK: Duration = Duration::from_secs(1);

/// See the module.
pub struct Pulse {
    beats: u32,
    changed: Instant,
}

impl Pulse {
    /// Of a slice that starts now.
    pub fn new(now: Instant) -> Pulse {
        Pulse {
            beats: 0,
            changed: now,
        }
    }

    /// The launcher did not run for a while: the lease starts anew.
    pub fn renew(&mut self, now: Instant) {
        self.changed = now;
    }

    /// Looks at the count; for how long it has stood when that is a lease or more.
    /// A lease shorter than two looks is one of two looks.
    pub fn stands(&mut self, beats: u32, now: Instant, lease: Duration) -> Option<Duration> {
        if self.beats != beats {
            self.beats = beats;
            self.changed = now;
        }
        let stood = now.duration_since(self.changed);
        (stood > lease.max(2 * LOOK)).then_some(stood)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(5);

    #[test]
    fn a_slice_that_counts_runs() {
        let start = Instant::now();
        let mut pulse = Pulse::new(start);
        for second in 1..100 {
            let now = start + Duration::from_secs(second);
            assert_eq!(pulse.stands(second as u32, now, LEASE), None);
        }
    }

    #[test]
    fn a_count_that_stands_is_seen_after_the_lease_and_not_before() {
        let start = Instant::now();
        let mut pulse = Pulse::new(start);
        assert_eq!(pulse.stands(7, start, LEASE), None);
        assert_eq!(pulse.stands(7, start + LEASE, LEASE), None);
        let late = start + LEASE + LOOK;
        assert_eq!(pulse.stands(7, late, LEASE), Some(LEASE + LOOK));
    }

    #[test]
    fn a_stop_of_the_launcher_starts_the_lease_anew() {
        let start = Instant::now();
        let mut pulse = Pulse::new(start);
        pulse.renew(start + 3 * LEASE);
        assert_eq!(pulse.stands(0, start + 4 * LEASE, LEASE), None);
    }
}
