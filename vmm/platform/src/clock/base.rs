//! Ticks of the guest's TSC and nanoseconds.

use serde::{Deserialize, Serialize};

const NANOSECONDS: u64 = 1_000_000_000;

/// How fast the guest's TSC ticks, and the factors by which the guest computes
/// nanoseconds from it (`pvclock_vcpu_time_info` in the kernel's
/// Documentation/virt/kvm/x86/msr.rst): both sides compute alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimeBase {
    /// Ticks in a second; not zero.
    hz: u64,
    /// Nanoseconds for 2^(32 - shift) ticks.
    multiplier: u32,
    /// Ticks are shifted left by this first (right when negative).
    shift: i8,
}

impl TimeBase {
    /// A TSC of `hz` ticks in a second; 1 MHz is the slowest.
    pub fn new(hz: u64) -> Self {
        let hz = hz.max(1_000_000);
        let mut ticks = hz;
        let mut scale = NANOSECONDS;
        let mut shift = 0;
        while ticks > scale * 2 || ticks > u64::from(u32::MAX) {
            ticks >>= 1;
            shift -= 1;
        }
        while ticks <= scale {
            if ticks >= 1 << 31 {
                scale >>= 1;
            } else {
                ticks <<= 1;
            }
            shift += 1;
        }
        Self {
            hz,
            multiplier: ((u128::from(scale) << 32) / u128::from(ticks)) as u32,
            shift,
        }
    }

    /// Ticks in a second.
    pub fn hz(&self) -> u64 {
        self.hz
    }

    /// `tsc_to_system_mul` and `tsc_shift`.
    pub fn factors(&self) -> (u32, i8) {
        (self.multiplier, self.shift)
    }

    /// Nanoseconds in this many ticks, rounded down.
    pub fn nanoseconds(&self, ticks: u64) -> u64 {
        let ticks = u128::from(ticks);
        let scaled = if self.shift < 0 {
            ticks >> -self.shift
        } else {
            ticks << self.shift
        };
        let nanoseconds = (scaled * u128::from(self.multiplier)) >> 32;
        u64::try_from(nanoseconds).unwrap_or(u64::MAX)
    }

    /// The fewest ticks that take this many nanoseconds.
    pub fn ticks(&self, nanoseconds: u64) -> u64 {
        let ticks = (u128::from(nanoseconds) * u128::from(self.hz)).div_ceil(NANOSECONDS.into());
        u64::try_from(ticks).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_and_nanoseconds_agree_at_every_frequency() {
        for hz in [
            1_000_000,
            24_000_000,
            999_999_999,
            1_000_000_000,
            2_100_000_000,
            2_000_000_001,
            4_300_000_000,
            9_000_000_000,
        ] {
            let base = TimeBase::new(hz);
            let day = 86_400 * NANOSECONDS;
            let back = base.nanoseconds(base.ticks(day));
            assert!(back.abs_diff(day) < 100_000, "{hz} Hz: {back}");
            assert_eq!(base.nanoseconds(0), 0);
            assert_eq!(base.ticks(0), 0);
        }
    }

    #[test]
    fn one_gigahertz_is_one_to_one() {
        let base = TimeBase::new(NANOSECONDS);
        assert_eq!(base.nanoseconds(123_456_789), 123_456_789);
        assert_eq!(base.ticks(5), 5);
    }
}
