//! One command, run in a session of its own and bounded in time.
//!
//! Invariants: [`Running::finish`] returns at most [`GRACE`] after the command's
//! end or its bound, whichever is first; afterwards no process of the command
//! is alive. What had to be killed for that is in the [`Outcome`].

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use crate::processes::{self, Family};

/// How long the children of a command that has ended may take to end.
pub const GRACE: Duration = Duration::from_secs(3);
/// How often `/proc` is read for new members while the command runs.
const SAMPLE: Duration = Duration::from_millis(100);

/// What to run.
#[derive(Debug, Clone)]
pub struct Invocation {
    /// Program and arguments.
    pub command: Vec<OsString>,
    /// Where; `stdout` and `stderr` are written there.
    pub directory: PathBuf,
    /// Standard input; `/dev/null` when absent.
    pub stdin: Option<PathBuf>,
    /// Added to the environment.
    pub environment: Vec<(OsString, OsString)>,
    /// After this the command counts as hung.
    pub bound: Duration,
}

impl Invocation {
    /// `command` in `directory`, bounded to a minute.
    pub fn new<S: AsRef<OsStr>>(command: &[S], directory: &Path) -> Invocation {
        Invocation {
            command: command.iter().map(|word| word.as_ref().into()).collect(),
            directory: directory.to_path_buf(),
            stdin: None,
            environment: Vec::new(),
            bound: Duration::from_secs(60),
        }
    }

    /// The same with another bound.
    pub fn bounded(mut self, bound: Duration) -> Invocation {
        self.bound = bound;
        self
    }

    /// For a report: the command as a shell would read it, nearly.
    pub fn to_line(&self) -> String {
        let words: Vec<_> = self.command.iter().map(|w| w.to_string_lossy()).collect();
        words.join(" ")
    }
}

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// By this exit status.
    Exit(i32),
    Signal(i32),
    /// It did not, and was killed.
    Hang,
}

impl End {
    fn from_status(status: ExitStatus) -> End {
        match (status.code(), status.signal()) {
            (Some(code), _) => End::Exit(code),
            (None, Some(signal)) => End::Signal(signal),
            (None, None) => End::Exit(-1),
        }
    }
}

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            End::Exit(code) => write!(f, "exit {code}"),
            End::Signal(signal) => write!(f, "signal {signal}"),
            End::Hang => write!(f, "hang"),
        }
    }
}

/// What came of it.
#[derive(Debug, Clone)]
pub struct Outcome {
    pub end: End,
    /// From start to end of the first process.
    pub wall: Duration,
    /// Where standard output is.
    pub stdout: PathBuf,
    /// What was written to standard error, at most its last 64 KiB.
    pub stderr: String,
    /// After a hang: where every process waited.
    pub stacks: Vec<String>,
    /// Processes that were alive [`GRACE`] after the end, and were killed.
    pub leftovers: Vec<String>,
}

/// A command that runs.
pub struct Running {
    pid: i32,
    started: Instant,
    bound: Duration,
    directory: PathBuf,
    ended: Receiver<(End, Instant)>,
    family: Family,
}

/// Starts a command.
pub fn start(invocation: &Invocation) -> Result<Running> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let tag = format!(
        "{}-{}",
        std::process::id(),
        COUNT.fetch_add(1, Ordering::Relaxed)
    );
    let Some((program, arguments)) = invocation.command.split_first() else {
        bail!("an invocation without a program");
    };
    fs::create_dir_all(&invocation.directory)?;
    let stdout = File::create(invocation.directory.join("stdout"))?;
    let stderr = File::create(invocation.directory.join("stderr"))?;
    let stdin = match &invocation.stdin {
        Some(path) => Stdio::from(File::open(path).with_context(|| format!("{}", path.display()))?),
        None => Stdio::null(),
    };
    let mut command = Command::new(program);
    command
        .args(arguments)
        .current_dir(&invocation.directory)
        .envs(invocation.environment.iter().map(|(k, v)| (k, v)))
        .env(processes::TAG, &tag)
        .env("LC_ALL", "C")
        .stdin(stdin)
        .stdout(stdout)
        .stderr(stderr);
    // SAFETY: between fork and exec only `setsid` is called, which is
    // async-signal-safe and allocates nothing.
    unsafe {
        command.pre_exec(|| {
            nix::unistd::setsid()?;
            Ok(())
        });
    }
    let started = Instant::now();
    let mut child = command
        .spawn()
        .with_context(|| format!("cannot start {}", program.to_string_lossy()))?;
    let pid = child.id() as i32;
    let (sender, ended) = mpsc::channel();
    thread::Builder::new()
        .name("waiter".into())
        .spawn(move || {
            let end = child.wait().map_or(End::Hang, End::from_status);
            // Nobody listens any more after a hang; that is fine.
            let _ = sender.send((end, Instant::now()));
        })?;
    Ok(Running {
        pid,
        started,
        bound: invocation.bound,
        directory: invocation.directory.clone(),
        ended,
        family: Family::new(pid, &tag),
    })
}

