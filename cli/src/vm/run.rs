//! `weft vm run`: looks after the process that is the machine.
//!
//! ```text
//! options ──▶ plan ──▶ sockets ──▶ fork ──▶ the machine (see `machine`)
//!                                   ▲            │ reset
//!                                   └────────────┘
//! ```
//!
//! This process stays outside: it never touches the guest, keeps the rights it
//! was started with, passes signals on, makes the machine anew when the guest
//! restarts (sockets stay, so clients only wait), and in the end removes the
//! sockets, repairs the terminal and says what happened. The machine's process
//! gives up what it can and dies with this one.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, IsTerminal, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::termios::{SetArg, Termios, tcgetattr, tcsetattr};
use nix::unistd::{ForkResult, Pid, fork};
use weft_aggregate::BOOTSTRAP;
use weft_console::Carrier;
use weft_machine::End;
use weft_node::oom;
use weft_platform::clock::Reference;

use super::args::VmRunArgs;
use super::companions::Companions;
use super::error::{EXIT_SETUP, EXIT_TRIPLE_FAULT, VmError};
use super::machine;
use super::outcome::{self, Message, Outcome, Report};
use super::places::Places;
use super::plan::Plan;
use super::suboptions::ConsoleArg;
use super::trace;
use crate::args::StatsArg;

/// Longest last word of a machine's process: its counters, and the trace of 16
/// nodes.
const MESSAGE_BYTES_MAX: usize = 512 << 20;
/// A life shorter than this that ends in a triple fault is a crash.
const CRASH: Duration = Duration::from_secs(1);
/// So many crashes in a row are not started again.
const CRASHES_MAX: u32 = 3;
/// `si_code` of a signal from the kernel: from the terminal, to all processes.
const SI_KERNEL: i32 = 0x80;

/// Runs a machine to its end.
pub fn run(args: &VmRunArgs, started: Instant) -> anyhow::Result<ExitCode> {
    let set_up = |error: anyhow::Error| {
        eprintln!("weft: {error:#}");
        ExitCode::from(EXIT_SETUP)
    };
    weft_platform::clock::begin_tsc_measurement();
    let prepared = || -> anyhow::Result<(Plan, Option<File>, Option<File>, Places)> {
        let plan = Plan::check(args)?;
        // Opened first: a summary that cannot be written is better known before
        // hours of work than after.
        let file =
            match &args.stats {
                Some(StatsArg::JsonFile(path)) => Some(File::create(path).with_context(|| {
                    format!("cannot write the statistics to {}", path.display())
                })?),
                _ => None,
            };
        let trace = args.trace.as_ref().map(|path| {
            File::create(path)
                .with_context(|| format!("cannot write the trace to {}", path.display()))
        });
        let trace = trace.transpose()?;
        let places = Places::claim(&plan)?;
        Ok((plan, file, trace, places))
    };
    let (plan, file, trace, places) = match prepared() {
        Ok(prepared) => prepared,
        Err(error) => return Ok(set_up(error)),
    };
    match supervise(&plan, &places, started) {
        Err(error) => Ok(set_up(error.into())),
        Ok(Last::NotStarted) => Ok(ExitCode::from(EXIT_SETUP)),
        Ok(Last::Killed(code)) => Ok(ExitCode::from(code)),
        Ok(Last::Ended(ended)) => {
            eprintln!("weft: {}", outcome::sentence(&plan.name, &ended.outcome));
            report(args, file, &plan, &ended)?;
            if let (Some(file), Some(trace)) = (trace, &ended.outcome.trace) {
                let path = args.trace.as_deref().unwrap_or(Path::new("trace"));
                trace::write(trace, file, path, &plan.name)?;
            }
            Ok(ExitCode::from(ended.code()))
        }
    }
}

/// The last life of a machine.
enum Last {
    /// It has said why.
    NotStarted,
    /// It ended without a last word; its exit code.
    Killed(u8),
    Ended(Box<Ended>),
}

