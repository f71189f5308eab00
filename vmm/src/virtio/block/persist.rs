//! State of a disk: nothing is in flight, so only what must be the same again.

use serde::{Deserialize, Serialize};

use super::disk::Disk;
use crate::virtio::StateError;

/// What the driver was told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockState {
    /// Size.
    pub sectors: u64,
    /// Logical blocks, in bytes.
    pub block_size: u32,
    /// Whether it refuses writes.
    pub read_only: bool,
    /// Serial number.
    pub serial: Vec<u8>,
}

pub(super) fn save(disk: &Disk) -> BlockState {
    BlockState {
        sectors: disk.sectors(),
        block_size: disk.block_size(),
        read_only: disk.read_only(),
        serial: disk.serial().to_vec(),
    }
}

pub(super) fn check(disk: &Disk, state: &BlockState) -> Result<(), StateError> {
    let here = save(disk);
    if here.sectors != state.sectors {
        return Err(StateError("the disk has another size"));
    }
    if here.block_size > state.block_size {
        return Err(StateError("the disk has larger blocks"));
    }
    if here.read_only && !state.read_only {
        return Err(StateError("the disk is read-only here"));
    }
    Ok(())
}
