//! Where each vCPU is: one slice's copy of the table that all slices have.
//!
//! ```text
//!   version n at slice A ──hand over──▶ version n + 1 at slice B ──▶ ...
//! ```
//!
//! Invariants: an entry's version only grows, by one each time; a version of a vCPU
//! is at the same slice in every copy; version 0 is the placement.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The greatest version that an entry has room for.
pub const VERSION_MAX: u64 = (1 << 48) - 1;
/// Bits of an entry for its slice, below those for the version.
const SLICE_BITS: u32 = 16;
/// Bytes of an entry, as it travels.
const ENTRY_BYTES: usize = 8;

/// Where a vCPU is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// The slice that has it.
    pub slice: usize,
    /// How often it moved until it was there: 0 to [`VERSION_MAX`].
    pub version: u64,
}

impl Place {
    fn pack(self) -> u64 {
        self.version << SLICE_BITS | self.slice as u64
    }

    fn unpack(entry: u64) -> Self {
        Self {
            slice: (entry & ((1 << SLICE_BITS) - 1)) as usize,
            version: entry >> SLICE_BITS,
        }
    }
}

/// Why what somebody said about a vCPU's place is not believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum LocationError {
    /// There is none of this number.
    #[error("it sent a location of vCPU {vcpu}, but there are {cpus}")]
    Vcpu {
        /// Its number.
        vcpu: u32,
        /// How many there are.
        cpus: u32,
    },
    /// There is none of this number.
    #[error("it sent node {slice} as the location of vCPU {vcpu}, but there are {slices}")]
    Slice {
        vcpu: u32,
        /// Where it is said to be.
        slice: usize,
        /// How many slices there are.
        slices: usize,
    },
    /// Versions come one after the other.
    #[error(
        "it sent the location of vCPU {vcpu} after move {said}, but this node knows {known}: a \
        move is missing"
    )]
    Skipped {
        vcpu: u32,
        /// The version that was said.
        said: u64,
        /// The version that is known.
        known: u64,
    },
    /// A version is at one slice.
    #[error(
        "it has vCPU {vcpu} on node {theirs} as of move {version}, this node on node {ours}: \
        the two tables contradict each other"
    )]
    Differs {
        vcpu: u32,
        /// As of this version.
        version: u64,
        /// Where the other one has it.
        theirs: usize,
        /// Where this one has it.
        ours: usize,
    },
    /// No more moves can be told apart.
    #[error("vCPU {vcpu} moved {VERSION_MAX} times: it cannot move any more")]
    Versions { vcpu: u32 },
    /// It cannot leave without its state, nor come without it.
    #[error(
        "it reported that vCPU {vcpu} moved from node {from} to node {to}, but node {here} has \
        neither sent nor received its state"
    )]
    WithoutState {
        vcpu: u32,
        /// Where it is here.
        from: usize,
        /// Where it is said to be.
        to: usize,
        /// The slice that received the message.
        here: usize,
    },
    /// A table of another length.
    #[error("it has {theirs} vCPUs in its table, this node {ours}")]
    Length {
        /// Entries of the other one's.
        theirs: usize,
        /// Entries of this one's.
        ours: usize,
    },
}

/// One slice's copy of the table. Reading takes one atomic load.
pub struct Locations {
    entries: Box<[AtomicU64]>,
    slices: usize,
}

impl Locations {
    /// As vCPUs are distributed: the first ones to slice 0, the next to slice 1, and
    /// so on, all of version 0.
    pub fn new(counts: impl IntoIterator<Item = u32>) -> Self {
        let mut entries = Vec::new();
        let mut slices = 0;
        for (slice, count) in counts.into_iter().enumerate() {
            let place = Place { slice, version: 0 };
            entries.extend((0..count).map(|_| AtomicU64::new(place.pack())));
            slices = slice + 1;
        }
        Self {
            entries: entries.into(),
            slices,
        }
    }

    /// How many vCPUs there are.
    pub fn cpus(&self) -> u32 {
        self.entries.len() as u32
    }

    /// Where a vCPU is; `None` where there is none of this number.
    pub fn of(&self, vcpu: u32) -> Option<Place> {
        let entry = self.entries.get(vcpu as usize)?;
        // SeqCst as in the module's argument about mailboxes (`router`): on x86 a load
        // like any other.
        Some(Place::unpack(entry.load(Ordering::SeqCst)))
    }

    /// Where all are, by number.
    pub fn all(&self) -> Vec<Place> {
        (0..self.cpus()).filter_map(|vcpu| self.of(vcpu)).collect()
    }

    /// The vCPUs that a slice has, in order.
    pub fn at(&self, slice: usize) -> Vec<u32> {
        let is_there = |vcpu: &u32| self.of(*vcpu).is_some_and(|place| place.slice == slice);
        (0..self.cpus()).filter(is_there).collect()
    }

    /// Whether a vCPU's entry may become `place`: `Ok(false)` when it is as new.
    /// Whoever asks is the only one who changes it.
    ///
    /// # Errors
    /// It cannot be true.
    pub(super) fn follows(&self, vcpu: u32, place: Place) -> Result<bool, LocationError> {
        let Place { slice, version } = place;
        let known = self.known(vcpu)?;
        if slice >= self.slices {
            let slices = self.slices;
            return Err(LocationError::Slice {
                vcpu,
                slice,
                slices,
            });
        }
        if version > VERSION_MAX {
            return Err(LocationError::Versions { vcpu });
        }
        if version == known.version && slice != known.slice {
            return Err(LocationError::Differs {
                vcpu,
                version,
                theirs: slice,
                ours: known.slice,
            });
        }
        if version > known.version + 1 {
            return Err(LocationError::Skipped {
                vcpu,
                said: version,
                known: known.version,
            });
        }
        Ok(version > known.version)
    }

