//! What an earlier scheduler started: taken over all at once, so that nothing is decided before
//! all of it is known.

use super::Scheduler;
use crate::costs::MoveCosts;
use crate::host::HostId;
use crate::inventory::InventoryError;
use crate::placement::{Move, Placement, Transfer};
use crate::request::Request;
use crate::room::Room;
use std::collections::BTreeSet;
use std::time::Duration;

/// An aggregate that runs already. All its hosts have joined; they are taken to have room for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adopted {
    pub request: Request,
    pub placement: Placement,
    /// What of it is on the move.
    pub transfers: Vec<Transfer>,
}

impl Scheduler {
    /// What moves cost, as an earlier scheduler has learned.
    pub fn set_move_costs(&mut self, moves: MoveCosts) {
        self.costs.moves = moves;
    }

    /// All of them, or none with an error.
    pub(super) fn adopt_all(
        &mut self,
        now: Duration,
        adopted: Vec<Adopted>,
    ) -> Result<(), InventoryError> {
        let mut ids = BTreeSet::new();
        for each in &adopted {
            self.check_adopted(each)?;
            if !ids.insert(each.request.id) {
                return Err(InventoryError::RunsAlready(each.request.name.clone()));
            }
        }
        for each in adopted {
            self.adopt(now, each);
        }
        Ok(())
    }

    fn check_adopted(&self, adopted: &Adopted) -> Result<(), InventoryError> {
        let Adopted {
            request,
            placement,
            transfers,
        } = adopted;
        let hosts = placement.parts.iter().map(|part| part.host);
        for host in hosts.chain(transfers.iter().map(|transfer| transfer.to)) {
            self.known(host)?;
        }
        let mut left = placement.clone();
        for transfer in transfers {
            let part = left
                .parts
                .iter_mut()
                .find(|part| part.host == transfer.from);
            let part = part.filter(|part| part.room.holds(transfer.room));
            part.ok_or(InventoryError::NotThere(transfer.from))?.room -= transfer.room;
        }
        match self.cluster.aggregate(request.id) {
            Some(_) => Err(InventoryError::RunsAlready(request.name.clone())),
            None => Ok(()),
        }
    }

    fn adopt(&mut self, now: Duration, adopted: Adopted) {
        let Adopted {
            request,
            placement,
            transfers,
        } = adopted;
        self.queue.remove(request.id);
        for part in &placement.parts {
            self.have_room(part.host, part.room);
        }
        let aggregate = request.id;
        self.cluster.start(request, placement, now);
        if !transfers.is_empty() {
            for transfer in &transfers {
                self.have_room(transfer.to, transfer.room);
            }
            let moving = Move {
                aggregate,
                transfers,
            };
            self.note_move(moving, true);
        }
    }

    /// What is there already has room.
    fn have_room(&mut self, host: HostId, room: Room) {
        let free = self.cluster.free(host);
        let lacks = Room::new(
            room.cores.saturating_sub(free.cores),
            room.memory_mib.saturating_sub(free.memory_mib),
        );
        let capacity = self.cluster.host(host).capacity + lacks;
        self.cluster.set_capacity(host, capacity);
    }
}