struct Ended {
    outcome: Outcome,
    restarts: u32,
    resident_bytes_max: u64,
    /// It was not started again although resets are.
    crashed: bool,
}

impl Ended {
    fn code(&self) -> u8 {
        match self.crashed {
            true => EXIT_TRIPLE_FAULT,
            false => outcome::exit_code(&self.outcome),
        }
    }
}

fn report(args: &VmRunArgs, file: Option<File>, plan: &Plan, ended: &Ended) -> anyhow::Result<()> {
    let outcome = &ended.outcome;
    let report = Report {
        format: 1,
        name: &plan.name,
        pid: std::process::id(),
        back_end: &outcome.back_end,
        end: outcome.end.to_string(),
        signal: outcome.signal,
        exit_code: ended.code(),
        restarts: ended.restarts,
        start_time_s: outcome.start_time_s,
        boot_time_s: outcome.boot_time_s,
        run_time_s: outcome.run_time_s,
        guest_time_s: outcome.guest_time_s,
        resident_bytes_max: ended.resident_bytes_max,
        console_bytes_lost: outcome.console_bytes_lost,
        counters: &outcome.counters,
    };
    match (&args.stats, file) {
        (Some(StatsArg::JsonFile(path)), Some(mut file)) => {
            let mut text = serde_json::to_vec_pretty(&report)?;
            text.push(b'\n');
            file.write_all(&text)
                .with_context(|| format!("cannot write the statistics to {}", path.display()))?;
        }
        (Some(StatsArg::Json), _) => eprintln!("{}", serde_json::to_string_pretty(&report)?),
        (Some(StatsArg::Text), _) => {
            for (name, value) in &ended.outcome.counters {
                eprintln!("  {name:<40} {value:>14}");
            }
        }
        _ => {}
    }
    Ok(())
}

/// One life after the other.
fn supervise(plan: &Plan, places: &Places, started: Instant) -> Result<Last, VmError> {
    let signals = Signals::take()?;
    let terminal = Terminal::remember(plan);
    let mut started = started;
    let (mut restarts, mut crashes) = (0, 0);
    loop {
        let life = Life {
            plan,
            places,
            started,
            restarts,
            // Measured before there are other processes: all get the same.
            reference: (plan.nodes.count > 1).then(Reference::here),
        };
        let lived = life.live(&signals);
        terminal.restore();
        let Lived {
            message,
            usage,
            out_of_memory,
        } = lived?;
        if let Some(why) = out_of_memory {
            eprintln!("weft: vm {}: {why}", plan.name);
        }
        let mut outcome = match message {
            Ok(Message::Ended(outcome)) => outcome,
            Ok(Message::SetUp(why)) => {
                eprintln!("weft: {why}");
                return Ok(Last::NotStarted);
            }
            Err((status, signal)) => {
                let (sentence, code) =
                    outcome::killed(status, signal, plan.nodes.describe(BOOTSTRAP));
                eprintln!("weft: vm {}: {sentence}", plan.name);
                return Ok(Last::Killed(code));
            }
        };
        crashes = match outcome.end {
            End::TripleFault { .. } if outcome.run_time_s < CRASH.as_secs_f64() => crashes + 1,
            _ => 0,
        };
        let crashed = crashes == CRASHES_MAX;
        // A signal may have come too late for the machine's process to hear of it.
        outcome.end_asked |= signals.asked_for_end();
        let again = plan.reboot && !outcome.end_asked && !crashed;
        if !again || !outcome::restarts(&outcome.end) {
            return Ok(Last::Ended(Box::new(Ended {
                outcome: *outcome,
                restarts,
                resident_bytes_max: usage,
                crashed: crashed && plan.reboot,
            })));
        }
        eprintln!(
            "weft: {}; restarting",
            outcome::sentence(&plan.name, &outcome)
        );
        restarts += 1;
        started = Instant::now();
        weft_platform::clock::begin_tsc_measurement();
    }
}

