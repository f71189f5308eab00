//! Pages that get another owner and manager at once, while all slices rest: their bytes were
//! sent ahead, or nobody ever touched them. `docs/membership.md` says what that saves.
//!
//! ```text
//!  primary ── FindRelocatable ──▶ source      the list, in parts
//!     │ ───── PlanRelocation ───▶ all         each part; a check behind the last one
//!     │ ───── Relocate ─────────▶ all         the switch
//! ```
//!
//! Until all have checked the list, nothing changes, and a refusal of one ends it. Afterwards
//! none refuses, and a slice that is lost ends the machine, as always.

use std::sync::Mutex;

use weft_coherent_memory::{DrainTarget, RelocatedRun, RelocationCursor};
use weft_confine::lock;
use weft_dsm::NodeId;

use super::Slice;
use super::commands::{Cursor, DrainShare, RelocatedPages, SliceCommand, SliceReply};
use super::membership::ChangeError;

/// Runs of pages in one command: less than the longest frame.
const RUNS_MAX: usize = 500;

impl From<&RelocatedPages> for RelocatedRun {
    fn from(pages: &RelocatedPages) -> Self {
        Self {
            first: pages.first,
            count: pages.count,
            to: NodeId(u8::try_from(pages.to).unwrap_or(u8::MAX)),
            has_bytes: pages.has_bytes,
        }
    }
}

impl From<RelocatedRun> for RelocatedPages {
    fn from(run: RelocatedRun) -> Self {
        Self {
            first: run.first,
            count: run.count,
            to: run.to.index(),
            has_bytes: run.has_bytes,
        }
    }
}

/// The cursor with which a source looks for the first part of its list.
const BEGIN: Cursor = (true, 0);

/// The list that a slice has been told so far.
#[derive(Default)]
pub(super) struct Plan {
    from: usize,
    runs: Vec<RelocatedRun>,
    is_checked: bool,
    /// On the source: what it found at this rest. It need not look at these pages again.
    found: Vec<RelocatedRun>,
}

/// A slice's part in a relocation.
pub(super) type Planned = Mutex<Plan>;

/// What changed its owner and manager at once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Relocated {
    /// Pages whose bytes had been sent ahead.
    pub with_bytes: u64,
    /// What of the shares is left.
    pub left: Vec<DrainShare>,
}

impl Slice {
    /// On the primary, while all slices rest: pages of `source` go to these slices.
    ///
    /// # Errors
    /// See [`ChangeError`].
    pub fn relocate_all(
        &self,
        source: usize,
        mut shares: Vec<DrainShare>,
    ) -> Result<Relocated, ChangeError> {
        let runs = self.find_all(source, &mut shares);
        let runs = runs.map_err(ChangeError::Undone)?;
        let with_bytes = runs.iter().filter(|run| run.has_bytes);
        let relocated = Relocated {
            with_bytes: with_bytes.map(|run| run.count).sum(),
            left: shares,
        };
        let parts = runs.chunks(RUNS_MAX).enumerate();
        let last = runs.len().div_ceil(RUNS_MAX).saturating_sub(1);
        for (number, part) in parts {
            let plan = SliceCommand::PlanRelocation {
                from: source,
                pages: part.to_vec(),
                is_first: number == 0,
                is_last: number == last,
            };
            self.relocation_step(&plan).map_err(ChangeError::Undone)?;
        }
        if !runs.is_empty() {
            let done = self.relocation_step(&SliceCommand::Relocate);
            done.map_err(ChangeError::Broken)?;
        }
        Ok(relocated)
    }

