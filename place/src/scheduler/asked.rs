//! Moves that an operator asks for.

use super::Scheduler;
use crate::decision::{Decision, Moved, NotMoved};
use crate::host::HostId;
use crate::placement::{Move, Part, Transfer};
use crate::request::AggregateId;

impl Scheduler {
    /// The move that an operator wants, or why there is none. `None`: it does not run.
    pub(super) fn move_asked(
        &mut self,
        id: AggregateId,
        from: Option<HostId>,
        to: HostId,
    ) -> Option<Decision> {
        let aggregate = self.cluster.aggregate(id)?;
        let name = aggregate.request.name.clone();
        let parts = aggregate.placement.parts.iter();
        let parts = parts.filter(|part| from.unwrap_or(part.host) == part.host);
        let home = aggregate.placement.parts[0].host;
        let has_devices = |part: &Part| part.host == home && !aggregate.request.devices.is_empty();
        let parts = parts
            .filter(|part| part.host != to && aggregate.may_leave(part.host) && !has_devices(part));
        let part = parts.min_by_key(|part| (part.room, part.host)).copied();
        let free = self.cluster.free(to);
        let why = match part {
            _ if aggregate.moving.is_some() => NotMoved::Moves,
            None => NotMoved::NoPart,
            Some(_) if !self.cluster.is_listed(to) => NotMoved::Closed,
            Some(part) if !free.holds(part.room) => {
                let part = part.room;
                NotMoved::NoRoom { part, free }
            }
            Some(part) => {
                let transfer = Transfer {
                    from: part.host,
                    to,
                    room: part.room,
                };
                let moving = Move {
                    aggregate: id,
                    transfers: vec![transfer],
                };
                let expected = self.costs.move_time(&moving);
                self.note_move(moving.clone(), true);
                let why = Moved::Asked;
                return Some(Decision::Move {
                    moving,
                    name,
                    why,
                    expected,
                });
            }
        };
        Some(Decision::NotMoved { id, name, to, why })
    }
}
