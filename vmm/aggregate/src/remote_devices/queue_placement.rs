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

/// What a slice does for a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DevicePart {
    /// It has the file or link.
    BackEnd,
    /// It serves queues; `owner` has the file or link.
    Queues { owner: usize },
}

/// A device's queues, dealt to slices. A *group* is what one handler serves: a queue
/// of a disk, a pair of queues of a network.
///
/// Invariant: every queue belongs to exactly one group, every group to one slice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueuePlacement {
    owner: usize,
    servers: Vec<usize>,
    group_queues: u16,
}

impl QueuePlacement {
    /// A device that `owner` has, of `groups` of `group_queues` queues each. With
    /// `bypass` group `u` of as many as there are vCPUs is served where vCPU `u` is,
    /// for Linux gives it to that vCPU; of fewer groups each serves the vCPUs that
    /// follow one another, as Linux deals them. Units stay there when vCPUs move.
    pub fn new(
        locations: &Locations,
        owner: usize,
        path: DataPath,
        groups: u16,
        group_queues: u16,
    ) -> Self {
        let cpus = u64::from(locations.cpus());
        let server = |group: u16| match path {
            DataPath::Dsm => owner,
            DataPath::Bypass => {
                let cpu = u64::from(group) * cpus / u64::from(groups.max(1));
                locations.of(cpu as u32).map_or(owner, |place| place.slice)
            }
        };
        Self {
            owner,
            servers: (0..groups).map(server).collect(),
            group_queues,
        }
    }

    /// The slice that has the device's file or link.
    pub fn owner(&self) -> usize {
        self.owner
    }

    /// What `slice` does for the device; `None`: nothing.
    pub fn part_of(&self, slice: usize) -> Option<DevicePart> {
        let owner = self.owner;
        match self.servers.contains(&slice) {
            _ if owner == slice => Some(DevicePart::BackEnd),
            true => Some(DevicePart::Queues { owner }),
            false => None,
        }
    }

    /// How many groups there are.
    pub fn groups(&self) -> u16 {
        self.servers.len() as u16
    }

    /// The slice that serves a group.
    pub fn server(&self, group: u16) -> usize {
        self.servers.get(usize::from(group)).copied().unwrap_or(0)
    }

    /// The slice that serves a queue: those behind the last group go with the first.
    pub fn server_of_queue(&self, queue: u16) -> usize {
        let group = usize::from(queue / self.group_queues);
        let server = self.servers.get(group).or(self.servers.first());
        server.copied().unwrap_or(0)
    }

    /// The queues of a group.
    pub fn queues(&self, group: u16) -> Range<u16> {
        group * self.group_queues..(group + 1) * self.group_queues
    }

    /// The groups that `slice` serves.
    pub fn groups_of(&self, slice: usize) -> impl Iterator<Item = u16> + '_ {
        (0..self.groups()).filter(move |group| self.server(*group) == slice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_follow_the_vcpus_or_stay_with_the_device() {
        let locations = Locations::new([2, 2]);
        let of = |path, groups| QueuePlacement::new(&locations, 1, path, groups, 1).servers;
        assert_eq!(of(DataPath::Bypass, 4), [0, 0, 1, 1]);
        assert_eq!(of(DataPath::Bypass, 2), [0, 1]);
        assert_eq!(of(DataPath::Bypass, 1), [0]);
        assert_eq!(of(DataPath::Dsm, 4), [1; 4]);
        let two = QueuePlacement::new(&locations, 0, DataPath::Bypass, 2, 1);
        assert_eq!(two.part_of(0), Some(DevicePart::BackEnd));
        assert_eq!(two.part_of(1), Some(DevicePart::Queues { owner: 0 }));
        assert_eq!(two.part_of(2), None);
        let all_there = QueuePlacement::new(&locations, 0, DataPath::Dsm, 2, 1);
        assert_eq!(all_there.part_of(1), None);
        let pairs = QueuePlacement::new(&locations, 0, DataPath::Bypass, 4, 2);
        assert_eq!(pairs.queues(2), 4..6);
        assert_eq!((pairs.server_of_queue(5), pairs.server_of_queue(8)), (1, 0));
        assert_eq!(pairs.groups_of(1).collect::<Vec<_>>(), [2, 3]);
    }
}
