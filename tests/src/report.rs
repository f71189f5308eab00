//! Counts results and prints them.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

/// What came of one test.
#[derive(Debug, Clone)]
pub enum Verdict {
    /// As it must be; a note on what was seen.
    Passed(String),
    /// Not as it must be; one line or more for each reason.
    Failed(Vec<String>),
    /// Not run, and why.
    Skipped(String),
}

#[derive(Debug, Default)]
struct Totals {
    passed: usize,
    failed: Vec<(String, Vec<String>)>,
    skipped: BTreeMap<String, Vec<String>>,
}

/// Collects verdicts; several threads may report.
#[derive(Debug, Default)]
pub struct Report {
    totals: Mutex<Totals>,
}

impl Report {
    /// Prints and counts one verdict.
    pub fn add(&self, name: &str, took: Duration, verdict: Verdict) {
        let mut totals = self
            .totals
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        let took_s = took.as_secs_f64();
        match verdict {
            Verdict::Passed(note) => {
                println!("ok    {name:<58} {took_s:8.2} s  {note}");
                totals.passed += 1;
            }
            Verdict::Failed(reasons) => {
                println!("FAIL  {name:<58} {took_s:8.2} s");
                for reason in &reasons {
                    println!("      {}", reason.replace('\n', "\n      "));
                }
                totals.failed.push((name.to_string(), reasons));
            }
            Verdict::Skipped(why) => {
                println!("skip  {name:<58} {why}");
                totals
                    .skipped
                    .entry(why)
                    .or_default()
                    .push(name.to_string());
            }
        }
    }

    /// Prints what was skipped and why, what failed, and the counts; true when
    /// nothing failed and something passed.
    pub fn finish(&self) -> bool {
        let totals = self
            .totals
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        println!();
        for (why, names) in &totals.skipped {
            println!("skipped, {why}: {}", names.join("; "));
        }
        for (name, reasons) in &totals.failed {
            let first = reasons
                .first()
                .map_or("", |reason| reason.lines().next().unwrap_or(""));
            println!("failed: {name}: {first}");
        }
        let skipped: usize = totals.skipped.values().map(Vec::len).sum();
        println!(
            "{} passed, {} failed, {skipped} skipped",
            totals.passed,
            totals.failed.len()
        );
        totals.failed.is_empty() && totals.passed > 0
    }
}
