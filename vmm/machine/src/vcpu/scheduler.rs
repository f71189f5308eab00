//! The scheduler of deterministic machines: one vCPU runs at a time, for a fixed number of
//! instructions, and guest time is the number of instructions that all vCPUs have executed.
//!
//! Invariants: at most one vCPU holds the turn; the next holder depends only on the guest,
//! never on the host's time; when all vCPUs sleep, guest time jumps to the first deadline.
//! Only input from outside (typed bytes, packets) arrives at moments that differ between runs.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use serde::{Deserialize, Serialize};
use weft_platform::interrupts::InterruptRouter;
use weft_platform::part::{Part, PartError, Persist, Version};

/// Instructions in a turn: at one per nanosecond, half of what Linux counts as a short spin
/// on another CPU.
pub const QUANTUM: u64 = 50_000;
const NOBODY: u32 = u32::MAX;

/// Whether a vCPU that does not hold the turn wants it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RunState {
    /// It wants to run.
    Ready,
    /// It waits for an interrupt, or until the guest's TSC has this value.
    Asleep(Option<u64>),
}

/// Whose turn it is, and what each vCPU waits for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SchedulerState {
    version: Version<1>,
    /// Guest TSC at the beginning of the turn.
    now: u64,
    /// Instructions of the turn that were executed already, before a pause.
    used: u64,
    holder: Option<u32>,
    run_states: Vec<RunState>,
}

/// Decides which vCPU of a deterministic machine runs.
pub struct TurnScheduler {
    /// The next vCPU is woken after the lock is released.
    state: Mutex<SchedulerState>,
    /// The holder, or [`NOBODY`]; read without the lock.
    holder: AtomicU32,
    interrupts: Arc<InterruptRouter>,
}

impl TurnScheduler {
    /// A scheduler whose vCPU 0 holds the turn and whose other vCPUs sleep.
    pub fn new(interrupts: Arc<InterruptRouter>) -> Self {
        let mut run_states = vec![RunState::Asleep(None); interrupts.cpus() as usize];
        if let Some(first) = run_states.first_mut() {
            *first = RunState::Ready;
        }
        Self {
            state: Mutex::new(SchedulerState {
                version: Version,
                now: 0,
                used: 0,
                holder: Some(0),
                run_states,
            }),
            holder: AtomicU32::new(0),
            interrupts,
        }
    }

    /// If `vcpu` holds the turn: the guest's TSC at its beginning, and how many of its
    /// instructions are used.
    pub fn claim(&self, vcpu: u32) -> Option<(u64, u64)> {
        let mut state = self.lock();
        if state.holder.is_none() {
            self.choose(&mut state, vcpu);
        }
        (state.holder == Some(vcpu)).then_some((state.now, state.used))
    }

    /// Whether a claim of `vcpu` can succeed.
    pub fn may_claim(&self, vcpu: u32) -> bool {
        let holder = self.holder.load(Ordering::SeqCst);
        holder == vcpu
            || holder == NOBODY
                && self
                    .interrupts
                    .posted(vcpu)
                    .is_some_and(|posted| posted.has_pending())
    }

    /// Records that a pause interrupts the turn after `used` of its instructions.
    pub fn interrupt(&self, vcpu: u32, used: u64) {
        let mut state = self.lock();
        if state.holder == Some(vcpu) {
            state.used = used;
        }
    }

    /// Ends the turn after `executed` instructions, and wakes the next holder.
    pub fn pass(&self, vcpu: u32, executed: u64, run_state: RunState) {
        let next = {
            let mut state = self.lock();
            if state.holder != Some(vcpu) {
                return;
            }
            state.now = state.now.saturating_add(executed);
            state.used = 0;
            if let Some(own) = state.run_states.get_mut(vcpu as usize) {
                *own = run_state;
            }
            self.choose(&mut state, vcpu + 1);
            state.holder
        };
        if let Some(next) = next.filter(|next| *next != vcpu)
            && let Some(posted) = self.interrupts.posted(next)
        {
            posted.waker.ring();
        }
    }

