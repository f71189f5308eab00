//! The stages of a machine, and the requests that each stage accepts.
//!
//! ```text
//!            run                pause
//!   Built ─────────▶ Running ◀────────▶ Paused
//!     │                 │      resume      │
//!     └────── stop ─────┼─────── stop ─────┘
//!                       ▼
//!                     Ended: powered off, reset, debug exit, stopped, failed
//! ```
//!
//! One thread owns the machine and takes requests one after the other, so two requests never
//! overlap. The power button needs Running; `save` and `restore` need Built or Paused.
//! `status`, `counters`, `pages` and `faults` are answered in every stage, also after the end.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;
use weft_aggregate::commands::{SavedWay, SliceCommand, SliceReply, VcpuStage};
use weft_aggregate::membership::Change;
use weft_coherent_memory::{SliceFaults, SlicePages};
use weft_platform::interrupts::VcpuLocation;

use super::checkpoint::{CHECKPOINT_SECONDS_MAX, NewCheckpoint, WrittenCheckpoint};
use super::move_report::{
    MOVE_PLATFORM, MOVE_QUEUES, MOVE_TIME, PlatformMoveReport, QueueMove, QueueMoveReport,
    TimeMoveReport, VcpuMoveReport,
};
use super::page_writer::NewPages;
use super::state::{HomeState, MachineState};
use super::switch_order::{SwitchOrder, Switched};
use crate::vcpu::runner::VcpuState;

/// Longest wait for the reply to a request that does not move guest memory. Save and
/// restore take longest: they wait for every vCPU and every device thread.
pub const REPLY_SECONDS_MAX: u64 = 30;

/// The stage of a machine's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stage {
    /// Complete; no instruction was executed.
    Built,
    /// vCPUs run.
    Running,
    /// vCPUs and guest time are stopped, and devices do not access guest memory.
    Paused,
    /// Over. See [`End`].
    Ended,
}

impl fmt::Display for Stage {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Built => "not started",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Ended => "ended",
        })
    }
}

/// How a machine ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum End {
    /// The guest powered it off.
    PoweredOff,
    /// The guest asked for a reset.
    Reset,
    /// A fault while a double fault was delivered: hardware resets.
    TripleFault { cpu: u32 },
    /// The guest wrote to the debug exit port.
    DebugExit {
        /// `(value << 1) | 1`, as the port's users expect.
        code: u32,
    },
    /// A request stopped it.
    Stopped,
    /// It goes on in a process on another host.
    Moved {
        /// What this host calls that one.
        host: String,
    },
    /// The machine cannot continue.
    Failed { reason: String },
}

impl fmt::Display for End {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PoweredOff => formatter.write_str("powered off by the guest"),
            Self::Reset => formatter.write_str("reset by the guest"),
            Self::TripleFault { cpu } => write!(formatter, "reset: triple fault of vCPU {cpu}"),
            Self::DebugExit { code } => write!(formatter, "debug exit with code {code}"),
            Self::Stopped => formatter.write_str("stopped"),
            Self::Moved { host } => write!(formatter, "moved to {host}"),
            Self::Failed { reason } => write!(formatter, "failed: {reason}"),
        }
    }
}

/// The reply to [`MachineRequest::Status`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    pub stage: Stage,
    /// How the machine ended; `None` while it has not.
    pub end: Option<End>,
    /// `kvm` or `soft`.
    pub back_end: String,
    /// By vCPU; on a secondary only its own vCPUs.
    pub vcpus: BTreeMap<u32, VcpuStage>,
    /// By vCPU, of the whole machine.
    pub locations: Vec<VcpuLocation>,
    /// Guest RAM, in bytes.
    pub memory_bytes: u64,
    /// Guest time since the start, in nanoseconds; stopped while the machine is paused.
    pub guest_time_ns: u64,
}

/// Counters that only grow, keyed by name (`vcpu0.exits.halted`, `ipi.sent`, ...).
pub type Counters = BTreeMap<String, u64>;

