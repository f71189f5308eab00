//! Home's budget, which follows the free memory of its host.
//!
//! The launcher looks at the host and says what home's budget should be (*wanted*). Before
//! the stretch it is the budget. Afterwards:
//!
//! - Home follows at once when nothing has to leave for it: to a larger budget, and to a
//!   smaller one that its pages fit into.
//! - On the command to give way its pages leave, a step at a time and for a bounded time.
//! - Pages that no node has room for stay, or come, and home's budget rises for them. So a
//!   lower budget never ends a program that the budgets of its start had room for.
//!
//! Invariant: home's budget is at most the one of [`Boot`].

use core::sync::atomic::Ordering;

use weft_dsm::NodeId;
use weft_proc::boot::Boot;
use weft_proc::message::Message;
use weft_proc::stats::GIVE_WAY_MS;

use super::machine::{Engine, counted};
use crate::{control, own_calls};

/// Pages that leave between two looks at the time.
const STEP: u64 = 1024;
/// Pages by which the budget rises when no node has room: as many as a few faults need, so
/// that the next one does not look for room in vain again.
const RISE: u64 = 256;

/// What the launcher wants home's budget to be.
pub fn wanted_pages(boot: &Boot) -> u64 {
    let first = boot.budget_pages[0];
    let wanted = control::shared().map_or(0, |s| s.home_budget_wanted.load(Ordering::Relaxed));
    if wanted == 0 {
        first
    } else {
        wanted.min(first)
    }
}

impl Engine {
    /// Home: its budget at the stretch. The pages that are here leave when the launcher says
    /// so.
    pub fn begin_budget(&mut self) {
        let first = self.boot.budget_pages[0];
        let held = self.io.resident_pages.min(first);
        self.set_home_budget(wanted_pages(self.boot).max(held));
        self.announce_budget(first);
    }

    /// Home: takes the budget that the launcher wants, if nothing has to leave for it.
    pub fn follow_budget(&mut self) {
        if !self.is_home() {
            return;
        }
        let (wanted, before) = (wanted_pages(self.boot), self.budget_pages());
        if wanted > before || wanted < before && self.io.resident_pages + self.requests <= wanted {
            self.set_home_budget(wanted);
            self.announce_budget(before);
        }
    }

    /// Home: sends pages away until no more are here than the launcher wants, or the time is
    /// over, or no node has room.
    pub fn give_way(&mut self) {
        let (wanted, before) = (wanted_pages(self.boot), self.budget_pages());
        let deadline_ns = own_calls::monotonic_ns() + u64::from(GIVE_WAY_MS) * 1_000_000;
        let mut held = self.io.resident_pages + self.requests;
        while held > wanted && own_calls::monotonic_ns() < deadline_ns {
            self.set_home_budget(wanted.max(held.saturating_sub(STEP)));
            self.make_room();
            let left = self.io.resident_pages + self.requests;
            if left >= held {
                break;
            }
            held = left;
        }
        self.set_home_budget(wanted.max(held.min(before)));
        self.announce_budget(before);
    }

    /// Home: its budget rises for pages that no node has room for; false when it is what it
    /// was at the start.
    pub fn take_budget_back(&mut self) -> bool {
        let before = self.budget_pages();
        let first = self.boot.budget_pages[0];
        if !self.is_home() || before >= first {
            return false;
        }
        let needed = self.io.resident_pages + self.requests + RISE;
        self.set_home_budget(needed.clamp(before, first));
        self.announce_budget(before);
        true
    }

    fn set_home_budget(&mut self, pages: u64) {
        let first = self.boot.budget_pages[0];
        let pages = pages.min(first);
        self.budgets[0] = pages;
        self.core.set_budget_pages(NodeId(0), counted(pages));
        self.core.set_spare_pages(counted(first - pages));
        if let Some(shared) = control::shared() {
            shared.home_budget.store(pages, Ordering::Relaxed);
        }
    }

    /// Tells the other nodes, whose jump policy compares budgets.
    fn announce_budget(&mut self, before: u64) {
        let pages = self.budget_pages();
        if pages != before {
            self.announce(&Message::HomeBudget { pages });
            self.settle();
        }
    }
}