/// What one life of a machine is made from.
pub struct Life<'a> {
    /// What to run.
    pub plan: &'a Plan,
    /// Its sockets.
    pub places: &'a Places,
    /// When the command, or this life, began.
    pub started: Instant,
    /// How often the guest restarted before.
    pub restarts: u32,
    /// The clock that all nodes follow; none on a machine of one.
    pub reference: Option<Reference>,
}

/// A last word, or status and signal of a process that had none.
type LastWord = Result<Message, (i32, Option<i32>)>;

/// How a life of a machine ended.
struct Lived {
    message: LastWord,
    /// The most memory that its processes had resident, in bytes.
    usage: u64,
    /// The kernel killed one of them, and counts it as out of memory.
    out_of_memory: Option<String>,
}

impl Life<'_> {
    /// Makes the machine's processes and waits for their end.
    fn live(&self, signals: &Signals) -> Result<Lived, VmError> {
        let parent = nix::unistd::getpid();
        // They are in the group of this process.
        let memory = oom::Watch::on(std::process::id());
        let (mut companions, links) = Companions::start(self, parent)?;
        // Made after the companions: one that does not end, and had a copy, would keep
        // the last word's end from being seen.
        let (ours, theirs) = UnixStream::pair().map_err(VmError::system("make a socket pair"))?;
        // SAFETY: this process has one thread, so the child's copy of its memory
        // is in order.
        let child = match unsafe { fork() }.map_err(VmError::system("make a process"))? {
            ForkResult::Child => {
                drop(ours);
                // Connections to daemons are the parent's business alone.
                drop(companions);
                machine::live(self, parent, theirs, links)
            }
            ForkResult::Parent { child } => child,
        };
        // A process with a copy of a link keeps its end from being noticed.
        drop((theirs, links));
        let (message, usage) = signals.attend(child, ours, &mut companions)?;
        let others = companions.finish();
        let killed = others.killed || matches!(message, Err((_, Some(libc::SIGKILL))));
        Ok(Lived {
            message,
            usage: usage + others.resident_bytes,
            out_of_memory: killed.then(|| memory.verdict()).flatten(),
        })
    }
}

/// The signals of this process, taken over before any other process is made.
struct Signals {
    descriptor: SignalFd,
    /// One that asks for the machine's end has come.
    end_asked: Cell<bool>,
}

impl Signals {
    fn take() -> Result<Signals, VmError> {
        let failed = "take over signals";
        let mut blocked = Carrier::signals();
        blocked.add(Signal::SIGCHLD);
        blocked.thread_block().map_err(VmError::system(failed))?;
        let mut read = blocked;
        // The machine's process gets it as well, and knows what to do.
        read.remove(Signal::SIGWINCH);
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        let descriptor = SignalFd::with_flags(&read, flags).map_err(VmError::system(failed))?;
        Ok(Signals {
            descriptor,
            end_asked: Cell::new(false),
        })
    }

