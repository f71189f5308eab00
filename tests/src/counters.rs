//! Counters of a machine, as `weft vm counters --json` prints them.

use anyhow::{Context as _, Result};
use serde_json::Value;

/// The sum of those with these names. One that is zero may be absent.
pub fn sum(view: &Value, is_wanted: impl Fn(&str) -> bool) -> Result<u64> {
    let counters = view["counters"].as_object().context("no counters")?;
    let wanted = counters.iter().filter(|(name, _)| is_wanted(name));
    Ok(wanted.filter_map(|(_, count)| count.as_u64()).sum())
}

/// Faults of vCPUs that other nodes served.
pub fn remote_faults(view: &Value) -> Result<u64> {
    sum(view, |name| {
        name.starts_with("vcpu") && name.contains(".from") && name.ends_with(".faults")
    })
}
