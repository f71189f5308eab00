//! The local APIC's timer (Intel SDM volume 3, 11.5.4), as arithmetic on the
//! guest's TSC: its owner asks for its deadline and passes the time.
//!
//! The counter's clock is 1 GHz: one count is one nanosecond of guest time.

use serde::{Deserialize, Serialize};
use weft_vcpu::encoding::{Decoder, Encoder, EncodingError};

use crate::clock::TimeBase;

/// Shortest period in which a timer interrupts without being asked again: a guest
/// that sets less gets this, so that it cannot keep the host's timers busy.
const PERIOD_NANOSECONDS_MIN: u64 = 20_000;

/// What the timer counts and when it fires.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimerState {
    /// Initial-count register.
    initial_count: u32,
    /// Divide configuration register.
    divide: u32,
    /// Guest TSC at which it fires next.
    deadline: Option<u64>,
}

impl TimerState {
    /// Initial-count register.
    pub fn initial_count(&self) -> u32 {
        self.initial_count
    }

    /// Divide configuration register.
    pub fn divide(&self) -> u32 {
        self.divide
    }

    /// Guest TSC at which it fires next.
    pub fn deadline(&self) -> Option<u64> {
        self.deadline
    }

    /// Starts the counter; zero stops it.
    pub fn start(&mut self, count: u32, now: u64, base: &TimeBase) {
        self.initial_count = count;
        self.deadline = (count != 0).then(|| now.saturating_add(self.ticks(count, base)));
    }

    /// TSC-deadline mode: fires at `deadline`; zero disarms.
    pub fn set_deadline(&mut self, deadline: u64) {
        self.deadline = (deadline != 0).then_some(deadline);
    }

    /// What is done when the mode changes between counting and TSC-deadline.
    pub fn disarm(&mut self) {
        self.deadline = None;
    }

    /// Sets the divide configuration register of a timer that does not count.
    pub fn keep_divide(&mut self, value: u32) {
        self.divide = value & 0xb;
    }

    /// Counts on from where it is, at another rate.
    pub fn set_divide(&mut self, value: u32, now: u64, base: &TimeBase) {
        let left = self.current_count(now, base);
        self.keep_divide(value);
        if self.deadline.is_some() {
            self.deadline = Some(now.saturating_add(self.ticks(left, base)));
        }
    }

    /// Current-count register.
    pub fn current_count(&self, now: u64, base: &TimeBase) -> u32 {
        let left = self.deadline.map_or(0, |end| end.saturating_sub(now));
        let counts = base.nanoseconds(left) / u64::from(self.divisor());
        u32::try_from(counts).unwrap_or(u32::MAX)
    }

    /// Whether it fired by `now`. A periodic one is armed again; periods that
    /// passed unseen are not made up for.
    pub fn expire(&mut self, now: u64, periodic: bool, base: &TimeBase) -> bool {
        let Some(deadline) = self.deadline else {
            return false;
        };
        if now < deadline {
            return false;
        }
        let period = self
            .ticks(self.initial_count, base)
            .max(base.ticks(PERIOD_NANOSECONDS_MIN));
        self.deadline = (periodic && self.initial_count != 0).then(|| {
            let late = (now - deadline) % period;
            now.saturating_add(period - late)
        });
        true
    }

    pub fn encode(&self, to: &mut Encoder) {
        to.u32(self.initial_count);
        to.u32(self.divide);
        to.bool(self.deadline.is_some());
        to.u64(self.deadline.unwrap_or(0));
    }

    /// # Errors
    /// The bytes are not what [`TimerState::encode`] writes.
    pub fn decode(from: &mut Decoder<'_>) -> Result<Self, EncodingError> {
        Ok(Self {
            initial_count: from.u32()?,
            divide: from.u32()?,
            deadline: match (from.bool("deadline")?, from.u64()?) {
                (is_there, at) if is_there || at == 0 => is_there.then_some(at),
                _ => return Err(EncodingError::Value("deadline")),
            },
        })
    }

    fn ticks(&self, counts: u32, base: &TimeBase) -> u64 {
        base.ticks(u64::from(counts) * u64::from(self.divisor()))
    }

    /// 1 to 128 (figure 11-10).
    fn divisor(&self) -> u32 {
        let bits = self.divide & 3 | (self.divide & 8) >> 1;
        1 << ((bits + 1) & 7)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn base() -> TimeBase {
        TimeBase::new(2_000_000_000)
    }

    #[test]
    fn one_shot_fires_once() {
        let mut timer = TimerState::default();
        timer.set_divide(0xb, 0, &base());
        timer.start(1000, 100, &base());
        assert_eq!(timer.deadline(), Some(2100));
        assert_eq!(timer.current_count(1100, &base()), 500);
        assert!(!timer.expire(2099, false, &base()));
        assert!(timer.expire(2100, false, &base()));
        assert_eq!(timer.current_count(2200, &base()), 0);
        assert!(!timer.expire(u64::MAX, false, &base()));
    }

    #[test]
    fn periodic_keeps_its_beat_when_seen_late() {
        let mut timer = TimerState::default();
        timer.set_divide(0xb, 0, &base());
        timer.start(100_000, 0, &base());
        assert!(timer.expire(200_001, true, &base()));
        assert_eq!(timer.deadline(), Some(400_000));
        assert!(timer.expire(900_000, true, &base()));
        assert_eq!(timer.deadline(), Some(1_000_000));
    }

    #[test]
    fn no_period_is_too_short() {
        let mut timer = TimerState::default();
        timer.start(1, 0, &base());
        assert!(timer.expire(4, true, &base()));
        assert_eq!(timer.deadline(), Some(40_004));
    }

    #[test]
    fn the_divisor_slows_it_and_may_change_on_the_way() {
        let mut timer = TimerState::default();
        for (value, divisor) in [
            (0b0000, 2),
            (0b0001, 4),
            (0b0010, 8),
            (0b0011, 16),
            (0b1000, 32),
            (0b1001, 64),
            (0b1010, 128),
            (0b1011, 1),
        ] {
            timer.set_divide(value, 0, &base());
            assert_eq!(timer.divisor(), divisor);
        }
        timer.start(100, 0, &base());
        timer.set_divide(0, 100, &base());
        assert_eq!(timer.current_count(100, &base()), 50);
        assert_eq!(timer.deadline(), Some(300));
    }

    #[test]
    fn zero_stops_and_deadlines_are_absolute() {
        let mut timer = TimerState::default();
        timer.start(5, 0, &base());
        timer.start(0, 1, &base());
        assert_eq!(timer.deadline(), None);
        timer.set_deadline(77);
        assert!(!timer.expire(76, false, &base()));
        assert!(timer.expire(77, false, &base()));
        timer.set_deadline(0);
        assert_eq!(timer.deadline(), None);
    }
}
