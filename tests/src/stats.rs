//! The counters that `--stats json=FILE` leaves.
//!
//! Read field by field from JSON: the harness does not share the
//! types of the program it judges. A missing field is an error that names it,
//! never a zero.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, anyhow};
use serde_json::Value;

#[derive(Debug, Clone, Default)]
pub struct NodeCounters {
    /// Most pages resident at any time.
    pub resident_pages_max: u64,
    /// Pages fetched because of a fault.
    pub pulls: u64,
    /// Pages fetched ahead of a fault.
    pub read_ahead: u64,
    /// Pages sent away to make room.
    pub pushes: u64,
    /// Times the execution arrived.
    pub jumps_in: u64,
    /// Times the execution left.
    pub jumps_out: u64,
    /// Bytes sent over all links.
    pub bytes_sent: u64,
    /// Median time from fault to page, nanoseconds.
    pub pull_p50_ns: Option<u64>,
    /// Median time of a jump, nanoseconds.
    pub jump_p50_ns: Option<u64>,
}

/// A run's counters.
#[derive(Debug, Clone, Default)]
pub struct Counters {
    /// Home first.
    pub nodes: Vec<NodeCounters>,
}

impl Counters {
    /// Reads a file.
    pub fn read(path: &Path) -> Result<Counters> {
        let text = fs::read_to_string(path)
            .with_context(|| format!("no statistics in {}", path.display()))?;
        Counters::parse(&text).with_context(|| format!("statistics in {}", path.display()))
    }

    /// Reads JSON.
    pub fn parse(text: &str) -> Result<Counters> {
        let value: Value = serde_json::from_str(text)?;
        let nodes = find(&value, "nodes")
            .and_then(Value::as_array)
            .ok_or_else(|| anyhow!("no array `nodes`"))?;
        let nodes = nodes.iter().map(parse_node).collect::<Result<_>>()?;
        Ok(Counters { nodes })
    }

    /// A counter's sum over all nodes.
    pub fn total(&self, counter: impl Fn(&NodeCounters) -> u64) -> u64 {
        self.nodes.iter().map(counter).sum()
    }
}

/// A member of this object, or of an object directly in it.
fn find<'a>(value: &'a Value, name: &str) -> Option<&'a Value> {
    let object = value.as_object()?;
    object.get(name).or_else(|| {
        object
            .values()
            .find_map(|inner| inner.as_object()?.get(name))
    })
}

fn parse_node(value: &Value) -> Result<NodeCounters> {
    let number = |name: &str| {
        find(value, name)
            .and_then(Value::as_u64)
            .ok_or_else(|| anyhow!("a node without the number `{name}`"))
    };
    let median = |name: &str| {
        let latency = find(value, name).ok_or_else(|| anyhow!("a node without `{name}`"))?;
        Ok::<_, anyhow::Error>(latency.get("p50_ns").and_then(Value::as_u64))
    };
    Ok(NodeCounters {
        resident_pages_max: number("resident_pages_max")?,
        pulls: number("pulls")?,
        read_ahead: number("read_ahead")?,
        pushes: number("pushes")?,
        jumps_in: number("jumps_in")?,
        jumps_out: number("jumps_out")?,
        bytes_sent: number("bytes_sent")?,
        pull_p50_ns: median("pull_latency")?,
        jump_p50_ns: median("jump_latency")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_counter_is_named() {
        let error = Counters::parse(r#"{"nodes": [{"resident_pages_max": 1}]}"#)
            .expect_err("`pulls` is missing");
        assert!(error.to_string().contains("`pulls`"), "{error}");
    }
}
