//! What the cluster has, what is free, and which aggregate has which part of it.
//!
//! Invariants, asserted at every change:
//! - what is free on a host and what its aggregates have there is its capacity;
//! - what a move takes on its destination is taken when it starts, and what it leaves on
//!   its source is given back when it ends, so no room is promised twice;
//! - a host is in its pool's index exactly while something new may come to it.

use crate::free_index::FreeIndex;
use crate::host::{Device, Features, Health, Host, HostId};
use crate::placement::{Move, PART_MEMORY_MIN_MIB, Placement};
use crate::request::{AggregateId, Request};
use crate::room::Room;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// What an inventory refuses.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InventoryError {
    #[error("host number {} is taken by {name}: give the new host another", .id.0)]
    KnownHost { id: HostId, name: Box<str> },
    #[error("there is no host with number {}", .0.0)]
    UnknownHost(HostId),
    #[error("not as much runs on host number {} as is said to move from it", .0.0)]
    NotThere(HostId),
    #[error("{0} runs already")]
    RunsAlready(Box<str>),
}

/// An aggregate that runs.
#[derive(Clone, Debug)]
pub struct Aggregate {
    pub request: Request,
    pub placement: Placement,
    /// The move under way. Its destinations are taken already.
    pub moving: Option<Move>,
    /// When it was placed, or moved the last time.
    pub changed: Duration,
}

impl Aggregate {
    /// The host that the home moves to, if it moves: the devices go along.
    fn new_home(&self) -> Option<HostId> {
        let after = self.placement.after(&self.moving.as_ref()?.transfers);
        let home = after.parts[0].host;
        (home != self.placement.parts[0].host).then_some(home)
    }

    /// Whether its part on that host can move to another one at all.
    pub fn may_leave(&self, host: HostId) -> bool {
        !self.request.fixed && self.request.home != Some(host)
    }

    pub fn is_spread(&self) -> bool {
        self.placement.parts.len() > 1
    }
}

struct Entry {
    host: Host,
    free: Room,
    devices_free: Vec<Device>,
    /// Aggregates that have room here, those that move here included.
    aggregates: Vec<AggregateId>,
    pool: usize,
    listed: bool,
}

/// Hosts that differ in nothing but their room and in where they are.
struct Pool {
    features: Features,
    with_devices: bool,
    index: FreeIndex,
    /// The same hosts, those near each other together.
    groups: BTreeMap<u32, FreeIndex>,
    /// Groups by their free cores.
    groups_by_free: BTreeSet<(u32, u32)>,
    /// How many hosts of each capacity, cordoned ones included.
    capacities: BTreeMap<Room, u32>,
}

impl Pool {
    /// What a listed host has free changes; `None`: it is not listed.
    fn change(&mut self, group: u32, id: HostId, before: Option<Room>, after: Option<Room>) {
        let near = self.groups.entry(group).or_default();
        self.groups_by_free.remove(&(near.free().cores, group));
        for index in [&mut self.index, &mut *near] {
            if let Some(before) = before {
                index.remove(id, before);
            }
            if let Some(after) = after {
                index.insert(id, after);
            }
        }
        self.groups_by_free.insert((near.free().cores, group));
    }
}

/// Groups in which a request is tried that needs several hosts. The ones with the most
/// free cores suffice: with 2,500 racks, all of them would take a hundred times as long.
const GROUPS_MAX: usize = 16;

#[derive(Default)]
pub struct Inventory {
    hosts: Vec<Option<Entry>>,
    pools: Vec<Pool>,
    aggregates: BTreeMap<AggregateId, Aggregate>,
    capacity: Room,
    used: Room,
}

impl Inventory {
    pub fn new() -> Inventory {
        Inventory::default()
    }

