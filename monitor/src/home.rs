//! Node 0, which is the machine to its user: puts it together, gives up what it can,
//! lets it run, and says with its last word what came of it.

use std::collections::BTreeMap;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::Context;
use nix::sys::signal::SigSet;
use nix::unistd::{Pid, Uid};
use weft_api::{BackEndView, ConsoleView, Control, Server};
use weft_confine::{ThreadKind, privilege};
use weft_console::{ConsoleEndpoint, ConsoleThread, Output, Port};
use weft_machine::{
    CheckpointIo, End, Handle, Machine, MachineIo, MachineRequest, MemoryFile, OpenDisks,
};
use weft_monitor::outcome::Outcome;
use weft_monitor::settings::{OwnSettings, SliceSettings, User};
use weft_monitor::trace::Trace;
use weft_node::launch::is_ignored;
use weft_node::monitor_protocol::{Control as LauncherControl, SliceBoot, Sockets};

use crate::attendance::{Endable, Event, attend};
use crate::control::{Controlled, Typed};
use crate::growth::{Changes, Launcher, Replies, Wanted};
use crate::restore::{self, Restored};
use crate::takeover::Takeover;
use crate::{die_with, growth, lent, links, switches};

/// How long the thread that waits for the end waits at one time.
const WAIT: Duration = Duration::from_secs(3600);

/// Lives one life of a machine.
pub fn live(
    control: &Arc<LauncherControl>,
    own: OwnSettings,
    boot: &SliceBoot,
    settings: SliceSettings,
    links: Sockets,
    sockets: Vec<OwnedFd>,
    parent: Pid,
) -> anyhow::Result<()> {
    // Those that ask for the end are blocked already; the console's thread reads all.
    signals()
        .thread_block()
        .context("cannot take over signals")?;
    let mut outlets = Outlets::of(sockets, &own, control)?;
    let prepared = prepare(control, own, boot, settings, links, &mut outlets, parent)?;
    let bytes = serde_json::to_vec(&prepared.run()).unwrap_or_default();
    // The parent has gone when nobody reads it.
    let _ = outlets.word.write_all(&bytes);
    Ok(())
}

/// Those that the console's thread reads. One that this process was started to ignore
/// (`nohup`) stays ignored: blocked, it would wait to be read all the same.
fn signals() -> SigSet {
    let all = ConsoleThread::signals();
    all.iter().filter(|signal| !is_ignored(*signal)).collect()
}

/// What the launcher made for the machine's inputs and outputs.
struct Outlets {
    /// For the last word.
    word: UnixStream,
    /// Of the API, until it is served.
    api: Option<UnixListener>,
    /// Of the console, where it is a socket and until it is served.
    console: Option<UnixListener>,
    /// Of a machine that comes from another host.
    takeover: Option<Takeover>,
    /// To the other nodes of this host, in their order, for files of checkpoints.
    channels: Vec<OwnedFd>,
}

impl Outlets {
    /// In the order in which they are given.
    fn of(
        sockets: Vec<OwnedFd>,
        own: &OwnSettings,
        control: &Arc<LauncherControl>,
    ) -> anyhow::Result<Outlets> {
        let mut sockets = sockets.into_iter();
        let word = sockets.next().context("there is no socket for the end")?;
        let api = sockets.next().map(Into::into);
        let mut next_if = |is_there: bool| is_there.then(|| sockets.next()).flatten();
        let console = next_if(own.console.is_some()).map(Into::into);
        let comes = next_if(own.takes_home).zip(next_if(own.takes_home));
        anyhow::ensure!(
            comes.is_some() == own.takes_home,
            "there is no memory of the machine that comes here"
        );
        Ok(Outlets {
            word: word.into(),
            api,
            console,
            takeover: comes.map(|(memory, socket)| Takeover::new(memory, socket, control.clone())),
            channels: sockets.collect(),
        })
    }
}

/// A machine about to execute its first instruction.
struct Prepared {
    /// When the command, or this life, began.
    started: Instant,
    machine: Machine,
    controlled: Arc<Controlled>,
    output: Output,
    console_thread: ConsoleThread,
    api: Server,
    events: Receiver<Event>,
    start: Start,
}

/// How a machine begins.
enum Start {
    /// With its kernel's first instruction.
    Boot,
    /// Where it was saved.
    Restore(Restored),
    /// Where it stands on another host.
    TakeOver(Takeover),
}

impl Start {
    fn of(takeover: Option<Takeover>, restored: Option<Restored>) -> Self {
        match (takeover, restored) {
            (Some(takeover), _) => Self::TakeOver(takeover),
            (None, Some(restored)) => Self::Restore(restored),
            (None, None) => Self::Boot,
        }
    }

