//! A virtual machine under test: its process, and the lines of its console with
//! the time at which each came.
//!
//! Invariants: the machine is gone when the [`Guest`] is; a
//! wait ends at its bound, whatever the guest does.

use std::fs;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

/// More of a console than this is thrown away, and said.
const CONSOLE_BYTES_MAX: usize = 16 << 20;
/// How long a machine may take to end after its process was killed.
const KILL: Duration = Duration::from_secs(5);

/// A guest's command did not succeed.
const COMMAND_FAILED: &str = "weft-told: failed";

/// A script that runs each command once, and again and again until [`Guest::tell`], so that the
/// guest works as long as a test needs it. [`Ended::all_succeeded`] judges.
pub fn until_told(commands: &[&str]) -> String {
    let repeat = |command: &&str| {
        format!("(while {command} || echo {COMMAND_FAILED}; [ ! -e /tmp/told ]; do :; done) & ")
    };
    let work: String = commands.iter().map(repeat).collect();
    work + "read line; touch /tmp/told; wait"
}

/// A line of the console.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    /// Since the process was started.
    pub at: Duration,
    /// Without its end.
    pub text: String,
    /// It has an end; the last line of a console may have none.
    pub is_whole: bool,
}

/// A machine that runs.
pub struct Guest {
    child: Child,
    input: Option<ChildStdin>,
    started: Instant,
    coming: Receiver<Line>,
    lines: Vec<Line>,
    errors: Option<JoinHandle<String>>,
}

/// A machine that ended, or was ended.
#[derive(Debug, Clone)]
pub struct Ended {
    /// `None` when it did not end within its bound and was killed.
    pub status: Option<ExitStatus>,
    /// From start to end.
    pub took: Duration,
    /// The whole console.
    pub lines: Vec<Line>,
    /// What the monitor wrote to standard error.
    pub stderr: String,
}

impl Guest {
    /// Starts `command`, whose standard output is the console.
    pub fn start(command: &mut Command) -> Result<Guest> {
        let started = Instant::now();
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", command.get_program().display()))?;
        let output = child.stdout.take().context("standard output is a pipe")?;
        let errors = child.stderr.take().context("standard error is a pipe")?;
        let (send, coming) = mpsc::channel();
        thread::spawn(move || read_lines(output, started, &send));
        Ok(Guest {
            input: child.stdin.take(),
            child,
            started,
            coming,
            lines: Vec::new(),
            errors: Some(thread::spawn(move || read_all(errors))),
        })
    }

    /// The monitor's process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for a whole line that contains `text`, from the first line on; `None`
    /// when the bound or the machine's end comes first.
    pub fn wait_for(&mut self, text: &str, bound: Duration) -> Option<Line> {
        if let Some(line) = self.lines.iter().find(|line| line.text.contains(text)) {
            return Some(line.clone());
        }
        let deadline = Instant::now() + bound;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let line = self.coming.recv_timeout(left).ok()?;
            self.lines.push(line.clone());
            if line.text.contains(text) {
                return Some(line);
            }
        }
    }

    /// What has come, as far as it was waited for.
    pub fn lines(&self) -> &[Line] {
        &self.lines
    }

    /// Types on the console.
    pub fn write(&mut self, text: &str) -> Result<()> {
        let input = self.input.as_mut().context("the console is closed")?;
        input.write_all(text.as_bytes())?;
        Ok(input.flush()?)
    }

    /// Ends the work of [`until_told`].
    pub fn tell(&mut self) -> Result<()> {
        self.write("enough\n")
    }

    /// Whether the monitor has not ended.
    pub fn is_running(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_none())
    }

    /// Kills the monitor: the guest is gone at once.
    pub fn kill(&mut self) -> Result<()> {
        Ok(self.child.kill()?)
    }

    /// Waits for the end, at most `bound`; then kills.
    pub fn finish(mut self, bound: Duration) -> Result<Ended> {
        let deadline = Instant::now() + bound;
        let status = loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.coming.recv_timeout(left) {
                Ok(line) => self.lines.push(line),
                Err(RecvTimeoutError::Timeout) => break None,
                // The console is closed: the process ends, or has.
                Err(RecvTimeoutError::Disconnected) => break self.reap(deadline)?,
            }
        };
        let took = self.started.elapsed();
        if status.is_none() {
            self.child.kill()?;
            self.reap(Instant::now() + KILL)?;
        }
        let stderr = self.errors.take().and_then(|reader| reader.join().ok());
        Ok(Ended {
            status,
            took,
            lines: std::mem::take(&mut self.lines),
            stderr: stderr.unwrap_or_default(),
        })
    }

    fn reap(&mut self, deadline: Instant) -> Result<Option<ExitStatus>> {
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(Some(status));
            }
            if Instant::now() > deadline {
                return Ok(None);
            }
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // Ended already: nothing to kill, and its status was taken.
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

impl Ended {
    /// The console as one text.
    pub fn console(&self) -> String {
        let lines: Vec<&str> = self.lines.iter().map(|line| line.text.as_str()).collect();
        lines.join("\n")
    }

    /// What was written to the console, with ends of lines where there were any: the machine
    /// that continues this one may write the rest of the last line.
    pub fn written(&self) -> String {
        let end = |line: &Line| if line.is_whole { "\n" } else { "" };
        let lines = self.lines.iter();
        lines
            .flat_map(|line| [line.text.as_str(), end(line)])
            .collect()
    }

