//! Which slice serves which queues of a device, now and from the start.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use serde::{Deserialize, Serialize};
use weft_platform::interrupts::Locations;

use crate::PRIMARY;

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

/// A device's queues, dealt to slices. A *group* is what one handler serves: a queue
/// of a disk, a pair of queues of a network.
///
/// Invariants: every queue belongs to exactly one group, every group to one slice at a time.
/// That is the slice which served it at the start, or the one that has the device: those two
/// have what they need for it from the start. Groups that slice 0 served at the start stay.
/// Where the placement is *open*, any slice that joined may serve the group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueuePlacement {
    owner: usize,
    /// By group, at the start.
    first: Vec<usize>,
    /// By group, now.
    servers: Vec<usize>,
    group_queues: u16,
    is_open: bool,
}

impl QueuePlacement {
    /// A device that `owner` has, of `groups` of `group_queues` queues each. With
    /// `bypass` group `u` of as many as there are vCPUs is served where vCPU `u` is,
    /// for Linux gives it to that vCPU; of fewer groups each serves the vCPUs that
    /// follow one another, as Linux deals them. Groups stay there when vCPUs move.
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
        let servers: Vec<usize> = (0..groups).map(server).collect();
        Self {
            owner,
            first: servers.clone(),
            servers,
            group_queues,
            is_open: false,
        }
    }

    /// A device that `owner` has and serves, of one group, which any slice that joins may come
    /// to serve.
    pub fn open(owner: usize, group_queues: u16) -> Self {
        Self {
            owner,
            first: vec![owner],
            servers: vec![owner],
            group_queues,
            is_open: true,
        }
    }

    /// Whether any slice that joins may serve it.
    pub fn is_open(&self) -> bool {
        self.is_open
    }

    /// Whether another slice than the device's may serve a group of it.
    pub fn is_shared(&self) -> bool {
        self.is_open || self.first.iter().any(|first| *first != self.owner)
    }

    /// The slice that has the device's file or link.
    pub fn owner(&self) -> usize {
        self.owner
    }

    /// How many groups there are.
    pub fn groups(&self) -> u16 {
        self.servers.len() as u16
    }

    /// The slice that serves a group.
    pub fn server(&self, group: u16) -> usize {
        self.servers.get(usize::from(group)).copied().unwrap_or(0)
    }

    /// Whether a slice may come to serve a group.
    pub fn may_serve(&self, slice: usize, group: u16) -> bool {
        let first = self.first.get(usize::from(group)).copied();
        self.is_open
            || first == Some(slice)
            || slice == self.owner && first.is_some_and(|first| first != PRIMARY)
    }

    /// The slice other than the device's that may serve a group.
    pub fn other_server(&self, group: u16) -> Option<usize> {
        let first = self.first.get(usize::from(group)).copied();
        first.filter(|first| *first != self.owner)
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

    /// The groups that `slice` may come to serve.
    pub fn groups_for(&self, slice: usize) -> impl Iterator<Item = u16> + '_ {
        (0..self.groups()).filter(move |group| self.may_serve(slice, *group))
    }
}

/// The slice that serves each group of each device.
pub type Servers = BTreeMap<u8, Vec<usize>>;

/// Where the queues of all devices are served. Replaced as a whole, on all slices, while the
/// machine is paused; the epoch grows with each time.
#[derive(Clone, Debug, Default)]
pub struct QueuePlaces {
    epoch: u64,
    devices: BTreeMap<u8, QueuePlacement>,
}

/// A group that another slice serves from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MovedGroup {
    pub device: u8,
    pub group: u16,
    pub from: usize,
    pub to: usize,
}

impl QueuePlaces {
    /// At the start.
    pub fn insert(&mut self, device: u8, placement: QueuePlacement) {
        self.devices.insert(device, placement);
    }

    pub fn get(&self, device: u8) -> Option<&QueuePlacement> {
        self.devices.get(&device)
    }

    /// Whether a network's pairs were dealt to several slices at the start: it has more than that
    /// of a machine on one slice has.
    pub fn has_dealt_pairs(&self) -> bool {
        let mut devices = self.devices.values();
        devices.any(|device| {
            let is_elsewhere = |first: &usize| *first != device.owner;
            device.group_queues > 1 && device.first.iter().any(is_elsewhere)
        })
    }

    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    pub fn servers(&self) -> Servers {
        let devices = self.devices.iter();
        devices
            .map(|(device, placement)| (*device, placement.servers.clone()))
            .collect()
    }

    /// As it is if `slice` serves all that any may serve.
    pub fn open_at(&self, slice: usize) -> Servers {
        let mut servers = self.servers();
        for (placement, servers) in self.devices.values().zip(servers.values_mut()) {
            if placement.is_open {
                servers.fill(slice);
            }
        }
        servers
    }

    /// As it is if the devices' slices serve what `slice` serves now.
    pub fn without(&self, slice: usize) -> Servers {
        let mut servers = self.servers();
        for (device, placement) in &self.devices {
            let all = servers.get_mut(device).into_iter().flatten();
            for server in all.filter(|server| **server == slice) {
                *server = placement.owner;
            }
        }
        servers
    }

