//! The launcher of a process that takes the place of node 0 among other nodes: it inherits their
//! slices from the launcher that started them.

use weft_proc::boot::MAX_NODES;

use super::owner::Machine;
use super::plan::{HEIR_BYTES, HeirLinks, MachinePlan};
use crate::error::LaunchError;
use crate::launch::nodes::{Body, Node};
use crate::launch::signals::Signals;
use crate::links::{Link, Links};
use crate::monitor_protocol::OtherNode;
use crate::remote::{Connection, RemoteSlice};
use crate::report::NodeState;

/// The nodes that stay, as a daemon connected this launcher with them.
pub struct Inheritance {
    pub nodes: Vec<OtherNode>,
    /// Of the process, to each of them.
    pub links: Vec<Link>,
    /// To the daemon of each.
    pub daemons: Vec<Link>,
}

impl<'a> Machine<'a> {
    /// Starts the process that takes the place of node 0. The slices are this launcher's once that
    /// has done so.
    ///
    /// # Errors
    /// A process that cannot be started, or out of descriptors. Nothing is left.
    pub fn inherit(
        plan: MachinePlan,
        inheritance: Inheritance,
        signals: &'a Signals,
        say: &'a mut dyn FnMut(&str),
    ) -> Result<Machine<'a>, LaunchError> {
        let mut links: Links = (0..MAX_NODES).map(|_| None).collect();
        let mut nodes = Vec::new();
        let ends = inheritance.links.into_iter().zip(inheritance.daemons);
        for (node, (link, daemon)) in inheritance.nodes.into_iter().zip(ends) {
            let (number, host) = (node.number, node.host.clone());
            let connection = Connection::inherited(node, daemon);
            let connection =
                connection.map_err(LaunchError::system("take over a connection to a daemon"))?;
            if let Some(place) = links.get_mut(number as usize) {
                *place = Some(link);
            }
            let slice = Box::new(RemoteSlice::new(connection));
            nodes.push(Node::joined((number, host), Body::Remote(slice)));
        }
        let mut machine = Machine::with_nodes(plan, |_| Ok(nodes), signals, say)?;
        machine.inherited = Some(HeirLinks {
            links,
            memory_bytes: HEIR_BYTES,
        });
        Ok(machine)
    }

    /// The process has taken the place of node 0: so does this launcher.
    pub(super) fn inherit_slices(&mut self) {
        let nodes = self.aggregate.nodes.iter_mut();
        for node in nodes.filter(|node| node.state == NodeState::Running) {
            if let Body::Remote(slice) = &mut node.body {
                // A daemon that is gone is heard of as any other.
                let _ = slice.inherit();
            }
        }
    }
}
