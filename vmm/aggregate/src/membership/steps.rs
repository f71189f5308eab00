//! What a slice does when it is told a step, and how the primary tells it to all.

use std::collections::BTreeSet;
use std::time::Instant;

use weft_dsm::{NodeId, Standing};
use weft_platform::interrupts::InterruptRouter;
use weft_wire::halves::{Receiver, Sender};

use super::{AGAIN, Answer, Authority, Change, ChangeError, Introduction, Progress, SETTLE, Step};
use crate::commands::{PageRun, SliceCommand, SliceReply};
use crate::message::SliceMessage;
use crate::message::device::{self, DeviceMessage};
use crate::{COMMAND_WAIT, Placement, SLICES_MAX, Slice, initial_locations};
use weft_coherent_memory::{ManagerRun, Threshold};
use weft_confine::lock;

/// Runs of pages in one command: less than the longest frame.
const RUNS_MAX: usize = 1000;
/// Slices that can join beyond those of the start. Each number costs two idle threads, which
/// a confined process cannot start later.
const JOINED_MAX: usize = 4;

/// How many numbers slices can have: those of the start, and some for slices that join.
pub(crate) fn numbers(placement: &Placement) -> usize {
    SLICES_MAX.min(placement.slices() + JOINED_MAX)
}

impl Slice {
    /// Connects a slice that joins, over a link that nobody uses yet. May wait for the link
    /// of the slice that had the number; not on a thread that reads a link.
    ///
    /// # Errors
    /// Its number is in use.
    pub fn connect(&self, node: usize, link: (Sender, Receiver)) -> Result<(), String> {
        if node >= self.numbers() {
            return Err(format!("there can be no node {node}"));
        }
        self.peers.wait_until_free(node, self.lease);
        let address = device::Address::new(0, 0);
        let described = lock(&self.descriptions).clone().into_iter();
        let mut first: Vec<SliceMessage> = described
            .map(|json| SliceMessage::Device {
                address,
                message: DeviceMessage::Described(json),
            })
            .collect();
        let table = initial_locations(&self.placement).to_bytes();
        first.push(SliceMessage::Locations { table });
        self.peers.connect(node, link, &first)
    }

    /// A slice that was about to join does not, or one has left: its link ends.
    pub fn disconnect(&self, node: usize) {
        self.peers.disconnect(node);
        self.peers.change_is_over(node);
    }

    /// Waits for the link of a slice that joins; whether it came within `patience`, and has
    /// not ended since.
    pub fn is_linked(&self, node: usize, patience: std::time::Duration) -> bool {
        self.peers.wait_for_joining(node, patience)
    }

    /// All members, this one among them.
    pub fn members(&self) -> BTreeSet<usize> {
        self.peers
            .others()
            .into_iter()
            .chain([self.number])
            .collect()
    }

    /// # Errors
    /// A node is no member: which ones there are.
    pub fn check_member(&self, node: usize) -> Result<(), String> {
        let members = self.members();
        if members.contains(&node) {
            return Ok(());
        }
        let members: Vec<String> = members.iter().map(usize::to_string).collect();
        let members = members.join(", ");
        Err(format!("node {node} does not exist: there are {members}"))
    }

    /// The disks and networks whose file or link `node` has, in the order in which the guest
    /// finds them.
    pub fn devices_of(&self, node: usize) -> Vec<String> {
        self.remote_devices.devices_of(node)
    }

    /// How many numbers slices can have, those that may join included.
    pub fn numbers(&self) -> usize {
        numbers(&self.placement)
    }

    /// The lowest number that no slice has.
    pub fn free_number(&self) -> Option<usize> {
        (0..self.numbers()).find(|number| {
            *number != self.number && self.peers.standing(*number) == crate::peers::Standing::Free
        })
    }

