//! The daemon of a node: lends this host's memory and CPU to aggregates of
//! trusted launchers.
//!
//! The first thread accepts; each connection gets a thread of its own, named
//! `weft-peer`, that shakes hands and then either serves a control connection
//! ([`session`]) or delivers a link to the session that expects it. Until then it is a
//! stranger's, and its place is at the [`door`]. A slice is
//! started by its session's thread and dies with it (`PR_SET_PDEATHSIG`).
//!
//! Invariants:
//! - without a key pair and at least one peer that may borrow nothing is bound;
//! - nothing is read from a peer before its key was proven and may borrow,
//!   except the handshake itself, which is bounded in bytes, time and number;
//! - every slice belongs to exactly one session, every reservation too.
//!
//! `SIGTERM` or `SIGINT`: no more connections; every session asks its launcher
//! to take the pages elsewhere ([`LEAVE_BOUND`]); then the daemon ends. A second
//! signal ends it at once, and the slices with it.

mod budget;
mod cluster;
mod dial;
mod door;
mod expected;
mod gossip;
mod health;
mod homes;
mod leader;
mod lending;
mod limit;
mod machine;
mod memory;
mod program;
mod reserved;
mod session;
mod shared;
mod slice;
mod takeover;
mod welcome;

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::socket::{Backlog, listen};
use weft_wire::hello::Hello;

use door::{Door, Limits};
use gossip::Gossip;
use homes::Homes;
use limit::Limit;
use shared::Shared;
use welcome::welcome;

pub use budget::{Budget, NoRoom, Reservation};
pub use expected::Expected;

use crate::cgroup::{CgroupError, Cgroups};
use crate::config::{self, Config, ConfigError, Peer};
use crate::host::UserfaultfdError;
use crate::member::{MemberError, Membership};
use crate::options::MEMORY_BYTES_MIN;
use crate::protocol::NodeStatus;
use crate::size::{PAGE_BYTES, format_bytes};
use crate::spawn::{self, Executable, ProgramKind};
use crate::{host, sys};

/// How long aggregates may take to leave a daemon that ends.
pub const LEAVE_BOUND: Duration = Duration::from_secs(30);
/// Connections that wait to be accepted, where the kernel allows as many: those of
/// strangers come in hundreds, and what does not fit tries again after a second.
const BACKLOG: i32 = 4096;

/// What the smallest slice may hold: a daemon that lends less lends nothing.
const SLICE_BYTES_MIN: u64 = budget::bound_bytes(MEMORY_BYTES_MIN);

