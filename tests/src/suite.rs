//! The corpus: every case natively once, then under `weft`, round by round.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::{Result, ensure};

use crate::case::Case;
use crate::context::Context;
use crate::judge::{self, Native};
use crate::matrix::{self, Setting};
use crate::report::{Report, Verdict};
use crate::run::{End, Invocation, Outcome, run};
use crate::stats::Counters;

/// How often, and how many at once.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Settings to choose from.
    pub settings: Vec<Setting>,
    /// Rounds; each runs every case under one setting.
    pub rounds: usize,
    /// Runs at the same time.
    pub jobs: usize,
    /// Keeps the directories of passed runs as well.
    pub keep: bool,
}

fn invocation(
    case: &Case,
    context: &Context,
    directory: &Path,
    before: &[std::ffi::OsString],
) -> Invocation {
    let mut command = before.to_vec();
    command.extend(case.words(context).into_iter().map(Into::into));
    let mut invocation = Invocation::new(&command, directory).bounded(case.bound);
    let input = case.stdin.as_ref().map(|name| context.inputs.join(name));
    invocation.stdin = input.or_else(|| case.script.as_ref().map(|name| directory.join(name)));
    invocation
}

fn prepare(case: &Case, context: &Context, directory: &Path) -> Result<()> {
    let Some(script) = &case.prepare else {
        return Ok(());
    };
    let outcome = run(&Invocation::new(
        &["sh", "-c", &context.fill(script)],
        directory,
    ))?;
    ensure!(
        outcome.end == End::Exit(0),
        "preparing: {}: {}",
        outcome.end,
        outcome.stderr
    );
    Ok(())
}

/// Runs a case natively. A hang or a leftover there is the case's own fault.
pub fn run_native(case: &Case, context: &Context) -> Result<Native> {
    let directory = context.directory(&format!("native-{}", case.name))?;
    prepare(case, context, &directory)?;
    let outcome = run(&invocation(case, context, &directory, &[]))?;
    ensure!(outcome.end != End::Hang, "the native run hangs");
    ensure!(
        outcome.leftovers.is_empty(),
        "the native run leaves {:?}",
        outcome.leftovers
    );
    Ok(Native { outcome, directory })
}

fn counters_note(counters: &Counters, outcome: &Outcome, native: &Native) -> String {
    format!(
        "native {:.2} s, x{:.1}; {} pulls, {} ahead, {} pushes, {} jumps",
        native.outcome.wall.as_secs_f64(),
        outcome.wall.as_secs_f64() / native.outcome.wall.as_secs_f64().max(0.001),
        counters.total(|node| node.pulls),
        counters.total(|node| node.read_ahead),
        counters.total(|node| node.pushes),
        counters.total(|node| node.jumps_in),
    )
}

/// Adds to a failure what helps to understand it.
fn explain(
    mut reasons: Vec<String>,
    context: &Context,
    outcome: &Outcome,
    directory: &Path,
) -> Verdict {
    if outcome.end == End::Hang {
        reasons.push(format!("weft list: {}", context.weft_list().trim()));
        reasons.extend(outcome.stacks.iter().cloned());
    }
    let stderr: Vec<&str> = outcome.stderr.trim_end().lines().collect();
    for line in &stderr[stderr.len().saturating_sub(12)..] {
        reasons.push(format!("stderr: {line}"));
    }
    reasons.push(format!("kept: {}", directory.display()));
    Verdict::Failed(reasons)
}

/// Runs a case under `weft` and judges it.
pub fn run_weft(
    case: &Case,
    context: &Context,
    setting: &Setting,
    native: &Native,
    keep: bool,
) -> Result<Verdict> {
    static RUN: AtomicUsize = AtomicUsize::new(0);
    let number = RUN.fetch_add(1, Ordering::Relaxed);
    let directory = context.directory(&format!("{}-{number}", case.name))?;
    prepare(case, context, &directory)?;
    let statistics = directory.join("weft-stats.json");
    let budgets_mib = matrix::budgets_mib(case, setting.nodes);
    let mut before = vec![context.weft.clone().into_os_string()];
    before.extend(matrix::options(setting, &budgets_mib, &statistics));
    let invocation = invocation(case, context, &directory, &before);
    let outcome = run(&invocation)?;

    let mut reasons = judge::compare(case, native, &outcome, &directory);
    let mut note = String::new();
    if outcome.end != End::Hang {
        match Counters::read(&statistics) {
            Ok(counters) => {
                reasons.extend(judge::check_counters(
                    case,
                    setting,
                    &budgets_mib,
                    &counters,
                ));
                note = counters_note(&counters, &outcome, native);
            }
            Err(error) => reasons.push(format!("{error:#}")),
        }
    }
    if reasons.is_empty() {
        if !keep {
            fs::remove_dir_all(&directory)?;
        }
        return Ok(Verdict::Passed(note));
    }
    reasons.push(format!("command: {}", invocation.to_line()));
    Ok(explain(reasons, context, &outcome, &directory))
}

/// Runs all cases; every run is one verdict.
pub fn run_corpus(cases: &[Case], context: &Context, plan: &Plan, report: &Report) {
    let mut natives = HashMap::new();
    for case in cases {
        if let Some(why) = case.missing(context) {
            report.add(&case.name, Default::default(), Verdict::Skipped(why));
            continue;
        }
        let started = Instant::now();
        match run_native(case, context) {
            Ok(native) => {
                natives.insert(case.name.clone(), native);
            }
            Err(error) => report.add(
                &format!("{} (native)", case.name),
                started.elapsed(),
                Verdict::Failed(vec![format!("{error:#}")]),
            ),
        }
    }
    let runs: Vec<(usize, &Case, &Setting)> = (0..plan.rounds)
        .flat_map(|round| {
            cases.iter().enumerate().map(move |(number, case)| {
                (round, case, matrix::pick(&plan.settings, number, round))
            })
        })
        .collect();
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..plan.jobs.max(1) {
            scope.spawn(|| {
                while let Some((_, case, setting)) = runs.get(next.fetch_add(1, Ordering::Relaxed))
                {
                    let Some(native) = natives.get(&case.name) else {
                        continue;
                    };
                    let started = Instant::now();
                    let verdict = run_weft(case, context, setting, native, plan.keep)
                        .unwrap_or_else(|error| Verdict::Failed(vec![format!("{error:#}")]));
                    report.add(
                        &format!("{}, {setting}", case.name),
                        started.elapsed(),
                        verdict,
                    );
                }
            });
        }
    });
}
