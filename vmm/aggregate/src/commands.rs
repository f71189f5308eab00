//! What the primary asks of the secondaries. The machine's life cycle has one owner, on
//! the primary; secondaries execute its commands.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::membership::Step;
use crate::message::SliceMessage;
use crate::remote_devices::Servers;
use crate::{COMMAND_WAIT, PRIMARY, Slice, describe_now};
use weft_coherent_memory::{SliceFaults, SlicePages};
use weft_platform::clock::Reference;
use weft_platform::interrupts::VcpuLocation;

/// The time that a slice keeps, for those that follow it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptTime {
    pub keeper: usize,
    /// Grows with each take-over.
    pub epoch: u64,
    /// The guest's TSC minus the keeper's host's, modulo 2^64.
    pub offset: u64,
    /// The keeper's host.
    pub host: Reference,
}

/// How a slice writes its file of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SavedWay {
    /// It comes over the socket that the launcher made.
    Socket,
    /// It is at slice 0, and is written by messages.
    Link,
    /// The daemon of the slice's host made it; only its tables go to slice 0.
    Host,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SliceCommand {
    /// Let the vCPUs run, for the first time or again.
    Run {
        /// The guest's TSC minus the timekeeper's host's, modulo 2^64.
        tsc_offset: u64,
        /// The guest's TSC when guest time was zero.
        tsc_zero: u64,
        /// Guest-physical addresses of pages whose copies are kept up to date.
        updated: Vec<Range<u64>>,
    },
    /// Pause the vCPUs.
    Pause,
    /// Reply when all other secondaries have handled what this one sent them.
    Settle,
    /// Be the timekeeper from now on; answered by `Time`.
    KeepTime {
        epoch: u64,
    },
    /// Follow this timekeeper from now on.
    FollowTime(KeptTime),
    /// To the timekeeper: let guest time, which stands, go on from here. Answered by `Time`.
    StartTime {
        /// The guest's TSC.
        tsc: u64,
        /// The guest's TSC when guest time was zero.
        tsc_zero: u64,
    },
    /// To a slice that joined a paused machine, and is paused: guest time stands here.
    StandAt {
        /// The guest's TSC.
        tsc: u64,
    },
    /// Report the state of the platform, which is here and paused; answered by `Platform`.
    SavePlatform,
    /// Give the platform, which is here and paused, to another slice; answered by `Platform`.
    GivePlatform {
        to: usize,
        epoch: u64,
    },
    /// Have the platform from now on.
    TakePlatform {
        epoch: u64,
        /// What `GivePlatform` reported.
        state: serde_json::Value,
    },
    /// Another slice has the platform from now on.
    PlatformAt {
        holder: usize,
        epoch: u64,
    },
    /// Report whether the queues of disks and networks, which are paused, can be served so.
    CheckQueues {
        epoch: u64,
        servers: Servers,
    },
    /// They are served so from now on.
    PlaceQueues {
        epoch: u64,
        servers: Servers,
    },
    /// Press the power button, which is here.
    PressPowerButton,
    /// Report whether a vCPU can come from another slice.
    ExpectVcpu {
        vcpu: u32,
        /// Of the slices that have it so far.
        back_end: String,
        /// It asked for the move itself: only a processor to spare is good enough.
        by_itself: bool,
    },
    /// The machine is over.
    Stop,
    /// Report the stage of each vCPU.
    Status,
    /// Report all counters.
    Counters,
    /// Begin nothing about pages until `EndRest`.
    Rest,
    /// Report whether something about a page is under way; answered by `Rest`.
    RestReport,
    /// When all slices have reported a rest: look at the record of each page.
    CheckRest,
    /// All goes on.
    EndRest,
    /// While all rest: write the pages that the slice owns, as they are now, to the file that
    /// came with this identity. `SaveProgress` says what came of it.
    CutPages {
        /// Of the checkpoint.
        identity: [u8; 16],
        /// The number of the slice's file.
        file: u32,
        way: SavedWay,
        /// Of the checkpoint that has the pages which did not change since.
        base: Option<[u8; 16]>,
    },
    /// Report how far this is; answered by `Saving`.
    SaveProgress,
    /// Give the save up.
    EndSave,
    /// Read files of a checkpoint that this slice's host has, for itself and for other slices.
    /// Before any slice is told which pages it reads.
    ServePages {
        /// The names of the files, in the order in which the daemon numbers them.
        files: serde_json::Value,
        readers: BTreeSet<usize>,
    },
    /// Read the pages of this checkpoint that slice 0 has told of, whether they are needed or not.
    LoadPages {
        identity: [u8; 16],
    },
    /// While all rest: give the memory of pages back that the slice does not own.
    KeepOwned,
    /// The guest does not need these pages: give the memory of those that the slice
    /// manages back to the host.
    Reclaim {
        pages: Range<u64>,
    },
    /// Give memory back that the slice keeps for those of these pages that left it.
    ReleaseVacant {
        pages: Range<u64>,
    },
    /// Report the state of a vCPU, which is paused.
    SaveVcpu {
        vcpu: u32,
    },
    /// Replace the state of a vCPU, which is paused.
    RestoreVcpu {
        vcpu: u32,
        /// What `SaveVcpu` reported.
        state: serde_json::Value,
    },
    /// A step of a change of membership of `node`.
    Membership {
        node: usize,
        step: Step,
    },
    /// Let the process at the link that came as that of node `heir` take the place of node 0.
    YieldTo {
        heir: usize,
    },
    /// To a slice that joins: pages that are managed otherwise than at the start.
    LearnManagers(Vec<PageRun>),
    /// To a slice that leaves: move its pages to these slices, with their management.
    DrainPages(Vec<DrainShare>),
    /// Send no pages from now on, neither to move them nor ahead.
    StopMoves,
    /// Report how far the drain is.
    DrainProgress,
    /// Send the slice's pages ahead to these slices, until `StopMoves`, a drain or `EndPrecopy`.
    PrecopyPages(Vec<DrainShare>),
    /// Send no more bytes of pages than this in a second, neither to move them nor ahead, from
    /// the next order on.
    LimitMoves {
        bytes_per_s: Option<u64>,
    },
    /// Send no more ahead, and have the others drop what has not become theirs.
    EndPrecopy,
    /// Report how far the pre-copy is.
    PrecopyProgress,
    /// While all slices rest: report pages of the slice that can go to these slices at once,
    /// from here on; answered by `Relocatable`.
    FindRelocatable {
        shares: Vec<DrainShare>,
        cursor: Cursor,
    },
    /// A part of the list of pages that go from one slice to others. Checked as a whole when
    /// the last part has come.
    PlanRelocation {
        from: usize,
        pages: Vec<RelocatedPages>,
        is_first: bool,
        is_last: bool,
    },
    /// Do what the list says that all slices have checked.
    Relocate,
    /// Tell the slices that manage pages which are here how these were used.
    TellHistory,
    /// Report how the pages that the slice manages were used; answered by `Histogram`.
    Histogram,
    /// Have pages go to slice `first` that were used more than `history`, by the last
    /// histogram, and some that were used as much; others to other slices.
    Split {
        first: usize,
        history: u8,
        equal_pages: u64,
    },
    EndSplit,
    /// Exchange no pages from now on, or do it again. Answered when none is under way.
    PauseExchanges(bool),
    /// Have room for this many more pages.
    AddRoom {
        pages: u64,
    },
    /// Have room for the pages that the slice manages, and to spare as at its start.
    FitRoom,
    /// Report the pages with the most faults.
    Pages,
    /// Report single faults; see [`SharedMemory::faults`].
    ///
    /// [`SharedMemory::faults`]: weft_coherent_memory::SharedMemory::faults
    Faults {
        /// By slice: the number of the first that is wanted; none: only later ones.
        from: Vec<Option<u64>>,
    },
}

