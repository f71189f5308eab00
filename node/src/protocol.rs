//! What a launcher and a daemon say to each other over a sealed control
//! channel, after the handshake and the exchange of [`weft_wire::hello::Hello`].
//!
//! ```text
//! launcher                         daemon
//! Status                    ──▶    Status                 (weft node list)
//! Open                      ──▶    Opened | NoRoom        budget reserved
//! Expect (one per link)     ──▶    Done                   the secret is known; after
//!                                                         StartMachine: a node joins
//! Dial (one per link)       ──▶    Done | Failed          a link to another slice
//! Start | StartMachine      ──▶    Started | Failed       the slice is READY
//! Ping                      ──▶    Pong                   heartbeat and counters
//! Kick                      ──▶                           signal to the slice
//! Stop                      ──▶    Stopped                slice ended, budget kept
//! Release                   ──▶    Done                   slice ended, budget given back
//! Heir                      ──▶    Done | Failed          another launcher may take the slice
//! DialHeir (one per slice)  ──▶    Done | Failed          a connection of such a launcher
//! Inherit (on that)         ──▶    Started                its launcher has the slice
//! Home (Disk)               ──▶    HomeReady | HomeFailed the slice has the file
//!      (Prepare)            ──▶    HomeReady | HomeFailed later, at any time
//!      (the last State)     ──▶    HomeTaken | HomeFailed
//!      (LetGo)              ──▶    HomeRuns | HomeFailed  the slice stands, and ends
//!      (GiveUp)             ──▶    HomeFailed             the process has ended
//!                           ◀──    Said, Ended, Leaving,  at any time after Start
//!                                WantedBack
//! ```
//!
//! Every request but `Kick` and a `Home` that is no last part, or waits or announces, has
//! exactly one answer, those but `Home` in order; the daemon sends nothing but answers before
//! `Started`. Closing the connection ends the slice and gives the budget back; a process that has the whole state
//! of a machine's home goes on then. While a launcher is there that may inherit the slice, the
//! end of the first one ends nothing: the slice ends if that launcher goes, too, and has not
//! inherited it.

use serde::{Deserialize, Serialize};
use weft_wire::handshake::{Secret, Ticket};
use weft_wire::keys::PublicKey;

use crate::links::ProgramSettings;
use crate::monitor_protocol::HomeStep;
use crate::shared::Snapshot;

/// From launcher to daemon.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DaemonRequest {
    /// What have you got?
    Status,
    /// Reserve memory and a slice.
    Open {
        /// What for, for the log.
        command: String,
        /// The slice's number in the aggregate.
        node: u32,
        /// Pages wanted; none leaves it to the host.
        budget_pages: Option<u64>,
        /// The aggregate's lease.
        lease_ms: u32,
    },
    /// A link from `peer` will be dialled to you. A machine's slice that runs gets it when
    /// it comes.
    Expect {
        /// The other end's node number.
        peer: u32,
        /// What it will present.
        ticket: Ticket,
        /// What both ends know.
        secret: Secret,
    },
    /// Dial a link to `peer`.
    Dial {
        /// The other end's node number.
        peer: u32,
        /// Its daemon's key: the dialling daemon has to know it, and where it listens.
        key: PublicKey,
        /// What to present.
        ticket: Ticket,
        /// What both ends know.
        secret: Secret,
    },
    /// A connection with this ticket will come, of a launcher that has the slice once it says
    /// `Inherit`. It takes the place of one that was expected before.
    Heir {
        /// What it will present.
        ticket: Ticket,
        /// What both ends know.
        secret: Secret,
    },
    /// Dial such a connection to the daemon of node `peer`, for the process that is about to
    /// take node 0's part here.
    DialHeir {
        /// The node whose slice it inherits.
        peer: u32,
        /// Its daemon's key.
        key: PublicKey,
        /// What to present.
        ticket: Ticket,
        /// What both ends know.
        secret: Secret,
    },
    /// On such a connection: the slice is its launcher's from now on.
    Inherit,
    /// Start the runtime.
    Start(Box<ProgramSettings>),
    /// Start a slice of a machine.
    StartMachine(Box<MachineStart>),
    /// Are you there, and how is the slice?
    Ping,
    /// Send the slice the kick signal.
    Kick,
    /// End the slice, keep the reservation: the program executes another image.
    Stop,
    /// End the slice and the reservation: answered when both are over.
    Release,
    /// Of the machine whose slice runs: node 0's part goes to a process on this host.
    Home(Box<HomeRequest>),
}

