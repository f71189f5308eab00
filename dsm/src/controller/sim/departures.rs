//! Judge 9: nothing is left of a node that was reported empty, and no message is about it
//! afterwards. It looks at records, memory and links, and does not ask the controllers.

use super::host::Packet;
use super::world::World;
use crate::checker::Flaw;
use crate::types::{NodeId, Page};

impl World {
    /// At the moment at which a node is reported empty.
    pub(super) fn judge_left_by(&mut self, leaver: usize) -> Result<(), Flaw> {
        let node = NodeId(leaver as u8);
        let flaw = |what| Err(Flaw::NotGone { node, what });
        for page in 0..self.scenario.pages {
            let managed = self.living_manager(page).is_some();
            let host = &mut self.hosts[leaver];
            if host.used(page).is_some() || host.rights.of(page).is_some() {
                return flaw("its users have a page");
            }
            if !host.controller.tables().look(Page(page)).clear() {
                return flaw("its record has a page, or a request for one");
            }
            if managed && self.is_under_way(leaver, page) {
                return flaw("a message to or from it is in flight");
            }
            for other in self.alive() {
                let host = &self.hosts[other];
                if host.manager_of(page) == leaver {
                    return flaw("a node believes that it manages a page");
                }
                let entry = *host.controller.node.tables.look_entry(Page(page));
                if other != leaver && host.manager_of(page) == other && entry.mentions(node) {
                    return flaw("an entry mentions it");
                }
            }
        }
        Ok(())
    }

    /// The live node that manages a page, by its own record.
    pub(super) fn living_manager(&self, page: u64) -> Option<usize> {
        self.alive()
            .find(|node| self.hosts[*node].manager_of(page) == *node)
    }

    fn is_under_way(&self, node: usize, page: u64) -> bool {
        let nodes = self.hosts.len();
        let lists = [&self.queued, &self.links];
        let mut all = lists.into_iter().flat_map(|links| links.iter().enumerate());
        all.any(|(index, link)| {
            let (from, to) = (index / nodes, index % nodes);
            let about = |packet: &Packet| packet.message.page.0 == page;
            (from == node && self.is_alive(to) || to == node && self.is_alive(from))
                && link.iter().any(about)
        })
    }

    /// A message that leaves a controller.
    pub(super) fn judge_message(
        gone: u32,
        from: usize,
        to: NodeId,
        packet: &Packet,
    ) -> Result<(), Flaw> {
        let named = packet.message.body.names().filter(|_| {
            // A dead node may have left before; these name it to say so.
            !matches!(packet.message.body, crate::Body::Lost { .. })
        });
        let about = 1 << from | to.bit() | named.map_or(0, NodeId::bit);
        match NodeId::lowest(about & gone) {
            None => Ok(()),
            Some(node) => Err(Flaw::NotGone {
                node,
                what: "a message to, from or about it is sent",
            }),
        }
    }
}
