//! Where each vCPU is: one slice's copy of the table that all slices have.
//!
//! ```text
//!   epoch n at slice A ──hand over──▶ epoch n + 1 at slice B ──▶ ...
//! ```
//!
//! Invariants: an entry's epoch only grows, by one each time; every copy has the same slice
//! for the same epoch of a vCPU; epoch 0 is the placement.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The largest epoch that fits an entry.
pub const EPOCH_MAX: u64 = (1 << 48) - 1;
/// Bits of an entry for its slice, below those for the epoch.
const SLICE_BITS: u32 = 16;
/// Bytes of an entry, as it travels.
const ENTRY_BYTES: usize = 8;

/// The slice that runs a vCPU, and the epoch since which it does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VcpuLocation {
    /// The slice that runs the vCPU.
    pub slice: usize,
    /// How often the vCPU had moved when it came there: 0 to [`EPOCH_MAX`].
    pub epoch: u64,
}

impl VcpuLocation {
    fn pack(self) -> u64 {
        self.epoch << SLICE_BITS | self.slice as u64
    }

    fn unpack(entry: u64) -> Self {
        Self {
            slice: (entry & ((1 << SLICE_BITS) - 1)) as usize,
            epoch: entry >> SLICE_BITS,
        }
    }
}

/// Why another slice's message about a vCPU's location is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum LocationError {
    /// No vCPU has this number.
    #[error("it sent a location of vCPU {vcpu}, but there are {cpus}")]
    Vcpu {
        vcpu: u32,
        /// vCPUs of the machine.
        cpus: u32,
    },
    /// No slice has this number.
    #[error("it sent node {slice} as the location of vCPU {vcpu}, but there are {slices}")]
    Slice {
        vcpu: u32,
        /// The slice in the message.
        slice: usize,
        /// Slices of the machine.
        slices: usize,
    },
    /// The epoch does not follow the known one.
    #[error(
        "it sent the location of vCPU {vcpu} after move {said}, but this node knows {known}: a \
        move is missing"
    )]
    Skipped {
        vcpu: u32,
        /// The epoch in the message.
        said: u64,
        /// The epoch in this slice's table.
        known: u64,
    },
    /// The two slices have different locations for one epoch.
    #[error(
        "it has vCPU {vcpu} on node {theirs} as of move {epoch}, this node on node {ours}: \
        the two tables contradict each other"
    )]
    Differs {
        vcpu: u32,
        epoch: u64,
        /// The location in the message.
        theirs: usize,
        /// The location in this slice's table.
        ours: usize,
    },
    /// Epochs are used up: 2^48 moves.
    #[error("vCPU {vcpu} moved {EPOCH_MAX} times: it cannot move any more")]
    Epochs { vcpu: u32 },
    /// The message moves a vCPU from or to this slice, which has neither sent nor received
    /// the vCPU's state.
    #[error(
        "it reported that vCPU {vcpu} moved from node {from} to node {to}, but node {here} has \
        neither sent nor received its state"
    )]
    WithoutState {
        vcpu: u32,
        /// The location in this slice's table.
        from: usize,
        /// The location in the message.
        to: usize,
        /// The slice that received the message.
        here: usize,
    },
    /// The two tables have different numbers of vCPUs.
    #[error("it has {theirs} vCPUs in its table, this node {ours}")]
    Length {
        /// Entries of the received table.
        theirs: usize,
        /// Entries of this slice's table.
        ours: usize,
    },
}

/// One slice's copy of the table. Reading takes one atomic load.
pub struct Locations {
    entries: Box<[AtomicU64]>,
    slices: usize,
}

impl Locations {
    /// A table of epoch 0: the first `counts[0]` vCPUs are on slice 0, the next `counts[1]`
    /// on slice 1, and so on.
    ///
    /// vCPUs may go to the slices that `counts` names; see [`Locations::with_room`].
    pub fn new(counts: impl IntoIterator<Item = u32>) -> Self {
        let mut entries = Vec::new();
        let mut slices = 0;
        for (slice, count) in counts.into_iter().enumerate() {
            let location = VcpuLocation { slice, epoch: 0 };
            entries.extend((0..count).map(|_| AtomicU64::new(location.pack())));
            slices = slice + 1;
        }
        Self {
            entries: entries.into(),
            slices,
        }
    }

