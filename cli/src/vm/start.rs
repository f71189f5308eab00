//! `weft vm start`: a machine that outlives the command and its terminal.
//!
//! The command forks. The child is the launcher, exactly as under `weft vm run`, in a
//! session of its own: without a terminal, with the console on a socket and its
//! messages in a log file. The parent waits until the machine answers at its API, or
//! until the launcher has ended, and then shows why.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, dup2_stderr, dup2_stdin, dup2_stdout, fork, setpgid, setsid};
use weft_api::client::Client;
use weft_api::{State, VmView};
use weft_machine::CHECKPOINT_SECONDS_MAX;
use weft_node::keeper::Keeper;
use weft_node::launch::machine::take_signals;
use weft_node::launch::{SignalEvent, Signals};
use weft_platform::clock::begin_tsc_measurement;

use super::args::VmStartArgs;
use super::error::VmError;
use super::placed::{self, Checked};
use super::registry;
use super::registry::VIEW_BOUND;
use super::run::{self as launcher, set_up_failed};
use super::suboptions::ConsoleArg;

/// How often the parent asks whether the machine answers.
const INTERVAL_MS: u16 = 20;
/// How long the parent waits for a start, beside the time in which a checkpoint is read. Every
/// other step of a start has a shorter bound.
const START_BOUND: Duration = Duration::from_secs(120);
/// How long a launcher may take to end after a signal: it gives the guest 10 s.
const END_BOUND: Duration = Duration::from_secs(30);
/// What of the log is shown when a machine did not start.
const LOG_BYTES_SHOWN: usize = 8 << 10;

/// Starts a machine and leaves it running.
pub fn run(args: &mut VmStartArgs, started: Instant) -> anyhow::Result<ExitCode> {
    let VmStartArgs { run: options, json } = args;
    if options.console == ConsoleArg::Stdio {
        options.console = ConsoleArg::Socket(None);
    }
    // What can be judged now is reported on the terminal, without a log.
    let mut plan = match placed::check(options) {
        Ok(Checked::Runs(plan)) => *plan,
        Ok(Checked::Shown(code)) => return Ok(code),
        Err(error) => return Ok(set_up_failed(&error)),
    };
    let keeper = match Keeper::of_environment() {
        Ok(keeper) => keeper,
        Err(error) => return Ok(set_up_failed(&error.into())),
    };
    let directory = registry::directory()?;
    if options.name.is_some() && registry::is_taken(&registry::api_path(&directory, &plan.name)) {
        return Ok(set_up_failed(&VmError::NameTaken(plan.name).into()));
    }
    // Before the fork: a signal that comes from now on reaches the launcher, too.
    let signals = take_signals()?;
    // SAFETY: this process has one thread: `main` has called nothing that makes another. It is
    // another process that asks a cluster.
    match unsafe { fork() }.context("cannot start the launcher")? {
        ForkResult::Child => {
            let tsc = begin_tsc_measurement();
            let pid = std::process::id().to_string();
            let log = log_path(&directory, &pid);
            if options.name.is_none() {
                plan.name = pid;
            }
            let detached = detach(&log, keeper.is_some());
            // Outside the terminal's group. A signal that came meanwhile ends it here.
            signals.give_back();
            drop(signals);
            match detached {
                Ok(()) => launcher::run_plan(&plan, options, keeper, (started, tsc)),
                Err(error) => Ok(set_up_failed(&error)),
            }
        }
        ForkResult::Parent { child } => {
            let launcher = Launcher {
                child,
                name: options.name.clone().unwrap_or(child.to_string()),
                log: log_path(&directory, &child.to_string()),
                directory,
            };
            let reading = plan.restore.map_or(0, |_| CHECKPOINT_SECONDS_MAX);
            let bound = START_BOUND + Duration::from_secs(reading);
            launcher.wait(&signals, bound, *json)
        }
    }
}

/// Where the launcher of a machine writes its messages. While the machine starts, its
/// launcher's pid stands for its name: a machine that runs may have the name.
pub fn log_path(directory: &Path, name: &str) -> PathBuf {
    directory.join(format!("{name}.log"))
}

/// Leaves the terminal's process group, and the session unless a keeper ends the machine. Where the
/// kernel shares processors between sessions (sched(7), autogroups), those of a keeper's machines
/// would wait for each other in a move.
pub fn detach(log: &Path, has_keeper: bool) -> anyhow::Result<()> {
    match has_keeper {
        true => setpgid(Pid::from_raw(0), Pid::from_raw(0)).context("cannot make a group")?,
        false => setsid().map(drop).context("cannot make a session")?,
    }
    let nothing = File::open("/dev/null").context("cannot open /dev/null")?;
    // An earlier launcher with this pid may have left one.
    let log = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(log)
        .with_context(|| format!("cannot write the log {}", log.display()))?;
    dup2_stdin(&nothing).context("cannot leave standard input")?;
    dup2_stdout(&log).context("cannot leave standard output")?;
    dup2_stderr(&log).context("cannot leave standard error")?;
    Ok(())
}

