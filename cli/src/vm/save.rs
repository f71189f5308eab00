//! `weft vm save`: this command opens the files, the machine writes its memory to them, and
//! this command makes the set complete.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use serde::Serialize;
use weft_api::client::{Client, ClientError};
use weft_api::{SaveBody, SaveFilesBody, Saved};
use weft_checkpoint::new_set::ReadySet;
use weft_checkpoint::{DiskMark, FILES_MAX, Identity, Machine, NewSet, PageFile, Place, Set};
use weft_machine::{Configuration, features_shown};
use weft_node::launch::SignalEvent;
use weft_node::launch::machine::take_signals;
use weft_node::size::format_bytes;

use super::args::SaveArgs;
use super::registry::VIEW_BOUND;
use super::running::find;

/// How often the progress is shown.
const INTERVAL: Duration = Duration::from_millis(250);
/// Between flushes of files that are being written.
const FLUSH_INTERVAL: Duration = Duration::from_millis(20);
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
    /// Other hosts that have a file.
    hosts: BTreeSet<String>,
}

/// The files that daemons of other hosts made, if they made any.
struct HostFiles<'a> {
    client: &'a Client,
    identity: Identity,
    may_be: bool,
}

impl<'a> HostFiles<'a> {
    fn of(client: &'a Client, body: &SaveBody) -> Self {
        Self {
            client,
            identity: body.identity,
            may_be: body.each_host.is_some(),
        }
    }

