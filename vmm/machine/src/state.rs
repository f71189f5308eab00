//! A whole machine but its RAM, as data.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use thiserror::Error;
use weft_aggregate::commands::PageRun;
use weft_aggregate::remote_devices::Servers;
use weft_platform::acpi::power::PowerState;
use weft_platform::clock::ClockState;
use weft_platform::devices::cmos::CmosState;
use weft_platform::devices::serial::SerialPortState;
use weft_platform::interrupts::IoApicState;
use weft_platform::part::Version;
use weft_platform::pci::RootState;
use weft_virtio::TransportState;

use super::configuration::Configuration;
use crate::vcpu::runner::VcpuState;
use crate::vcpu::scheduler::SchedulerState;

/// Bytes of an encoded state: 255 vCPUs with all registers, and 31 devices, take a tenth.
const ENCODED_MAX: usize = 64 << 20;

/// What [`super::MachineRequest::Save`] answers and [`super::MachineRequest::Restore`] takes.
/// Together with the bytes of the RAM it is the machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineState {
    pub version: Version<1>,
    /// The vCPUs with their local APICs, by number.
    pub vcpus: Vec<VcpuState>,
    /// Every other part, by the name that the machine gave it.
    pub parts: BTreeMap<String, PartState>,
}

/// The state of a part, by what the part is. Each state begins with the version of its
/// format.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PartState {
    Clock(ClockState),
    IoApic(IoApicState),
    Serial(SerialPortState),
    Cmos(CmosState),
    Power(PowerState),
    /// The PCI bus itself.
    Pci(RootState),
    /// A virtio device with its PCI function.
    Virtio(Box<TransportState>),
    /// The scheduler of a deterministic machine.
    Scheduler(SchedulerState),
}

/// Why bytes are not a machine's state.
#[derive(Debug, Error)]
pub enum StateError {
    #[error("the state has {0} bytes, more than a machine's can have ({ENCODED_MAX})")]
    Size(usize),
    #[error("the state cannot be read")]
    Format(#[from] serde_json::Error),
}

impl MachineState {
    /// The state as JSON.
    ///
    /// # Errors
    /// None with the states of this machine's parts.
    pub fn encode(&self) -> Result<Vec<u8>, StateError> {
        Ok(serde_json::to_vec(self)?)
    }

    /// The state that [`MachineState::encode`] made, perhaps elsewhere. Whether it fits a
    /// machine is decided by the machine.
    ///
    /// # Errors
    /// The bytes are too many, are no state, or have another version.
    pub fn decode(bytes: &[u8]) -> Result<Self, StateError> {
        if bytes.len() > ENCODED_MAX {
            return Err(StateError::Size(bytes.len()));
        }
        Ok(serde_json::from_slice(bytes)?)
    }
}

/// A machine but its RAM, for a process that is configured alike and has the RAM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HomeState {
    /// The machine ran when it was stopped for the move.
    pub ran: bool,
    /// See [`SavedMachine::updated`].
    pub updated: Vec<Range<u64>>,
    /// Without vCPUs, if other nodes stay.
    pub state: MachineState,
    #[serde(default)]
    pub others: Option<OtherNodes>,
}

/// What a process needs to know that takes the place of node 0 among other nodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OtherNodes {
    /// The one on that process's host.
    pub beside: usize,
    /// Pages that are managed otherwise than at the start.
    pub managers: Vec<PageRun>,
    /// The node that has the platform, and since which epoch.
    pub platform: (usize, u64),
    /// The node that keeps the time, and since which epoch.
    pub time: (usize, u64),
    /// Where the queues of disks and networks are served, and since which epoch.
    pub queues: (u64, Servers),
}

/// A machine but its RAM, with what a new process needs to make it again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedMachine {
    /// The machine as it was asked for.
    pub configuration: Configuration,
    /// Guest-physical addresses to which all slices subscribe.
    pub updated: Vec<Range<u64>>,
    pub state: MachineState,
}
