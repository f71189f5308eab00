//! Where an aggregate runs, and how that changes.

use crate::host::HostId;
use crate::request::AggregateId;
use crate::room::Room;

/// A part with less memory than this could not hold a slice's own tables, MiB.
pub const PART_MEMORY_MIN_MIB: u64 = 64;

/// What one host gives to one aggregate. Without cores it is a memory server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    pub host: HostId,
    pub room: Room,
}

/// All parts of an aggregate, each on another host. The first one is the home: the largest,
/// and where the devices are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    pub parts: Vec<Part>,
}

impl Placement {
    pub fn whole(host: HostId, room: Room) -> Placement {
        Placement {
            parts: vec![Part { host, room }],
        }
    }

    pub fn room(&self) -> Room {
        self.parts.iter().map(|part| part.room).sum()
    }

    pub fn on(&self, host: HostId) -> Room {
        self.parts
            .iter()
            .find(|part| part.host == host)
            .map_or(Room::NONE, |part| part.room)
    }

    /// The same aggregate after `transfers`.
    pub fn after(&self, transfers: &[Transfer]) -> Placement {
        let mut parts = self.parts.clone();
        for transfer in transfers {
            match parts.iter_mut().find(|part| part.host == transfer.to) {
                Some(part) => part.room += transfer.room,
                None => parts.push(Part {
                    host: transfer.to,
                    room: transfer.room,
                }),
            }
            let from = parts
                .iter_mut()
                .find(|part| part.host == transfer.from)
                .expect("a transfer starts at a part");
            from.room -= transfer.room;
        }
        // Where the home goes as a whole, its first destination is the home: the devices go there.
        let home = parts[0];
        if home.room == Room::NONE
            && let Some(first) = transfers.iter().find(|transfer| transfer.from == home.host)
            && let Some(place) = parts.iter().position(|part| part.host == first.to)
        {
            parts.swap(0, place);
        }
        parts.retain(|part| part.room != Room::NONE);
        Placement { parts }
    }
}

impl Placement {
    /// Transfers after which this is `after`. Both have the same room, and the same home.
    pub fn transfers_to(&self, after: &Placement) -> Vec<Transfer> {
        let less = |one: Room, other: Room| {
            Room::new(
                one.cores.saturating_sub(other.cores),
                one.memory_mib.saturating_sub(other.memory_mib),
            )
        };
        let mut sources: Vec<Part> = self
            .parts
            .iter()
            .map(|&Part { host, room }| Part {
                host,
                room: less(room, after.on(host)),
            })
            .collect();
        let mut transfers = Vec::new();
        for &Part { host: to, room } in &after.parts {
            let mut wanted = less(room, self.on(to));
            for source in &mut sources {
                let room = Room::new(
                    wanted.cores.min(source.room.cores),
                    wanted.memory_mib.min(source.room.memory_mib),
                );
                if room != Room::NONE {
                    let from = source.host;
                    transfers.push(Transfer { from, to, room });
                    source.room -= room;
                    wanted -= room;
                }
            }
        }
        transfers
    }
}

/// Cores and memory that go from one host to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    pub from: HostId,
    pub to: HostId,
    pub room: Room,
}

/// What moves of one aggregate, at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    pub aggregate: AggregateId,
    pub transfers: Vec<Transfer>,
}

impl Move {
    pub fn memory_mib(&self) -> u64 {
        self.transfers
            .iter()
            .map(|transfer| transfer.room.memory_mib)
            .sum()
    }

    pub fn cores(&self) -> u32 {
        self.transfers
            .iter()
            .map(|transfer| transfer.room.cores)
            .sum()
    }
}
