//! Hosts that all must leave: drained, sick, or gone soon.

use super::{Scheduler, hosts_of};
use crate::decision::{Decision, Moved};
use crate::host::{HostId, Leave};
use crate::inventory::Aggregate;
use crate::placement::{Move, Placement, Transfer};
use crate::request::Request;
use crate::room::Room;
use std::time::Duration;

impl Scheduler {
    /// Moves away from hosts that all must leave.
    pub(super) fn leave_hosts(&mut self, now: Duration, decisions: &mut Vec<Decision>) {
        for host in self.leaving.clone() {
            let Some(why) = self.cluster.host(host).must_leave(now, self.limits.notice) else {
                continue;
            };
            let mut needed = Duration::ZERO;
            for id in self.cluster.on(host).to_vec() {
                let aggregate = self.cluster.aggregate(id).expect("it has room there");
                let name = aggregate.request.name.clone();
                let waits = self.retry.get(&id).is_some_and(|&until| now < until);
                let here = aggregate.placement.on(host) != Room::NONE;
                if aggregate.moving.is_some() || !here || waits {
                    continue;
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
                    continue;
                };
                needed += self.costs.move_time(&moving);
                if hosts_of(&moving).iter().any(|host| self.is_busy(*host)) {
                    continue;
                }
                self.stuck.remove(&(id, host));
                let why = Moved::Leaves {
                    host,
                    why: why.clone(),
                };
                self.start_move(moving, name, why, true, decisions);
            }
            if let Leave::Deadline(left) = why
                && needed > left
                && self.too_late.insert(host)
            {
                decisions.push(Decision::TooLate { host, needed, left });
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
