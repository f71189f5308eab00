//! A machine of a peer that comes here for good: when this host has all of its memory and
//! vCPUs, a process of the daemon's user takes what node 0 had, and with it the machine. Nothing
//! of it is the peer's any more then.
//!
//! ```text
//! prepared ──Ready──▶ ready ──last part──▶ taking ──HomeTaken──▶ taken ──LetGo──▶ settled
//!     │                 │                    │ │                   connection lost ──▲
//!     └── given up, connection lost: killed  │ └── connection lost: awaited, then ───┘
//!     └── failed, late: killed ──────────────┘
//! ```
//!
//! Invariants: before it is let go the slice whose memory it takes stands, and never goes on, or
//! has ended, so that no vCPU runs twice. Once it has the whole state, node 0 goes on only if this
//! daemon says that the process has ended; so the machine goes on here if node 0 is not heard of
//! again.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::budget::Reservation;
use super::dial::Dialled;
use super::reserved::Reserved;
use super::shared::Shared;
use super::slice::{Counted, LentMachine};
use crate::config::Peer;
use crate::consent::{Lender, Refused};
use crate::launch::machine::HEIR_BYTES;
use crate::links::Link;
use crate::monitor_protocol::{self, HomeOrder, HomeStep, Loan, MonitorMessage, OtherNode};
use crate::protocol::HomeRequest;
use crate::rundir;
use crate::size::PAGE_BYTES;
use crate::sys;

/// How long the process may take to get ready, or to take the state.
const STEP_BOUND: Duration = Duration::from_secs(20);
/// How long it may be ready without being needed.
const READY_BOUND: Duration = Duration::from_secs(120);
/// Between two looks at whether it is late.
const LOOK: Duration = Duration::from_millis(100);
/// How long its guest may take to run again.
const RUN_BOUND: Duration = Duration::from_secs(10);