    pub fn add(&mut self, host: Host, may_take: bool) -> Result<(), InventoryError> {
        let place = host.id.0 as usize;
        if let Some(Some(known)) = self.hosts.get(place) {
            return Err(InventoryError::KnownHost {
                id: host.id,
                name: known.host.name.clone(),
            });
        }
        if self.hosts.len() <= place {
            self.hosts.resize_with(place + 1, || None);
        }
        let pool = self.pool_of(&host);
        *self.pools[pool]
            .capacities
            .entry(host.capacity)
            .or_default() += 1;
        self.capacity += host.capacity;
        let id = host.id;
        self.hosts[place] = Some(Entry {
            free: host.capacity,
            devices_free: host.devices.clone(),
            aggregates: Vec::new(),
            pool,
            listed: false,
            host,
        });
        self.list(id, may_take);
        Ok(())
    }

    fn pool_of(&mut self, host: &Host) -> usize {
        let with_devices = !host.devices.is_empty();
        let same =
            |pool: &Pool| pool.features == host.features && pool.with_devices == with_devices;
        self.pools.iter().position(same).unwrap_or_else(|| {
            self.pools.push(Pool {
                features: host.features,
                with_devices,
                index: FreeIndex::default(),
                groups: BTreeMap::new(),
                groups_by_free: BTreeSet::new(),
                capacities: BTreeMap::new(),
            });
            self.pools.len() - 1
        })
    }

    /// Takes a host out. The aggregates that had a part there are the answer; the caller
    /// ends them.
    pub fn remove(&mut self, id: HostId) -> Result<Vec<AggregateId>, InventoryError> {
        self.entry_checked(id)?;
        self.list(id, false);
        let aggregates = self.entry(id).aggregates.clone();
        for &aggregate in &aggregates {
            self.end(aggregate);
        }
        let entry = self.hosts[id.0 as usize].take().expect("looked up above");
        let count = self.pools[entry.pool]
            .capacities
            .get_mut(&entry.host.capacity);
        *count.expect("counted when it came") -= 1;
        self.pools[entry.pool]
            .capacities
            .retain(|_, &mut count| count > 0);
        self.capacity -= entry.host.capacity;
        Ok(aggregates)
    }

    /// Lets new aggregates come to a host, or keeps them away.
    pub fn list(&mut self, id: HostId, may_take: bool) {
        let entry = self.entry_mut(id);
        let (was, free) = (entry.listed, entry.free);
        let (pool, group) = (entry.pool, entry.host.group);
        entry.listed = may_take;
        match (was, may_take) {
            (false, true) => self.pools[pool].change(group, id, None, Some(free)),
            (true, false) => self.pools[pool].change(group, id, Some(free), None),
            _ => {}
        }
    }

    pub fn is_listed(&self, id: HostId) -> bool {
        self.entry(id).listed
    }

    pub fn set_health(&mut self, id: HostId, health: Health) {
        self.entry_mut(id).host.health = health;
    }

    pub fn set_cordon(&mut self, id: HostId, cordoned: bool, draining: bool) {
        let host = &mut self.entry_mut(id).host;
        (host.cordoned, host.draining) = (cordoned, draining);
    }

    pub fn set_wanted_back(&mut self, id: HostId, mib: u64) {
        self.entry_mut(id).host.wanted_back_mib = mib;
    }

    pub fn set_deadline(&mut self, id: HostId, deadline: Option<Duration>) {
        self.entry_mut(id).host.deadline = deadline;
    }

    /// A host lends more or less than before; never less than what aggregates have there.
    /// `true`: there is more room than before.
    pub fn set_capacity(&mut self, id: HostId, capacity: Room) -> bool {
        let (before, free) = (self.host(id).capacity, self.free(id));
        let used = before - free;
        let capacity = Room::new(
            capacity.cores.max(used.cores),
            capacity.memory_mib.max(used.memory_mib),
        );
        if capacity == before {
            return false;
        }
        let pool = self.entry(id).pool;
        let capacities = &mut self.pools[pool].capacities;
        *capacities.get_mut(&before).expect("counted when it came") -= 1;
        capacities.retain(|_, &mut count| count > 0);
        *capacities.entry(capacity).or_default() += 1;
        self.capacity = self.capacity - before + capacity;
        self.entry_mut(id).host.capacity = capacity;
        self.set_free(id, capacity - used);
        !free.holds(capacity - used)
    }

