//! Asking ahead: memory that is used for the first time, page after page, pages that
//! went for want of room and are read again, and the kernel's code.

use weft_dsm::{Event, Page};
use weft_vcpu::{Access, Asker, Purpose};

use super::shell::{Guard, PAGE_SHIFT, SharedMemory};

/// Pages that are asked for ahead, at most.
pub(super) const AHEAD_PAGES: u64 = 32;
/// Pages of the kernel's code that are asked for together.
const CODE_PAGES: u64 = 8;

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

    /// Asks for the pages around `page` if a vCPU runs kernel code there: code lies
    /// together, and to read it takes it from nobody.
    pub(super) fn ask_for_code<'a>(
        &'a self,
        mut state: Guard<'a>,
        page: u64,
        asker: Option<&Asker>,
    ) -> Guard<'a> {
        let is_code = |asker: &Asker| asker.purpose == Purpose::Code && !asker.user;
        if !asker.is_some_and(is_code) {
            return state;
        }
        let first = page - page % CODE_PAGES;
        let room = self.budget.high().saturating_sub(self.rights.resident());
        for next in first..first + CODE_PAGES.min(room) {
            let is_memory = self.host_of(next << PAGE_SHIFT).is_some();
            let is_here = self.rights.of(next).is_some() || state.busy.contains_key(&next);
            if is_memory && !is_here && next != page {
                state = self.ask_for(state, next);
            }
        }
        state
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
            state = self.ask_for(state, next);
        }
        state
    }

    /// Asks for a page that nobody waits for.
    fn ask_for<'a>(&'a self, mut state: Guard<'a>, page: u64) -> Guard<'a> {
        let event = Event::Fault {
            page: Page(page),
            access: weft_dsm::Access::Read,
            ahead: true,
        };
        let work = state.step(event, None);
        self.carry_out(state, page, work)
    }
}
