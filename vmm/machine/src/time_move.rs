//! The owner's part in the timekeeper's role: guest time starts where the timekeeper is, and
//! another slice takes over.

use weft_aggregate::commands::{KeptTime, SliceCommand, SliceReply};
use weft_aggregate::time_role::{TakeOverError, take_over};
use weft_aggregate::{Slice, Timekeeper};

use super::lifecycle::{Refusal, Stage};
use super::move_report::{MOVE_TIME as REQUEST, TimeMoveReport};
use super::owner::Owner;

impl Owner {
    /// Guest time goes on from where it stands. What secondaries need to know of it: the
    /// guest's TSC minus the timekeeper's host's, and its value at time zero.
    pub(super) fn start_time(&self, request: &'static str) -> Result<(u64, u64), Refusal> {
        if let Some((slice, timekeeper)) = self.time_role() {
            let (tsc, tsc_zero) = (self.clock.now(), self.clock.zero());
            let start = SliceCommand::StartTime { tsc, tsc_zero };
            let started = tell(slice, timekeeper, timekeeper.keeper().0, &start);
            let led = started.and_then(|reply| match reply {
                SliceReply::Time(kept) => timekeeper
                    .lead(kept.offset, tsc_zero)
                    .map(|()| (kept.offset, tsc_zero)),
                other => Err(format!("the timekeeper replied {other:?}")),
            });
            let led = led.map_err(|reason| {
                let refusal = refused(request, reason);
                self.fail(&refusal);
                refusal
            });
            self.clock.go();
            return led;
        }
        self.clock.go();
        Ok((self.clock.offset(), self.clock.zero()))
    }

    /// Has another slice keep the time. Refused with all as before, or done; otherwise the
    /// machine ends.
    pub(super) fn move_time(&self, to: usize) -> Result<TimeMoveReport, Refusal> {
        if !matches!(self.stage, Stage::Running | Stage::Paused) {
            return Err(Refusal::Stage {
                request: REQUEST,
                stage: self.stage,
            });
        }
        let role = self.time_role();
        let (slice, timekeeper) =
            role.ok_or_else(|| impossible("the machine runs on one node only".into()))?;
        let (from, epoch) = timekeeper.keeper();
        slice.check_member(to).map_err(impossible)?;
        if to == from {
            return Err(impossible(format!("node {to} keeps the time already")));
        }
        let kept = self.take_over(slice, timekeeper, (from, epoch), to)?;
        Ok(TimeMoveReport {
            from,
            to: kept.keeper,
            epoch: kept.epoch,
        })
    }

    /// Tells a node that has joined who keeps the time. What it needs to know of it: see
    /// [`Owner::start_time`].
    pub(super) fn announce_time(&self) -> Result<(u64, u64), Refusal> {
        let (offset, zero) = (self.clock.offset(), self.clock.zero());
        let Some((slice, timekeeper)) = self.time_role() else {
            return Ok((offset, zero));
        };
        match timekeeper.keeper() {
            // What every slice begins with.
            (_, 0) => Ok((offset, zero)),
            (keeper, epoch) => {
                let kept = self.take_over(slice, timekeeper, (keeper, epoch), keeper)?;
                Ok((kept.offset, zero))
            }
        }
    }

    /// On a new node 0: follows the node that keeps the time. The others hear of it, too.
    pub(super) fn follow_time(&self, (keeper, epoch): (usize, u64)) -> Result<(), Refusal> {
        let Some((slice, timekeeper)) = self.time_role() else {
            return Ok(());
        };
        self.take_over(slice, timekeeper, (keeper, epoch), keeper)
            .map(drop)
    }

    /// Whether a node keeps the time.
    pub(super) fn keeps_time(&self, node: usize) -> bool {
        let role = self.time_role();
        role.is_some_and(|(_, timekeeper)| timekeeper.keeper().0 == node)
    }

    fn take_over(
        &self,
        slice: &Slice,
        timekeeper: &Timekeeper,
        from: (usize, u64),
        to: usize,
    ) -> Result<KeptTime, Refusal> {
        let members: Vec<usize> = slice.members().into_iter().collect();
        let mut tell = |to: usize, command: &SliceCommand| tell(slice, timekeeper, to, command);
        take_over(from, to, &members, &mut tell).map_err(|error| match error {
            TakeOverError::Kept(..) => impossible(error.to_string()),
            TakeOverError::Broken(..) => {
                let refusal = refused(REQUEST, error.to_string());
                self.fail(&refusal);
                refusal
            }
        })
    }

    /// On the primary of several slices.
    fn time_role(&self) -> Option<(&Slice, &Timekeeper)> {
        let slice = self.slice.as_deref().filter(|slice| slice.is_primary());
        slice.zip(self.timekeeper.as_deref())
    }
}

/// Gives a command to a slice, or to this one.
fn tell(
    slice: &Slice,
    timekeeper: &Timekeeper,
    to: usize,
    command: &SliceCommand,
) -> Result<SliceReply, String> {
    match to == slice.number() {
        true => timekeeper.carry_out(command),
        false => slice.command(to, command),
    }
}

fn impossible(reason: String) -> Refusal {
    Refusal::Impossible {
        request: REQUEST,
        reason,
    }
}

fn refused(request: &'static str, reason: String) -> Refusal {
    Refusal::Failed { request, reason }
}