    /// Has the machine run.
    fn carry_out(self, controlled: &Controlled, console: &Output) -> Result<(), String> {
        let handle = &controlled.handle;
        let request = |request| {
            let done = handle.request(request);
            done.map(drop).map_err(|refusal| refusal.to_string())
        };
        match self {
            Self::Boot => request(MachineRequest::Run),
            Self::Restore(Restored { state, files }) => {
                for (node, number, name) in files {
                    controlled.launcher.open_file(node, number, &name.path)?;
                }
                request(MachineRequest::Restore(state))
                    .and_then(|()| request(MachineRequest::Resume))
            }
            Self::TakeOver(takeover) => {
                if let Some(node) = takeover.take(handle, console)? {
                    controlled.unite(node);
                }
                Ok(())
            }
        }
    }
}

fn prepare(
    control: &Arc<LauncherControl>,
    own: OwnSettings,
    boot: &SliceBoot,
    settings: SliceSettings,
    links: Sockets,
    outlets: &mut Outlets,
    parent: Pid,
) -> anyhow::Result<Prepared> {
    weft_confine::prepare(own.confine.into())?;
    // A vCPU of another node waits for two leases before it gives node 0 up.
    let lease = Duration::from_millis(boot.lease_ms.into());
    let output = Output::new(lease / 2).context("cannot create the console")?;
    if let Some(text) = &own.ready {
        output.expect(text);
    }
    // The user that started it, real and effective, before root is given up.
    let owners = [Uid::effective(), Uid::current()];
    let become_user = |user: Option<User>| -> anyhow::Result<()> {
        if let Some(user) = user {
            privilege::become_user(&user.into())?;
            // A change of user undoes it.
            die_with(parent)?;
        }
        Ok(())
    };
    let links = links::open(links, boot, &settings)?;
    let configuration = settings.configuration;
    let open = |lender, disks| lent::open(&configuration, 0, lender, disks);
    if let Some(lender) = &own.lender {
        lent::check_networks(&configuration, 0, lender)?;
    }
    let switches = switches::connect(&configuration, 0, &own.switches)?;
    // What a lender allows is opened as the user that the machine's slice was.
    let (user, disks) = match (&own.lender, own.user) {
        (None, user) => (user, OpenDisks::default()),
        (Some(lender), user) if own.takes_home => {
            become_user(user)?;
            (None, open(lender, OpenDisks::locked_elsewhere())?)
        }
        (Some(lender), None) => (None, open(lender, OpenDisks::default())?),
        // Root reads the copy of its kernel.
        (Some(lender), Some(user)) => {
            let open = || open(lender, OpenDisks::default());
            let disks = privilege::as_user(&user.clone().into(), open)??;
            (Some(user), disks)
        }
    };
    let open = |directory| restore::open(directory, &own.hosts);
    let restored = own.restore.as_deref().map(open).transpose()?;
    let (restore, restored) = restored.unzip();
    let channels = std::mem::take(&mut outlets.channels);
    let io = MachineIo {
        serial: Box::new(output.port(Port::Serial)),
        console: Some(Box::new(output.port(Port::Virtio))),
        disks,
        switches,
        checkpoint: CheckpointIo {
            channels: channels.into_iter().map(Some).collect(),
            restore,
        },
        memory: match outlets.takeover.as_mut().and_then(|it| it.memory.take()) {
            Some(memory) => MemoryFile::Full(memory),
            None => MemoryFile::New,
        },
    };
    let machine = match links {
        None => Machine::new(&configuration, io)?,
        Some(links) => Machine::of_slice(&configuration, io, links)?,
    };
    let handle = machine.handle();
    let replies = Arc::<Replies>::default();
    growth::listen(control, &machine, boot, Some(replies.clone()))?;
    let launcher = Launcher {
        name: own.name.clone(),
        control: control.clone(),
        replies,
        is_kvm: machine.back_end() == "kvm",
        console: output.clone(),
        has_terminal: own.console.is_none(),
    };
    let changes = Changes::start(handle.clone(), launcher.clone())?;
    become_user(user)?;
    let (console, endpoint) = match outlets.console.take().zip(own.console) {
        None => (ConsoleView::Stdio, ConsoleEndpoint::Standard),
        Some((listener, path)) => (
            ConsoleView::Socket { path },
            ConsoleEndpoint::Socket(listener, owners.to_vec()),
        ),
    };
    let back_end = BackEndView {
        name: machine.back_end().to_owned(),
        reason: machine.notes().first().cloned().unwrap_or_default(),
    };
    if own.restarts == 0 {
        say_what(&own.name, &machine);
    }
    let controlled = Arc::new(Controlled {
        handle: handle.clone(),
        name: own.name,
        parent: parent.as_raw() as u32,
        back_end,
        console,
        configuration,
        restarts: own.restarts,
        built: Instant::now(),
        end_asked: AtomicBool::new(false),
        started: AtomicBool::new(false),
        changes,
        launcher,
        files: Mutex::default(),
    });
    let (wake, events) = channel();
    watch(&handle, wake.clone())?;
    let typed = Typed {
        handle,
        output: output.clone(),
    };
    let notify = Box::new(move |notice| drop(wake.send(Event::Notice(notice))));
    let console_thread = ConsoleThread::start(
        endpoint,
        output.clone(),
        Arc::new(typed),
        notify,
        &signals(),
    )
    .context("cannot start the console")?;
    let listener = outlets
        .api
        .take()
        .context("there is no socket for the API")?;
    let owners = owners.map(Uid::as_raw).to_vec();
    let api =
        Server::start(listener, controlled.clone(), owners).context("cannot start the API")?;
    weft_confine::enter(ThreadKind::Main)?;
    Ok(Prepared {
        started: own.started.into(),
        machine,
        controlled,
        output,
        console_thread,
        api,
        events,
        start: Start::of(outlets.takeover.take(), restored),
    })
}

