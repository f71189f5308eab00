//! The control loop of a secondary: carries out the primary's commands until the links end.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use weft_aggregate::commands::{CommandReceiver, SliceCommand, SliceReply};
use weft_aggregate::{HostFile, Slice, Timekeeper};
use weft_checkpoint::FileName;

use super::handle::Handle;
use super::lifecycle::{MachineReply, MachineRequest, Refusal, Stage};
use super::page_writer::NewPages;
use super::restoring::HostPages;

/// How often it checks whether the machine has ended.
const LOOK: Duration = Duration::from_millis(500);

/// What the thread of the control loop needs.
pub(super) struct ControlLoop {
    pub slice: Arc<Slice>,
    pub timekeeper: Arc<Timekeeper>,
    pub handle: Handle,
    pub commands: CommandReceiver,
}

impl ControlLoop {
    /// Carries out commands until the machine has ended everywhere. One that ended here by
    /// itself still replies: the primary must not wait for it.
    pub fn run(self) {
        while self.handle.wait(Duration::ZERO).is_none() || !self.slice.has_heard_stop() {
            let (ticket, json) = match self.commands.recv_timeout(LOOK) {
                Ok(command) => command,
                Err(RecvTimeoutError::Timeout) => continue,
                Err(RecvTimeoutError::Disconnected) => return,
            };
            let reply = match serde_json::from_slice(&json) {
                Ok(SliceCommand::Stop) => {
                    // The links end with the machine, so the reply is sent first.
                    self.slice.reply(ticket, &SliceReply::Done);
                    self.slice.hear_stop();
                    let _ = self.handle.request(MachineRequest::Stop);
                    return;
                }
                Ok(command) => self
                    .carry_out(&command)
                    .unwrap_or_else(|refusal| SliceReply::Refused(refusal.to_string())),
                Err(error) => SliceReply::Refused(format!("a malformed command: {error}")),
            };
            self.slice.reply(ticket, &reply);
        }
    }

    fn serve_pages(
        &self,
        files: &serde_json::Value,
        readers: &BTreeSet<usize>,
    ) -> Result<(), String> {
        let names: Vec<FileName> = serde_json::from_value(files.clone())
            .map_err(|error| format!("the names of files: {error}"))?;
        let host_files = self.slice.host_files();
        let take = |(name, number)| Ok((host_files.take(HostFile::Saved(number))?, name));
        let files = names.into_iter().zip(0..).map(take);
        let pages = HostPages::open(files.collect::<Result<_, String>>()?)?;
        self.slice.serve_pages(Arc::new(pages), readers.clone());
        Ok(())
    }

    fn reply_of_owner(&self, request: MachineRequest) -> Result<SliceReply, Refusal> {
        Ok(match self.handle.request(request)? {
            MachineReply::OfSlice(reply) => reply,
            other => SliceReply::Refused(format!("{other:?}")),
        })
    }

