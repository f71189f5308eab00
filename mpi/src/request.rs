//! What a user says to a launcher that runs: one line of JSON each way, over its UNIX socket.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde::{Deserialize, Serialize};

use crate::control::MACHINES_MAX;

/// Longest line in bytes.
pub const LINE_MAX: u64 = 1 << 20;
/// Bytes of each of the program's streams in an answer: as JSON a byte has six at most.
pub const OUTPUT_MAX: u64 = 64 << 10;
/// How long a launcher may take for an answer: the batch system may be asked meanwhile.
const ANSWER_MAX: Duration = Duration::from_secs(120);
/// How long a small file may take to a machine, which may be moving.
const COPY_LEAST: Duration = Duration::from_secs(60);
/// Bytes a second of a large one at least.
const COPIES_LEAST: u64 = 1 << 20;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    Status,
    /// The end of what the program has written: at most this many bytes of each stream, and never
    /// more than [`OUTPUT_MAX`].
    Output(u64),
    /// How many hosts are wanted. Fewer than there are: as reservations run out.
    Hosts(usize),
    /// One host goes back now.
    Release(String),
    /// The reservation of a host lasts so much longer, if the batch system allows that.
    Extend(String, Duration),
    /// One host more.
    NewNode,
    /// So many hosts stay, those whose reservations last longest.
    Shrink(usize),
    /// A file for the home of all machines.
    Deploy(PathBuf),
    /// The cluster ends.
    Exit,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// A sentence.
    Done(String),
    Refused(String),
    Status(Box<Status>),
    Output(Output),
}

/// A cluster at one moment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    pub name: String,
    /// `gathering`, `booting`, `running`, `saved`, `ending`.
    pub phase: String,
    /// The program with its arguments.
    pub program: Option<String>,
    /// Seconds since the launcher started.
    pub seconds: f64,
    pub wanted: usize,
    /// Jobs of the batch system whose hosts have not come.
    pub asked: usize,
    /// Those of these jobs that the batch system lets wait.
    #[serde(default)]
    pub waiting: Vec<WaitingJob>,
    pub hosts: Vec<HostStatus>,
    pub machines: Vec<MachineStatus>,
    /// Since the cluster's start.
    pub moves: u64,
    /// The last of what happened, oldest first.
    pub log: Vec<String>,
    /// What is wrong with the batch system, if it is.
    pub trouble: Option<String>,
    /// The launcher's exit code, once the cluster ends.
    pub exit_code: Option<u8>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitingJob {
    pub job: String,
    /// As the batch system says.
    pub why: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HostStatus {
    pub name: String,
    pub job: String,
    /// Seconds until the reservation ends.
    pub left: Option<f64>,
    /// Seconds that its machines take to leave, as far as is known.
    pub leaving_takes: f64,
    /// Seconds until they must begin to leave. Hosts that end soon after each other begin sooner.
    pub begins: Option<f64>,
    /// Whether its agent answers.
    pub answers: bool,
    pub leaves: bool,
    /// Bytes for machines.
    pub memory: u64,
    pub cores: u32,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MachineStatus {
    pub name: String,
    pub address: String,
    /// The name of its host.
    pub host: Option<String>,
    /// The names of further hosts, if it is one over several.
    #[serde(default)]
    pub others: Vec<String>,
    /// The name of the host that it moves to; of one over several, all of them.
    pub moves_to: Option<String>,
    /// What an agent does with it.
    pub task: Option<TaskStatus>,
    /// Whether its ssh server has answered.
    pub ready: bool,
    /// Bytes.
    pub resident: u64,
    pub memory: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TaskStatus {
    /// `starts`, `moves`, `is saved`, `is restored`.
    pub does: String,
    /// Seconds since it began.
    pub seconds: f64,
    /// Seconds that it should take as the last moves went; only of moves.
    pub expected: Option<f64>,
}

impl MachineStatus {
    /// Whether it, or a part of it, is on that host.
    pub fn is_on(&self, host: &str) -> bool {
        self.host
            .iter()
            .chain(&self.others)
            .any(|name| name == host)
    }
}

/// What the program has written.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Output {
    pub stdout: Stream,
    pub stderr: Stream,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stream {
    /// Bytes since the program's start.
    pub length: u64,
    /// The last of them; what is not UTF-8 is replaced.
    pub end: String,
}

/// How long the copy of a file to a machine may take.
pub(crate) fn copy_max(bytes: u64) -> Duration {
    COPY_LEAST + Duration::from_secs(bytes / COPIES_LEAST)
}

impl Request {
    /// How long a launcher may take for the answer.
    fn patience(&self) -> Duration {
        match self {
            // To one machine after the other.
            Request::Deploy(file) => {
                let bytes = std::fs::metadata(file).map_or(0, |metadata| metadata.len());
                copy_max(bytes) * MACHINES_MAX
            }
            _ => ANSWER_MAX,
        }
    }
}

/// Asks the launcher at `socket`.
pub fn ask(socket: &Path, request: &Request) -> anyhow::Result<Answer> {
    let stream = weft_node::rundir::connect(socket).with_context(|| {
        format!(
            "no launcher answers at {}: `weft mpi list` shows the clusters, and `weft mpi attach` \
             starts a launcher again",
            socket.display()
        )
    })?;
    stream.set_read_timeout(Some(request.patience()))?;
    stream.set_write_timeout(Some(Duration::from_secs(5)))?;
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    (&stream)
        .write_all(&line)
        .context("the launcher does not listen")?;
    let mut answer = String::new();
    BufReader::new(stream.take(LINE_MAX))
        .read_line(&mut answer)
        .context("the launcher did not answer")?;
    if answer.is_empty() {
        bail!("the launcher ended before it answered");
    }
    serde_json::from_str(&answer).context("the answer of the launcher cannot be read")
}
