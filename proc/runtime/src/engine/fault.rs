//! One fault: is it ours, is the page here after all, jump or pull, read ahead,
//! make room.
//!
//! What a touch of a region means on a node:
//!
//! | region | home | elsewhere |
//! | --- | --- | --- |
//! | anonymous | pull | pull |
//! | file, read-only | native | pull a copy |
//! | home only, or none at all | native | go home and touch it there |
//!
//! A protection that forbids the access is the program's own affair: at home the
//! signal is native, elsewhere the execution goes home to get it.

use weft_dsm::{Access, CHUNK_PAGES, Event, Local, Page, Phase, State};
use weft_proc::boot::MAX_NODES;
use weft_proc::layout::{Kind, PROT_READ, PROT_WRITE, Region};
use weft_proc::policy::Decision;
use weft_proc::stats::add;

use super::clock;
use super::machine::Engine;
use super::tables::page_of;

/// First touches, or first writes, done at once in a stream of them, at most.
pub const TOUCHES_MAX: u64 = 16;
/// Smallest and largest number of pages that leave together.
const EVICT_MIN: u64 = 16;
const EVICT_MAX: u64 = CHUNK_PAGES;
/// Rounds of choosing victims before the node counts as full of busy pages.
const EVICT_ROUNDS: usize = 64;

/// How a fault ended.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The access can be tried again.
    Resolved,
    /// The program did something that the system has to judge natively.
    Native,
    /// It has to be judged at home.
    GoHome,
    /// The policy says that the execution should go to this node.
    Jump(usize),
}

impl Engine {
    /// A touch of `address` by the program, or by the runtime on its behalf
    /// (`may_jump` is false then).
    pub fn fault(&mut self, address: usize, write: bool, may_jump: bool) -> Outcome {
        let foreign = if self.is_home() {
            Outcome::Native
        } else {
            Outcome::GoHome
        };
        let Some(region) = self.io.layout.lookup(address as u64).copied() else {
            return foreign;
        };
        let native = self.is_home() && region.kind == Kind::FileReadOnly;
        if region.kind == Kind::HomeOnly || native || !permits(&region, write) {
            self.home_only_touched |= region.kind == Kind::HomeOnly;
            return foreign;
        }
        let access = if write { Access::Write } else { Access::Read };
        self.page_fault(page_of(address), access, &region, may_jump)
    }

    fn page_fault(
        &mut self,
        page: u64,
        access: Access,
        region: &Region,
        may_jump: bool,
    ) -> Outcome {
        let arrived_at = clock::now();
        let busy = arrived_at.wrapping_sub(self.left_at);
        let local = self.tables.look(page);
        let here = match access {
            Access::Read => local.present(),
            Access::Write => local.state() == State::Exclusive,
        };
        let remote = !here && self.is_remote(page, access);
        let on_its_way = local.pending().is_some();
        if remote && may_jump {
            let owner = self.likely_owner(page);
            if owner != self.me {
                let cost = self.pull_ticks * 2;
                match self.policy.fault(owner, busy, cost) {
                    // A base may have been given back meanwhile.
                    Decision::Jump(node) if self.io.links[node].is_some() => {
                        return Outcome::Jump(node);
                    }
                    Decision::Jump(_) => self.policy.stay(self.me),
                    Decision::Pull => {}
                }
            }
        }
        self.count_fault(access, local.present(), remote);
        self.io.awaited = page;
        self.io.resolved = false;
        self.ask(page, access, false);
        if remote && !local.present() {
            self.io.flush();
            self.read_ahead(page, region);
        } else if self.io.resolved {
            self.touch_ahead(page, access, local, region);
        }
        self.settle();
        self.wait_until("a page", |engine| engine.io.resolved);
        self.working_set.touch(page);
        if remote {
            let took = clock::now() - arrived_at;
            self.pull_ticks = self.pull_ticks - self.pull_ticks / 8 + took / 8;
            self.io.stats.pull_ns.record(clock::ns(took));
            if !on_its_way {
                add(&self.io.stats.pulls, 1);
            }
        }
        self.make_room();
        self.count_traffic();
        self.left_at = clock::now();
        if remote {
            self.policy.waited(self.left_at - arrived_at);
        }
        Outcome::Resolved
    }