/// The result of a [`SliceCommand`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SliceReply {
    Done,
    /// To `KeepTime` and `StartTime`.
    Time(KeptTime),
    /// To `SavePlatform` and `GivePlatform`: the states of its parts, keyed by their names.
    Platform(serde_json::Value),
    /// To `Status`: of the slice's own vCPUs, by number.
    Status(BTreeMap<u32, VcpuStage>),
    Counters(BTreeMap<String, u64>),
    Pages(SlicePages),
    Faults(SliceFaults),
    /// To `RestReport`: why the slice is at work, and by slice how many messages about pages
    /// it has sent and received.
    Rest {
        work: Option<String>,
        sent: Vec<u64>,
        received: Vec<u64>,
    },
    /// To `SaveProgress`.
    Saving(SaveReport),
    /// To `SaveVcpu`.
    Vcpu(serde_json::Value),
    /// To a step of a change of membership: not yet, for this reason.
    NotYet(String),
    /// To `DrainProgress`: what a drain has done so far.
    Drained(DrainReport),
    /// To `PrecopyProgress`: what a pre-copy has done so far.
    Precopied(PrecopyReport),
    /// To `FindRelocatable`: some pages, and where to go on.
    Relocatable {
        pages: Vec<RelocatedPages>,
        next: Option<Cursor>,
    },
    /// To `Histogram`: pages by the history of their chunk.
    Histogram(Vec<u64>),
    /// It cannot be done.
    Refused(String),
}

