//! How far another host's TSC is from this one's, from requests and replies.
//!
//! ```text
//! here      asked ────────────────── answered        (our ticks)
//!                ╲                  ╱
//! there           ╲──── theirs ────╱                 (their ticks)
//! ```
//!
//! Their TSC was read at some moment between the two of ours, so the offset lies
//! within half of the round trip of what it would be in the middle; the shortest
//! round trip says most. Where the way there takes as long as the way back, the
//! middle is right.
//!
//! What a guest can see of the error: nothing between slice 0 and another, as long
//! as no message is faster than the look that was used. A message of one way takes
//! as long, in the guest's time, as half of that round trip; so what was written
//! before is never read earlier.
//!
//! [`Lead`] is the controller: it takes estimates and returns by how much to change
//! the offset now. It knows no clocks and no links.

/// Most ticks by which an offset is changed at one time, as a part of a second:
/// 20 µs.
const STEP_PART: u64 = 50_000;

/// One question and its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Look {
    /// Our TSC before the question was sent.
    pub asked: u64,
    /// Theirs when they answered.
    pub theirs: u64,
    /// Ours when the answer had come.
    pub answered: u64,
}

/// What a look says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Estimate {
    /// Their TSC minus ours, modulo 2^64.
    pub offset: u64,
    /// By how many ticks the offset may be wrong, either way.
    pub error: u64,
}

impl Look {
    /// The offset, and how wrong it may be.
    pub fn estimate(&self) -> Estimate {
        let round_trip = self.answered.wrapping_sub(self.asked);
        let middle = self.asked.wrapping_add(round_trip / 2);
        Estimate {
            offset: self.theirs.wrapping_sub(middle),
            error: round_trip.div_ceil(2),
        }
    }
}

/// The best of several looks; none of none.
pub fn best(looks: impl IntoIterator<Item = Look>) -> Option<Estimate> {
    let estimates = looks.into_iter().map(|look| look.estimate());
    estimates.min_by_key(|estimate| estimate.error)
}

/// The offset that is used, and how it follows what is measured.
///
/// Invariant: one step is smaller than the error that was measured with it, and
/// than 20 µs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lead {
    /// Their TSC minus ours, modulo 2^64: what is used now.
    offset: u64,
    /// By how many ticks it may be wrong.
    error: u64,
    /// Half of the shortest round trip so far: what took much longer was held up,
    /// one way only.
    shortest: u64,
    step_max: u64,
}

impl Lead {
    /// Uses what was measured first. `hz`: ticks in a second.
    pub fn new(first: Estimate, hz: u64) -> Self {
        Self {
            offset: first.offset,
            error: first.error,
            shortest: first.error,
            step_max: (hz / STEP_PART).max(1),
        }
    }

    /// Uses `offset`, whatever was measured, and comes to that in steps: another host's TSC is
    /// followed from now on, and the clock does not jump.
    pub fn from(offset: u64, measured: Estimate, hz: u64) -> Self {
        let apart = (measured.offset.wrapping_sub(offset) as i64).unsigned_abs();
        Self {
            offset,
            error: measured.error.saturating_add(apart),
            ..Self::new(measured, hz)
        }
    }

    /// What is used now: their TSC minus ours, modulo 2^64.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// By how many ticks it may be wrong.
    pub fn error(&self) -> u64 {
        self.error
    }

