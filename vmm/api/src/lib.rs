//! HTTP at a UNIX socket: what a machine is, pause, resume, stop, counters, faults, moves
//! of vCPUs, nodes that join and leave.
//!
//! ```text
//! client ── one request, one answer ──▶ thread `api` ── job ──▶ thread `api-work` ──▶ Control
//!                                       (hyper, tokio)  (bounded)   (may wait)
//! ```
//!
//! - A client that may connect may stop the machine: the socket has mode 0600, and the
//!   peer must be root or one of the machine's users.
//! - [`CONNECTIONS_MAX`] connections at one time, one request each; every step of
//!   one has a bound ([`server`]).
//! - The API is described by `openapi.json` beside this file, which it serves; a
//!   test holds the routes, the document and the views against each other.
//! - [`Control`] is what the API asks of a machine; tests have one of their own.

pub mod client;
mod files;
mod routes;
mod server;
mod view;

use std::fs::File;

use thiserror::Error;
use weft_checkpoint::{Identity, Written};
use weft_machine::membership::NewNode;
use weft_machine::migration::Migration;
use weft_machine::{
    CHECKPOINT_SECONDS_MAX, PlatformMoveReport, REPLY_SECONDS_MAX, TimeMoveReport, VcpuMoveReport,
};

pub use server::{CONNECTIONS_MAX, REQUEST_BYTES_MAX, Server};
pub use view::{
    BackEndView, BalloonBody, BalloonView, ChangeView, ConsoleView, Counters, ErrorBody, ErrorView,
    Faults, LocationView, MoveBody, Pages, PlatformBody, ReleaseBody, STOP_SECONDS,
    STOP_SECONDS_MAX, SaveBody, SaveFilesBody, Saved, State, StopBody, TimekeeperBody, VmView,
};

/// The description of the API.
pub const OPENAPI: &str = include_str!("openapi.json");

/// Why a machine did not do what it was asked.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Failure {
    /// Not in its present state.
    #[error("{0}")]
    Conflict(String),
    /// Too much is asked of it at the moment.
    #[error("{0}")]
    Busy(String),
    /// It did not answer in time.
    #[error("{0}")]
    TimedOut(String),
    /// It failed at it.
    #[error("{0}")]
    Failed(String),
}

/// Longest that a save may take: the machine says how it is, pauses, writes its memory, and
/// resumes.
const SAVE_SECONDS_MAX: u64 = CHECKPOINT_SECONDS_MAX + 3 * REPLY_SECONDS_MAX;

/// A machine, as the API sees it. Called on one thread; each call is bounded by
/// the machine.
pub trait Control: Send + Sync {
    /// What it is and does.
    fn view(&self) -> Result<VmView, Failure>;
    /// Its numbers.
    fn counters(&self) -> Result<Counters, Failure>;
    /// The pages that its slices asked each other for most often.
    fn pages(&self) -> Result<Pages, Failure>;
    /// Faults one by one. By slice: the number of the first that is wanted; without
    /// one, those to come. They are recorded for some seconds from now on.
    fn faults(&self, from: Vec<Option<u64>>) -> Result<Faults, Failure>;
    /// Lets the vCPUs stand.
    fn pause(&self) -> Result<(), Failure>;
    /// Lets them go on.
    fn resume(&self) -> Result<(), Failure>;
    /// Moves a vCPU to another node.
    fn move_vcpu(&self, vcpu: u32, node: usize) -> Result<VcpuMoveReport, Failure>;
    /// Has another node keep the guest's time.
    fn move_time(&self, node: usize) -> Result<TimeMoveReport, Failure>;
    /// Has another node have the I/O APIC and the small devices.
    fn move_platform(&self, node: usize) -> Result<PlatformMoveReport, Failure>;
    /// Asks the guest to give `bytes` of its memory back; fewer: it may take some again.
    fn set_balloon(&self, bytes: u64) -> Result<BalloonView, Failure>;
    /// Begins to add a node.
    fn grow(&self, node: NewNode) -> Result<ChangeView, Failure>;
    /// Begins to give a node back.
    fn release(&self, node: usize) -> Result<ChangeView, Failure>;
    /// Begins to move the whole machine to other nodes.
    fn migrate(&self, migration: Migration) -> Result<ChangeView, Failure>;
    /// How far that is, or what came of it.
    fn change(&self) -> Result<ChangeView, Failure>;
    /// Asks for its end.
    fn cancel(&self) -> Result<ChangeView, Failure>;
    /// Pages that were not yet read from the checkpoint that it continues.
    fn unread_pages(&self) -> Result<u64, Failure>;
    /// Writes guest memory to `files`, one for each node, and saves everything else. The
    /// machine continues if it ran. A live save has no pages in its reply, nor has one whose files
    /// on other hosts are not on disk: `save_progress`.
    fn save(&self, files: Vec<File>, body: &SaveBody) -> Result<Saved, Failure>;
    /// Has daemons keep or remove the files that they made for the last save.
    fn save_files(&self, body: &SaveFilesBody) -> Result<(), Failure>;
    /// What each node has written, when such a save is over; `None` before.
    fn save_progress(&self, identity: Identity) -> Result<Option<Vec<Written>>, Failure>;
    /// Gives up such a save of this checkpoint, if it is under way.
    fn end_save(&self, identity: Identity);
    /// Asks the guest to power itself off; `false` when there is no way to, and a
    /// conflict when the guest does not run and so would not hear of it.
    fn power_button(&self) -> Result<bool, Failure>;
    /// Ends it at once.
    fn stop(&self) -> Result<(), Failure>;
}
