//! Which fragments an aggregate gets where no host has room for all of it.

use crate::free_index::FreeIndex;
use crate::host::HostId;
use crate::inventory::Inventory;
use crate::placement::{PART_MEMORY_MIN_MIB, Part, Placement};
use crate::request::Request;
use crate::room::Room;

/// Over how many hosts an aggregate starts that no host holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    FewestHosts,
    MostHosts,
}

/// Beyond this number of hosts the fragments are not searched for a set that fits exactly:
/// the search grows with their number.
const EXACT_HOSTS_MAX: usize = 4;

/// How many hosts are tried as the home. A cluster without room for a request would else be
/// searched once for each of its hosts.
const HOMES_MAX: usize = 8;

/// A host, its free room, and how many cores of it are taken.
type Chosen = (HostId, Room, u32);

/// Hosts near each other if they have room, else all of them. `None` where even those lack it.
pub fn spread(cluster: &Inventory, request: &Request, start: Start) -> Option<Placement> {
    if request.hosts_max < 2 {
        return None;
    }
    if request.home.is_some() || request.home_stays || !request.devices.is_empty() {
        return spread_around_home(cluster, request, start);
    }
    let spread = Spread {
        request,
        start,
        without: None,
    };
    let best_length = match start {
        Start::FewestHosts => 2,
        Start::MostHosts => request.hosts_max.min(request.room.cores) as usize,
    };
    let mut best: Option<Vec<Part>> = None;
    for near in cluster.near_indices(request) {
        let Some(parts) = spread.over(&[near]) else {
            continue;
        };
        let better = best.as_ref().is_none_or(|best| match start {
            Start::FewestHosts => parts.len() < best.len(),
            Start::MostHosts => parts.len() > best.len(),
        });
        if better {
            best = Some(parts);
        }
        if best
            .as_ref()
            .is_some_and(|parts| parts.len() == best_length)
        {
            break;
        }
    }
    let everywhere = || spread.over(&cluster.indices(request));
    best.or_else(everywhere).map(home_first)
}

/// The least memory of the first part if it has `cores`. An aggregate with less is whole.
fn first_part_min_mib(request: &Request, cores: u32) -> u64 {
    let least = PART_MEMORY_MIN_MIB + request.core_memory_mib * u64::from(cores);
    match request.core_memory_mib {
        0 => least.min(request.room.memory_mib),
        _ => least,
    }
}

/// The home is the host that the request names, else one with the devices: the one with the most
/// free cores that can be it, of [`HOMES_MAX`].
fn spread_around_home(cluster: &Inventory, request: &Request, start: Start) -> Option<Placement> {
    if let Some(home) = request.home {
        let free = cluster.free_if_home(home, request)?;
        return spread_around((home, free), cluster, request, start);
    }
    let indices = cluster.indices(request);
    let homes = descending(&indices).filter(|&(host, _)| {
        cluster.has_devices(host, &request.devices) && cluster.free_if_home(host, request).is_some()
    });
    homes
        .take(HOMES_MAX)
        .find_map(|home| spread_around(home, cluster, request, start))
}

/// What the home cannot hold is spread without it.
fn spread_around(
    (home, free): (HostId, Room),
    cluster: &Inventory,
    request: &Request,
    start: Start,
) -> Option<Placement> {
    // As many cores as it has memory for, in proportion.
    let by_memory = free.memory_mib * u64::from(request.room.cores) / request.room.memory_mib;
    let most = u64::from(free.cores.min(request.room.cores)).min(by_memory.max(1)) as u32;
    let room = free.memory_mib.min(request.room.memory_mib);
    let has_room = |cores: &u32| first_part_min_mib(request, *cores) <= room;
    let cores = (1..=most).rev().find(has_room)?;
    let share = request.room.share_of(cores);
    let least = first_part_min_mib(request, cores);
    let here = Room::new(cores, share.memory_mib.max(least).min(free.memory_mib));
    let mut rest = Request {
        devices: Vec::new(),
        home: None,
        ..request.clone()
    };
    rest.room -= here;
    rest.hosts_max -= 1;
    let indices = cluster.indices(&rest);
    let spread = Spread {
        request: &rest,
        start,
        without: Some(home),
    };
    let mut parts = vec![Part {
        host: home,
        room: here,
    }];
    // Fragments are chosen by their cores, and may lack memory that one host has.
    let one_host = || {
        let fitting = indices.iter().flat_map(|index| index.fitting(rest.room));
        let others = fitting.filter(|&(host, _)| host != home);
        let (host, _) = others.min_by_key(|&(host, free)| (free, host))?;
        let room = rest.room;
        Some(vec![Part { host, room }])
    };
    parts.extend(spread.over(&indices).or_else(one_host)?);
    without_crumbs(cluster, request, &mut parts)?;
    Some(Placement { parts })
}