impl Running {
    /// The number of the first process.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// When it was started.
    pub fn started(&self) -> Instant {
        self.started
    }

    /// The processes that belong to it now.
    pub fn members(&mut self) -> Vec<processes::Process> {
        self.family.members()
    }

    /// What it wrote to standard error so far.
    pub fn stderr(&self) -> String {
        read_tail(&self.directory.join("stderr"))
    }

    /// Waits for the end, or the bound; cleans up.
    pub fn finish(mut self) -> Result<Outcome> {
        let (end, at) = self.wait();
        let stacks = match end {
            End::Hang => {
                let members = self.family.members();
                members.iter().map(processes::where_it_waits).collect()
            }
            _ => Vec::new(),
        };
        let leftovers = if end == End::Hang {
            Vec::new()
        } else {
            self.wait_for_family()
        };
        self.family.kill();
        Ok(Outcome {
            end,
            wall: at.duration_since(self.started),
            stdout: self.directory.join("stdout"),
            stderr: self.stderr(),
            stacks,
            leftovers,
        })
    }

    fn wait(&mut self) -> (End, Instant) {
        loop {
            let now = Instant::now();
            let left = self.bound.saturating_sub(now.duration_since(self.started));
            if left.is_zero() {
                return (End::Hang, now);
            }
            match self.ended.recv_timeout(left.min(SAMPLE)) {
                Ok(ended) => return ended,
                Err(RecvTimeoutError::Timeout) => {
                    self.family.members();
                }
                Err(RecvTimeoutError::Disconnected) => return (End::Hang, now),
            }
        }
    }

    /// Waits until no member is left, at most [`GRACE`]; returns those that are.
    fn wait_for_family(&mut self) -> Vec<String> {
        let deadline = Instant::now() + GRACE;
        loop {
            let members = self.family.members();
            if members.is_empty() || Instant::now() >= deadline {
                return members.iter().map(processes::describe).collect();
            }
            thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Whatever way a test leaves, its processes do not stay.
impl Drop for Running {
    fn drop(&mut self) {
        self.family.kill();
    }
}

/// Starts a command and waits for it.
pub fn run(invocation: &Invocation) -> Result<Outcome> {
    start(invocation)?.finish()
}

fn read_tail(path: &Path) -> String {
    const TAIL_BYTES: usize = 64 << 10;
    let bytes = fs::read(path).unwrap_or_default();
    let start = bytes.len().saturating_sub(TAIL_BYTES);
    String::from_utf8_lossy(&bytes[start..]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("weft-run-{name}-{}", std::process::id()))
    }

    #[test]
    fn ends_are_told_apart() {
        let directory = scratch("ends");
        let run = |script: &str| {
            let invocation = Invocation::new(&["sh", "-c", script], &directory);
            run(&invocation).expect("sh runs").end
        };
        assert_eq!(run("exit 7"), End::Exit(7));
        assert_eq!(run("kill -TERM $$"), End::Signal(15));
        fs::remove_dir_all(&directory).expect("it was made");
    }

    #[test]
    fn a_hang_is_killed_and_described() {
        let directory = scratch("hang");
        let invocation = Invocation::new(&["sh", "-c", "sleep 30 & sleep 30"], &directory)
            .bounded(Duration::from_millis(300));
        let outcome = run(&invocation).expect("sh runs");
        assert_eq!(outcome.end, End::Hang);
        assert!(
            outcome
                .stacks
                .iter()
                .any(|stack| stack.contains("sleep 30"))
        );
        assert!(outcome.wall < Duration::from_secs(5));
        fs::remove_dir_all(&directory).expect("it was made");
    }

    #[test]
    fn a_child_that_stays_is_found_even_in_another_session() {
        let directory = scratch("orphan");
        let script = "env -i setsid sleep 31 & sleep 0.3; exit 0";
        let outcome = run(&Invocation::new(&["sh", "-c", script], &directory)).expect("sh runs");
        assert_eq!(outcome.end, End::Exit(0));
        assert_eq!(outcome.leftovers.len(), 1, "{:?}", outcome.leftovers);
        assert!(outcome.leftovers[0].contains("sleep 31"));
        fs::remove_dir_all(&directory).expect("it was made");
    }
}