    /// Starts an aggregate where `placement` says.
    pub fn start(&mut self, mut request: Request, placement: Placement, now: Duration) {
        assert_eq!(
            placement.room(),
            request.room,
            "a placement has what was asked for"
        );
        for part in &placement.parts {
            self.take(part.host, part.room, request.id);
        }
        let home = placement.parts[0].host;
        self.take_devices(home, &request.devices);
        if request.home_stays {
            request.home = Some(home);
        }
        let aggregate = Aggregate {
            placement,
            request,
            moving: None,
            changed: now,
        };
        let id = aggregate.request.id;
        let before = self.aggregates.insert(id, aggregate);
        assert!(before.is_none(), "aggregate {} runs once", id.0);
    }

    /// Ends an aggregate, moving or not. The hosts that got room are the answer; empty
    /// where it does not run.
    pub fn end(&mut self, id: AggregateId) -> Vec<HostId> {
        let Some(aggregate) = self.aggregates.remove(&id) else {
            return Vec::new();
        };
        let mut freed = Vec::new();
        let home = aggregate.placement.parts[0].host;
        self.give_back_devices(home, &aggregate.request.devices);
        if let Some(new_home) = aggregate.new_home() {
            self.give_back_devices(new_home, &aggregate.request.devices);
        }
        for part in &aggregate.placement.parts {
            self.give_back(part.host, part.room);
            freed.push(part.host);
        }
        for transfer in aggregate.moving.iter().flat_map(|moving| &moving.transfers) {
            self.give_back(transfer.to, transfer.room);
            freed.push(transfer.to);
        }
        freed.sort_unstable();
        freed.dedup();
        for &host in &freed {
            self.entry_mut(host).aggregates.retain(|&other| other != id);
        }
        freed
    }

    /// A move starts: its destinations are taken.
    pub fn start_move(&mut self, moving: Move) {
        let id = moving.aggregate;
        for transfer in &moving.transfers {
            self.take(transfer.to, transfer.room, id);
        }
        let aggregate = self
            .aggregates
            .get_mut(&id)
            .expect("only what runs is moved");
        assert!(
            aggregate.moving.is_none(),
            "one move of an aggregate at a time"
        );
        aggregate.moving = Some(moving);
        let devices = aggregate.request.devices.clone();
        if let Some(new_home) = self.aggregates[&id].new_home() {
            self.take_devices(new_home, &devices);
        }
    }

    /// A move has ended: its sources are free (`done`), or its destinations. The hosts
    /// that got room are the answer.
    pub fn end_move(&mut self, id: AggregateId, done: bool, now: Duration) -> Vec<HostId> {
        let Some(aggregate) = self.aggregates.get_mut(&id) else {
            return Vec::new();
        };
        let new_home = aggregate.new_home();
        let Some(moving) = aggregate.moving.take() else {
            return Vec::new();
        };
        aggregate.changed = now;
        let home = aggregate.placement.parts[0].host;
        if done {
            aggregate.placement = aggregate.placement.after(&moving.transfers);
        }
        let devices = aggregate.request.devices.clone();
        let placement = aggregate.placement.clone();
        if let Some(new_home) = new_home {
            self.give_back_devices(if done { home } else { new_home }, &devices);
        }
        let mut freed = Vec::new();
        for transfer in &moving.transfers {
            let host = if done { transfer.from } else { transfer.to };
            self.give_back(host, transfer.room);
            if placement.on(host) == Room::NONE {
                self.entry_mut(host).aggregates.retain(|&other| other != id);
            }
            freed.push(host);
        }
        freed.sort_unstable();
        freed.dedup();
        freed
    }

