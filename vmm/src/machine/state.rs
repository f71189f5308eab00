//! A whole machine but its RAM, as data.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use weft_soft::CpuState;

/// What [`super::Request::Save`] answers and [`super::Request::Restore`] takes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MachineState {
    /// The vCPUs, by number.
    pub vcpus: Vec<CpuState>,
    /// Every other part, by the name that the machine gave it.
    pub parts: BTreeMap<String, serde_json::Value>,
}
