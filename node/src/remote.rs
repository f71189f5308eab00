//! A slice on another host, as the launcher sees it.
//!
//! ```text
//! connect ──▶ open ──▶ links ──▶ started ──▶ closed
//!               ▲                   │ execve
//!               └───── stopped ◀────┘
//! ```
//!
//! Until `started` every request is answered within a bound, one at a time.
//! After it, requests are sent without waiting and whatever arrives is an event
//! for the owner's loop; the heartbeat is a Ping whose answer must come within
//! the lease.

use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use weft_proc::boot::MAX_NODES;
use weft_wire::channel::{Channel, ChannelError};
use weft_wire::handshake::{self, HandshakeError, Secret, Ticket};
use weft_wire::hello::{self, Hello, Mismatch};
use weft_wire::keys::{Keys, PublicKey};
use weft_wire::{keys, socket};

use crate::config::{self, Config, PORT};
use crate::error::{LaunchError, sentence};
use crate::links::{Link, Links};
use crate::protocol::{Reply, Request, Status};
use crate::said::{BATCH, Said, plain};
use crate::shared::Snapshot;

/// How long a host may take to accept a connection, and again to shake hands.
const CONNECT_BOUND: Duration = Duration::from_secs(5);
/// How long a daemon may take for a request that only it works on.
const CALL_BOUND: Duration = Duration::from_secs(5);
/// How long daemons may take to start the slices of an aggregate, which they do at the
/// same time: longer than a daemon's own bounds.
const START_BOUND: Duration = Duration::from_secs(30);
/// How long linking and starting the slices of the largest aggregate takes when each
/// step takes its whole bound: a link is announced and dialled, and every two of the
/// nodes have one.
pub(crate) const JOIN_BOUND: Duration = {
    let links = (MAX_NODES * (MAX_NODES - 1) / 2) as u32;
    let link = 4 * CALL_BOUND.as_secs() + 2 * CONNECT_BOUND.as_secs();
    Duration::from_secs(links as u64 * link + START_BOUND.as_secs())
};
/// How long the last counters may take after the program's end.
const CLOSE_BOUND: Duration = Duration::from_millis(500);
/// A launcher that did not run for this long (it was stopped) gives every node
/// a fresh lease.
pub(crate) const STALL: Duration = Duration::from_millis(1500);

/// What a slice elsewhere did by itself.
#[derive(Debug)]
pub enum Event {
    /// It has something to say to the user.
    Said(String),
    Ended {
        why: String,
        /// As it does when its links close.
        clean: bool,
    },
    /// Its host wants its memory back.
    Leaving,
}

/// An authenticated connection to a daemon.
pub struct Connection {
    /// As the user named it.
    pub host: String,
    /// Where it listens, resolved.
    address: String,
    /// Its key: other hosts are told this.
    key: PublicKey,
    channel: Channel,
    descriptor: TcpStream,
}

/// This side's identity and whom it trusts.
pub struct Identity {
    keys: Keys,
    config: Config,
}

impl Identity {
    /// Reads both from the configuration directory.
    pub fn load(directory: Option<&std::path::Path>) -> Result<Identity, config::ConfigError> {
        let directory = directory.map_or_else(config::directory, Into::into);
        Ok(Identity {
            keys: config::load_keys(&directory)?,
            config: Config::load(&directory)?,
        })
    }

    /// The trusted nodes.
    pub fn config(&self) -> &Config {
        &self.config
    }
}

impl Connection {
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
    pub fn call(&mut self, request: &Request, bound: Duration) -> Result<Reply, LaunchError> {
        let sent = self.channel.send(request);
        sent.map_err(|error| self.failed(sentence(&error)))?;
        self.receive(bound, bound)
    }

    /// Waits for what is `left` of `bound`.
    fn receive(&mut self, left: Duration, bound: Duration) -> Result<Reply, LaunchError> {
        self.channel.receive(left).map_err(|error| match error {
            ChannelError::Timeout(_) => self.too_slow(bound),
            error => self.failed(sentence(&error)),
        })
    }

    fn too_slow(&self, bound: Duration) -> LaunchError {
        LaunchError::Timeout {
            what: format!("node {}", self.host),
            bound,
        }
    }

    /// Asks for what the host has and lends.
    pub fn status(&mut self) -> Result<Status, LaunchError> {
        match self.call(&Request::Status, CALL_BOUND)? {
            Reply::Status(status) => Ok(status),
            other => Err(self.unexpected(&other)),
        }
    }

    fn failed(&self, why: String) -> LaunchError {
        LaunchError::Remote {
            host: self.host.clone(),
            why,
        }
    }

    fn unexpected(&self, reply: &Reply) -> LaunchError {
        self.failed(match reply {
            Reply::Failed(why) | Reply::Ended { why, .. } => plain(why),
            Reply::Said(text) => plain(text),
            other => format!("it sent a reply that does not match the request ({other:?})"),
        })
    }

