//! What is known of a malleable cluster.

use std::collections::BTreeMap;
use std::time::Duration;

/// Machines that a host has at most, those that come and go included: as many as its switch has
/// places for cards.
pub const MACHINES_ON_HOST_MAX: usize = 64;

/// A reservation: one host for a time. Never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostId(pub u32);

/// A machine of the cluster, for its whole life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MachineId(pub u32);

/// A host that has come, and has not been given back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    pub name: String,
    /// When the batch system takes it back, as it says now. `None`: it does not say.
    pub until: Option<Duration>,
    /// Memory for machines, bytes.
    pub room: u64,
    /// It has to be empty as soon as possible: a user or the batch system said so.
    pub leaves: bool,
}

/// A machine that runs, or is about to.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    /// Its size, bytes.
    pub memory: u64,
    /// What it has touched of that, bytes: what a move carries.
    pub resident: u64,
    /// Bytes a second that it writes anew.
    pub dirties: f64,
    pub at: HostId,
    /// A move is under way, to there.
    pub moves_to: Option<HostId>,
    /// It is being written to the folder that was named; afterwards it is no machine of the
    /// cluster any more. Until then it needs its host.
    pub is_being_saved: bool,
}

impl Machine {
    /// Where it is, or is about to be.
    pub fn goes_to(&self) -> HostId {
        self.moves_to.unwrap_or(self.at)
    }
}

/// Hosts, machines, and what a user wants of them.
#[derive(Clone, Debug, Default)]
pub struct Cluster {
    /// How many hosts a user wants.
    pub wanted: usize,
    /// How many were asked for and have not come yet.
    pub asked: usize,
    pub hosts: BTreeMap<HostId, Host>,
    pub machines: BTreeMap<MachineId, Machine>,
    /// The machines are the parts of this one, from number 0 on.
    pub one: Option<OneMachine>,
}

/// One machine over all hosts, whose parts are the machines of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OneMachine {
    /// The most hosts that it can be on: each has a vCPU.
    pub hosts_max: usize,
    /// The most hosts that it can have while it changes them: those before and after.
    pub at_once_max: usize,
    /// Its memory, bytes.
    pub memory: u64,
    /// What each part needs of a host's memory beside its share of the machine's, bytes.
    pub overhead: u64,
}

impl OneMachine {
    /// What a host needs for a part, if the machine is on `hosts`.
    pub fn part(&self, hosts: usize) -> u64 {
        self.overhead + self.memory.div_ceil(hosts.max(1) as u64)
    }
}

/// What a site and a user set.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rules {
    /// A host is empty this much before its end at least.
    pub margin: Duration,
    /// A replacement is asked for this much before a host must begin to leave.
    pub ask_ahead: Duration,
    /// A machine goes to a host for load alone if it can be there for this multiple of what the
    /// moves to it and from it take.
    pub worth: f64,
    /// Bytes a second that a machine is saved with; `None`: no folder was named for that.
    pub saves: Option<f64>,
    /// Whether hosts are asked for and machines move by themselves.
    pub adaptive: bool,
}

impl Default for Rules {
    fn default() -> Rules {
        Rules {
            margin: Duration::from_secs(5),
            ask_ahead: Duration::from_secs(30),
            worth: 4.0,
            saves: None,
            adaptive: true,
        }
    }
}
