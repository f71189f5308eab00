//! A user with folders of their own, what they ask of `weft mpi`, and a launcher that runs.

use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use super::processes::{self, TAG};

/// How often something that is awaited is looked at.
const LOOK: Duration = Duration::from_millis(50);
/// A command that asks a launcher has an answer by then.
const ASK_BOUND: &str = "150";

/// A user, and their folders.
pub struct User {
    pub weft: PathBuf,
    /// What `make guest guest-mpi` left.
    pub image: PathBuf,
    pub folder: PathBuf,
    /// In the environment of all that is started.
    pub tag: String,
    /// Another user than this process's.
    pub uid: Option<u32>,
    /// Before each command.
    pub prefix: Vec<OsString>,
}

impl User {
    /// In a folder, whose path is short: it has sockets.
    pub fn new(weft: &Path, image: &Path, folder: &Path, uid: Option<u32>) -> Result<User> {
        let user = User {
            weft: weft.to_owned(),
            image: image.to_owned(),
            folder: folder.to_owned(),
            tag: format!("mpi-{}", folder.display()),
            uid,
            prefix: Vec::new(),
        };
        for name in ["", "h", "r", "t"] {
            let made = folder.join(name);
            fs::create_dir_all(&made)?;
            if uid.is_some() {
                chown(&made, uid, uid)?;
            }
        }
        Ok(user)
    }

    /// Of temporary files: agents have their folders there.
    pub fn temporary(&self) -> PathBuf {
        self.folder.join("t")
    }

    pub fn run_directory(&self) -> PathBuf {
        self.folder.join("r")
    }

    /// Of all clusters of this user.
    pub fn state(&self) -> PathBuf {
        self.folder.join("h/.local/state/weft/mpi")
    }

    /// A command as this user.
    pub fn command(&self, program: &Path) -> Command {
        let mut words: Vec<OsString> = self.prefix.clone();
        if let Some(uid) = self.uid {
            let change = format!("setpriv --reuid {uid} --regid {uid} --clear-groups");
            words.extend(change.split(' ').map(OsString::from));
        }
        words.push(program.into());
        let mut command = Command::new(&words[0]);
        command
            .args(&words[1..])
            .env("HOME", self.folder.join("h"))
            .env("XDG_RUNTIME_DIR", self.run_directory())
            .env("TMPDIR", self.temporary())
            .env(TAG, &self.tag)
            .env_remove("XDG_STATE_HOME")
            .env_remove("XDG_CONFIG_HOME")
            .env_remove("WEFT_CONFIG")
            .env("LC_ALL", "C")
            .current_dir(&self.folder)
            .stdin(Stdio::null());
        processes::heed(&mut command);
        command
    }

    /// `weft mpi` with these words, to its end, which comes within a bound.
    pub fn ask(&self, words: &[&str]) -> Result<Output> {
        let mut command = self.command(Path::new("timeout"));
        command
            .arg(ASK_BOUND)
            .arg(&self.weft)
            .arg("mpi")
            .args(words);
        Ok(command.output()?)
    }

    /// The same, which must succeed: its standard output.
    pub fn must(&self, words: &[&str]) -> Result<String> {
        let output = self.ask(words)?;
        let said = text(&output.stderr);
        ensure!(
            output.status.success(),
            "{words:?}: {}: {said}",
            output.status
        );
        Ok(text(&output.stdout))
    }

    /// The same, which must fail with a code and a sentence.
    pub fn refused(&self, words: &[&str], code: i32, sentence: &str) -> Result<()> {
        let output = self.ask(words)?;
        let said = text(&output.stderr);
        ensure!(
            output.status.code() == Some(code) && said.contains(sentence),
            "{words:?} should end with {code} and say {sentence:?}: {}: {said}",
            output.status
        );
        ensure!(
            output.stdout.is_empty(),
            "{words:?} wrote to standard output"
        );
        Ok(())
    }

    pub fn status(&self, name: &str) -> Result<Status> {
        let said = self.must(&["status", name, "--json"])?;
        Ok(Status(serde_json::from_str(&said)?))
    }

    /// Waits until the cluster's status is as it should be.
    pub fn until(
        &self,
        launcher: &mut Launcher,
        what: &str,
        bound: Duration,
        wanted: impl Fn(&Status) -> bool,
    ) -> Result<Status> {
        let begun = Instant::now();
        let mut last = None;
        loop {
            // There may be no launcher's socket yet.
            if let Ok(status) = self.status(&launcher.name) {
                if wanted(&status) {
                    return Ok(status);
                }
                last = Some(status.0);
            }
            if let Some(code) = launcher.code()? {
                bail!("before {what} it ended with {code}: {}", launcher.errors());
            }
            ensure!(
                begun.elapsed() < bound,
                "{what}: not within {} s: {}; {}",
                bound.as_secs(),
                last.unwrap_or_default(),
                launcher.errors()
            );
            thread::sleep(LOOK);
        }
    }

    /// Starts a cluster of small machines; `words` are more options, and the program after `--`.
    pub fn run(&self, name: &str, words: &[&str]) -> Result<Launcher> {
        let image = self.image.to_string_lossy().into_owned();
        let mut all = vec!["run", "--name", name, "--image", &image, "--memory", "128M"];
        all.extend(words);
        self.launch(name, &all)
    }