    /// All parts of the source's list.
    fn find_all(
        &self,
        source: usize,
        shares: &mut [DrainShare],
    ) -> Result<Vec<RelocatedPages>, String> {
        let mut all = Vec::new();
        let mut next = Some(BEGIN);
        while let Some(cursor) = next {
            let find = SliceCommand::FindRelocatable {
                shares: shares.to_vec(),
                cursor,
            };
            let found = match source == self.number {
                true => self.carry_out_relocation(&find),
                false => self.command(source, &find)?,
            };
            let runs = match found {
                SliceReply::Relocatable { pages, next: more } => {
                    next = more;
                    pages
                }
                SliceReply::Refused(reason) => return Err(reason),
                other => return Err(format!("node {source} answered {other:?}")),
            };
            for run in &runs {
                let mut shares = shares.iter_mut();
                if let Some(share) = shares.find(|share| share.slice == run.to) {
                    share.pages = share.pages.saturating_sub(run.count);
                }
            }
            all.extend(runs);
        }
        Ok(all)
    }

    /// Has all slices take a step, this one too.
    fn relocation_step(&self, step: &SliceCommand) -> Result<(), String> {
        let replies = self.command_members(step, |step| self.carry_out_relocation(step));
        replies.map(drop)
    }

    /// On the slice that it is meant for: carries out a command about a relocation.
    pub fn carry_out_relocation(&self, command: &SliceCommand) -> SliceReply {
        let done = match command {
            SliceCommand::FindRelocatable { shares, cursor } => {
                return self.find_relocatable(shares, *cursor);
            }
            SliceCommand::PlanRelocation {
                from,
                pages,
                is_first,
                is_last,
            } => self.plan_relocation(*from, pages, *is_first, *is_last),
            SliceCommand::Relocate => self.relocate(),
            other => Err(format!("{other:?} is not about a relocation")),
        };
        done.map_or_else(SliceReply::Refused, |()| SliceReply::Done)
    }

    fn find_relocatable(&self, shares: &[DrainShare], (has_bytes, page): Cursor) -> SliceReply {
        let target = |share: &DrainShare| DrainTarget {
            node: NodeId(share.slice as u8),
            pages: share.pages,
        };
        let mut targets: Vec<DrainTarget> = shares.iter().map(target).collect();
        let cursor = RelocationCursor { has_bytes, page };
        let (runs, next) = self.memory.relocatable(cursor, &mut targets, RUNS_MAX);
        let mut plan = lock(&self.planned);
        if (has_bytes, page) == BEGIN {
            plan.found.clear();
        }
        plan.found.extend(&runs);
        drop(plan);
        SliceReply::Relocatable {
            pages: runs.into_iter().map(RelocatedPages::from).collect(),
            next: next.map(|next| (next.has_bytes, next.page)),
        }
    }

    fn plan_relocation(
        &self,
        from: usize,
        pages: &[RelocatedPages],
        is_first: bool,
        is_last: bool,
    ) -> Result<(), String> {
        self.check_member(from)?;
        let mut plan = lock(&self.planned);
        if is_first {
            let found = std::mem::take(&mut plan.found);
            *plan = Plan {
                from,
                found,
                ..Plan::default()
            };
        }
        let room = self.memory.pages() as usize;
        if plan.from != from || plan.is_checked || plan.runs.len() + pages.len() > room {
            return Err("a list of relocated pages that does not go on as it began".into());
        }
        plan.runs.extend(pages.iter().map(RelocatedRun::from));
        if !is_last {
            return Ok(());
        }
        if from == self.number {
            plan.is_checked = plan.runs == plan.found;
            let differs = || "the list is not the one that was found".to_owned();
            return plan.is_checked.then_some(()).ok_or_else(differs);
        }
        let checked = self.memory.check_relocation(NodeId(from as u8), &plan.runs);
        checked.map_err(|error| error.to_string())?;
        plan.is_checked = true;
        Ok(())
    }

    fn relocate(&self) -> Result<(), String> {
        let Plan {
            from,
            runs,
            is_checked,
            ..
        } = std::mem::take(&mut *lock(&self.planned));
        match is_checked {
            true => (self.memory).relocate(NodeId(from as u8), &runs, self.lease),
            false => Err("a list of relocated pages that was not checked".into()),
        }
    }
}
