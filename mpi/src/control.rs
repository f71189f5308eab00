//! What a launcher and the agent of a reservation say to each other.
//!
//! Over a Noise channel (`weft_wire::channel`) that the agent dials. After the handshake both
//! send their `Hello`, then the agent a [`Greeting`], then both what they want. Each says
//! something every [`PULSE`]; after [`SILENCE_MAX`] without a word the connection is given up,
//! and the agent dials again. Orders have numbers, since their results come later.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use weft_wire::keys::PublicKey;

/// Machines of a cluster: their addresses differ in the last byte.
pub const MACHINES_MAX: u32 = 250;
/// How often each side says something.
pub const PULSE: Duration = Duration::from_secs(1);
/// How long the other side may say nothing.
pub const SILENCE_MAX: Duration = Duration::from_secs(6);
/// How long a connection, its handshake and its greeting may take, each.
pub const STEP_MAX: Duration = Duration::from_secs(5);
/// The name of the cluster's switch on each host, as `--net switch=NAME` has it.
pub const SWITCH: &str = "cluster";

/// The agent's first message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Greeting {
    /// The token's.
    pub secret: String,
    /// Or why the host cannot be used.
    pub offer: Result<Offer, String>,
}

/// What a host has. The agent's key is that of its daemon and of its switch, too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// Where its daemon listens.
    pub node: String,
    /// Where its switch listens.
    pub switch: String,
    /// For machines, bytes.
    pub memory: u64,
    pub cores: u32,
    /// Of its tap device, bytes.
    pub mtu: Option<u32>,
}

/// Another host of the cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerHost {
    /// By which a move names it.
    pub name: String,
    pub key: PublicKey,
    /// Where its daemon listens; the launcher has none.
    pub node: Option<String>,
    /// Where its switch listens. `:PORT` is at the address by which the agent reached the
    /// launcher.
    pub switch: String,
}

/// From the launcher.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToAgent {
    /// All other hosts.
    Peers(Vec<PeerHost>),
    /// The reservation ends after these milliseconds.
    EndsAfter(u64),
    Order {
        id: u64,
        task: Task,
    },
    /// Ends everything here, and the agent.
    End,
    Alive,
}

/// What an agent does with a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Task {
    Start(Machine),
    /// Goes on from a folder.
    Restore {
        machine: String,
        folder: PathBuf,
        /// Other hosts that it is on from the start.
        on: Vec<String>,
    },
    /// To the host of that name.
    Move {
        machine: String,
        to: String,
    },
    /// One machine over several hosts is on these from now on.
    Reshape {
        machine: String,
        to: Vec<Part>,
        /// Its home is where it stays, which is the first.
        keeps_home: bool,
    },
    /// Into a folder, and ends it.
    Save {
        machine: String,
        folder: PathBuf,
    },
}

/// A place for a part of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    pub host: String,
    /// The number of the machine's node there; `None`: one joins.
    pub node: Option<usize>,
    /// Guest memory that it may have there, bytes.
    pub memory: u64,
}

/// What came of an order that was carried out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// Of a machine that is on other hosts now: the numbers of its nodes, in their order.
    pub nodes: Vec<usize>,
    /// Why its home, or another node, did not leave.
    pub stays: Option<String>,
    /// All of it is in the process of its new home.
    pub is_alone: bool,
    /// How long the machine stood, each time that it did, milliseconds.
    pub stood_ms: Vec<u32>,
}

impl Task {
    /// The name of the machine.
    pub fn machine(&self) -> &str {
        match self {
            Task::Start(machine) => &machine.name,
            Task::Restore { machine, .. }
            | Task::Move { machine, .. }
            | Task::Reshape { machine, .. }
            | Task::Save { machine, .. } => machine,
        }
    }
}

/// A machine, as it is started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    pub name: String,
    pub kernel: PathBuf,
    pub initrd: PathBuf,
    pub command_line: String,
    /// Bytes.
    pub memory: u64,
    pub cpus: u32,
    /// Other hosts that it is on from the start, a node on each.
    pub on: Vec<String>,
    /// What each of several nodes may use beyond its own memory, bytes.
    pub spare: u64,
    /// The CPU that the guest sees.
    pub cpu: String,
    /// Of its card, as `02:00:00:00:00:01`.
    pub address: String,
}

/// What the agent of a reservation tells its launcher.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FromAgent {
    /// All machines on its host.
    Machines(Vec<Seen>),
    /// Runnable threads there, as a percentage of the processors.
    Load(u32),
    /// An order has been carried out, or why it has not.
    Done {
        id: u64,
        result: Result<Outcome, String>,
    },
    /// The batch system wants the host back.
    Leaves(String),
}

/// A machine on an agent's host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    pub name: String,
    /// What it has touched of its memory, bytes.
    pub resident: u64,
}
