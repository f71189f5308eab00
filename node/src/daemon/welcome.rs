//! A connection from its accept to its end: a handshake, then a session, or a link for
//! the session that waits for it.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use weft_wire::channel::{Channel, ChannelError};
use weft_wire::handshake::{self, HandshakeError, Opening};
use weft_wire::{hello, socket};

use super::door::{DoorError, Guest, Stranger};
use super::session::Session;
use super::shared::Shared;
use crate::config::Peer;
use crate::error::sentence;

/// How long a peer may take for its handshake.
const HANDSHAKE_BOUND: Duration = Duration::from_secs(5);

/// Why a connection is not served.
#[derive(Debug, thiserror::Error)]
enum WelcomeError {
    #[error("its socket cannot be set up")]
    Socket(#[source] io::Error),
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    /// After the handshake: who both are.
    #[error(transparent)]
    Hello(#[from] ChannelError),
    #[error("an unexpected link")]
    UnexpectedLink,
    #[error("a key without a peer")]
    NoPeer,
    #[error("{name} may lend to this host, not borrow from it")]
    MayNotBorrow { name: String },
    #[error(transparent)]
    Door(#[from] DoorError),
}

/// The whole life of one connection.
pub(super) fn welcome(
    shared: &Arc<Shared>,
    stream: TcpStream,
    stranger: Stranger,
    from: SocketAddr,
) {
    match prove(shared, stream, stranger) {
        Ok(None) => {}
        Ok(Some(session)) => {
            let Known {
                channel,
                descriptor,
                peer,
                guest,
            } = session;
            let served = Session::new(shared, &peer, channel, descriptor).serve();
            drop(guest);
            if let Err(why) = served {
                shared.say_of_peer(&peer, &format!("{from}: {}", sentence(&why)));
            }
        }
        Err(why) => shared.say_of_stranger(&format!("{from}: {}", sentence(&why))),
    }
}

/// A peer whose key was proven, on a connection of its own.
struct Known {
    peer: Peer,
    channel: Channel,
    descriptor: TcpStream,
    guest: Guest,
}

/// The handshake: a peer, or none where it was a link, which its session has now.
fn prove(
    shared: &Shared,
    stream: TcpStream,
    stranger: Stranger,
) -> Result<Option<Known>, WelcomeError> {
    stream
        .set_nonblocking(false)
        .and_then(|()| socket::tune(&stream))
        .map_err(WelcomeError::Socket)?;
    let incoming = handshake::accept(stream.into(), HANDSHAKE_BOUND)?;
    match incoming.opening() {
        Opening::Link { ticket } => {
            let secret = shared
                .expected
                .secret(&ticket)
                .ok_or(WelcomeError::UnexpectedLink)?;
            let keyed = incoming.link(&secret)?;
            if stranger.leave() {
                shared.expected.deliver(&ticket, keyed);
            }
            Ok(None)
        }
        // A switch is another process, at another port.
        Opening::Switch => Err(HandshakeError::Malformed("a switch is not served here").into()),
        Opening::Control => {
            let borrows = |key: &_| {
                let peer = shared.peer(key);
                peer.is_some_and(|peer| peer.may().borrow())
            };
            let controlled = incoming.control(&shared.keys, borrows);
            let (mut channel, key) = controlled.map_err(|error| refusal(shared, error))?;
            let peer = shared.peer(&key).ok_or(WelcomeError::NoPeer)?;
            let (guest, descriptor) = stranger.prove(key)?;
            // Home decides whether its programs can move here; this side only
            // says what it is.
            hello::exchange(&mut channel, &shared.hello, HANDSHAKE_BOUND)?;
            Ok(Some(Known {
                peer,
                channel,
                descriptor,
                guest,
            }))
        }
    }
}

/// Why a connection is not served, for the log.
fn refusal(shared: &Shared, error: HandshakeError) -> WelcomeError {
    if let HandshakeError::Untrusted { found } = &error
        && let Some(peer) = shared.peer(found)
    {
        return WelcomeError::MayNotBorrow {
            name: peer.name.clone(),
        };
    }
    error.into()
}
