//! Nodes that join a running machine and leave it, as far as processes are concerned: home
//! decides, the launcher starts and ends.
//!
//! ```text
//! home ── StartNode ──▶ a process, a link for each pair ─▶ Link to all, boot to it
//!      ◀─ NodeReady, NodeFailed ── as the process says
//! home ── EndNode ────▶ the process is ended and reaped
//! ```

use std::os::fd::AsFd;

use super::owner::Machine;
use crate::launch::nodes::{Body, Node, NodeEvent};
use crate::launch::workload::Workload;
use crate::links::{Link, Links};
use crate::monitor_protocol::{self, LauncherMessage};
use crate::options::Placement;
use crate::report::NodeState;
use crate::spawn;
use weft_proc::boot::MAX_NODES;

impl Machine<'_> {
    /// Home asks for one node more.
    pub(super) fn start_node(&mut self, number: u32, host: Option<String>, memory_bytes: u64) {
        if let Err(reason) = self.try_start_node(number, host, memory_bytes) {
            self.end_node(number);
            self.tell_home(&LauncherMessage::NodeFailed { number, reason });
        }
    }

    fn try_start_node(
        &mut self,
        number: u32,
        host: Option<String>,
        memory_bytes: u64,
    ) -> Result<(), String> {
        let workload = &self.aggregate.workload;
        if let Some(host) = host {
            return Err(format!(
                "{host}: a node on another host cannot join a running machine yet: leave the \
                 host out for one on this host"
            ));
        }
        if let Placement::Remote(hosts) = workload.placement() {
            return Err(format!(
                "the machine has nodes on other hosts ({}), to which a node that joins cannot \
                 be linked yet",
                hosts.join(", ")
            ));
        }
        let nodes = &self.aggregate.nodes;
        let is_used = nodes.iter().any(|node| node.number == number);
        if number == 0 || number as usize >= MAX_NODES || is_used {
            return Err(format!("there cannot be a further node {number}"));
        }
        let failed =
            |what: &'static str| move |error: std::io::Error| format!("cannot {what}: {error}");
        let process = spawn::start(workload.executable(), &workload.role())
            .map_err(failed("start weft-monitor"))?;
        let kept = workload.keep().map_err(|error| error.to_string())?;
        let mut links: Links = (0..MAX_NODES).map(|_| None).collect();
        let mut pair = |peer: u32| -> Result<Link, String> {
            let ends = Link::pair(workload.transport()).map_err(failed("make a link"))?;
            links[peer as usize] = Some(ends.0);
            Ok(ends.1)
        };
        let mut others = vec![(&self.aggregate.home.control, pair(0)?)];
        for node in nodes {
            if let (Body::Local(local), NodeState::Running) = (&node.body, node.state)
                && let Some(process) = &local.process
            {
                others.push((&process.control, pair(node.number)?));
            }
        }
        for (control, link) in others {
            monitor_protocol::send_link(control.as_fd(), number, link)
                .map_err(failed("hand out a link"))?;
        }
        workload
            .boot_into(&process, (number, Some(memory_bytes)), links, &[])
            .map_err(failed("describe the machine to its monitor"))?;
        self.aggregate
            .nodes
            .push(Node::joining(number, process, kept));
        Ok(())
    }

    /// Home says that a node did not join, or has left.
    pub(super) fn end_node(&mut self, number: u32) {
        if let Some(node) = self.aggregate.node(number) {
            node.state = NodeState::Left;
            node.stop();
        }
    }

    /// Whether an event is about a node that is joining: home hears of it.
    pub(super) fn grew(&mut self, index: usize, event: &NodeEvent) -> bool {
        let Some(node) = self.aggregate.nodes.get_mut(index) else {
            return false;
        };
        let number = node.number;
        let message = match event {
            NodeEvent::Ready => LauncherMessage::NodeReady { number },
            NodeEvent::Said(reason) if node.is_joining => LauncherMessage::NodeFailed {
                number,
                reason: reason.clone(),
            },
            NodeEvent::Ended { why, .. } if node.is_joining => LauncherMessage::NodeFailed {
                number,
                reason: why.clone(),
            },
            _ => return false,
        };
        node.is_joining = false;
        self.tell_home(&message);
        true
    }

    /// Numbers of nodes that have left are used again.
    pub(super) fn forget_nodes(&mut self) {
        self.aggregate
            .nodes
            .retain(|node| node.state != NodeState::Left);
    }

    fn tell_home(&self, message: &LauncherMessage) {
        // One that has ended asks for no more nodes.
        let _ = monitor_protocol::tell(self.aggregate.home.control.as_fd(), message);
    }
}
