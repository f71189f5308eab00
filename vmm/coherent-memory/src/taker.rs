//! The thread that goes on with pages that were held back, and asks again for those
//! that are kept up to date.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::shell::SharedMemory;

/// How often the taker looks again while a page is held back.
const HELD_BACK_LOOK: Duration = Duration::from_millis(1);
/// How often it looks when nothing is.
const IDLE_LOOK: Duration = Duration::from_secs(1);

impl SharedMemory {
    /// The thread that goes on with pages that were held back; runs until the
    /// machine is over, and says so if that was the memory's doing.
    pub fn take_held_back(&self) {
        let _ = self.taker.set(std::thread::current());
        let mut due = None;
        while !self.is_over() {
            let waiting = self.held_back.load(Ordering::SeqCst) != 0;
            let look = match (waiting, self.pins.next_end()) {
                (true, Some(end)) => end.min(HELD_BACK_LOOK),
                (true, None) => HELD_BACK_LOOK,
                (false, _) => IDLE_LOOK,
            };
            std::thread::park_timeout(due.unwrap_or(look).min(look));
            if self.held_back.load(Ordering::SeqCst) != 0 {
                self.look_at_held_back();
            }
            due = self.ask_again();
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

    pub(super) fn look_at_held_back(&self) {
        let mut state = self.lock();
        let pages: Vec<u64> = state
            .busy
            .iter()
            .filter(|(page, busy)| busy.held_back.is_some() && !self.pins.hold(**page))
            .map(|(page, _)| *page)
            .collect();
        for page in pages {
            let work = state
                .busy
                .get_mut(&page)
                .and_then(|busy| busy.held_back.take());
            if let Some(work) = work {
                self.held_back.fetch_sub(1, Ordering::SeqCst);
                state = self.carry_out(state, page, work);
            }
        }
    }

    /// A pin may have gone between the look at it and the word that a page waits, or
    /// go by itself.
    pub(super) fn wake_taker(&self, page: u64) {
        if (!self.pins.hold(page) || self.pins.next_end().is_some())
            && let Some(taker) = self.taker.get()
        {
            taker.unpark();
        }
    }
}
