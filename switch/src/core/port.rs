//! A port: a machine, or another switch, and what waits for it.
//!
//! States of a machine's port: connected → gone → removed. A port that is gone keeps the
//! frames for its addresses until they are heard elsewhere, for a machine that moves is at
//! neither place for a moment. States of a switch's port: down ⇄ up.
//!
//! Invariants: at most [`FRAMES_MAX`] frames and [`BYTES_MAX`] bytes wait at a port, in the
//! order of their arrival; what was handed out is handed out once.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use serde::Serialize;

use crate::frames::{Address, Way};

/// Frames that wait at a port. Beyond that the oldest are dropped.
pub const FRAMES_MAX: usize = 1000;
/// Bytes that wait at a port: as many as a few TCP connections have under way.
pub const BYTES_MAX: usize = 16 << 20;
/// Notices that wait at a port: more than the addresses of all machines of a switch.
pub const NOTICES_MAX: usize = 8192;

/// Addresses that were heard at a machine's port and are remembered until it ends.
pub const HEARD_MAX: usize = 256;

/// A port, for its life. No two of a switch are the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct PortId(pub u32);

/// What is behind a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A machine of this host.
    Machine {
        /// Since when it is gone, in milliseconds.
        gone: Option<u64>,
    },
    /// Another switch.
    Peer {
        /// Whether there is a link to it.
        up: bool,
    },
    /// Another switch on the same bridge: a link for what the bridge may not have.
    Detour {
        /// Whether it works.
        up: bool,
    },
}

impl Kind {
    /// Another switch, or the bridge with several.
    pub fn is_peer(self) -> bool {
        matches!(self, Kind::Peer { .. })
    }

    /// Not a machine.
    pub fn is_switch(self) -> bool {
        matches!(self, Kind::Peer { .. } | Kind::Detour { .. })
    }

    /// A machine with a connection.
    pub fn is_connected_machine(self) -> bool {
        self == Kind::Machine { gone: None }
    }
}

/// What went through a port, and what did not.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// Frames that came from there.
    pub frames_in: u64,
    /// Their bytes.
    pub bytes_in: u64,
    /// Frames that went there.
    pub frames_out: u64,
    /// Their bytes.
    pub bytes_out: u64,
    /// Frames with a broken header that came from there.
    pub broken: u64,
    /// Frames from there whose source was one address too many.
    pub refused: u64,
    /// Frames from there for an address that is not behind this switch.
    pub misdirected: u64,
    /// Frames for there that newer ones pushed out.
    pub overflowed: u64,
    /// Frames for there that waited for too long, or whose machine has left.
    pub stale: u64,
}

/// A frame that waits.
#[derive(Debug, Clone)]
pub struct Waiting {
    /// The whole frame.
    pub frame: Arc<[u8]>,
    pub destination: Address,
    pub source: Address,
    /// When it came, in milliseconds.
    pub since: u64,
    /// It is at this port only: its destination was known.
    pub known: bool,
    /// The port that it came from, and whether that is another switch's.
    pub from: PortId,
    pub from_switch: bool,
    /// How it came, or goes: what was passed on, and one of several copies, crosses no more links.
    pub way: Way,
}

/// What one switch tells another beside frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Notice {
    Here(Address),
    Gone(Address),
}

/// Its kind, and what waits for it.
#[derive(Debug)]
pub struct Port {
    pub kind: Kind,
    pub counters: Counters,
    pub notices: VecDeque<Notice>,
    /// The addresses that peers may take to be at this machine.
    pub heard: BTreeSet<Address>,
    queue: VecDeque<Waiting>,
    bytes: usize,
}

impl Port {
    /// With nothing that waits.
    pub fn new(kind: Kind) -> Port {
        Port {
            kind,
            counters: Counters::default(),
            notices: VecDeque::new(),
            heard: BTreeSet::new(),
            queue: VecDeque::new(),
            bytes: 0,
        }
    }

    /// Adds a frame; the oldest make room.
    pub fn push(&mut self, waiting: Waiting) {
        self.bytes += waiting.frame.len();
        self.queue.push_back(waiting);
        while self.queue.len() > FRAMES_MAX || self.bytes > BYTES_MAX {
            self.pop();
            self.counters.overflowed += 1;
        }
    }

    /// Takes the oldest frame off.
    pub fn pop(&mut self) -> Option<Waiting> {
        let waiting = self.queue.pop_front()?;
        self.bytes -= waiting.frame.len();
        Some(waiting)
    }

    /// What waits, the oldest first.
    pub fn waiting(&self) -> &VecDeque<Waiting> {
        &self.queue
    }

    /// Adds a notice, unless there are too many.
    pub fn tell(&mut self, notice: Notice) {
        if self.notices.len() < NOTICES_MAX {
            self.notices.push_back(notice);
        }
    }

    /// An address was heard here for the first time.
    pub fn hear(&mut self, address: Address) {
        if !self.kind.is_peer() {
            self.heard.insert(address);
        }
        if self.heard.len() > HEARD_MAX {
            self.heard.pop_first();
        }
    }

    /// Takes the frames off that `leave`, in their order.
    pub fn extract(&mut self, leave: impl Fn(&Waiting) -> bool) -> Vec<Waiting> {
        if !self.queue.iter().any(&leave) {
            return Vec::new();
        }
        let (left, stay): (Vec<_>, Vec<_>) = self.queue.drain(..).partition(leave);
        self.queue = stay.into();
        self.bytes = self.queue.iter().map(|waiting| waiting.frame.len()).sum();
        left
    }

    /// Drops the frames that `leave`, and counts them.
    pub fn drop_stale(&mut self, leave: impl Fn(&Waiting) -> bool) {
        self.counters.stale += self.extract(leave).len() as u64;
    }

    /// Drops the frames that came before `oldest`.
    pub fn drop_before(&mut self, oldest: u64) {
        while self.queue.front().is_some_and(|first| first.since < oldest) {
            self.pop();
            self.counters.stale += 1;
        }
    }
}