    /// Has the daemons keep or remove them.
    fn settle(&self, keep: bool) -> anyhow::Result<()> {
        if !self.may_be {
            return Ok(());
        }
        let identity = self.identity;
        let settled = self.client.save_files(&SaveFilesBody { identity, keep });
        let way = if keep { "keep" } else { "remove" };
        settled
            .map(drop)
            .with_context(|| format!("cannot {way} the files of the checkpoint on other hosts"))
    }
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
    let each_host = args.each_host.as_ref();
    let each_host = each_host.map(|given| given.as_ref().unwrap_or(&args.directory));
    let each_host = each_host.map(std::path::absolute).transpose();
    let each_host = each_host.context("cannot find --each-host")?;
    let create = match each_host {
        Some(_) => NewSet::create_for_hosts,
        None => NewSet::create,
    };
    let set = create(&args.directory, FILES_MAX, base.as_ref())?;
    let body = SaveBody {
        identity: set.identity(),
        base: base.map(|base| base.manifest().identity),
        live: args.live,
        leave_paused: args.stop,
        each_host,
    };
    // A machine that runs on writes to its disks as soon as it is saved.
    let before = (!args.stop).then(|| disks(&view.configuration));
    let (set, saved) = save_with_progress(set, &client, &body)?;
    let (saved, flushed) = saved.with_context(|| format!("vm {}", view.name))?;
    let nodes = saved.pages.len();
    let pages = saved.pages.iter().map(|file| file.pages).sum();
    let unchanged = saved.pages.iter().map(|file| file.unchanged).sum();
    let pause_seconds = saved.pause_s;
    let disks = before.unwrap_or_else(|| disks(&view.configuration));
    let files = HostFiles::of(&client, &body);
    let committed = disks.and_then(|disks| {
        flushed?;
        let ready = prepare(set, &view.name, saved, &body, disks)?;
        files.settle(true)?;
        Ok(ready.complete()?)
    });
    let bytes = match committed {
        Ok(bytes) => bytes,
        Err(error) => {
            let error = match files.settle(false) {
                Ok(()) => error,
                Err(left) => error.context(format!("{left:#}: remove them there")),
            };
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
        hosts: hosts_of(&args.directory)?,
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
        if !self.hosts.is_empty() {
            let hosts: Vec<&str> = self.hosts.iter().map(String::as_str).collect();
            eprintln!("weft: files of it are on {}", hosts.join(", "));
        }
        Ok(())
    }
}

/// Other hosts that have files of a complete set.
fn hosts_of(directory: &Path) -> anyhow::Result<BTreeSet<String>> {
    let set = Set::open(directory)?;
    let places = set.manifest().pages.iter().flat_map(|file| &file.place);
    Ok(places.map(|place| place.host.clone()).collect())
}

/// The disks as they are now.
fn disks(configuration: &Configuration) -> anyhow::Result<Vec<DiskMark>> {
    let marks = configuration.disks.iter().map(|disk| {
        let mark = DiskMark::of(&disk.path);
        mark.with_context(|| format!("cannot examine disk {}", disk.path.display()))
    });
    marks.collect()
}

/// Has everything on disk but what makes the set complete.
fn prepare(
    set: NewSet,
    name: &str,
    saved: Saved,
    body: &SaveBody,
    disks: Vec<DiskMark>,
) -> anyhow::Result<ReadySet> {
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
    let mut written: Vec<PageFile> = saved.pages.into_iter().map(Into::into).collect();
    for (file, host) in written.iter_mut().zip(saved.hosts) {
        let place = |(host, directory)| Place { host, directory };
        file.place = host.zip(body.each_host.clone()).map(place);
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.map_or(0, |now| now.as_secs());
    Ok(set.prepare(machine, &state, written, env!("CARGO_PKG_VERSION"), now)?)
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

/// What the machine reports of a save, and whether its files here could be flushed.
type SaveOutcome = Result<(Saved, anyhow::Result<()>), ClientError>;

/// Has the machine save itself, and meanwhile shows on a terminal how much was written. Ctrl-C
/// gives the save up, and removes its files. A machine that is saved while it runs notices the
/// end of the connection, and so does one with files on other hosts; another one that stands
/// continues when its memory is written. One that was to end is waited for, and resumed.
fn save_with_progress(
    set: NewSet,
    client: &Client,
    body: &SaveBody,
) -> anyhow::Result<(NewSet, SaveOutcome)> {
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
    // Files here are not flushed only after those of other hosts, or after all is written.
    let flushes = body.live || body.each_host.is_some();
    let flusher = flushes.then(|| Flusher::start(&set)).transpose()?;
    let mut is_given_up = false;
    loop {
        match replied.recv_timeout(INTERVAL) {
            Ok(saved) => {
                clear(shows);
                if is_given_up {
                    let gone = HostFiles::of(client, body).settle(false);
                    client.resume().context("the machine stays paused")?;
                    gone?;
                    bail!("the save was given up");
                }
                let flushed = flusher.map_or(Ok(()), Flusher::end);
                return Ok((set, saved.map(|saved| (saved, flushed))));
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

/// Flushes the files of a set while they are written.
struct Flusher {
    is_over: Arc<AtomicBool>,
    thread: JoinHandle<io::Result<()>>,
}

impl Flusher {
    fn start(set: &NewSet) -> anyhow::Result<Self> {
        let files = set.pages().iter().map(File::try_clone);
        let files = files.collect::<io::Result<Vec<File>>>();
        let files = files.context("cannot use the files of the checkpoint")?;
        let is_over = Arc::<AtomicBool>::default();
        let over = is_over.clone();
        let flush = move || {
            while !over.load(Ordering::Relaxed) {
                std::thread::sleep(FLUSH_INTERVAL);
                files.iter().try_for_each(File::sync_data)?;
            }
            Ok(())
        };
        let thread = std::thread::Builder::new().name("flush".into());
        let thread = thread.spawn(flush).context("cannot start a thread")?;
        Ok(Self { is_over, thread })
    }

    /// The kernel reports an error of the disk once, so one that was found here counts.
    fn end(self) -> anyhow::Result<()> {
        self.is_over.store(true, Ordering::Relaxed);
        let flushed = self.thread.join();
        let flushed = flushed.unwrap_or_else(|_| Err(io::Error::other("its thread has ended")));
        flushed.context("cannot write the files of the checkpoint")
    }
}

/// Clears the line of the progress.
fn clear(shows: bool) {
    if shows {
        eprint!("\r\x1b[K");
    }
}