    /// On the primary, whose owner calls it: changes a node's membership.
    ///
    /// # Errors
    /// See [`ChangeError`].
    pub fn change_membership(&self, change: Change, node: usize) -> Result<(), ChangeError> {
        let mut authority = Authority::new(change, node, self.members());
        let mut deadline = Instant::now() + SETTLE;
        let mut last = None;
        let mut progress = authority.begin();
        loop {
            match progress {
                Progress::Tell(step, slices) => {
                    if last.replace(step) == Some(step) {
                        // The same step once more: pages are in transition.
                        std::thread::sleep(AGAIN);
                    } else {
                        deadline = Instant::now() + SETTLE;
                    }
                    progress = self.tell(&mut authority, step, &slices);
                    if progress != Progress::Waiting && Instant::now() > deadline {
                        let reason = authority.not_yet.clone().unwrap_or_default();
                        let late = format!("not over within {} s: {reason}", SETTLE.as_secs());
                        if let undone @ (Progress::Tell(..) | Progress::Undone(_)) =
                            authority.cancel(&late)
                        {
                            progress = undone;
                        }
                    }
                }
                Progress::Waiting => {
                    // All have answered when `tell` returns.
                    return Err(ChangeError::Broken("a step was not answered".into()));
                }
                Progress::Done => return Ok(()),
                Progress::Undone(reason) => return Err(ChangeError::Undone(reason)),
                Progress::Broken(reason) => return Err(ChangeError::Broken(reason)),
            }
        }
    }

    /// Tells slices a step and takes all their answers.
    fn tell(&self, authority: &mut Authority, step: Step, slices: &BTreeSet<usize>) -> Progress {
        let node = authority.node();
        let mut progress = Progress::Waiting;
        let mut open = Vec::new();
        for slice in slices.iter().filter(|slice| **slice != self.number) {
            let command = match step {
                // Further down.
                Step::Learn => None,
                Step::Go => Some(SliceCommand::Stop),
                step => Some(SliceCommand::Membership { node, step }),
            };
            if let Some(command) = command {
                // Plain data always has a text.
                let json = serde_json::to_vec(&command).unwrap_or_default();
                open.push(self.send_command(*slice, json));
            }
        }
        if slices.contains(&self.number) {
            progress = authority.answer(self.number, self.take_step(node, step));
        }
        if step == Step::Learn {
            let answer = match self.teach_managers(node) {
                Ok(()) => Answer::Done,
                Err(reason) => Answer::Refused(reason),
            };
            progress = authority.answer(node, answer);
        }
        for (slice, ticket) in open {
            progress = match self.commands.wait(ticket, COMMAND_WAIT) {
                Some(SliceReply::Done) => authority.answer(slice, Answer::Done),
                Some(SliceReply::NotYet(reason)) => authority.answer(slice, Answer::NotYet(reason)),
                Some(SliceReply::Refused(reason)) => {
                    authority.answer(slice, Answer::Refused(reason))
                }
                Some(_) => authority.answer(slice, Answer::Refused("a wrong reply".into())),
                None => authority.lost(slice),
            };
        }
        progress
    }

    /// Tells the node that joins who manages what.
    fn teach_managers(&self, node: usize) -> Result<(), String> {
        let mut next = Some(0);
        while let Some(first) = next {
            let (runs, more) = self.memory.managers(first, RUNS_MAX);
            next = more;
            if runs.is_empty() {
                continue;
            }
            let runs = runs.iter().map(|run| PageRun {
                first: run.first,
                count: run.count,
                manager: run.manager.index(),
            });
            self.command(node, &SliceCommand::LearnManagers(runs.collect()))?;
        }
        Ok(())
    }

    /// On a slice that joins: what the primary's `LearnManagers` says.
    pub fn learn_managers(&self, runs: &[PageRun]) -> SliceReply {
        let runs: Vec<ManagerRun> = runs
            .iter()
            .map(|run| ManagerRun {
                first: run.first,
                count: run.count,
                manager: NodeId(run.manager as u8),
            })
            .collect();
        match self.memory.learn_managers(&runs) {
            Ok(()) => SliceReply::Done,
            Err(error) => SliceReply::Refused(error.to_string()),
        }
    }

    /// On a secondary: takes a step. May wait; not on a thread that reads a link.
    pub fn take_membership_step(&self, node: usize, step: Step) -> SliceReply {
        match self.take_step(node, step) {
            Answer::Done => SliceReply::Done,
            Answer::NotYet(reason) => SliceReply::NotYet(reason),
            Answer::Refused(reason) => SliceReply::Refused(reason),
        }
    }

    fn take_step(&self, node: usize, step: Step) -> Answer {
        match self.do_step(node, step) {
            Ok(answer) => answer,
            Err(reason) => Answer::Refused(reason),
        }
    }

