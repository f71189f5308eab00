//! What the [switch](super::switch) of a migration is asked for, and what it did.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use weft_aggregate::commands::DrainShare;

/// What a switch moves.
#[derive(Clone, Debug)]
pub struct SwitchOrder {
    /// By node that gives its pages away, which are being sent ahead: what goes where.
    pub parts: Vec<(usize, Vec<DrainShare>)>,
    /// vCPUs, and where they go.
    pub vcpus: Vec<(u32, usize)>,
    /// Where platform and timekeeper go.
    pub roles: usize,
    /// Longest time in which the last bytes are sent while the machine stands.
    pub copy_max: Duration,
    /// The switch happens only if they were all sent within that time.
    pub needs_all: bool,
}

/// What a switch did.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Switched {
    /// It happened.
    pub is_done: bool,
    pub times: SwitchTimes,
    /// Pages whose bytes had been sent ahead and that have moved.
    pub pages: u64,
    /// By node that gives its pages away: what of its shares is left.
    pub left: Vec<(usize, Vec<DrainShare>)>,
    pub vcpus: usize,
}

/// The time in which the machine stood for the switch, in nanoseconds since its begin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SwitchTimes {
    /// All vCPUs stood.
    pub paused_ns: u64,
    /// The last bytes had been sent.
    pub copied_ns: u64,
    /// All nodes rested.
    pub rested_ns: u64,
    /// The pages had their new owners.
    pub relocated_ns: u64,
    /// The machine ran again; 0 if it was paused before.
    pub stopped_ns: u64,
}