    fn take(&mut self, host: HostId, room: Room, by: AggregateId) {
        let free = self.free(host);
        self.set_free(host, free - room);
        self.used += room;
        let aggregates = &mut self.entry_mut(host).aggregates;
        if !aggregates.contains(&by) {
            aggregates.push(by);
        }
    }

    fn give_back(&mut self, host: HostId, room: Room) {
        let free = self.free(host);
        self.set_free(host, free + room);
        self.used -= room;
        let entry = self.entry(host);
        assert!(
            entry.host.capacity.holds(entry.free),
            "no host has more free than it has"
        );
    }

    fn set_free(&mut self, host: HostId, free: Room) {
        let entry = self.entry_mut(host);
        let (listed, pool, group) = (entry.listed, entry.pool, entry.host.group);
        let before = std::mem::replace(&mut entry.free, free);
        if listed {
            self.pools[pool].change(group, host, Some(before), Some(free));
        }
    }

    fn take_devices(&mut self, host: HostId, devices: &[Device]) {
        for wanted in devices {
            let free = self.entry_mut(host).devices_free.iter_mut();
            let free = free.into_iter().find(|free| free.kind == wanted.kind);
            let free = free.expect("a placement's home has its devices");
            free.count = free
                .count
                .checked_sub(wanted.count)
                .expect("enough of them");
        }
    }

    fn give_back_devices(&mut self, host: HostId, devices: &[Device]) {
        for given in devices {
            let free = self.entry_mut(host).devices_free.iter_mut();
            let free = free.into_iter().find(|free| free.kind == given.kind);
            free.expect("it was taken here").count += given.count;
        }
    }

    pub fn has_devices(&self, host: HostId, devices: &[Device]) -> bool {
        devices.iter().all(|wanted| {
            let free = self.entry(host).devices_free.iter();
            free.into_iter()
                .any(|free| free.kind == wanted.kind && free.count >= wanted.count)
        })
    }

    /// What a host has free for a part with a core, where the request's home may be. `None`
    /// where it may not.
    pub fn free_if_home(&self, host: HostId, request: &Request) -> Option<Room> {
        let fine = self.has(host)
            && self.host(host).features.contains(request.features)
            && self.has_devices(host, &request.devices);
        let free = fine.then(|| self.room_for_more(host))?;
        free.holds(Room::new(
            1,
            PART_MEMORY_MIN_MIB.min(request.room.memory_mib),
        ))
        .then_some(free)
    }

    /// The indices in which a request may look. Hosts with devices come last for a request
    /// that needs none.
    pub fn indices(&self, request: &Request) -> Vec<&FreeIndex> {
        self.pools_for(request).map(|pool| &pool.index).collect()
    }

    /// The same for hosts that are near each other: the groups with the most free cores, a
    /// few of each kind of host. Nothing where all hosts are near each other.
    pub fn near_indices(&self, request: &Request) -> Vec<&FreeIndex> {
        let pools = self.pools_for(request).filter(|pool| pool.groups.len() > 1);
        let groups = pools.flat_map(|pool| {
            let most = pool.groups_by_free.iter().rev().take(GROUPS_MAX);
            most.map(|(_, group)| &pool.groups[group])
        });
        groups.collect()
    }

    fn pools_for(&self, request: &Request) -> impl Iterator<Item = &Pool> {
        let fitting = move |devices: bool| {
            let features = request.features;
            self.pools.iter().filter(move |pool| {
                pool.with_devices == devices && pool.features.contains(features)
            })
        };
        let plain = fitting(false).filter(|_| request.devices.is_empty());
        plain.chain(fitting(true))
    }

