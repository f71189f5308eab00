//! The two threads of a slice's memory: one for deferred work, one that evicts.

use std::sync::PoisonError;
use std::time::Duration;

use weft_dsm::controller::{Clock, Event};

use super::shell::SharedMemory;

/// How often deferred pages are tried again.
const DEFERRED_LOOK: Duration = Duration::from_millis(1);
/// How often both threads check when there is no work.
const IDLE_LOOK: Duration = Duration::from_secs(1);
/// How long the evictor waits for replies of other slices, or for pins to end.
const ANSWER_LOOK: Duration = Duration::from_millis(1);

impl SharedMemory {
    /// The deferred-work thread: continues with deferred pages and renews subscriptions until
    /// the machine ends. Reports the failure of the memory, if that is why it ends.
    pub fn run_deferred_work(&self) {
        self.deferred_work.serve();
        let mut due = None;
        while !self.is_over() {
            let look = match self.pins.has_deferred() {
                true => DEFERRED_LOOK,
                false => IDLE_LOOK,
            };
            self.deferred_work.sleep(due.unwrap_or(look).min(look));
            due = self.locked(|state| {
                state.step(self, Event::Tick, None);
                state.controller.deadline(self.now())
            });
        }
        let failure = self
            .failure
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(reason) = failure {
            (self.on_failure)(reason);
        }
    }

    /// The evictor: keeps the memory within its budget, and the history of its pages, until the
    /// machine ends.
    pub fn keep_to_budget(&self) {
        self.evictor.serve();
        let mut clock = Clock::new(self.locked(|state| state.controller.homes()));
        while !self.is_over() {
            self.look_at_history();
            let before = self.rights.resident();
            let evicting = clock.evicts(&self.budget(), before);
            let wanted = self.locked(|state| {
                state.step(self, Event::MakeRoom, None);
                state.controller.wanted()
            });
            let mut more = false;
            if evicting && wanted > 0 {
                let passed = clock.pass(&self.rights);
                more = passed.any_used();
                self.locked(|state| state.step(self, Event::Evict(passed), None));
                self.locked(|state| state.step(self, Event::MakeRoom, None));
            }
            if !evicting {
                self.evictor.sleep(IDLE_LOOK);
            } else if self.rights.resident() >= before && !more {
                self.evictor.sleep(ANSWER_LOOK);
            }
        }
    }
}
