//! The disks and networks that a machine is asked to have, as one slice sees them:
//! those that lie here are opened and described to the others, those of others are
//! heard of. Each slice tells first and listens then, so that none waits for one
//! that waits for it.

mod disks;
mod networks;

use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use thiserror::Error;
use weft_virtio::VirtioDevice;

use crate::Slice;
use crate::remote_devices::QueuePlacement;

pub use crate::remote_devices::DataPath;
pub use disks::OpenDisks;
pub use networks::OpenSwitches;

/// A disk: a raw image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Disk {
    /// The file or block device.
    pub path: PathBuf,
    /// The guest may not write to it.
    #[serde(default)]
    pub read_only: bool,
    /// Goes around the host's page cache.
    #[serde(default)]
    pub direct: bool,
    /// The slice that has it.
    #[serde(default)]
    pub slice: u32,
    /// How other slices' vCPUs reach it.
    #[serde(default)]
    pub data_path: DataPath,
}

/// A port of the host that reaches a port of the guest (user-mode network).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Forward {
    /// TCP port on the host's loopback.
    pub host_port: u16,
    /// TCP port in the guest.
    pub guest_port: u16,
}

/// Where a network card's frames go.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Network {
    /// The name of a tap device of the host.
    Tap {
        name: String,
        /// The slice that has it.
        #[serde(default)]
        slice: u32,
        /// How other slices' vCPUs reach it.
        #[serde(default)]
        data_path: DataPath,
    },
    /// A network in user space (passt): needs no privilege.
    User {
        /// Ports of the host that reach the guest.
        #[serde(default)]
        forwards: Vec<Forward>,
        /// Whether the gateway's address is this host's loopback to the guest.
        #[serde(default)]
        reaches_host: bool,
        /// The slice that has it.
        #[serde(default)]
        slice: u32,
        /// How other slices' vCPUs reach it.
        #[serde(default)]
        data_path: DataPath,
    },
    /// A switch (`weft switch`).
    Switch {
        socket: SwitchSocket,
        /// The card's address, for its life.
        mac: [u8; 6],
        /// The slice that has it.
        #[serde(default)]
        slice: u32,
        /// How other slices' vCPUs reach it.
        #[serde(default)]
        data_path: DataPath,
    },
}

/// Where a card finds its switch, on each host that it comes to. As text a name has no slash.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "PathBuf", into = "PathBuf")]
pub enum SwitchSocket {
    /// At this path.
    At(PathBuf),
    /// At a path that each host has for this name: the process that makes the slice connects,
    /// see [`OpenSwitches`].
    Named(String),
}

impl From<PathBuf> for SwitchSocket {
    fn from(path: PathBuf) -> Self {
        match path.to_str() {
            Some(name) if !name.contains('/') => Self::Named(name.to_owned()),
            _ => Self::At(path),
        }
    }
}

impl From<SwitchSocket> for PathBuf {
    fn from(socket: SwitchSocket) -> Self {
        match socket {
            SwitchSocket::At(path) => path,
            SwitchSocket::Named(name) => name.into(),
        }
    }
}

impl Network {
    /// The slice that has it.
    pub fn slice(&self) -> u32 {
        match self {
            Self::Tap { slice, .. } | Self::User { slice, .. } | Self::Switch { slice, .. } => {
                *slice
            }
        }
    }

    /// How other slices' vCPUs reach it.
    pub fn data_path(&self) -> DataPath {
        match self {
            Self::Tap { data_path, .. }
            | Self::User { data_path, .. }
            | Self::Switch { data_path, .. } => *data_path,
        }
    }
}

/// A device with the slices that serve it.
pub type Placed = (QueuePlacement, Box<dyn VirtioDevice>);

/// What of a machine its disks and networks need to know.
#[derive(Clone, Copy, Debug)]
pub struct DeviceList<'a> {
    /// vCPUs of all slices: devices have a queue for each, as far as they can.
    pub cpus: u32,
    /// Disks, in the order in which the guest finds them.
    pub disks: &'a [Disk],
    /// Network cards, in that order too, behind the disks.
    pub networks: &'a [Network],
}

impl DeviceList<'_> {
    /// All of them, as `slice` has its part in each.
    ///
    /// # Errors
    /// The first that cannot be had.
    pub fn of_slice(
        &self,
        slice: &Arc<Slice>,
        (disks, switches): (&OpenDisks, &OpenSwitches),
    ) -> Result<Vec<Placed>, DeviceSetupError> {
        let mut all: Vec<Placed> = Vec::new();
        for (placement, block) in self.disks_of_slice(slice, disks)? {
            all.push((placement, Box::new(block)));
        }
        all.extend(self.networks_of_slice(slice, switches)?);
        Ok(all)
    }
}

/// Why a disk or a network cannot be had.
#[derive(Debug, Error)]
pub enum DeviceSetupError {
    /// A disk cannot be had.
    #[error(transparent)]
    Disk(#[from] weft_virtio::block::BlockError),
    /// No network.
    #[error(transparent)]
    Network(#[from] weft_virtio::net::NetError),
    /// Another slice did not say what its device is.
    #[error("node {slice} did not describe its {device} {number}: {reason}")]
    Described {
        slice: usize,
        /// `disk` or `network`.
        device: &'static str,
        /// Which of them, from 0.
        number: usize,
        /// What came instead.
        reason: String,
    },
    /// What serves devices of several slices could not be made.
    #[error("cannot serve the devices of several nodes")]
    RemoteDevices(#[source] std::io::Error),
}
