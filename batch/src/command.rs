//! Calls of a batch system's commands.

use std::ffi::{OsStr, OsString};
use std::io::{self, Read, Write as _};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

use crate::BatchError;

/// How long a batch system's command may take. Its own clients wait 10 s and more for a server.
pub const CALL_BOUND: Duration = Duration::from_secs(30);
/// How often a command is looked at while it runs.
const LOOK: Duration = Duration::from_millis(5);
/// The most that a command may say, bytes.
const SAID_MAX: u64 = 64 << 20;
/// The last words of an error that are repeated, characters.
const ERROR_MAX: usize = 300;

/// One command of a batch system.
pub(crate) struct Call {
    pub system: &'static str,
    pub command: &'static str,
    arguments: Vec<OsString>,
    environment: Vec<(&'static str, OsString)>,
    input: Vec<u8>,
}

/// What a command has said, and whether it did what it should.
pub(crate) struct Said {
    pub success: bool,
    pub output: String,
    /// On one line.
    pub error: String,
}

impl Said {
    /// Why it did not do what it should. One of the words in `silent` in what it says means that
    /// its server does not answer.
    pub fn failure(&self, system: &'static str, silent: &[&str]) -> BatchError {
        // Some say what is wrong with a request on standard output.
        let said = match self.error.is_empty() {
            true => one_line(&self.output),
            false => self.error.clone(),
        };
        let said = match said.is_empty() {
            true => "its command failed and said nothing".into(),
            false => said,
        };
        match silent.iter().any(|words| said.contains(words)) {
            true => BatchError::Silent { system, said },
            false => BatchError::Refused { system, said },
        }
    }
}

impl Call {
    pub fn new(system: &'static str, command: &'static str) -> Call {
        Call {
            system,
            command,
            arguments: Vec::new(),
            environment: Vec::new(),
            input: Vec::new(),
        }
    }

    pub fn argument(mut self, argument: impl Into<OsString>) -> Call {
        self.arguments.push(argument.into());
        self
    }

    pub fn arguments<Word: AsRef<OsStr>>(mut self, words: impl IntoIterator<Item = Word>) -> Call {
        let words = words.into_iter().map(|word| word.as_ref().to_owned());
        self.arguments.extend(words);
        self
    }

    pub fn environment(mut self, name: &'static str, value: impl Into<OsString>) -> Call {
        self.environment.push((name, value.into()));
        self
    }

    pub fn input(mut self, input: Vec<u8>) -> Call {
        self.input = input;
        self
    }

    /// Runs it, for [`CALL_BOUND`] at most.
    pub fn run(self) -> Result<Said, BatchError> {
        self.run_within(CALL_BOUND)
    }

    fn run_within(self, bound: Duration) -> Result<Said, BatchError> {
        let system = |error| BatchError::System {
            what: format!("cannot run {}", self.command),
            error,
        };
        let mut child = Command::new(self.command)
            .args(&self.arguments)
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            // Words of errors are compared.
            .env("LC_ALL", "C")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => BatchError::Missing {
                    system: self.system,
                    command: self.command,
                },
                _ => system(error),
            })?;
        let begun = Instant::now();
        let input = child.stdin.take();
        std::thread::spawn(move || {
            // A command that does not read it says why.
            let _ = input.map(|mut pipe| pipe.write_all(&self.input));
        });
        let output = read(child.stdout.take());
        let error = read(child.stderr.take());
        let left = || bound.saturating_sub(begun.elapsed());
        let success = wait(&mut child, bound).map_err(system)?;
        // A process that it has left behind may have the pipes still.
        let said = success.and_then(|success| {
            let text = |pipe: Receiver<Vec<u8>>| pipe.recv_timeout(left()).ok();
            let text = |pipe| Some(String::from_utf8_lossy(&text(pipe)?).into_owned());
            Some(Said {
                success,
                output: text(output)?,
                error: one_line(&text(error)?),
            })
        });
        said.ok_or_else(|| BatchError::Silent {
            system: self.system,
            said: format!("{} did not end within {} s", self.command, bound.as_secs()),
        })
    }
}

/// All that comes until the end, at the end.
fn read(pipe: Option<impl Read + Send + 'static>) -> Receiver<Vec<u8>> {
    let (sender, receiver) = sync_channel(1);
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        // What has come until then is what there is.
        let _ = pipe.map(|pipe| pipe.take(SAID_MAX).read_to_end(&mut bytes));
        // The caller may wait no longer.
        let _ = sender.send(bytes);
    });
    receiver
}

/// Whether it has ended well; `None`: it took too long, and was ended.
fn wait(child: &mut Child, bound: Duration) -> io::Result<Option<bool>> {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status.success()));
        }
        if begun.elapsed() > bound {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        std::thread::sleep(LOOK);
    }
}

/// The last words, without control characters.
fn one_line(text: &str) -> String {
    let words: Vec<&str> = text.split_whitespace().collect();
    let line: Vec<char> = words
        .join(" ")
        .chars()
        .filter(|c| !c.is_control())
        .collect();
    let start = line.len().saturating_sub(ERROR_MAX);
    line.into_iter().skip(start).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Call {
        Call::new("a test", "sh").arguments(["-c", script])
    }

    #[test]
    fn a_call_has_output_errors_and_an_end() {
        let said = shell("cat; echo $X >&2; exit 3")
            .environment("X", "two\n words")
            .input(b"typed".to_vec())
            .run()
            .unwrap();
        assert!(!said.success);
        assert_eq!((&said.output[..], &said.error[..]), ("typed", "two words"));
    }

    #[test]
    fn a_call_that_takes_too_long_is_ended() {
        let begun = Instant::now();
        let silent = shell("exec sleep 60").run_within(Duration::from_millis(50));
        assert!(matches!(silent, Err(BatchError::Silent { .. })));
        assert!(begun.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn a_process_that_keeps_the_pipes_does_not_keep_the_caller() {
        let begun = Instant::now();
        let silent = shell("sleep 60 & echo 7").run_within(Duration::from_millis(200));
        assert!(matches!(silent, Err(BatchError::Silent { .. })));
        assert!(begun.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn a_command_that_is_missing_is_told_apart() {
        let missing = Call::new("Nothing", "weft-no-such-command").run();
        let Err(error) = missing else {
            panic!("it runs");
        };
        assert_eq!(
            error.to_string(),
            "Nothing is not here: its command weft-no-such-command is not in PATH"
        );
    }
}
