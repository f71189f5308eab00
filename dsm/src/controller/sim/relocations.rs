//! Pages that are relocated at a rest: all nodes check the list, all are told, in any order,
//! and all go on. Whether that is right is judged at the end of the rest, and by what users see
//! afterwards.

use super::BadShell;
use super::world::World;
use crate::checker::Flaw;
use crate::controller::{DrainTarget, RelocatedRun};
use crate::types::NodeId;

impl World {
    /// At a rest, a node relocates pages.
    pub(super) fn relocate_some(&mut self) -> Result<(), Flaw> {
        let may = self.authority.is_over() && self.scenario.spreads() && self.killed == 0;
        if !may || !self.random.per_mille(self.scenario.relocations) {
            return Ok(());
        }
        let node = self.any_node();
        let mut targets = self.relocation_targets(node);
        let runs = self.find_relocatable(node, &mut targets);
        let from = NodeId(node as u8);
        let all: Vec<usize> = self.alive().collect();
        for (host, run) in all
            .iter()
            .flat_map(|host| runs.iter().map(move |run| (*host, run)))
        {
            let checked = self.hosts[host]
                .controller
                .check_relocation(from, run, self.now);
            if let Err(error) = checked {
                return Err(Flaw::Failed {
                    node: error.node,
                    failure: error.to_string(),
                });
            }
        }
        // In any order: nobody uses a page before all have been told.
        let start = self.random.below(all.len() as u64) as usize;
        for host in all[start..].iter().chain(&all[..start]) {
            for run in &runs {
                self.hosts[*host].controller.relocate(from, run);
            }
        }
        for (page, to) in runs
            .iter()
            .flat_map(|run| run.pages().map(|page| (page, run.to)))
        {
            self.hosts[to.index()].look(page);
            if self.bad != Some(BadShell::KeepsRelocated) {
                self.hosts[node].unmap(page);
            }
            self.judge(page)?;
            self.outcome.relocated += 1;
        }
        for run in &runs {
            self.show(format!("{from}: relocates {run:?}"));
        }
        Ok(())
    }

    fn relocation_targets(&mut self, node: usize) -> Vec<DrainTarget> {
        let others: Vec<usize> = self.alive().filter(|other| *other != node).collect();
        let mut targets = Vec::new();
        for other in others {
            let pages = self.random.below(self.scenario.pages);
            self.hosts[other].raise_budget(pages);
            let node = NodeId(other as u8);
            targets.push(DrainTarget { node, pages });
        }
        targets
    }

    fn find_relocatable(&mut self, node: usize, targets: &mut [DrainTarget]) -> Vec<RelocatedRun> {
        let mut found = Vec::new();
        let pages = self.scenario.pages;
        for has_bytes in [true, false] {
            let mut next = Some(0);
            while let Some(first) = next {
                let runs_max = 1 + self.random.below(4) as usize;
                let mut runs = Vec::new();
                next = self.hosts[node].controller.relocatable(
                    first..pages,
                    has_bytes,
                    targets,
                    &mut runs,
                    runs_max,
                );
                found.extend(runs);
            }
        }
        found
    }
}
