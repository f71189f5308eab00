//! What the scheduler decides, each with its reason in one sentence.

use crate::host::{HostId, Leave};
use crate::inventory::Inventory;
use crate::placement::{Move, Placement};
use crate::request::AggregateId;
use crate::room::Room;
use std::time::Duration;

#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    /// Start the aggregate there.
    Start {
        id: AggregateId,
        name: Box<str>,
        placement: Placement,
        why: Started,
    },
    /// It waits. Said once for each reason.
    Delay {
        id: AggregateId,
        name: Box<str>,
        why: Delayed,
    },
    /// It will never start as it was asked for.
    Refuse {
        id: AggregateId,
        name: Box<str>,
        why: Refused,
    },
    /// Move a part; the destination's room is taken already.
    Move {
        moving: Move,
        name: Box<str>,
        why: Moved,
        expected: Duration,
    },
    /// It does not move as an operator asked.
    NotMoved {
        id: AggregateId,
        name: Box<str>,
        to: HostId,
        why: NotMoved,
    },
    /// A spread aggregate is on one host now: best fit is responsible for it again.
    Whole {
        id: AggregateId,
        name: Box<str>,
        host: HostId,
    },
    /// It has to leave a host and finds no room. Said once; tried again whenever there is
    /// new room.
    Stuck {
        id: AggregateId,
        name: Box<str>,
        host: HostId,
        why: Leave,
        /// It could move, if there were room.
        can_move: bool,
    },
    /// What is left on a host needs longer to leave than the host stays.
    TooLate {
        host: HostId,
        needed: Duration,
        left: Duration,
    },
    /// A host is gone, and with it a part of this aggregate.
    Lost {
        id: AggregateId,
        name: Box<str>,
        host: Box<str>,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Started {
    /// One host holds it, and has `left` free cores then.
    Fits { left: u32 },
    /// No host holds it; the largest block of free cores is this.
    Spread { largest: u32 },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delayed {
    /// All hosts that it may use together have too little.
    NoRoom { free: Room },
    /// There is enough in sum, but not as the policy or the request wants it.
    NoBlock { largest: u32 },
    /// The host where it has to start has too little.
    HomeFull { host: HostId, free: Room },
    /// A move under way leaves room for all of it on this host.
    MoveUnderWay { host: HostId },
    /// Others wait before it.
    Queued { before: usize },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refused {
    /// Even empty hosts could not hold it.
    LargerThanCluster {
        capacity: Room,
        hosts_max: u32,
    },
    /// The host where it has to start is not there.
    NoHome,
    /// No host has the devices, free or not.
    NoDevices,
    QueueFull {
        waiting: usize,
    },
    Wrong(crate::request::RequestError),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotMoved {
    /// One move at a time.
    Moves,
    /// It has no part elsewhere, or not there, that may move.
    NoPart,
    /// The host takes nothing new.
    Closed,
    NoRoom {
        part: Room,
        free: Room,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Moved {
    /// An operator wants it.
    Asked,
    /// The source then has a block of `larger` free cores.
    LargerBlock {
        from: HostId,
        larger: u32,
        whole: bool,
    },
    /// The aggregate is then on `hosts` hosts.
    FewerHosts { hosts: u32 },
    /// Something else finds room then.
    MakesRoom { of: Box<str> },
    /// The host has to be left.
    Leaves { host: HostId, why: Leave },
}

impl Decision {
    /// The decision and its reason in one sentence.
    pub fn explain(&self, cluster: &Inventory) -> String {
        let host_name = |id: HostId| match cluster.has(id) {
            true => cluster.host(id).name.to_string(),
            false => format!("host {}", id.0),
        };
        match self {
            Decision::Start {
                name,
                placement,
                why,
                ..
            } => {
                let parts = parts(placement, &host_name);
                match why {
                    Started::Fits { left: 0 } => {
                        format!("{name} starts on {parts}: it fills the free cores there exactly.")
                    }
                    Started::Fits { left } => format!(
                        "{name} starts on {parts}: the least cores, {left}, are left over there."
                    ),
                    Started::Spread { largest } => format!(
                        "{name} starts on {parts}: no host has room for all of it, the largest \
                         block of free cores is {largest}."
                    ),
                }
            }
            Decision::Delay { name, why, .. } => match why {
                Delayed::NoRoom { free } => {
                    format!("{name} waits: {free} are free on all hosts together.")
                }
                Delayed::NoBlock { largest } => format!(
                    "{name} waits: the largest block of free cores is {largest}, and it does not \
                     fit into what may be combined."
                ),
                Delayed::HomeFull { host, free } => format!(
                    "{name} waits: it starts on {}, which has only {free} free.",
                    host_name(*host)
                ),
                Delayed::MoveUnderWay { host } => format!(
                    "{name} waits: a move under way leaves room for all of it on {}.",
                    host_name(*host)
                ),
                Delayed::Queued { before } => {
                    format!("{name} waits: {before} asked before it and wait, too.")
                }
            },
            Decision::Refuse { name, why, .. } => match why {
                Refused::LargerThanCluster {
                    capacity,
                    hosts_max,
                } => format!(
                    "{name} is refused: {hosts_max} of this cluster's hosts would not hold it if \
                     they were empty (the cluster has {capacity}); ask for less."
                ),
                Refused::NoHome => format!(
                    "{name} is refused: the host on which it has to start is no member of the \
                     cluster."
                ),
                Refused::NoDevices => format!(
                    "{name} is refused: no host of this cluster has the devices that it needs."
                ),
                Refused::QueueFull { waiting } => {
                    format!("{name} is refused: {waiting} requests wait already; ask again later.")
                }
                Refused::Wrong(error) => format!("{name} is refused: {error}."),
            },
            Decision::Move {
                moving,
                name,
                why,
                expected,
            } => {
                let transfers = transfers(moving, &host_name);
                let seconds = expected.as_secs_f64();
                match why {
                    Moved::Asked => format!(
                        "{name} moves {transfers} within {seconds:.1} s: an operator wants it."
                    ),
                    Moved::LargerBlock {
                        from,
                        larger,
                        whole,
                    } => format!(
                        "{name} moves {transfers} within {seconds:.1} s: {} then has a block of \
                         {larger} free cores{}.",
                        host_name(*from),
                        if *whole {
                            ", and the aggregate is on one host"
                        } else {
                            ""
                        }
                    ),
                    Moved::FewerHosts { hosts: 1 } => format!(
                        "{name} moves {transfers} within {seconds:.1} s: it is on one host then."
                    ),
                    Moved::FewerHosts { hosts } => format!(
                        "{name} moves {transfers} within {seconds:.1} s: it is on {hosts} hosts \
                         then, one less."
                    ),
                    Moved::MakesRoom { of } => format!(
                        "{name} moves {transfers} within {seconds:.1} s: {of} finds room then."
                    ),
                    Moved::Leaves { host, why } => format!(
                        "{name} moves {transfers} within {seconds:.1} s: {} {why}.",
                        host_name(*host)
                    ),
                }
            }
            Decision::NotMoved { name, to, why, .. } => {
                let to = host_name(*to);
                match why {
                    NotMoved::Moves => format!("{name} does not move to {to}: it moves already."),
                    NotMoved::NoPart => format!(
                        "{name} does not move to {to}: no such part of it can move; the first one \
                         is where its launcher is."
                    ),
                    NotMoved::Closed => {
                        format!("{name} does not move to {to}: nothing new comes there.")
                    }
                    NotMoved::NoRoom { part, free } => format!(
                        "{name} does not move to {to}: {free} are free there, its part has {part}."
                    ),
                }
            }
            Decision::Whole { name, host, .. } => format!(
                "{name} is on {} as a whole: it is placed by best fit from now on.",
                host_name(*host)
            ),
            Decision::Stuck {
                name,
                host,
                why,
                can_move,
                ..
            } => format!(
                "{name} has to leave {}, which {why}, and {}.",
                host_name(*host),
                match can_move {
                    true => "no other host has room for its part",
                    false => "the cluster cannot move it: end it, or wait until it leaves or ends",
                }
            ),
            Decision::TooLate { host, needed, left } => format!(
                "{} leaves the cluster in {:.0} s, and moving what is there needs {:.0} s.",
                host_name(*host),
                left.as_secs_f64(),
                needed.as_secs_f64()
            ),
            Decision::Lost { name, host, .. } => {
                format!("{name} has ended: a part of it was on {host}, which is gone.")
            }
        }
    }
}

/// "alpha (2 cores and 4096 MiB) and beta (…)".
fn parts(placement: &Placement, host_name: &dyn Fn(HostId) -> String) -> String {
    match &placement.parts[..] {
        [part] => host_name(part.host),
        parts => {
            let parts = parts
                .iter()
                .map(|part| format!("{} ({})", host_name(part.host), part.room));
            parts.collect::<Vec<_>>().join(" and ")
        }
    }
}

fn transfers(moving: &Move, host_name: &dyn Fn(HostId) -> String) -> String {
    let transfers = moving.transfers.iter().map(|transfer| {
        let (from, to) = (host_name(transfer.from), host_name(transfer.to));
        format!("{} from {from} to {to}", transfer.room)
    });
    transfers.collect::<Vec<_>>().join(" and ")
}
