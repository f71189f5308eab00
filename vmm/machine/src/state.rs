//! A whole machine but its RAM, as data.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::vcpu::runner::VcpuState;

/// What [`super::MachineRequest::Save`] answers and [`super::MachineRequest::Restore`] takes.
/// Together with the bytes of the RAM it is the machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MachineState {
    /// The vCPUs with their local APICs, by number.
    pub vcpus: Vec<VcpuState>,
    /// Every other part, by the name that the machine gave it.
    pub parts: BTreeMap<String, serde_json::Value>,
}
