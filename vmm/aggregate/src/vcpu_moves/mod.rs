//! vCPUs that move from one slice to another: docs/mobility.md has the protocol, its
//! invariants, and what happens at each failure.
//!
//! ```text
//!  primary                 source                    target            others
//!     │ ──── HandOver ───────▶ │ vCPU's thread: stops,  │                 │
//!     │ ◀─── HandedOver ────── │ saves, gives away      │                 │
//!     │ ──── TakeOver ────────────────────────────────▶ │ vCPU's thread:  │
//!     │ ──── Moved ──────────────────────────────────── │ installs ─────▶ │
//!     │ ◀─── TakenOver ──────────────────────────────── │ runs            │
//!     │ ◀─── Known ──────────────────────────────────────────────────────│
//! ```
//!
//! | file | holds |
//! | --- | --- |
//! | `protocol` | the primary's side as a state machine |
//! | `working_set` | the message behind a vCPU, with the pages that it used |
//!
//! Whichever thread has an event executes the step: the thread that reads the link, or
//! the vCPU's own. None of them waits; only the thread that asked for the move does.

#[cfg(test)]
pub mod double;
mod protocol;
#[cfg(test)]
mod simulation;
pub mod working_set;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use thiserror::Error;
use weft_platform::interrupts::{InterruptRouter, Locations, VcpuLocation};
use weft_vcpu::PageRun;

use super::PRIMARY;
use super::message::{MoveStep, SliceMessage};
use super::peers::Peers;
use protocol::{Action, Event, Move, Phase};

/// The vCPUs of a slice, as moves need them. Neither call waits, and each leads to one
/// report, later and from any thread.
pub trait VcpuSite: Send + Sync {
    /// Has a vCPU stop at an instruction boundary, leave for `location`, and report itself with
    /// [`VcpuMoves::handed_over`], or with [`VcpuMoves::kept`] if it could not leave.
    ///
    /// # Errors
    /// It cannot be asked; it stays as it is.
    fn hand_over(
        &self,
        vcpu: u32,
        location: VcpuLocation,
        moves: &Arc<VcpuMoves>,
    ) -> Result<(), String>;

    /// A vCPU comes with what its source reported: from now on messages for it are
    /// accepted here. It reports itself with [`VcpuMoves::taken_over`].
    ///
    /// # Errors
    /// The state is malformed, or the vCPU cannot come here.
    fn take_over(
        &self,
        vcpu: u32,
        location: VcpuLocation,
        state: &[u8],
        moves: &Arc<VcpuMoves>,
    ) -> Result<(), String>;

    /// A vCPU that is here, or about to come, used these pages where it was, the first ones
    /// last: fetches them while it runs, until [`VcpuSite::end_prefetch`].
    ///
    /// # Errors
    /// Some are no memory; nothing is fetched.
    fn prefetch(&self, vcpu: u32, runs: &[PageRun]) -> Result<(), String>;

    /// A vCPU left: nothing more is fetched for it.
    fn end_prefetch(&self, vcpu: u32);
}

/// Three moments of one slice's part in a move, as values of the guest's TSC, which all
/// slices share. At the source: the request, the end of guest code, the state complete.
/// At the target: its arrival, the vCPU's thread awake, guest code.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MoveTimes(pub [u64; 3]);

/// Bytes of [`MoveTimes`] in a message.
const TIMES_BYTES: usize = 24;

impl MoveTimes {
    fn encode(self) -> [u8; TIMES_BYTES] {
        let mut bytes = [0; TIMES_BYTES];
        for (location, time) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(self.0) {
            *location = time.to_le_bytes();
        }
        bytes
    }

    /// What comes first in a payload, and the rest.
    fn decode(payload: &[u8]) -> Option<(Self, &[u8])> {
        let (times, rest) = payload.split_first_chunk::<TIMES_BYTES>()?;
        let (words, _) = times.as_chunks::<8>();
        let time = |at: usize| u64::from_le_bytes(words[at]);
        Some((Self([time(0), time(1), time(2)]), rest))
    }
}

/// A vCPU has moved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MovedVcpu {
    pub vcpu: u32,
    pub source: usize,
    pub location: VcpuLocation,
    /// Of the one message that carried it.
    pub state_bytes: usize,
    pub at_source: MoveTimes,
    pub at_target: MoveTimes,
}