    /// The entry is `place` from now on, which [`Locations::follows`] allowed.
    pub(super) fn set(&self, vcpu: u32, place: Place) {
        if let Some(entry) = self.entries.get(vcpu as usize) {
            let before = entry.swap(place.pack(), Ordering::SeqCst);
            let before = Place::unpack(before).version;
            assert!(
                before < place.version,
                "vCPU {vcpu}: {before} then {place:?}"
            );
        }
    }

    /// Where a vCPU is.
    ///
    /// # Errors
    /// There is none of this number.
    pub(super) fn known(&self, vcpu: u32) -> Result<Place, LocationError> {
        let cpus = self.cpus();
        self.of(vcpu).ok_or(LocationError::Vcpu { vcpu, cpus })
    }

    /// All of it, as it travels: eight bytes for each vCPU, the least significant
    /// first, of which the lowest two are the slice.
    pub fn to_bytes(&self) -> Vec<u8> {
        let entries = self.all().into_iter();
        entries
            .flat_map(|place| place.pack().to_le_bytes())
            .collect()
    }

    /// Compares it with another slice's.
    ///
    /// # Errors
    /// They differ, with the first difference.
    pub fn compare(&self, bytes: &[u8]) -> Result<(), LocationError> {
        let (theirs, rest) = bytes.as_chunks::<ENTRY_BYTES>();
        if theirs.len() != self.entries.len() || !rest.is_empty() {
            return Err(LocationError::Length {
                theirs: bytes.len().div_ceil(ENTRY_BYTES),
                ours: self.entries.len(),
            });
        }
        for (vcpu, (entry, ours)) in (0..).zip(theirs.iter().zip(self.all())) {
            let theirs = Place::unpack(u64::from_le_bytes(*entry));
            if theirs != ours && theirs.version == ours.version {
                return Err(LocationError::Differs {
                    vcpu,
                    version: ours.version,
                    theirs: theirs.slice,
                    ours: ours.slice,
                });
            }
            if theirs != ours {
                return Err(LocationError::Skipped {
                    vcpu,
                    said: theirs.version,
                    known: ours.version,
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(slice: usize, version: u64) -> Place {
        Place { slice, version }
    }

    #[test]
    fn entries_hold_both_ends_of_what_they_may() {
        for at in [place(0, 0), place(15, VERSION_MAX), place(255, 1)] {
            assert_eq!(Place::unpack(at.pack()), at);
        }
        let table = Locations::new([1, 0, 2]);
        assert_eq!((table.at(1), table.at(2)), (vec![], vec![1, 2]));
        assert_eq!((table.of(2), table.of(3)), (Some(place(2, 0)), None));
    }

    #[test]
    fn only_what_follows_is_taken() {
        let table = Locations::new([1, 1, 0]);
        assert_eq!(table.follows(1, place(2, 1)), Ok(true));
        table.set(1, place(2, 1));
        assert_eq!(table.of(1), Some(place(2, 1)));
        // As new, and older.
        assert_eq!(table.follows(1, place(2, 1)), Ok(false));
        assert_eq!(table.follows(1, place(1, 0)), Ok(false));
        let cpus = 2;
        for (vcpu, said, error) in [
            (2, place(0, 1), LocationError::Vcpu { vcpu: 2, cpus }),
            (
                1,
                place(3, 2),
                LocationError::Slice {
                    vcpu: 1,
                    slice: 3,
                    slices: 3,
                },
            ),
            (
                1,
                place(0, 1),
                LocationError::Differs {
                    vcpu: 1,
                    version: 1,
                    theirs: 0,
                    ours: 2,
                },
            ),
            (
                1,
                place(0, 3),
                LocationError::Skipped {
                    vcpu: 1,
                    said: 3,
                    known: 1,
                },
            ),
            (
                1,
                place(0, VERSION_MAX + 1),
                LocationError::Versions { vcpu: 1 },
            ),
        ] {
            assert_eq!(table.follows(vcpu, said), Err(error));
        }
        assert_eq!(table.of(1), Some(place(2, 1)));
    }

    #[test]
    fn the_last_version_has_none_after_it() {
        let table = Locations::new([1, 0]);
        table.set(0, place(1, VERSION_MAX));
        let wrapped = Err(LocationError::Versions { vcpu: 0 });
        assert_eq!(table.follows(0, place(0, VERSION_MAX + 1)), wrapped);
        assert_eq!(table.follows(0, place(0, 0)), Ok(false));
    }

    #[test]
    fn tables_that_differ_are_told_apart() {
        let table = Locations::new([1, 1, 1]);
        assert_eq!(table.compare(&table.to_bytes()), Ok(()));
        let other = Locations::new([1, 0, 2]);
        let error = table.compare(&other.to_bytes()).unwrap_err();
        assert!(error.to_string().contains("vCPU 1 on node 2"), "{error}");
        other.set(1, place(1, 1));
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
