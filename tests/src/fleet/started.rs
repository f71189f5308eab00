//! One process of the test, which is asked whether it has ended, and not waited for.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::run::End;

/// What to start.
pub struct Words<'a> {
    /// Words before it that bring it to its host.
    pub prefix: Vec<OsString>,
    pub command: Vec<OsString>,
    pub environment: Vec<(OsString, OsString)>,
    /// Where `NAME.out` and `NAME.err` are. Both grow with each process of the same name.
    pub directory: &'a Path,
    pub name: &'a str,
}

/// A process in a session of its own.
pub struct Started {
    child: Child,
    pub begun: Instant,
    pub output: PathBuf,
    pub errors: PathBuf,
    end: Option<End>,
}

impl Started {
    pub fn begin(words: Words<'_>) -> Result<Started> {
        let all: Vec<OsString> = words.prefix.into_iter().chain(words.command).collect();
        let [program, arguments @ ..] = &all[..] else {
            bail!("nothing to start");
        };
        fs::create_dir_all(words.directory)?;
        let output = words.directory.join(format!("{}.out", words.name));
        let errors = words.directory.join(format!("{}.err", words.name));
        let mut command = Command::new(program);
        command
            .args(arguments)
            .envs(words.environment)
            .env("LC_ALL", "C")
            .current_dir(words.directory)
            .stdin(Stdio::null())
            .stdout(appended(&output)?)
            .stderr(appended(&errors)?);
        // SAFETY: between fork and exec only `setsid` is called, which is async-signal-safe.
        unsafe {
            command.pre_exec(|| {
                nix::unistd::setsid()?;
                Ok(())
            });
        }
        let child = command.spawn();
        let child = child.with_context(|| format!("cannot start {}", program.to_string_lossy()))?;
        Ok(Started {
            child,
            begun: Instant::now(),
            output,
            errors,
            end: None,
        })
    }

    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// How it has ended, if it has.
    pub fn end(&mut self) -> Option<End> {
        if self.end.is_none() {
            // A child of this process can always be waited for.
            let status = self.child.try_wait().ok().flatten()?;
            self.end = Some(match (status.code(), status.signal()) {
                (Some(code), _) => End::Exit(code),
                (None, signal) => End::Signal(signal.unwrap_or_default()),
            });
        }
        self.end
    }

    /// Signals it, unless it has ended.
    pub fn signal(&mut self, signal: Signal) {
        if self.end().is_none() {
            // It has not been waited for, so the number is its own.
            let _ = kill(Pid::from_raw(self.pid()), signal);
        }
    }

    /// Waits for its end; kills it after the bound.
    pub fn finish(mut self, bound: Duration) -> (End, Started) {
        loop {
            if let Some(end) = self.end() {
                return (end, self);
            }
            if self.begun.elapsed() > bound {
                self.signal(Signal::SIGKILL);
                let _ = self.child.wait();
                return (End::Hang, self);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub fn said(&self) -> String {
        fs::read_to_string(&self.errors).unwrap_or_default()
    }

    pub fn printed(&self) -> String {
        let bytes = fs::read(&self.output).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        self.signal(Signal::SIGKILL);
        let _ = self.child.wait();
    }
}

fn appended(path: &Path) -> Result<File> {
    let file = OpenOptions::new().create(true).append(true).open(path);
    file.with_context(|| format!("{}", path.display()))
}