/// Why a daemon does not start.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// Keys or configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The cluster that this host is in.
    #[error(transparent)]
    Member(#[from] MemberError),
    /// Nobody could borrow.
    #[error(
        "no node may borrow from this one: run `weft node trust --may borrow KEY NAME`, or write `may = \"borrow\"` into the [[peer]] of one in {0}; until then the daemon does not listen"
    )]
    NobodyMayBorrow(PathBuf),
    /// A program of Weft's is missing.
    #[error(transparent)]
    Missing(#[from] spawn::Missing),
    /// The kernel lacks Syscall User Dispatch.
    #[error(
        "this host cannot run slices: no Syscall User Dispatch ({0}); `weft doctor` says what fixes it"
    )]
    NoDispatch(io::Error),
    /// userfaultfd is missing, or lacks a feature.
    #[error("this host cannot run slices: no userfaultfd ({0}); `weft doctor` says what fixes it")]
    NoUserfaultfd(UserfaultfdError),
    /// Less memory to lend than one slice needs.
    #[error(
        "{} to lend is less than the smallest slice may hold ({}): raise --memory, or `memory` in node.toml",
        format_bytes(*.0), format_bytes(SLICE_BYTES_MIN)
    )]
    TooLittle(u64),
    /// The address cannot be bound.
    #[error("cannot listen on {address}")]
    Listen {
        address: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// A call to the kernel failed.
    #[error("cannot {doing}")]
    System {
        /// What was being done.
        doing: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
}

/// Overrides of the configuration, from the command line.
#[derive(Debug, Clone, Default)]
pub struct DaemonOptions {
    /// Configuration directory; see [`config::directory`].
    pub configuration: Option<PathBuf>,
    /// Address to listen on.
    pub listen: Option<String>,
    /// Most memory that slices may hold.
    pub memory_bytes: Option<u64>,
    /// Cores that a cluster counts on.
    pub cores: Option<u32>,
    /// Most slices.
    pub slices: Option<u32>,
    /// Leave slices this user and its file system, even where they could be
    /// confined. For a runtime under test that is not static; the command line
    /// has no option for it.
    pub unconfined: bool,
}

/// Whom a daemon knows beside its configuration, for a process that has both and learns of other
/// hosts while the daemon runs.
pub struct KnownPeers(Arc<Shared>);

impl KnownPeers {
    /// These and no others, from now on. What runs goes on.
    pub fn set(&self, peers: Vec<Peer>) {
        self.0.set_members(peers);
    }
}

/// A daemon that listens.
pub struct Daemon {
    listener: TcpListener,
    shared: Arc<Shared>,
    /// The configuration's directory.
    directory: PathBuf,
    /// The cluster that this host is in.
    membership: Option<Membership>,
    /// Dropped to tell every session that the daemon ends.
    end: Option<OwnedFd>,
}

impl Daemon {
    /// Reads keys and configuration, checks this host, and listens.
    pub fn listen(options: &DaemonOptions, log: fn(&str)) -> Result<Daemon, DaemonError> {
        let directory = options
            .configuration
            .clone()
            .unwrap_or_else(config::directory);
        let keys = config::load_keys(&directory)?;
        let mut config = Config::load(&directory)?;
        let membership = Membership::load(&directory)?;
        let in_cluster = membership.is_some();
        if !in_cluster && !config.peers.iter().any(|peer| peer.may().borrow()) {
            return Err(DaemonError::NobodyMayBorrow(
                directory.join(config::CONFIG_FILE),
            ));
        }
        for peer in &mut config.peers {
            settle(peer, log);
        }
        let runtime = Executable::find(ProgramKind::Runtime)?;
        let monitor = Executable::find(ProgramKind::Monitor);
        if let Err(missing) = &monitor {
            log(&format!(
                "no slice of a virtual machine can run here: {missing}"
            ));
        }
        host::require_dispatch().map_err(DaemonError::NoDispatch)?;
        host::require_userfaultfd().map_err(DaemonError::NoUserfaultfd)?;
        if let Some(listen) = &options.listen {
            config.listen = config::with_port(listen);
        }
        config.cores = options.cores.or(config.cores);
        config.slices = options
            .slices
            .unwrap_or(config.slices)
            .clamp(1, config::SLICES_MAX);
        let memory_bytes = options
            .memory_bytes
            .or(config.memory_bytes)
            .unwrap_or_else(|| host::available_memory_bytes() / 2);
        if memory_bytes < SLICE_BYTES_MIN {
            return Err(DaemonError::TooLittle(memory_bytes));
        }
        let listener = TcpListener::bind(&config.listen).map_err(|source| DaemonError::Listen {
            address: config.listen.clone(),
            source,
        })?;
        let system = |doing| move |source| DaemonError::System { doing, source };
        listener
            .set_nonblocking(true)
            .map_err(system("limit how long the listener waits"))?;
        Backlog::new(BACKLOG)
            .and_then(|backlog| listen(&listener, backlog))
            .map_err(io::Error::from)
            .map_err(system("enlarge the listener's backlog"))?;
        let (end, ending) = sys::stream_pair().map_err(system("make a socket pair"))?;
        let budget = Budget::new(memory_bytes / PAGE_BYTES, config.slices);
        let limit = Limit::new(memory_bytes, config.keep_free_bytes);
        let shared = Shared {
            keys,
            config,
            budget,
            homes: Homes::default(),
            limit,
            expected: Expected::default(),
            runtime,
            monitor,
            empty_root: match options.unconfined {
                true => None,
                false => empty_root().map_err(system("make an empty directory for slices"))?,
            },
            cgroups: Cgroups::find(),
            filters: !options.unconfined,
            hello: Hello::here(),
            ending,
            own_address: own_address(&listener).map_err(system("find out the address"))?,
            door: Door::new(Limits::raised()),
            gossip: Mutex::new(Gossip::new(gossip::OF_STRANGERS)),
            peers: Mutex::default(),
            members: RwLock::default(),
            alive: Mutex::default(),
            leading: Mutex::default(),
            machine_slices: AtomicU32::new(0),
            log,
        };
        Ok(Daemon {
            listener,
            shared: Arc::new(shared),
            directory,
            membership,
            end: Some(end),
        })
    }

    /// The address it listens on.
    pub fn address(&self) -> io::Result<std::net::SocketAddr> {
        self.listener.local_addr()
    }

    /// The peers that this process adds to those of the configuration.
    pub fn known_peers(&self) -> KnownPeers {
        KnownPeers(self.shared.clone())
    }

    /// What it has and lends.
    pub fn status(&self) -> NodeStatus {
        self.shared.status()
    }

    /// Why the kernel does not bound the memory of slices, where it does not: then
    /// the daemon looks at it.
    pub fn memory_is_watched(&self) -> Option<&CgroupError> {
        self.shared.cgroups.as_ref().err()
    }

    /// Serves until a signal ends it; see the module.
    pub fn serve(mut self) -> Result<(), DaemonError> {
        let system = |doing| move |source| DaemonError::System { doing, source };
        let signals = end_signals().map_err(system("set up signals"))?;
        lending::start(&self.shared, &self.directory).map_err(system(
            "start the thread that answers at the daemon's socket",
        ))?;
        if let Some(membership) = self.membership.take() {
            leader::start(&self.shared, membership.clone())
                .and_then(|()| cluster::start(&self.shared, self.directory.clone(), membership))
                .map_err(system("start the cluster's threads"))?;
        }
        self.accept_until(signals.as_fd())
            .map_err(system("wait for connections"))?;
        let _ = signals.read_signal();
        self.shared
            .say("ending: asking aggregates to leave (a second signal ends at once)");
        self.end = None;
        // Beside the wait for sessions: the store may not answer.
        let shared = self.shared.clone();
        let told = std::thread::Builder::new()
            .name("weft-cluster-end".into())
            .spawn(move || cluster::end(&shared))
            .map_err(system("start a thread"))?;
        let deadline = Instant::now() + LEAVE_BOUND + Duration::from_secs(2);
        let waits = || self.shared.door.guests() > 0 || !told.is_finished();
        while waits() && Instant::now() < deadline {
            let again = sys::wait_readable(&[signals.as_fd()], Duration::from_millis(100));
            if again.map_err(system("wait for sessions"))?[0] {
                break;
            }
        }
        self.shared.say("ended");
        Ok(())
    }

    /// Accepts connections until `stop` is readable.
    pub fn accept_until(&self, stop: BorrowedFd<'_>) -> io::Result<()> {
        loop {
            let bound = Duration::from_secs(60);
            let ready = sys::wait_readable(&[stop, self.listener.as_fd()], bound)?;
            if ready[0] {
                return Ok(());
            }
            match self.listener.accept() {
                Ok((stream, from)) => self.admit(stream, from),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // Out of descriptors, or a connection that went before it was
                // accepted: the next may fare better, but not at once.
                Err(error) => {
                    self.shared
                        .say(&format!("cannot accept a connection: {error}"));
                    std::thread::sleep(Duration::from_millis(100));
                }
            }
        }
    }

    fn admit(&self, stream: TcpStream, from: SocketAddr) {
        let shared = self.shared.clone();
        // Where it cannot be, the connection is dropped, as where its thread cannot be.
        let Ok(other) = stream.try_clone() else {
            return;
        };
        let Some(stranger) = shared.door.admit(other, from) else {
            return;
        };
        let thread = std::thread::Builder::new().name("weft-peer".into());
        let _ = thread.spawn(move || welcome(&shared, stream, stranger, from));
    }
}

/// Where this host reaches what listens: all addresses include the loopback's.
fn own_address(listener: &TcpListener) -> io::Result<SocketAddr> {
    let mut address = listener.local_addr()?;
    match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
        IpAddr::V6(ip) if ip.is_unspecified() => address.set_ip(Ipv6Addr::LOCALHOST.into()),
        _ => {}
    }
    Ok(address)
}

