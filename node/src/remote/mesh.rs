//! The links of all slices of an aggregate, and their start.

use std::time::{Duration, Instant};

use weft_proc::boot::MAX_NODES;
use weft_wire::handshake::{self, Secret, Ticket};
use weft_wire::{keys, socket};

use super::connection::{CALL_BOUND, CONNECT_BOUND};
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
        links[*number as usize] = Some(dial_home_link(lease_ms, slice)?);
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

fn dial_home_link(lease_ms: u32, slice: &mut RemoteSlice) -> Result<Link, LaunchError> {
    let connection = &mut slice.connection;
    let (ticket, secret) = pair_secret()?;
    connection.done(&DaemonRequest::Expect {
        peer: 0,
        ticket,
        secret,
    })?;
    let unreachable = |why: String| LaunchError::Unreachable {
        host: connection.host.clone(),
        why: format!("second connection: {why}"),
    };
    let stream = socket::dial(&connection.address, CONNECT_BOUND)
        .map_err(|error| unreachable(error.to_string()))?;
    let keyed = handshake::dial_link(stream.into(), &ticket, &secret, CONNECT_BOUND)
        .map_err(|error| unreachable(sentence(&error)))?;
    Link::keyed(keyed, lease_ms).map_err(|error| unreachable(error.to_string()))
}

fn join(
    number: u32,
    slice: &mut RemoteSlice,
    peer: u32,
    other: &mut RemoteSlice,
) -> Result<(), LaunchError> {
    let (ticket, secret) = pair_secret()?;
    other.connection.done(&DaemonRequest::Expect {
        peer: number,
        ticket,
        secret,
    })?;
    let (ours, theirs) = (&mut slice.connection, &other.connection);
    let dialled = ours.done(&DaemonRequest::Dial {
        peer,
        key: theirs.key,
        ticket,
        secret,
    });
    dialled.map_err(|error| match error {
        // Why, it tells its own log alone.
        LaunchError::Remote { .. } => LaunchError::NoWay {
            from: ours.host.clone(),
            to: theirs.host.clone(),
            key: theirs.key,
        },
        error => error,
    })
}