/// A part without cores has the least memory of a part at least: the first one gives it the rest.
/// `None` if it cannot, and the aggregate is one whose first part needs memory for itself.
fn without_crumbs(cluster: &Inventory, request: &Request, parts: &mut [Part]) -> Option<()> {
    let (first, others) = parts.split_first_mut()?;
    let least = first_part_min_mib(request, first.room.cores);
    for part in others.iter_mut().filter(|part| part.room.cores == 0) {
        let lacks = PART_MEMORY_MIN_MIB.saturating_sub(part.room.memory_mib);
        let free = cluster.room_for_more(part.host).memory_mib;
        let fits = free >= PART_MEMORY_MIN_MIB && first.room.memory_mib >= least + lacks;
        match (lacks, fits) {
            (0, _) => {}
            (_, true) => {
                first.room.memory_mib -= lacks;
                part.room.memory_mib += lacks;
            }
            (_, false) if request.core_memory_mib == 0 => {}
            (_, false) => return None,
        }
    }
    Some(())
}

/// The largest part is the home; of equal ones the one with the lower number.
fn home_first(mut parts: Vec<Part>) -> Placement {
    parts.sort_by_key(|part| (std::cmp::Reverse(part.room), part.host));
    Placement { parts }
}

/// Hosts with free cores and memory for a part, those with the most first.
fn descending<'a>(indices: &'a [&FreeIndex]) -> impl Iterator<Item = (HostId, Room)> + 'a {
    let most = indices
        .iter()
        .map(|index| index.cores_max())
        .max()
        .unwrap_or(0);
    (1..=most)
        .rev()
        .flat_map(|cores| with_cores(indices, cores))
}

fn ascending<'a>(indices: &'a [&FreeIndex]) -> impl Iterator<Item = (HostId, Room)> + 'a {
    let most = indices
        .iter()
        .map(|index| index.cores_max())
        .max()
        .unwrap_or(0);
    (1..=most).flat_map(|cores| with_cores(indices, cores))
}

/// Hosts with `cores` free cores, those with the most memory first.
fn with_cores<'a>(
    indices: &'a [&FreeIndex],
    cores: u32,
) -> impl Iterator<Item = (HostId, Room)> + 'a {
    indices
        .iter()
        .flat_map(move |index| index.with_cores(cores, PART_MEMORY_MIN_MIB).rev())
}

struct Spread<'a> {
    request: &'a Request,
    start: Start,
    /// A host that has its part already.
    without: Option<HostId>,
}

