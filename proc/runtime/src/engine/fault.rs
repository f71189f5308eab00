//! One fault: is it ours, is the page here after all, jump or pull, read ahead.
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

use weft_dsm::{Access, Local, Page, State};
use weft_jump::{Decision, Price};
use weft_proc::boot::MAX_NODES;
use weft_proc::layout::{Kind, PAGE, PROT_READ, PROT_WRITE, Region};
use weft_proc::stats::add;

use super::clock;
use super::machine::Engine;
use super::tables::page_of;

/// First touches, or first writes, done at once in a stream of them, at most.
pub const TOUCHES_MAX: u64 = 16;
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
        let local = self.core.tables.look(page);
        let here = match access {
            Access::Read => local.present(),
            Access::Write => local.state() == State::Exclusive,
        };
        let remote = !here && self.is_remote(page, access);
        let on_its_way = local.pending().is_some();
        if remote && may_jump {
            let owner = self.likely_owner(page);
            if owner != self.me {
                match self.policy.fault(owner, busy, self.price()) {
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
        let missing = self
            .working_set
            .departures
            .missing(Page(page))
            .filter(|_| remote);
        self.io.awaited = page;
        self.io.resolved = false;
        if !remote {
            self.ask(page, access, false);
        } else {
            if local.present() {
                self.working_set.rewritten.wrote(Page(page));
            }
            self.ask_remote(page, access, region, false);
        }
        if remote && !local.present() {
            self.io.flush();
            self.read_ahead(page, region);
            self.settle();
            self.make_room_ahead();
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
        if let Some(pages) = missing {
            self.regret(pages, self.left_at - arrived_at);
        }
        Outcome::Resolved
    }

    /// A wait for a page that would have stayed at a node whose budget is so much
    /// larger than this one's.
    fn regret(&mut self, pages: u64, ticks: u64) {
        let enough = self.budget_pages() + pages;
        for node in 0..self.nodes {
            let fits = self.budgets[node] >= enough;
            if node != self.me && fits && self.io.links[node].is_some() {
                self.policy.missed(node, ticks);
            }
        }
    }

    /// What moving the execution takes, by what pulls took of late.
    pub fn price(&self) -> Price {
        Price {
            jump: self.pull_ticks * 2,
            pages: self.io.resident_pages,
        }
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
            let local = self.core.tables.look(page);
            return access == Access::Read || !local.owner() || local.state() != State::Exclusive;
        }
        let entry = self.core.tables.look_entry(page);
        match entry.owner() {
            None => false,
            Some(owner) => owner.index() != 0 || access == Access::Write && entry.copyset() != 0,
        }
    }

    /// The node that has a page, or that had the last one.
    fn likely_owner(&self, page: u64) -> usize {
        if self.is_home() {
            return self
                .core
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

    /// Asks another node for a page: for writing at once, where copies that were
    /// read came to be written and had to be asked for again.
    fn ask_remote(&mut self, page: u64, access: Access, region: &Region, ahead: bool) {
        let writable = region.kind == Kind::Anonymous && region.prot & PROT_WRITE != 0;
        let whole = access == Access::Read
            && writable
            && self.working_set.rewritten.comes_whole(Page(page));
        let access = if whole { Access::Write } else { access };
        self.ask(page, access, ahead);
    }

    /// Asks for the pages behind a sequential fault.
    fn read_ahead(&mut self, page: u64, region: &Region) {
        let ahead = self.streams.fault(page);
        add(&self.io.stats.read_ahead_used, ahead.passed);
        let room = (self.budget_pages() / 32).saturating_sub(self.requests);
        let end = (ahead.from + ahead.count.min(room)).min(region.end / PAGE);
        let mut asked = 0;
        for next in ahead.from..end {
            let local = self.core.tables.look(next);
            if local.present() || local.pending().is_some() {
                continue;
            }
            if self.is_home() && !self.is_remote(next, Access::Read) {
                continue;
            }
            self.ask_remote(next, Access::Read, region, true);
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
        let end = (ahead.from + ahead.count).min(region.end / PAGE);
        for next in ahead.from..end {
            let alike = if first_touch {
                self.core.tables.look_entry(next).untouched()
            } else {
                is_unwritten(self.core.tables.look(next))
            };
            if alike {
                self.ask(next, access, false);
            }
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
