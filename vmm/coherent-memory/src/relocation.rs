//! Pages that get another owner and manager at once, while all slices rest: the memory's part.
//! `docs/membership.md` has the sequence.

use std::ops::Range;
use std::time::Duration;

use weft_dsm::NodeId;
use weft_dsm::controller::{DrainTarget, RelocatedRun, RelocationError};

use super::shell::{PAGE_SHIFT, SharedMemory};

/// Where a look for pages that can be relocated goes on: first those with bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RelocationCursor {
    pub has_bytes: bool,
    pub page: u64,
}

impl Default for RelocationCursor {
    fn default() -> Self {
        Self {
            has_bytes: true,
            page: 0,
        }
    }
}

impl SharedMemory {
    /// Pages of this slice that can be relocated, from `cursor` on: those whose bytes were sent
    /// ahead, and then those that nobody touched. At most `runs_max` runs, and where to go on.
    /// While all slices rest.
    pub fn relocatable(
        &self,
        cursor: RelocationCursor,
        targets: &mut [DrainTarget],
        runs_max: usize,
    ) -> (Vec<RelocatedRun>, Option<RelocationCursor>) {
        let mut runs = Vec::new();
        let mut at = cursor;
        loop {
            for pages in self.walk().filter(|pages| pages.end > at.page) {
                let pages = pages.start.max(at.page)..pages.end;
                let next = self.locked(|state| {
                    let controller = &mut state.controller;
                    controller.relocatable(pages, at.has_bytes, targets, &mut runs, runs_max)
                });
                if let Some(page) = next {
                    return (runs, Some(RelocationCursor { page, ..at }));
                }
            }
            if !at.has_bytes {
                return (runs, None);
            }
            at = RelocationCursor {
                has_bytes: false,
                page: 0,
            };
        }
    }

    /// Checks what a list says of pages of `from` against what this slice knows of them.
    ///
    /// # Errors
    /// The first page that it does not fit. Nothing has changed.
    pub fn check_relocation(
        &self,
        from: NodeId,
        runs: &[RelocatedRun],
    ) -> Result<(), RelocationError> {
        self.locked(|state| {
            let now = self.now();
            runs.iter()
                .try_for_each(|run| state.controller.check_relocation(from, run, now))
        })
    }

    /// Does what a list says that all slices have checked. When this returns, no user of this
    /// slice uses a page that left it.
    ///
    /// # Errors
    /// The users did not give the pages up: the machine cannot continue.
    pub fn relocate(
        &self,
        from: NodeId,
        runs: &[RelocatedRun],
        patience: Duration,
    ) -> Result<(), String> {
        self.locked(|state| {
            runs.iter()
                .for_each(|run| state.controller.relocate(from, run));
        });
        if from.index() != self.slice {
            return Ok(());
        }
        let left = runs.iter().filter(|run| run.has_bytes);
        let addresses: Vec<Range<u64>> = left
            .map(|run| {
                let pages = run.pages();
                pages.start << PAGE_SHIFT..pages.end << PAGE_SHIFT
            })
            .collect();
        match self.notifier.get() {
            Some(notifier) if !addresses.is_empty() => notifier
                .revoke_all(&addresses, patience)
                .map_err(|error| format!("pages could not be revoked from vCPUs: {error}")),
            _ => Ok(()),
        }
    }
}
