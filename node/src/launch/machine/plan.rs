//! What a machine's nodes need of the hosts that they are on.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use weft_wire::hello::{self, Hello, Mismatch};

use crate::error::LaunchError;
use crate::launch::nodes::{Body, Node};
use crate::launch::workload::Workload;
use crate::links::Links;
use crate::monitor_protocol::{self, SliceBoot, Terms};
use crate::options::{Placement, Transport};
use crate::protocol::{DaemonRequest, MachineStart};
use crate::remote::Identity;
use crate::said::Spoken;
use crate::size::PAGE_BYTES;
use crate::spawn::{Executable, Process, ProgramKind, Role, StartError};
use crate::sys;

/// What a vCPU uses of its host beside the guest's memory: generated code (64 MiB at
/// most) and its tables.
const CPU_BYTES: u64 = 72 << 20;

/// Guest memory that a process may fill which becomes node 0 among other nodes: what its devices
/// use.
pub const HEIR_BYTES: u64 = 64 << 20;

/// What a host has to lend for a slice: guest memory that it may come to hold, and what
/// its vCPUs need.
pub fn reservation_bytes(memory_bytes: u64, cpus: u32) -> u64 {
    memory_bytes.saturating_add(u64::from(cpus) * CPU_BYTES)
}

/// What is started, and where.
#[derive(Debug, Clone)]
pub struct MachinePlan {
    /// What the machine is called, for the hosts' logs.
    pub name: String,
    /// Where its nodes are.
    pub placement: Placement,
    /// What joins nodes on this host.
    pub transport: Transport,
    /// Silence after which a node counts as lost.
    pub lease: Duration,
    /// What each node needs of its host, node 0's first; empty for a machine of one.
    pub shares: Vec<Share>,
    /// What a guest that restarts is booted from, where it does: another host gets copies.
    pub boot_files: Vec<PathBuf>,
    /// CPU features that every host needs, by their names in `/proc/cpuinfo`.
    pub features: &'static [&'static str],
    /// Where keys and the list of trusted nodes are; see
    /// [`crate::config::directory`].
    pub configuration: Option<PathBuf>,
}

/// What a node needs of its host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Share {
    /// Guest memory that it may come to hold, in bytes.
    pub memory_bytes: u64,
    /// Its vCPUs.
    pub cpus: u32,
    /// The node with what it gives, for a sentence.
    pub described: String,
}

/// What the processes are told once they have been started. The launcher passes it on
/// without understanding it.
#[derive(Debug, Default)]
pub struct MachineSettings {
    /// All of them, on every host.
    pub machine: String,
    /// Those on this host.
    pub own: String,
}

/// What home passes open files to another node of this host through. Both ends are copied
/// into the processes.
pub struct FileChannel {
    pub(super) home: OwnedFd,
    node: OwnedFd,
}

/// What home gets that takes the place of another among other nodes.
pub(super) struct HeirLinks {
    pub links: Links,
    pub memory_bytes: u64,
}

/// A plan with what carries it out.
pub struct Monitors {
    pub(super) plan: MachinePlan,
    pub(super) executable: Executable,
    pub(super) settings: MachineSettings,
}

impl Monitors {
    /// Hands a process on this host its number, settings and links.
    pub(super) fn boot(
        &self,
        process: &Process,
        number: u32,
        links: Links,
        sockets: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        self.boot_into(process, (number, None), links, sockets)
    }

    /// As [`Monitors::boot`]; a node that joins a running machine has so much memory.
    pub(super) fn boot_into(
        &self,
        process: &Process,
        (number, joins): (u32, Option<u64>),
        links: Links,
        sockets: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        let boot = SliceBoot {
            number,
            lease_ms: self.plan.lease.as_millis() as u32,
            settings: self.settings.machine.clone(),
            terms: Terms::Own(self.settings.own.clone()),
            links: Vec::new(),
            joins,
        };
        monitor_protocol::send_boot(&process.control, boot, links, sockets)
    }

    fn share(&self, node: u32) -> (u64, u32) {
        let share = self.plan.shares.get(node as usize);
        share.map_or((0, 0), |share| (share.memory_bytes, share.cpus))
    }
}

impl Workload for Monitors {
    type Kept = FileChannel;
    const PROGRAM: ProgramKind = ProgramKind::Monitor;
    // Its slices watch each other over their links.
    const BEATS: bool = false;

    fn placement(&self) -> &Placement {
        &self.plan.placement
    }

    fn transport(&self) -> Transport {
        self.plan.transport
    }

    fn lease(&self) -> Duration {
        self.plan.lease
    }

    fn executable(&self) -> &Executable {
        &self.executable
    }

    fn role(&self) -> Role<'_> {
        Role::Node {
            arguments: &monitor_protocol::ARGUMENTS,
            console: false,
        }
    }

    fn keep(&self) -> Result<FileChannel, LaunchError> {
        let pair = sys::packet_pair().map_err(LaunchError::system("make a socket pair"))?;
        let (home, node) = pair;
        Ok(FileChannel { home, node })
    }

    fn boot(
        &self,
        process: &mut Process,
        node: u32,
        links: Links,
        channel: &FileChannel,
    ) -> Result<(), StartError> {
        Monitors::boot(self, process, node, links, &[channel.node.as_fd()])
            .map_err(StartError::Settings)
    }

    /// Home waits for its slices by itself, while it gets ready.
    fn await_ready(&self, _: &mut Process) -> Result<(), StartError> {
        Ok(())
    }

    fn hear(control: BorrowedFd<'_>) -> Spoken {
        monitor_protocol::hear(control)
    }

    fn beats(_: &FileChannel) -> Option<u32> {
        None
    }

    fn identity(&self) -> Result<Identity, LaunchError> {
        Ok(Identity::load(self.plan.configuration.as_deref())?)
    }

    fn fits(&self, ours: &Hello, theirs: &Hello) -> Result<(), Mismatch> {
        hello::check_guest(ours, theirs, self.plan.features)
    }

    fn reservation(&self, node: u32) -> DaemonRequest {
        let (memory_bytes, cpus) = self.share(node);
        let bytes = reservation_bytes(memory_bytes, cpus);
        DaemonRequest::Open {
            command: format!("vm {}", self.plan.name),
            node,
            budget_pages: Some(bytes.div_ceil(PAGE_BYTES)),
            lease_ms: self.plan.lease.as_millis() as u32,
        }
    }

    fn reserved(&mut self, _: u32, _: u64) {}

    fn order(&self, node: u32) -> Result<DaemonRequest, LaunchError> {
        Ok(DaemonRequest::StartMachine(Box::new(MachineStart {
            slices: self.plan.placement.nodes() as u32,
            cpus: self.share(node).1,
            settings: self.settings.machine.clone(),
            joins: None,
        })))
    }
}

/// The sockets that home gets: the one for its last word, `others`, and the channels for
/// files to `nodes`.
pub(super) fn home_sockets<'a>(
    word: &'a impl AsFd,
    others: &[BorrowedFd<'a>],
    nodes: &'a [Node<Monitors>],
) -> Vec<BorrowedFd<'a>> {
    let mut sockets = vec![word.as_fd()];
    sockets.extend(others);
    sockets.extend(nodes.iter().filter_map(|node| match &node.body {
        Body::Local(local) => Some(local.kept.home.as_fd()),
        Body::Remote(_) => None,
    }));
    sockets
}