/// The launcher, seen from the process that started it.
struct Launcher {
    child: Pid,
    name: String,
    /// Where its messages are while it starts.
    log: PathBuf,
    directory: PathBuf,
}

impl Launcher {
    fn wait(&self, signals: &Signals, bound: Duration, json: bool) -> anyhow::Result<ExitCode> {
        let mut deadline = Instant::now() + bound;
        let mut asked = false;
        loop {
            if let Some(code) = self.ended()? {
                return self.report_end(code);
            }
            if let (false, Some(view)) = (asked, self.view()) {
                return self.report(&view, json);
            }
            while let Some(request) = signals.next() {
                if let SignalEvent::Signal { .. } = request {
                    // The start was called off.
                    kill(self.child, Signal::SIGTERM).context("cannot end the launcher")?;
                    asked = true;
                    deadline = Instant::now() + END_BOUND;
                }
            }
            if Instant::now() > deadline {
                bail!(
                    "vm {}: pid {} has neither started the machine nor ended; its log is {}",
                    self.name,
                    self.child,
                    self.log.display()
                );
            }
            let descriptor = signals.descriptor();
            let mut ready = [PollFd::new(descriptor, PollFlags::POLLIN)];
            match poll(&mut ready, PollTimeout::from(INTERVAL_MS)) {
                Ok(_) | Err(nix::errno::Errno::EINTR) => {}
                Err(error) => return Err(error).context("cannot wait for the launcher"),
            }
        }
    }

    /// The exit code of the launcher, once it has ended.
    fn ended(&self) -> anyhow::Result<Option<u8>> {
        let status = waitpid(self.child, Some(WaitPidFlag::WNOHANG));
        Ok(match status.context("cannot wait for the launcher")? {
            WaitStatus::Exited(_, code) => Some(code as u8),
            WaitStatus::Signaled(_, signal, _) => Some(128 + signal as u8),
            _ => None,
        })
    }

    /// What the machine says of itself, once it has been put together.
    fn view(&self) -> Option<VmView> {
        let path = registry::api_path(&self.directory, &self.name);
        let view = Client::new(&path).view(VIEW_BOUND).ok()?;
        let own = view.pid == self.child.as_raw() as u32;
        (own && view.state != State::Starting).then_some(view)
    }

    fn report(&self, view: &VmView, json: bool) -> anyhow::Result<ExitCode> {
        let log = log_path(&self.directory, &self.name);
        fs::rename(&self.log, &log)
            .with_context(|| format!("cannot rename the log to {}", log.display()))?;
        if json {
            println!("{}", serde_json::to_string_pretty(view)?);
        } else {
            println!("{}", self.name);
            eprintln!(
                "weft: vm {name} is {} (pid {}): `weft vm console {name}` attaches to its console, \
                 its log is {}",
                view.state.name(),
                self.child,
                log.display(),
                name = self.name,
            );
        }
        Ok(ExitCode::SUCCESS)
    }

    /// The machine ended before it was seen: its messages, and its exit code.
    fn report_end(&self, code: u8) -> anyhow::Result<ExitCode> {
        let text = fs::read(&self.log).unwrap_or_default();
        let shown = &text[text.len().saturating_sub(LOG_BYTES_SHOWN)..];
        io::stderr().write_all(shown)?;
        let _ = fs::remove_file(&self.log);
        Ok(ExitCode::from(code))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_that_fails_leaves_the_log_of_the_machine_that_has_the_name() {
        let directory = std::env::temp_dir().join(format!("weft-start-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let running = log_path(&directory, "web");
        fs::write(&running, "of the machine that runs").unwrap();
        let child = Pid::from_raw(4_194_999);
        let launcher = Launcher {
            child,
            name: "web".into(),
            log: log_path(&directory, &child.to_string()),
            directory: directory.clone(),
        };
        fs::write(&launcher.log, "weft: the name is taken\n").unwrap();
        assert_eq!(launcher.report_end(125).unwrap(), ExitCode::from(125));
        assert!(!launcher.log.exists());
        assert_eq!(
            fs::read_to_string(&running).unwrap(),
            "of the machine that runs"
        );
        fs::remove_dir_all(&directory).unwrap();
    }
}
