//! A slice that this daemon lends to a peer: started on a reservation, heard, kept
//! within its memory, ended.
//!
//! ```text
//! check ──▶ links ──▶ process, watched ──▶ settings ──▶ ready ──▶ running ──▶ ended
//! ```
//!
//! The slice of a program and that of a machine differ in what is executed and in what
//! it is told: [`SliceStart`].

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use weft_proc::boot::KICK_SIGNAL;
use weft_wire::handshake::{Secret, Ticket};

use super::expected::Announced;
use super::memory::{Keeper, MemoryError};
use super::reserved::{LinkError, Reserved};
use super::shared::Shared;
use crate::config::Peer;
use crate::links::{Link, Links};
use crate::monitor_protocol::{self, SliceFile};
use crate::said::{BATCH, Spoken};
use crate::size::{PAGE_BYTES, format_bytes};
use crate::spawn::{
    self, Confinement, Ended, Executable, Missing, Process, ProgramKind, Role, StartError,
};

/// How long the link to a node that joins may take to come: its host is asked and starts it.
const JOIN_LINK_BOUND: Duration = Duration::from_secs(60);
/// How long its threads may take to stand; then it is ended at once.
const HALT_BOUND: Duration = Duration::from_millis(100);

/// Why a slice was not started.
#[derive(Debug, thiserror::Error)]
pub enum SliceError {
    /// One slice for each reservation.
    #[error("a slice is running already")]
    Running,
    /// The settings are of another aggregate than the reservation.
    #[error("the settings do not fit the reservation")]
    Settings,
    /// A program's slice is nothing without home.
    #[error("the slice has no link to home")]
    NoHome,
    /// The machine's links are not those of its description, or not sealed.
    #[error("the machine's description does not match its links")]
    Description,
    /// The reservation has no room for what vCPUs need.
    #[error(
        "{cpus} vCPUs need {}, and {} were reserved",
        format_bytes(*cpus_bytes), format_bytes(*reserved_bytes)
    )]
    Cpus {
        cpus: u32,
        /// What they need beside guest memory.
        cpus_bytes: u64,
        /// What there is for all.
        reserved_bytes: u64,
    },
    /// A link that was announced did not come.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// A program of Weft's is missing.
    #[error(transparent)]
    Missing(#[from] Missing),
    /// There is no file for guest memory.
    #[error("cannot make a file for guest memory")]
    MemoryFile(#[source] io::Error),
    /// The process was not made.
    #[error("the {} cannot be started", program.noun())]
    Spawn {
        /// What it would execute.
        program: ProgramKind,
        /// What the kernel said.
        source: io::Error,
    },
    /// The process did not get ready.
    #[error("the slice {0}")]
    Start(StartError),
    /// The process runs without a filter.
    #[error("the slice is not confined")]
    Unconfined(#[source] io::Error),
    /// Its memory is not bounded, or it needed more.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

impl From<StartError> for SliceError {
    fn from(error: StartError) -> SliceError {
        SliceError::Start(error)
    }
}

/// What a launcher asks to start.
pub(super) trait SliceStart {
    /// What the process executes.
    const PROGRAM: ProgramKind;

    /// Whether the request fits what is reserved.
    fn check(&self, reserved: &Reserved) -> Result<(), SliceError>;
    /// Whether it has all of its links.
    fn check_links(&self, reserved: &Reserved, links: &Links) -> Result<(), SliceError>;
    /// The file that is executed.
    fn executable<'a>(&self, daemon: &'a Shared) -> Result<&'a Executable, SliceError>;
    /// As what it is started.
    fn role<'a>(
        &self,
        confinement: Option<&'a Confinement>,
        group: Option<BorrowedFd<'a>>,
    ) -> Role<'a>;
    /// Tells the process what it is and waits until it is ready; what a machine's slice got.
    /// With the end of this call the slice alone holds its links.
    fn boot(
        &self,
        process: &mut Process,
        lender: (&Arc<Shared>, &Peer),
        reserved: &Reserved,
        links: Links,
    ) -> Result<Option<LentMachine>, SliceError>;
    /// The next thing that a process said.
    fn hear(control: BorrowedFd<'_>) -> Spoken;
    /// Counts it among the daemon's, where the daemon counts them.
    fn count(&self, daemon: &Arc<Shared>) -> Option<Counted>;
}

/// A machine's slice that runs counts among the daemon's until this is dropped.
pub(super) struct Counted(Arc<Shared>);

impl Counted {
    pub fn among(daemon: &Arc<Shared>) -> Counted {
        daemon.machine_slices.fetch_add(1, Ordering::AcqRel);
        Counted(daemon.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.machine_slices.fetch_sub(1, Ordering::AcqRel);
    }
}

/// What the slice of a machine has of this host.
pub(super) struct LentMachine {
    /// The memfd with guest memory.
    pub memory: OwnedFd,
    /// vCPUs that it may have.
    pub cpus: u32,
    /// Guest memory that it may fill, in bytes.
    pub memory_bytes: u64,
}

/// See the module. Dropped, it is killed if it runs; its group goes after its process.
pub(super) struct LentSlice {
    process: Process,
    /// Keeps it within what was lent to it.
    keeper: Keeper,
    hear: fn(BorrowedFd<'_>) -> Spoken,
    /// Whether its control socket is still open.
    talks: bool,
    /// Why this daemon ended it, if it did.
    ended_for: Option<MemoryError>,
    /// Where it is a machine's: it counts among the daemon's.
    counted: Option<Counted>,
    machine: Option<LentMachine>,
    /// Links to nodes that join its machine.
    joining: Vec<Joining>,
}

/// A link to a node that joins, which has not come yet or came a while ago.
struct Joining {
    peer: u32,
    since: Instant,
    _announced: Announced,
}

impl LentSlice {
    /// Starts it on a reservation, whose links it takes whatever becomes of it, and
    /// waits until it is ready.
    pub fn start<S: SliceStart>(
        start: &S,
        daemon: &Arc<Shared>,
        peer: &Peer,
        reserved: &mut Reserved,
    ) -> Result<LentSlice, SliceError> {
        let promised = reserved.take_links();
        start.check(reserved)?;
        let links = promised.collect()?;
        start.check_links(reserved, &links)?;
        let mut keeper = reserved.keeper(daemon)?;
        let confinement = daemon.confinement(peer);
        let role = start.role(confinement.as_ref(), keeper.entry());
        let mut process =
            spawn::start(start.executable(daemon)?, &role).map_err(|source| SliceError::Spawn {
                program: S::PROGRAM,
                source,
            })?;
        keeper.started(process.pid())?;
        let machine = start
            .boot(&mut process, (daemon, peer), reserved, links)
            .map_err(|error| keeper.ended_by_kernel().map_or(error, SliceError::Memory))?;
        Ok(LentSlice {
            process,
            keeper,
            hear: S::hear,
            talks: true,
            ended_for: None,
            counted: start.count(daemon),
            machine,
            joining: Vec::new(),
        })
    }

    /// Of what it is a part, where that is no program: the end of a sentence.
    pub fn aggregate(&self) -> &'static str {
        match self.is_machines() {
            true => " of a virtual machine",
            false => "",
        }
    }

    /// What it has, if it is a machine's.
    pub fn machine(&self) -> Option<&LentMachine> {
        self.machine.as_ref()
    }

    /// Whether it is a machine's.
    pub fn is_machines(&self) -> bool {
        self.counted.is_some()
    }

    /// Node `peer` joins its machine: the slice gets the link when it comes. False for a
    /// ticket that is in use.
    pub fn expect(
        &mut self,
        daemon: &Shared,
        (peer, ticket, secret): (u32, Ticket, Secret),
        lease_ms: u32,
    ) -> io::Result<bool> {
        self.forget_late_links();
        self.joining.retain(|joining| joining.peer != peer);
        let control = self.process.control.try_clone()?;
        let take = move |keyed| {
            // A slice that has ended needs none, and one that does not get it lacks it when
            // the node joins.
            let _ = Link::keyed(keyed, lease_ms)
                .and_then(|link| monitor_protocol::send_link(control.as_fd(), peer, link));
        };
        let announced = (daemon.expected).announce_to(ticket, secret, Box::new(take));
        let is_new = announced.is_some();
        self.joining.extend(announced.map(|announced| Joining {
            peer,
            since: Instant::now(),
            _announced: announced,
        }));
        Ok(is_new)
    }

    /// Gives it a file.
    pub fn take_file(&self, what: SliceFile, file: BorrowedFd<'_>) -> io::Result<()> {
        monitor_protocol::send_file(self.process.control.as_fd(), what, file)
    }

    /// Links that did not come in time are expected no longer.
    pub fn forget_late_links(&mut self) {
        let is_awaited = |joining: &Joining| joining.since.elapsed() < JOIN_LINK_BOUND;
        self.joining.retain(is_awaited);
    }

    /// To wait for its end and its messages.
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// Whether it may still say something.
    pub fn talks(&self) -> bool {
        self.talks
    }

    /// How long until its memory has to be looked at.
    pub fn due(&self) -> Duration {
        self.keeper.due()
    }

    /// Makes it look at home. An error means that it has gone, which is seen elsewhere.
    pub fn kick(&self) {
        let _ = self.process.signal(KICK_SIGNAL);
    }

    /// What it has said, a batch at most.
    pub fn words(&mut self) -> Vec<String> {
        let mut words = Vec::new();
        for _ in 0..BATCH {
            if !self.talks {
                break;
            }
            match (self.hear)(self.process.control.as_fd()) {
                Spoken::Sentence(text) => words.push(text),
                Spoken::Ready | Spoken::Other => {}
                Spoken::Nothing => break,
                Spoken::Closed => self.talks = false,
            }
        }
        words
    }

    /// Why it ended, once it has, and whether it did as it does when its links close.
    pub fn end(&mut self) -> Option<(String, bool)> {
        let ended = self.process.try_wait().ok()??;
        let known = self.ended_for.take();
        let known = known.or_else(|| self.keeper.ended_by_kernel());
        let why = known.map_or_else(|| self.process.slice_ended(ended), |why| why.to_string());
        Some((why, ended == Ended::Exited(0)))
    }

    /// Ends it if it holds more than it may; its end is told as any other.
    pub fn look_at_memory(&mut self) {
        if self.ended_for.is_none()
            && let Err(why) = self.keeper.look()
        {
            self.ended_for = Some(why);
            // Its end is seen in the next turn.
            let _ = self.process.kill();
        }
    }

    /// Memory that its process has, if it lives: `/proc/PID/statm` (proc_pid_statm(5)).
    pub fn held_bytes(&self) -> Option<u64> {
        let pid = self.process.pid();
        let statm = std::fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
        let pages: u64 = statm.split_whitespace().nth(1)?.parse().ok()?;
        Some(pages * PAGE_BYTES)
    }

    /// Whether it stands from now on, and executes nothing more.
    pub fn halt(&self) -> bool {
        self.process.halt(HALT_BOUND)
    }

    /// Ends it: home has gone, or wants it gone. Why it had ended before that, if it had
    /// and that may be news.
    pub fn stop(mut self) -> Option<String> {
        let ended = self.end();
        // Its links close before its end can be seen.
        let _ = self.process.kill();
        match ended {
            Some((why, clean)) => (!clean).then_some(why),
            None => self.keeper.ended_by_kernel().map(|why| why.to_string()),
        }
    }
}
