//! One launcher's control connection: its reservation, its links, its slice.
//!
//! ```text
//! fresh ──Open──▶ reserved ──Start──▶ running ──Stop──▶ reserved
//!   └── Status (any time)               │ slice ends: Ended, then reserved
//! ```
//!
//! Invariants: at most one reservation and one slice; a slice only while there
//! is a reservation; when the connection ends, for whatever reason, the slice
//! is dead within the lease and the reservation is given back.

use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use weft_proc::boot::{CONTROL_FATAL, KICK_SIGNAL, MAX_NODES};
use weft_wire::channel::{Channel, ChannelError};
use weft_wire::handshake::{self, Ticket};
use weft_wire::keys::PublicKey;
use weft_wire::socket;

use super::machine::MachineSlice;
use super::memory::{Keeper, LOOK_MAX};
use super::reserved::{LINK_BOUND, Reserved, no_links};
use super::{LEAVE_BOUND, Shared};
use crate::config::Peer;
use crate::control::{self, Arrival};
use crate::error::sentence;
use crate::links::{self, Link, Settings};
use crate::protocol::{MachineStart, Reply, Request};
use crate::said::{BATCH, Said};
use crate::shared::{SharedMemory, Snapshot};
use crate::size::format_pages;
use crate::spawn::{self, Process, Role};
use crate::sys;

/// A connection on which nothing was asked for this long is closed, unless a
/// slice runs: probes of the kernel watch over those.
const IDLE_BOUND: Duration = Duration::from_secs(60);
/// The name of a slice in a process list.
const SLICE_NAME: &str = "weft-slice";

/// See the module.
pub struct Session<'a> {
    daemon: &'a Arc<Shared>,
    peer: &'a Peer,
    channel: Channel,
    descriptor: TcpStream,
    reserved: Option<Reserved>,
    slice: Option<Process>,
    /// Keeps the slice within what was lent to it.
    keeper: Option<Keeper>,
    /// Why this daemon ended the slice, if it did.
    ended_for: Option<String>,
    slice_talks: bool,
    /// What slices of this connection had this daemon say.
    said: Said,
    /// What is different where the slice is of a machine.
    machine: Option<MachineSlice>,
    last_request: Instant,
    /// When the daemon's end was announced to the launcher.
    leaving: Option<Instant>,
}

/// Why a session ends without an error.
enum End {
    Closed,
}