    /// Whether a host of the cluster lends these devices, free or not.
    pub fn has_host_with(&self, devices: &[Device]) -> bool {
        let lends = |host: &Host, wanted: &Device| {
            let mut lent = host.devices.iter();
            lent.any(|lent| lent.kind == wanted.kind && lent.count >= wanted.count)
        };
        let mut hosts = self.hosts();
        devices.is_empty() || hosts.any(|host| devices.iter().all(|wanted| lends(host, wanted)))
    }

    /// Whether the hosts of this cluster, all empty and none cordoned, could have room: one of
    /// them alone, or `hosts_max` together. Nothing is refused that would fit; a request that
    /// passes may still find no set of hosts.
    pub fn could_hold(&self, request: &Request, hosts_max: u32) -> bool {
        if let Some(home) = request.home {
            if !self.has(home) {
                return false;
            }
            let here = self.host(home).capacity;
            if here.holds(request.room) || hosts_max == 1 || here.cores == 0 {
                return here.holds(request.room);
            }
        }
        let pools = self
            .pools
            .iter()
            .filter(|pool| pool.features.contains(request.features));
        let capacities: Vec<(Room, u32)> = pools
            .flat_map(|pool| pool.capacities.iter().map(|(&room, &count)| (room, count)))
            .collect();
        let alone = capacities.iter().any(|(room, _)| room.holds(request.room));
        if alone || hosts_max == 1 {
            return alone;
        }
        let most = |of: &dyn Fn(Room) -> u64| {
            let mut sizes: Vec<(u64, u32)> = capacities
                .iter()
                .map(|&(room, count)| (of(room), count))
                .collect();
            sizes.sort_unstable_by_key(|&(size, _)| std::cmp::Reverse(size));
            let mut left = hosts_max;
            let sums = sizes.into_iter().map(|(size, count)| {
                let hosts = count.min(left);
                left -= hosts;
                size * u64::from(hosts)
            });
            sums.sum::<u64>()
        };
        most(&|room| u64::from(room.cores)) >= u64::from(request.room.cores)
            && most(&|room| room.memory_mib) >= request.room.memory_mib
    }

    fn entry_checked(&self, id: HostId) -> Result<&Entry, InventoryError> {
        let entry = self.hosts.get(id.0 as usize).and_then(Option::as_ref);
        entry.ok_or(InventoryError::UnknownHost(id))
    }

    fn entry(&self, id: HostId) -> &Entry {
        self.entry_checked(id).expect("a host of the inventory")
    }

    fn entry_mut(&mut self, id: HostId) -> &mut Entry {
        let entry = self.hosts.get_mut(id.0 as usize).and_then(Option::as_mut);
        entry.expect("a host of the inventory")
    }

    pub fn has(&self, id: HostId) -> bool {
        self.entry_checked(id).is_ok()
    }

    pub fn host(&self, id: HostId) -> &Host {
        &self.entry(id).host
    }

    pub fn hosts(&self) -> impl Iterator<Item = &Host> {
        self.hosts.iter().flatten().map(|entry| &entry.host)
    }

    pub fn free(&self, id: HostId) -> Room {
        self.entry(id).free
    }

    /// What may still come to a host: nothing where it is not listed.
    pub fn room_for_more(&self, id: HostId) -> Room {
        let entry = self.entry(id);
        if entry.listed { entry.free } else { Room::NONE }
    }

    pub fn on(&self, id: HostId) -> &[AggregateId] {
        &self.entry(id).aggregates
    }

    pub fn aggregate(&self, id: AggregateId) -> Option<&Aggregate> {
        self.aggregates.get(&id)
    }

    pub fn aggregates(&self) -> impl Iterator<Item = &Aggregate> {
        self.aggregates.values()
    }

    pub fn capacity(&self) -> Room {
        self.capacity
    }

    /// What aggregates have, both ends of moves under way counted.
    pub fn used(&self) -> Room {
        self.used
    }

    /// Whether two hosts are near each other.
    pub fn near(&self, one: HostId, other: HostId) -> bool {
        self.host(one).group == self.host(other).group
    }
}
