//! Whole aggregates: best fit, and least loaded first.

use super::Policy;
use crate::host::HostId;
use crate::inventory::Inventory;
use crate::placement::Placement;
use crate::request::Request;
use crate::room::Room;

/// The host that holds `request` whole with the least left over: cores first, then memory.
pub fn whole_placement(cluster: &Inventory, request: &Request) -> Option<Placement> {
    let room = request.room;
    if let Some(home) = request.home {
        let free = cluster.free_if_home(home, request)?;
        return free.holds(room).then(|| Placement::whole(home, room));
    }
    let mut best: Option<(Room, HostId)> = None;
    for index in cluster.indices(request) {
        let fitting = index
            .fitting(room)
            .find(|&(host, _)| cluster.has_devices(host, &request.devices));
        if let Some((host, free)) = fitting
            && best.is_none_or(|(least, _)| free < least)
        {
            best = Some((free, host));
        }
        if best.is_some_and(|(free, _)| free.cores == room.cores) {
            break;
        }
    }
    best.map(|(_, host)| Placement::whole(host, room))
}

/// Best fit in the order of arrival (FragVisor 6.5): whole, or not yet.
pub struct BestFit;

impl Policy for BestFit {
    fn name(&self) -> String {
        "bff".into()
    }

    fn start(&self, cluster: &Inventory, request: &Request) -> Option<Placement> {
        whole_placement(cluster, request)
    }
}

/// The host with the most free cores. Over hosts that promise more cores than they have,
/// this is overcommitting, spread as evenly as it goes.
pub struct LeastLoaded;

impl Policy for LeastLoaded {
    fn name(&self) -> String {
        "least-loaded".into()
    }

    fn start(&self, cluster: &Inventory, request: &Request) -> Option<Placement> {
        let room = request.room;
        if request.home.is_some() {
            return whole_placement(cluster, request);
        }
        let fitting = cluster.indices(request).into_iter().filter_map(|index| {
            (room.cores..=index.cores_max()).rev().find_map(|cores| {
                let hosts = index.with_cores(cores, room.memory_mib).rev();
                hosts
                    .into_iter()
                    .find(|&(host, _)| cluster.has_devices(host, &request.devices))
            })
        });
        let (host, _) = fitting.max_by_key(|&(host, free)| (free, std::cmp::Reverse(host)))?;
        Some(Placement::whole(host, room))
    }
}