    /// The first line that contains `text`.
    pub fn line(&self, text: &str) -> Option<&Line> {
        self.lines.iter().find(|line| line.text.contains(text))
    }

    /// Whether the machine ended by itself, and well.
    pub fn ended_well(&self) -> bool {
        self.status.is_some_and(|status| status.success())
    }

    /// Whether each run of [`until_told`] has succeeded.
    pub fn all_succeeded(&self) -> bool {
        self.line(COMMAND_FAILED).is_none()
    }

    /// The last `count` lines, for a report.
    pub fn tail(&self, count: usize) -> String {
        let from = self.lines.len().saturating_sub(count);
        let lines: Vec<&str> = self.lines[from..]
            .iter()
            .map(|line| line.text.as_str())
            .collect();
        lines.join("\n")
    }
}

/// The exit code of a machine that ended by itself within its bound.
pub fn code(ended: &Ended) -> Result<i32> {
    let status = ended.status.with_context(|| {
        let (stderr, tail) = (&ended.stderr, ended.tail(20));
        format!("it did not end; stderr: {stderr}\nconsole: {tail}")
    })?;
    status
        .code()
        .with_context(|| format!("{status}; stderr: {}", ended.stderr))
}

/// Fails unless a machine ended with this code and said all of this.
pub fn ended_with(ended: &Ended, wanted: i32, says: &[&str]) -> Result<()> {
    let found = code(ended)?;
    ensure!(
        found == wanted,
        "exit {found}, not {wanted}; stderr: {}\n{}",
        ended.stderr,
        ended.tail(20)
    );
    for text in says {
        ensure!(
            ended.stderr.contains(text),
            "`{text}` is not in: {}",
            ended.stderr
        );
    }
    Ok(())
}

/// The files that machines left in the run directory of a test.
pub fn leftovers(run_directory: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    // The directory does not exist when nothing was started.
    for entry in fs::read_dir(run_directory.join("weft/vm"))
        .into_iter()
        .flatten()
    {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    Ok(names)
}

/// Splits what comes at line ends. What has none is a line when the output ends,
/// not before.
fn read_lines(mut output: impl Read, started: Instant, send: &mpsc::Sender<Line>) {
    let mut buffer = [0; 64 << 10];
    let mut rest = Vec::new();
    let mut seen = 0;
    while let Ok(count @ 1..) = output.read(&mut buffer) {
        let at = started.elapsed();
        seen += count;
        if seen > CONSOLE_BYTES_MAX {
            // Read on, so that the guest is not held up.
            continue;
        }
        rest.extend_from_slice(&buffer[..count]);
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = rest.drain(..=end).collect();
            let text = String::from_utf8_lossy(&line).trim_end().to_string();
            let is_whole = true;
            if send.send(Line { at, text, is_whole }).is_err() {
                return;
            }
        }
    }
    if !rest.is_empty() || seen > CONSOLE_BYTES_MAX {
        // What it ends with may be inside of a line.
        let mut text = String::from_utf8_lossy(&rest).to_string();
        if seen > CONSOLE_BYTES_MAX {
            text = format!("[the console wrote {seen} bytes; the rest is not kept]");
        }
        let at = started.elapsed();
        let is_whole = false;
        let _ = send.send(Line { at, text, is_whole });
    }
}

fn read_all(mut errors: impl Read) -> String {
    let mut bytes = Vec::new();
    let mut buffer = [0; 4096];
    while let Ok(count @ 1..) = errors.read(&mut buffer) {
        if bytes.len() < CONSOLE_BYTES_MAX {
            bytes.extend_from_slice(&buffer[..count]);
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUND: Duration = Duration::from_secs(20);

    fn shell(script: &str) -> Guest {
        Guest::start(Command::new("sh").args(["-c", script])).expect("there is a shell")
    }

    #[test]
    fn lines_come_with_their_time() {
        let mut guest = shell("echo one; read answer; echo \"got $answer\" >&2; printf two");
        assert!(guest.wait_for("one", BOUND).is_some());
        guest.write("hello\n").expect("the console is open");
        let ended = guest.finish(BOUND).expect("it ends");
        assert!(ended.ended_well());
        assert_eq!(ended.console(), "one\ntwo");
        assert_eq!(ended.written(), "one\ntwo");
        let whole = shell("echo one").finish(BOUND).expect("it ends");
        assert_eq!(
            (whole.console().as_str(), whole.written().as_str()),
            ("one", "one\n")
        );
        assert_eq!(ended.stderr, "got hello\n");
        assert!(ended.lines[0].at <= ended.lines[1].at);
    }

    #[test]
    fn a_machine_that_hangs_is_killed() {
        let mut guest = shell("echo up; exec sleep 100");
        assert!(guest.wait_for("up", BOUND).is_some());
        let ended = guest.finish(Duration::from_millis(200)).expect("killed");
        assert_eq!(ended.status, None);
        assert!(ended.line("up").is_some());
    }

    #[test]
    fn waiting_ends_with_the_machine() {
        let mut guest = shell("echo nothing");
        assert_eq!(guest.wait_for("something", BOUND), None);
        assert!(guest.finish(BOUND).expect("it ends").ended_well());
    }
}
