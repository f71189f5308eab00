//! What may be asked of a machine, when, and what it answers.
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
//! One thread owns the machine and takes requests one after the other, so no
//! two lifecycle calls ever overlap. The power button needs Running; `save` needs Built or Paused, `restore`
//! too; `status`, `counters`, `pages` and `faults` are answered always, also after
//! the end.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;
use weft_aggregate::commands::VcpuStage;
use weft_coherent_memory::{SliceFaults, SlicePages};
use weft_platform::interrupts::VcpuLocation;

use super::state::MachineState;

/// Where in its life a machine is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stage {
    /// Complete; no instruction was executed.
    Built,
    /// vCPUs run.
    Running,
    /// vCPUs stand, guest time stands, devices touch no guest memory.
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
    TripleFault {
        /// The vCPU that had it.
        cpu: u32,
    },
    /// The guest wrote to the debug exit port.
    DebugExit {
        /// `(value << 1) | 1`, as the port's users expect.
        code: u32,
    },
    /// By request.
    Stopped,
    /// The machine cannot go on.
    Failed {
        /// What failed, on what.
        reason: String,
    },
}

impl fmt::Display for End {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PoweredOff => formatter.write_str("powered off by the guest"),
            Self::Reset => formatter.write_str("reset by the guest"),
            Self::TripleFault { cpu } => write!(formatter, "reset: triple fault of vCPU {cpu}"),
            Self::DebugExit { code } => write!(formatter, "debug exit with code {code}"),
            Self::Stopped => formatter.write_str("stopped"),
            Self::Failed { reason } => write!(formatter, "failed: {reason}"),
        }
    }
}

/// What the machine is and does at the moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// In its life.
    pub stage: Stage,
    /// How it ended, once it did.
    pub end: Option<End>,
    /// `kvm` or `soft`.
    pub back_end: String,
    /// Each vCPU, by number; on a secondary those that are there.
    pub vcpus: BTreeMap<u32, VcpuStage>,
    /// Where each vCPU of the whole machine is.
    pub locations: Vec<VcpuLocation>,
    /// Guest RAM, in bytes.
    pub memory_bytes: u64,
    /// Guest time since the start, in nanoseconds; stands while paused.
    pub guest_time_ns: u64,
}

/// Counters that only grow, keyed by name (`vcpu0.exits.halted`, `ipi.sent`, ...).
pub type Counters = BTreeMap<String, u64>;

/// What may be asked.
#[derive(Debug)]
pub enum Request {
    /// Starts the vCPUs.
    Run,
    /// Lets them stand; guest time stands.
    Pause,
    /// Lets them go on.
    Resume,
    /// Ends the machine.
    Stop,
    /// Presses the power button: a guest that listens powers itself off. Answered
    /// when it is pressed (`PowerDevice::press_button`), not when the guest obeys.
    PressPowerButton,
    /// Everything but RAM, as data.
    Save,
    /// Makes the machine what the state says; it is Paused then.
    Restore(Box<MachineState>),
    /// What it is and does.
    Status,
    /// Its numbers.
    Counters,
    /// The pages that slices asked each other for most often.
    Pages,
    /// Faults one by one. By slice: the number of the first that is wanted; without
    /// one, those that will come. They are recorded for a few seconds from now on.
    Faults(Vec<Option<u64>>),
}

impl Request {
    /// One word.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Run => "run",
            Self::Pause => "pause",
            Self::Resume => "resume",
            Self::Stop => "stop",
            Self::PressPowerButton => "press the power button",
            Self::Save => "save",
            Self::Restore(_) => "restore",
            Self::Status => "status",
            Self::Counters => "counters",
            Self::Pages => "pages",
            Self::Faults(_) => "faults",
        }
    }
}

#[derive(Debug)]
pub enum Answer {
    /// Done; the machine is in this stage now.
    Done(Stage),
    Saved(Box<MachineState>),
    Status(Status),
    Counters(Counters),
    /// To `Pages`: of each slice; none where there is one only.
    Pages(Vec<SlicePages>),
    /// To `Faults`, in the same order.
    Faults(Vec<SliceFaults>),
}

/// Why a request was not carried out; the machine is as before unless the
/// refusal says otherwise.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Refusal {
    /// Not in this stage.
    #[error("cannot {request}: the machine is {stage}")]
    Stage {
        /// What was asked.
        request: &'static str,
        stage: Stage,
    },
    /// Too many requests wait already.
    #[error("cannot {request}: too many requests wait")]
    Busy {
        /// What was asked.
        request: &'static str,
    },
    /// No answer in time. It may still be carried out.
    #[error("no answer to {request} within {seconds} s")]
    TimedOut {
        /// What was asked.
        request: &'static str,
        /// How long was waited.
        seconds: u64,
    },
    /// A part would not; the machine ended for it if it could not go on.
    #[error("cannot {request}: {reason}")]
    Failed {
        /// What was asked.
        request: &'static str,
        /// What failed, on what.
        reason: String,
    },
    /// The machine was taken down.
    #[error("cannot {request}: the machine is gone")]
    Gone {
        /// What was asked.
        request: &'static str,
    },
}
