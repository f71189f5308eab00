//! Whose TSC the guest's time is made from, where the machine lies on several hosts.

use std::fs;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::host::measure_host_tsc;

/// Different in every boot of every host.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// Rates further apart than this are refused: corrections (see `weft_aggregate`)
/// could not follow, and timers of a guest would be off by more than they may.
pub const DRIFT_PPM_MAX: u64 = 200;

/// The clock of the primary's host. All slices of a machine are given the
/// same, and show their vCPUs a TSC of this rate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reference {
    /// Ticks of its TSC in a second, as measured.
    pub tsc_hz: u64,
    /// Names the host, and since when it runs.
    pub boot_id: String,
}

/// Rates of two TSCs are too far apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error(
    "this host's TSC has {ours} Hz, node 0's has {theirs} Hz: {ppm} ppm apart, but at most \
    {DRIFT_PPM_MAX} can be corrected"
)]
pub struct RatesDiffer {
    /// This host's.
    pub ours: u64,
    /// The primary's host's.
    pub theirs: u64,
    /// Their difference in millionths.
    pub ppm: u64,
}

impl Reference {
    /// This host's clock. Waits for what is left of the measurement, see
    /// [`measure_host_tsc`].
    pub fn here() -> Reference {
        Reference {
            tsc_hz: measure_host_tsc(),
            boot_id: boot_id(),
        }
    }

    /// Whether it is the clock of this host, since the same boot. A host that does
    /// not say which boot it is counts as another.
    pub fn is_here(&self) -> bool {
        !self.boot_id.is_empty() && self.boot_id == boot_id()
    }

    /// Refuses a rate that this host's TSC, of `ours` Hz, cannot follow.
    pub fn check(&self, ours: u64) -> Result<(), RatesDiffer> {
        let theirs = self.tsc_hz;
        let apart = u128::from(ours.abs_diff(theirs)) * 1_000_000;
        let ppm = apart / u128::from(theirs.max(1));
        if ppm <= u128::from(DRIFT_PPM_MAX) {
            return Ok(());
        }
        let ppm = u64::try_from(ppm).unwrap_or(u64::MAX);
        Err(RatesDiffer { ours, theirs, ppm })
    }
}

fn boot_id() -> String {
    // Without /proc no host is this one, which costs accuracy and nothing else.
    let text = fs::read_to_string(BOOT_ID).unwrap_or_default();
    text.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_host_is_this_host_and_another_is_not() {
        let here = Reference::here();
        assert!(here.is_here());
        let mut other = here.clone();
        other.boot_id.push('x');
        assert!(!other.is_here());
        other.boot_id.clear();
        assert!(!other.is_here());
    }

    #[test]
    fn rates_that_cannot_be_followed_are_refused_with_both() {
        let reference = Reference {
            tsc_hz: 2_000_000_000,
            boot_id: "b".into(),
        };
        for ours in [2_000_000_000, 2_000_400_000, 1_999_600_000] {
            assert_eq!(reference.check(ours), Ok(()), "{ours}");
        }
        for ours in [0, 2_000_500_000, 1_999_500_000, 3_000_000_000, u64::MAX] {
            let text = reference.check(ours).unwrap_err().to_string();
            assert!(text.contains(&ours.to_string()), "{text}");
            assert!(text.contains("2000000000 Hz"), "{text}");
        }
    }
}