    fn do_step(&self, node: usize, step: Step) -> Result<Answer, String> {
        let memory = &self.memory;
        let patience = 2 * self.lease;
        let id = NodeId(node as u8);
        let is_me = node == self.number;
        let said = |error: weft_coherent_memory::MembershipError| error.to_string();
        match step {
            Step::Hold => memory.hold().map_err(said)?,
            Step::Resume => {
                self.peers.change_is_over(node);
                memory.resume();
            }
            Step::Settle => {
                if let Some(page) = memory.unsettled() {
                    return Ok(Answer::NotYet(format!("page {page:#x} is in transition")));
                }
            }
            Step::Introduce => {
                if !self.peers.wait_for_joining(node, patience) {
                    return Err(format!("it has no link to node {node}"));
                }
                self.introduce(node);
            }
            Step::Meet => self.membership.meet(patience)?,
            Step::Present => {
                if node == crate::PRIMARY {
                    self.settle_primary()?;
                }
                if !is_me {
                    self.peers.admit(node)?;
                }
                memory.set_member(id, Standing::Present).map_err(said)?;
            }
            Step::Draining => memory.set_member(id, Standing::Draining).map_err(said)?,
            Step::Leaving => memory.set_member(id, Standing::Leaving).map_err(said)?,
            Step::Holdings => {
                let held = memory.holdings();
                if !held.is_nothing() {
                    return Ok(Answer::NotYet(format!("node {node} still has {held:?}")));
                }
                let readers = self.pages_server.readers();
                if !readers.is_empty() {
                    return Ok(Answer::NotYet(format!(
                        "nodes {readers:?} still read the checkpoint that the machine continues"
                    )));
                }
            }
            Step::Mentions => {
                if let Some(page) = memory.mentions(id) {
                    return Ok(Answer::NotYet(format!(
                        "page {page:#x} still mentions node {node}"
                    )));
                }
            }
            Step::Part => self.peers.part(node),
            Step::Absent => {
                if !self.peers.wait_until_free(node, patience) {
                    return Err(format!("the link to node {node} did not end"));
                }
                memory.set_member(id, Standing::Absent).map_err(said)?;
                self.pages_server.end(node);
            }
            // Commands of their own.
            Step::Learn | Step::Go => return Err("it is no step of this slice".into()),
        }
        Ok(Answer::Done)
    }

    /// Tells a slice that joins where the vCPUs are, and to whom those here answer.
    fn introduce(&self, node: usize) {
        let Some(interrupts) = self.interrupts.get() else {
            return;
        };
        // So that a vCPU's next identity comes behind.
        let _order = lock(&self.identities);
        let introduction = Introduction {
            table: self.locations.to_bytes(),
            identities: self.identities_here(interrupts),
        };
        let bytes = introduction.encode();
        self.peers.send(node, &SliceMessage::Introduced { bytes });
    }

    fn identities_here(&self, interrupts: &InterruptRouter) -> Vec<(u32, u16, u64)> {
        let here = self.locations.at(self.number).into_iter();
        let identity = |vcpu| {
            let epoch = self.locations.of(vcpu)?.epoch;
            Some((vcpu, interrupts.posted(vcpu)?.identity(), epoch))
        };
        here.filter_map(identity).collect()
    }

    /// On the primary: from here on each page has one manager, and keeps it until
    /// [`Slice::resume_managers`]. A drain that is under way continues after that.
    ///
    /// # Errors
    /// A slice is lost, or pages do not settle in time. Hand-overs go on then.
    fn hold_managers(&self) -> Result<(), String> {
        let held = self
            .all_take(Step::Hold)
            .and_then(|_| self.wait_until_settled());
        if held.is_err() {
            self.resume_managers();
        }
        held
    }

    /// On the primary: returns when all slices have heard who manages each page, if that does not
    /// change any more.
    ///
    /// # Errors
    /// A slice is lost, or pages do not settle in time.
    pub fn wait_until_settled(&self) -> Result<(), String> {
        let deadline = Instant::now() + SETTLE;
        while let Some(reason) = self.all_take(Step::Settle)? {
            if Instant::now() > deadline {
                let seconds = SETTLE.as_secs();
                return Err(format!(
                    "pages change their managers after {seconds} s: {reason}"
                ));
            }
            std::thread::sleep(AGAIN);
        }
        Ok(())
    }

