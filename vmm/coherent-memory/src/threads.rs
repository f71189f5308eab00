//! The threads that serve a slice's memory: one ticks, one makes room.

use std::sync::PoisonError;
use std::time::Duration;

use weft_dsm::controller::{Clock, Event};

use super::shell::SharedMemory;

/// How often the ticker looks again while a page is held back.
const HELD_BACK_LOOK: Duration = Duration::from_millis(1);
/// How often both look when nothing is to be done.
const IDLE_LOOK: Duration = Duration::from_secs(1);
/// How long the evictor waits for answers of other slices, or for pins to end.
const ANSWER_LOOK: Duration = Duration::from_millis(1);

impl SharedMemory {
    /// The thread that goes on with pages that were held back, and asks again for those
    /// that are kept up to date; runs until the machine is over, and says so if that was
    /// the memory's doing.
    pub fn take_held_back(&self) {
        self.ticker.serve();
        let mut due = None;
        while !self.is_over() {
            let look = match self.pins.hold_back() {
                true => HELD_BACK_LOOK,
                false => IDLE_LOOK,
            };
            self.ticker.wait(due.unwrap_or(look).min(look));
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
            (self.broken)(reason);
        }
    }

    /// The thread that keeps the memory within its budget; runs until the machine is
    /// over.
    pub fn keep_to_budget(&self) {
        self.room.serve();
        let mut clock = Clock::new(self.own.clone());
        while !self.is_over() {
            let before = self.rights.resident();
            let evicting = clock.evicts(&self.budget, before);
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
                self.room.wait(IDLE_LOOK);
            } else if self.rights.resident() >= before && !more {
                self.room.wait(ANSWER_LOOK);
            }
        }
    }
}
