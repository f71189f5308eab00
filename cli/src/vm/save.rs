//! `weft vm save`: this command opens the files, the machine writes its memory to them, and
//! this command makes the set complete.

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use serde::Serialize;
use weft_api::{SaveBody, Saved};
use weft_checkpoint::{DiskMark, Machine, NewSet};
use weft_machine::{Configuration, features_shown};
use weft_node::size::format_bytes;

use super::args::SaveArgs;
use super::running::{VIEW_BOUND, find};

/// How often the progress is shown.
const INTERVAL: Duration = Duration::from_millis(250);
const PAGE_BYTES: u64 = weft_checkpoint::PAGE_BYTES as u64;

/// What came of it.
#[derive(Serialize)]
struct Report {
    name: String,
    directory: String,
    nodes: usize,
    /// Pages that are not zero.
    pages: u64,
    /// Of all files.
    bytes: u64,
    /// Until the set was complete.
    seconds: f64,
    /// How long the vCPUs were paused.
    pause_seconds: f64,
    stopped: bool,
}

pub fn run(args: &SaveArgs) -> anyhow::Result<ExitCode> {
    let started = Instant::now();
    let client = find(&args.machine)?;
    let view = client
        .view(VIEW_BOUND)
        .with_context(|| format!("vm {}", args.machine))?;
    let nodes = view.configuration.slices.len().max(1);
    let set = NewSet::create(&args.directory, nodes)?;
    let body = SaveBody {
        identity: set.identity(),
        leave_paused: args.stop,
    };
    // A machine that runs on writes to its disks as soon as it is saved.
    let before = (!args.stop).then(|| disks(&view.configuration));
    let saved = with_progress(&set, || client.save(set.pages(), &body));
    let saved = saved.with_context(|| format!("vm {}", view.name))?;
    let (pages, pause_seconds) = (
        saved.pages.iter().map(|file| file.pages).sum(),
        saved.pause_s,
    );
    let disks = before.unwrap_or_else(|| disks(&view.configuration));
    let bytes = match disks.and_then(|disks| commit(set, &view.name, saved, disks)) {
        Ok(bytes) => bytes,
        Err(error) => {
            if args.stop {
                client.resume().with_context(|| format!("{error:#}"))?;
            }
            return Err(error);
        }
    };
    let seconds = started.elapsed().as_secs_f64();
    if args.stop {
        client
            .stop(0.0)
            .with_context(|| format!("vm {} is saved, but did not stop", view.name))?;
    }
    let report = Report {
        name: view.name,
        directory: args.directory.display().to_string(),
        nodes,
        pages,
        bytes,
        seconds,
        pause_seconds,
        stopped: args.stop,
    };
    report.show(args.json)?;
    Ok(ExitCode::SUCCESS)
}

impl Report {
    fn show(&self, json: bool) -> anyhow::Result<()> {
        if json {
            println!("{}", serde_json::to_string_pretty(self)?);
            return Ok(());
        }
        let rate = (self.bytes as f64 / self.seconds.max(1e-6)) as u64;
        eprintln!(
            "weft: vm {} is saved to {}{}: {} in {:.2} s ({}/s), paused for {:.2} s",
            self.name,
            self.directory,
            if self.stopped { " and has ended" } else { "" },
            format_bytes(self.bytes),
            self.seconds,
            format_bytes(rate),
            self.pause_seconds
        );
        Ok(())
    }
}

/// The disks as they are now.
fn disks(configuration: &Configuration) -> anyhow::Result<Vec<DiskMark>> {
    let marks = configuration.disks.iter().map(|disk| {
        let mark = DiskMark::of(&disk.path);
        mark.with_context(|| format!("cannot examine disk {}", disk.path.display()))
    });
    marks.collect()
}

/// Makes the set complete: the number of bytes in its files.
fn commit(set: NewSet, name: &str, saved: Saved, disks: Vec<DiskMark>) -> anyhow::Result<u64> {
    let configuration = &saved.machine.configuration;
    let ram = configuration.memory_bytes;
    let machine = Machine {
        name: name.to_owned(),
        cpus: configuration.cpus,
        memory_bytes: ram,
        pages_end: weft_machine::memory_end(ram) / PAGE_BYTES,
        features: features_shown(&saved.back_end, configuration.cpu_model),
        back_end: saved.back_end,
        disks,
    };
    let state = serde_json::to_vec(&saved.machine).context("cannot describe the machine")?;
    let written = saved.pages.into_iter().map(Into::into).collect();
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.map_or(0, |now| now.as_secs());
    Ok(set.commit(machine, &state, written, env!("CARGO_PKG_VERSION"), now)?)
}

/// Does `work`, and meanwhile shows on a terminal how much was written.
fn with_progress<T: Send>(set: &NewSet, work: impl FnOnce() -> T + Send) -> T {
    if !io::stderr().is_terminal() {
        return work();
    }
    let (done, finished) = channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            while finished.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                eprint!("\rweft: {} written", format_bytes(set.bytes_written()));
                let _ = io::stderr().flush();
            }
            eprint!("\r\x1b[K");
        });
        let result = work();
        drop(done);
        result
    })
}