/// Why a vCPU did not move, or nobody knows where it is.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum MoveError {
    /// It runs where it was.
    #[error("{0}")]
    Kept(String),
    #[error("node {0} was lost meanwhile")]
    Lost(usize),
    #[error("no reply within {0:?}")]
    TimedOut(Duration),
    #[error("the machine ends")]
    Over,
}

impl MoveError {
    /// Whether the vCPU runs where it was, as if nothing had happened.
    pub fn is_harmless(&self) -> bool {
        matches!(self, Self::Kept(_))
    }
}

#[derive(Default)]
struct Ongoing {
    /// On the primary.
    current: Option<Move>,
    state_bytes: usize,
    at_source: MoveTimes,
    at_target: MoveTimes,
    lost: BTreeSet<usize>,
    over: bool,
}

/// One slice's part in moves.
pub struct VcpuMoves {
    me: usize,
    peers: Arc<Peers>,
    locations: Arc<Locations>,
    interrupts: OnceLock<Arc<InterruptRouter>>,
    site: OnceLock<Arc<dyn VcpuSite>>,
    /// Held for moments; nothing is sent under it.
    ongoing: Mutex<Ongoing>,
    changed: Condvar,
    /// Working sets that were malformed. The first is reported.
    refused_sets: AtomicU64,
}

impl VcpuMoves {
    pub(super) fn new(me: usize, peers: Arc<Peers>, locations: Arc<Locations>) -> Arc<Self> {
        Arc::new(Self {
            me,
            peers,
            locations,
            interrupts: OnceLock::new(),
            site: OnceLock::new(),
            ongoing: Mutex::default(),
            changed: Condvar::new(),
            refused_sets: AtomicU64::new(0),
        })
    }

    /// Connects the interrupt controllers and the vCPUs here. Once, before any link is read.
    pub(super) fn connect(&self, interrupts: Arc<InterruptRouter>, site: Arc<dyn VcpuSite>) {
        // A second one is a mistake that the first survives.
        let _ = self.interrupts.set(interrupts);
        let _ = self.site.set(site);
    }

    /// Moves a vCPU to another slice and waits, `patience` at most, until it runs there
    /// and all slices know. On the primary, whose owner asks for one move after the other.
    ///
    /// # Errors
    /// See [`MoveError`]. `vcpu` and `target` exist, and it is not there already.
    pub fn start(
        self: &Arc<Self>,
        vcpu: u32,
        target: usize,
        patience: Duration,
    ) -> Result<MovedVcpu, MoveError> {
        let Some(known) = self.locations.of(vcpu) else {
            return Err(MoveError::Kept(format!("there is no vCPU {vcpu}")));
        };
        let location = VcpuLocation {
            slice: target,
            epoch: known.epoch + 1,
        };
        let source = known.slice;
        {
            let mut ongoing = self.lock();
            if ongoing.over {
                return Err(MoveError::Over);
            }
            let ends = [source, target];
            if let Some(lost) = ends.iter().find(|end| ongoing.lost.contains(end)) {
                return Err(MoveError::Lost(*lost));
            }
            let begun = Move::new(vcpu, source, location, self.me, self.peers.others());
            ongoing.current = Some(begun);
        }
        let asked = match source == self.me {
            true => self.receive(self.me, MoveStep::HandOver, (vcpu, location), &[]),
            false => {
                self.send(source, MoveStep::HandOver, (vcpu, location), &[]);
                Ok(())
            }
        };
        if let Err(reason) = asked {
            self.lock().current = None;
            return Err(MoveError::Kept(reason));
        }
        self.wait(patience)
    }

    fn wait(&self, patience: Duration) -> Result<MovedVcpu, MoveError> {
        let unfinished = |ongoing: &mut Ongoing| {
            let lost = &ongoing.lost;
            let waits = |current: &Move| {
                !current.is_over() && !lost.iter().any(|slice| current.waits_for(*slice))
            };
            !ongoing.over && ongoing.current.as_ref().is_some_and(waits)
        };
        let (mut ongoing, _) = self
            .changed
            .wait_timeout_while(self.lock(), patience, unfinished)
            .unwrap_or_else(PoisonError::into_inner);
        let Some(current) = ongoing.current.take() else {
            return Err(MoveError::Over);
        };
        let lost = ongoing.lost.iter().find(|slice| current.waits_for(**slice));
        match (&current.phase, lost) {
            (Phase::Done, _) => Ok(MovedVcpu {
                vcpu: current.vcpu,
                source: current.source,
                location: current.location,
                state_bytes: ongoing.state_bytes,
                at_source: ongoing.at_source,
                at_target: ongoing.at_target,
            }),
            (Phase::Kept(reason), _) => Err(MoveError::Kept(reason.clone())),
            (_, Some(lost)) => Err(MoveError::Lost(*lost)),
            _ if ongoing.over => Err(MoveError::Over),
            _ => Err(MoveError::TimedOut(patience)),
        }
    }