    fn carry_out(&self, command: &SliceCommand) -> Result<SliceReply, Refusal> {
        match command {
            SliceCommand::Run {
                tsc_offset,
                tsc_zero,
                updated,
            } => {
                for range in updated {
                    self.slice.memory().subscribe(range);
                }
                if let Err(reason) = self.timekeeper.lead(*tsc_offset, *tsc_zero) {
                    return Ok(SliceReply::Refused(reason));
                }
                let built = self.handle.status()?.stage == Stage::Built;
                self.handle.request(match built {
                    true => MachineRequest::Run,
                    false => MachineRequest::Resume,
                })?;
            }
            SliceCommand::ExpectVcpu {
                vcpu,
                back_end,
                by_itself,
            } => drop(self.handle.request(MachineRequest::ExpectVcpu {
                vcpu: *vcpu,
                back_end: back_end.clone(),
                by_itself: *by_itself,
            })?),
            SliceCommand::KeepTime { .. }
            | SliceCommand::FollowTime(_)
            | SliceCommand::StartTime { .. }
            | SliceCommand::StandAt { .. } => {
                let carried_out = self.timekeeper.carry_out(command);
                return Ok(carried_out.unwrap_or_else(SliceReply::Refused));
            }
            SliceCommand::SavePlatform
            | SliceCommand::GivePlatform { .. }
            | SliceCommand::TakePlatform { .. }
            | SliceCommand::PlatformAt { .. } => {
                let request = MachineRequest::Platform(command.clone());
                return self.reply_of_owner(request);
            }
            SliceCommand::CheckQueues { .. } | SliceCommand::PlaceQueues { .. } => {
                return self.reply_of_owner(MachineRequest::Queues(command.clone()));
            }
            SliceCommand::PressPowerButton => {
                drop(self.handle.request(MachineRequest::PressPowerButton)?);
            }
            SliceCommand::Pause => drop(self.handle.request(MachineRequest::Pause)?),
            SliceCommand::Settle => {
                if let Err(reason) = self.slice.settle() {
                    return Ok(SliceReply::Refused(reason));
                }
            }
            SliceCommand::Stop => {}
            SliceCommand::Status => return Ok(SliceReply::Status(self.handle.status()?.vcpus)),
            SliceCommand::CutPages {
                identity,
                file,
                way,
                base,
            } => {
                let pages = NewPages {
                    identity: *identity,
                    file: *file,
                    base: *base,
                };
                let way = *way;
                let request = MachineRequest::CutPages { pages, way };
                drop(self.handle.request(request)?);
            }
            SliceCommand::SaveProgress => return Ok(self.handle.writer.report()),
            SliceCommand::EndSave => self.handle.writer.give_up(),
            SliceCommand::ServePages { files, readers } => {
                if let Err(reason) = self.serve_pages(files, readers) {
                    return Ok(SliceReply::Refused(reason));
                }
            }
            SliceCommand::LoadPages { identity } => {
                self.slice.knows_pages();
                self.handle.writer.load(*identity);
            }
            SliceCommand::KeepOwned => drop(self.handle.request(MachineRequest::KeepOwned)?),
            SliceCommand::Reclaim { pages } => {
                if let Err(error) = self.slice.memory().reclaim(pages.clone()) {
                    return Ok(SliceReply::Refused(error.to_string()));
                }
            }
            SliceCommand::ReleaseVacant { pages } => {
                self.slice.memory().release_vacant(pages.clone());
            }
            SliceCommand::SaveVcpu { vcpu } => {
                let saved = self.handle.request(MachineRequest::SaveVcpu(*vcpu))?;
                return Ok(match saved {
                    // A vCPU's state always serialises.
                    MachineReply::Vcpu(state) => {
                        SliceReply::Vcpu(serde_json::to_value(state).unwrap_or_default())
                    }
                    other => SliceReply::Refused(format!("{other:?}")),
                });
            }
            SliceCommand::RestoreVcpu { vcpu, state } => {
                let state = match serde_json::from_value(state.clone()) {
                    Ok(state) => state,
                    Err(error) => {
                        let reason = format!("the state of vCPU {vcpu}: {error}");
                        return Ok(SliceReply::Refused(reason));
                    }
                };
                let restore = MachineRequest::RestoreVcpu(*vcpu, state);
                drop(self.handle.request(restore)?);
            }
            SliceCommand::Membership { node, step } => {
                return Ok(self.slice.take_membership_step(*node, *step));
            }
            SliceCommand::YieldTo { heir } => return Ok(self.slice.yield_primary_to(*heir)),
            SliceCommand::LearnManagers(runs) => return Ok(self.slice.learn_managers(runs)),
            SliceCommand::DrainPages(_)
            | SliceCommand::StopMoves
            | SliceCommand::DrainProgress
            | SliceCommand::PrecopyPages(_)
            | SliceCommand::LimitMoves { .. }
            | SliceCommand::EndPrecopy
            | SliceCommand::PrecopyProgress
            | SliceCommand::TellHistory
            | SliceCommand::Histogram
            | SliceCommand::Split { .. }
            | SliceCommand::EndSplit
            | SliceCommand::PauseExchanges(_)
            | SliceCommand::AddRoom { .. }
            | SliceCommand::FitRoom => return Ok(self.slice.carry_out_drain(command)),
            SliceCommand::Rest
            | SliceCommand::RestReport
            | SliceCommand::CheckRest
            | SliceCommand::EndRest => return Ok(self.slice.carry_out_rest(command)),
            SliceCommand::FindRelocatable { .. }
            | SliceCommand::PlanRelocation { .. }
            | SliceCommand::Relocate => return Ok(self.slice.carry_out_relocation(command)),
            SliceCommand::Counters => return Ok(SliceReply::Counters(self.handle.counters()?)),
            SliceCommand::Pages => return Ok(SliceReply::Pages(self.slice.memory().hottest())),
            SliceCommand::Faults { from } => {
                let from = from.get(self.slice.number()).copied().flatten();
                return Ok(SliceReply::Faults(self.slice.memory().faults(from)));
            }
        }
        Ok(SliceReply::Done)
    }
}
