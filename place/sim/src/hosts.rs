//! The cluster of a simulation.

use weft_place::Room;

/// The hosts, all alike.
#[derive(Clone, Copy, Debug)]
pub struct Hosts {
    pub count: u32,
    pub room: Room,
    /// Hosts of one group are near each other.
    pub group: u32,
    /// How many cores a host promises for each that it has.
    pub overcommit: f64,
}

impl Hosts {
    pub fn promised(&self) -> Room {
        let cores = (f64::from(self.room.cores) * self.overcommit).round() as u32;
        Room { cores, ..self.room }
    }
}
