//! As an ordinary user: `weft run` needs no right that `nobody` does not have.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use crate::context::{Context, works};
use crate::judge;
use crate::matrix::{self, Setting};
use crate::report::{Report, Verdict};
use crate::run::{Invocation, run};
use crate::suite::run_native;

/// Cases of the corpus that are run so.
const CASES: [&str; 5] = ["coherence", "sort-1", "children", "ends-exit-42", "python"];
const USER: &str = "nobody";

fn make_open(path: &Path) -> Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))
        .with_context(|| format!("{}", path.display()))
}

/// A copy of both binaries where everybody can read them.
fn copy_binaries(context: &Context) -> Result<std::path::PathBuf> {
    let directory = context.directory("binaries")?;
    let from = context.weft.parent().context("weft is in a directory")?;
    for name in ["weft", "weft-runtime"] {
        let to = directory.join(name);
        fs::copy(from.join(name), &to).with_context(|| format!("{name} beside weft"))?;
        make_open(&to)?;
    }
    Ok(directory.join("weft"))
}

/// Runs the cases as `nobody`, or says why not.
pub fn run_as_user(context: &Context, report: &Report) -> Result<()> {
    let skip = |why: &str| {
        report.add(
            "as an ordinary user",
            Duration::ZERO,
            Verdict::Skipped(why.to_string()),
        );
    };
    if !context.is_root() {
        skip("changing the user needs root; everything above ran as an ordinary user");
        return Ok(());
    }
    if !works("runuser", &["-u", USER, "--", "true"]) {
        skip("`runuser -u nobody` does not work here");
        return Ok(());
    }
    let mut open = context.clone();
    open.weft = match copy_binaries(context) {
        Ok(weft) => weft,
        Err(error) => {
            report.add(
                "as an ordinary user",
                Duration::ZERO,
                Verdict::Failed(vec![format!("{error:#}")]),
            );
            return Ok(());
        }
    };
    open.programs = context.directory("programs")?;
    for entry in fs::read_dir(&context.programs)? {
        let entry = entry?;
        fs::copy(entry.path(), open.programs.join(entry.file_name()))?;
    }
    open.sources = context.directory("sources")?;
    let script = "work.py";
    fs::copy(context.sources.join(script), open.sources.join(script))?;
    for directory in [&open.work, &open.inputs, &open.programs, &open.sources] {
        make_open(directory)?;
    }
    let setting = Setting {
        nodes: 2,
        jump: "auto".to_string(),
        transport: "ring".to_string(),
    };
    for case in crate::corpus::cases()
        .into_iter()
        .filter(|case| CASES.contains(&case.name.as_str()))
    {
        let name = format!("{} as {USER}", case.name);
        if let Some(why) = case.missing(&open) {
            report.add(&name, Duration::ZERO, Verdict::Skipped(why));
            continue;
        }
        let started = Instant::now();
        let verdict = run_one(&open, &case, &setting)
            .unwrap_or_else(|error| Verdict::Failed(vec![format!("{error:#}")]));
        report.add(&name, started.elapsed(), verdict);
    }
    Ok(())
}

fn run_one(context: &Context, case: &crate::case::Case, setting: &Setting) -> Result<Verdict> {
    let native = run_native(case, context)?;
    let directory = context.directory(&format!("user-{}", case.name))?;
    // The program writes its outputs here, and Weft its statistics.
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o777))?;
    let budgets_mib = matrix::budgets_mib(case, setting.nodes);
    let statistics = directory.join("weft-stats.json");
    let mut command: Vec<OsString> = ["runuser", "-u", USER, "--"].map(Into::into).to_vec();
    command.push(context.weft.clone().into());
    command.extend(matrix::options(setting, &budgets_mib, &statistics));
    command.extend(case.words(context).into_iter().map(Into::into));
    let outcome = run(&Invocation::new(&command, &directory).bounded(case.bound))?;
    let mut reasons = judge::compare(case, &native, &outcome, &directory);
    match crate::stats::Counters::read(&statistics) {
        Ok(counters) => {
            reasons.extend(judge::check_counters(
                case,
                setting,
                &budgets_mib,
                &counters,
            ));
        }
        Err(error) => reasons.push(format!("{error:#}")),
    }
    if reasons.is_empty() {
        return Ok(Verdict::Passed(String::new()));
    }
    reasons.push(format!("stderr: {}", outcome.stderr.trim()));
    Ok(Verdict::Failed(reasons))
}