impl<'a> Session<'a> {
    /// A session on an authenticated channel; `descriptor` is its socket.
    pub fn new(
        daemon: &'a Arc<Shared>,
        peer: &'a Peer,
        channel: Channel,
        descriptor: TcpStream,
    ) -> Session<'a> {
        Session {
            daemon,
            peer,
            channel,
            descriptor,
            reserved: None,
            slice: None,
            keeper: None,
            ended_for: None,
            slice_talks: false,
            said: Said::new(Instant::now()),
            machine: None,
            last_request: Instant::now(),
            leaving: None,
        }
    }

    /// Serves until the launcher goes or the daemon ends.
    pub fn serve(mut self) -> Result<(), String> {
        // The first request may have been read together with the hello, and
        // then nothing announces it.
        let outcome = match self.hear_launcher() {
            Ok(None) => self.serve_turns(),
            Ok(Some(End::Closed)) => Ok(()),
            Err(why) => Err(why),
        };
        self.end_slice();
        if let Err(why) = &outcome {
            // The launcher would only see that the connection ended. What of it still
            // works is not known.
            let why = format!("its daemon ended the connection: {why}");
            let _ = self.send(&Reply::Ended { why, clean: false });
        }
        self.give_back();
        outcome
    }

    fn give_back(&mut self) {
        if let Some(reserved) = self.reserved.take() {
            let pages = format_pages(reserved.reservation.pages);
            self.say(&format!("gave {pages} back"));
        }
    }

    fn serve_turns(&mut self) -> Result<(), String> {
        loop {
            match self.turn() {
                Ok(None) => {}
                Ok(Some(End::Closed)) => return Ok(()),
                Err(why) => return Err(why),
            }
        }
    }

    fn say(&self, text: &str) {
        self.daemon.say_of_peer(self.peer, text);
    }

    fn turn(&mut self) -> Result<Option<End>, String> {
        let ready = self.wait().map_err(|error| error.to_string())?;
        if ready.connection
            && let Some(end) = self.hear_launcher()?
        {
            return Ok(Some(end));
        }
        self.hear_slice()?;
        if (ready.ending || self.leaving.is_some()) && self.slice.is_none() {
            return Ok(Some(End::Closed));
        }
        if ready.ending {
            self.leaving = Some(Instant::now());
            self.send(&Reply::Leaving)?;
        }
        if self
            .leaving
            .is_some_and(|since| since.elapsed() > LEAVE_BOUND)
        {
            return Err("the aggregate did not leave in time; its slice was ended".into());
        }
        self.look_at_memory();
        if self.slice.is_none() && self.last_request.elapsed() > IDLE_BOUND {
            return Ok(Some(End::Closed));
        }
        Ok(None)
    }

    fn wait(&mut self) -> std::io::Result<Ready> {
        let listens = self.slice_talks && self.said.listens(Instant::now());
        let mut set: Vec<BorrowedFd<'_>> = vec![self.descriptor.as_fd()];
        // Once seen, the end of the daemon stays readable: not asked for again.
        if self.leaving.is_none() {
            set.push(self.daemon.ending());
        }
        if let Some(slice) = &self.slice {
            set.push(slice.pidfd());
            if listens {
                set.push(slice.control.as_fd());
            }
        }
        let bound = self.keeper.as_ref().map_or(LOOK_MAX, Keeper::due);
        let ready = sys::wait_readable(&set, bound)?;
        Ok(Ready {
            connection: ready[0],
            ending: self.leaving.is_none() && ready[1],
        })
    }

    fn hear_launcher(&mut self) -> Result<Option<End>, String> {
        let mut bound = Duration::from_millis(1);
        loop {
            let request = match self.channel.receive(bound) {
                Ok(request) => request,
                Err(ChannelError::Timeout(_)) => return Ok(None),
                Err(ChannelError::Closed) => return Ok(Some(End::Closed)),
                Err(error) => return Err(sentence(&error)),
            };
            self.last_request = Instant::now();
            if let Some(reply) = self.handle(request) {
                self.send(&reply)?;
            }
            bound = Duration::ZERO;
        }
    }

    fn send(&mut self, reply: &Reply) -> Result<(), String> {
        self.channel.send(reply).map_err(|error| sentence(&error))
    }

    fn handle(&mut self, request: Request) -> Option<Reply> {
        let reply = match request {
            Request::Status => Ok(Reply::Status(self.daemon.status())),
            Request::Open {
                command,
                node,
                budget_pages,
                lease_ms,
            } => self.open(&command, node, budget_pages, lease_ms),
            Request::Expect {
                peer,
                ticket,
                secret,
            } => self.expect(peer, ticket, secret),
            Request::Dial {
                peer,
                key,
                ticket,
                secret,
            } => self.dial(peer, &key, &ticket, &secret),
            Request::Start(settings) => self.start(&settings),
            Request::StartMachine(start) => self.start_machine(&start),
            Request::Ping => Ok(Reply::Pong(Box::new(self.counters()))),
            Request::Kick => {
                if let Some(slice) = &self.slice {
                    let _ = slice.signal(KICK_SIGNAL);
                }
                return None;
            }
            Request::Stop => {
                self.end_slice();
                Ok(Reply::Stopped(Box::new(self.counters())))
            }
            Request::Release => {
                self.end_slice();
                self.give_back();
                Ok(Reply::Done)
            }
        };
        Some(reply.unwrap_or_else(Reply::Failed))
    }

    fn counters(&self) -> Snapshot {
        let shared = self.reserved.as_ref().map(|reserved| &reserved.shared);
        shared.map_or_else(Snapshot::default, |shared| Snapshot::of(shared))
    }

    fn open(
        &mut self,
        command: &str,
        node: u32,
        budget_pages: Option<u64>,
        lease_ms: u32,
    ) -> Result<Reply, String> {
        if self.reserved.is_some() {
            return Err("this connection already has a reservation".into());
        }
        if node == 0 || node as usize >= MAX_NODES {
            return Err(format!("node {node} is not within 1 to {}", MAX_NODES - 1));
        }
        let lease = Duration::from_millis(lease_ms.into());
        let range = crate::options::LEASE_MIN..=crate::options::LEASE_MAX;
        if !range.contains(&lease) {
            return Err(format!("a lease of {lease_ms} ms is out of range"));
        }
        let reservation = match self.daemon.budget.reserve(budget_pages) {
            Ok(reservation) => reservation,
            Err(no_room) => {
                self.say(&format!(
                    "no room for {}: {} free ({})",
                    format_pages(no_room.asked_pages),
                    format_pages(no_room.free_pages),
                    no_room.why
                ));
                return Ok(Reply::NoRoom {
                    asked_pages: no_room.asked_pages,
                    free_pages: no_room.free_pages,
                    why: no_room.why,
                });
            }
        };
        sys::watch_peer(&self.descriptor, lease_ms).map_err(|error| error.to_string())?;
        let budget_pages = reservation.pages;
        // A peer's text goes into our log: no control characters, no novels.
        let command: String = command
            .chars()
            .filter(|c| !c.is_control())
            .take(120)
            .collect();
        self.say(&format!(
            "lends {} to `{command}` as node {node}",
            format_pages(budget_pages)
        ));
        self.reserved = Some(Reserved {
            node,
            lease,
            reservation,
            shared: SharedMemory::new().map_err(|error| error.to_string())?,
            links: no_links(),
            awaited: Vec::new(),
        });
        Ok(Reply::Opened { budget_pages })
    }

    /// The reservation, for another link to `peer`.
    fn reservation_for(&mut self, peer: u32) -> Result<(&mut Reserved, &'a Arc<Shared>), String> {
        let reserved = self
            .reserved
            .as_mut()
            .ok_or("there is no reservation yet")?;
        let taken = |peer: usize| {
            reserved.links[peer].is_some() || reserved.awaited.iter().any(|(to, _)| *to == peer)
        };
        if peer as usize >= MAX_NODES || peer == reserved.node || taken(peer as usize) {
            return Err(format!("a link to node {peer} cannot be made"));
        }
        Ok((reserved, self.daemon))
    }

    fn expect(
        &mut self,
        peer: u32,
        ticket: Ticket,
        secret: handshake::Secret,
    ) -> Result<Reply, String> {
        let (reserved, daemon) = self.reservation_for(peer)?;
        let awaited = daemon.expected.announce(ticket, secret);
        let awaited = awaited.ok_or("this ticket is used already")?;
        reserved.awaited.push((peer as usize, awaited));
        Ok(Reply::Done)
    }

    /// Makes a link to the daemon that has `key`. Only where a peer listens is dialled,
    /// by this daemon's configuration, and the launcher hears but one answer: it learns
    /// nothing of what is on this host's network.
    fn dial(
        &mut self,
        peer: u32,
        key: &PublicKey,
        ticket: &Ticket,
        secret: &handshake::Secret,
    ) -> Result<Reply, String> {
        let (reserved, daemon) = self.reservation_for(peer)?;
        let lease_ms = reserved.lease.as_millis() as u32;
        match dial_peer(daemon, key, ticket, secret, lease_ms) {
            Ok(link) => {
                reserved.links[peer as usize] = Some(link);
                Ok(Reply::Done)
            }
            Err(why) => {
                self.say(&format!("cannot connect to node {peer}: {why}"));
                Err(format!("it cannot connect to node {peer}"))
            }
        }
    }

    fn start(&mut self, settings: &Settings) -> Result<Reply, String> {
        if self.slice.is_some() {
            return Err("a slice is running already".into());
        }
        let daemon = self.daemon;
        let reserved = self
            .reserved
            .as_mut()
            .ok_or("there is no reservation yet")?;
        let node = reserved.node;
        let promised = reserved.take_links();
        if settings.budget_pages[node as usize] > reserved.reservation.pages
            || settings.nodes as usize > MAX_NODES
            || node >= settings.nodes
        {
            return Err("the settings do not fit the reservation".into());
        }
        let links = promised.collect()?;
        if links[0].is_none() {
            return Err("the slice has no link to home".into());
        }
        reserved.shared.reset_gauges();
        let confinement = daemon.confinement(self.peer);
        let mut keeper = reserved.keeper(daemon)?;
        let role = Role::Slice {
            name: SLICE_NAME,
            confinement: confinement.as_ref(),
            keeps_errors: false,
            group: keeper.entry(),
        };
        let mut slice = spawn::start(&daemon.runtime, &role)
            .map_err(|error| format!("the runtime cannot be started: {error}"))?;
        keeper.started(slice.pid())?;
        // With this function's end the daemon's copies are closed, and the slice alone
        // holds its links.
        control::expect_hello(&mut slice)
            .and_then(|_| {
                let shared = reserved.shared.descriptor();
                links::send_boot(&slice.control, node, settings, &links, shared, &[])
                    .map_err(|error| format!("did not take its settings: {error}"))
            })
            .and_then(|()| control::expect_ready(&mut slice))
            .map_err(|why| keeper.why_it_ended(&why))?;
        let pid = slice.pid() as u32;
        if daemon.filters {
            sys::has_filter(pid).map_err(|why| format!("the slice is not confined: {why}"))?;
        }
        self.slice = Some(slice);
        self.keeper = Some(keeper);
        self.slice_talks = true;
        self.say(&format!("slice {pid} runs as node {node}"));
        Ok(Reply::Started { pid })
    }

    fn start_machine(&mut self, start: &MachineStart) -> Result<Reply, String> {
        if self.slice.is_some() {
            return Err("a slice is running already".into());
        }
        let daemon = self.daemon;
        let reserved = self
            .reserved
            .as_mut()
            .ok_or("there is no reservation yet")?;
        let links = reserved.take_links().collect()?;
        let mut keeper = reserved.keeper(daemon)?;
        let started = MachineSlice::start(daemon, self.peer, reserved, links, start, &mut keeper);
        let (slice, machine) = started?;
        let (pid, node) = (slice.pid() as u32, reserved.node);
        self.slice = Some(slice);
        self.keeper = Some(keeper);
        self.slice_talks = true;
        self.machine = Some(machine);
        self.say(&format!(
            "slice {pid} runs as node {node} of a virtual machine"
        ));
        Ok(Reply::Started { pid })
    }

    fn hear_slice(&mut self) -> Result<(), String> {
        let now = Instant::now();
        // Before its messages are read, so that the last of them is among them.
        let end = self.slice_end();
        let mut lines: Vec<String> = self.said.rest(now).into_iter().collect();
        for text in self.slice_words() {
            lines.extend(self.said.hear(now, &text));
        }
        if end.is_some() {
            lines.extend(self.said.last());
        }
        for line in lines {
            self.say(&line);
            self.send(&Reply::Said(line))?;
        }
        if let Some((why, clean)) = end {
            self.say(&why);
            self.drop_slice();
            self.send(&Reply::Ended { why, clean })?;
        }
        Ok(())
    }

    /// What the slice has said, a batch at most.
    fn slice_words(&mut self) -> Vec<String> {
        let mut words = Vec::new();
        let Some(slice) = &self.slice else {
            return words;
        };
        if !self.said.listens(Instant::now()) {
            return words;
        }
        if self.machine.is_some() && self.slice_talks {
            self.slice_talks = MachineSlice::hear(slice, &mut words);
            return words;
        }
        for _ in 0..BATCH {
            if !self.slice_talks {
                break;
            }
            match control::receive(slice.control.as_fd()) {
                Arrival::Message(message) if message.kind == CONTROL_FATAL => {
                    words.push(control::text(&message));
                }
                Arrival::Message(_) => {}
                Arrival::Nothing => break,
                Arrival::Closed => self.slice_talks = false,
            }
        }
        words
    }

    /// Why the slice ended, and whether it did as it does when its links close.
    fn slice_end(&mut self) -> Option<(String, bool)> {
        let slice = self.slice.as_mut()?;
        let ended = slice.try_wait().ok()??;
        let why = slice.slice_ended(ended);
        let by_kernel = self.keeper.as_ref().and_then(Keeper::ended_by_kernel);
        let known = self.ended_for.take().or(by_kernel);
        Some((known.unwrap_or(why), ended == spawn::Ended::Exited(0)))
    }

    /// Ends a slice that holds more than it may; its end is told as any other.
    fn look_at_memory(&mut self) {
        if let (Some(slice), Some(keeper)) = (&mut self.slice, &mut self.keeper)
            && self.ended_for.is_none()
            && let Err(why) = keeper.look()
        {
            self.ended_for = Some(why);
            // Its end is seen in the next turn.
            let _ = slice.kill();
        }
    }

    /// Ends the slice: home has gone, or wants it gone. That it had ended by itself may
    /// be news here.
    fn end_slice(&mut self) {
        let ended = self.slice_end();
        if let Some(slice) = &mut self.slice {
            // Its links close before its end can be seen.
            let _ = slice.kill();
        }
        if let Some(line) = self.said.last() {
            self.say(&line);
        }
        let by_kernel = self.keeper.as_ref().and_then(Keeper::ended_by_kernel);
        match (ended, by_kernel) {
            (Some((why, false)), _) | (None, Some(why)) => self.say(&why),
            _ => {}
        }
        self.drop_slice();
    }

    /// Forgets the slice, which is killed if it runs, and what belongs to it. Its
    /// group goes after its process.
    fn drop_slice(&mut self) {
        self.slice = None;
        self.keeper = None;
        self.machine = None;
        self.ended_for = None;
    }
}

/// Which of the things a session waits for are ready.
struct Ready {
    connection: bool,
    ending: bool,
}

/// A link to the peer that has `key`, or to this daemon itself: a host may have several
/// slices of one aggregate.
fn dial_peer(
    daemon: &Shared,
    key: &PublicKey,
    ticket: &Ticket,
    secret: &handshake::Secret,
    lease_ms: u32,
) -> Result<Link, String> {
    let (name, address) = match daemon.config.peer(key) {
        Some(peer) => (peer.name.as_str(), peer.address()),
        None if *key == daemon.keys.public() => ("this host", daemon.own_address.to_string()),
        None => {
            return Err(format!(
                "no [[peer]] has the key {key}: `weft node trust --may lend {key} NAME` adds one"
            ));
        }
    };
    let failed = |why: String| format!("{name}, {address}: {why}");
    let stream = socket::dial(&address, LINK_BOUND).map_err(|error| failed(error.to_string()))?;
    let keyed = handshake::dial_link(stream.into(), ticket, secret, LINK_BOUND)
        .map_err(|error| failed(sentence(&error)))?;
    Link::keyed(keyed, lease_ms).map_err(|error| failed(error.to_string()))
}