    /// vCPUs may go to any of `slices` slices, of which some may join later.
    pub fn with_room(mut self, slices: usize) -> Self {
        self.slices = self.slices.max(slices);
        self
    }

    /// vCPUs of the machine.
    pub fn cpus(&self) -> u32 {
        self.entries.len() as u32
    }

    /// A vCPU's location; `None` if no such vCPU exists.
    pub fn of(&self, vcpu: u32) -> Option<VcpuLocation> {
        let entry = self.entries.get(vcpu as usize)?;
        // SeqCst: `router` orders it against posting to a descriptor. On x86 it is an
        // ordinary load.
        Some(VcpuLocation::unpack(entry.load(Ordering::SeqCst)))
    }

    /// All locations, by vCPU.
    pub fn all(&self) -> Vec<VcpuLocation> {
        (0..self.cpus()).filter_map(|vcpu| self.of(vcpu)).collect()
    }

    /// The vCPUs of a slice, in order.
    pub fn at(&self, slice: usize) -> Vec<u32> {
        let is_there = |vcpu: &u32| {
            self.of(*vcpu)
                .is_some_and(|location| location.slice == slice)
        };
        (0..self.cpus()).filter(is_there).collect()
    }

    /// Whether a slice has a vCPU.
    pub fn has_any(&self, slice: usize) -> bool {
        let mut places = (0..self.cpus()).filter_map(|vcpu| self.of(vcpu));
        places.any(|location| location.slice == slice)
    }

    /// Whether `location` is the next of a vCPU's entry; `Ok(false)` if the entry is at least
    /// as new. The caller holds the lock under which entries change.
    ///
    /// # Errors
    /// The location is impossible.
    pub(super) fn follows(&self, vcpu: u32, location: VcpuLocation) -> Result<bool, LocationError> {
        let VcpuLocation { slice, epoch } = location;
        let known = self.known(vcpu)?;
        if slice >= self.slices {
            let slices = self.slices;
            return Err(LocationError::Slice {
                vcpu,
                slice,
                slices,
            });
        }
        if epoch > EPOCH_MAX {
            return Err(LocationError::Epochs { vcpu });
        }
        if epoch == known.epoch && slice != known.slice {
            return Err(LocationError::Differs {
                vcpu,
                epoch,
                theirs: slice,
                ours: known.slice,
            });
        }
        if epoch > known.epoch + 1 {
            return Err(LocationError::Skipped {
                vcpu,
                said: epoch,
                known: known.epoch,
            });
        }
        Ok(epoch > known.epoch)
    }

    /// Sets an entry to `location`, which [`Locations::follows`] allowed.
    pub(super) fn set(&self, vcpu: u32, location: VcpuLocation) {
        if let Some(entry) = self.entries.get(vcpu as usize) {
            let before = entry.swap(location.pack(), Ordering::SeqCst);
            let before = VcpuLocation::unpack(before).epoch;
            assert!(
                before < location.epoch,
                "vCPU {vcpu}: {before} then {location:?}"
            );
        }
    }

    /// A vCPU's location.
    ///
    /// # Errors
    /// No such vCPU exists.
    pub(super) fn known(&self, vcpu: u32) -> Result<VcpuLocation, LocationError> {
        let cpus = self.cpus();
        self.of(vcpu).ok_or(LocationError::Vcpu { vcpu, cpus })
    }

    /// The table as slices send it: eight bytes for each vCPU, little-endian, whose lowest 16
    /// bits are the slice and the others the epoch.
    pub fn to_bytes(&self) -> Vec<u8> {
        let entries = self.all().into_iter();
        entries
            .flat_map(|location| location.pack().to_le_bytes())
            .collect()
    }

    /// The locations that [`Locations::to_bytes`] made bytes of; `None` if they are no table
    /// of as many vCPUs.
    pub fn read(&self, bytes: &[u8]) -> Option<Vec<VcpuLocation>> {
        let (entries, rest) = bytes.as_chunks::<ENTRY_BYTES>();
        if entries.len() != self.entries.len() || !rest.is_empty() {
            return None;
        }
        let unpack = |entry: &[u8; ENTRY_BYTES]| VcpuLocation::unpack(u64::from_le_bytes(*entry));
        Some(entries.iter().map(unpack).collect())
    }

