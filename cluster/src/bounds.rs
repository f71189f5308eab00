//! What a record of work may say: one that says more is damaged.

/// The most cores of a request.
pub const CORES_MAX: u32 = 4096;
/// The most memory of a request.
pub const MEMORY_MIB_MAX: u64 = 1 << 32;
/// Hosts of one aggregate: a machine has that many nodes at most.
pub const WORK_HOSTS_MAX: u32 = 16;
/// The most urgent priority.
pub const PRIORITY_MAX: u8 = 9;
