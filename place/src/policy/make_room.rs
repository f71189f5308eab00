//! Best fit with live migration: whole aggregates move aside for one that finds no room.
//! This is what a cluster can do today without spreading anything.

use super::{Policy, Wanted, whole_placement};
use crate::decision::Moved;
use crate::host::HostId;
use crate::inventory::{Aggregate, Inventory};
use crate::placement::{Move, Placement, Transfer};
use crate::request::Request;
use crate::room::Room;
use std::collections::BTreeMap;

/// Hosts that are looked at, those with the most free cores.
const HOSTS_MAX: usize = 16;

/// Aggregates that move aside for one request.
const ASIDE_MAX: usize = 4;

pub struct BestFitWithMigration;

impl Policy for BestFitWithMigration {
    fn name(&self) -> String {
        "bff-migration".into()
    }

    fn start(&self, cluster: &Inventory, request: &Request) -> Option<Placement> {
        whole_placement(cluster, request)
    }

    fn make_room(
        &self,
        cluster: &Inventory,
        request: &Request,
        may_move: &dyn Fn(&Aggregate) -> bool,
    ) -> Vec<Wanted> {
        let mut candidates: Vec<(Room, HostId)> = Vec::new();
        if let Some(home) = request.home {
            let free = cluster.has(home).then(|| cluster.room_for_more(home));
            candidates.extend(free.map(|free| (free, home)));
        }
        let indices = match request.home {
            Some(_) => Vec::new(),
            None => cluster.indices(request),
        };
        for index in indices {
            let most = (0..=index.cores_max())
                .rev()
                .flat_map(|cores| index.with_cores(cores, 0));
            candidates.extend(most.take(HOSTS_MAX).map(|(host, free)| (free, host)));
        }
        candidates.sort_unstable_by_key(|&(free, host)| (std::cmp::Reverse(free), host));
        let plans = candidates
            .into_iter()
            .take(HOSTS_MAX)
            .filter_map(|(free, host)| {
                let moves = aside(cluster, request, host, free, may_move)?;
                let memory: u64 = moves.iter().map(Move::memory_mib).sum();
                Some(((memory, host), moves))
            });
        let cheapest = plans.min_by_key(|&(key, _)| key);
        let moves = cheapest.map(|(_, moves)| moves).unwrap_or_default();
        let why = Moved::MakesRoom {
            of: request.name.clone(),
        };
        moves
            .into_iter()
            .map(|moving| (moving, why.clone()))
            .collect()
    }
}

/// The aggregates that leave `host` so that it holds the request, the smallest that
/// suffice, each to where it fits best. `None` where that is not enough.
fn aside(
    cluster: &Inventory,
    request: &Request,
    host: HostId,
    mut free: Room,
    may_move: &dyn Fn(&Aggregate) -> bool,
) -> Option<Vec<Move>> {
    let here = cluster
        .on(host)
        .iter()
        .filter_map(|&id| cluster.aggregate(id));
    let mut here: Vec<&Aggregate> = here
        .filter(|aggregate| !aggregate.is_spread() && aggregate.moving.is_none())
        .filter(|aggregate| {
            let request = &aggregate.request;
            request.devices.is_empty() && request.home.is_none() && !request.fixed
        })
        .filter(|aggregate| may_move(aggregate))
        .collect();
    here.sort_by_key(|aggregate| (aggregate.request.room, aggregate.request.id));
    let mut taken: BTreeMap<HostId, Room> = BTreeMap::new();
    let mut moves = Vec::new();
    while !free.holds(request.room) {
        if moves.len() == ASIDE_MAX || here.is_empty() {
            return None;
        }
        // The smallest one that suffices; the largest where a single one does not.
        let suffices = here
            .iter()
            .position(|a| (free + a.request.room).holds(request.room));
        let leaving = here.remove(suffices.unwrap_or(here.len() - 1));
        let room = leaving.request.room;
        let to = elsewhere(cluster, &leaving.request, host, &taken)?;
        *taken.entry(to).or_default() += room;
        free += room;
        let transfers = vec![Transfer {
            from: host,
            to,
            room,
        }];
        moves.push(Move {
            aggregate: leaving.request.id,
            transfers,
        });
    }
    Some(moves)
}

/// Where a request fits best, beside what this plan has taken already.
fn elsewhere(
    cluster: &Inventory,
    request: &Request,
    not_on: HostId,
    taken: &BTreeMap<HostId, Room>,
) -> Option<HostId> {
    let indices = cluster.indices(request);
    let fitting = indices.iter().filter_map(|index| {
        index.fitting(request.room).find(|&(host, free)| {
            let already = taken.get(&host).copied().unwrap_or_default();
            host != not_on && free.holds(already + request.room)
        })
    });
    fitting
        .min_by_key(|&(host, free)| (free, host))
        .map(|(host, _)| host)
}
