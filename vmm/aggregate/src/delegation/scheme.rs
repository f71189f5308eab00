//! Which slice serves which queues of a device.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use weft_platform::interrupts::Locations;

/// How the data of a device reach a guest whose vCPUs are on several slices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DataPath {
    /// Each slice serves the queues of its own vCPUs in its own memory; requests and
    /// data travel to the device's slice by themselves.
    #[default]
    Bypass,
    /// The device's slice serves all queues, through the memory that slices share.
    Dsm,
}

/// A device's queues, dealt to slices. A *unit* is what one handler serves: a queue
/// of a disk, a pair of queues of a network.
///
/// Invariant: every queue belongs to exactly one unit, every unit to one slice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scheme {
    owner: usize,
    servers: Vec<usize>,
    unit_queues: u16,
}

impl Scheme {
    /// A device that `owner` has, of `units` of `unit_queues` queues each. With
    /// `bypass` unit `u` of as many as there are vCPUs is served where vCPU `u` is,
    /// for Linux gives it to that vCPU; of fewer units each serves the vCPUs that
    /// follow one another, as Linux deals them. Units stay there when vCPUs move.
    pub fn new(
        locations: &Locations,
        owner: usize,
        path: DataPath,
        units: u16,
        unit_queues: u16,
    ) -> Self {
        let cpus = u64::from(locations.cpus());
        let server = |unit: u16| match path {
            DataPath::Dsm => owner,
            DataPath::Bypass => {
                let cpu = u64::from(unit) * cpus / u64::from(units.max(1));
                locations.of(cpu as u32).map_or(owner, |place| place.slice)
            }
        };
        Self {
            owner,
            servers: (0..units).map(server).collect(),
            unit_queues,
        }
    }

    /// The slice that has the device's file or link.
    pub fn owner(&self) -> usize {
        self.owner
    }

    /// How many units there are.
    pub fn units(&self) -> u16 {
        self.servers.len() as u16
    }

    /// The slice that serves a unit.
    pub fn server(&self, unit: u16) -> usize {
        self.servers.get(usize::from(unit)).copied().unwrap_or(0)
    }

    /// The slice that serves a queue: those behind the last unit go with the first.
    pub fn server_of_queue(&self, queue: u16) -> usize {
        let unit = usize::from(queue / self.unit_queues);
        let server = self.servers.get(unit).or(self.servers.first());
        server.copied().unwrap_or(0)
    }

    /// The queues of a unit.
    pub fn queues(&self, unit: u16) -> Range<u16> {
        unit * self.unit_queues..(unit + 1) * self.unit_queues
    }

    /// The units that `slice` serves.
    pub fn units_of(&self, slice: usize) -> impl Iterator<Item = u16> + '_ {
        (0..self.units()).filter(move |unit| self.server(*unit) == slice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_follow_the_vcpus_or_stay_with_the_device() {
        let locations = Locations::new([2, 2]);
        let of = |path, units| Scheme::new(&locations, 1, path, units, 1).servers;
        assert_eq!(of(DataPath::Bypass, 4), [0, 0, 1, 1]);
        assert_eq!(of(DataPath::Bypass, 2), [0, 1]);
        assert_eq!(of(DataPath::Bypass, 1), [0]);
        assert_eq!(of(DataPath::Dsm, 4), [1; 4]);
        let pairs = Scheme::new(&locations, 0, DataPath::Bypass, 4, 2);
        assert_eq!(pairs.queues(2), 4..6);
        assert_eq!((pairs.server_of_queue(5), pairs.server_of_queue(8)), (1, 0));
        assert_eq!(pairs.units_of(1).collect::<Vec<_>>(), [2, 3]);
    }
}
