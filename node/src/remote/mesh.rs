//! The links of all slices of an aggregate, and their start.

use std::time::{Duration, Instant};

use weft_proc::boot::MAX_NODES;
use weft_wire::handshake::{self, Secret, Ticket};
use weft_wire::keys::PublicKey;
use weft_wire::{keys, socket};

use super::connection::{CALL_BOUND, CONNECT_BOUND, Connection};
use super::slice::{RemoteSlice, START_BOUND};
use crate::error::{LaunchError, sentence};
use crate::links::{Link, Links};
use crate::protocol::DaemonRequest;

/// How long linking and starting the slices of the largest aggregate takes when each
/// step takes its whole bound: a link is announced and dialled, and every two of the
/// nodes have one.
pub(crate) const JOIN_BOUND: Duration = {
    let links = (MAX_NODES * (MAX_NODES - 1) / 2) as u32;
    let link = 4 * CALL_BOUND.as_secs() + 2 * CONNECT_BOUND.as_secs();
    Duration::from_secs(links as u64 * link + START_BOUND.as_secs())
};

fn pair_secret() -> Result<(Ticket, Secret), LaunchError> {
    let fresh = || {
        keys::secret().map_err(|error| LaunchError::System {
            doing: "make a link's secret".into(),
            source: std::io::Error::other(error),
        })
    };
    let mut ticket = Ticket::default();
    ticket.copy_from_slice(&fresh()?[..16]);
    Ok((ticket, fresh()?))
}

/// Makes the full mesh of `nodes` nodes (home with each slice, each slice with
/// each later one); returns home's ends.
pub(crate) fn connect(
    nodes: u32,
    lease_ms: u32,
    slices: &mut [(u32, &mut RemoteSlice)],
) -> Result<Links, LaunchError> {
    let mut links: Links = (0..nodes).map(|_| None).collect();
    for (number, slice) in slices.iter_mut() {
        links[*number as usize] = Some(link_here(lease_ms, &mut slice.connection, 0)?);
    }
    for left in 0..slices.len() {
        let (before, after) = slices.split_at_mut(left + 1);
        let (number, slice) = &mut before[left];
        for (peer, other) in after {
            join(*number, slice, *peer, other)?;
        }
    }
    Ok(links)
}

/// Starts all slices, which get ready together.
pub(crate) fn start(
    slices: &mut [(u32, &mut RemoteSlice)],
    request: impl Fn(u32) -> Result<DaemonRequest, LaunchError>,
) -> Result<(), LaunchError> {
    for (number, slice) in slices.iter_mut() {
        let sent = slice.connection.channel.send(&request(*number)?);
        sent.map_err(|error| slice.connection.failed(sentence(&error)))?;
    }
    let deadline = Instant::now() + START_BOUND;
    for (_, slice) in slices.iter_mut() {
        slice.started(deadline)?;
    }
    Ok(())
}

/// This host's end of a link between its node `number` and the slice that a daemon is about
/// to start.
fn link_here(lease_ms: u32, connection: &mut Connection, number: u32) -> Result<Link, LaunchError> {
    let end = FarEnd::new(connection)?;
    connection.done(&end.expected_from(number))?;
    end.dial(lease_ms)
}

/// The end of a link that a daemon expects for its slice.
pub(crate) struct FarEnd {
    host: String,
    address: String,
    key: PublicKey,
    ticket: Ticket,
    secret: Secret,
}

impl FarEnd {
    fn new(connection: &Connection) -> Result<FarEnd, LaunchError> {
        let (ticket, secret) = pair_secret()?;
        Ok(FarEnd {
            host: connection.host.clone(),
            address: connection.address.clone(),
            key: connection.key,
            ticket,
            secret,
        })
    }

    /// Of a link between a slice that runs and node `number`, which joins. Its daemon expects
    /// the link once it has answered ([`super::RemoteEvent::Expects`]).
    pub fn announce(slice: &mut RemoteSlice, number: u32) -> Result<FarEnd, LaunchError> {
        let end = FarEnd::new(&slice.connection)?;
        let sent = slice.expect(&end.expected_from(number));
        sent.map_err(|error| slice.connection.failed(sentence(&error)))?;
        Ok(end)
    }

