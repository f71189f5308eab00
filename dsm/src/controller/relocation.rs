//! Pages that get another owner and manager all at once, at a rest of all nodes: those whose
//! bytes were sent ahead, and those that nobody ever touched. `docs/membership.md` has the
//! sequence.
//!
//! ```text
//!  source: relocatable ──▶ runs ──▶ all: check_relocation ──▶ all: relocate
//! ```
//!
//! Invariants:
//!
//! - From the first look at the source to the last `relocate` no node has a message about a
//!   page under way, no user uses a page, and nothing begins that would change that.
//! - A check changes nothing. If all nodes have checked a list, none of them refuses it.
//! - Bytes are the owner's: the source relocates a page with bytes only if the target said
//!   that it keeps them and nobody wrote the page since.

use std::ops::Range;
use std::time::Duration;

use super::{Controller, DrainTarget, Mutant};
use crate::relocation::Relocatable;
use crate::state::Tables;
use crate::types::{Access, NodeId, Page};

/// Consecutive pages that go to another node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RelocatedRun {
    /// The first page.
    pub first: u64,
    /// How many.
    pub count: u64,
    /// Their next owner and manager.
    pub to: NodeId,
    /// That node keeps their bytes; otherwise nobody ever touched them.
    pub has_bytes: bool,
}

impl RelocatedRun {
    pub fn pages(&self) -> Range<u64> {
        self.first..self.first.saturating_add(self.count)
    }

    fn what(&self) -> Relocatable {
        match self.has_bytes {
            true => Relocatable::Owned,
            false => Relocatable::Untouched,
        }
    }
}

/// A page that a node does not know as a list of relocated pages says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{node} cannot relocate page {page:#x}: {reason}")]
pub struct RelocationError {
    pub node: NodeId,
    pub page: u64,
    pub reason: &'static str,
}

impl<T: Tables, B> Controller<T, B> {
    /// Adds those of `pages` to `runs` that can be relocated, with bytes or without, as far as
    /// `targets` have room for them. Ends when there are `runs_max` runs, with the first page
    /// that was not looked at.
    pub fn relocatable(
        &mut self,
        pages: Range<u64>,
        has_bytes: bool,
        targets: &mut [DrainTarget],
        runs: &mut Vec<RelocatedRun>,
        runs_max: usize,
    ) -> Option<u64> {
        for page in pages {
            let to = match has_bytes {
                true => self.precopies.kept_by(page),
                false => self.untouched_target(page, targets),
            };
            let target = targets
                .iter_mut()
                .find(|target| target.pages > 0 && Some(target.node) == to);
            let (Some(to), Some(target)) = (to, target) else {
                continue;
            };
            let found = self.relocatable_page(page) == Some(has_bytes);
            if !found || !self.node.takes_pages(to) {
                continue;
            }
            target.pages -= 1;
            let last = runs.last_mut();
            let joins = |run: &&mut RelocatedRun| {
                (run.to, run.has_bytes, run.pages().end) == (to, has_bytes, page)
            };
            match last.filter(joins) {
                Some(run) => run.count += 1,
                None => runs.push(RelocatedRun {
                    first: page,
                    count: 1,
                    to,
                    has_bytes,
                }),
            }
            if runs.len() == runs_max {
                return Some(page + 1);
            }
        }
        None
    }

    /// Where a page goes that nobody touched: if possible, where the split has it go.
    fn untouched_target(&self, page: u64, targets: &[DrainTarget]) -> Option<NodeId> {
        let has_room = || targets.iter().filter(|target| target.pages > 0);
        let chosen = has_room().find(|target| self.chooses(page, target.node));
        chosen.or(has_room().next()).map(|target| target.node)
    }

    /// Whether a page of this node can be relocated, and if so, whether it has bytes.
    fn relocatable_page(&mut self, page: u64) -> Option<bool> {
        let found = self.node.relocatable(Page(page))?;
        let is_idle = !self.is_under_way(page) && !self.saves.is_unsaved(page);
        match found {
            Relocatable::Untouched => is_idle.then_some(false),
            Relocatable::Owned => {
                let is_kept = self.precopies.kept_by(page).is_some();
                let is_read_only = self.rights.of(page) != Some(Access::Write);
                (is_idle && is_kept && is_read_only).then_some(true)
            }
        }
    }

    /// Checks what a list says of pages of `from` against what this node knows.
    ///
    /// # Errors
    /// The first page that it does not fit. Nothing has changed.
    pub fn check_relocation(
        &mut self,
        from: NodeId,
        run: &RelocatedRun,
        now: Duration,
    ) -> Result<(), RelocationError> {
        let error = |page, reason| RelocationError {
            node: self.node.me(),
            page,
            reason,
        };
        let ends = [from, run.to];
        if ends.iter().any(|node| node.0 >= self.node.nodes) || from == run.to {
            return Err(error(run.first, "it goes between nodes that there are not"));
        }
        if !run.pages().all(|page| self.is_memory(page)) {
            return Err(error(run.first, "it is not memory"));
        }
        let has_pins = self.pins.any(now).is_some();
        for page in run.pages() {
            let is_pinned = has_pins && self.pins.hold(page, now);
            let reason = match is_pinned || self.is_under_way(page) {
                true => Some("it is in use"),
                false => self.unfit(from, run, page),
            };
            if let Some(reason) = reason {
                let node = self.node.me();
                return Err(RelocationError { node, page, reason });
            }
        }
        Ok(())
    }

    /// Why a page cannot be relocated as a run says.
    fn unfit(&mut self, from: NodeId, run: &RelocatedRun, page: u64) -> Option<&'static str> {
        let me = self.node.me();
        if from == me {
            let fits = self.relocatable_page(page) == Some(run.has_bytes)
                && (!run.has_bytes || self.precopies.kept_by(page) == Some(run.to));
            return (!fits).then_some("it changed since it was offered");
        }
        if !self.node.is_unconcerned(Page(page), from) {
            return Some("another node has a part in it");
        }
        let lacks_bytes = run.to == me && run.has_bytes && !self.keeps_precopy_of(page, from);
        lacks_bytes.then_some("its bytes are not here")
    }

    /// Does what a checked list says. The shell has all users give up the pages that leave
    /// this node before the rest ends.
    pub fn relocate(&mut self, from: NodeId, run: &RelocatedRun) {
        let me = self.node.me();
        let what = run.what();
        for page in run.pages() {
            if from == me {
                self.node.give_relocated(Page(page), run.to, what);
                self.left(page);
                self.precopies.forget(page);
                if run.has_bytes {
                    self.vacant.push(page);
                }
            } else if run.to == me {
                self.node.take_relocated(Page(page), what);
                if run.has_bytes {
                    self.precopies.unkeep(page);
                    self.set_right(page, Some(Access::Write));
                }
            } else if !self.is(Mutant::RelocateUntold) {
                self.node.learn_relocated(Page(page), run.to);
            }
            self.mark_manager(page);
        }
    }
}
