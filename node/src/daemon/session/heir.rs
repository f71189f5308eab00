//! Another launcher that may take the slice of this session: the one beside the process that takes
//! node 0's part of the machine on another host.
//!
//! ```text
//!  none ──Heir──▶ expected ──its connection──▶ there ──Inherit──▶ the session is its own: none
//!                                                └── it goes ──▶ none
//! ```
//!
//! Invariant: while an heir is there, the end of the first launcher ends nothing. The slice ends if
//! the heir goes, too, and has not inherited it.

use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use weft_proc::boot::MAX_NODES;
use weft_wire::channel::{Channel, ChannelError};
use weft_wire::handshake::{Secret, Ticket};
use weft_wire::keys::PublicKey;

use super::{RequestError, Session, SessionError};
use crate::consent::NewFile;
use crate::daemon::dial::dial_peer;
use crate::daemon::expected::Awaited;
use crate::daemon::reserved::Inherited;
use crate::links::Link;
use crate::protocol::{DaemonReply, DaemonRequest};
use crate::sys;

/// Longest time for which a slice goes on without a launcher while its heir decides. What the heir
/// waits for has shorter bounds.
const DECISION_BOUND: Duration = Duration::from_secs(60);
/// Between two looks at whether it has decided.
const LOOK: Duration = Duration::from_millis(200);

/// See the module.
pub(super) enum Heir {
    None,
    Expected(Awaited),
    There(Box<Channel>, TcpStream),
}

impl Heir {
    /// Readable when it may have said something.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Heir::There(_, descriptor) => Some(descriptor.as_fd()),
            Heir::None | Heir::Expected(_) => None,
        }
    }

    /// Takes its connection, once that has come.
    fn meet(&mut self, lease_ms: u32) {
        let Heir::Expected(awaited) = self else {
            return;
        };
        if let Some(keyed) = awaited.come() {
            let connected = Link::keyed(keyed, lease_ms).and_then(Link::into_channel);
            *self = connected.map_or(Heir::None, |(channel, descriptor)| {
                Heir::There(Box::new(channel), descriptor)
            });
        }
    }

    /// The next thing that it says.
    fn hear(&mut self) -> Result<Option<DaemonRequest>, ChannelError> {
        let Heir::There(channel, descriptor) = self else {
            return Ok(None);
        };
        let is_readable = sys::wait_readable(&[descriptor.as_fd()], Duration::ZERO);
        let bound = match is_readable.map_err(ChannelError::Io)?[0] {
            true => Duration::from_millis(1),
            false => Duration::ZERO,
        };
        match channel.receive(bound) {
            Ok(request) => Ok(Some(request)),
            Err(ChannelError::Timeout(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl Session<'_> {
    pub(super) fn expect_heir(
        &mut self,
        ticket: Ticket,
        secret: Secret,
    ) -> Result<DaemonReply, RequestError> {
        if !self.slice.as_ref().is_some_and(|slice| slice.is_machines()) {
            return Err(RequestError::NoSlice);
        }
        let awaited = self.daemon.expected.announce(ticket, secret);
        self.heir = Heir::Expected(awaited.ok_or(RequestError::TicketUsed)?);
        Ok(DaemonReply::Done)
    }

    /// On the session of the process that inherits: connects it to the daemon of a slice.
    pub(super) fn dial_heir(
        &mut self,
        peer: u32,
        key: &PublicKey,
        ticket: &Ticket,
        secret: &Secret,
    ) -> Result<DaemonReply, RequestError> {
        let reserved = self.reserved.as_mut().ok_or(RequestError::NotReserved)?;
        let is_known = |inherited: &Inherited| inherited.node == peer;
        if peer as usize >= MAX_NODES || reserved.inherits.iter().any(is_known) {
            return Err(RequestError::Link { peer });
        }
        let lease_ms = reserved.lease.as_millis() as u32;
        match dial_peer(self.daemon, key, ticket, secret, lease_ms) {
            Ok(daemon) => {
                let node = peer;
                reserved.inherits.push(Inherited { node, daemon });
                Ok(DaemonReply::Done)
            }
            Err(why) => Err(self.not_dialled(peer, &why)),
        }
    }

    /// Whether an heir is connected.
    pub(super) fn has_heir(&mut self) -> bool {
        let lease = self.reserved.as_ref().map(|reserved| reserved.lease);
        self.heir.meet(lease.unwrap_or_default().as_millis() as u32);
        matches!(self.heir, Heir::There(..))
    }

    /// What the heir has said; whether it has inherited the slice.
    pub(super) fn hear_heir(&mut self) -> Result<bool, SessionError> {
        while self.has_heir() {
            let reply = match self.heir.hear() {
                Ok(None) => return Ok(false),
                Ok(Some(DaemonRequest::Inherit)) => return self.inherit().map(|()| true),
                Ok(Some(DaemonRequest::Ping)) => DaemonReply::Pong(Box::new(self.counters())),
                // It is not its launcher yet, or has gone.
                Ok(Some(_)) | Err(_) => {
                    self.heir = Heir::None;
                    break;
                }
            };
            if let Heir::There(channel, _) = &mut self.heir
                && channel.send(&reply).is_err()
            {
                self.heir = Heir::None;
            }
        }
        Ok(false)
    }

    fn inherit(&mut self) -> Result<(), SessionError> {
        let Heir::There(channel, descriptor) = std::mem::replace(&mut self.heir, Heir::None) else {
            return Ok(());
        };
        (self.channel, self.descriptor) = (*channel, descriptor);
        self.last_request = Instant::now();
        self.is_released = false;
        self.was_inherited = true;
        self.leaving = None;
        // The machine has come.
        self.disks.drain(..).for_each(NewFile::keep);
        let Some(slice) = &self.slice else {
            let why = "the slice has ended".to_owned();
            return self.send(&DaemonReply::Ended { why, clean: false });
        };
        let pid = slice.process().pid() as u32;
        self.say(&format!(
            "slice {pid} belongs to a machine that another host has now"
        ));
        self.send(&DaemonReply::Started { pid })
    }

    /// The launcher has gone: whether an heir that was there has inherited the slice. Waits until
    /// it has decided.
    pub(super) fn is_inherited(&mut self) -> bool {
        let deadline = Instant::now() + DECISION_BOUND;
        while self.has_heir() && Instant::now() < deadline {
            let heard = match self.wait_for_heir() {
                Ok(()) => self.hear_heir(),
                Err(error) => Err(SessionError::Wait(error)),
            };
            if !matches!(heard, Ok(false)) {
                return heard.is_ok();
            }
        }
        false
    }

    fn wait_for_heir(&self) -> io::Result<()> {
        let set: Vec<BorrowedFd<'_>> = self.heir.descriptor().into_iter().collect();
        sys::wait_readable(&set, LOOK).map(drop)
    }
}