/// Consecutive pages with one manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageRun {
    pub first: u64,
    pub count: u64,
    /// The slice that manages them.
    pub manager: usize,
}

/// A slice that takes pages of one that leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrainShare {
    pub slice: usize,
    /// Pages that it may be handed.
    pub pages: u64,
}

/// Consecutive pages that go to another slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RelocatedPages {
    pub first: u64,
    pub count: u64,
    /// The slice that owns and manages them then.
    pub to: usize,
    /// That slice has their bytes; otherwise nobody touched them.
    pub has_bytes: bool,
}

/// The place where a source goes on with its list: with bytes or without, and the page.
pub type Cursor = (bool, u64);

/// How far a slice's part of a save is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SaveReport {
    pub left_pages: u64,
    /// When it is over: pages in the file, pages that are as in the base, length of the file.
    pub written: Option<(u64, u64, u64)>,
}

/// How far a drain is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrainReport {
    /// Pages that are still there: owned, copied, or managed.
    pub left_pages: u64,
    /// Pages that went to other slices.
    pub sent_pages: u64,
    /// Nothing is left.
    pub is_over: bool,
    /// No slice takes the rest.
    pub lacks_room: bool,
}

/// How far a pre-copy is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrecopyReport {
    /// Pages that were sent, each as often as it was.
    pub sent_pages: u64,
    /// Rounds over the slice's pages that are over.
    pub rounds: u64,
    /// Pages that the last round sent.
    pub round_pages: u64,
    /// Pages that are still to be sent, about.
    pub left_pages: u64,
    /// The others have all that can be sent at this moment.
    pub is_settled: bool,
    /// It was ended, and nothing is kept of it elsewhere.
    pub is_over: bool,
}

/// Commands with their tickets, as text, on a secondary.
pub type CommandReceiver = Receiver<(u64, Vec<u8>)>;

/// What a vCPU is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VcpuStage {
    /// Not started by another CPU yet.
    WaitingForStartUp,
    /// Executes instructions.
    Running,
    /// Waits for an interrupt after HLT.
    Halted,
    /// Stands, by request.
    Paused,
    /// Its thread is over.
    Finished,
}

/// A command to which no reply was taken yet.
#[must_use = "its replies must be taken"]
pub struct BegunCommand {
    /// As its text has it.
    name: String,
    /// By slice, its ticket.
    tickets: Vec<(usize, u64)>,
}

/// The name of the command in this text: the first word in quotation marks.
fn name_of(json: &[u8]) -> String {
    let word = json.split(|byte| *byte == b'"').nth(1);
    String::from_utf8_lossy(word.unwrap_or_default()).into_owned()
}

impl Slice {
    /// Gives every secondary a command and waits for the replies, by slice.
    pub fn command_all(&self, command: &SliceCommand) -> Result<Vec<(usize, SliceReply)>, String> {
        self.finish_command(self.begin_command(command)?, COMMAND_WAIT)
    }

