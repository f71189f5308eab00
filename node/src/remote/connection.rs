//! A connection to a daemon: who both are, and requests with their replies.

use std::io;
use std::net::TcpStream;
use std::time::Duration;

use weft_wire::channel::{Channel, ChannelError};
use weft_wire::handshake::{self, HandshakeError};
use weft_wire::hello::{self, Hello, Mismatch};
use weft_wire::keys::{PublicKey, StaticKeys};
use weft_wire::socket;

use crate::config::{self, Config, PORT};
use crate::error::{LaunchError, sentence};
use crate::links::Link;
use crate::member::{self, MemberError};
use crate::monitor_protocol::OtherNode;
use crate::protocol::{DaemonReply, DaemonRequest, NodeStatus};
use crate::said::plain;

/// How long a host may take to accept a connection, and again to shake hands.
pub(super) const CONNECT_BOUND: Duration = Duration::from_secs(5);
/// How long a daemon may take for a request that only it works on.
pub(super) const CALL_BOUND: Duration = Duration::from_secs(5);

/// An authenticated connection to a daemon.
pub struct Connection {
    /// As the user named it.
    pub host: String,
    /// Where it listens, resolved.
    pub(super) address: String,
    /// Its key: other hosts are told this.
    pub(super) key: PublicKey,
    pub(super) channel: Channel,
    pub(super) descriptor: TcpStream,
}

/// This side's identity and whom it trusts.
pub struct Identity {
    keys: StaticKeys,
    config: Config,
}

impl Identity {
    /// Reads both from the configuration directory. In a cluster, its members are trusted, too.
    pub fn load(directory: Option<&std::path::Path>) -> Result<Identity, MemberError> {
        let directory = directory.map_or_else(config::directory, Into::into);
        let keys = config::load_keys(&directory)?;
        let mut config = Config::load(&directory)?;
        let members = member::peers(&directory, &config.peers)?;
        config.peers.extend(members);
        Ok(Identity { keys, config })
    }

    /// The trusted nodes.
    pub fn config(&self) -> &Config {
        &self.config
    }
}

impl Connection {
    /// One that a daemon made for this launcher, to the daemon of a node of its machine.
    ///
    /// # Errors
    /// Out of descriptors.
    pub fn inherited(node: OtherNode, link: Link) -> io::Result<Connection> {
        let (channel, descriptor) = link.into_channel()?;
        Ok(Connection {
            host: node.host,
            address: node.address,
            key: node.key,
            channel,
            descriptor,
        })
    }

    /// Connects to `host`, proves who both are, and checks that a program could
    /// move there.
    pub fn open(identity: &Identity, host: &str) -> Result<Connection, LaunchError> {
        Connection::open_for(identity, host, hello::check)
    }

    /// The same for something else, about which `check` (this host's hello first)
    /// says whether it can be there.
    pub fn open_for(
        identity: &Identity,
        host: &str,
        check: impl FnOnce(&Hello, &Hello) -> Result<(), Mismatch>,
    ) -> Result<Connection, LaunchError> {
        let refused = |why: String| LaunchError::Handshake {
            host: host.to_owned(),
            why,
        };
        let unreachable = |why: String| LaunchError::Unreachable {
            host: host.to_owned(),
            why,
        };
        let (peer, address) = identity.config.find(host).ok_or_else(|| {
            refused(format!(
                "no key is known for it: run `weft node init` there and `weft node trust --may lend KEY {host}` here (port {PORT} unless told otherwise)"
            ))
        })?;
        if !peer.may().lend() {
            return Err(refused(format!(
                "it may borrow from this host, not lend to it: write `may = \"both\"` into the [[peer]] `{}` of node.toml here",
                peer.name
            )));
        }
        let stream = socket::dial(&address, CONNECT_BOUND)
            .map_err(|error| unreachable(format!("{address}: {error}")))?;
        let io = |error: std::io::Error| unreachable(error.to_string());
        let address = stream.peer_addr().map_err(io)?.to_string();
        let descriptor = stream.try_clone().map_err(io)?;
        let channel =
            handshake::dial_control(stream.into(), &identity.keys, &peer.key, CONNECT_BOUND);
        let mut channel = channel.map_err(|error| refused(match error {
            HandshakeError::Refused { ours } => format!(
                "it does not let the key {ours} borrow: run `weft node trust --may borrow {ours} NAME` there, or write `may = \"borrow\"` into the [[peer]] that has the key, and start its daemon again"
            ),
            error => sentence(&error),
        }))?;
        let ours = Hello::here();
        let theirs = hello::exchange(&mut channel, &ours, CALL_BOUND)
            .map_err(|error| refused(sentence(&error)))?;
        check(&ours, &theirs).map_err(|error| refused(error.to_string()))?;
        Ok(Connection {
            host: host.to_owned(),
            address,
            key: peer.key,
            channel,
            descriptor,
        })
    }

    /// Asks and waits for the answer.
    pub fn call(
        &mut self,
        request: &DaemonRequest,
        bound: Duration,
    ) -> Result<DaemonReply, LaunchError> {
        let sent = self.channel.send(request);
        sent.map_err(|error| self.failed(sentence(&error)))?;
        self.receive(bound, bound)
    }

    /// Waits for what is `left` of `bound`.
    pub(super) fn receive(
        &mut self,
        left: Duration,
        bound: Duration,
    ) -> Result<DaemonReply, LaunchError> {
        self.channel.receive(left).map_err(|error| match error {
            ChannelError::Timeout(_) => self.too_slow(bound),
            error => self.failed(sentence(&error)),
        })
    }

    pub(super) fn too_slow(&self, bound: Duration) -> LaunchError {
        LaunchError::Timeout {
            what: format!("node {}", self.host),
            bound,
        }
    }

    /// Asks for what the host has and lends.
    pub fn status(&mut self) -> Result<NodeStatus, LaunchError> {
        match self.call(&DaemonRequest::Status, CALL_BOUND)? {
            DaemonReply::Status(status) => Ok(status),
            other => Err(self.unexpected(&other)),
        }
    }

    pub(super) fn failed(&self, why: String) -> LaunchError {
        LaunchError::Remote {
            host: self.host.clone(),
            why,
        }
    }

    pub(super) fn unexpected(&self, reply: &DaemonReply) -> LaunchError {
        self.failed(match reply {
            DaemonReply::Failed(why) | DaemonReply::Ended { why, .. } => plain(why),
            DaemonReply::Said(text) => plain(text),
            other => format!("it sent a reply that does not match the request ({other:?})"),
        })
    }

    pub(super) fn done(&mut self, request: &DaemonRequest) -> Result<(), LaunchError> {
        match self.call(request, 2 * CALL_BOUND)? {
            DaemonReply::Done => Ok(()),
            other => Err(self.unexpected(&other)),
        }
    }
}

pub(crate) fn reserve(
    connection: &mut Connection,
    request: &DaemonRequest,
) -> Result<u64, LaunchError> {
    match connection.call(request, CALL_BOUND)? {
        DaemonReply::Opened { budget_pages } => Ok(budget_pages),
        DaemonReply::NoRoom {
            asked_pages,
            free_pages,
            why,
        } => Err(LaunchError::NoRoom {
            host: connection.host.clone(),
            asked_pages,
            free_pages,
            why,
        }),
        other => Err(connection.unexpected(&other)),
    }
}