    /// Gives the turn to the first vCPU from `first` on that wants to run. If none does,
    /// guest time jumps to the first deadline.
    fn choose(&self, state: &mut SchedulerState, first: u32) {
        let cpus = self.interrupts.cpus();
        let order = (0..cpus).map(|step| (first + step) % cpus);
        let wants = |state: &SchedulerState, vcpu: u32| match state.run_states.get(vcpu as usize) {
            Some(RunState::Ready) => true,
            Some(RunState::Asleep(until)) => {
                until.is_some_and(|until| until <= state.now)
                    || self
                        .interrupts
                        .posted(vcpu)
                        .is_some_and(|posted| posted.has_pending())
            }
            None => false,
        };
        let mut next = order.clone().find(|vcpu| wants(state, *vcpu));
        if next.is_none() {
            let deadlines = state
                .run_states
                .iter()
                .filter_map(|run_state| match run_state {
                    RunState::Asleep(until) => *until,
                    RunState::Ready => None,
                });
            if let Some(deadline) = deadlines.min() {
                state.now = deadline;
                next = order.clone().find(|vcpu| wants(state, *vcpu));
            }
        }
        state.holder = next;
        self.holder.store(next.unwrap_or(NOBODY), Ordering::SeqCst);
    }

    fn lock(&self) -> MutexGuard<'_, SchedulerState> {
        self.state
            .lock()
            .unwrap_or_else(|poison| poison.into_inner())
    }
}

impl Part for TurnScheduler {}

impl Persist for TurnScheduler {
    type State = SchedulerState;

    fn save(&self) -> Result<SchedulerState, PartError> {
        Ok(self.lock().clone())
    }

    fn restore(&self, saved: &SchedulerState) -> Result<(), PartError> {
        if saved.run_states.len() != self.interrupts.cpus() as usize {
            let what = format!("scheduler of {} vCPUs", saved.run_states.len());
            return Err(PartError::Misfit(what));
        }
        if saved
            .holder
            .is_some_and(|holder| holder >= self.interrupts.cpus())
        {
            return Err(PartError::Misfit(
                "the turn of a vCPU that does not exist".into(),
            ));
        }
        self.holder
            .store(saved.holder.unwrap_or(NOBODY), Ordering::SeqCst);
        *self.lock() = saved.clone();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weft_platform::interrupts::Message;

    #[test]
    fn turns_go_round_among_those_that_want_to_run() {
        let interrupts = InterruptRouter::new(3);
        let scheduler = TurnScheduler::new(interrupts.clone());
        assert_eq!(scheduler.claim(0), Some((0, 0)));
        assert_eq!(scheduler.claim(1), None);
        scheduler.pass(0, 100, RunState::Ready);
        assert_eq!(scheduler.claim(0), Some((100, 0)));
        interrupts.deliver(2, Message::NonMaskable, None);
        scheduler.pass(0, 50, RunState::Ready);
        assert_eq!(scheduler.claim(2), Some((150, 0)));
        // A vCPU that does not hold the turn cannot pass it.
        scheduler.pass(0, 50, RunState::Ready);
        assert_eq!(scheduler.claim(0), None);
    }

    #[test]
    fn time_jumps_to_the_first_deadline_when_all_sleep() {
        let interrupts = InterruptRouter::new(2);
        let scheduler = TurnScheduler::new(interrupts.clone());
        scheduler.pass(0, 10, RunState::Ready);
        scheduler.pass(0, 10, RunState::Asleep(Some(1000)));
        assert_eq!(scheduler.claim(0), Some((1000, 0)));
        scheduler.pass(0, 10, RunState::Asleep(None));
        assert!(!scheduler.may_claim(0) && !scheduler.may_claim(1));
        assert_eq!(scheduler.claim(1), None);
        interrupts.deliver(1, Message::NonMaskable, None);
        assert!(scheduler.may_claim(1));
        assert_eq!(scheduler.claim(1), Some((1010, 0)));
    }

    #[test]
    fn a_turn_goes_on_after_a_pause_elsewhere_too() {
        let scheduler = TurnScheduler::new(InterruptRouter::new(1));
        scheduler.interrupt(0, 30);
        let state = Persist::save(&scheduler).unwrap();
        let other = TurnScheduler::new(InterruptRouter::new(1));
        Persist::restore(&other, &state).unwrap();
        assert_eq!(other.claim(0), Some((0, 30)));
        assert!(Persist::restore(&TurnScheduler::new(InterruptRouter::new(2)), &state).is_err());
    }
}
