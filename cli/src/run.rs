//! `weft run`.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, bail};
use weft_cluster::{WorkKind, WorkPart, WorkRequest};
use weft_node::error::{LaunchError, sentence};
use weft_node::launch::{self, ProgramOutcome};
use weft_node::options::{Placement, RunOptions};
use weft_node::report::{LiveView, Report};
use weft_node::spawn::Ended;

use crate::args::RunArgs;
use crate::values::StatsArg;
use crate::work::Found;
use crate::{summary, watch, work};

/// The longest name in a cluster that is made of a program's.
const NAME_MAX: usize = 63;

/// Runs the program and ends this process as the program ended.
pub fn run(args: &RunArgs) -> anyhow::Result<ExitCode> {
    // Opened first: a summary that cannot be written is better known before
    // hours of work than after.
    let file = match &args.stats {
        Some(StatsArg::JsonFile(path)) => Some(
            File::create(path)
                .with_context(|| format!("cannot write the statistics to {}", path.display()))?,
        ),
        _ => None,
    };
    let mut options = args.to_options();
    if args.place.cluster {
        match find_hosts(args, &mut options) {
            Ok(None) => {}
            Ok(Some(shown)) => return Ok(shown),
            Err(error) => {
                let error = LaunchError::Option(format!("{error:#}"));
                eprintln!("weft: {}", sentence(&error));
                return Ok(ExitCode::from(error.exit_code() as u8));
            }
        }
    }
    let live = LiveView::new();
    let watcher = args.watch.then(|| watch::start(live.clone()));
    let messages = watcher.as_ref().map(|watcher| watcher.messages());
    let mut say = |text: &str| match &messages {
        Some(messages) => messages.say(text),
        None => eprintln!("weft: {text}"),
    };
    let result = launch::launch(&options, &live, &mut say);
    if let Some(watcher) = watcher {
        watcher.stop();
    }
    match result {
        Ok(outcome) => {
            report(args, file, &outcome)?;
            launch::end_like(outcome.ended)
        }
        Err(error) => {
            eprintln!("weft: {}", sentence(&error));
            if let LaunchError::Interrupted { signal } = error {
                launch::end_like(Ended::Signaled(signal as i32));
            }
            Ok(ExitCode::from(error.exit_code() as u8))
        }
    }
}

/// Has the cluster find the nodes of the run. `Some`: with `--dry-run` all that was asked for
/// has been shown; with `--anywhere` it has run on another host.
fn find_hosts(args: &RunArgs, options: &mut RunOptions) -> anyhow::Result<Option<ExitCode>> {
    let request = request(args)?;
    if args.place.dry_run {
        return Ok(Some(work::show_trial(&request)?));
    }
    match work::place(request, &args.place, None)? {
        Found::Here(parts) => put_on(options, &parts),
        Found::Elsewhere(elsewhere) => return elsewhere.run(args.program.len()).map(Some),
    }
    if args.place.placed.is_some() {
        work::end_with_connection();
    }
    Ok(None)
}

/// What the cluster is asked for.
fn request(args: &RunArgs) -> anyhow::Result<WorkRequest> {
    let [memory] = args.memory[..] else {
        bail!("--cluster needs one --memory: how much all of the program needs");
    };
    let program = Path::new(&args.program[0]).file_name().unwrap_or_default();
    let name = work::name_for(&program.to_string_lossy(), NAME_MAX);
    work::request(name, WorkKind::Program, 1, memory, &args.place)
}

/// The nodes of the run, as the cluster placed them.
fn put_on(options: &mut RunOptions, parts: &[WorkPart]) {
    options.memory_bytes = parts.iter().map(|part| part.memory_mib << 20).collect();
    options.placement = match &parts[1..] {
        [] => Placement::Embedded(1),
        others => Placement::Remote(others.iter().map(|part| part.host.clone()).collect()),
    };
}

fn report(args: &RunArgs, file: Option<File>, outcome: &ProgramOutcome) -> anyhow::Result<()> {
    match (&args.stats, file) {
        (Some(StatsArg::JsonFile(path)), Some(file)) => write_json(file, path, &outcome.report),
        (Some(StatsArg::Json), _) => {
            eprintln!("{}", serde_json::to_string_pretty(&outcome.report)?);
            Ok(())
        }
        (None, _) if !outcome.report.aggregate.stretched => Ok(()),
        _ => {
            eprint!("{}", summary::render(&outcome.report, summary::colour()));
            Ok(())
        }
    }
}

fn write_json(mut file: File, path: &Path, report: &Report) -> anyhow::Result<()> {
    let mut text = serde_json::to_vec_pretty(report)?;
    text.push(b'\n');
    file.write_all(&text)
        .with_context(|| format!("cannot write the statistics to {}", path.display()))
}
