//! Requests that wait: which of them starts, where, and why the others do not.

use super::{Scheduler, hosts_of};
use crate::decision::{Decision, Delayed, Moved, Started};
use crate::host::{Features, HostId};
use crate::inventory::Aggregate;
use crate::placement::Move;
use crate::queue::Place;
use crate::request::Request;
use crate::room::Room;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// What became of a request that was tried, and what that is for those behind it.
enum Tried {
    Starts,
    /// It would not start on empty hosts either: nothing waits for it.
    HasNoHope,
    /// This host lacks room for it, or is kept for one before it: those behind it may start on
    /// others.
    Keeps(HostId),
    /// Nothing behind it starts, apart from [`super::Limits::backfill`].
    HoldsAll,
}

impl Scheduler {
    /// Starts what waits and finds room now.
    pub(super) fn start_waiting(
        &mut self,
        now: Duration,
        newest: Option<Place>,
        decisions: &mut Vec<Decision>,
    ) {
        let tried_max = self.limits.backfill + 1;
        let is_next = |newest: Place| self.queue.before(newest) < tried_max;
        if !self.blocked || newest.is_some_and(is_next) {
            self.try_next(now, tried_max, decisions);
        }
        if let Some(newest) = newest
            && self.queue.is_untold(newest)
        {
            let before = self.queue.before(newest);
            self.tell(newest, Delayed::Queued { before }, decisions);
        }
    }

    /// Tries the first requests until `tried_max` of them have found no room that they could
    /// find on empty hosts. One that waits for its home alone does not count: those behind it
    /// may start on other hosts.
    fn try_next(&mut self, now: Duration, tried_max: usize, decisions: &mut Vec<Decision>) {
        let mut failed: Vec<(Room, u32)> = Vec::new();
        let mut kept = BTreeSet::new();
        let mut behind = None;
        while failed.len() < tried_max
            && let Some((place, request)) = self.queue.next(behind)
        {
            let shape = (request.room, request.hosts_max);
            let plain = request.devices.is_empty() && request.features == Features::default();
            let plain = plain && request.home.is_none();
            let is_known = plain && failed.contains(&shape);
            let tried = match is_known {
                true => Tried::HoldsAll,
                false => self.try_start(now, place, &kept, decisions),
            };
            match tried {
                Tried::Starts => continue,
                Tried::HasNoHope => {}
                Tried::Keeps(host) => drop(kept.insert(host)),
                Tried::HoldsAll => failed.push(shape),
            }
            behind = Some(place);
        }
        self.blocked = !failed.is_empty();
    }

    /// Whether a request that waits would start if nothing else ran: not where its home takes
    /// nothing, or hosts lend less than when it was asked for.
    fn may_start_later(&self, request: &Request) -> bool {
        let takes = |home| self.cluster.has(home) && self.cluster.is_listed(home);
        request.home.is_none_or(takes) && self.cluster.could_hold(request, self.hosts_max(request))
    }

    /// The home of a request, if that host has too little room.
    fn full_home(&self, request: &Request) -> Option<HostId> {
        request.home.filter(|&home| {
            request.hosts_max == 1 || self.cluster.free_if_home(home, request).is_none()
        })
    }

    /// What a request without room does to those behind it.
    fn holds(&self, request: &Request) -> Tried {
        match self.full_home(request) {
            _ if !self.may_start_later(request) => Tried::HasNoHope,
            Some(home) => Tried::Keeps(home),
            None => Tried::HoldsAll,
        }
    }