    /// A vCPU stopped here and left for `location`: its location is in the table here, and
    /// this is all that it is.
    pub fn handed_over(
        self: &Arc<Self>,
        vcpu: u32,
        location: VcpuLocation,
        times: MoveTimes,
        state: &[u8],
    ) {
        let payload = [&times.encode(), state].concat();
        self.report(MoveStep::HandedOver, (vcpu, location), &payload);
        if let Some(site) = self.site.get() {
            site.end_prefetch(vcpu);
        }
    }

    /// The pages that a vCPU used here follow it to `location`: straight there, not through
    /// the primary, since nothing depends on them.
    pub fn send_working_set(&self, vcpu: u32, location: VcpuLocation, runs: &[PageRun]) {
        let pages = &working_set::encode(runs);
        if !pages.is_empty() {
            let message = SliceMessage::WorkingSet {
                vcpu,
                location,
                pages,
            };
            self.peers.send(location.slice, &message);
        }
    }

    /// Slice `from` sent the pages that a vCPU used there. What is wrong with them is no
    /// reason to end: the vCPU's faults fetch them.
    pub(super) fn follow(&self, from: usize, vcpu: u32, location: VcpuLocation, pages: &[u8]) {
        if let Err(reason) = self.prefetch(from, (vcpu, location), pages)
            && self.refused_sets.fetch_add(1, Ordering::Relaxed) == 0
        {
            eprintln!("weft: node {from} sent wrong pages of vCPU {vcpu}, ignored: {reason}");
        }
    }

    fn prefetch(
        &self,
        from: usize,
        (vcpu, location): (u32, VcpuLocation),
        pages: &[u8],
    ) -> Result<(), String> {
        let known = self.locations.of(vcpu).ok_or("it does not exist")?;
        let site = self.site.get().ok_or("this node has no vCPUs yet")?;
        let runs = working_set::decode(pages).map_err(|error| error.to_string())?;
        let comes = known.slice == from && known.epoch.checked_add(1) == Some(location.epoch);
        if location.slice != self.me || known.epoch < location.epoch && !comes {
            return Err(format!("they are for epoch {}", location.epoch));
        }
        let has_left = || {
            let known = self.locations.of(vcpu);
            known.is_none_or(|known| known.epoch > location.epoch)
        };
        if has_left() {
            return Ok(());
        }
        site.prefetch(vcpu, &runs)?;
        // It may have left meanwhile, before anything was fetched that could be ended.
        if has_left() {
            site.end_prefetch(vcpu);
        }
        Ok(())
    }

