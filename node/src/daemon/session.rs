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

mod heir;
mod home;

use std::io;
use std::net::TcpStream;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use weft_proc::boot::MAX_NODES;
use weft_wire::channel::{Channel, ChannelError};
use weft_wire::handshake::{self, Ticket};
use weft_wire::keys::PublicKey;

use super::LEAVE_BOUND;
use super::dial::{DialError, dial_peer};
use super::memory::LOOK_MAX;
use super::reserved::{Reserved, no_links};
use super::shared::Shared;
use super::slice::{LentSlice, SliceError, SliceStart};
use super::takeover::Takeover;
use crate::config::Peer;
use crate::consent::NewFile;
use crate::error::sentence;
use crate::protocol::{DaemonReply, DaemonRequest};
use crate::said::Said;
use crate::shared::{SharedMemory, Snapshot};
use crate::size::{PAGE_BYTES, format_pages};
use crate::sys;
use heir::Heir;

/// A connection on which nothing was asked for this long is closed, unless a
/// slice runs: probes of the kernel watch over those.
const IDLE_BOUND: Duration = Duration::from_secs(60);

/// See the module.
pub struct Session<'a> {
    daemon: &'a Arc<Shared>,
    peer: &'a Peer,
    channel: Channel,
    descriptor: TcpStream,
    reserved: Option<Reserved>,
    slice: Option<LentSlice>,
    /// The process that takes the machine of the slice, where that comes here for good.
    takeover: Option<Takeover>,
    /// Copies of its disks; removed unless it comes.
    disks: Vec<NewFile>,
    /// Its pages of a checkpoint, until that is complete.
    new_file: Option<NewFile>,
    /// Another launcher that may take the slice.
    heir: Heir,
    /// The machine's home has moved since the slice was started.
    was_inherited: bool,
    /// The launcher has what it wanted, and ends the connection.
    is_released: bool,
    /// What slices of this connection had this daemon say.
    said: Said,
    last_request: Instant,
    /// When the daemon's end was announced to the launcher.
    leaving: Option<Instant>,
}

