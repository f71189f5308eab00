//! Hosts that all must leave: drained, sick, or gone soon. And those that some must leave:
//! their owners want memory back.

use super::{Scheduler, hosts_of};
use crate::decision::{Decision, Moved};
use crate::host::{HostId, Leave};
use crate::inventory::Aggregate;
use crate::placement::{Move, Placement, Transfer};
use crate::request::AggregateId;
use crate::request::Request;
use crate::room::Room;
use std::time::Duration;

/// What became of a part that has to leave a host.
enum Left {
    /// It moves, within this time.
    Moves(Duration),
    /// It will move, within this time, when other moves have ended.
    Later(Duration),
    /// It moves already, has just failed to, or cannot.
    Stays,
}

impl Left {
    fn needed(self) -> Duration {
        match self {
            Left::Moves(needed) | Left::Later(needed) => needed,
            Left::Stays => Duration::ZERO,
        }
    }
}

impl Scheduler {
    /// Moves away from hosts that all must leave.
    pub(super) fn leave_hosts(&mut self, now: Duration, decisions: &mut Vec<Decision>) {
        for host in self.leaving.clone() {
            let Some(why) = self.cluster.host(host).must_leave(now, self.limits.notice) else {
                continue;
            };
            let mut needed = Duration::ZERO;
            for id in self.cluster.on(host).to_vec() {
                needed += self.leave(now, id, host, &why, decisions).needed();
            }
            if let Leave::Deadline(left) = why
                && needed > left
                && self.too_late.insert(host)
            {
                decisions.push(Decision::TooLate { host, needed, left });
            }
        }
    }

    /// Moves a part away from a host, if it can move now.
    fn leave(
        &mut self,
        now: Duration,
        id: AggregateId,
        host: HostId,
        why: &Leave,
        decisions: &mut Vec<Decision>,
    ) -> Left {
        let aggregate = self.cluster.aggregate(id).expect("it has room there");
        let name = aggregate.request.name.clone();
        let waits = self.retry.get(&id).is_some_and(|&until| now < until);
        let here = aggregate.placement.on(host) != Room::NONE;
        if aggregate.moving.is_some() || !here || waits {
            return Left::Stays;
        }
        let can_move = aggregate.may_leave(host);
        let Some(moving) = self.away_from(host, aggregate) else {
            if self.stuck.insert((id, host)) {
                decisions.push(Decision::Stuck {
                    id,
                    name,
                    host,
                    why: why.clone(),
                    can_move,
                });
            }
            return Left::Stays;
        };
        let needed = self.costs.move_time(&moving);
        if hosts_of(&moving).iter().any(|host| self.is_busy(*host)) {
            return Left::Later(needed);
        }
        self.stuck.remove(&(id, host));
        let why = Moved::Leaves {
            host,
            why: why.clone(),
        };
        self.start_move(moving, name, why, true, decisions);
        Left::Moves(needed)
    }

    /// The owner of a host wants memory back, or no more.
    pub(super) fn want_back(&mut self, now: Duration, host: HostId, mib: u64) {
        self.cluster.set_wanted_back(host, mib);
        match mib {
            0 => drop(self.wanted_back.remove(&host)),
            _ => drop(self.wanted_back.entry(host).or_insert(now)),
        }
        self.host_changed(now, host);
    }

    /// A part has left a host, or could not: what its owner wants back is asked for again when
    /// the host has said what is there now.
    pub(super) fn pause_wanted_back(&mut self, now: Duration, host: HostId) {
        if let Some(until) = self.wanted_back.get_mut(&host) {
            *until = now + self.limits.hold;
            self.later.insert((*until, host));
        }
    }

    /// Moves parts away whose memory the owners of their hosts want back: of those that suffice
    /// the smallest, else the largest first.
    pub(super) fn give_back(&mut self, now: Duration, decisions: &mut Vec<Decision>) {
        let hosts = self.wanted_back.iter();
        let due = hosts.filter(|&(_, &until)| until <= now);
        for host in due.map(|(&host, _)| host).collect::<Vec<_>>() {
            let mut parts = Vec::new();
            let mut on_the_move = 0;
            for &id in self.cluster.on(host) {
                let aggregate = self.cluster.aggregate(id).expect("it has room there");
                let transfers = aggregate.moving.iter().flat_map(|moving| &moving.transfers);
                let leaving = transfers.filter(|transfer| transfer.from == host);
                on_the_move += leaving.map(|leaving| leaving.room.memory_mib).sum::<u64>();
                if aggregate.may_leave(host) {
                    parts.push((aggregate.placement.on(host).memory_mib, id));
                }
            }
            parts.sort_unstable();
            let why = self.cluster.host(host).wanted_back_mib;
            let mut wanted = why.saturating_sub(on_the_move);
            while wanted > 0 && !parts.is_empty() {
                let sufficient = parts.partition_point(|&(mib, _)| mib < wanted);
                let (mib, id) = parts.remove(sufficient.min(parts.len() - 1));
                let left = self.leave(now, id, host, &Leave::WantedBack(why), decisions);
                if let Left::Moves(_) = left {
                    wanted = wanted.saturating_sub(mib);
                }
            }
        }
    }

    /// How an aggregate's part leaves a host: to a host that has another part of it, else
    /// as the policy would start it.
    fn away_from(&self, host: HostId, aggregate: &Aggregate) -> Option<Move> {
        if !aggregate.may_leave(host) {
            return None;
        }
        let part = aggregate.placement.on(host);
        let is_home = aggregate.placement.parts[0].host == host;
        let devices = if is_home {
            aggregate.request.devices.clone()
        } else {
            Vec::new()
        };
        let others = aggregate.placement.parts.iter().map(|part| part.host);
        let near = others
            .filter(|&other| other != host && self.cluster.room_for_more(other).holds(part))
            .filter(|&other| self.cluster.has_devices(other, &devices))
            .min_by_key(|&other| (self.cluster.free(other), other));
        let destinations = match near {
            Some(other) => Placement::whole(other, part),
            None => {
                let others = aggregate.placement.parts.len() as u32 - 1;
                let hosts_max = match self.limits.split_parts {
                    true => aggregate.request.hosts_max.saturating_sub(others).max(1),
                    false => 1,
                };
                let request = Request {
                    room: part,
                    devices,
                    hosts_max,
                    home: None,
                    home_stays: false,
                    ..aggregate.request.clone()
                };
                self.policy.start(&self.cluster, &request)?
            }
        };
        let to_each = destinations.parts.iter().map(|part| Transfer {
            from: host,
            to: part.host,
            room: part.room,
        });
        Some(Move {
            aggregate: aggregate.request.id,
            transfers: to_each.collect(),
        })
    }

    /// A host that all must leave is not left by the same failing move at once.
    pub(super) fn try_later(&mut self, now: Duration, moving: &Move) {
        let at = now + self.limits.hold;
        self.retry.insert(moving.aggregate, at);
        for transfer in &moving.transfers {
            if self.leaving.contains(&transfer.from) {
                self.later.insert((at, transfer.from));
            }
        }
    }
}
