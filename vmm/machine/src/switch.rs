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
//! the machine as it was, a pause of the user included. A refusal behind it leaves what has moved
//! where it is, and the migration puts it back.

use std::time::{Duration, Instant};

use weft_aggregate::Slice;
use weft_aggregate::commands::{SliceCommand, SliceReply};
use weft_aggregate::membership::ChangeError;

use super::lifecycle::{MIGRATE, Refusal};
use super::membership::impossible;
use super::owner::Owner;
use super::switch_order::{SwitchOrder, Switched};

/// Between two looks at the last pages.
const LOOK: Duration = Duration::from_micros(200);
/// Longest time in which the nodes must come to rest.
const REST_WAIT: Duration = Duration::from_secs(1);

impl Owner {
    /// Carries out a switch. If it has not happened, all is as before; if it is refused, the
    /// machine runs or stands as before.
    pub(super) fn switch(&mut self, order: &SwitchOrder) -> Result<Switched, Refusal> {
        let begun = Instant::now();
        let act = |owner: &mut Self| owner.switch_standing(order, begun);
        let (mut switched, stood) = self.while_standing(MIGRATE, act)?;
        switched.times.stopped_ns = stood.as_nanos() as u64;
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
        let times = &mut switched.times;
        times.paused_ns = nanoseconds(begun);
        let has_all = send_last(&slice, order)?;
        times.copied_ns = nanoseconds(begun);
        if order.needs_all && !has_all {
            return Ok(switched);
        }
        for (source, _) in &order.parts {
            command(&slice, *source, &SliceCommand::StopMoves)?;
        }
        // All slices check the records of the pages that are relocated.
        if let Err(reason) = slice.rest_all_unchecked(REST_WAIT) {
            return Err(impossible(MIGRATE, reason));
        }
        times.rested_ns = nanoseconds(begun);
        let moved = self.move_at_rest(&slice, order, &mut switched, begun);
        slice.end_rest_all();
        moved?;
        switched.is_done = true;
        Ok(switched)
    }

    /// Pages, roles and vCPUs. The rest ends behind them: memory that goes back to the host
    /// then would keep a processor busy for which vCPUs wait.
    fn move_at_rest(
        &mut self,
        slice: &Slice,
        order: &SwitchOrder,
        switched: &mut Switched,
        begun: Instant,
    ) -> Result<(), Refusal> {
        self.relocate(slice, order, switched)?;
        switched.times.relocated_ns = nanoseconds(begun);
        self.move_roles(slice, order.roles)?;
        for (vcpu, to) in &order.vcpus {
            // It may have gone there by itself.
            if slice.locations().of(*vcpu).map(|at| at.slice) != Some(*to) {
                self.move_vcpu(*vcpu, *to, false)?;
                switched.vcpus += 1;
            }
        }
        Ok(())
    }

    fn relocate(
        &self,
        slice: &Slice,
        order: &SwitchOrder,
        switched: &mut Switched,
    ) -> Result<(), Refusal> {
        for (source, shares) in &order.parts {
            match slice.relocate_all(*source, shares.clone()) {
                Ok(relocated) => {
                    switched.pages += relocated.with_bytes;
                    switched.left.push((*source, relocated.left));
                }
                Err(ChangeError::Undone(reason)) => return Err(impossible(MIGRATE, reason)),
                Err(ChangeError::Broken(reason)) => return Err(self.failed(MIGRATE, &reason)),
            }
        }
        Ok(())
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

fn nanoseconds(since: Instant) -> u64 {
    since.elapsed().as_nanos() as u64
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
