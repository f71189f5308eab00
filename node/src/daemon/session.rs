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

use super::expected::Awaited;
use super::machine::MachineSlice;
use super::{LEAVE_BOUND, Reservation, Shared};
use crate::config::Peer;
use crate::control::{self, Arrival};
use crate::links::{self, Link, Links, Settings};
use crate::protocol::{MachineStart, Reply, Request};
use crate::remote::describe;
use crate::shared::{SharedMemory, Snapshot};
use crate::size::{PAGE_BYTES, format_bytes, format_pages};
use crate::spawn::{self, Role, Runtime};
use crate::sys;

/// How long an announced link may take to come.
const LINK_BOUND: Duration = Duration::from_secs(5);
/// How often a running slice's memory is looked at.
const WATCH_PERIOD: Duration = Duration::from_secs(1);
/// What a slice may use beside its budget: its own code, tables and buffers.
const OVERHEAD_BYTES: u64 = 64 << 20;
/// A connection on which nothing was asked for this long is closed, unless a
/// slice runs: probes of the kernel watch over those.
const IDLE_BOUND: Duration = Duration::from_secs(60);
/// The name of a slice in a process list.
const SLICE_NAME: &str = "weft-slice";

/// A reservation and what was prepared on it.
pub(super) struct Reserved {
    pub(super) node: u32,
    pub(super) lease: Duration,
    pub(super) reservation: Reservation,
    shared: SharedMemory,
    links: Links,
    /// Links that somebody is going to dial, with the node at their other end.
    awaited: Vec<(usize, Awaited)>,
}

/// See the module.
pub struct Session<'a> {
    daemon: &'a Arc<Shared>,
    peer: &'a Peer,
    channel: Channel,
    descriptor: TcpStream,
    reserved: Option<Reserved>,
    slice: Option<Runtime>,
    slice_talks: bool,
    /// What is different where the slice is of a machine.
    machine: Option<MachineSlice>,
    last_request: Instant,
    next_look: Instant,
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
            slice_talks: false,
            machine: None,
            last_request: Instant::now(),
            next_look: Instant::now(),
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
        self.daemon.say(&format!("{}: {text}", self.peer.name));
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
        self.look_at_memory()?;
        if self.slice.is_none() && self.last_request.elapsed() > IDLE_BOUND {
            return Ok(Some(End::Closed));
        }
        Ok(None)
    }

    fn wait(&self) -> std::io::Result<Ready> {
        let mut set: Vec<BorrowedFd<'_>> = vec![self.descriptor.as_fd()];
        // Once seen, the end of the daemon stays readable: not asked for again.
        if self.leaving.is_none() {
            set.push(self.daemon.ending());
        }
        if let Some(slice) = &self.slice {
            set.push(slice.pidfd());
            if self.slice_talks {
                set.push(slice.control.as_fd());
            }
        }
        let ready = sys::wait_readable(&set, WATCH_PERIOD)?;
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
                Err(error) => return Err(describe(&error)),
            };
            self.last_request = Instant::now();
            if let Some(reply) = self.handle(request) {
                self.send(&reply)?;
            }
            bound = Duration::ZERO;
        }
    }

    fn send(&mut self, reply: &Reply) -> Result<(), String> {
        self.channel.send(reply).map_err(|error| describe(&error))
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
            return Err("this connection holds a reservation already".into());
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
        let reserved = self.reserved.as_mut().ok_or("nothing was reserved yet")?;
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
                self.say(&format!("has no way to node {peer}: {why}"));
                Err(format!("it has no way to node {peer}"))
            }
        }
    }

    fn start(&mut self, settings: &Settings) -> Result<Reply, String> {
        if self.slice.is_some() {
            return Err("a slice is running already".into());
        }
        let daemon = self.daemon;
        let reserved = self.reserved.as_mut().ok_or("nothing was reserved yet")?;
        let node = reserved.node;
        let promised = reserved.take_links();
        if settings.budget_pages[node as usize] > reserved.reservation.pages
            || settings.nodes as usize > MAX_NODES
            || node >= settings.nodes
        {
            return Err("the settings do not fit the reservation".into());
        }
        let links = promised.collect()?;
        reserved.shared.reset_gauges();
        let confinement = daemon.confinement(self.peer);
        let role = Role::Slice {
            name: SLICE_NAME,
            confinement: confinement.as_ref(),
            keeps_errors: false,
        };
        let mut slice = spawn::start(&daemon.runtime, &role)
            .map_err(|error| format!("the runtime cannot be started: {error}"))?;
        // With this function's end the daemon's copies are closed, and the slice alone
        // holds its links.
        control::expect_hello(&mut slice)
            .and_then(|_| {
                let shared = reserved.shared.descriptor();
                links::send_boot(&slice.control, node, settings, &links, shared, &[])
                    .map_err(|error| format!("did not take its settings: {error}"))
            })
            .and_then(|()| control::expect_ready(&mut slice))
            .map_err(|why| format!("the slice {why}"))?;
        let pid = slice.pid() as u32;
        self.slice = Some(slice);
        self.slice_talks = true;
        self.say(&format!("slice {pid} runs as node {node}"));
        Ok(Reply::Started { pid })
    }

    fn start_machine(&mut self, start: &MachineStart) -> Result<Reply, String> {
        if self.slice.is_some() {
            return Err("a slice is running already".into());
        }
        let daemon = self.daemon;
        let reserved = self.reserved.as_mut().ok_or("nothing was reserved yet")?;
        let links = reserved.take_links().collect()?;
        let (slice, machine) = MachineSlice::start(daemon, self.peer, reserved, links, start)?;
        let (pid, node) = (slice.pid() as u32, reserved.node);
        self.slice = Some(slice);
        self.slice_talks = true;
        self.machine = Some(machine);
        self.say(&format!(
            "slice {pid} runs as node {node} of a virtual machine"
        ));
        Ok(Reply::Started { pid })
    }

    fn hear_slice(&mut self) -> Result<(), String> {
        let Some(slice) = &mut self.slice else {
            return Ok(());
        };
        let mut said = Vec::new();
        if self.machine.is_some() && self.slice_talks {
            self.slice_talks = MachineSlice::hear(slice, &mut said);
        }
        while self.slice_talks && self.machine.is_none() {
            match control::receive(slice.control.as_fd()) {
                Arrival::Message(message) if message.kind == CONTROL_FATAL => {
                    said.push(control::text(&message));
                }
                Arrival::Message(_) => {}
                Arrival::Nothing => break,
                Arrival::Closed => self.slice_talks = false,
            }
        }
        let ended = slice.try_wait().map_err(|error| error.to_string())?;
        for text in said {
            self.say(&text);
            self.send(&Reply::Said(text))?;
        }
        if let Some(ended) = ended {
            self.slice = None;
            self.machine = None;
            self.say(&format!("slice {ended}"));
            self.send(&Reply::Ended {
                why: ended.of_slice(),
                clean: ended == spawn::Ended::Exited(0),
            })?;
        }
        Ok(())
    }

    /// Ends a slice that takes much more than its budget: the runtime keeps to
    /// it, but what runs there is somebody else's code.
    fn look_at_memory(&mut self) -> Result<(), String> {
        if Instant::now() < self.next_look {
            return Ok(());
        }
        self.next_look = Instant::now() + WATCH_PERIOD;
        let (Some(slice), Some(reserved)) = (&mut self.slice, &self.reserved) else {
            return Ok(());
        };
        let budget_bytes = reserved.reservation.pages * PAGE_BYTES;
        let machine = self
            .machine
            .as_ref()
            .map_or(0, MachineSlice::overhead_bytes);
        let allowed_bytes = budget_bytes + budget_bytes / 4 + OVERHEAD_BYTES + machine;
        let used_bytes = resident_bytes(slice.pid());
        if used_bytes > allowed_bytes {
            let _ = slice.kill();
            let text = format!(
                "the slice used {} of memory, {} are allowed, and was ended",
                format_bytes(used_bytes),
                format_bytes(allowed_bytes)
            );
            self.say(&text);
            self.send(&Reply::Said(text))?;
        }
        Ok(())
    }

    fn end_slice(&mut self) {
        if let Some(mut slice) = self.slice.take() {
            // Home has gone or wants it gone: nothing there is needed any more.
            let _ = slice.kill();
        }
        self.machine = None;
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
        .map_err(|error| failed(describe(&error)))?;
    Link::keyed(keyed, lease_ms).map_err(|error| failed(error.to_string()))
}

