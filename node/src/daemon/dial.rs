//! Links that this daemon dials, to other lenders of the same aggregate.

use std::io;

use weft_wire::handshake::{self, HandshakeError, Secret, Ticket};
use weft_wire::keys::PublicKey;
use weft_wire::socket;

use super::expected::LINK_BOUND;
use super::shared::Shared;
use crate::links::Link;
use crate::monitor_protocol::THIS_HOST;

/// Why a link was not made, for this daemon's log.
#[derive(Debug, thiserror::Error)]
pub(super) enum DialError {
    /// Only peers are dialled.
    #[error("no [[peer]] has the key {0}: `weft node trust --may lend {0} NAME` adds one")]
    NoPeer(PublicKey),
    /// Nobody listens there, or the connection failed.
    #[error("{name}, {address}")]
    Connection {
        name: String,
        address: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// What listens there does not expect this link.
    #[error("{name}, {address}")]
    Handshake {
        name: String,
        address: String,
        /// What failed.
        source: HandshakeError,
    },
}

/// A link to a daemon, with what it is called here and where it listens.
pub(super) struct Dialled {
    pub(super) name: String,
    pub(super) address: String,
    pub(super) key: PublicKey,
    pub(super) link: Link,
}

/// A link to the peer that has `key`, or to this daemon itself: a host may have several
/// slices of one aggregate.
pub(super) fn dial_peer(
    daemon: &Shared,
    key: &PublicKey,
    ticket: &Ticket,
    secret: &Secret,
    lease_ms: u32,
) -> Result<Dialled, DialError> {
    let (name, address) = match daemon.peer(key) {
        Some(peer) => (peer.name.clone(), peer.address()),
        None if *key == daemon.keys.public() => {
            (THIS_HOST.to_owned(), daemon.own_address.to_string())
        }
        None => return Err(DialError::NoPeer(*key)),
    };
    let failed = |source| DialError::Connection {
        name: name.clone(),
        address: address.clone(),
        source,
    };
    let stream = socket::dial(&address, LINK_BOUND).map_err(failed)?;
    let keyed =
        handshake::dial_link(stream.into(), ticket, secret, LINK_BOUND).map_err(|source| {
            DialError::Handshake {
                name: name.clone(),
                address: address.clone(),
                source,
            }
        })?;
    let link = Link::keyed(keyed, lease_ms).map_err(failed)?;
    Ok(Dialled {
        name,
        address,
        key: *key,
        link,
    })
}