    /// How many working sets were ignored because they were wrong, with its name.
    pub fn counters(&self) -> [(&'static str, u64); 1] {
        let refused = self.refused_sets.load(Ordering::Relaxed);
        [("working-sets-refused", refused)]
    }

    /// A vCPU that was to leave stays, and runs on.
    pub fn kept(self: &Arc<Self>, vcpu: u32, location: VcpuLocation, reason: &str) {
        self.report(MoveStep::Kept, (vcpu, location), reason.as_bytes());
    }

    /// A vCPU that came is installed.
    pub fn taken_over(self: &Arc<Self>, vcpu: u32, location: VcpuLocation, times: MoveTimes) {
        self.report(MoveStep::TakenOver, (vcpu, location), &times.encode());
    }

    /// The table here has the new location, which the primary told.
    pub(super) fn known(self: &Arc<Self>, vcpu: u32, location: VcpuLocation) {
        self.report(MoveStep::Known, (vcpu, location), &[]);
    }

    /// Takes a step that slice `from` sent, or this one.
    ///
    /// # Errors
    /// It cannot be true: the peer is broken.
    pub(super) fn receive(
        self: &Arc<Self>,
        from: usize,
        step: MoveStep,
        vcpu_and_place: (u32, VcpuLocation),
        payload: &[u8],
    ) -> Result<(), String> {
        let taken = self.take(from, step, vcpu_and_place, payload);
        // A machine that ends has no threads of vCPUs and no moves: a step that comes too
        // late says nothing about its sender.
        taken.or_else(|reason| match self.lock().over {
            true => Ok(()),
            false => Err(reason),
        })
    }

    fn take(
        self: &Arc<Self>,
        from: usize,
        step: MoveStep,
        (vcpu, location): (u32, VcpuLocation),
        payload: &[u8],
    ) -> Result<(), String> {
        let event = match step {
            MoveStep::HandOver | MoveStep::TakeOver if from != PRIMARY => {
                return Err("it sent a vCPU's move, which only node 0 may".into());
            }
            MoveStep::HandOver => {
                let site = self.site.get().ok_or("this node has no vCPUs yet")?;
                if let Err(reason) = site.hand_over(vcpu, location, self) {
                    self.kept(vcpu, location, &reason);
                }
                return Ok(());
            }
            MoveStep::TakeOver => {
                let site = self.site.get().ok_or("this node has no vCPUs yet")?;
                let (_, state) = MoveTimes::decode(payload).ok_or("a vCPU without its times")?;
                return site.take_over(vcpu, location, state, self);
            }
            MoveStep::HandedOver => Event::HandedOver,
            MoveStep::Kept => Event::Kept(String::from_utf8_lossy(payload).into_owned()),
            MoveStep::TakenOver => Event::TakenOver,
            MoveStep::Known => Event::Known,
        };
        self.advance(from, (vcpu, location), event, payload)
    }

    /// On the primary: a move goes on.
    fn advance(
        self: &Arc<Self>,
        from: usize,
        (vcpu, location): (u32, VcpuLocation),
        event: Event,
        payload: &[u8],
    ) -> Result<(), String> {
        let actions = {
            let mut ongoing = self.lock();
            let times = match event {
                Event::HandedOver | Event::TakenOver => MoveTimes::decode(payload),
                Event::Kept(_) | Event::Known => Some((MoveTimes::default(), &[][..])),
            };
            let (times, state) = times.ok_or("a step of a move without its times")?;
            let current = ongoing.current.as_mut();
            let current = current.ok_or("it sent a step of a move that is not under way")?;
            let handed_over = event == Event::HandedOver;
            let taken_over = event == Event::TakenOver;
            let actions = current
                .step(from, (vcpu, location), event)
                .map_err(|error| error.to_string())?;
            if handed_over {
                (ongoing.at_source, ongoing.state_bytes) = (times, state.len());
            } else if taken_over {
                ongoing.at_target = times;
            }
            actions
        };
        if !actions.is_empty()
            && from != self.me
            && location.slice != self.me
            && let Some(interrupts) = self.interrupts.get()
        {
            let moved = interrupts.moved(vcpu, location);
            moved.map_err(|error| error.to_string())?;
        }
        for action in actions {
            match action {
                Action::Send if location.slice == self.me => {
                    self.receive(self.me, MoveStep::TakeOver, (vcpu, location), payload)?;
                }
                Action::Send => self.send(
                    location.slice,
                    MoveStep::TakeOver,
                    (vcpu, location),
                    payload,
                ),
                Action::Tell(slice) => {
                    self.peers
                        .send(slice, &SliceMessage::Moved { vcpu, location });
                }
            }
        }
        self.changed.notify_all();
        Ok(())
    }

    fn report(
        self: &Arc<Self>,
        step: MoveStep,
        vcpu_and_place: (u32, VcpuLocation),
        payload: &[u8],
    ) {
        if self.me != PRIMARY {
            self.send(PRIMARY, step, vcpu_and_place, payload);
        } else if let Err(reason) = self.receive(self.me, step, vcpu_and_place, payload) {
            // The primary contradicts itself: no move can end any more.
            self.peers.lost(self.me, &reason);
        }
    }

    fn send(
        &self,
        to: usize,
        step: MoveStep,
        (vcpu, location): (u32, VcpuLocation),
        payload: &[u8],
    ) {
        let message = SliceMessage::Move {
            step,
            vcpu,
            location,
            payload,
        };
        self.peers.send(to, &message);
    }

    /// A slice reports nothing any more.
    pub(super) fn peer_lost(&self, slice: usize) {
        self.lock().lost.insert(slice);
        self.changed.notify_all();
    }

    /// The machine ends: nobody waits any more.
    pub(super) fn end(&self) {
        self.lock().over = true;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Ongoing> {
        self.ongoing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
