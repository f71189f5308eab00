//! `weft vm save`: this command opens the files, the machine writes its memory to them, and
//! this command makes the set complete.

use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use serde::Serialize;
use weft_api::client::{Client, ClientError};
use weft_api::{SaveBody, Saved};
use weft_checkpoint::{DiskMark, FILES_MAX, Machine, NewSet, Set};
use weft_machine::{Configuration, features_shown};
use weft_node::launch::SignalEvent;
use weft_node::launch::machine::take_signals;
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
    /// Pages that are not zero, and were written.
    pages: u64,
    /// Pages that are as in the checkpoint that this one is based on.
    unchanged: u64,
    /// Of all files.
    bytes: u64,
    /// Until the set was complete.
    seconds: f64,
    /// How long the vCPUs were paused.
    pause_seconds: f64,
    live: bool,
    stopped: bool,
}

pub fn run(args: &SaveArgs) -> anyhow::Result<ExitCode> {
    let started = Instant::now();
    let client = find(&args.machine)?;
    let view = client
        .view(VIEW_BOUND)
        .with_context(|| format!("vm {}", args.machine))?;
    let base = args
        .since
        .as_deref()
        .map(|since| open_base(since, &view.name));
    let base = base.transpose()?;
    let set = NewSet::create(&args.directory, FILES_MAX, base.as_ref())?;
    let body = SaveBody {
        identity: set.identity(),
        base: base.map(|base| base.manifest().identity),
        live: args.live,
        leave_paused: args.stop,
    };
    // A machine that runs on writes to its disks as soon as it is saved.
    let before = (!args.stop).then(|| disks(&view.configuration));
    let (set, saved) = save_with_progress(set, &client, &body)?;
    let saved = saved.with_context(|| format!("vm {}", view.name))?;
    let nodes = saved.pages.len();
    let pages = saved.pages.iter().map(|file| file.pages).sum();
    let unchanged = saved.pages.iter().map(|file| file.unchanged).sum();
    let pause_seconds = saved.pause_s;
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
        unchanged,
        bytes,
        seconds,
        pause_seconds,
        live: args.live,
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
            "weft: vm {} is saved to {}{}: {} in {:.2} s ({}/s), paused for {:.3} s",
            self.name,
            self.directory,
            if self.stopped { " and has ended" } else { "" },
            format_bytes(self.bytes),
            self.seconds,
            format_bytes(rate),
            self.pause_seconds
        );
        if self.unchanged > 0 {
            let unchanged = format_bytes(self.unchanged * PAGE_BYTES);
            eprintln!("weft: {unchanged} did not change, and are in the checkpoint before it");
        }
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

/// The checkpoint that a new one is based on.
fn open_base(directory: &Path, name: &str) -> anyhow::Result<Set> {
    let directory = std::path::absolute(directory).context("cannot find --since")?;
    let set = Set::open(&directory)?;
    let saved = &set.manifest().machine.name;
    if saved != name {
        bail!(
            "--since {}: it is a checkpoint of vm {saved}, not of vm {name}",
            directory.display()
        );
    }
    Ok(set)
}

/// Has the machine save itself, and meanwhile shows on a terminal how much was written. Ctrl-C
/// gives the save up, and removes its files. A machine that is saved while it runs notices the
/// end of the connection; one that stands continues when its memory is written. One that was to
/// end is waited for, and resumed.
fn save_with_progress(
    set: NewSet,
    client: &Client,
    body: &SaveBody,
) -> anyhow::Result<(NewSet, Result<Saved, ClientError>)> {
    let signals = take_signals()?;
    let files = set.pages().iter().map(File::try_clone);
    let files = files.collect::<io::Result<Vec<File>>>();
    let files = files.context("cannot use the files of the checkpoint")?;
    let (reply, replied) = channel();
    let (asked, asking) = (body.clone(), client.clone());
    std::thread::Builder::new()
        .name("save".into())
        .spawn(move || drop(reply.send(asking.save(&files, &asked))))
        .context("cannot start a thread")?;
    let shows = io::stderr().is_terminal();
    let mut is_given_up = false;
    loop {
        match replied.recv_timeout(INTERVAL) {
            Ok(saved) => {
                clear(shows);
                if is_given_up {
                    client.resume().context("the machine stays paused")?;
                    bail!("the save was given up");
                }
                return Ok((set, saved));
            }
            Err(RecvTimeoutError::Disconnected) => bail!("the save ended without a reply"),
            Err(RecvTimeoutError::Timeout) => {}
        }
        while let Some(event) = signals.next() {
            if let SignalEvent::Signal { .. } = event {
                clear(shows);
                if !body.leave_paused {
                    bail!("the save was given up");
                }
                is_given_up = true;
            }
        }
        if shows {
            eprint!("\rweft: {} written", format_bytes(set.bytes_written()));
            let _ = io::stderr().flush();
        }
    }
}

/// Clears the line of the progress.
fn clear(shows: bool) {
    if shows {
        eprint!("\r\x1b[K");
    }
}
