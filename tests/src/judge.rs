//! Compares a run under `weft` with the native one.
//!
//! Nothing here trusts Weft: bytes are compared with bytes, ends with ends, and
//! the counters must exist before they are believed.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

use anyhow::{Context as _, Result};

use crate::case::Case;
use crate::matrix::Setting;
use crate::run::{End, Outcome};
use crate::stats::Counters;

/// A budget may be exceeded by this part of it.
pub const BUDGET_TOLERANCE: f64 = 1.05;
const PAGES_PER_MIB: u64 = 256;

/// What a native run left: the outcome, and its directory with the outputs.
#[derive(Debug, Clone)]
pub struct Native {
    pub outcome: Outcome,
    pub directory: std::path::PathBuf,
}

/// Where two files differ first: `None` when they are the same.
fn first_difference(left: &Path, right: &Path) -> Result<Option<String>> {
    let open = |path: &Path| {
        File::open(path)
            .map(BufReader::new)
            .with_context(|| format!("{}", path.display()))
    };
    let (mut left, mut right) = (open(left)?, open(right)?);
    let (mut a, mut b) = (vec![0; 1 << 16], vec![0; 1 << 16]);
    let mut offset = 0;
    loop {
        let (got_a, got_b) = (fill(&mut left, &mut a)?, fill(&mut right, &mut b)?);
        let common = got_a.min(got_b);
        if let Some(at) = (0..common).find(|&i| a[i] != b[i]) {
            return Ok(Some(format!(
                "first differ at byte {}: native {:#04x}, here {:#04x}",
                offset + at,
                a[at],
                b[at]
            )));
        }
        if got_a != got_b {
            return Ok(Some(format!(
                "{} ends at byte {}",
                if got_a < got_b { "native" } else { "this one" },
                offset + common
            )));
        }
        if common == 0 {
            return Ok(None);
        }
        offset += common;
    }
}

fn fill(reader: &mut impl Read, buffer: &mut [u8]) -> Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match reader.read(&mut buffer[filled..])? {
            0 => break,
            count => filled += count,
        }
    }
    Ok(filled)
}

/// The end and the bytes; an empty list means the same.
pub fn compare(case: &Case, native: &Native, outcome: &Outcome, directory: &Path) -> Vec<String> {
    let mut findings = Vec::new();
    if outcome.end == End::Hang {
        findings.push(format!("no end after {:.0} s", outcome.wall.as_secs_f64()));
        return findings;
    }
    if outcome.end != native.outcome.end {
        findings.push(format!(
            "native: {}, here: {}",
            native.outcome.end, outcome.end
        ));
    }
    let mut files = vec![(
        "stdout",
        native.outcome.stdout.clone(),
        outcome.stdout.clone(),
    )];
    for (name, path) in case.outputs_in(directory) {
        files.push((name, native.directory.join(name), path));
    }
    for (name, left, right) in files {
        match first_difference(&left, &right) {
            Ok(None) => {}
            Ok(Some(difference)) => findings.push(format!("{name}: {difference}")),
            Err(error) => findings.push(format!("{name}: {error:#}")),
        }
    }
    for leftover in &outcome.leftovers {
        findings.push(format!("left a process behind: {leftover}"));
    }
    findings
}

/// What the counters must say.
pub fn check_counters(
    case: &Case,
    setting: &Setting,
    budgets_mib: &[u64],
    counters: &Counters,
) -> Vec<String> {
    let mut findings = Vec::new();
    if counters.nodes.len() != setting.nodes {
        findings.push(format!(
            "{} nodes in the statistics, not {}",
            counters.nodes.len(),
            setting.nodes
        ));
        return findings;
    }
    for (node, (counted, budget_mib)) in counters.nodes.iter().zip(budgets_mib).enumerate() {
        let budget_pages = budget_mib * PAGES_PER_MIB;
        let bound = (budget_pages as f64 * BUDGET_TOLERANCE) as u64;
        if counted.resident_pages_max > bound {
            findings.push(format!(
                "node {node} held {} pages with a budget of {budget_pages} (at most {bound})",
                counted.resident_pages_max
            ));
        }
    }
    let pushes = counters.total(|node| node.pushes);
    let jumps = counters.total(|node| node.jumps_in);
    // An execution that follows its pages leaves them where they are: all of them
    // when it learned to, some when a count makes it.
    let pushes_min = match (setting.jump.as_str(), jumps) {
        (_, 0) => case.pushes_min,
        ("auto", _) => 0,
        _ => case.pushes_min / 4,
    };
    if pushes < pushes_min {
        findings.push(format!("{pushes} pushes, at least {pushes_min} expected"));
    }
    if setting.jump == "never" && jumps > 0 {
        findings.push(format!("{jumps} jumps, though jumping was forbidden"));
    }
    if case.must_jump && setting.jump.parse::<u32>().is_ok() && jumps == 0 {
        findings.push("no jump, though a threshold was given".to_string());
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::NodeCounters;

    fn setting(jump: &str) -> Setting {
        Setting {
            nodes: 2,
            jump: jump.to_string(),
            transport: "ring".to_string(),
        }
    }

    fn counters(resident_pages_max: u64, pushes: u64, jumps_in: u64) -> Counters {
        let node = NodeCounters {
            resident_pages_max,
            pushes,
            jumps_in,
            ..NodeCounters::default()
        };
        Counters {
            nodes: vec![node, NodeCounters::default()],
        }
    }

    #[test]
    fn a_budget_may_be_passed_by_five_per_cent_only() {
        let case = Case::new("case", "true");
        let check =
            |pages| check_counters(&case, &setting("auto"), &[4, 4], &counters(pages, 0, 0));
        assert!(check(1075).is_empty());
        assert_eq!(check(1076).len(), 1);
    }

    #[test]
    fn pushes_and_jumps_are_demanded_and_forbidden() {
        let case = Case::new("case", "true").memory(16, 100).jumps();
        let check = |jump, pushes, jumps| {
            check_counters(&case, &setting(jump), &[4, 4], &counters(0, pushes, jumps)).len()
        };
        assert_eq!(check("8", 100, 1), 0);
        assert_eq!(check("8", 25, 1), 0);
        assert_eq!(check("8", 24, 1), 1);
        assert_eq!(check("8", 100, 0), 1);
        assert_eq!(check("never", 100, 0), 0);
        assert_eq!(check("never", 99, 0), 1);
        assert_eq!(check("never", 100, 1), 1);
        assert_eq!(check("auto", 100, 0), 0);
        assert_eq!(check("auto", 99, 0), 1);
        assert_eq!(check("auto", 0, 1), 0);
    }
}