    /// What changes with `servers`.
    ///
    /// # Errors
    /// A slice would serve what it cannot, or `epoch` is over.
    pub fn check(&self, epoch: u64, servers: &Servers) -> Result<Vec<MovedGroup>, String> {
        if epoch <= self.epoch {
            let known = self.epoch;
            return Err(format!("places of epoch {epoch}, after those of {known}"));
        }
        if !servers.keys().eq(self.devices.keys()) {
            return Err("places of the queues of other devices".into());
        }
        let mut moved = Vec::new();
        for ((device, placement), servers) in self.devices.iter().zip(servers.values()) {
            if servers.len() != placement.servers.len() {
                return Err(format!("another number of queues of device {device}"));
            }
            for ((group, from), to) in (0..).zip(&placement.servers).zip(servers) {
                if !placement.may_serve(*to, group) {
                    return Err(format!(
                        "node {to} cannot serve queue {group} of device {device}"
                    ));
                }
                let owner = placement.owner;
                if from != to && *from != owner && *to != owner {
                    return Err(format!(
                        "queue {group} of device {device} goes from node {from} to node {to} by \
                         way of node {owner} only"
                    ));
                }
                if from != to {
                    moved.push(MovedGroup {
                        device: *device,
                        group,
                        from: *from,
                        to: *to,
                    });
                }
            }
        }
        Ok(moved)
    }

    /// Replaces them; returns what changed.
    ///
    /// # Errors
    /// As with [`QueuePlaces::check`]; nothing has changed.
    pub fn place(&mut self, epoch: u64, servers: &Servers) -> Result<Vec<MovedGroup>, String> {
        let moved = self.check(epoch, servers)?;
        self.epoch = epoch;
        for (placement, servers) in self.devices.values_mut().zip(servers.values()) {
            placement.servers.clone_from(servers);
        }
        Ok(moved)
    }
}

/// The slices that serve more with `to` than with `from`.
pub fn takers(from: &Servers, to: &Servers) -> BTreeSet<usize> {
    let pairs = from.values().flatten().zip(to.values().flatten());
    pairs
        .filter(|(from, to)| from != to)
        .map(|(_, to)| *to)
        .collect()
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
        assert_eq!(two.servers, [0, 1]);
        let pairs = QueuePlacement::new(&locations, 0, DataPath::Bypass, 4, 2);
        assert_eq!(pairs.queues(2), 4..6);
        assert_eq!((pairs.server_of_queue(5), pairs.server_of_queue(8)), (1, 0));
        assert_eq!(pairs.groups_of(1).collect::<Vec<_>>(), [2, 3]);
    }

    /// A device of slice 1 with a queue for a vCPU of each of three slices.
    fn places() -> QueuePlaces {
        let locations = Locations::new([1, 1, 1]);
        let mut places = QueuePlaces::default();
        let placement = QueuePlacement::new(&locations, 1, DataPath::Bypass, 3, 1);
        places.insert(4, placement);
        places
    }

    #[test]
    fn a_group_is_served_from_its_first_slice_or_the_devices() {
        let mut places = places();
        let placement = places.get(4).unwrap();
        let of = |slice| placement.groups_for(slice).collect::<Vec<_>>();
        assert_eq!(
            [of(0), of(1), of(2), of(3)],
            [vec![0], vec![1, 2], vec![2], vec![]]
        );
        let first = places.servers();
        let without = places.without(2);
        assert_eq!(without, [(4, vec![0, 1, 1])].into());
        assert_eq!(takers(&first, &without), [1].into());
        let moved = MovedGroup {
            device: 4,
            group: 2,
            from: 2,
            to: 1,
        };
        assert_eq!(places.place(1, &without), Ok(vec![moved]));
        assert_eq!(places.get(4).unwrap().groups_of(2).count(), 0);
        assert_eq!(places.place(3, &first).unwrap()[0].to, 2);
    }

    #[test]
    fn an_open_group_is_served_anywhere() {
        let mut places = places();
        places.insert(5, QueuePlacement::open(0, 2));
        let dealt = places.servers()[&4].clone();
        assert_eq!(places.servers()[&5], [0]);
        assert!(!places.has_dealt_pairs());
        let elsewhere = places.open_at(7);
        assert_eq!(elsewhere, [(4, dealt), (5, vec![7])].into());
        assert_eq!(places.place(1, &elsewhere).unwrap().len(), 1);
        assert_eq!(places.get(5).unwrap().server(0), 7);
        assert_eq!(places.without(7)[&5], [0]);
        let refused = places.place(2, &places.open_at(3)).unwrap_err();
        assert!(refused.contains("by way of node 0 only"), "{refused}");
    }

    #[test]
    fn impossible_places_change_nothing() {
        let mut places = places();
        let first = places.servers();
        places.place(2, &first).unwrap();
        for (epoch, servers, words) in [
            (2, first, "after those of 2"),
            (3, [(4, vec![0, 1])].into(), "another number"),
            (3, [(5, vec![0, 1, 2])].into(), "other devices"),
            // Slice 0 keeps what it served, and gets no more.
            (
                3,
                [(4, vec![1, 1, 2])].into(),
                "node 1 cannot serve queue 0",
            ),
            (
                3,
                [(4, vec![0, 1, 0])].into(),
                "node 0 cannot serve queue 2",
            ),
        ] {
            let refused = places.place(epoch, &servers).unwrap_err();
            assert!(refused.contains(words), "{refused}");
            assert_eq!(places.epoch(), 2);
        }
    }
}
