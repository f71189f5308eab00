//! What a disk is to its driver. It is also its state, for nothing is in flight
//! when that is saved.

use serde::{Deserialize, Serialize};

use super::SECTOR;
use crate::StateError;

/// Bytes of a serial number (5.2.6).
pub const SERIAL: usize = 20;

/// What the driver was told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Geometry {
    /// Size.
    pub sectors: u64,
    /// Logical blocks, in bytes.
    pub block_size: u32,
    /// Whether it refuses writes.
    pub read_only: bool,
    /// Serial number.
    pub serial: Vec<u8>,
}

impl Geometry {
    /// Whether it can be a disk's: another process may say anything.
    pub fn is_possible(&self) -> bool {
        let block_size = u64::from(self.block_size);
        self.sectors > 0
            && self.sectors <= u64::MAX / SECTOR
            && block_size.is_power_of_two()
            && (SECTOR..=4096).contains(&block_size)
            && self.serial.len() == SERIAL
    }

    /// Whether all of it is on the disk.
    pub fn holds(&self, sector: u64, sectors: u64) -> bool {
        sector
            .checked_add(sectors)
            .is_some_and(|end| end <= self.sectors)
    }

    /// Whether a driver that was told `saved` can go on with this disk.
    pub(super) fn serves(&self, saved: &Self) -> Result<(), StateError> {
        if self.sectors != saved.sectors {
            return Err(StateError("the disk's size differs"));
        }
        if self.block_size > saved.block_size {
            return Err(StateError("the disk's blocks are larger"));
        }
        if self.read_only && !saved.read_only {
            return Err(StateError("the disk is read-only here"));
        }
        Ok(())
    }
}
