//! All that belongs to one vCPU, as plain data.

use serde::{Deserialize, Serialize};
use weft_platform::interrupts::LocalApicState;
use weft_platform::part::Version;
use weft_vcpu::CpuState;

/// The state of a vCPU, with its local APIC and its clock registers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VcpuState {
    pub version: Version<1>,
    /// Registers.
    pub cpu: CpuState,
    /// Local APIC.
    pub apic: LocalApicState,
    /// The vCPU's kvmclock register.
    pub system_time: u64,
    /// The machine's wall clock register: the same for each vCPU.
    pub wall_clock: u64,
    /// An INIT came and no start-up since.
    pub waits_for_start_up: bool,
}
