//! A host of the cluster, as the scheduler sees it.

use crate::room::Room;
use std::fmt;
use std::time::Duration;

/// The number of a host in its inventory. The caller gives the numbers out, small and
/// dense: they are places in a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostId(pub u32);

/// A set of CPU features, one bit each. What the bits stand for is the caller's affair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Features(pub u64);

impl Features {
    pub fn contains(self, needed: Features) -> bool {
        self.0 & needed.0 == needed.0
    }
}

/// Devices of one kind: what a host lends, or what a request needs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Device {
    pub kind: Box<str>,
    pub count: u32,
}

/// Whether a host is expected to last.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Health {
    #[default]
    Well,
    /// It reported errors, or somebody said that it will fail. The reason is a phrase
    /// such as "3 memory errors in an hour".
    Sick(Box<str>),
}

/// A host and what it lends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    pub id: HostId,
    pub name: Box<str>,
    pub capacity: Room,
    pub features: Features,
    pub devices: Vec<Device>,
    /// Hosts of one group are near one another: one rack, one switch.
    pub group: u32,
    pub health: Health,
    /// Nothing new starts here, and nothing moves here.
    pub cordoned: bool,
    /// All aggregates are to leave.
    pub draining: bool,
    /// When the host leaves the cluster, if that is known.
    pub deadline: Option<Duration>,
    /// Memory that aggregates have here and the owner wants back, MiB.
    pub wanted_back_mib: u64,
}

impl Host {
    /// A well host without devices, in group 0.
    pub fn new(id: HostId, name: impl Into<Box<str>>, capacity: Room) -> Host {
        Host {
            id,
            name: name.into(),
            capacity,
            features: Features::default(),
            devices: Vec::new(),
            group: 0,
            health: Health::Well,
            cordoned: false,
            draining: false,
            deadline: None,
            wanted_back_mib: 0,
        }
    }

    /// Why aggregates have to leave this host, `None` where they may stay. A deadline
    /// counts from `notice` before it on: a move takes time.
    pub fn must_leave(&self, now: Duration, notice: Duration) -> Option<Leave> {
        if let Health::Sick(reason) = &self.health {
            Some(Leave::Sick(reason.clone()))
        } else if self.draining {
            Some(Leave::Draining)
        } else {
            let deadline = self.deadline?;
            (deadline <= now + notice).then(|| Leave::Deadline(deadline.saturating_sub(now)))
        }
    }

    /// Whether something new may come here.
    pub fn takes_more(&self, now: Duration, notice: Duration) -> bool {
        !self.cordoned && self.wanted_back_mib == 0 && self.must_leave(now, notice).is_none()
    }
}

/// Why aggregates leave a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Leave {
    Draining,
    Sick(Box<str>),
    /// The host leaves after this time.
    Deadline(Duration),
    /// Some of them: the owner wants this much memory back, in MiB.
    WantedBack(u64),
}

impl fmt::Display for Leave {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Leave::Draining => write!(f, "is drained"),
            Leave::Sick(reason) => write!(f, "is expected to fail ({reason})"),
            Leave::Deadline(left) => write!(f, "leaves the cluster in {} s", left.as_secs()),
            Leave::WantedBack(mib) => write!(f, "lends {mib} MiB less than is used there"),
        }
    }
}