    fn count_fault(&self, access: Access, present: bool, remote: bool) {
        let stats = self.io.stats;
        let counter = match (remote, present, access) {
            (false, false, _) => &stats.first_touch_faults,
            (true, false, Access::Read) => &stats.read_faults,
            (true, false, Access::Write) => &stats.write_faults,
            _ => &stats.upgrade_faults,
        };
        add(counter, 1);
    }

    /// Whether another node has to be asked, as far as this one knows.
    fn is_remote(&self, page: u64, access: Access) -> bool {
        if !self.is_home() {
            let local = self.tables.look(page);
            return access == Access::Read || !local.owner() || local.state() != State::Exclusive;
        }
        let entry = self.tables.look_entry(page);
        match entry.owner() {
            None => false,
            Some(owner) => owner.index() != 0 || access == Access::Write && entry.copyset() != 0,
        }
    }

    /// The node that has a page, or that had the last one.
    fn likely_owner(&self, page: u64) -> usize {
        if self.is_home() {
            return self
                .tables
                .look_entry(page)
                .owner()
                .map_or(0, |o| o.index());
        }
        let source = self.io.source;
        if source < MAX_NODES && source != self.me && self.io.links[source].is_some() {
            source
        } else {
            0
        }
    }

    /// Asks for the pages behind a sequential fault.
    fn read_ahead(&mut self, page: u64, region: &Region) {
        let ahead = self.streams.fault(page);
        add(&self.io.stats.read_ahead_used, ahead.passed);
        let room = (self.budget_pages() / 32).saturating_sub(self.requests);
        let end = (ahead.from + ahead.count.min(room)).min(region.end / 4096);
        let mut asked = 0;
        for next in ahead.from..end {
            let local = self.tables.look(next);
            if local.present() || local.pending().is_some() {
                continue;
            }
            if self.is_home() && !self.is_remote(next, Access::Read) {
                continue;
            }
            self.ask(next, Access::Read, true);
            asked += 1;
        }
        self.streams.asked(asked);
        add(&self.io.stats.read_ahead, asked);
    }

    /// A fault that needed nobody: a page that existed nowhere, or the first
    /// write to one that came with all rights. In a run of such the next few are
    /// done as well.
    fn touch_ahead(&mut self, page: u64, access: Access, before: Local, region: &Region) {
        let first_touch = self.is_home() && self.io.zeroed == page;
        let ahead = if first_touch {
            self.first_touches.fault(page)
        } else if access == Access::Write && is_unwritten(before) {
            self.first_writes.fault(page)
        } else {
            return;
        };
        let end = (ahead.from + ahead.count).min(region.end / 4096);
        for next in ahead.from..end {
            let alike = if first_touch {
                self.tables.look_entry(next).untouched()
            } else {
                is_unwritten(self.tables.look(next))
            };
            if alike {
                self.ask(next, access, false);
            }
        }
    }

    /// Pages that leave together.
    fn eviction_run(&self) -> u64 {
        (self.budget_pages() / 64).clamp(EVICT_MIN, EVICT_MAX)
    }

    /// Sends pages away until the budget holds again.
    pub fn make_room(&mut self) {
        let budget = self.budget_pages();
        let mut rounds = 0;
        while self.io.resident_pages + self.requests > budget {
            rounds += 1;
            let goal = self.io.resident_pages + self.requests - budget;
            let run = self.eviction_run().max(goal.min(EVICT_MAX));
            if !self.evict_some(run) && rounds > EVICT_ROUNDS {
                return;
            }
        }
    }

