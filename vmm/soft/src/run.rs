//! The loop that runs a vCPU.

/// What a vCPU is made of, apart from its state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Configuration {
    /// Local APIC id.
    pub apic_id: u32,
    /// vCPUs of the whole machine, this one included.
    pub cpus: u32,
    /// Guest TSC ticks in a second.
    pub tsc_frequency: u64,
    /// Time is the count of executed instructions.
    pub deterministic: bool,
}
