//! Node 0 hands its part of a machine to a process on another host, when all else is there: a
//! move of the machine's *home*. `docs/roles.md` has the reasons.
//!
//! ```text
//!  node 0: pause ─▶ its last pages go ─▶ rest ─▶ state saved ─▶ given ──▶ ended
//!                                                      │ given back
//!                                                      ▼
//!                                                 as before
//!  taker:  built around the node's memory ─▶ state restored ─▶ run
//! ```
//!
//! Where several other nodes stay, the taker is their new node 0, without memory and vCPUs: the
//! *heir* of `weft_aggregate::Slice::succeed`. No rest is needed then, because node 0 has no
//! page and no record of a page mentions it.
//!
//! Invariants: while the home is given, node 0 carries out nothing that could change the
//! machine; it goes on only after the taker is known to have been given up.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use weft_aggregate::Slice;
use weft_aggregate::commands::{DrainShare, SliceCommand, SliceReply};
use weft_aggregate::membership::{Change, ChangeError};
use weft_platform::part::Version;
use weft_virtio::Transport;

use super::lifecycle::{End, MOVE_HOME, Refusal, Stage};
use super::membership::{add_room, impossible};
use super::owner::{Given, Owner};
use super::part::MachinePart;
use super::state::{HomeState, MachineState, OtherNodes, PartState};

/// Between two looks at the last pages.
const LOOK: Duration = Duration::from_micros(200);
/// Longest time in which node 0's last pages must go: those that its devices used.
const DRAIN_WAIT: Duration = Duration::from_secs(2);
/// Longest time in which the nodes must come to rest.
const REST_WAIT: Duration = Duration::from_secs(1);

impl Owner {
    /// On the primary: has the machine stand, its pages on `node`, and reports its state. A
    /// machine that ran, or `ran` until it was paused for this, goes on after a refusal.
    pub(super) fn give_home(
        &mut self,
        (node, heir): (usize, Option<usize>),
        ran: bool,
    ) -> Result<HomeState, Refusal> {
        let ran = ran || self.stage == Stage::Running;
        let to_heir = heir.is_some();
        let given = self.try_give((node, heir), ran);
        match &given {
            Ok(_) => self.given = Some(Given { ran, to_heir }),
            // It ends the machine.
            Err(Refusal::Failed { .. }) => {}
            Err(_) if ran && self.stage == Stage::Paused => self.run_vcpus(MOVE_HOME)?,
            Err(_) => {}
        }
        given
    }

    fn try_give(
        &mut self,
        (node, heir): (usize, Option<usize>),
        ran: bool,
    ) -> Result<HomeState, Refusal> {
        let slice = self.slice.clone().filter(|slice| slice.is_primary());
        let slice = slice.ok_or_else(|| impossible(MOVE_HOME, "node 0 does this".into()))?;
        self.check_home(&slice, node, heir)
            .map_err(|reason| impossible(MOVE_HOME, reason))?;
        if self.stage == Stage::Running {
            self.pause(MOVE_HOME)?;
        }
        let given = match heir {
            None => self.give_standing(&slice, node, ran),
            Some(heir) => self.give_to_heir(&slice, node, heir, ran),
        };
        if !matches!(given, Ok(_) | Err(Refusal::Failed { .. })) {
            self.change_own_membership(&slice, Change::Keep)?;
        }
        given
    }

    /// Frames for the machine come to this process from now on.
    pub(super) fn announce_home(&self) {
        self.virtio().for_each(Transport::announce);
    }

    fn check_home(&self, slice: &Slice, node: usize, heir: Option<usize>) -> Result<(), String> {
        slice.check_member(node)?;
        if !matches!(self.stage, Stage::Running | Stage::Paused) {
            return Err(format!("the machine is {}", self.stage));
        }
        if node == slice.number() || heir.is_none() && slice.members().len() != 2 {
            return Err("the rest of the machine is on more than one node".into());
        }
        let own = slice.number();
        let mut places = slice.locations().all().into_iter().map(|place| place.slice);
        match places.find(|place| *place == own || heir.is_none() && *place != node) {
            Some(_) if heir.is_some() => Err(format!("a vCPU is on node {own}")),
            Some(_) => Err(format!("a vCPU is not on node {node}")),
            None => Ok(()),
        }
    }