    /// Ends [`Slice::hold_managers`].
    fn resume_managers(&self) {
        // A slice that does not answer is lost, which ends the machine.
        let _ = self.all_take(Step::Resume);
    }

    /// Has all slices take a step; a reason of one that has to be told again.
    fn all_take(&self, step: Step) -> Result<Option<String>, String> {
        let node = self.number;
        let begun = self.begin_command(&SliceCommand::Membership { node, step })?;
        let own = self.do_step(node, step)?;
        let replies = self.finish_command(begun, COMMAND_WAIT)?;
        let not_yet = replies.into_iter().find_map(|(_, reply)| match reply {
            SliceReply::NotYet(reason) => Some(reason),
            _ => None,
        });
        Ok(match own {
            Answer::NotYet(reason) => Some(reason),
            _ => not_yet,
        })
    }

    /// How many pages a node manages, as far as this slice knows.
    pub fn managed_pages(&self, node: usize) -> u64 {
        self.memory.managed_pages(NodeId(node as u8))
    }

    /// Gives a member, which may be this slice, a command about its drain or its room.
    ///
    /// # Errors
    /// Why it was not carried out.
    pub fn command_drain(
        &self,
        member: usize,
        command: &SliceCommand,
    ) -> Result<SliceReply, String> {
        match member == self.number {
            false => self.command(member, command),
            true => match self.carry_out_drain(command) {
                SliceReply::Refused(reason) => Err(reason),
                reply => Ok(reply),
            },
        }
    }

    /// On the slice that it is meant for: carries out a command about its drain or its room.
    pub fn carry_out_drain(&self, command: &SliceCommand) -> SliceReply {
        match command {
            SliceCommand::DrainPages(shares) => self.membership.drain_to(shares.clone()),
            SliceCommand::StopMoves => self.membership.stop_moves(),
            SliceCommand::PrecopyPages(shares) => self.membership.precopy_to(shares.clone()),
            SliceCommand::LimitMoves { bytes_per_s } => self.membership.limit_moves(*bytes_per_s),
            SliceCommand::EndPrecopy => self.membership.end_precopy(),
            SliceCommand::PrecopyProgress => {
                return SliceReply::Precopied(self.membership.precopy_report(&self.memory));
            }
            SliceCommand::DrainProgress => {
                return SliceReply::Drained(self.membership.drain_report());
            }
            SliceCommand::AddRoom { pages } => {
                if let Err(reason) = self.change_room(|own| own + pages) {
                    return SliceReply::Refused(reason);
                }
            }
            SliceCommand::FitRoom => self.fit_room(),
            SliceCommand::TellHistory => self.membership.tell_managers(&self.memory),
            SliceCommand::Histogram => {
                return SliceReply::Histogram(self.memory.histogram().bins().to_vec());
            }
            SliceCommand::Split {
                first,
                history,
                equal_pages,
            } => self.memory.split(
                NodeId(*first as u8),
                Threshold {
                    history: *history,
                    equal_pages: *equal_pages,
                },
            ),
            SliceCommand::EndSplit => self.memory.end_split(),
            SliceCommand::PauseExchanges(is_paused) => self.membership.pause_exchanges(*is_paused),
            other => return SliceReply::Refused(format!("{other:?} is not about a drain")),
        }
        SliceReply::Done
    }

    /// Has room for the pages that it manages, and to spare as at its start.
    fn fit_room(&self) {
        let managed = self.managed_pages(self.number);
        // Where it is lent too little for them, `AddRoom` was refused before they came.
        let _ = self.change_room(|_| managed);
    }

    fn change_room(&self, own_pages: impl FnOnce(u64) -> u64) -> Result<(), String> {
        let mut room = lock(&self.room);
        if let Some(room) = &mut *room {
            *room = room.with_own(own_pages(room.own()))?;
            self.memory.set_budget(room.budget());
        }
        Ok(())
    }

    /// On the primary, after pages changed their managers: all members have room for those
    /// that each manages now.
    ///
    /// # Errors
    /// See [`Slice::hold_managers`].
    pub fn fit_rooms(&self) -> Result<(), String> {
        self.hold_managers()?;
        self.fit_room();
        let fitted = self.command_all(&SliceCommand::FitRoom).map(drop);
        self.resume_managers();
        fitted
    }
}
