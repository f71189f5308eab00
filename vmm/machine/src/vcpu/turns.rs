//! Deterministic machines: one vCPU runs at a time, for a fixed number of
//! instructions, and guest time is the sum of what all executed.
//!
//! Invariants: at most one vCPU holds the turn; who is next depends only on what
//! the vCPUs did, never on the host's time; when all sleep, time jumps to the
//! first deadline. Only input from outside (typed bytes, packets) arrives at a
//! moment that is not repeated.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use weft_platform::interrupts::InterruptRouter;
use weft_platform::part::{Part, PartError};

/// Instructions in a turn: at one a nanosecond, half of what Linux takes for a
/// short spin on another CPU.
pub const QUANTUM: u64 = 50_000;
const NOBODY: u32 = u32::MAX;

/// What a vCPU does when it does not hold the turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Standing {
    /// Wants to go on.
    Ready,
    /// Waits for an interrupt, or until the guest's TSC is so much.
    Asleep(Option<u64>),
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct State {
    /// Guest TSC at the beginning of the turn.
    now: u64,
    /// Instructions of the turn that were executed already, before a pause.
    used: u64,
    holder: Option<u32>,
    standings: Vec<Standing>,
}

/// Whose turn it is.
pub struct Turns {
    /// Held to change or look at it; the next vCPU is woken after.
    state: Mutex<State>,
    /// The holder, or [`NOBODY`], for a look without the lock.
    holder: AtomicU32,
    interrupts: Arc<InterruptRouter>,
}

impl Turns {
    /// vCPU 0 begins; the others sleep.
    pub fn new(interrupts: Arc<InterruptRouter>) -> Self {
        let mut standings = vec![Standing::Asleep(None); interrupts.cpus() as usize];
        if let Some(first) = standings.first_mut() {
            *first = Standing::Ready;
        }
        Self {
            state: Mutex::new(State {
                now: 0,
                used: 0,
                holder: Some(0),
                standings,
            }),
            holder: AtomicU32::new(0),
            interrupts,
        }
    }

    /// The guest's TSC at the beginning of this turn and the instructions of it
    /// that are used, if it is `vcpu`'s.
    pub fn claim(&self, vcpu: u32) -> Option<(u64, u64)> {
        let mut state = self.lock();
        if state.holder.is_none() {
            self.choose(&mut state, vcpu);
        }
        (state.holder == Some(vcpu)).then_some((state.now, state.used))
    }

    /// Whether a claim of `vcpu`'s may succeed.
    pub fn may_claim(&self, vcpu: u32) -> bool {
        let holder = self.holder.load(Ordering::SeqCst);
        holder == vcpu
            || holder == NOBODY
                && self
                    .interrupts
                    .posted(vcpu)
                    .is_some_and(|posted| posted.has_pending())
    }

    /// The turn is interrupted by a pause; `used` instructions of it are executed.
    pub fn interrupt(&self, vcpu: u32, used: u64) {
        let mut state = self.lock();
        if state.holder == Some(vcpu) {
            state.used = used;
        }
    }

    /// The turn ends after `executed` instructions; the next vCPU is rung.
    pub fn pass(&self, vcpu: u32, executed: u64, standing: Standing) {
        let next = {
            let mut state = self.lock();
            if state.holder != Some(vcpu) {
                return;
            }
            state.now = state.now.saturating_add(executed);
            state.used = 0;
            if let Some(own) = state.standings.get_mut(vcpu as usize) {
                *own = standing;
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

    /// The first that wants to run, from `first` on; if none does, after the
    /// first deadline has come.
    fn choose(&self, state: &mut State, first: u32) {
        let cpus = self.interrupts.cpus();
        let order = (0..cpus).map(|step| (first + step) % cpus);
        let wants = |state: &State, vcpu: u32| match state.standings.get(vcpu as usize) {
            Some(Standing::Ready) => true,
            Some(Standing::Asleep(until)) => {
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
                .standings
                .iter()
                .filter_map(|standing| match standing {
                    Standing::Asleep(until) => *until,
                    Standing::Ready => None,
                });
            if let Some(deadline) = deadlines.min() {
                state.now = deadline;
                next = order.clone().find(|vcpu| wants(state, *vcpu));
            }
        }
        state.holder = next;
        self.holder.store(next.unwrap_or(NOBODY), Ordering::SeqCst);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state
            .lock()
            .unwrap_or_else(|poison| poison.into_inner())
    }
}

impl Part for Turns {
    fn save(&self) -> Result<Value, PartError> {
        Ok(serde_json::to_value(&*self.lock())?)
    }

    fn restore(&self, state: Value) -> Result<(), PartError> {
        let saved: State = serde_json::from_value(state)?;
        if saved.standings.len() != self.interrupts.cpus() as usize {
            let what = format!("turns of {} vCPUs", saved.standings.len());
            return Err(PartError::Misfit(what));
        }
        self.holder
            .store(saved.holder.unwrap_or(NOBODY), Ordering::SeqCst);
        *self.lock() = saved;
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
        let turns = Turns::new(interrupts.clone());
        assert_eq!(turns.claim(0), Some((0, 0)));
        assert_eq!(turns.claim(1), None);
        turns.pass(0, 100, Standing::Ready);
        assert_eq!(turns.claim(0), Some((100, 0)));
        interrupts.deliver(2, Message::NonMaskable, None);
        turns.pass(0, 50, Standing::Ready);
        assert_eq!(turns.claim(2), Some((150, 0)));
        // Nothing to be had for one that does not hold it.
        turns.pass(0, 50, Standing::Ready);
        assert_eq!(turns.claim(0), None);
    }

    #[test]
    fn time_jumps_to_the_first_deadline_when_all_sleep() {
        let interrupts = InterruptRouter::new(2);
        let turns = Turns::new(interrupts.clone());
        turns.pass(0, 10, Standing::Ready);
        turns.pass(0, 10, Standing::Asleep(Some(1000)));
        assert_eq!(turns.claim(0), Some((1000, 0)));
        turns.pass(0, 10, Standing::Asleep(None));
        assert!(!turns.may_claim(0) && !turns.may_claim(1));
        assert_eq!(turns.claim(1), None);
        interrupts.deliver(1, Message::NonMaskable, None);
        assert!(turns.may_claim(1));
        assert_eq!(turns.claim(1), Some((1010, 0)));
    }

    #[test]
    fn a_turn_goes_on_after_a_pause_elsewhere_too() {
        let turns = Turns::new(InterruptRouter::new(1));
        turns.interrupt(0, 30);
        let state = Part::save(&turns).unwrap();
        let other = Turns::new(InterruptRouter::new(1));
        Part::restore(&other, state.clone()).unwrap();
        assert_eq!(other.claim(0), Some((0, 30)));
        assert!(Part::restore(&Turns::new(InterruptRouter::new(2)), state).is_err());
    }
}
