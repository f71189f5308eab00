//! Asking ahead: memory that is used for the first time, page after page.

use weft_dsm::{Event, Page};

use super::shell::{Guard, PAGE_SHIFT, SharedMemory};

/// Pages that were never touched and are asked for ahead, at most.
pub(super) const AHEAD_PAGES: u64 = 32;

impl SharedMemory {
    /// Asks for the pages behind `page`, which nobody had touched before, if they
    /// are touched one after the other: memory that is used for the first time.
    pub(super) fn ask_ahead<'a>(&'a self, mut state: Guard<'a>, page: u64) -> Guard<'a> {
        let ahead = state.streams.fault(page);
        for next in ahead.from..ahead.from + ahead.count {
            let known = self.host_of(next << PAGE_SHIFT).is_none()
                || self.rights.of(next).is_some()
                || state.busy.contains_key(&next);
            if known {
                break;
            }
            let event = Event::Fault {
                page: Page(next),
                access: weft_dsm::Access::Read,
                ahead: true,
            };
            let work = state.step(event, None);
            state = self.carry_out(state, next, work);
        }
        state
    }
}