/// Why a session ended before its launcher ended it.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The launcher cannot be heard, or told.
    #[error(transparent)]
    Channel(#[from] ChannelError),
    /// The kernel refused to wait.
    #[error("cannot wait for the launcher")]
    Wait(#[source] io::Error),
    /// The daemon ends, and its launcher was asked to leave.
    #[error("the aggregate did not leave in time; its slice was ended")]
    NotLeft,
}

/// Why a launcher's request was refused.
#[derive(Debug, thiserror::Error)]
enum RequestError {
    #[error("this connection already has a reservation")]
    Reserved,
    #[error("this host may not borrow here any more")]
    NoPeer,
    #[error("there is no reservation yet")]
    NotReserved,
    #[error("node {node} is not within 1 to {}", MAX_NODES - 1)]
    Node { node: u32 },
    #[error("a lease of {lease_ms} ms is out of range")]
    Lease { lease_ms: u32 },
    #[error("cannot watch over the connection")]
    Watch(#[source] io::Error),
    #[error("cannot make shared memory")]
    SharedMemory(#[source] io::Error),
    #[error("a link to node {peer} cannot be made")]
    Link { peer: u32 },
    #[error("this ticket is used already")]
    TicketUsed,
    #[error("no slice of a machine runs on this connection")]
    NoSlice,
    #[error("the slice on this connection is its launcher's already")]
    NoHeir,
    #[error("the slice's socket cannot be kept for a link")]
    Control(#[source] io::Error),
    /// Why, the daemon tells its own log alone.
    #[error("it cannot connect to node {peer}")]
    Dial { peer: u32 },
    #[error(transparent)]
    Slice(#[from] SliceError),
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
            takeover: None,
            disks: Vec::new(),
            new_file: None,
            heir: Heir::None,
            was_inherited: false,
            is_released: false,
            said: Said::new(Instant::now()),
            last_request: Instant::now(),
            leaving: None,
        }
    }

    /// Serves until the launcher goes or the daemon ends.
    ///
    /// # Errors
    /// Why it ended earlier.
    pub fn serve(mut self) -> Result<(), SessionError> {
        // The first request may have been read together with the hello, and
        // then nothing announces it.
        let mut outcome = self.hear_launcher().and_then(|open| match open {
            ControlFlow::Continue(()) => self.serve_turns(),
            ControlFlow::Break(()) => Ok(()),
        });
        while self.is_inherited() {
            outcome = self.serve_turns();
        }
        self.settle_home();
        self.end_slice();
        if let Err(why) = &outcome {
            // The launcher would only see that the connection ended. What of it still
            // works is not known.
            let why = format!("its daemon ended the connection: {}", sentence(why));
            let _ = self.send(&DaemonReply::Ended { why, clean: false });
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

    fn serve_turns(&mut self) -> Result<(), SessionError> {
        while self.turn()?.is_continue() {}
        Ok(())
    }

    fn say(&self, text: &str) {
        self.daemon.say_of_peer(self.peer, text);
    }

    /// Whether it goes on.
    fn turn(&mut self) -> Result<ControlFlow<()>, SessionError> {
        let ready = self.wait().map_err(SessionError::Wait)?;
        if ready.connection && self.hear_launcher()?.is_break() {
            return Ok(ControlFlow::Break(()));
        }
        self.hear_slice()?;
        self.hear_takeover()?;
        self.hear_heir()?;
        if (ready.ending || self.leaving.is_some()) && self.slice.is_none() {
            return Ok(ControlFlow::Break(()));
        }
        if ready.ending {
            self.leaving = Some(Instant::now());
            self.send(&DaemonReply::Leaving)?;
        }
        if self
            .leaving
            .is_some_and(|since| since.elapsed() > LEAVE_BOUND)
        {
            return Err(SessionError::NotLeft);
        }
        if let Some(slice) = &mut self.slice {
            slice.look_at_memory();
            slice.forget_late_links();
            if let Some(reserved) = &self.reserved
                && let Some(bytes) = slice.held_bytes()
            {
                reserved.reservation.set_held(bytes / PAGE_BYTES);
            }
            let reserved = self.reserved.as_ref();
            if reserved.is_some_and(|reserved| reserved.reservation.is_wanted_back(Instant::now()))
            {
                self.say("its memory is wanted back: asking it to leave");
                self.send(&DaemonReply::WantedBack)?;
            }
        }
        if self.slice.is_none() && self.last_request.elapsed() > IDLE_BOUND {
            return Ok(ControlFlow::Break(()));
        }
        Ok(ControlFlow::Continue(()))
    }

    fn wait(&mut self) -> std::io::Result<Ready> {
        let listens = self.said.listens(Instant::now());
        let mut set: Vec<BorrowedFd<'_>> = vec![self.descriptor.as_fd()];
        // Once seen, the end of the daemon stays readable: not asked for again.
        if self.leaving.is_none() {
            set.push(self.daemon.ending());
        }
        if let Some(slice) = &self.slice {
            set.push(slice.process().pidfd());
            if listens && slice.talks() {
                set.push(slice.process().control.as_fd());
            }
        }
        set.extend(self.takeover.as_ref().map(Takeover::descriptor));
        set.extend(self.heir.descriptor());
        let bound = self.slice.as_ref().map_or(LOOK_MAX, LentSlice::due);
        let ready = sys::wait_readable(&set, bound)?;
        Ok(Ready {
            connection: ready[0],
            ending: self.leaving.is_none() && ready[1],
        })
    }

    /// Whether it goes on.
    fn hear_launcher(&mut self) -> Result<ControlFlow<()>, SessionError> {
        let mut bound = Duration::from_millis(1);
        loop {
            let request = match self.channel.receive(bound) {
                Ok(request) => request,
                Err(ChannelError::Timeout(_)) => return Ok(ControlFlow::Continue(())),
                Err(ChannelError::Closed) => return Ok(ControlFlow::Break(())),
                Err(error) => return Err(error.into()),
            };
            self.last_request = Instant::now();
            if let Some(reply) = self.handle(request) {
                self.send(&reply)?;
            }
            if self.is_released {
                return Ok(ControlFlow::Break(()));
            }
            bound = Duration::ZERO;
        }
    }

    fn send(&mut self, reply: &DaemonReply) -> Result<(), SessionError> {
        Ok(self.channel.send(reply)?)
    }

    fn handle(&mut self, request: DaemonRequest) -> Option<DaemonReply> {
        let reply = match request {
            DaemonRequest::Status => Ok(DaemonReply::Status(self.daemon.status())),
            DaemonRequest::Open {
                command,
                node,
                budget_pages,
                lease_ms,
            } => self.open(&command, node, budget_pages, lease_ms),
            DaemonRequest::Expect {
                peer,
                ticket,
                secret,
            } => self.expect(peer, ticket, secret),
            DaemonRequest::Dial {
                peer,
                key,
                ticket,
                secret,
            } => self.dial(peer, &key, &ticket, &secret),
            DaemonRequest::Heir { ticket, secret } => self.expect_heir(ticket, secret),
            DaemonRequest::DialHeir {
                peer,
                key,
                ticket,
                secret,
            } => self.dial_heir(peer, &key, &ticket, &secret),
            DaemonRequest::Inherit => Err(RequestError::NoHeir),
            DaemonRequest::Start(settings) => self.start(&*settings),
            DaemonRequest::StartMachine(start) => self.start(&*start),
            DaemonRequest::Ping => Ok(DaemonReply::Pong(Box::new(self.counters()))),
            DaemonRequest::Kick => {
                if let Some(slice) = &self.slice {
                    slice.kick();
                }
                return None;
            }
            DaemonRequest::Home(home) => return self.move_home(&home),
            DaemonRequest::Stop => {
                self.end_slice();
                Ok(DaemonReply::Stopped(Box::new(self.counters())))
            }
            // Whether the slice ends, its heir decides.
            DaemonRequest::Release if self.has_heir() => {
                self.is_released = true;
                Ok(DaemonReply::Done)
            }
            DaemonRequest::Release => {
                // A machine that goes on here keeps what was reserved for it.
                self.settle_home();
                self.end_slice();
                self.give_back();
                Ok(DaemonReply::Done)
            }
        };
        Some(reply.unwrap_or_else(|error| DaemonReply::Failed(sentence(&error))))
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
    ) -> Result<DaemonReply, RequestError> {
        if self.reserved.is_some() {
            return Err(RequestError::Reserved);
        }
        // It may have left the cluster since the handshake.
        let peer = self.daemon.peer(&self.peer.key);
        if !peer.is_some_and(|peer| peer.may().borrow()) {
            return Err(RequestError::NoPeer);
        }
        if node == 0 || node as usize >= MAX_NODES {
            return Err(RequestError::Node { node });
        }
        let lease = Duration::from_millis(lease_ms.into());
        let range = crate::options::LEASE_MIN..=crate::options::LEASE_MAX;
        if !range.contains(&lease) {
            return Err(RequestError::Lease { lease_ms });
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
                return Ok(DaemonReply::NoRoom {
                    asked_pages: no_room.asked_pages,
                    free_pages: no_room.free_pages,
                    why: no_room.why,
                });
            }
        };
        sys::watch_peer(&self.descriptor, lease_ms).map_err(RequestError::Watch)?;
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
            reservation: Arc::new(reservation),
            shared: SharedMemory::new().map_err(RequestError::SharedMemory)?,
            links: no_links(),
            awaited: Vec::new(),
            inherits: Vec::new(),
        });
        Ok(DaemonReply::Opened { budget_pages })
    }

    /// The reservation, for another link to `peer`.
    fn reservation_for(
        &mut self,
        peer: u32,
    ) -> Result<(&mut Reserved, &'a Arc<Shared>), RequestError> {
        let reserved = self.reserved.as_mut().ok_or(RequestError::NotReserved)?;
        let taken = |peer: usize| {
            reserved.links[peer].is_some() || reserved.awaited.iter().any(|(to, _)| *to == peer)
        };
        if peer as usize >= MAX_NODES || peer == reserved.node || taken(peer as usize) {
            return Err(RequestError::Link { peer });
        }
        Ok((reserved, self.daemon))
    }

    fn expect(
        &mut self,
        peer: u32,
        ticket: Ticket,
        secret: handshake::Secret,
    ) -> Result<DaemonReply, RequestError> {
        if self.slice.is_some() {
            return self.expect_to_join(peer, ticket, secret);
        }
        let (reserved, daemon) = self.reservation_for(peer)?;
        let awaited = daemon.expected.announce(ticket, secret);
        let awaited = awaited.ok_or(RequestError::TicketUsed)?;
        reserved.awaited.push((peer as usize, awaited));
        Ok(DaemonReply::Done)
    }

    /// A node joins the machine of the slice, which runs.
    fn expect_to_join(
        &mut self,
        peer: u32,
        ticket: Ticket,
        secret: handshake::Secret,
    ) -> Result<DaemonReply, RequestError> {
        let reserved = self.reserved.as_ref().ok_or(RequestError::NotReserved)?;
        let is_other = peer != 0 && (peer as usize) < MAX_NODES && peer != reserved.node;
        let slice = self.slice.as_mut().filter(|slice| slice.is_machines());
        let slice = slice.filter(|_| is_other);
        let slice = slice.ok_or(RequestError::Link { peer })?;
        let lease_ms = reserved.lease.as_millis() as u32;
        let is_new = slice.expect(self.daemon, (peer, ticket, secret), lease_ms);
        match is_new.map_err(RequestError::Control)? {
            true => Ok(DaemonReply::Done),
            false => Err(RequestError::TicketUsed),
        }
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
    ) -> Result<DaemonReply, RequestError> {
        let (reserved, daemon) = self.reservation_for(peer)?;
        let lease_ms = reserved.lease.as_millis() as u32;
        match dial_peer(daemon, key, ticket, secret, lease_ms) {
            Ok(dialled) => {
                reserved.links[peer as usize] = Some(dialled.link);
                Ok(DaemonReply::Done)
            }
            Err(why) => Err(self.not_dialled(peer, &why)),
        }
    }

    fn not_dialled(&self, peer: u32, why: &DialError) -> RequestError {
        let why = sentence(why);
        self.say(&format!("cannot connect to node {peer}: {why}"));
        RequestError::Dial { peer }
    }

    fn start(&mut self, start: &impl SliceStart) -> Result<DaemonReply, RequestError> {
        if self.slice.is_some() {
            return Err(SliceError::Running.into());
        }
        let reserved = self.reserved.as_mut().ok_or(RequestError::NotReserved)?;
        let slice = LentSlice::start(start, self.daemon, self.peer, reserved)?;
        let (pid, node) = (slice.process().pid() as u32, reserved.node);
        reserved.reservation.set_can_leave(!slice.is_machines());
        let aggregate = slice.aggregate();
        self.slice = Some(slice);
        self.say(&format!("slice {pid} runs as node {node}{aggregate}"));
        Ok(DaemonReply::Started { pid })
    }

    fn hear_slice(&mut self) -> Result<(), SessionError> {
        let now = Instant::now();
        let mut lines: Vec<String> = self.said.rest(now).into_iter().collect();
        let mut end = None;
        if let Some(slice) = &mut self.slice {
            // Before its messages are read, so that the last of them is among them.
            end = slice.end();
            if self.said.listens(now) {
                for text in slice.words() {
                    lines.extend(self.said.hear(now, &text));
                }
            }
        }
        if end.is_some() {
            lines.extend(self.said.last());
        }
        for line in lines {
            self.say(&line);
            self.send(&DaemonReply::Said(line))?;
        }
        if let Some((why, clean)) = end {
            self.say(&why);
            self.slice = None;
            if let Some(reserved) = &self.reserved {
                reserved.reservation.set_can_leave(false);
            }
            self.send(&DaemonReply::Ended { why, clean })?;
        }
        Ok(())
    }

    /// Ends the slice: home has gone, or wants it gone.
    fn end_slice(&mut self) {
        let Some(slice) = self.slice.take() else {
            return;
        };
        let why = slice.stop();
        for line in self.said.last().into_iter().chain(why) {
            self.say(&line);
        }
    }
}

/// Which of the things a session waits for are ready.
struct Ready {
    connection: bool,
    ending: bool,
}
