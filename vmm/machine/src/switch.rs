//! The switch of a migration: the machine stands once, and then roles, vCPUs, and all pages
//! whose bytes were sent ahead are elsewhere. `docs/membership.md` has the reasons.
//!
//! ```text
//!  pause ─▶ the last bytes are sent ─▶ rest of all nodes ─▶ relocation ─▶ platform, time, vCPUs ─▶ run
//!                 │ not in time                │ not in time      │ refused
//!                 └────────────────────────────┴─────▶ run ◀──────┘
//! ```
//!
//! Invariant: until the relocation nothing has moved, and a switch that does not happen leaves
//! the machine as it was, a pause of the user included.

use std::time::{Duration, Instant};

use weft_aggregate::Slice;
use weft_aggregate::commands::{DrainShare, SliceCommand, SliceReply};
use weft_aggregate::membership::ChangeError;
use weft_aggregate::relocation::Relocated;

use super::lifecycle::{MIGRATE, Refusal, Stage};
use super::membership::impossible;
use super::owner::{Owner, refused};

/// Between two looks at the last pages.
const LOOK: Duration = Duration::from_micros(200);
/// Longest time in which the nodes must come to rest.
const REST_WAIT: Duration = Duration::from_secs(1);

/// What a switch moves.
#[derive(Clone, Debug)]
pub struct SwitchOrder {
    /// By node that gives its pages away, which are being sent ahead: what goes where.
    pub parts: Vec<(usize, Vec<DrainShare>)>,
    /// vCPUs, and where they go.
    pub vcpus: Vec<(u32, usize)>,
    /// Where platform and timekeeper go.
    pub roles: usize,
    /// Longest time in which the last bytes are sent while the machine stands.
    pub copy_max: Duration,
    /// The switch happens only if they were all sent within that time.
    pub needs_all: bool,
}

/// What a switch did.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Switched {
    /// It happened.
    pub is_done: bool,
    /// How long the machine stood.
    pub stopped: Duration,
    /// Of it, until the last bytes were sent.
    pub copied: Duration,
    /// Of it, until all nodes rested.
    pub rested: Duration,
    /// Of it, until the pages had their new owner.
    pub relocated: Duration,
    pub pages: Relocated,
    pub vcpus: usize,
}

impl Owner {
    /// Carries out a switch. If it is refused, or has not happened, all is as before.
    pub(super) fn switch(&mut self, order: &SwitchOrder) -> Result<Switched, Refusal> {
        if !matches!(self.stage, Stage::Running | Stage::Paused) {
            return Err(Refusal::Stage {
                request: MIGRATE,
                stage: self.stage,
            });
        }
        let is_running = self.stage == Stage::Running;
        let begun = Instant::now();
        if is_running {
            self.pause(MIGRATE)?;
        }
        let switched = self.switch_standing(order, begun);
        // What it failed of ends the machine.
        if is_running && !matches!(switched, Err(Refusal::Failed { .. })) {
            self.run_vcpus(MIGRATE)?;
        }
        let mut switched = switched?;
        if is_running {
            switched.stopped = begun.elapsed();
        }
        Ok(switched)
    }

    fn switch_standing(
        &mut self,
        order: &SwitchOrder,
        begun: Instant,
    ) -> Result<Switched, Refusal> {
        let slice = self.slice.clone().filter(|slice| slice.is_primary());
        let slice =
            slice.ok_or_else(|| impossible(MIGRATE, "the machine runs on one node only".into()))?;
        let mut switched = Switched::default();
        let has_all = send_last(&slice, order)?;
        switched.copied = begun.elapsed();
        if order.needs_all && !has_all {
            return Ok(switched);
        }
        for (source, _) in &order.parts {
            command(&slice, *source, &SliceCommand::StopMoves)?;
        }
        if let Err(reason) = slice.rest_all(REST_WAIT) {
            return Err(impossible(MIGRATE, reason));
        }
        switched.rested = begun.elapsed();
        let pages = self.relocate(&slice, order);
        slice.end_rest_all();
        switched.pages = pages?;
        switched.relocated = begun.elapsed();
        self.move_roles(&slice, order.roles)?;
        for (vcpu, to) in &order.vcpus {
            // It may have gone there by itself.
            if slice.locations().of(*vcpu).map(|at| at.slice) != Some(*to) {
                self.move_vcpu(*vcpu, *to, false)?;
                switched.vcpus += 1;
            }
        }
        switched.is_done = true;
        Ok(switched)
    }

    fn relocate(&self, slice: &Slice, order: &SwitchOrder) -> Result<Relocated, Refusal> {
        let mut all = Relocated::default();
        for (source, shares) in &order.parts {
            match slice.relocate_all(*source, shares.clone()) {
                Ok(pages) => all.add(pages),
                Err(ChangeError::Undone(reason)) => return Err(impossible(MIGRATE, reason)),
                Err(ChangeError::Broken(reason)) => {
                    let refusal = refused(MIGRATE, reason);
                    self.fail(&refusal);
                    return Err(refusal);
                }
            }
        }
        Ok(all)
    }

    fn move_roles(&mut self, slice: &Slice, to: usize) -> Result<(), Refusal> {
        if slice.platform().holder() != to {
            self.move_platform(to)?;
        }
        if slice.timekeeper_number() != to {
            self.move_time(to)?;
        }
        Ok(())
    }
}

/// Has the sources send what the guest wrote last; whether all was sent in time.
fn send_last(slice: &Slice, order: &SwitchOrder) -> Result<bool, Refusal> {
    let deadline = Instant::now() + order.copy_max;
    loop {
        let mut is_settled = true;
        for (source, _) in &order.parts {
            match command(slice, *source, &SliceCommand::PrecopyProgress)? {
                SliceReply::Precopied(report) => is_settled &= report.is_settled,
                other => {
                    let reason = format!("node {source} answered {other:?}");
                    return Err(impossible(MIGRATE, reason));
                }
            }
        }
        if is_settled || Instant::now() > deadline {
            return Ok(is_settled);
        }
        std::thread::sleep(LOOK);
    }
}

fn command(slice: &Slice, node: usize, command: &SliceCommand) -> Result<SliceReply, Refusal> {
    let replied = slice.command_drain(node, command);
    replied.map_err(|reason| impossible(MIGRATE, reason))
}