/// What the API, the terminal or a signal asks of a machine.
#[derive(Debug)]
pub enum MachineRequest {
    /// Starts the vCPUs.
    Run,
    /// Stops the vCPUs and guest time.
    Pause,
    /// Continues after a pause.
    Resume,
    /// Ends the machine.
    Stop,
    /// Presses the power button: a guest that listens powers itself off. Answered
    /// when it is pressed (`PowerDevice::press_button`), not when the guest obeys.
    PressPowerButton,
    /// Saves everything except RAM.
    Save,
    /// Replaces the machine's state by a saved one; the machine is Paused afterwards.
    Restore(Box<MachineState>),
    /// Moves a vCPU to another slice. A paused machine stays paused.
    MoveVcpu { vcpu: u32, to: usize },
    /// Has another slice keep the guest's time, whether the machine runs or is paused.
    MoveTime { to: usize },
    /// Has another slice have the platform: the I/O APIC and the small devices. A machine that
    /// runs stands meanwhile; a paused machine stays paused.
    MovePlatform { to: usize },
    /// To a secondary: its part in `MovePlatform`, or in a save.
    Platform(SliceCommand),
    /// On the primary: changes which slices serve queues of disks and networks. A machine that
    /// runs stands meanwhile; a paused machine stays paused.
    MoveQueues(QueueMove),
    /// To a secondary: its part in `MoveQueues`.
    Queues(SliceCommand),
    /// To a secondary: can the vCPU of `MoveVcpu` come here?
    ExpectVcpu {
        vcpu: u32,
        back_end: String,
        by_itself: bool,
    },
    /// On the primary: changes whether a slice is a member.
    ChangeMembership { change: Change, node: usize },
    /// On the primary: the switch of a migration.
    Switch(Box<SwitchOrder>),
    /// On the primary, when all pages and vCPUs but its own few pages are on `node`: stops the
    /// machine, and reports its state, with which another process goes on around that node's
    /// memory. Until the next of the two requests below, nothing else is carried out.
    GiveHome {
        node: usize,
        /// The other nodes stay, and have links to that process under this number.
        heir: Option<usize>,
        /// The machine was paused for this.
        ran: bool,
    },
    /// That process was given up: the machine is as before.
    TakeHomeBack,
    /// That process has everything, or may have: the machine is over here.
    EndGiven(End),
    /// On that process: frames for the machine come here from now on.
    AnnounceHome,
    /// On that process: takes the machine's state. The machine is Paused afterwards.
    TakeHome(Box<HomeState>),
    /// On that process: the old one cannot go on any more. Before the machine goes on.
    SettleHome,
    /// On the primary: writes guest memory to these files, and saves everything else.
    WriteCheckpoint(Box<NewCheckpoint>),
    /// On a secondary: begins to write the pages that it owns to the file that came with the
    /// set's identity, or by messages.
    CutPages { pages: NewPages, way: SavedWay },
    /// On a secondary: gives the memory of pages back that it does not own.
    KeepOwned,
    /// On a secondary: saves one of its vCPUs.
    SaveVcpu(u32),
    /// On a secondary: restores one of its vCPUs.
    RestoreVcpu(u32, Box<VcpuState>),
    /// Stage, vCPUs and times: [`Status`].
    Status,
    /// All counters of vCPUs, parts and slices.
    Counters,
    /// The pages that slices requested most often from each other.
    Pages,
    /// Records of single faults. By slice: the number of the first wanted record, or `None`
    /// for records of future faults. Faults are recorded for a few seconds after each request.
    Faults(Vec<Option<u64>>),
}

pub(super) const GROW: &str = "grow";
pub(super) const RELEASE: &str = "release";
pub(super) const MIGRATE: &str = "migrate";
pub(super) const MOVE_HOME: &str = "move the machine's home";

/// The name of a change, for refusals.
pub(super) fn change_name(change: Change) -> &'static str {
    match change {
        Change::Join => GROW,
        Change::Drain | Change::Keep | Change::Leave => RELEASE,
        Change::Yield => MOVE_HOME,
    }
}