/// The back end and why, and what was booted.
fn say_what(name: &str, machine: &Machine) {
    let mut prefix = format!("back end {}: ", machine.back_end());
    for note in machine.notes() {
        eprintln!("weft: vm {name}: {prefix}{note}");
        prefix.clear();
    }
}

/// Turns the machine's end into an event.
fn watch(handle: &Handle, wake: Sender<Event>) -> anyhow::Result<()> {
    let handle = handle.clone();
    weft_confine::spawn("end", ThreadKind::Device, move || {
        let end = loop {
            if let Some(end) = handle.wait(WAIT) {
                break end;
            }
        };
        // Nobody listens when the process ends already.
        let _ = wake.send(Event::Ended(end));
    })
    .context("cannot start a thread")?;
    Ok(())
}

impl Prepared {
    /// Runs the machine to its end.
    fn run(self) -> Outcome {
        let asked = self.start.carry_out(&self.controlled, &self.output);
        self.controlled.started.store(true, Ordering::SeqCst);
        let first = self.controlled.handle.first_instruction();
        let running = first.unwrap_or_else(Instant::now);
        let start_time_s = running
            .saturating_duration_since(self.started)
            .as_secs_f64();
        // A machine that was given up answers nothing.
        let mut answers = true;
        let (end, signal) = match asked {
            Ok(()) => {
                let attended = attend(&self.events, &*self.controlled);
                answers = self.controlled.end().is_some();
                attended
            }
            Err(reason) => {
                // A machine that had ended already says why; a refusal only that.
                let end = self.controlled.end();
                (end.unwrap_or(End::Failed { reason }), None)
            }
        };
        if let End::Moved { host } = &end {
            self.controlled.changes.linger();
            // For a client at the console: the guest writes on the new host only.
            let name = &self.controlled.name;
            let note = format!("\r\nweft: vm {name} is on {host} now\r\n");
            self.output.push(note.as_bytes());
        }
        let run_time_s = running.elapsed().as_secs_f64();
        let status = answers.then(|| self.controlled.status().ok()).flatten();
        let guest_time_s = status.map_or(0.0, |status| status.guest_time_ns as f64 / 1e9);
        let counters = answers.then(|| self.controlled.counters().ok()).flatten();
        let counters = counters.map_or_else(BTreeMap::new, |counters| counters.counters);
        let shares = match &end {
            End::Reset | End::TripleFault { .. } => self.controlled.handle.shares(),
            _ => Vec::new(),
        };
        let trace = answers
            .then(|| trace(&self.controlled, run_time_s))
            .flatten();
        // Answers that tell of the end go out; then the last of the console.
        self.api.finish();
        drop(self.machine);
        self.console_thread.finish();
        let boot = self.output.seen().map(|seen| seen - running);
        Outcome {
            end,
            end_asked: self.controlled.end_asked(),
            signal,
            back_end: self.controlled.back_end.clone(),
            start_time_s,
            boot_time_s: boot.map(|time| time.as_secs_f64()),
            run_time_s,
            guest_time_s,
            shares,
            console_bytes_lost: self.output.lost(),
            counters,
            trace,
        }
    }
}

fn trace(controlled: &Controlled, seconds: f64) -> Option<Box<Trace>> {
    let configuration = &controlled.configuration;
    configuration.trace.then(|| {
        let kept = Trace::kept(&controlled.handle, configuration, seconds);
        Box::new(kept)
    })
}

impl Controlled {
    /// Has node 0 take over what a node of this host has.
    fn unite(&self, node: usize) {
        if let Err(failure) = self.changes.begin(Wanted::Unite(node)) {
            // A user was faster.
            let name = &self.name;
            eprintln!("weft: vm {name}: node 0 and node {node} of this host stay apart: {failure}");
        }
    }
}

impl Endable for Controlled {
    fn power_off(&self) -> bool {
        self.power_button() == Ok(true)
    }

    fn stop(&self) -> Result<(), String> {
        Control::stop(self).map_err(|failure| failure.to_string())
    }

    fn end(&self) -> Option<End> {
        self.handle.wait(Duration::ZERO)
    }

    /// To a terminal that may be in raw mode.
    fn say(&self, sentence: &str) {
        eprint!("\r\nweft: vm {}: {sentence}\r\n", self.name);
    }
}