    /// A command that is a launcher: `run`, `attach`, `resume`.
    pub fn launch(&self, name: &str, words: &[&str]) -> Result<Launcher> {
        let mut number = 0;
        let path = |number: u32, kind: &str| self.folder.join(format!("{name}.{number}.{kind}"));
        while path(number, "out").exists() {
            number += 1;
        }
        let (out, err) = (path(number, "out"), path(number, "err"));
        let mut command = self.command(&self.weft);
        let command = command
            .arg("mpi")
            .args(words)
            .stdout(File::create(&out)?)
            .stderr(File::create(&err)?)
            // A signal for the suite's terminal is not for it.
            .process_group(0);
        Ok(Launcher {
            name: name.to_owned(),
            child: command.spawn().context("cannot start weft")?,
            out,
            err,
        })
    }

    /// The path of EP on this host.
    pub fn ep(&self) -> String {
        self.image.join("mpi/ep").to_string_lossy().into_owned()
    }

    /// Waits until nothing of this user's clusters is left but what is named.
    pub fn nothing_left(&self, keeps_state: bool) -> Result<()> {
        none_left(|| self.left(keeps_state))
    }

    pub fn no_process_left(&self) -> Result<()> {
        none_left(|| processes::tagged(&self.tag))
    }

    fn left(&self, keeps_state: bool) -> Vec<String> {
        let mut left: Vec<String> = processes::tagged(&self.tag);
        left.extend(files(&self.temporary()));
        left.extend(files(&self.run_directory()));
        if !keeps_state {
            left.extend(files(&self.state()));
        }
        left
    }
}

/// Waits until `left` gives nothing.
fn none_left(left: impl Fn() -> Vec<String>) -> Result<()> {
    let begun = Instant::now();
    loop {
        let left = left();
        if left.is_empty() {
            return Ok(());
        }
        ensure!(
            begun.elapsed() < Duration::from_secs(5),
            "left behind: {}",
            left.join("; ")
        );
        thread::sleep(LOOK);
    }
}

/// All that is in a folder and its folders and is no folder itself, or is an agent's.
fn files(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
        let name = entry.file_name();
        if !is_folder || name.to_string_lossy().starts_with("weft-mpi-") {
            found.push(path.display().to_string());
        }
        if is_folder {
            found.extend(files(&path));
        }
    }
    found
}

/// A process of `weft mpi` that serves a cluster.
pub struct Launcher {
    pub name: String,
    child: Child,
    out: PathBuf,
    err: PathBuf,
}

impl Launcher {
    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Its standard output so far.
    pub fn output(&self) -> String {
        text(&fs::read(&self.out).unwrap_or_default())
    }

    /// Its standard error so far.
    pub fn errors(&self) -> String {
        text(&fs::read(&self.err).unwrap_or_default())
    }

    /// Its exit code, if it has ended; 1000 and more: a signal.
    pub fn code(&mut self) -> Result<Option<i32>> {
        use std::os::unix::process::ExitStatusExt as _;
        let status = self.child.try_wait()?;
        Ok(status.map(|status| status.code().unwrap_or(1000 + status.signal().unwrap_or(0))))
    }

    pub fn ends_within(&mut self, bound: Duration) -> Result<i32> {
        let begun = Instant::now();
        loop {
            if let Some(code) = self.code()? {
                return Ok(code);
            }
            ensure!(
                begun.elapsed() < bound,
                "the launcher did not end within {} s: {}",
                bound.as_secs(),
                self.errors()
            );
            thread::sleep(LOOK);
        }
    }

    pub fn must_end(&mut self, code: i32, bound: Duration) -> Result<()> {
        let ended = self.ends_within(bound)?;
        ensure!(
            ended == code,
            "ended with {ended}, not {code}: {}",
            self.errors()
        );
        Ok(())
    }

    pub fn says(&self, sentence: &str) -> Result<()> {
        let said = self.errors();
        ensure!(
            said.contains(sentence),
            "it does not say {sentence:?}: {said}"
        );
        Ok(())
    }

    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

/// A failed test leaves no launcher; its agents end as they miss it, or are ended by their tag.
impl Drop for Launcher {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// All that a failed test has left ends.
impl Drop for User {
    fn drop(&mut self) {
        for pid in processes::tagged_pids(&self.tag) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}

/// `weft mpi status --json`.
pub struct Status(pub Value);

impl Status {
    pub fn phase(&self) -> &str {
        self.0["phase"].as_str().unwrap_or("")
    }

    pub fn is_running(&self) -> bool {
        self.phase() == "running"
    }

    /// The names of hosts whose agents answer.
    pub fn hosts(&self) -> Vec<&str> {
        let hosts = self.0["hosts"].as_array().into_iter().flatten();
        let here = hosts.filter(|host| host["answers"] == true && host["leaves"] == false);
        here.filter_map(|host| host["name"].as_str()).collect()
    }

    pub fn moves(&self) -> u64 {
        self.0["moves"].as_u64().unwrap_or(0)
    }

    /// Machines that are on a host and not moving, by their hosts.
    pub fn machines_on(&self, host: &str) -> usize {
        let machines = self.0["machines"].as_array().into_iter().flatten();
        let there = machines.filter(|machine| {
            machine["host"].as_str() == Some(host) && machine["moves_to"].is_null()
        });
        there.count()
    }

    pub fn is_moving(&self) -> bool {
        let mut machines = self.0["machines"].as_array().into_iter().flatten();
        machines.any(|machine| !machine["moves_to"].is_null())
    }

    /// What the log has.
    pub fn log(&self) -> String {
        let lines = self.0["log"].as_array().into_iter().flatten();
        lines
            .filter_map(Value::as_str)
            .collect::<Vec<_>>()
            .join("\n")
    }
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
