//! What a session has reserved for one node, until its slice starts: memory, and the
//! links that were dialled or are still to come.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use weft_proc::boot::MAX_NODES;

use super::budget::Reservation;
use super::dial::Dialled;
use super::expected::{Awaited, LINK_BOUND};
use super::memory::{Keeper, MemoryError};
use super::shared::Shared;
use crate::links::{Link, Links};
use crate::shared::SharedMemory;
use crate::size::PAGE_BYTES;

/// Why a slice lacks a link that was announced.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// Whatever was to dial did not.
    #[error("the link to node {peer} did not come within {} s", LINK_BOUND.as_secs())]
    NoLink {
        /// The node at its other end.
        peer: usize,
    },
    /// It came, and the kernel refused to watch over it.
    #[error("the link to node {peer} cannot be watched")]
    Unwatched {
        /// The node at its other end.
        peer: usize,
        /// What the kernel said.
        source: io::Error,
    },
}

/// A reservation and what was prepared on it.
pub(super) struct Reserved {
    pub(super) node: u32,
    pub(super) lease: Duration,
    pub(super) reservation: Arc<Reservation>,
    pub(super) shared: SharedMemory,
    pub(super) links: Links,
    /// Links that somebody is going to dial, with the node at their other end.
    pub(super) awaited: Vec<(usize, Awaited)>,
    /// Control connections to the daemons of other nodes, for a process that inherits their
    /// slices.
    pub(super) inherits: Vec<Inherited>,
}

/// A slice that a process inherits.
pub(super) struct Inherited {
    pub(super) node: u32,
    pub(super) daemon: Dialled,
}

pub(super) fn no_links() -> Links {
    (0..MAX_NODES).map(|_| None).collect()
}

/// The links of one start: those that were dialled, and those still to come. Dropped,
/// they are gone, and so are their tickets.
pub(super) struct Promised {
    links: Links,
    awaited: Vec<(usize, Awaited)>,
    lease: Duration,
}

impl Reserved {
    /// What keeps a slice within this reservation.
    pub(super) fn keeper(&self, daemon: &Shared) -> Result<Keeper, MemoryError> {
        let lent_bytes = self.reservation.pages * PAGE_BYTES;
        Keeper::new(daemon.cgroups.as_ref().ok(), lent_bytes)
    }

    /// All links that were announced, for a start: whatever becomes of it, the next
    /// has links of its own.
    pub(super) fn take_links(&mut self) -> Promised {
        Promised {
            links: std::mem::replace(&mut self.links, no_links()),
            awaited: std::mem::take(&mut self.awaited),
            lease: self.lease,
        }
    }
}

impl Promised {
    /// Waits for those still to come.
    pub(super) fn collect(mut self) -> Result<Links, LinkError> {
        let deadline = Instant::now() + LINK_BOUND;
        let lease_ms = self.lease.as_millis() as u32;
        for (peer, awaited) in self.awaited {
            let left = deadline.saturating_duration_since(Instant::now());
            let keyed = awaited.wait(left).ok_or(LinkError::NoLink { peer })?;
            let link = Link::keyed(keyed, lease_ms);
            self.links[peer] = Some(link.map_err(|source| LinkError::Unwatched { peer, source })?);
        }
        Ok(self.links)
    }
}