    /// Passes signals on to `child`, listens to it until it has ended, and tends its
    /// nodes on other hosts.
    fn attend(
        &self,
        child: Pid,
        mut from: UnixStream,
        companions: &mut Companions,
    ) -> Result<(LastWord, u64), VmError> {
        // At most a second, so it fits.
        let bound = companions
            .beat()
            .map_or(PollTimeout::NONE, |beat| (beat.as_millis() as u16).into());
        let mut word = Vec::new();
        let mut open = true;
        let ended = loop {
            let mut polled = vec![PollFd::new(self.descriptor.as_fd(), PollFlags::POLLIN)];
            if open {
                polled.push(PollFd::new(from.as_fd(), PollFlags::POLLIN));
            }
            let hosts = companions.descriptors();
            polled.extend(hosts.map(|host| PollFd::new(host, PollFlags::POLLIN)));
            match poll(&mut polled, bound) {
                Ok(_) | Err(nix::Error::EINTR) => {}
                Err(error) => return Err(VmError::system("wait for the machine")(error)),
            }
            let spoke = open && polled.get(1).and_then(PollFd::any).unwrap_or(false);
            drop(polled);
            if companions.tend() {
                // The machine cannot leave the node: its guest is asked to power off.
                let _ = kill(child, Signal::SIGTERM);
            }
            if spoke {
                open = listen(&mut from, &mut word);
            }
            self.pass_on(child);
            if let Some(ended) = reap(child)? {
                break ended;
            }
        };
        while open {
            open = listen(&mut from, &mut word);
        }
        let (status, usage) = ended;
        let word = serde_json::from_slice(&word).map_err(|_| {
            let signal = libc::WIFSIGNALED(status).then(|| libc::WTERMSIG(status));
            (libc::WEXITSTATUS(status), signal)
        });
        Ok((word, usage))
    }

    fn pass_on(&self, child: Pid) {
        while let Some((signal, code)) = self.next_wish() {
            // The terminal sent it to the machine's process as well.
            if code != SI_KERNEL {
                // It may have ended already.
                let _ = kill(child, signal);
            }
        }
    }

    /// The next signal that asks for the machine's end, and its `si_code`.
    fn next_wish(&self) -> Option<(Signal, i32)> {
        while let Ok(Some(information)) = self.descriptor.read_signal() {
            match Signal::try_from(information.ssi_signo as i32) {
                Ok(Signal::SIGCHLD) | Err(_) => {}
                Ok(signal) => {
                    self.end_asked.set(true);
                    return Some((signal, information.ssi_code));
                }
            }
        }
        None
    }

    /// Whether one of the signals that have come so far asks for the machine's end.
    fn asked_for_end(&self) -> bool {
        while self.next_wish().is_some() {}
        self.end_asked.get()
    }
}

/// Reads once; whether more may come.
fn listen(from: &mut UnixStream, word: &mut Vec<u8>) -> bool {
    let mut piece = [0; 16 << 10];
    match from.read(&mut piece) {
        Ok(count @ 1..) if word.len() < MESSAGE_BYTES_MAX => {
            word.extend(piece.iter().take(count));
            true
        }
        Err(error) => error.kind() == io::ErrorKind::Interrupted,
        Ok(_) => false,
    }
}

/// The status of `child` and the most memory it had resident, once it has ended.
pub(super) fn reap(child: Pid) -> Result<Option<(i32, u64)>, VmError> {
    let mut status = 0;
    // SAFETY: a structure of integers, for which zero is a value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: both structures outlive the call, which fills them.
    let ended = unsafe { libc::wait4(child.as_raw(), &mut status, libc::WNOHANG, &mut usage) };
    match ended {
        0 => Ok(None),
        pid if pid == child.as_raw() => Ok(Some((status, usage.ru_maxrss as u64 * 1024))),
        _ => Err(VmError::system("wait for the machine")(
            io::Error::last_os_error(),
        )),
    }
}

/// Whether SIGKILL ended a process with this status.
pub(super) fn was_killed(status: i32) -> bool {
    libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGKILL
}

/// The mode of the terminal at the start, for when a machine's process was killed
/// in raw mode. None where the console is elsewhere: then nobody changes the mode,
/// and a process in the background that sets it is stopped (SIGTTOU).
struct Terminal(Option<Termios>);

impl Terminal {
    fn remember(plan: &Plan) -> Terminal {
        let input = io::stdin();
        let here = plan.console == ConsoleArg::Stdio && input.is_terminal();
        Terminal(here.then(|| tcgetattr(input.as_fd()).ok()).flatten())
    }

    fn restore(&self) {
        if let Some(mode) = &self.0 {
            let _ = tcsetattr(io::stdin().as_fd(), SetArg::TCSANOW, mode);
        }
    }
}
