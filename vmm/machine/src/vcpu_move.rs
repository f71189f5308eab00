//! The owner's part in moving a vCPU between slices: what is refused, and when the machine
//! ends.

use std::time::Duration;

use weft_aggregate::commands::SliceCommand;
use weft_aggregate::{MoveError, Slice};

use super::lifecycle::{End, Refusal, Stage};
use super::move_report::{REQUEST, VcpuMoveReport};
use super::owner::Owner;
use super::wanted_moves::is_current;

/// Longest that a move may take: as long as a vCPU may take for any order, and a message
/// each way.
const MOVE_WAIT: Duration = Duration::from_secs(12);
/// Why a vCPU may not come by itself.
const NO_PROCESSOR: &str = "this node has no processor to spare";

impl Owner {
    /// Moves a vCPU. A refusal changes nothing. A move that was begun and cannot end stops
    /// the machine, because the location of the vCPU is unknown then.
    /// `by_itself`: it needs a processor that no other vCPU uses.
    pub(super) fn move_vcpu(
        &self,
        vcpu: u32,
        to: usize,
        by_itself: bool,
    ) -> Result<VcpuMoveReport, Refusal> {
        if !matches!(self.stage, Stage::Running | Stage::Paused) {
            // The command that comes too late learns the reason, a lost node for example.
            if let Some(End::Failed { reason }) = self.shutdown.wanted() {
                return Err(failed(reason));
            }
            return Err(Refusal::Stage {
                request: REQUEST,
                stage: self.stage,
            });
        }
        let slice = self.slice.as_deref().filter(|slice| slice.is_primary());
        let slice = slice.ok_or_else(|| impossible("the machine runs on one node only".into()))?;
        check(slice, vcpu, to).map_err(impossible)?;
        if to != slice.number() {
            let expect = SliceCommand::ExpectVcpu {
                vcpu,
                back_end: self.back_end.to_owned(),
                by_itself,
            };
            slice
                .command(to, &expect)
                .map_err(|reason| match self.lost() {
                    Some(lost) => failed(lost),
                    None => impossible(reason),
                })?;
        } else if by_itself && !self.has_spare_processor() {
            return Err(impossible(NO_PROCESSOR.into()));
        }
        match slice.vcpu_moves().start(vcpu, to, MOVE_WAIT) {
            Ok(moved) => Ok(VcpuMoveReport::new(&moved, self.clock.base())),
            Err(error) if error.is_harmless() => {
                Err(impossible(format!("{error}; it stays where it was")))
            }
            Err(error) => Err(self.interrupted_move(vcpu, &error)),
        }
    }

    /// Carries out the moves that vCPUs asked for. One that is refused is dropped: its vCPU
    /// asks again later.
    pub(super) fn move_wanted(&mut self) {
        for (vcpu, from, wanted) in self.wanted_moves.take() {
            let locations = self.slice.as_deref().map(|slice| slice.locations());
            let is_current =
                locations.is_some_and(|locations| is_current(locations, (vcpu, from), wanted));
            if is_current && self.stage == Stage::Running && self.shutdown.wanted().is_none() {
                let _ = self.move_vcpu(vcpu, wanted.slice, true);
            }
        }
    }

    /// Whether a vCPU that comes by itself finds a processor here.
    pub(super) fn has_spare_processor(&self) -> bool {
        let busy = self.runners.iter().filter(|runner| runner.is_running());
        busy.count() < self.processors
    }

    /// A vCPU left, and nobody knows whether it arrived.
    fn interrupted_move(&self, vcpu: u32, error: &MoveError) -> Refusal {
        // A lost node is reported by the name that it was reported lost with.
        let reason = self
            .lost()
            .unwrap_or_else(|| format!("vCPU {vcpu} was on its way: {error}"));
        let refusal = failed(reason);
        self.shutdown.end(End::Failed {
            reason: refusal.to_string(),
        });
        refusal
    }

    /// Why the machine is about to end, if it is.
    fn lost(&self) -> Option<String> {
        self.shutdown.wanted().map(|end| match end {
            End::Failed { reason } => reason,
            end => end.to_string(),
        })
    }

    /// On a secondary: whether a vCPU of the primary's back end can come here.
    pub(super) fn expect_vcpu(
        &self,
        vcpu: u32,
        back_end: &str,
        by_itself: bool,
    ) -> Result<(), Refusal> {
        if back_end != self.back_end {
            let ours = self.back_end;
            return Err(impossible(format!(
                "the vCPU's back end is {back_end}, this node's is {ours}"
            )));
        }
        if !self.runners.iter().any(|runner| runner.id() == vcpu) {
            return Err(impossible(format!(
                "this node has no thread for vCPU {vcpu}"
            )));
        }
        if by_itself && !self.has_spare_processor() {
            return Err(impossible(NO_PROCESSOR.into()));
        }
        Ok(())
    }
}

/// What can be seen without asking anybody.
fn check(slice: &Slice, vcpu: u32, to: usize) -> Result<(), String> {
    let locations = slice.locations();
    let Some(known) = locations.of(vcpu) else {
        let last = locations.cpus().saturating_sub(1);
        return Err(format!("vCPU {vcpu} does not exist: there are 0 to {last}"));
    };
    slice.check_member(to)?;
    match known.slice == to {
        true => Err(format!("vCPU {vcpu} is on node {to} already")),
        false => Ok(()),
    }
}

fn impossible(reason: String) -> Refusal {
    Refusal::Impossible {
        request: REQUEST,
        reason,
    }
}

fn failed(reason: String) -> Refusal {
    Refusal::Failed {
        request: REQUEST,
        reason,
    }
}
