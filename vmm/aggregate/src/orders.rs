//! What the bootstrap slice asks of its companions. The machine's life has one
//! owner, there; companions do as they are told.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::mpsc::Receiver;

use serde::{Deserialize, Serialize};

use weft_coherent_memory::{SliceFaults, SlicePages};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// Let the vCPUs run, for the first time or again.
    Run {
        /// The guest's TSC minus the bootstrap host's, modulo 2^64.
        tsc_offset: u64,
        /// The guest's TSC when guest time was zero.
        tsc_zero: u64,
        /// Guest-physical addresses of pages whose copies are kept up to date.
        updated: Vec<Range<u64>>,
    },
    /// Let them stand.
    Pause,
    /// The machine is over.
    Stop,
    /// What do your vCPUs do?
    Status,
    /// What did you count?
    Counters,
    /// Which pages did you ask for, how often?
    Pages,
    /// Your faults one by one; see [`SharedMemory::faults`].
    ///
    /// [`SharedMemory::faults`]: weft_coherent_memory::SharedMemory::faults
    Faults {
        /// By slice: the number of the first that is wanted; none: those to come.
        from: Vec<Option<u64>>,
    },
}

/// The answer to one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    Done,
    /// To `Status`: of the slice's own vCPUs, by number.
    Status(BTreeMap<u32, VcpuStage>),
    Counters(BTreeMap<String, u64>),
    Pages(SlicePages),
    Faults(SliceFaults),
    /// It cannot be done.
    Refused(String),
}

/// Orders with their tickets, as text, on a companion.
pub type OrderReceiver = Receiver<(u64, Vec<u8>)>;

/// What a vCPU is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VcpuStage {
    /// Not started by another CPU yet.
    WaitingForStartUp,
    /// Executes instructions.
    Running,
    /// Waits for an interrupt after HLT.
    Halted,
    /// Stands, by request.
    Paused,
    /// Its thread is over.
    Finished,
}