    /// Of the connection of a launcher that may inherit a slice that runs. Answered as
    /// [`FarEnd::announce`].
    pub fn announce_heir(slice: &mut RemoteSlice) -> Result<FarEnd, LaunchError> {
        let end = FarEnd::new(&slice.connection)?;
        let request = DaemonRequest::Heir {
            ticket: end.ticket,
            secret: end.secret,
        };
        let sent = slice.expect(&request);
        sent.map_err(|error| slice.connection.failed(sentence(&error)))?;
        Ok(end)
    }

    fn expected_from(&self, number: u32) -> DaemonRequest {
        DaemonRequest::Expect {
            peer: number,
            ticket: self.ticket,
            secret: self.secret,
        }
    }

    /// This host's end of the link.
    pub fn dial(&self, lease_ms: u32) -> Result<Link, LaunchError> {
        let unreachable = |why: String| LaunchError::Unreachable {
            host: self.host.clone(),
            why: format!("second connection: {why}"),
        };
        let stream = socket::dial(&self.address, CONNECT_BOUND)
            .map_err(|error| unreachable(error.to_string()))?;
        let keyed = handshake::dial_link(stream.into(), &self.ticket, &self.secret, CONNECT_BOUND)
            .map_err(|error| unreachable(sentence(&error)))?;
        Link::keyed(keyed, lease_ms).map_err(|error| unreachable(error.to_string()))
    }

    /// Has another daemon make the link to node `peer`, for a slice that it is about to start.
    fn dial_from(&self, ours: &mut Connection, peer: u32) -> Result<(), LaunchError> {
        let request = DaemonRequest::Dial {
            peer,
            key: self.key,
            ticket: self.ticket,
            secret: self.secret,
        };
        self.dialled(ours, &request)
    }

    /// Has another daemon connect the launcher that inherits the slice of node `peer`, for the
    /// process that it is about to start.
    fn dial_heir_from(&self, ours: &mut Connection, peer: u32) -> Result<(), LaunchError> {
        let request = DaemonRequest::DialHeir {
            peer,
            key: self.key,
            ticket: self.ticket,
            secret: self.secret,
        };
        self.dialled(ours, &request)
    }

    fn dialled(&self, ours: &mut Connection, request: &DaemonRequest) -> Result<(), LaunchError> {
        let dialled = ours.done(request);
        dialled.map_err(|error| match error {
            // Why, it tells its own log alone.
            LaunchError::Remote { .. } => LaunchError::NoWay {
                from: ours.host.clone(),
                to: self.host.clone(),
                key: self.key,
            },
            error => error,
        })
    }
}

/// Links a slice that joins a running machine: with this host's nodes `here`, whose ends are
/// returned, and with those on other hosts.
pub(crate) fn link_joining(
    connection: &mut Connection,
    lease_ms: u32,
    here: &[u32],
    far: &[(u32, FarEnd)],
) -> Result<Vec<(u32, Link)>, LaunchError> {
    let links = (here.iter())
        .map(|peer| Ok((*peer, link_here(lease_ms, connection, *peer)?)))
        .collect::<Result<_, LaunchError>>()?;
    for (peer, end) in far {
        end.dial_from(connection, *peer)?;
    }
    Ok(links)
}

/// Connects a process that takes the place of node 0 with the nodes that stay: the links, and
/// the connections of its launcher.
pub(crate) fn link_heir(
    connection: &mut Connection,
    far: &[(u32, FarEnd)],
    daemons: &[(u32, FarEnd)],
) -> Result<(), LaunchError> {
    for (peer, end) in far {
        end.dial_from(connection, *peer)?;
    }
    for (peer, end) in daemons {
        end.dial_heir_from(connection, *peer)?;
    }
    Ok(())
}

fn join(
    number: u32,
    slice: &mut RemoteSlice,
    peer: u32,
    other: &mut RemoteSlice,
) -> Result<(), LaunchError> {
    let end = FarEnd::new(&other.connection)?;
    other.connection.done(&end.expected_from(number))?;
    end.dial_from(&mut slice.connection, peer)
}