    /// Has all slices carry out a command, this one too by `carry_out`, at the same time. The
    /// replies, by slice.
    pub(crate) fn command_members(
        &self,
        command: &SliceCommand,
        carry_out: impl FnOnce(&SliceCommand) -> SliceReply,
    ) -> Result<Vec<(usize, SliceReply)>, String> {
        let begun = self.begin_command(command)?;
        let own = carry_out(command);
        let mut replies = self.finish_command(begun, COMMAND_WAIT)?;
        if let SliceReply::Refused(reason) = own {
            return Err(format!("slice {}: {reason}", self.number));
        }
        replies.push((self.number, own));
        Ok(replies)
    }

    /// Gives one secondary a command and waits for its reply.
    pub fn command(&self, slice: usize, command: &SliceCommand) -> Result<SliceReply, String> {
        let begun = self.begin_command_of(slice, command)?;
        let mut replies = self.finish_command(begun, COMMAND_WAIT)?;
        let reply = replies.pop().map(|(_, reply)| reply);
        reply.ok_or_else(|| format!("slice {slice} did not reply"))
    }

    /// Gives one secondary a command, without a wait.
    pub fn begin_command_of(
        &self,
        slice: usize,
        command: &SliceCommand,
    ) -> Result<BegunCommand, String> {
        let json = serde_json::to_vec(command).map_err(|error| error.to_string())?;
        Ok(BegunCommand {
            name: name_of(&json),
            tickets: vec![self.send_command(slice, json)],
        })
    }

    /// Gives every secondary a command, without a wait.
    pub fn begin_command(&self, command: &SliceCommand) -> Result<BegunCommand, String> {
        let json = serde_json::to_vec(command).map_err(|error| error.to_string())?;
        let send = |slice| self.send_command(slice, json.clone());
        Ok(BegunCommand {
            name: name_of(&json),
            tickets: self.peers.others().into_iter().map(send).collect(),
        })
    }

    /// Waits for the replies to a command, by slice. A slice that is lost, or is found to
    /// be meanwhile, is not waited for.
    pub fn finish_command(
        &self,
        begun: BegunCommand,
        patience: Duration,
    ) -> Result<Vec<(usize, SliceReply)>, String> {
        let deadline = Instant::now() + patience;
        // All are waited for, so that none stays open.
        let BegunCommand { name, tickets } = begun;
        let replies: Vec<(usize, Option<SliceReply>)> = tickets
            .into_iter()
            .map(|(slice, ticket)| {
                let patience = deadline.saturating_duration_since(Instant::now());
                (slice, self.commands.wait(ticket, patience))
            })
            .collect();
        let named = |(slice, reply)| match reply {
            None => Err(format!(
                "{}: it is lost, or did not reply to `{name}` within {} s",
                describe_now(&self.placement, &self.locations, slice),
                patience.as_secs()
            )),
            Some(SliceReply::Refused(reason)) => Err(format!("slice {slice}: {reason}")),
            Some(reply) => Ok((slice, reply)),
        };
        replies.into_iter().map(named).collect()
    }

    pub(crate) fn send_command(&self, slice: usize, json: Vec<u8>) -> (usize, u64) {
        let ticket = self.commands.open(slice);
        self.peers
            .send(slice, &SliceMessage::Command { ticket, json });
        (slice, ticket)
    }

    /// Replies to a command of the primary.
    pub fn reply(&self, ticket: u64, reply: &SliceReply) {
        // A reply is plain data: it always has a text.
        let json = serde_json::to_vec(reply).unwrap_or_default();
        self.peers
            .send(PRIMARY, &SliceMessage::Reply { ticket, json });
    }

    /// Tells the primary that the machine must end.
    pub fn send_end(&self, json: Vec<u8>) {
        self.peers.send(PRIMARY, &SliceMessage::Ended { json });
    }

    /// On a secondary: tells the primary that a vCPU asks to move to `location`.
    pub fn ask_to_move(&self, vcpu: u32, location: VcpuLocation) {
        self.peers
            .send(PRIMARY, &SliceMessage::WantsMove { vcpu, location });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_has_the_name_of_its_text() {
        for (command, name) in [
            (SliceCommand::Pause, "pause"),
            (SliceCommand::Reclaim { pages: 1..2 }, "reclaim"),
        ] {
            let json = serde_json::to_vec(&command).unwrap();
            assert_eq!(name_of(&json), name);
        }
        assert_eq!(name_of(b"{}"), "");
    }
}