    fn done(&mut self, request: &Request) -> Result<(), LaunchError> {
        match self.call(request, 2 * CALL_BOUND)? {
            Reply::Done => Ok(()),
            other => Err(self.unexpected(&other)),
        }
    }
}

/// See the module.
pub struct RemoteSlice {
    pub(crate) connection: Connection,
    pid: Option<u32>,
    counters: Snapshot,
    heard: Instant,
    /// When the last heartbeat was due, to notice that this process was stopped.
    beaten: Instant,
    /// Pings that were not answered yet.
    waiting: u32,
    closed: bool,
    /// What it and its daemon had this process say.
    said: Said,
}

impl RemoteSlice {
    pub(crate) fn new(connection: Connection) -> RemoteSlice {
        RemoteSlice {
            connection,
            pid: None,
            counters: Snapshot::default(),
            heard: Instant::now(),
            beaten: Instant::now(),
            waiting: 0,
            closed: false,
            said: Said::new(Instant::now()),
        }
    }

    /// What the user calls its host.
    pub fn host(&self) -> &str {
        &self.connection.host
    }

    /// Its process id on its host.
    pub fn pid(&self) -> Option<u32> {
        self.pid
    }

    /// Its counters as last heard.
    pub fn counters(&self) -> &Snapshot {
        &self.counters
    }

    /// Readable when an event may have come.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.connection.descriptor.as_fd()
    }

    /// What has come, a batch at most. An error means that the node is lost.
    pub fn receive(&mut self) -> Result<Vec<Event>, String> {
        let rest = self.said.rest(Instant::now());
        let mut events: Vec<Event> = rest.map(Event::Said).into_iter().collect();
        // What was already read is returned without waiting; the first round
        // reads what the descriptor announced.
        let readable = crate::sys::wait_readable(&[self.descriptor()], Duration::ZERO)
            .map_err(|error| error.to_string())?[0];
        let mut bound = if readable {
            Duration::from_millis(1)
        } else {
            Duration::ZERO
        };
        for _ in 0..BATCH {
            match self.connection.channel.receive(bound) {
                Ok(reply) => {
                    self.heard = Instant::now();
                    self.waiting = self.waiting.saturating_sub(1);
                    self.take(reply, &mut events);
                }
                Err(ChannelError::Timeout(_)) => return Ok(events),
                // An end that the slice had announced is told as that.
                Err(_) if !events.is_empty() => return Ok(events),
                Err(error) => return Err(sentence(&error)),
            }
            bound = Duration::ZERO;
        }
        Ok(events)
    }

    fn take(&mut self, reply: Reply, events: &mut Vec<Event>) {
        match reply {
            Reply::Pong(counters) | Reply::Stopped(counters) => self.counters = *counters,
            Reply::Said(text) => {
                let line = self.said.hear(Instant::now(), &text);
                events.extend(line.map(Event::Said));
            }
            Reply::Ended { why, clean } => {
                let why = plain(&why);
                events.push(Event::Ended { why, clean });
            }
            Reply::Leaving => events.push(Event::Leaving),
            other => events.push(Event::Ended {
                why: format!(
                    "its daemon sent a reply that does not match the request \
                ({other:?})"
                ),
                clean: false,
            }),
        }
    }

    /// Sends a Ping; fails when the node has been silent for the lease.
    pub fn heartbeat(&mut self, lease: Duration) -> Result<(), String> {
        let now = Instant::now();
        if now.duration_since(self.beaten) > STALL.max(lease / 2) {
            self.heard = now;
        }
        self.beaten = now;
        if now.duration_since(self.heard) > lease {
            return Err(format!("it was silent for {} s", lease.as_secs_f32()));
        }
        // Unanswered pings would pile up at a daemon that is slow.
        if self.waiting < 8 {
            self.waiting += 1;
            self.send(&Request::Ping)?;
        }
        Ok(())
    }

    /// Has the daemon send the slice the kick signal.
    pub fn kick(&mut self) -> Result<(), String> {
        self.send(&Request::Kick)
    }

    fn send(&mut self, request: &Request) -> Result<(), String> {
        let sent = self.connection.channel.send(request);
        sent.map_err(|error| sentence(&error))
    }

    /// Ends the slice and waits, within a bound, for its last counters. The
    /// connection stays, for the next generation; dropped, it gives the host its
    /// memory back.
    pub fn close(&mut self) {
        if self.closed || self.pid.is_none() {
            return;
        }
        self.pid = None;
        if self.send(&Request::Stop).is_err() {
            self.closed = true;
            return;
        }
        let deadline = Instant::now() + CLOSE_BOUND;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.connection.channel.receive(left) {
                Ok(Reply::Stopped(counters)) => {
                    self.counters = *counters;
                    self.waiting = 0;
                    return;
                }
                // Another message than the last; one that never stops talking is left.
                Ok(_) if !left.is_zero() => {}
                Ok(_) | Err(_) => {
                    self.closed = true;
                    return;
                }
            }
        }
    }
}

