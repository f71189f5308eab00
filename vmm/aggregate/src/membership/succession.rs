//! Another process takes the place of slice 0 while the other slices stay: the *heir*.
//! `docs/roles.md` has the sequence.
//!
//! ```text
//!  slice 0            others              heir
//!    │ ── YieldTo ──────▶ │                 │   slice 0 has no page, and no record mentions it
//!    │                    │ ◀── Succeeds ── │   links change their numbers
//!    │                    │ ─ Introduced ─▶ │
//!    │                    │ ◀── Present ─── │   decided: the old link ends
//!    │ ── GoesOn ───────▶ │                 │   or: the heir is gone, and slice 0 goes on
//! ```
//!
//! Invariant: until `Present` the heir uses no page, so slice 0 can go on as it was.

use std::time::Duration;

use weft_dsm::{NodeId, Standing};

use super::Step;
use crate::commands::{PageRun, SliceCommand, SliceReply};
use crate::message::SliceMessage;
use crate::{PRIMARY, Slice};

/// Longest wait for the heir's link, which was made before.
const LINK_WAIT: Duration = Duration::from_secs(2);

impl Slice {
    /// On the primary, which has nothing any more: the process at the links with the number
    /// `heir` may take its place. From now on no other slice's loss is heard of.
    ///
    /// # Errors
    /// A slice has no such link, or is lost. [`Slice::go_on`] undoes it.
    pub fn yield_to_heir(&self, heir: usize) -> Result<(), String> {
        self.command_all(&SliceCommand::YieldTo { heir })?;
        self.peers.ignore_losses(true);
        Ok(())
    }

    /// Whether the heir may have taken the primary's place: the others may not answer this slice.
    pub fn has_yielded(&self) -> bool {
        self.peers.are_losses_ignored()
    }

    /// On the primary: the heir is gone. All is as before for the other slices, as soon as they
    /// have heard of it, which is before they get another command.
    pub fn go_on(&self) {
        self.peers.ignore_losses(false);
        self.peers.broadcast(&SliceMessage::GoesOn);
    }

    /// On a secondary: what the primary's `YieldTo` says. May wait; not on a thread that reads
    /// a link.
    pub fn yield_primary_to(&self, heir: usize) -> SliceReply {
        match self.peers.yield_to(heir, LINK_WAIT) {
            Ok(()) => SliceReply::Done,
            Err(reason) => SliceReply::Refused(reason),
        }
    }

    /// On the heir: takes the place of slice 0 at all other slices, and learns where the vCPUs
    /// are. It uses no page before it is a member.
    ///
    /// # Errors
    /// A slice is lost, or does not answer.
    pub fn succeed(&self) -> Result<(), String> {
        self.peers.broadcast(&SliceMessage::Succeeds);
        let (node, step) = (PRIMARY, Step::Introduce);
        self.command_all(&SliceCommand::Membership { node, step })?;
        self.membership.meet(2 * self.lease)
    }

    /// Pages that are managed otherwise than at the start, for the heir.
    pub fn manager_runs(&self) -> Vec<PageRun> {
        let (runs, _) = self.memory.managers(0, usize::MAX);
        let run = |run: weft_coherent_memory::ManagerRun| PageRun {
            first: run.first,
            count: run.count,
            manager: run.manager.index(),
        };
        runs.into_iter().map(run).collect()
    }

    /// On a secondary: node 0 is a member; if that is the heir, the old process cannot go on any
    /// more. What was counted of its messages is forgotten, as of a node that left.
    pub(super) fn settle_primary(&self) -> Result<(), String> {
        if self.peers.settle() {
            let left = self
                .memory
                .set_member(NodeId(PRIMARY as u8), Standing::Absent);
            left.map_err(|error| error.to_string())?;
            // The old one, which had paused them, is gone.
            self.membership.pause_exchanges(false);
        }
        Ok(())
    }
}
