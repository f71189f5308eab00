//! What moves, and what it cost.

use serde::{Deserialize, Serialize};
use weft_aggregate::MovedVcpu;
use weft_aggregate::remote_devices::Servers;
use weft_platform::clock::TimeBase;

/// The request's name, for refusals.
pub(super) const REQUEST: &str = "move a vCPU";
/// The name of the request that moves the timekeeper.
pub(super) const MOVE_TIME: &str = "move the timekeeper";

/// Another node keeps the time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimeMoveReport {
    /// The node that kept it.
    pub from: usize,
    /// The node that keeps it now.
    pub to: usize,
    /// Grows with each take-over.
    pub epoch: u64,
}

/// The name of the request that moves the platform.
pub(super) const MOVE_PLATFORM: &str = "move the platform";

/// Another node has the platform: the I/O APIC and the small devices.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlatformMoveReport {
    /// The node that had it.
    pub from: usize,
    /// The node that has it now.
    pub to: usize,
    /// Grows with each take-over.
    pub epoch: u64,
    /// Bytes of the state that went.
    pub state_bytes: usize,
    /// How long the guest stood; 0 if it was paused before.
    pub stopped_ns: u64,
}

/// The name of the request that moves queues.
pub(super) const MOVE_QUEUES: &str = "move queues of disks and networks";

/// Which queues go where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum QueueMove {
    /// Those of this slice go to the slices that have their devices.
    Away(usize),
    /// All are served so.
    To(Servers),
}

/// Other nodes serve queues of disks and networks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueMoveReport {
    /// Queues of disks, and pairs of queues of networks, that went.
    pub queues: usize,
    /// How long the guest stood; 0 if it was paused before, or none went.
    pub stopped_ns: u64,
    /// The node that served each of them before, by device.
    pub before: Servers,
}

/// A vCPU that moved, and what it cost. Times are of the guest's clock, which all nodes
/// share; between hosts they are as exact as that (`sliceN.clock-error-ns`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VcpuMoveReport {
    pub vcpu: u32,
    /// The node that it left.
    pub from: usize,
    /// The node that has it now.
    pub to: usize,
    /// How often it has moved.
    pub moves: u64,
    /// Bytes of the message that carried it.
    pub state_bytes: usize,
    /// From the end of guest code on the one node to its beginning on the other: the
    /// sum of `save_ns`, `send_ns`, `resume_ns` and `install_ns`.
    pub stopped_ns: u64,
    /// From the request on the node that has it to the end of guest code there.
    pub stop_ns: u64,
    /// To save it and to change the table there.
    pub save_ns: u64,
    /// On the way, through node 0 if that is neither of the two.
    pub send_ns: u64,
    /// To wake its thread.
    pub resume_ns: u64,
    /// From the thread's first step at the target to the first instruction.
    pub install_ns: u64,
}

impl VcpuMoveReport {
    pub(super) fn new(moved: &MovedVcpu, base: TimeBase) -> Self {
        let between = |from: u64, to: u64| base.nanoseconds(to.saturating_sub(from));
        let [asked, stopped, saved] = moved.at_source.0;
        let [arrived, woken, running] = moved.at_target.0;
        Self {
            vcpu: moved.vcpu,
            from: moved.source,
            to: moved.location.slice,
            moves: moved.location.epoch,
            state_bytes: moved.state_bytes,
            stopped_ns: between(stopped, running),
            stop_ns: between(asked, stopped),
            save_ns: between(stopped, saved),
            send_ns: between(saved, arrived),
            resume_ns: between(arrived, woken),
            install_ns: between(woken, running),
        }
    }
}