/// Why there is no process that takes the home.
#[derive(Debug, thiserror::Error)]
pub(super) enum TakeoverError {
    #[error(
        "the host does not take machines for good; to allow it, write `machines = true` into the \
         [[peer]] `{0}` of its node.toml, and start its daemon again"
    )]
    NotAllowed(String),
    #[error("no slice of a machine runs on this connection")]
    NoSlice,
    #[error("the machine's home is not on this host")]
    NoHome,
    #[error("no process that takes the machine is ready")]
    NotPrepared,
    #[error("the process that takes the machine cannot be started")]
    Start(#[source] io::Error),
    #[error("the process that takes the machine cannot be told what it is")]
    Told(#[source] io::Error),
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error("cannot make {} for a copy of a disk", path.display())]
    Disk {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot {action} {} for a checkpoint", path.display())]
    File {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{0}")]
    Failed(String),
    #[error("the process that takes the machine did not answer within {} s", .0.as_secs())]
    Late(Duration),
    #[error("it was given up")]
    GivenUp,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Prepared,
    Ready,
    Taking,
    Taken,
}

/// What came of a look at the process.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Progress {
    Nothing,
    Ready,
    Taken,
}

/// See the module. Dropped before it is let go, it is killed.
pub(super) struct Takeover {
    process: Option<Child>,
    name: String,
    socket: OwnedFd,
    stage: Stage,
    since: Instant,
    /// The number of the launcher's last request.
    request: u64,
}

/// What the process is made around.
pub(super) struct HomePart {
    cpus: u32,
    memory_bytes: u64,
    memory: OwnedFd,
    /// Where other nodes stay.
    others: Option<Others>,
}

/// The other nodes of a machine whose node 0 the process becomes.
#[derive(Default)]
struct Others {
    nodes: Vec<OtherNode>,
    /// To each of them.
    links: Vec<Link>,
    /// To the daemon of each.
    daemons: Vec<Link>,
}

impl HomePart {
    /// The memory of the slice that has all of the machine's.
    ///
    /// # Errors
    /// Out of descriptors.
    pub fn of_slice(slice: &LentMachine) -> io::Result<HomePart> {
        Ok(HomePart {
            cpus: slice.cpus,
            memory_bytes: slice.memory_bytes,
            memory: slice.memory.try_clone()?,
            others: None,
        })
    }

    /// Memory for pages of others, and the links that were made for it.
    ///
    /// # Errors
    /// Links and connections are not to the same nodes; the kernel refuses.
    pub fn among_others(reserved: &mut Reserved) -> io::Result<HomePart> {
        let mut others = Others::default();
        for inherited in std::mem::take(&mut reserved.inherits) {
            let Dialled {
                name,
                address,
                key,
                link,
            } = inherited.daemon;
            let number = inherited.node;
            let to_node = reserved
                .links
                .get_mut(number as usize)
                .and_then(Option::take);
            others.nodes.push(OtherNode {
                number,
                host: name,
                address,
                key,
            });
            let missing = || io::Error::other(format!("there is no link to node {number}"));
            others.links.push(to_node.ok_or_else(missing)?);
            others.daemons.push(link);
        }
        Ok(HomePart {
            cpus: 0,
            memory_bytes: HEIR_BYTES.min(reserved.reservation.pages * PAGE_BYTES),
            memory: sys::empty_memfd(c"weft-guest-ram")?,
            others: Some(others),
        })
    }
}

impl Takeover {
    /// Starts the process that is to take the home of a machine.
    pub fn prepare(
        daemon: &Shared,
        (peer, lease): (&Peer, Duration),
        part: HomePart,
        request: &HomeRequest,
    ) -> Result<Takeover, TakeoverError> {
        if !peer.takes_machines {
            return Err(TakeoverError::NotAllowed(peer.name.clone()));
        }
        let Others {
            nodes,
            links,
            daemons,
        } = part.others.unwrap_or_default();
        let order = HomeOrder {
            name: request.name.clone(),
            settings: request.settings.clone(),
            files: request.files.clone(),
            loan: Loan {
                cpus: part.cpus,
                memory_bytes: part.memory_bytes,
                lender: Lender::of(peer),
                switches: rundir::switches(),
            },
            user: daemon.confinement(peer).map(|confinement| confinement.user),
            lease_ms: lease.as_millis() as u32,
            nodes,
            links: Vec::new(),
        };
        let (socket, theirs) = sys::packet_pair().map_err(TakeoverError::Start)?;
        // This program, whatever has its path meanwhile. It leaves this process group by itself.
        let process = Command::new("/proc/self/exe")
            .arg0("weft")
            .args(["vm", "take-home"])
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(TakeoverError::Start)?;
        let takeover = Takeover {
            process: Some(process),
            name: request.name.clone(),
            socket,
            stage: Stage::Prepared,
            since: Instant::now(),
            request: request.request,
        };
        let links = links.into_iter().chain(daemons).collect();
        let (socket, memory) = (takeover.socket.as_fd(), part.memory.as_fd());
        monitor_protocol::send_order(socket, order, memory, links).map_err(TakeoverError::Told)?;
        Ok(takeover)
    }

    /// The number of the launcher's last request.
    pub fn request(&self) -> u64 {
        self.request
    }

    /// Readable when the process may have said something.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Whether it has taken the state.
    pub fn is_taken(&self) -> bool {
        self.stage == Stage::Taken
    }

    /// Waits until it has taken the state, if it has all of that. False where it has not.
    pub fn await_taken(&mut self) -> Result<bool, TakeoverError> {
        while self.stage == Stage::Taking && self.look()? == Progress::Nothing {
            sys::wait_readable(&[self.socket.as_fd()], LOOK).map_err(TakeoverError::Told)?;
        }
        Ok(self.is_taken())
    }

    /// It may be ready for as long again.
    pub fn renew(&mut self) {
        if self.stage == Stage::Ready {
            self.since = Instant::now();
        }
    }

    /// Passes a part of the state, or of files, on.
    pub fn take(&mut self, request: u64, step: &HomeStep) -> Result<(), TakeoverError> {
        let expected = match step {
            HomeStep::File { .. } => Stage::Prepared,
            _ => Stage::Ready,
        };
        if self.stage != expected {
            return Err(TakeoverError::NotPrepared);
        }
        self.request = request;
        if let HomeStep::State { is_last: true, .. } = step {
            self.enter(Stage::Taking);
        }
        monitor_protocol::send_step(self.socket.as_fd(), step).map_err(TakeoverError::Told)
    }

    /// What the process has said.
    pub fn look(&mut self) -> Result<Progress, TakeoverError> {
        let ended = "the process that takes the machine has ended";
        match monitor_protocol::receive(self.socket.as_fd()) {
            Some(Ok(MonitorMessage::Ready)) if self.stage == Stage::Prepared => {
                self.enter(Stage::Ready);
                return Ok(Progress::Ready);
            }
            Some(Ok(MonitorMessage::HomeTaken)) if self.stage == Stage::Taking => {
                self.enter(Stage::Taken);
                return Ok(Progress::Taken);
            }
            Some(Ok(MonitorMessage::Failed(why))) => return Err(TakeoverError::Failed(why)),
            Some(Err(())) => return Err(TakeoverError::Failed(ended.into())),
            Some(Ok(_)) | None => {}
        }
        let bound = match self.stage {
            Stage::Prepared | Stage::Taking => STEP_BOUND,
            Stage::Ready => READY_BOUND,
            // Its launcher's connection has a bound of its own.
            Stage::Taken => Duration::MAX,
        };
        match self.since.elapsed() > bound {
            true => Err(TakeoverError::Late(bound)),
            false => Ok(Progress::Nothing),
        }
    }

    fn enter(&mut self, stage: Stage) {
        self.stage = stage;
        self.since = Instant::now();
    }

    /// Lets the machine go on, whose slice stands or has ended, with what was reserved for that.
    /// Waits until its guest runs.
    pub fn let_go(
        mut self,
        daemon: &Arc<Shared>,
        reservation: Arc<Reservation>,
    ) -> Result<(), TakeoverError> {
        let socket = self.socket.as_fd();
        monitor_protocol::send_step(socket, &HomeStep::LetGo).map_err(TakeoverError::Told)?;
        let deadline = Instant::now() + RUN_BOUND;
        loop {
            match monitor_protocol::receive(self.socket.as_fd()) {
                Some(Ok(MonitorMessage::HomeRuns)) => break,
                Some(Ok(MonitorMessage::Failed(why))) => return Err(TakeoverError::Failed(why)),
                Some(Err(())) => {
                    let why = "the process that takes the machine has ended";
                    return Err(TakeoverError::Failed(why.into()));
                }
                Some(Ok(_)) | None => {}
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(TakeoverError::Late(RUN_BOUND));
            }
            sys::wait_readable(&[self.socket.as_fd()], left).map_err(TakeoverError::Told)?;
        }
        let Some(mut process) = self.process.take() else {
            return Ok(());
        };
        let counted = Counted::among(daemon);
        let home = daemon.homes.begin(&self.name, reservation);
        // Without a thread the reservation is given back too early, and nothing else.
        let _ = thread::Builder::new()
            .name("weft-settled".into())
            .spawn(move || {
                let _ = process.wait();
                drop((home, counted));
            });
        Ok(())
    }
}

impl Drop for Takeover {
    fn drop(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}
