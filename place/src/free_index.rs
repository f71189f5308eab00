//! The hosts of one kind by what they have free.
//!
//! A host is in `buckets[c]` where it has `c` free cores, ordered by free memory, and in
//! `by_memory`. Best fit looks at most at one host in each bucket.

use crate::host::HostId;
use crate::room::Room;
use std::collections::BTreeSet;

#[derive(Debug, Default)]
pub struct FreeIndex {
    buckets: Vec<BTreeSet<(u64, HostId)>>,
    by_memory: BTreeSet<(u64, HostId)>,
    free: Room,
}

impl FreeIndex {
    pub fn insert(&mut self, host: HostId, free: Room) {
        let cores = free.cores as usize;
        if self.buckets.len() <= cores {
            self.buckets.resize_with(cores + 1, BTreeSet::new);
        }
        let new = self.buckets[cores].insert((free.memory_mib, host));
        assert!(new, "host {host:?} is in the index once");
        self.by_memory.insert((free.memory_mib, host));
        self.free += free;
    }

    pub fn remove(&mut self, host: HostId, free: Room) {
        let there = self.buckets[free.cores as usize].remove(&(free.memory_mib, host));
        assert!(there, "host {host:?} is in the index with {free}");
        self.by_memory.remove(&(free.memory_mib, host));
        self.free -= free;
    }

    /// All free room of the hosts here.
    pub fn free(&self) -> Room {
        self.free
    }

    /// The largest number of free cores that a host here may have.
    pub fn cores_max(&self) -> u32 {
        self.buckets.len().saturating_sub(1) as u32
    }

    /// Hosts with `cores` free cores and at least `memory_mib`, less memory first.
    pub fn with_cores(
        &self,
        cores: u32,
        memory_mib: u64,
    ) -> impl DoubleEndedIterator<Item = (HostId, Room)> {
        self.buckets
            .get(cores as usize)
            .into_iter()
            .flat_map(move |bucket| {
                bucket
                    .range((memory_mib, HostId(0))..)
                    .map(move |&(memory_mib, host)| (host, Room::new(cores, memory_mib)))
            })
    }

    /// The hosts that hold `room`, those with the least left over first.
    pub fn fitting(&self, room: Room) -> impl Iterator<Item = (HostId, Room)> {
        (room.cores..=self.cores_max())
            .flat_map(move |cores| self.with_cores(cores, room.memory_mib))
    }

    /// The hosts with the most free memory first, with that memory in MiB.
    pub fn most_memory(&self) -> impl Iterator<Item = (HostId, u64)> {
        self.by_memory
            .iter()
            .rev()
            .map(|&(memory_mib, host)| (host, memory_mib))
    }
}
