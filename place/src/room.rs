//! Cores and memory: what hosts have, and what aggregates need.

use std::fmt;
use std::ops::{Add, AddAssign, Sub, SubAssign};

/// Cores and memory. Ordered by cores first: they are the scarcer resource in practice
/// (FragVisor, section 7).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Room {
    pub cores: u32,
    pub memory_mib: u64,
}

impl Room {
    pub const NONE: Room = Room {
        cores: 0,
        memory_mib: 0,
    };

    pub const fn new(cores: u32, memory_mib: u64) -> Room {
        Room { cores, memory_mib }
    }

    pub fn holds(self, other: Room) -> bool {
        self.cores >= other.cores && self.memory_mib >= other.memory_mib
    }

    /// The share of this room's memory that belongs to `cores` of its cores, rounded up.
    /// All of it where these are all cores.
    pub fn share_of(self, cores: u32) -> Room {
        let memory_mib = if self.cores == 0 {
            self.memory_mib
        } else {
            (self.memory_mib * u64::from(cores)).div_ceil(u64::from(self.cores))
        };
        Room { cores, memory_mib }
    }
}

impl Add for Room {
    type Output = Room;
    fn add(self, other: Room) -> Room {
        Room::new(self.cores + other.cores, self.memory_mib + other.memory_mib)
    }
}

/// Panics where `other` is larger: an inventory that gives more than it has is wrong.
impl Sub for Room {
    type Output = Room;
    fn sub(self, other: Room) -> Room {
        assert!(self.holds(other), "{other} taken from {self}");
        Room::new(self.cores - other.cores, self.memory_mib - other.memory_mib)
    }
}

impl AddAssign for Room {
    fn add_assign(&mut self, other: Room) {
        *self = *self + other;
    }
}

impl SubAssign for Room {
    fn sub_assign(&mut self, other: Room) {
        *self = *self - other;
    }
}

impl std::iter::Sum for Room {
    fn sum<I: Iterator<Item = Room>>(rooms: I) -> Room {
        rooms.fold(Room::NONE, Add::add)
    }
}

impl fmt::Display for Room {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cores = if self.cores == 1 { "core" } else { "cores" };
        write!(f, "{} {cores} and {} MiB", self.cores, self.memory_mib)
    }
}