fn no_links() -> Links {
    (0..MAX_NODES).map(|_| None).collect()
}

/// The links of one start: those that were dialled, and those still to come. Dropped,
/// they are gone, and so are their tickets.
struct Promised {
    links: Links,
    awaited: Vec<(usize, Awaited)>,
    lease: Duration,
}

impl Reserved {
    /// All links that were announced, for a start: whatever becomes of it, the next
    /// has links of its own.
    fn take_links(&mut self) -> Promised {
        Promised {
            links: std::mem::replace(&mut self.links, no_links()),
            awaited: std::mem::take(&mut self.awaited),
            lease: self.lease,
        }
    }
}

impl Promised {
    /// Waits for those still to come.
    fn collect(mut self) -> Result<Links, String> {
        let deadline = Instant::now() + LINK_BOUND;
        let lease_ms = self.lease.as_millis() as u32;
        for (peer, awaited) in self.awaited {
            let left = deadline.saturating_duration_since(Instant::now());
            let keyed = awaited.wait(left).ok_or_else(|| {
                let bound = LINK_BOUND.as_secs();
                format!("the link to node {peer} did not come within {bound} s")
            })?;
            let link = Link::keyed(keyed, lease_ms).map_err(|error| error.to_string())?;
            self.links[peer] = Some(link);
        }
        Ok(self.links)
    }
}

/// Memory of a process that is resident now; 0 when it has ended.
fn resident_bytes(pid: i32) -> u64 {
    std::fs::read_to_string(format!("/proc/{pid}/statm"))
        .ok()
        .and_then(|text| text.split_whitespace().nth(1)?.parse::<u64>().ok())
        .map_or(0, |pages| pages * PAGE_BYTES)
}