impl Spread<'_> {
    fn over(&self, indices: &[&FreeIndex]) -> Option<Vec<Part>> {
        let free: Room = indices.iter().map(|index| index.free()).sum();
        if !free.holds(self.request.room) {
            return None;
        }
        let greedy = self.largest(indices)?;
        let chosen = match self.start {
            Start::FewestHosts => self.exact(indices, greedy.len()),
            Start::MostHosts => self.smallest(indices),
        };
        let with_memory = |chosen: Vec<Chosen>| self.with_memory(indices, chosen);
        chosen.and_then(with_memory).or_else(|| with_memory(greedy))
    }

    /// The fewest hosts that hold the cores: the largest ones, and for what remains at the
    /// end the one where the least is left over.
    fn largest(&self, indices: &[&FreeIndex]) -> Option<Vec<Chosen>> {
        let mut chosen: Vec<Chosen> = Vec::new();
        let mut left = self.request.room.cores;
        for (host, free) in self.except(descending(indices)) {
            if left == 0 || chosen.len() == self.request.hosts_max as usize {
                break;
            }
            if free.cores >= left {
                let snug = (left..free.cores)
                    .flat_map(|cores| self.except(with_cores(indices, cores)))
                    .filter(|(_, free)| free.cores >= left)
                    .find(|(host, _)| chosen.iter().all(|(other, ..)| other != host));
                let (host, free) = snug.unwrap_or((host, free));
                chosen.push((host, free, left));
                left = 0;
            } else {
                chosen.push((host, free, free.cores));
                left -= free.cores;
            }
        }
        (left == 0).then_some(chosen)
    }

    /// So many hosts that all their free cores together are the cores wanted: no fragment is
    /// left of any. `None` where there is no such set.
    fn exact(&self, indices: &[&FreeIndex], hosts: usize) -> Option<Vec<Chosen>> {
        if hosts > EXACT_HOSTS_MAX || self.request.room.cores < 2 {
            return None;
        }
        let cores = self.request.room.cores as usize;
        // `from[n][sum]`: the last size of `n` sizes with that sum, 0 where none is known.
        let mut from = vec![vec![0_u32; cores + 1]; hosts + 1];
        let reached =
            |from: &[Vec<u32>], n: usize, sum: usize| n == 0 && sum == 0 || from[n][sum] > 0;
        let most = indices
            .iter()
            .map(|index| index.cores_max())
            .max()
            .unwrap_or(0);
        for size in (1..=most.min(cores as u32 - 1)).rev() {
            let there = self.with_exactly(indices, size).take(hosts).count();
            for _ in 0..there {
                for n in (1..=hosts).rev() {
                    for sum in size as usize..=cores {
                        if from[n][sum] == 0 && reached(&from, n - 1, sum - size as usize) {
                            from[n][sum] = size;
                        }
                    }
                }
            }
        }
        let mut chosen: Vec<Chosen> = Vec::new();
        let mut sum = cores;
        for n in (1..=hosts).rev() {
            let size = from[n][sum];
            let of_size = self.with_exactly(indices, size);
            let unused = of_size
                .into_iter()
                .find(|(host, _)| chosen.iter().all(|(other, ..)| other != host));
            let (host, free) = unused.filter(|_| size > 0)?;
            chosen.push((host, free, size));
            sum -= size as usize;
        }
        (sum == 0).then_some(chosen)
    }

    /// The most hosts: one core of each, the smallest fragments first, then a second one.
    /// `None` where that number of hosts does not have the cores: then the largest are right.
    fn smallest(&self, indices: &[&FreeIndex]) -> Option<Vec<Chosen>> {
        let hosts = self.request.hosts_max.min(self.request.room.cores) as usize;
        let mut chosen: Vec<Chosen> = self
            .except(ascending(indices))
            .take(hosts)
            .map(|(host, free)| (host, free, 0))
            .collect();
        let mut left = self.request.room.cores;
        let free: u32 = chosen.iter().map(|(_, free, _)| free.cores).sum();
        if free < left {
            return None;
        }
        while left > 0 {
            for (_, free, taken) in &mut chosen {
                if left > 0 && *taken < free.cores {
                    *taken += 1;
                    left -= 1;
                }
            }
        }
        Some(chosen)
    }

    /// Memory for the cores: in proportion where it is there, then wherever there is more,
    /// at last on hosts that give memory only.
    fn with_memory(&self, indices: &[&FreeIndex], chosen: Vec<Chosen>) -> Option<Vec<Part>> {
        let want = self.request.room;
        let of_cores = |cores: u32| self.request.core_memory_mib * u64::from(cores);
        // What is left beside that of the cores.
        let mut left = want.memory_mib.checked_sub(of_cores(want.cores))?;
        let beside = Room::new(want.cores, left);
        let mut parts: Vec<(Part, u64)> = Vec::new();
        for (host, free, cores) in chosen {
            let share = beside.share_of(cores).memory_mib;
            let more = share.min(free.memory_mib - of_cores(cores)).min(left);
            let memory_mib = of_cores(cores) + more;
            left -= more;
            let room = Room::new(cores, memory_mib);
            parts.push((Part { host, room }, free.memory_mib - memory_mib));
        }
        for (part, more) in &mut parts {
            let memory_mib = left.min(*more);
            part.room.memory_mib += memory_mib;
            left -= memory_mib;
        }
        let mut parts: Vec<Part> = parts.into_iter().map(|(part, _)| part).collect();
        let mut servers: Vec<(HostId, u64)> = indices
            .iter()
            .flat_map(|index| {
                index
                    .most_memory()
                    .take(self.request.hosts_max as usize * 2)
            })
            .collect();
        servers.sort_unstable_by_key(|&(host, free)| (std::cmp::Reverse(free), host));
        for (host, free) in servers {
            if left == 0 || parts.len() >= self.request.hosts_max as usize {
                break;
            }
            let known = Some(host) == self.without || parts.iter().any(|part| part.host == host);
            if !known && free >= PART_MEMORY_MIN_MIB {
                let memory_mib = left.min(free);
                parts.push(Part {
                    host,
                    room: Room::new(0, memory_mib),
                });
                left -= memory_mib;
            }
        }
        let fits = left == 0 && parts.len() <= self.request.hosts_max as usize;
        fits.then_some(parts)
    }

    /// Hosts of which no more than these cores can be used.
    fn with_exactly<'b>(
        &self,
        indices: &'b [&FreeIndex],
        cores: u32,
    ) -> impl Iterator<Item = (HostId, Room)> + 'b {
        let hosts = self.except(with_cores(indices, cores));
        hosts.filter(move |(_, free)| free.cores == cores)
    }

    /// The hosts that have no part yet, each with the cores for which it has memory.
    fn except<'b>(
        &self,
        hosts: impl Iterator<Item = (HostId, Room)> + 'b,
    ) -> impl Iterator<Item = (HostId, Room)> + 'b {
        let (without, core_mib) = (self.without, self.request.core_memory_mib);
        let others = hosts.filter(move |&(host, _)| Some(host) != without);
        let usable = others.map(move |(host, free)| {
            let by_memory = free.memory_mib.checked_div(core_mib);
            let by_memory = by_memory.map_or(u32::MAX, |n| n.try_into().unwrap_or(u32::MAX));
            let cores = free.cores.min(by_memory);
            (host, Room { cores, ..free })
        });
        usable.filter(|(_, free)| free.cores > 0)
    }
}
