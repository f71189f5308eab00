//! Asking ahead: memory that is used for the first time, page after page, and pages
//! that went for want of room and are read again.

use weft_dsm::{Event, Page};
use weft_soft::Access;

use super::shell::{Guard, PAGE_SHIFT, SharedMemory};

/// Pages that are asked for ahead, at most.
pub(super) const AHEAD_PAGES: u64 = 32;

impl SharedMemory {
    /// Asks for the pages behind `page`, which nobody had touched before, if they
    /// are touched one after the other.
    pub(super) fn ask_ahead<'a>(&'a self, state: Guard<'a>, page: u64) -> Guard<'a> {
        self.ask_for_more(state, page, |next| self.rights.of(next).is_none())
    }

    /// Asks for the pages behind `page` if this slice had them, and it, and is about to
    /// read them again. Others are left alone: to read one ahead would take it from who
    /// writes it.
    pub(super) fn ask_back_if_read<'a>(
        &'a self,
        state: Guard<'a>,
        page: u64,
        access: Access,
    ) -> Guard<'a> {
        match access == Access::Read && self.rights.is_evicted(page) {
            true => self.ask_for_more(state, page, |next| self.rights.is_evicted(next)),
            false => state,
        }
    }

    /// As many as there is room for, up to the first that is not wanted.
    fn ask_for_more<'a>(
        &'a self,
        mut state: Guard<'a>,
        page: u64,
        wanted: impl Fn(u64) -> bool,
    ) -> Guard<'a> {
        let ahead = state.streams.fault(page);
        let room = self.budget.high().saturating_sub(self.rights.resident());
        for next in ahead.from..ahead.from + ahead.count.min(room) {
            let is_memory = self.host_of(next << PAGE_SHIFT).is_some();
            if !is_memory || state.busy.contains_key(&next) || !wanted(next) {
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
