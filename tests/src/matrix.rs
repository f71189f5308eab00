//! Under what a case runs: nodes, budgets, jump policy, transport.

use std::ffi::OsString;
use std::fmt;
use std::path::Path;

use crate::case::Case;

/// Jump policies that the corpus runs under.
pub const JUMPS: [&str; 3] = ["auto", "never", "32"];
/// Transports between nodes on one host.
pub const TRANSPORTS: [&str; 4] = ["ring", "unix", "tcp", "tcp-sealed"];
/// Numbers of nodes, home included.
pub const NODES: [usize; 3] = [2, 3, 4];
/// Every combination of the three.
pub const COMBINATIONS: usize = JUMPS.len() * TRANSPORTS.len() * NODES.len();

/// One combination.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    /// Nodes, home included.
    pub nodes: usize,
    /// `--jump`.
    pub jump: String,
    /// `--transport`.
    pub transport: String,
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} nodes, jump {}, {}",
            self.nodes, self.jump, self.transport
        )
    }
}

/// What the caller narrows the matrix to; empty means all.
#[derive(Debug, Clone, Default)]
pub struct Filter {
    /// Numbers of nodes.
    pub nodes: Vec<usize>,
    /// Jump policies; others than [`JUMPS`] may be named.
    pub jumps: Vec<String>,
    pub transports: Vec<String>,
}

fn or_all(given: &[String], all: &[&str]) -> Vec<String> {
    if given.is_empty() {
        all.iter().map(|name| name.to_string()).collect()
    } else {
        given.to_vec()
    }
}

/// Every combination that the filter allows.
pub fn settings(filter: &Filter) -> Vec<Setting> {
    let nodes = if filter.nodes.is_empty() {
        NODES.to_vec()
    } else {
        filter.nodes.clone()
    };
    let mut all = Vec::new();
    for transport in or_all(&filter.transports, &TRANSPORTS) {
        for jump in or_all(&filter.jumps, &JUMPS) {
            for &nodes in &nodes {
                all.push(Setting {
                    nodes,
                    jump: jump.clone(),
                    transport: transport.clone(),
                });
            }
        }
    }
    all
}

/// The setting of one round of one case: successive rounds differ in all three
/// dimensions, as many rounds as there are settings go through all of them, and
/// different cases start at different ones.
pub fn pick(settings: &[Setting], case: usize, round: usize) -> &Setting {
    let count = settings.len();
    // A step that shares no divisor with the count reaches every setting.
    let step = (1..count.max(2))
        .filter(|&step| greatest_common_divisor(step, count) == 1)
        .min_by_key(|&step| step.abs_diff(count * 2 / 5))
        .unwrap_or(1);
    &settings[(case * 7 + round * step) % count]
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 {
        a
    } else {
        greatest_common_divisor(b, a % b)
    }
}

/// Budgets, home first, for a case: home gets its part, the others share the
/// whole, so that home has to push and nobody runs out of room.
pub fn budgets_mib(case: &Case, nodes: usize) -> Vec<u64> {
    let home = (case.footprint_mib * case.home_percent / 100).max(2);
    let other = (case.footprint_mib * 115 / 100 / (nodes as u64 - 1)).max(2) + 1;
    let mut budgets = vec![other; nodes];
    budgets[0] = home;
    budgets
}

/// The options of `weft run` for a setting.
pub fn options(setting: &Setting, budgets_mib: &[u64], stats: &Path) -> Vec<OsString> {
    let memory: Vec<String> = budgets_mib.iter().map(|mib| format!("{mib}M")).collect();
    let mut statistics = OsString::from("json=");
    statistics.push(stats);
    vec![
        "run".into(),
        "--nodes".into(),
        setting.nodes.to_string().into(),
        "--memory".into(),
        memory.join(",").into(),
        "--jump".into(),
        setting.jump.clone().into(),
        "--transport".into(),
        setting.transport.clone().into(),
        "--stats".into(),
        statistics,
        "--".into(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_reach_every_setting_and_start_with_different_nodes() {
        let all = settings(&Filter::default());
        assert_eq!(all.len(), COMBINATIONS);
        for case in 0..5 {
            let mut seen: Vec<String> = (0..all.len())
                .map(|round| pick(&all, case, round).to_string())
                .collect();
            seen.sort();
            seen.dedup();
            assert_eq!(seen.len(), all.len());
        }
    }

    #[test]
    fn budgets_hold_the_program_together_but_not_alone() {
        for nodes in NODES {
            let case = Case::new("case", "true").memory(100, 0);
            let budgets = budgets_mib(&case, nodes);
            assert!(budgets[0] < 50);
            assert!(budgets.iter().sum::<u64>() > 130);
        }
    }
}
