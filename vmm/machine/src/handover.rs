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
//! Invariants: while the home is given, node 0 carries out nothing that could change the
//! machine; it goes on only after the taker is known to have been given up.

use std::time::{Duration, Instant};

use weft_aggregate::Slice;
use weft_aggregate::commands::{DrainShare, SliceCommand, SliceReply};
use weft_aggregate::membership::{Change, ChangeError};
use weft_virtio::Transport;

use super::lifecycle::{End, MOVE_HOME, Refusal, Stage};
use super::membership::{add_room, impossible};
use super::owner::{Given, Owner};
use super::part::MachinePart;
use super::state::HomeState;

/// Between two looks at the last pages.
const LOOK: Duration = Duration::from_micros(200);
/// Longest time in which node 0's last pages must go: those that its devices used.
const DRAIN_WAIT: Duration = Duration::from_secs(2);
/// Longest time in which the nodes must come to rest.
const REST_WAIT: Duration = Duration::from_secs(1);

impl Owner {
    /// On the primary: has the machine stand, its pages on `node`, and reports its state. A
    /// machine that ran, or `ran` until it was paused for this, goes on after a refusal.
    pub(super) fn give_home(&mut self, node: usize, ran: bool) -> Result<HomeState, Refusal> {
        let ran = ran || self.stage == Stage::Running;
        let given = self.try_give(node, ran);
        match &given {
            Ok(_) => self.given = Some(Given { ran }),
            // It ends the machine.
            Err(Refusal::Failed { .. }) => {}
            Err(_) if ran && self.stage == Stage::Paused => self.run_vcpus(MOVE_HOME)?,
            Err(_) => {}
        }
        given
    }

    fn try_give(&mut self, node: usize, ran: bool) -> Result<HomeState, Refusal> {
        let slice = self.slice.clone().filter(|slice| slice.is_primary());
        let slice = slice.ok_or_else(|| impossible(MOVE_HOME, "node 0 does this".into()))?;
        self.check_home(&slice, node)
            .map_err(|reason| impossible(MOVE_HOME, reason))?;
        if self.stage == Stage::Running {
            self.pause(MOVE_HOME)?;
        }
        let given = self.give_standing(&slice, node, ran);
        if !matches!(given, Ok(_) | Err(Refusal::Failed { .. })) {
            self.change_own_membership(&slice, Change::Keep)?;
        }
        given
    }

    /// Frames for the machine come to this process from now on.
    pub(super) fn announce_home(&self) {
        self.virtio().for_each(Transport::announce);
    }

    fn check_home(&self, slice: &Slice, node: usize) -> Result<(), String> {
        slice.check_member(node)?;
        if !matches!(self.stage, Stage::Running | Stage::Paused) {
            return Err(format!("the machine is {}", self.stage));
        }
        if slice.members().len() != 2 || node == slice.number() {
            return Err("the rest of the machine is on more than one node".into());
        }
        let mut places = slice.locations().all().into_iter();
        match places.any(|place| place.slice != node) {
            true => Err(format!("a vCPU is not on node {node}")),
            false => Ok(()),
        }
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
        for device in self.virtio() {
            device.release_backing();
        }
        Ok(HomeState {
            ran,
            updated: self.updated.clone(),
            state,
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
        slice.end_rest_all();
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
