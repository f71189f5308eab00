//! Queues of disks and networks are served by other slices from now on: see docs/roles.md. The
//! machine is paused and its links are quiet, so no queue is served, and no request, kick or
//! report of a queue is on its way. Only frames for the guest may be, from a network's slice to
//! one that gives a pair away, which gives them back.
//!
//! ```text
//!   owner ── CheckQueues(epoch, servers) ──▶ all       one that refuses: all is as before
//!   owner ── PlaceQueues(epoch, servers), Settle ──▶ takers    the switch
//!   owner ── PlaceQueues(epoch, servers), Settle ──▶ others
//! ```
//!
//! Invariants: at most one slice serves a queue, and with one epoch all slices agree on which;
//! a slice that takes a pair of a network has emptied its end of the way before the network's
//! slice sends to it.

use std::collections::BTreeSet;

use thiserror::Error;

use super::commands::{SliceCommand, SliceReply};
use super::remote_devices::{Servers, takers};

/// Why queues are not served where they should be.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum MoveQueuesError {
    /// All is as before.
    #[error("{0}; the queues are where they were")]
    Refused(String),
    /// Not all slices know where queues are served.
    #[error("{0}, while queues went to another node")]
    Broken(String),
}

/// Has all slices of a machine, `members`, serve the queues as `to` says instead of `from`,
/// which holds since `epoch`. `tell` gives a slice a command and waits for its reply. Returns
/// the new epoch.
pub fn move_queues(
    (epoch, from): (u64, &Servers),
    to: &Servers,
    members: &BTreeSet<usize>,
    tell: &mut impl FnMut(usize, &SliceCommand) -> Result<SliceReply, String>,
) -> Result<u64, MoveQueuesError> {
    let epoch = epoch + 1;
    let check = SliceCommand::CheckQueues {
        epoch,
        servers: to.clone(),
    };
    for slice in members {
        tell(*slice, &check).map_err(MoveQueuesError::Refused)?;
    }
    let place = SliceCommand::PlaceQueues {
        epoch,
        servers: to.clone(),
    };
    let takers = takers(from, to);
    let others = members.difference(&takers);
    for slice in takers.iter().chain(others) {
        tell(*slice, &place).map_err(MoveQueuesError::Broken)?;
        // What a network's slice sent before has arrived when a pair is given away, and what
        // is given back when the machine goes on.
        tell(*slice, &SliceCommand::Settle).map_err(MoveQueuesError::Broken)?;
    }
    Ok(epoch)
}

#[cfg(test)]
mod simulation;