    /// Sends up to `run` pages of the coldest chunks away; false when none left.
    fn evict_some(&mut self, run: u64) -> bool {
        self.io.left = 0;
        self.io.no_room = false;
        let mut chosen = [0u64; EVICT_MAX as usize];
        let mut count = 0;
        while count == 0 {
            let Some(chunk) = self.working_set.coldest(|_| true) else {
                return false;
            };
            count = self.choose(chunk, run as usize, &mut chosen);
            if count == 0 && !self.forget_if_empty(chunk) {
                break;
            }
        }
        if count == 0 {
            // The coldest has pages that cannot leave now: the coldest of those
            // that have some that can.
            let warmer = self
                .working_set
                .coldest(|chunk| self.pages_of(chunk).any(|page| self.may_leave(page)));
            let Some(chunk) = warmer else {
                return false;
            };
            count = self.choose(chunk, run as usize, &mut chosen);
        }
        for &page in &chosen[..count] {
            self.step(Event::Evict {
                page: Page(page),
                to: None,
            });
        }
        self.settle();
        let chosen = &chosen[..count];
        self.wait_until("room on another node", |engine| {
            chosen.iter().all(|&page| engine.has_settled(page))
        });
        if self.io.no_room && self.io.left == 0 && !self.drop_copies(run) {
            self.no_room();
        }
        self.io.left > 0
    }

    /// Gives up copies of pages that others own, wherever they are; false when
    /// there are none. For when no node has room for more than it owns.
    fn drop_copies(&mut self, run: u64) -> bool {
        self.io.left = 0;
        for index in 0..self.working_set.len() {
            let first = self.working_set.chunk(index) * CHUNK_PAGES;
            for page in first..first + CHUNK_PAGES {
                let local = self.tables.look(page);
                if local.evictable() && !local.owner() && page != self.io.awaited {
                    self.step(Event::Evict {
                        page: Page(page),
                        to: None,
                    });
                }
            }
            self.settle();
            if self.io.left >= run {
                break;
            }
        }
        self.io.left > 0
    }

    /// Whether no eviction of the page is under way: neither an offer of this
    /// node's nor, at home, an ownership that is moving.
    fn has_settled(&self, page: u64) -> bool {
        let moving = self.is_home() && self.tables.look_entry(page).phase() != Phase::Idle;
        !moving && !self.tables.look(page).offered()
    }

    fn pages_of(&self, chunk: u64) -> core::ops::Range<u64> {
        let first = chunk * CHUNK_PAGES;
        first..first + CHUNK_PAGES
    }

    /// Takes a chunk off the list when nothing of it is here; false otherwise.
    fn forget_if_empty(&mut self, chunk: u64) -> bool {
        let empty = !self
            .pages_of(chunk)
            .any(|page| self.tables.look(page).present());
        if empty {
            self.working_set.forget(chunk);
        }
        empty
    }

    fn may_leave(&self, page: u64) -> bool {
        self.tables.look(page).evictable() && page != self.io.awaited && !self.is_native(page)
    }

    /// The pages of a chunk that may leave, read-only copies first.
    fn choose(&mut self, chunk: u64, run: usize, chosen: &mut [u64]) -> usize {
        let mut count = 0;
        for copies in [true, false] {
            for page in self.pages_of(chunk) {
                let wanted = self.tables.look(page).owner() != copies && self.may_leave(page);
                if wanted && count < run.min(chosen.len()) {
                    chosen[count] = page;
                    count += 1;
                }
            }
        }
        count
    }

    /// Home: a page of a file, which the kernel keeps.
    fn is_native(&self, page: u64) -> bool {
        self.is_home()
            && self
                .io
                .layout
                .lookup(page * 4096)
                .is_some_and(|r| r.kind == Kind::FileReadOnly)
    }

    /// A serving node over its budget gives up read-only copies, which costs
    /// nobody anything.
    pub fn trim_copies(&mut self) {
        if self.io.resident_pages > self.budget_pages() {
            self.drop_copies(self.io.resident_pages - self.budget_pages());
        }
    }
}

/// Whether a write to the page would fault, and concern this node alone.
fn is_unwritten(local: Local) -> bool {
    local.state() == State::Exclusive && !local.written()
}

/// Whether the region's protection allows the access.
fn permits(region: &Region, write: bool) -> bool {
    let needed = if write { PROT_WRITE } else { PROT_READ };
    // An executable mapping can be fetched from although it cannot be read.
    region.prot & needed != 0 || (!write && region.prot != 0)
}
