//! Nodes that die. The others are told in any order, each at any time.

use super::world::World;
use crate::checker::Flaw;
use crate::controller::Event;
use crate::types::{NodeId, Page};

impl World {
    pub(super) fn is_alive(&self, node: usize) -> bool {
        (self.killed | self.absent) & NodeId(node as u8).bit() == 0
    }

    /// The nodes that are.
    pub(super) fn alive(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.hosts.len()).filter(|node| self.is_alive(*node))
    }

    /// A node dies, and with it its users, operations and frames that are not on a link.
    pub(super) fn kill(&mut self) {
        if self.alive().count() < 2 {
            return;
        }
        let (dead, nodes) = (self.any_node(), self.hosts.len());
        self.scenario.deaths -= 1;
        self.outcome.deaths += 1;
        self.killed |= NodeId(dead as u8).bit();
        self.hosts[dead].die();
        for other in 0..nodes {
            self.unaware[other] |= NodeId(dead as u8).bit();
            self.queued[dead * nodes + other].clear();
            self.queued[other * nodes + dead].clear();
            self.links[other * nodes + dead].clear();
        }
        self.show(format!("{} dies", NodeId(dead as u8)));
        self.authority.died(dead);
    }

    /// A node is told of a death: nothing more arrives from there.
    pub(super) fn learn(&mut self, node: usize) -> Result<(), Flaw> {
        let Some(dead) = NodeId::lowest(self.unaware[node]) else {
            return Ok(());
        };
        self.unaware[node] &= !dead.bit();
        self.links[dead.index() * self.hosts.len() + node].clear();
        self.event(node, Event::PeerLost { node: dead }, None)
    }

    /// Judge 8: a page is reported as lost with a node that is dead, and no live node
    /// uses it, as far as its manager can know. Its users do not wait any longer.
    pub(super) fn reported_lost(
        &mut self,
        node: usize,
        page: u64,
        dead: NodeId,
    ) -> Result<(), Flaw> {
        self.outcome.losses += 1;
        let manager = self.hosts[node].manager_of(page);
        let used = self
            .alive()
            .find(|other| self.hosts[*other].used(page).is_some());
        match used {
            _ if self.killed & dead.bit() == 0 => {
                let page = Page(page);
                let action = "a loss with a node that lives";
                let node = NodeId(node as u8);
                return Err(Flaw::Memory { page, node, action });
            }
            Some(other) if self.is_alive(manager) => {
                let node = NodeId(other as u8);
                let page = Page(page);
                return Err(Flaw::LostButHere { page, node });
            }
            _ => {}
        }
        for waiter in self.hosts[node].give_up(page) {
            self.event(node, Event::Leave { waiter }, None)?;
        }
        Ok(())
    }

    /// Whether a node has nothing left to do. One that has no room stays so when the homes
    /// of all pages that could leave are dead.
    pub(super) fn is_idle(&self, node: usize) -> bool {
        let killed = self.killed;
        self.hosts[node].is_idle(self.now, |home| killed & home.bit() != 0)
    }
}