impl RemoteSlice {
    /// Ends the slice and gives the host back what it lent, within a bound, so that
    /// the next request finds it free. A host that does not answer gets it back
    /// with the connection.
    pub fn release(&mut self) {
        // A host that is lost already is not waited for.
        let bound = match self.heard.elapsed() > 2 * STALL {
            true => CLOSE_BOUND,
            false => CALL_BOUND,
        };
        let deadline = Instant::now() + bound;
        let mut waits = self.send(&Request::Release).is_ok();
        while waits {
            let left = deadline.saturating_duration_since(Instant::now());
            // What else it says, nobody needs any more; an error is the end of the
            // connection, which does the same.
            let reply = self.connection.channel.receive(left);
            waits = !left.is_zero() && !matches!(reply, Ok(Reply::Done) | Err(_));
        }
        self.disconnect();
    }

    /// Ends the connection: the host gets back what it lent.
    pub fn disconnect(&mut self) {
        self.closed = true;
        // It fails only when the connection is gone already.
        let _ = self
            .connection
            .descriptor
            .shutdown(std::net::Shutdown::Both);
    }
}

pub(crate) fn reserve(connection: &mut Connection, request: &Request) -> Result<u64, LaunchError> {
    match connection.call(request, CALL_BOUND)? {
        Reply::Opened { budget_pages } => Ok(budget_pages),
        Reply::NoRoom {
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
    request: impl Fn(u32) -> Result<Request, LaunchError>,
) -> Result<(), LaunchError> {
    for (number, slice) in slices.iter_mut() {
        let sent = slice.connection.channel.send(&request(*number)?);
        sent.map_err(|error| slice.connection.failed(sentence(&error)))?;
    }
    let deadline = Instant::now() + START_BOUND;
    for (_, slice) in slices.iter_mut() {
        started(slice, deadline)?;
    }
    Ok(())
}

fn dial_home_link(lease_ms: u32, slice: &mut RemoteSlice) -> Result<Link, LaunchError> {
    let connection = &mut slice.connection;
    let (ticket, secret) = pair_secret()?;
    connection.done(&Request::Expect {
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
    other.connection.done(&Request::Expect {
        peer: number,
        ticket,
        secret,
    })?;
    let (ours, theirs) = (&mut slice.connection, &other.connection);
    let dialled = ours.done(&Request::Dial {
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

/// Waits for the answer to a start, whatever else the daemon says before it.
fn started(slice: &mut RemoteSlice, deadline: Instant) -> Result<(), LaunchError> {
    let connection = &mut slice.connection;
    let mut said = Vec::new();
    loop {
        // Looked at before each message: what is here already is received without waiting.
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(connection.too_slow(START_BOUND));
        }
        match connection.receive(left, START_BOUND)? {
            Reply::Started { pid } => {
                slice.pid = Some(pid);
                slice.heard = Instant::now();
                slice.beaten = slice.heard;
                return Ok(());
            }
            Reply::Said(text) => {
                said.truncate(BATCH);
                said.push(plain(&text));
            }
            Reply::Failed(why) => {
                said.push(plain(&why));
                return Err(connection.failed(said.join(": ")));
            }
            other => return Err(connection.unexpected(&other)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::thread::{self, JoinHandle};

    const BOUND: Duration = Duration::from_secs(30);

    /// A daemon that answers whatever is asked with the same, for as long as anybody
    /// listens, and a connection to it.
    fn talker() -> (RemoteSlice, JoinHandle<()>) {
        let (ours, theirs) = (keys::generate().unwrap(), keys::generate().unwrap());
        let key = theirs.public();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let thread = thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let incoming = handshake::accept(stream.into(), BOUND).unwrap();
            let (mut channel, _) = incoming.control(&theirs, |_| true).unwrap();
            while channel
                .send(&Reply::Said("and another thing".into()))
                .is_ok()
            {}
        });
        let stream = socket::dial(&address, BOUND).unwrap();
        let descriptor = stream.try_clone().unwrap();
        let channel = handshake::dial_control(stream.into(), &ours, &key, BOUND).unwrap();
        let slice = RemoteSlice::new(Connection {
            host: "talker".into(),
            address,
            key,
            channel,
            descriptor,
        });
        (slice, thread)
    }

    #[test]
    fn a_daemon_that_never_stops_talking_does_not_start() {
        let (mut slice, thread) = talker();
        let error = started(&mut slice, Instant::now() + CLOSE_BOUND).unwrap_err();
        assert!(matches!(error, LaunchError::Timeout { .. }), "{error}");
        slice.disconnect();
        thread.join().unwrap();
    }

    #[test]
    fn a_daemon_that_never_stops_talking_is_closed() {
        let (mut slice, thread) = talker();
        slice.pid = Some(1);
        slice.close();
        assert!(slice.closed);
        slice.disconnect();
        thread.join().unwrap();
    }
}
