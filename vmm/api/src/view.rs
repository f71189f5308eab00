//! What the API says, as data. `openapi.json` describes the same.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use weft_checkpoint::{Identity, Written};
use weft_coherent_memory::{SliceFaults, SlicePages};
use weft_machine::membership::{Grown, JobView, Released};
use weft_machine::migration::Migrated;
use weft_machine::{Configuration, SavedMachine};

/// How long a guest has to power itself off, unless the request says otherwise.
pub const STOP_SECONDS: f64 = 10.0;
/// The longest that a request may say.
pub const STOP_SECONDS_MAX: f64 = 600.0;

/// Where in its life a machine is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Complete; the guest has not begun.
    Starting,
    /// vCPUs run.
    Running,
    /// vCPUs and guest time stand.
    Paused,
    /// Over.
    Ended,
}

impl State {
    /// The same word as in JSON.
    pub fn name(self) -> &'static str {
        match self {
            State::Starting => "starting",
            State::Running => "running",
            State::Paused => "paused",
            State::Ended => "ended",
        }
    }
}

/// The back end of the vCPUs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackEndView {
    /// `kvm` or `soft`.
    pub name: String,
    /// Why this one.
    pub reason: String,
}

/// Where the console is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum ConsoleView {
    /// Standard input and output of the process.
    Stdio,
    /// A UNIX socket.
    Socket { path: PathBuf },
}

/// Where a vCPU is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LocationView {
    /// The node that has it.
    pub node: usize,
    /// How often it moved until it was there.
    pub epoch: u64,
}

/// A machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VmView {
    /// Unique on this host, for this user.
    pub name: String,
    /// Of the process that looks after the machine.
    pub pid: u32,
    /// Of the process that is the machine; another one after each restart.
    pub machine_pid: u32,
    /// Of Weft.
    pub version: String,
    /// Where in its life it is.
    pub state: State,
    /// How it ended, once it did.
    pub end: Option<String>,
    /// The back end of the vCPUs.
    pub back_end: BackEndView,
    /// Since the machine was put together, in seconds.
    pub uptime_s: f64,
    /// Guest time since then; it stands while the machine is paused.
    pub guest_time_s: f64,
    /// How often the guest restarted.
    pub restarts: u32,
    /// What each vCPU does: `running`, `halted`, `paused`, `waiting-for-start-up`,
    /// `finished`.
    pub vcpus: Vec<String>,
    /// Where each vCPU is, in the same order.
    pub locations: Vec<LocationView>,
    /// Where the console is.
    pub console: ConsoleView,
    /// What was asked for.
    pub configuration: Configuration,
}

/// Numbers that only grow.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Counters {
    /// When they were read: seconds since the machine was put together.
    pub uptime_s: f64,
    /// By name: part, then what is counted (`vcpu0.exits.halted`).
    pub counters: BTreeMap<String, u64>,
}

/// The pages that slices asked each other for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pages {
    /// When they were read: seconds since the machine was put together.
    pub uptime_s: f64,
    /// Of each slice; none where there is one slice only.
    pub slices: Vec<SlicePages>,
}

/// Faults one by one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Faults {
    /// When they were read: seconds since the machine was put together.
    pub uptime_s: f64,
    /// Of each slice; none where there is one slice only.
    pub slices: Vec<SliceFaults>,
}

/// What `POST /v1/vm/stop` may be told.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StopBody {
    /// How long the guest has to power itself off; 0: none.
    #[serde(default = "stop_seconds")]
    pub timeout_s: f64,
}

/// What `PUT /v1/vm/vcpu-location` is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoveBody {
    pub vcpu: u32,
    /// Where it shall run.
    pub node: usize,
}

/// What `PUT /v1/vm/balloon` is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BalloonBody {
    /// Memory that the guest shall give back, in bytes.
    pub bytes: u64,
}

/// A guest's balloon: memory that the guest has given back on request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BalloonView {
    /// What the guest was asked to give back.
    pub target_bytes: u64,
    /// What it has given back so far.
    pub actual_bytes: u64,
}

/// What `PUT /v1/vm/timekeeper` is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TimekeeperBody {
    /// Whose host's clock guest time shall follow.
    pub node: usize,
}

/// What `PUT /v1/vm/platform` is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlatformBody {
    /// The node that shall have the I/O APIC and the small devices.
    pub node: usize,
}

/// What `POST /v1/vm/release` is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReleaseBody {
    pub node: usize,
}

/// A node that is added or given back, or a machine that goes to other nodes; or the last
/// one that was.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ChangeView {
    /// The node that is given back.
    pub node: Option<usize>,
    #[serde(flatten)]
    pub progress: JobView,
    /// What came of it, once it is over: one of the four.
    pub grown: Option<Grown>,
    pub released: Option<Released>,
    pub migrated: Option<Migrated>,
    /// Why it did not come about.
    pub failed: Option<String>,
}

impl ChangeView {
    pub fn is_over(&self) -> bool {
        let is_done = self.grown.is_some() || self.released.is_some() || self.migrated.is_some();
        is_done || self.failed.is_some()
    }
}

fn stop_seconds() -> f64 {
    STOP_SECONDS
}

impl Default for StopBody {
    fn default() -> Self {
        StopBody {
            timeout_s: STOP_SECONDS,
        }
    }
}

/// The body of every answer that is no success.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// What went wrong.
    pub error: ErrorView,
}

/// What went wrong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorView {
    /// A word for programs.
    pub code: String,
    /// A sentence for people.
    pub message: String,
}

/// What `save` needs beside the open files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SaveBody {
    /// In all files of the checkpoint.
    pub identity: Identity,
    /// Of the checkpoint that has the pages which did not change since.
    #[serde(default)]
    pub base: Option<Identity>,
    /// Has the machine continue while guest memory is written. The save ends with the
    /// connection.
    #[serde(default)]
    pub live: bool,
    /// Leaves the machine paused once guest memory is written; not with `live`.
    #[serde(default)]
    pub leave_paused: bool,
    /// Has the daemons of other hosts make files in this directory there, which is absolute, for
    /// the nodes on them. They stay only after `keep`; the nodes' open files get the tables.
    #[serde(default)]
    pub each_host: Option<PathBuf>,
}

/// What becomes of the files that daemons made for the last save.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SaveFilesBody {
    /// In all files of the checkpoint.
    pub identity: Identity,
    /// They stay when the machine is gone; otherwise they are removed.
    pub keep: bool,
}

/// A machine whose guest memory is written.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Saved {
    /// Everything but guest memory.
    pub machine: SavedMachine,
    /// `kvm` or `soft`.
    pub back_end: String,
    /// What each node wrote.
    pub pages: Vec<Written>,
    /// By node: the host whose daemon made its file.
    #[serde(default)]
    pub hosts: Vec<Option<String>>,
    /// How long the vCPUs were paused; if they are left paused, until now.
    pub pause_s: f64,
}