    /// The others stay, without this node.
    fn give_to_heir(
        &mut self,
        slice: &Slice,
        node: usize,
        heir: usize,
        ran: bool,
    ) -> Result<HomeState, Refusal> {
        self.change_own_membership(slice, Change::Drain)?;
        drain(slice, node).map_err(|reason| impossible(MOVE_HOME, reason))?;
        self.change_own_membership(slice, Change::Yield)?;
        let parts = self.save_parts(MOVE_HOME)?;
        let time = self.timekeeper.as_deref().map(|time| time.keeper());
        let home = HomeState {
            ran,
            updated: self.updated.clone(),
            state: MachineState {
                version: Version,
                vcpus: Vec::new(),
                parts,
            },
            others: Some(OtherNodes {
                beside: node,
                managers: slice.manager_runs(),
                platform: (slice.platform().holder(), slice.platform().epoch()),
                time: time.unwrap_or_default(),
                queues: slice.remote_devices().queue_servers(),
            }),
        };
        let yielded = slice.yield_to_heir(heir);
        yielded.map_err(|reason| {
            slice.go_on();
            impossible(MOVE_HOME, reason)
        })?;
        self.release_backing();
        Ok(home)
    }

    fn release_backing(&self) {
        self.virtio().for_each(Transport::release_backing);
    }

    fn give_standing(
        &mut self,
        slice: &Slice,
        node: usize,
        ran: bool,
    ) -> Result<HomeState, Refusal> {
        self.change_own_membership(slice, Change::Drain)?;
        drain(slice, node).map_err(|reason| impossible(MOVE_HOME, reason))?;
        slice
            .rest_all(REST_WAIT)
            .map_err(|reason| impossible(MOVE_HOME, reason))?;
        let kept = slice.command(node, &SliceCommand::KeepOwned);
        let state = kept
            .map_err(|reason| impossible(MOVE_HOME, reason))
            .and_then(|_| self.save(MOVE_HOME));
        let state = state.inspect_err(|_| slice.end_rest_all())?;
        self.release_backing();
        Ok(HomeState {
            ran,
            updated: self.updated.clone(),
            state,
            others: None,
        })
    }

    /// On the node whose memory file the taker gets.
    pub(super) fn keep_owned(&self) -> Result<(), Refusal> {
        let kept = self.slice.as_ref().map(|slice| slice.memory().keep_owned());
        kept.unwrap_or(Ok(()))
            .map_err(|error| impossible(MOVE_HOME, error.to_string()))
    }

    fn change_own_membership(&self, slice: &Slice, change: Change) -> Result<(), Refusal> {
        match slice.change_membership(change, slice.number()) {
            Ok(()) => Ok(()),
            Err(ChangeError::Undone(reason)) => Err(impossible(MOVE_HOME, reason)),
            Err(ChangeError::Broken(reason)) => Err(self.failed(MOVE_HOME, &reason)),
        }
    }

    /// The taker was given up: the machine goes on here.
    pub(super) fn take_home_back(&mut self) -> Result<(), Refusal> {
        let (Some(given), Some(slice)) = (self.given.take(), self.slice.clone()) else {
            return Err(impossible(MOVE_HOME, "the home is here".into()));
        };
        match given.to_heir {
            true => slice.go_on(),
            false => slice.end_rest_all(),
        }
        self.claim_backing()
            .map_err(|reason| self.failed(MOVE_HOME, &reason))?;
        self.announce_home();
        self.change_own_membership(&slice, Change::Keep)?;
        match given.ran {
            true => self.run_vcpus(MOVE_HOME),
            false => Ok(()),
        }
    }

    /// The taker has everything, or may have: the machine is over here.
    pub(super) fn end_given(&mut self, end: End) -> Result<(), Refusal> {
        if self.given.is_none() {
            return Err(impossible(MOVE_HOME, "the home is here".into()));
        }
        self.shutdown.end(end);
        Ok(())
    }

