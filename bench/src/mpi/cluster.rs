//! One run of `weft mpi run`, with what is asked of it meanwhile.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::{JoinHandle, sleep, spawn};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;
use weft_tests::boot::Images;
use weft_tests::namespace::Star;

use crate::program::Place;

/// A run that takes longer has failed.
const BOUND: Duration = Duration::from_secs(1800);
const LOOK: Duration = Duration::from_millis(50);

/// Where a cluster runs.
pub struct Hosts {
    /// The list of hosts, a line for each.
    pub list: String,
    /// The launcher's, which hosts reach.
    pub address: String,
    /// What runs the launcher where it has that address.
    pub prefix: Vec<OsString>,
}

impl Hosts {
    /// On this host: the lines of the list are given.
    fn local(lines: impl Iterator<Item = String>) -> Hosts {
        Hosts {
            list: lines.map(|line| line + "\n").collect(),
            address: "127.0.0.1".into(),
            prefix: Vec::new(),
        }
    }

    /// One processor each, as many as there are.
    pub fn processors(count: usize) -> Result<Hosts> {
        let all = std::thread::available_parallelism()?.get();
        ensure!(
            all >= count,
            "{count} processors are needed, and {all} are here"
        );
        let lines = (0..count).map(|cpu| format!("cpu{cpu} taskset -c {cpu}"));
        Ok(Hosts::local(lines))
    }

    /// This host, several times.
    pub fn here(count: usize) -> Hosts {
        Hosts::local((0..count).map(|number| format!("here{number}")))
    }

    /// Namespaces of a star but the first, which has the launcher.
    pub fn of_star(star: &Star, count: usize) -> Result<Hosts> {
        let lines: Result<String> = (1..=count).map(|host| star.list_line(host)).collect();
        Ok(Hosts {
            list: lines?,
            address: Star::address(0),
            prefix: star.prefix(0),
        })
    }
}

/// A cluster that runs.
pub struct Cluster {
    weft: PathBuf,
    /// Its state and its sockets.
    folder: PathBuf,
    launcher: Child,
    output: JoinHandle<String>,
    messages: JoinHandle<String>,
}

/// What a cluster has said, to its end.
pub struct Said {
    pub output: String,
    pub messages: String,
}

impl Cluster {
    /// `options` and the program after ` -- `, split at spaces.
    pub fn start(place: &Place, images: &Images, hosts: &Hosts, options: &str) -> Result<Cluster> {
        // Short: a socket's path has 107 bytes.
        let folder = std::env::temp_dir().join(format!("weft-m{}", std::process::id()));
        std::fs::create_dir_all(folder.join("run"))?;
        let list = folder.join("hosts");
        std::fs::write(&list, &hosts.list)?;
        let image = images.folder.join("mpi/root.cpio");
        ensure!(
            image.exists(),
            "{} is missing: `make guest-mpi`",
            image.display()
        );
        let mut launcher = command(&hosts.prefix, &place.weft, &folder)
            .args(["run", "--name", "bench", "--address"])
            .arg(&hosts.address)
            .arg("--list")
            .arg(&list)
            .arg("--image")
            .arg(std::fs::canonicalize(&images.folder)?)
            .args(options.split_whitespace())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot start weft mpi run")?;
        let output = read(launcher.stdout.take());
        let messages = read(launcher.stderr.take());
        Ok(Cluster {
            weft: place.weft.clone(),
            folder,
            launcher,
            output,
            messages,
        })
    }

    /// `weft mpi …`.
    pub fn ask(&self, words: &[&str]) -> Result<String> {
        let asked = command(&[], &self.weft, &self.folder)
            .args(words)
            .output()?;
        let said = String::from_utf8_lossy(&asked.stderr).into_owned();
        ensure!(
            asked.status.success(),
            "weft mpi {}: {said}",
            words.join(" ")
        );
        Ok(String::from_utf8(asked.stdout)?)
    }

    pub fn status(&self) -> Result<Value> {
        Ok(serde_json::from_str(&self.ask(&["status", "--json"])?)?)
    }