impl MachineRequest {
    /// The request's name in messages.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Run => "run",
            Self::Pause => "pause",
            Self::Resume => "resume",
            Self::Stop => "stop",
            Self::PressPowerButton => "press the power button",
            Self::Save => "save",
            Self::Restore(_) => "restore",
            Self::MoveVcpu { .. } | Self::ExpectVcpu { .. } => super::move_report::REQUEST,
            Self::MoveTime { .. } => MOVE_TIME,
            Self::MovePlatform { .. } | Self::Platform(_) => MOVE_PLATFORM,
            Self::MoveQueues(_) | Self::Queues(_) => MOVE_QUEUES,
            Self::ChangeMembership { change, .. } => change_name(*change),
            Self::Switch(_) => MIGRATE,
            Self::GiveHome { .. }
            | Self::TakeHomeBack
            | Self::EndGiven(_)
            | Self::KeepOwned
            | Self::AnnounceHome
            | Self::TakeHome(_)
            | Self::SettleHome => MOVE_HOME,
            Self::WriteCheckpoint(_) => "save",
            Self::CutPages { .. } => "write pages",
            Self::SaveVcpu(_) => "save a vCPU",
            Self::RestoreVcpu(..) => "restore a vCPU",
            Self::Status => "status",
            Self::Counters => "counters",
            Self::Pages => "pages",
            Self::Faults(_) => "faults",
        }
    }

    /// Longest wait for its reply: guest memory may be large, and disks slow.
    pub fn seconds_max(&self) -> u64 {
        match self {
            Self::WriteCheckpoint(_) | Self::CutPages { .. } | Self::Restore(_) => {
                CHECKPOINT_SECONDS_MAX
            }
            // Each of its stages has a bound.
            Self::ChangeMembership { .. } | Self::Switch(_) => CHECKPOINT_SECONDS_MAX,
            _ => REPLY_SECONDS_MAX,
        }
    }
}

/// The reply to a [`MachineRequest`].
#[derive(Debug)]
pub enum MachineReply {
    /// The request was carried out; the machine is in this stage now.
    Done(Stage),
    Saved(Box<MachineState>),
    HomeGiven(Box<HomeState>),
    Moved(VcpuMoveReport),
    TimeMoved(TimeMoveReport),
    PlatformMoved(PlatformMoveReport),
    Switched(Switched),
    QueuesMoved(QueueMoveReport),
    /// A secondary's reply, for the primary.
    OfSlice(SliceReply),
    Checkpoint(Box<WrittenCheckpoint>),
    Vcpu(Box<VcpuState>),
    Status(Status),
    Counters(Counters),
    /// To `Pages`: one for each slice; empty if the machine has one slice that stays alone.
    Pages(Vec<SlicePages>),
    /// To `Faults`, in the order of slices.
    Faults(Vec<SliceFaults>),
}

/// Why a request was not carried out. The machine is as before unless the variant says
/// otherwise.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Refusal {
    /// The machine's stage does not accept the request.
    #[error("cannot {request}: the machine is {stage}")]
    Stage { request: &'static str, stage: Stage },
    /// The request names something that does not exist, or that is so already.
    #[error("cannot {request}: {reason}")]
    Impossible {
        request: &'static str,
        reason: String,
    },
    /// Too many requests wait already.
    #[error("cannot {request}: too many requests wait")]
    Busy { request: &'static str },
    /// No reply came in time. The request may still be carried out.
    #[error("no answer to {request} within {seconds} s")]
    TimedOut {
        request: &'static str,
        /// The bound of the wait.
        seconds: u64,
    },
    /// A part of the machine failed. If the machine cannot continue without it, it ended.
    #[error("cannot {request}: {reason}")]
    Failed {
        request: &'static str,
        reason: String,
    },
    /// The machine no longer exists.
    #[error("cannot {request}: the machine is gone")]
    Gone { request: &'static str },
}

impl Refusal {
    /// The same for a request that this one was a step of.
    pub(super) fn of(self, request: &'static str) -> Self {
        match self {
            Self::Stage { stage, .. } => Self::Stage { request, stage },
            Self::Impossible { reason, .. } => Self::Impossible { request, reason },
            Self::Failed { reason, .. } => Self::Failed { request, reason },
            // These are about the request itself.
            Self::Busy { .. } | Self::TimedOut { .. } | Self::Gone { .. } => self,
        }
    }
}