    /// On the taker: goes on where another process gave the home away. All guest memory is in
    /// this process's memory file.
    pub(super) fn take_home(&mut self, home: HomeState) -> Result<(), Refusal> {
        if let Some(others) = home.others {
            self.updated = home.updated;
            let succeeded = self.succeed(others, home.state.parts);
            succeeded.map_err(|reason| self.failed(MOVE_HOME, &reason))?;
            self.announce_home();
            return Ok(());
        }
        if let Some(slice) = self.slice.as_deref() {
            super::share(&self.ram, slice).map_err(|error| self.failed(MOVE_HOME, &error))?;
            for range in &home.updated {
                slice.memory().subscribe(range);
            }
        }
        self.updated = home.updated;
        self.restore(MOVE_HOME, home.state)?;
        self.claim_backing()
            .map_err(|reason| self.failed(MOVE_HOME, &reason))?;
        self.announce_home();
        Ok(())
    }

    /// Takes the place of node 0 among the other nodes.
    fn succeed(
        &mut self,
        others: OtherNodes,
        parts: BTreeMap<String, PartState>,
    ) -> Result<(), String> {
        let slice = self.slice.clone();
        let slice = slice.ok_or("there are no other nodes")?;
        let OtherNodes {
            beside: _,
            managers,
            platform,
            time,
            queues: (epoch, servers),
        } = others;
        self.unsettled = Some(time);
        slice.succeed()?;
        if let SliceReply::Refused(reason) = slice.learn_managers(&managers) {
            return Err(reason);
        }
        for range in &self.updated {
            slice.memory().subscribe(range);
        }
        slice.platform().begin_at(platform.0, platform.1);
        if epoch > 0 {
            self.queues_command(&SliceCommand::PlaceQueues { epoch, servers })?;
        }
        let restored = self.restore_parts(MOVE_HOME, &parts);
        restored.map_err(|refusal| refusal.to_string())?;
        self.claim_backing()
    }

    /// On the taker: the old node 0 cannot go on any more. Among other nodes, this one is a
    /// member from now on, and uses pages.
    pub(super) fn settle_home(&mut self) -> Result<(), Refusal> {
        let slice = self.slice.clone();
        let Some((slice, time)) = slice.zip(self.unsettled.take()) else {
            return Ok(());
        };
        self.change_own_membership(&slice, Change::Keep)?;
        self.follow_time(time)?;
        // Without it the others have more room than they need.
        let _ = slice.fit_rooms();
        self.serve_at_vcpus(&slice)
    }

    fn virtio(&self) -> impl Iterator<Item = &Transport> {
        self.parts.iter().filter_map(|(_, part)| match part {
            MachinePart::Virtio(device) => Some(&**device),
            _ => None,
        })
    }

    fn claim_backing(&self) -> Result<(), String> {
        self.virtio().try_for_each(Transport::claim_backing)
    }
}

/// Has node 0's last pages go to `node`.
fn drain(slice: &Slice, node: usize) -> Result<(), String> {
    let own = slice.number();
    let share = DrainShare {
        slice: node,
        pages: slice.managed_pages(own),
    };
    add_room(slice, std::slice::from_ref(&share))?;
    slice.command_drain(own, &SliceCommand::DrainPages(vec![share]))?;
    let deadline = Instant::now() + DRAIN_WAIT;
    loop {
        let report = match slice.command_drain(own, &SliceCommand::DrainProgress)? {
            SliceReply::Drained(report) => report,
            other => return Err(format!("node {own} answered {other:?}")),
        };
        if report.is_over {
            return Ok(());
        }
        if report.lacks_room {
            return Err(format!("node {node} has no room for node {own}'s pages"));
        }
        if Instant::now() > deadline {
            slice.command_drain(own, &SliceCommand::StopMoves)?;
            let seconds = DRAIN_WAIT.as_secs();
            return Err(format!("node {own}'s pages did not go within {seconds} s"));
        }
        std::thread::sleep(LOOK);
    }
}