    /// Waits until the status is as wanted.
    pub fn until(&mut self, what: &str, wanted: impl Fn(&Value) -> bool) -> Result<Value> {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.launcher.try_wait()? {
                bail!("the cluster ended before {what}: {status}");
            }
            // Before its socket is there, nobody answers.
            if let Ok(status) = self.status()
                && wanted(&status)
            {
                return Ok(status);
            }
            ensure!(begun.elapsed() < BOUND, "not in time: {what}");
            sleep(LOOK);
        }
    }

    /// The name of the host of a machine.
    pub fn host(status: &Value, machine: usize) -> String {
        let host = &status["machines"][machine]["host"];
        host.as_str().unwrap_or_default().to_owned()
    }

    /// Waits for its end.
    pub fn finish(mut self) -> Result<Said> {
        let begun = Instant::now();
        let status = loop {
            if let Some(status) = self.launcher.try_wait()? {
                break status;
            }
            if begun.elapsed() > BOUND {
                self.launcher.kill()?;
                bail!("the cluster did not end within {} s", BOUND.as_secs());
            }
            sleep(LOOK);
        };
        let said = Said {
            output: self.output.join().unwrap_or_default(),
            messages: self.messages.join().unwrap_or_default(),
        };
        // 130: it was told to end, before its program had.
        ensure!(
            matches!(status.code(), Some(0 | 130)),
            "{status}: {}{}",
            said.output,
            said.messages
        );
        std::fs::remove_dir_all(&self.folder)?;
        Ok(said)
    }
}

impl Said {
    /// How long the program ran, seconds: from when all machines were ready.
    pub fn program_s(&self) -> Result<f64> {
        let after = |words: &str| number_after(&self.messages, words);
        let ready = after("machines are ready after ").context("no machine was ready")?;
        let ended = self
            .messages
            .lines()
            .find(|line| line.contains("the program ended with"));
        let ended = ended.and_then(|line| number_after(line, " after "));
        Ok(ended.context("the program did not end")? - ready)
    }

    /// How often a machine went to other hosts.
    pub fn changes(&self) -> usize {
        let count = |words: &str| self.messages.matches(words).count();
        count(" moves from ") + count("vm-0 goes to ")
    }

    /// What each move took, and what was expected, seconds.
    pub fn moves(&self) -> Vec<(f64, f64)> {
        let of_line = |line: &str| {
            let took = number_after(line, " after ")?;
            let expected = number_after(line, " s, ")?;
            line.contains("were expected").then_some((took, expected))
        };
        self.messages.lines().filter_map(of_line).collect()
    }
}

/// The number that follows the words.
pub fn number_after(text: &str, words: &str) -> Option<f64> {
    let rest = text.split_once(words)?.1;
    let end = rest.find(|letter: char| !letter.is_ascii_digit() && letter != '.');
    rest[..end.unwrap_or(rest.len())].parse().ok()
}

fn command(prefix: &[OsString], weft: &Path, folder: &Path) -> Command {
    let mut words = prefix
        .iter()
        .map(OsString::as_os_str)
        .chain([weft.as_os_str()]);
    let mut command = Command::new(words.next().unwrap_or_default());
    command
        .args(words)
        .arg("mpi")
        .env("XDG_RUNTIME_DIR", folder.join("run"))
        .env("XDG_STATE_HOME", folder.join("state"));
    command
}

fn read(from: Option<impl std::io::Read + Send + 'static>) -> JoinHandle<String> {
    spawn(move || {
        let mut bytes = Vec::new();
        // What was read until an error counts.
        let _ = from.map(|mut from| from.read_to_end(&mut bytes));
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_found_in_sentences() {
        let said = Said {
            output: String::new(),
            messages: "weft: all machines are ready after 2.5 s\n\
                weft: vm-0 is on cpu1 after 0.71 s, 0.90 s were expected\n\
                weft: the program ended with 0 after 20.1 s, 1 moves of machines\n"
                .into(),
        };
        assert!((said.program_s().unwrap() - 17.6).abs() < 1e-9);
        assert_eq!(said.moves(), [(0.71, 0.9)]);
    }
}
