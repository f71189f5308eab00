//! The platform of a machine, which is the I/O APIC and the small devices, goes to another
//! slice: see docs/roles.md. The machine is paused, so no access to a device, interrupt or EOI
//! is on its way.
//!
//! Invariants: at most one slice has the platform; while none has it, its state is in one
//! message. The switch is the step in which the taker restores the state.

use std::collections::BTreeSet;

use thiserror::Error;

use super::commands::{SliceCommand, SliceReply};

/// Why a slice did not get the platform.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum HandOverError {
    /// The old holder has it as before.
    #[error("{0}; node {1} still has the platform")]
    Kept(String, usize),
    /// None has it, or not all slices know which one has.
    #[error("{0}, and then: {1}")]
    Broken(String, String),
}

/// The platform after it went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandedOver {
    pub epoch: u64,
    /// Of the message that carried it.
    pub state_bytes: usize,
}

/// Has slice `to` take the platform of `from`, which has it since `epoch`, in a machine of
/// the slices `members`. `tell` gives a slice a command and waits for its reply.
pub fn hand_over(
    (from, epoch): (usize, u64),
    to: usize,
    members: &BTreeSet<usize>,
    tell: &mut impl FnMut(usize, &SliceCommand) -> Result<SliceReply, String>,
) -> Result<HandedOver, HandOverError> {
    let kept = |reason| HandOverError::Kept(reason, from);
    let taken = epoch + 1;
    let given = tell(from, &SliceCommand::GivePlatform { to, epoch: taken });
    let state = match given.map_err(kept)? {
        SliceReply::Platform(state) => state,
        other => return Err(kept(format!("node {from} replied {other:?}"))),
    };
    let state_bytes = state.to_string().len();
    let take = SliceCommand::TakePlatform {
        epoch: taken,
        state: state.clone(),
    };
    if let Err(reason) = tell(to, &take) {
        let epoch = taken + 1;
        // The taker first: one that has taken it refuses this, so no two have it.
        let back = tell(to, &at(from, epoch));
        let back = back.and_then(|_| tell(from, &SliceCommand::TakePlatform { epoch, state }));
        return Err(match back {
            Ok(_) => kept(reason),
            Err(second) => HandOverError::Broken(reason, second),
        });
    }
    let others = members.iter().filter(|slice| ![from, to].contains(slice));
    for slice in others {
        if let Err(second) = tell(*slice, &at(to, taken)) {
            let first = format!("node {to} has the platform");
            return Err(HandOverError::Broken(first, second));
        }
    }
    Ok(HandedOver {
        epoch: taken,
        state_bytes,
    })
}

fn at(holder: usize, epoch: u64) -> SliceCommand {
    SliceCommand::PlatformAt { holder, epoch }
}

#[cfg(test)]
mod simulation;
