//! What the nodes of an aggregate run, as far as it makes a difference to starting,
//! linking and hearing them: a program's runtimes ([`super::program`]) or a machine's
//! monitors ([`super::machine`]).

use std::os::fd::BorrowedFd;
use std::time::Duration;

use weft_wire::hello::{Hello, Mismatch};

use crate::error::LaunchError;
use crate::links::Links;
use crate::options::{Placement, Transport};
use crate::protocol::DaemonRequest;
use crate::remote::Identity;
use crate::said::Spoken;
use crate::spawn::{Executable, Process, ProgramKind, Role, StartError};

/// See the module. `node` is always the number of one other than home.
pub trait Workload {
    /// What the launcher keeps of a node on this host from one process to the next.
    type Kept;
    /// What its processes execute.
    const PROGRAM: ProgramKind;

    /// Where the nodes are.
    fn placement(&self) -> &Placement;
    /// What joins nodes on this host.
    fn transport(&self) -> Transport;
    /// Silence after which a node counts as lost.
    fn lease(&self) -> Duration;

    /// What is started on this host.
    fn executable(&self) -> &Executable;
    /// As what it is started.
    fn role(&self) -> Role<'_>;
    /// For a node that has no process yet.
    fn keep(&self) -> Result<Self::Kept, LaunchError>;
    /// Hands a started process its number, settings and links.
    fn boot(
        &self,
        process: &mut Process,
        node: u32,
        links: Links,
        kept: &Self::Kept,
    ) -> Result<(), StartError>;
    /// Waits until a process is ready, where home needs that.
    fn await_ready(&self, process: &mut Process) -> Result<(), StartError>;
    /// The next thing that a process said.
    fn hear(control: BorrowedFd<'_>) -> Spoken;
    /// The beats that it counted, where it counts them.
    fn beats(kept: &Self::Kept) -> Option<u32>;

    /// Keys and trusted nodes, for hosts.
    fn identity(&self) -> Result<Identity, LaunchError>;
    /// Whether a host can have a node.
    fn fits(&self, ours: &Hello, theirs: &Hello) -> Result<(), Mismatch>;
    /// Asks a host for what the node needs.
    fn reservation(&self, node: u32) -> DaemonRequest;
    /// A host has reserved so much for it.
    fn reserved(&mut self, node: u32, budget_pages: u64);
    /// Has a host start it.
    fn order(&self, node: u32) -> Result<DaemonRequest, LaunchError>;
    /// Whether a host's slices count beats.
    const BEATS: bool;
}
