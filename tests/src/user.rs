//! As an ordinary user: `weft run` needs no right that `nobody` does not have.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use nix::unistd::User;

use crate::context::{Context, works};
use crate::executable;
use crate::judge;
use crate::matrix::{self, Setting};
use crate::report::{Report, Verdict};
use crate::run::{Invocation, run};
use crate::suite::run_native;

/// Cases of the corpus that are run so.
const CASES: [&str; 5] = [
    "coherence",
    "sort-1",
    "children",
    "ends-return-42",
    "python",
];
const USER: &str = "nobody";

pub(crate) fn make_open(path: &Path) -> Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))
        .with_context(|| format!("{}", path.display()))
}

/// A copy of all binaries where everybody can read them.
fn copy_binaries(context: &Context) -> Result<PathBuf> {
    let directory = context.directory("binaries")?;
    make_open(&directory)?;
    let from = context.weft.parent().context("weft is in a directory")?;
    for name in ["weft", "weft-runtime", "weft-monitor"] {
        let to = directory.join(name);
        executable::copy(&from.join(name), &to)?;
    }
    Ok(directory.join("weft"))
}

/// What is in the work directory for `nobody` to write to: sockets and the like.
const RUN_DIRECTORY: &str = "nobody";

/// The words before a command that run it as `nobody`, in a context that is open.
pub(crate) fn prefix(open: &Context) -> Vec<OsString> {
    let mut words: Vec<OsString> = ["runuser", "-u", USER, "--", "env"]
        .map(Into::into)
        .to_vec();
    let mut variable = OsString::from("XDG_RUNTIME_DIR=");
    variable.push(open.work.join(RUN_DIRECTORY));
    words.push(variable);
    words
}

/// Why root cannot run anything as `nobody` here, if so.
pub(crate) fn cannot_change() -> Option<String> {
    let works = works("runuser", &["-u", USER, "--", "true"]);
    (!works).then(|| format!("`runuser -u {USER}` does not work here"))
}

/// Of `weft`, the programs and the sources, in this process's work directory; made when first
/// wanted.
static COPIES: Mutex<Option<[PathBuf; 3]>> = Mutex::new(None);

/// The same, with copies of everything where `nobody` can read it. Suites that run side by side
/// share one set of copies, since each may have processes that execute them.
pub(crate) fn open_context(context: &Context) -> Result<Context> {
    let mut copies = COPIES.lock().expect("no suite panicked here");
    let [weft, programs, sources] = match &*copies {
        Some(made) => made.clone(),
        None => copies.insert(make_copies(context)?).clone(),
    };
    Ok(Context {
        weft,
        programs,
        sources,
        ..context.clone()
    })
}

/// The copies of `weft`, the programs and the sources. Makes the rest of the context readable.
fn make_copies(context: &Context) -> Result<[PathBuf; 3]> {
    let weft = copy_binaries(context)?;
    let programs = context.directory("programs")?;
    for entry in fs::read_dir(&context.programs)? {
        let entry = entry?;
        executable::copy(&entry.path(), &programs.join(entry.file_name()))?;
    }
    let sources = context.directory("sources")?;
    let script = "work.py";
    fs::copy(context.sources.join(script), sources.join(script))?;
    for directory in [&context.work, &context.inputs, &programs, &sources] {
        make_open(directory)?;
    }
    let user = User::from_name(USER)?.with_context(|| format!("there is no user {USER}"))?;
    let run_directory = context.directory(RUN_DIRECTORY)?;
    fs::set_permissions(&run_directory, fs::Permissions::from_mode(0o700))?;
    chown(
        &run_directory,
        Some(user.uid.as_raw()),
        Some(user.gid.as_raw()),
    )?;
    Ok([weft, programs, sources])
}

/// Runs the cases as `nobody`, or says why not.
pub fn run_as_user(context: &Context, report: &Report) -> Result<()> {
    let why = if context.is_root() {
        cannot_change()
    } else {
        Some("changing the user needs root; everything above ran as an ordinary user".to_string())
    };
    if let Some(why) = why {
        report.add("as an ordinary user", Duration::ZERO, Verdict::Skipped(why));
        return Ok(());
    }
    let open = open_context(context)?;
    let setting = Setting {
        nodes: 2,
        jump: "auto".to_string(),
        transport: "ring".to_string(),
    };
    let cases = crate::corpus::cases();
    for name in CASES {
        let case = cases.iter().find(|case| case.name == name);
        let case = case.with_context(|| format!("the corpus has no case {name}"))?;
        let name = format!("{} as {USER}", case.name);
        if let Some(why) = case.missing(&open) {
            report.add(&name, Duration::ZERO, Verdict::Skipped(why));
            continue;
        }
        let started = Instant::now();
        let verdict = run_one(&open, case, &setting)
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
    let mut command = prefix(context);
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
