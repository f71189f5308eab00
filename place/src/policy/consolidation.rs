//! Which part of an aggregate goes where when a host has got room.
//!
//! Only hosts that have a part of the aggregate are looked at, and only aggregates with a
//! part on the host that changed: what ended elsewhere has had its turn already.

use super::Wanted;
use crate::costs::Costs;
use crate::decision::Moved;
use crate::host::HostId;
use crate::inventory::{Aggregate, Inventory};
use crate::placement::{Move, Transfer};
use crate::room::Room;

/// A move that leaves the cluster's free cores in larger blocks.
///
/// How far free cores are in large blocks is the sum of their squares over the hosts.
/// `k` cores that go from a host with `f` free cores to one with `t` change it by
/// `2k(f - t + k)`: the block that grows must become larger than the block that is broken
/// was. This is what FragVisor's Figure 14 does: 2+2 with 0 and 4 free cores stay, with 1
/// and 7 become 3+1. An aggregate never becomes slower for it.
///
/// Where not all cores of a part fit, the others move, and the part's memory stays: its pages
/// follow the cores that use them. Such cores go to the home only, if there is one: a part
/// elsewhere has room for the cores with which it started.
pub fn least_fragmentation(
    cluster: &Inventory,
    costs: &Costs,
    host: HostId,
    may_move: &dyn Fn(&Aggregate) -> bool,
) -> Option<Wanted> {
    let mut best: Option<(i64, std::cmp::Reverse<u64>, Wanted)> = None;
    for (aggregate, from, to) in pairs(cluster, host, may_move) {
        let (free_from, free_to) = (cluster.free(from), cluster.room_for_more(to));
        let Some(room) = movable_room(aggregate, from, to, free_to) else {
            continue;
        };
        let (f, t, k) = (
            i64::from(free_from.cores),
            i64::from(free_to.cores),
            i64::from(room.cores),
        );
        let gain = 2 * k * (f - t + k);
        let moving = single(aggregate, Transfer { from, to, room });
        let after = aggregate.placement.after(&moving.transfers);
        let slower = costs.slow_down(cluster, &after)
            > costs.slow_down(cluster, &aggregate.placement) + f64::EPSILON;
        let key = (gain, std::cmp::Reverse(room.memory_mib));
        if gain <= 0 || slower || best.as_ref().is_some_and(|(g, m, _)| (*g, *m) >= key) {
            continue;
        }
        let whole = after.parts.len() == 1;
        let larger = free_from.cores + room.cores;
        best = Some((
            key.0,
            key.1,
            (
                moving,
                Moved::LargerBlock {
                    from,
                    larger,
                    whole,
                },
            ),
        ));
    }
    best.map(|(_, _, wanted)| wanted)
}

/// What of the part on `from` fits on `to`.
fn movable_room(aggregate: &Aggregate, from: HostId, to: HostId, free: Room) -> Option<Room> {
    let part = aggregate.placement.on(from);
    if part.cores == 0 {
        return None;
    }
    if free.holds(part) {
        return Some(part);
    }
    let request = &aggregate.request;
    let cores = free.cores.min(part.cores - 1);
    let room = Room::new(cores, request.core_memory_mib * u64::from(cores));
    let may = request.home.is_none_or(|home| home == to) && room.memory_mib < part.memory_mib;
    (cores > 0 && may && free.holds(room)).then_some(room)
}

/// A move after which an aggregate is on one host less. The smallest part moves, to the
/// host where the least is left over, if the time that it then saves within
/// [`Costs::payback`] is more than the move takes.
pub fn fewest_hosts(
    cluster: &Inventory,
    costs: &Costs,
    host: HostId,
    may_move: &dyn Fn(&Aggregate) -> bool,
) -> Option<Wanted> {
    let fitting = pairs(cluster, host, may_move).filter_map(|(aggregate, from, to)| {
        let room = aggregate.placement.on(from);
        let free = cluster.room_for_more(to);
        if !free.holds(room) {
            return None;
        }
        let moving = single(aggregate, Transfer { from, to, room });
        let after = aggregate.placement.after(&moving.transfers);
        let saved =
            costs.slow_down(cluster, &aggregate.placement) - costs.slow_down(cluster, &after);
        let pays = costs.payback.mul_f64(saved.max(0.0)) >= costs.move_time(&moving);
        let key = (
            after.parts.len(),
            room,
            free.cores - room.cores,
            aggregate.request.id,
            from,
        );
        let hosts = after.parts.len() as u32;
        pays.then_some((key, (moving, Moved::FewerHosts { hosts })))
    });
    fitting
        .min_by_key(|&(key, _)| key)
        .map(|(_, wanted)| wanted)
}

/// Both directions between `host` and each other host of each spread aggregate there.
fn pairs<'a>(
    cluster: &'a Inventory,
    host: HostId,
    may_move: &'a dyn Fn(&Aggregate) -> bool,
) -> impl Iterator<Item = (&'a Aggregate, HostId, HostId)> {
    let here = cluster
        .on(host)
        .iter()
        .filter_map(|&id| cluster.aggregate(id));
    let movable = here.filter(move |aggregate| {
        // Devices stay where they are, and the home with them.
        let request = &aggregate.request;
        let movable = aggregate.is_spread() && request.devices.is_empty() && !request.fixed;
        movable && aggregate.moving.is_none() && may_move(aggregate)
    });
    movable.flat_map(move |aggregate| {
        let others = aggregate.placement.parts.iter().map(|part| part.host);
        others
            .filter(move |&other| other != host)
            .flat_map(move |other| [(aggregate, other, host), (aggregate, host, other)])
            .filter(|(aggregate, from, _)| aggregate.request.home != Some(*from))
    })
}

fn single(aggregate: &Aggregate, transfer: Transfer) -> Move {
    Move {
        aggregate: aggregate.request.id,
        transfers: vec![transfer],
    }
}
