//! The reference clock of a machine on several hosts: the TSC of the primary's host.

use std::fs;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::host::measure_host_tsc;

/// The file of the host's boot id, which differs in every boot of every host.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// Largest accepted difference of two TSCs' rates, in millionths. Corrections (`weft_aggregate`)
/// could not follow a larger one, and a guest's timers would be too inaccurate.
pub const DRIFT_PPM_MAX: u64 = 200;

/// The TSC of the primary's host. All slices of a machine have the same reference, and show
/// their vCPUs a TSC of this rate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reference {
    /// The measured rate, in ticks per second.
    pub tsc_hz: u64,
    /// The boot id of the host.
    pub boot_id: String,
}

/// The rates of two TSCs differ too much.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error(
    "this host's TSC has {ours} Hz, the timekeeper's has {theirs} Hz: {ppm} ppm apart, but at most \
    {DRIFT_PPM_MAX} can be corrected"
)]
pub struct RatesDiffer {
    /// The rate of this host's TSC.
    pub ours: u64,
    /// The rate of the TSC of the timekeeper's host.
    pub theirs: u64,
    /// Their difference in millionths.
    pub ppm: u64,
}

impl Reference {
    /// The reference of this host. Waits for the rest of the measurement
    /// ([`measure_host_tsc`]).
    pub fn here() -> Reference {
        Reference {
            tsc_hz: measure_host_tsc(),
            boot_id: boot_id(),
        }
    }

    /// Whether the reference is the TSC of this host in this boot. A host without a boot id
    /// counts as another host.
    pub fn is_here(&self) -> bool {
        !self.boot_id.is_empty() && self.boot_id == boot_id()
    }

    /// The boot id of this host; empty if the host does not tell it.
    pub fn boot_id_here() -> String {
        boot_id()
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