/// Says what of a peer's entry its owner may not expect, and finds what it may open.
fn settle(peer: &mut Peer, log: fn(&str)) {
    if peer.may.is_none() {
        log(&format!(
            "{}: its [[peer]] has no `may`: `may = \"both\"` is assumed",
            peer.name
        ));
    }
    for path in peer.consent.resolve() {
        log(&format!(
            "{}: {} does not exist now: if it is created later, it is opened only if its path \
            has no symbolic link",
            peer.name,
            path.display()
        ));
    }
}

fn end_signals() -> io::Result<SignalFd> {
    let mut set = SigSet::empty();
    set.add(Signal::SIGTERM);
    set.add(Signal::SIGINT);
    // Before any thread is made, so that all inherit the mask.
    set.thread_block()?;
    let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
    Ok(SignalFd::with_flags(&set, flags)?)
}

/// An empty directory that nobody can write to; only root can use it.
fn empty_root() -> io::Result<Option<PathBuf>> {
    use std::os::unix::fs::DirBuilderExt;
    if !nix::unistd::geteuid().is_root() {
        return Ok(None);
    }
    let base = Path::new("/run/weft");
    crate::rundir::prepare(base).map_err(io::Error::other)?;
    let path = base.join("empty");
    match std::fs::DirBuilder::new().mode(0o555).create(&path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    if std::fs::read_dir(&path)?.next().is_some() {
        return Err(io::Error::other(format!("{} is not empty", path.display())));
    }
    Ok(Some(path))
}
