//! What a user asks for.

use crate::host::{Device, Features, HostId};
use crate::room::Room;

/// The number of an aggregate, given out by the caller and never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AggregateId(pub u64);

/// A program or a machine that wants to start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    pub id: AggregateId,
    pub name: Box<str>,
    pub room: Room,
    /// Each host must have these.
    pub features: Features,
    /// They all come from one host.
    pub devices: Vec<Device>,
    /// The most hosts that it may be spread over. 1: it runs whole or not at all.
    pub hosts_max: u32,
    /// A larger number is served first; equal ones in the order of arrival.
    pub priority: u8,
    /// The first part is on this host, and stays there: what started it is there.
    pub home: Option<HostId>,
    /// Where there is no such host, the first part stays on the one on which it starts.
    pub home_stays: bool,
    /// It cannot move while it runs.
    pub fixed: bool,
    /// What each core takes of the memory, beside what the aggregate works on.
    pub core_memory_mib: u64,
}

/// What is wrong with a request or with a host.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    #[error("{0} asks for no core: ask for one or more")]
    NoCores(Box<str>),
    #[error("{0} asks for no memory: ask for 1 MiB or more")]
    NoMemory(Box<str>),
    #[error("{0} asks for one kind of device twice: give one number for each kind")]
    TwinDevices(Box<str>),
    #[error("{0} may run on 0 hosts: allow one or more")]
    NoHosts(Box<str>),
    #[error("the number of {0} is used by an aggregate that runs or waits: give it another")]
    KnownAggregate(Box<str>),
}

impl Request {
    /// A request that may be spread over as many hosts as it has cores.
    pub fn new(id: AggregateId, name: impl Into<Box<str>>, room: Room) -> Request {
        Request {
            id,
            name: name.into(),
            room,
            features: Features::default(),
            devices: Vec::new(),
            hosts_max: room.cores.max(1),
            priority: 0,
            home: None,
            home_stays: false,
            fixed: false,
            core_memory_mib: 0,
        }
    }

    pub fn check(&self) -> Result<(), RequestError> {
        if self.room.cores == 0 {
            Err(RequestError::NoCores(self.name.clone()))
        } else if self.room.memory_mib == 0 {
            Err(RequestError::NoMemory(self.name.clone()))
        } else if self.hosts_max == 0 {
            Err(RequestError::NoHosts(self.name.clone()))
        } else if self.devices.iter().enumerate().any(|(n, device)| {
            self.devices[..n]
                .iter()
                .any(|other| other.kind == device.kind)
        }) {
            Err(RequestError::TwinDevices(self.name.clone()))
        } else {
            Ok(())
        }
    }
}