/// A step of the move of node 0's part of a machine.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub struct HomeRequest {
    /// The number that is in the reply.
    pub request: u64,
    /// What the machine is called.
    pub name: String,
    /// Its settings, for `Prepare`: text that only monitors read.
    pub settings: String,
    /// For `Prepare`: the sizes of the files that its guest restarts from, in bytes. They
    /// follow, one behind the other.
    pub files: Vec<u64>,
    pub step: HomeStep,
}

/// A slice of a machine, as a daemon starts it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MachineStart {
    /// Slices of the machine, 2 to 16.
    pub slices: u32,
    /// vCPUs of this slice. What each needs beside the guest's memory is part of the
    /// reservation; the settings may not ask for more than it and these.
    pub cpus: u32,
    /// What the monitor needs to know, as text that only it reads.
    pub settings: String,
    /// Of a slice that joins a running machine.
    pub joins: Option<MachineJoin>,
}

/// A slice that joins a running machine.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MachineJoin {
    /// Guest memory that it may fill, in bytes: part of the reservation.
    pub memory_bytes: u64,
    /// The nodes that the machine has; the slice has a link to each.
    pub peers: Vec<u32>,
}

/// From daemon to launcher.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DaemonReply {
    /// To [`DaemonRequest::Status`].
    Status(NodeStatus),
    /// Reserved.
    Opened {
        /// This many pages.
        budget_pages: u64,
    },
    /// Not reserved.
    NoRoom {
        asked_pages: u64,
        /// Most pages that a slice could have.
        free_pages: u64,
        /// What ran out.
        why: String,
    },
    /// To [`DaemonRequest::Expect`], [`DaemonRequest::Dial`], [`DaemonRequest::Heir`],
    /// [`DaemonRequest::DialHeir`] and [`DaemonRequest::Release`].
    Done,
    /// The request failed; the reason.
    Failed(String),
    /// To [`DaemonRequest::Start`], [`DaemonRequest::StartMachine`] and
    /// [`DaemonRequest::Inherit`].
    Started {
        /// The slice's process id on its host.
        pid: u32,
    },
    /// To [`DaemonRequest::Ping`].
    Pong(Box<Snapshot>),
    /// To [`DaemonRequest::Stop`].
    Stopped(Box<Snapshot>),
    /// The slice has something to say to the user.
    Said(String),
    /// The slice ended by itself.
    Ended {
        why: String,
        /// As it does when its links close.
        clean: bool,
    },
    /// The daemon ends: leave the host soon.
    Leaving,
    /// The host's owner wants the memory back: leave the host if that is possible.
    WantedBack,
    /// The process that can take node 0's part is ready.
    HomeReady { request: u64 },
    /// It has taken the machine's state.
    HomeTaken { request: u64 },
    /// It goes on with the machine.
    HomeRuns { request: u64 },
    /// There is no such process (any more).
    HomeFailed { request: u64, reason: String },
}

/// What a daemon has and lends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeStatus {
    /// Weft's version there.
    pub version: String,
    pub host_name: String,
    pub cpu_name: String,
    pub cpus: u32,
    /// Most memory that its slices may hold together.
    pub memory_bytes: u64,
    /// Of that, what no slice may hold now.
    pub memory_free_bytes: u64,
    /// Most slices at a time.
    pub slices: u32,
    /// Slices running now, of programs and of machines.
    pub slices_used: u32,
    /// Of these, slices of machines.
    pub machine_slices: u32,
    /// Whether slices get a user and an empty root directory of their own.
    pub confined: bool,
}