    /// Starts one request, or says once why it waits. Nothing starts on the hosts `kept`.
    fn try_start(
        &mut self,
        now: Duration,
        place: Place,
        kept: &BTreeSet<HostId>,
        decisions: &mut Vec<Decision>,
    ) -> Tried {
        let request = self.queue.at(place);
        let placement = self.policy.start(&self.cluster, request);
        let Some(placement) = placement else {
            let moves = self.room_by_moving(now, request);
            let why = match moves.first() {
                Some((moving, _)) => Delayed::MoveUnderWay {
                    host: moving.transfers[0].from,
                },
                None => self.why_no_room(request),
            };
            for (moving, why) in moves {
                let name = self.name_of(moving.aggregate);
                self.start_move(moving, name, why, false, decisions);
            }
            self.tell(place, why, decisions);
            return self.holds(self.queue.at(place));
        };
        if placement.parts.iter().any(|part| kept.contains(&part.host)) {
            let holds = request.home.map_or(Tried::HoldsAll, Tried::Keeps);
            let before = self.queue.before(place);
            self.tell(place, Delayed::Queued { before }, decisions);
            return holds;
        }
        if placement.parts.len() > 1
            && let Some(host) = self.whole_after_moves(request)
        {
            self.tell(place, Delayed::MoveUnderWay { host }, decisions);
            return Tried::HoldsAll;
        }
        let id = request.id;
        let request = self.queue.remove(id).expect("it waits at that place");
        let why = match &placement.parts[..] {
            [part] => Started::Fits {
                left: self.cluster.free(part.host).cores - part.room.cores,
            },
            _ => Started::Spread {
                largest: self.largest_block(&request),
            },
        };
        let name = request.name.clone();
        self.cluster.start(request, placement.clone(), now);
        decisions.push(Decision::Start {
            id,
            name,
            placement,
            why,
        });
        Tried::Starts
    }

    /// The policy's moves that would make room, if the limits allow all of them, and nothing
    /// is on the move that will make it.
    fn room_by_moving(&self, now: Duration, request: &Request) -> Vec<(Move, Moved)> {
        let voluntary = self.voluntary_moves();
        if self.whole_after_moves(request).is_some() || voluntary >= self.limits.moves_max {
            return Vec::new();
        }
        let may_move = |aggregate: &Aggregate| aggregate.changed + self.limits.hold <= now;
        let moves = self.policy.make_room(&self.cluster, request, &may_move);
        let busy = moves
            .iter()
            .flat_map(|(moving, _)| hosts_of(moving))
            .any(|h| self.is_busy(h));
        if busy || voluntary + moves.len() > self.limits.moves_max {
            Vec::new()
        } else {
            moves
        }
    }

    /// A host that will hold all of the request when the moves under way have ended.
    fn whole_after_moves(&self, request: &Request) -> Option<HostId> {
        let mut leaving: BTreeMap<HostId, Room> = BTreeMap::new();
        for id in self.moving.keys() {
            let moving = self.cluster.aggregate(*id).and_then(|a| a.moving.as_ref());
            for transfer in moving.iter().flat_map(|moving| &moving.transfers) {
                *leaving.entry(transfer.from).or_default() += transfer.room;
            }
        }
        let holds = |(&host, &room): (&HostId, &Room)| {
            let fits = request.home.is_none_or(|home| home == host)
                && self.cluster.is_listed(host)
                && (self.cluster.free(host) + room).holds(request.room)
                && self.cluster.host(host).features.contains(request.features)
                && self.cluster.has_devices(host, &request.devices);
            fits.then_some(host)
        };
        leaving.iter().find_map(holds)
    }

    fn why_no_room(&self, request: &Request) -> Delayed {
        if let Some(host) = self.full_home(request) {
            let free = match self.cluster.has(host) {
                true => self.cluster.room_for_more(host),
                false => Room::NONE,
            };
            return Delayed::HomeFull { host, free };
        }
        let free: Room = self
            .cluster
            .indices(request)
            .iter()
            .map(|index| index.free())
            .sum();
        if free.holds(request.room) {
            Delayed::NoBlock {
                largest: self.largest_block(request),
            }
        } else {
            Delayed::NoRoom { free }
        }
    }

    fn largest_block(&self, request: &Request) -> u32 {
        let indices = self.cluster.indices(request);
        let largest = indices.iter().map(|index| {
            let most = (0..=index.cores_max()).rev();
            most.into_iter()
                .find(|&cores| index.with_cores(cores, 0).next().is_some())
                .unwrap_or(0)
        });
        largest.max().unwrap_or(0)
    }

    /// Says why a request waits, once for each kind of reason.
    fn tell(&mut self, place: Place, why: Delayed, decisions: &mut Vec<Decision>) {
        if self.queue.tell(place, &why) {
            let request = self.queue.at(place);
            let (id, name) = (request.id, request.name.clone());
            decisions.push(Decision::Delay { id, name, why });
        }
    }
}