    /// Compares the table with another slice's.
    ///
    /// # Errors
    /// The tables differ; the error has the first difference.
    pub fn compare(&self, bytes: &[u8]) -> Result<(), LocationError> {
        let (theirs, rest) = bytes.as_chunks::<ENTRY_BYTES>();
        if theirs.len() != self.entries.len() || !rest.is_empty() {
            return Err(LocationError::Length {
                theirs: bytes.len().div_ceil(ENTRY_BYTES),
                ours: self.entries.len(),
            });
        }
        for (vcpu, (entry, ours)) in (0..).zip(theirs.iter().zip(self.all())) {
            let theirs = VcpuLocation::unpack(u64::from_le_bytes(*entry));
            if theirs != ours && theirs.epoch == ours.epoch {
                return Err(LocationError::Differs {
                    vcpu,
                    epoch: ours.epoch,
                    theirs: theirs.slice,
                    ours: ours.slice,
                });
            }
            if theirs != ours {
                return Err(LocationError::Skipped {
                    vcpu,
                    said: theirs.epoch,
                    known: ours.epoch,
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn location(slice: usize, epoch: u64) -> VcpuLocation {
        VcpuLocation { slice, epoch }
    }

    #[test]
    fn entries_hold_both_ends_of_what_they_may() {
        for at in [location(0, 0), location(15, EPOCH_MAX), location(255, 1)] {
            assert_eq!(VcpuLocation::unpack(at.pack()), at);
        }
        let table = Locations::new([1, 0, 2]);
        assert_eq!((table.at(1), table.at(2)), (vec![], vec![1, 2]));
        assert_eq!((table.of(2), table.of(3)), (Some(location(2, 0)), None));
    }

    #[test]
    fn only_what_follows_is_taken() {
        let table = Locations::new([1, 1, 0]);
        assert_eq!(table.follows(1, location(2, 1)), Ok(true));
        table.set(1, location(2, 1));
        assert_eq!(table.of(1), Some(location(2, 1)));
        // As new, and older.
        assert_eq!(table.follows(1, location(2, 1)), Ok(false));
        assert_eq!(table.follows(1, location(1, 0)), Ok(false));
        let cpus = 2;
        for (vcpu, said, error) in [
            (2, location(0, 1), LocationError::Vcpu { vcpu: 2, cpus }),
            (
                1,
                location(3, 2),
                LocationError::Slice {
                    vcpu: 1,
                    slice: 3,
                    slices: 3,
                },
            ),
            (
                1,
                location(0, 1),
                LocationError::Differs {
                    vcpu: 1,
                    epoch: 1,
                    theirs: 0,
                    ours: 2,
                },
            ),
            (
                1,
                location(0, 3),
                LocationError::Skipped {
                    vcpu: 1,
                    said: 3,
                    known: 1,
                },
            ),
            (
                1,
                location(0, EPOCH_MAX + 1),
                LocationError::Epochs { vcpu: 1 },
            ),
        ] {
            assert_eq!(table.follows(vcpu, said), Err(error));
        }
        assert_eq!(table.of(1), Some(location(2, 1)));
    }

    #[test]
    fn the_last_version_has_none_after_it() {
        let table = Locations::new([1, 0]);
        table.set(0, location(1, EPOCH_MAX));
        let wrapped = Err(LocationError::Epochs { vcpu: 0 });
        assert_eq!(table.follows(0, location(0, EPOCH_MAX + 1)), wrapped);
        assert_eq!(table.follows(0, location(0, 0)), Ok(false));
    }

    #[test]
    fn tables_that_differ_are_told_apart() {
        let table = Locations::new([1, 1, 1]);
        assert_eq!(table.compare(&table.to_bytes()), Ok(()));
        let other = Locations::new([1, 0, 2]);
        let error = table.compare(&other.to_bytes()).unwrap_err();
        assert!(error.to_string().contains("vCPU 1 on node 2"), "{error}");
        other.set(1, location(1, 1));
        assert!(matches!(
            table.compare(&other.to_bytes()),
            Err(LocationError::Skipped { vcpu: 1, .. })
        ));
        for bytes in [&other.to_bytes()[..16], &[0; 25], &[]] {
            let refused = table.compare(bytes);
            assert!(matches!(refused, Err(LocationError::Length { .. })));
        }
    }
}