    /// Takes what was measured later; by how many ticks the offset changes now.
    /// Positive: their time is ahead of what we used.
    pub fn correct(&mut self, measured: Estimate) -> i64 {
        let apart = measured.offset.wrapping_sub(self.offset) as i64;
        let is_good = measured.error <= 2 * self.shortest;
        // Slowly forgotten, for ways that become longer for good.
        self.shortest = measured.error.min(self.shortest + self.shortest / 128 + 1);
        let wanted = match is_good {
            // Within a quarter of the error nothing is known to be wrong.
            true if apart.unsigned_abs() <= measured.error / 4 => 0,
            true => apart / 2,
            // Its middle says nothing; that we are outside of it does.
            false => {
                let outside = apart.unsigned_abs().saturating_sub(measured.error);
                apart.signum() * outside as i64
            }
        };
        let step_max = self.step_max.min(measured.error * 3 / 4).max(1) as i64;
        let step = wanted.clamp(-step_max, step_max);
        self.offset = self.offset.wrapping_add_signed(step);
        let left = (apart - step).unsigned_abs();
        self.error = measured.error.saturating_add(left);
        step
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HZ: u64 = 2_000_000_000;

    /// A measurement with a round trip of this many ticks, at local time `now`.
    fn look(now: u64, offset: u64, there: u64, back: u64) -> Look {
        let arrived = now.wrapping_add(there);
        Look {
            asked: now,
            theirs: arrived.wrapping_add(offset),
            answered: arrived.wrapping_add(back),
        }
    }

    #[test]
    fn the_offset_is_within_the_error() {
        for offset in [0, 5, u64::MAX - 5, 1 << 63, 123_456_789_012] {
            for (there, back) in [(0, 0), (1, 0), (50, 50), (10, 90_001), (77_777, 3)] {
                let estimate = look(u64::MAX - 20, offset, there, back).estimate();
                let wrong = (estimate.offset.wrapping_sub(offset) as i64).unsigned_abs();
                assert!(wrong <= estimate.error, "{offset} {there} {back}");
            }
        }
    }

    #[test]
    fn the_shortest_round_trip_is_believed() {
        let looks = [
            look(0, 1000, 500, 9000),
            look(0, 1000, 40, 44),
            look(0, 1000, 100, 100),
        ];
        let estimate = best(looks).unwrap();
        assert_eq!(estimate.error, 42);
        assert!(estimate.offset.abs_diff(1000) <= 42);
        assert_eq!(best([]), None);
    }

    #[test]
    fn no_message_arrives_before_it_was_sent() {
        // Whatever the ways were in the look that was used: one-way times as short
        // as those are never negative in the other's time.
        for (there, back) in [(100, 100), (10, 500), (500, 10), (1, 0), (0, 1)] {
            let truth = 1_000_000;
            let used = look(0, truth, there, back).estimate().offset;
            // Theirs to ours: sent at their 5000, arrives `back` later.
            let arrives = 5000 - truth as i64 + back as i64;
            assert!(arrives + used as i64 >= 5000, "{there} {back}");
            // Ours to theirs.
            let sent = 9000 + used as i64;
            assert!(9000 + there as i64 + truth as i64 >= sent, "{there} {back}");
        }
    }

    #[test]
    fn it_follows_the_greatest_drift_in_small_steps() {
        for ppm in [-200_i64, -37, 0, 5, 200] {
            let way = 40_000; // 20 µs
            let truth = |now: u64| 1000_u64.wrapping_add_signed(now as i64 / 1_000_000 * ppm);
            let mut lead = Lead::new(look(0, truth(0), way, way).estimate(), HZ);
            // Fifty rounds a second, for ten minutes.
            for round in 1..30_000_u64 {
                let now = round * HZ / 50;
                let measured = look(now, truth(now), way, way).estimate();
                let step = lead.correct(measured);
                assert!(step.unsigned_abs() < measured.error, "{ppm}");
                let wrong = (lead.offset().wrapping_sub(truth(now)) as i64).unsigned_abs();
                assert!(wrong <= lead.error(), "{ppm} ppm: {wrong}");
                assert!(wrong <= 3 * way, "{ppm} ppm: {wrong} after {round}");
            }
        }
    }

    #[test]
    fn a_look_that_was_held_up_moves_nothing_that_it_cannot_prove() {
        let mut lead = Lead::new(look(0, 7, 1000, 1000).estimate(), HZ);
        for (there, back) in [(90_000, 1000), (1000, 90_000)] {
            assert_eq!(lead.correct(look(99, 7, there, back).estimate()), 0);
        }
        // Off by more than it could be wrong.
        let step = lead.correct(look(99, 100_000, 30_000, 30_000).estimate());
        assert_eq!(step, 22_500);
        let step = lead.correct(look(99, 100_000, 50_000, 50_000).estimate());
        assert_eq!(step, 27_493);
    }

    #[test]
    fn jitter_changes_nothing() {
        let mut lead = Lead::new(look(0, 7, 1000, 1000).estimate(), HZ);
        for (there, back) in [(1200, 1000), (1000, 1100), (900, 1100)] {
            assert_eq!(lead.correct(look(99, 7, there, back).estimate()), 0);
        }
    }
}
