//! The judges. They do not ask the controllers.

use super::world::World;
use super::{AHEAD_MAX, USERS_MAX};
use crate::checker::{Flaw, Frame, Judge, idle_node, one_manager};
use crate::state::Phase;
use crate::types::{Access, NodeId, Page};

impl World {
    /// Judges 1 and 2.
    pub(super) fn judge(&self, page: u64) -> Result<(), Flaw> {
        let latest = self.latest[page as usize];
        let (mut holders, mut writers) = (0, 0);
        for node in self.alive() {
            let (me, host) = (NodeId(node as u8), &self.hosts[node]);
            let Some(access) = host.used(page) else {
                continue;
            };
            holders |= me.bit();
            if access == Access::Write {
                writers |= me.bit();
            }
            let version = host.version(page);
            if version != latest {
                return Err(Flaw::Stale {
                    page: Page(page),
                    node: me,
                    version,
                    latest,
                });
            }
        }
        match writers != 0 && holders.count_ones() > 1 {
            true => Err(Flaw::Writer {
                page: Page(page),
                holders,
                writers,
            }),
            false => Ok(()),
        }
    }

    /// Judge 5.
    pub(super) fn judge_budget(&self, node: usize) -> Result<(), Flaw> {
        let budget = self.hosts[node].budget.pages();
        let most = budget.saturating_add((USERS_MAX + AHEAD_MAX) as u64);
        let filled = self.hosts[node].filled();
        match filled > most {
            true => Err(Flaw::Budget {
                node: NodeId(node as u8),
                filled,
                most,
            }),
            false => Ok(()),
        }
    }

    /// Judge 7, as far as the drain has not judged it.
    pub(super) fn judge_idle(&mut self) -> Result<(), Flaw> {
        let killed = self.killed != 0;
        for page in (0..self.scenario.pages).map(Page) {
            let alive: Vec<usize> = self.alive().collect();
            let mut judge = Judge::new(page, self.latest[page.0 as usize]);
            for node in alive {
                let (me, host) = (NodeId(node as u8), &mut self.hosts[node]);
                let frame = Frame {
                    mapped: host.allowed(page.0),
                    version: host.kept_version(page.0),
                };
                let local = host.controller.tables().look(page);
                idle_node(page, me, local)?;
                judge.node(me, frame, local)?;
                host.judge_left(me, page, killed)?;
            }
            let managers = self
                .alive()
                .filter(|node| self.hosts[*node].manager_of(page.0) == *node);
            one_manager(page, managers.count() as u32, 0, self.killed != 0)?;
            let Some(manager) = self.living_manager(page.0) else {
                continue;
            };
            let entry = *self.hosts[manager].controller.tables().look_entry(page);
            let one = u32::from(!entry.untouched() && entry.phase() != Phase::Lost);
            judge.verdict(0, one, one)?;
            judge.idle(NodeId(manager as u8), &entry)?;
        }
        Ok(())
    }
}
