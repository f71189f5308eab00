//! Pre-copies, begun and ended at random moments, together with everything else. What a
//! node takes from a pre-copy is judged like all other bytes, when a user looks at them.

use super::world::World;
use crate::checker::Flaw;
use crate::controller::{DrainPlan, DrainTarget, Event};
use crate::types::NodeId;

impl World {
    /// A node begins to send pages ahead, or ends that.
    pub(super) fn begin_or_end_precopy(&mut self) {
        let node = self.any_node();
        if self.hosts[node].controller.is_precopying() {
            // Mostly its pages leave meanwhile: that is what they were sent ahead for.
            match self.random.below(4) {
                0 => self.hosts[node].controller.end_precopy(),
                _ if self.authority.is_over() && self.scenario.spreads() => {
                    self.begin_drain(node, 0..self.scenario.pages);
                }
                _ => {}
            }
            return;
        }
        let others: Vec<usize> = self.alive().filter(|other| *other != node).collect();
        if others.is_empty() {
            return;
        }
        let mut targets = Vec::new();
        for _ in 0..1 + self.random.below(2) {
            let other = others[self.random.below(others.len() as u64) as usize];
            let pages = 1 + self.random.below(self.scenario.pages);
            // What is sent ahead takes no room from what other nodes were promised.
            self.hosts[other].raise_budget(pages);
            targets.push(DrainTarget {
                node: NodeId(other as u8),
                pages,
            });
        }
        self.split(node, &targets);
        let plan = DrainPlan {
            targets,
            pages: std::iter::once(0..self.scenario.pages).collect(),
            window_pages: 1 + self.random.below(20) as usize,
        };
        self.hosts[node].controller.begin_precopy(plan);
    }

    /// A node goes on with its pre-copy.
    pub(super) fn precopy_on(&mut self, node: usize) -> Result<(), Flaw> {
        self.event(node, Event::Precopy, None)
    }

    pub(super) fn end_precopies(&mut self) {
        for host in &mut self.hosts {
            host.controller.end_precopy();
        }
    }
}
