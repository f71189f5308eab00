//! Nodes that join a running machine and leave it, as far as processes are concerned: home
//! decides, the launcher starts and ends.
//!
//! ```text
//! home ── StartNode ──▶ Expect to daemons of slices on other hosts
//!                       all expect it ─▶ a thread: links to them; a slice on another host
//!                                    ─▶ Link to all nodes here, a process here gets its own
//!      ◀─ NodeReady, NodeFailed ── as the process says
//! home ── EndNode ────▶ the process is ended and reaped, a host gets back what it lent
//! ```
//!
//! The thread is that of [`super::joining`]; the owner serves the machine meanwhile.

use std::os::fd::{AsFd, BorrowedFd};

use super::joining::{Joining, Linking, Made, Order, Started, There};
use super::owner::Machine;
use super::plan::reservation_bytes;
use crate::error::sentence;
use crate::launch::nodes::{Body, Node, NodeEvent};
use crate::launch::workload::Workload;
use crate::links::{Link, Links};
use crate::monitor_protocol::{self, HomeStep, LauncherMessage};
use crate::protocol::{DaemonRequest, MachineJoin, MachineStart};
use crate::remote::FarEnd;
use crate::report::NodeState;
use crate::size::PAGE_BYTES;
use crate::spawn;
use weft_proc::boot::MAX_NODES;

impl Machine<'_> {
    /// Home asks for one node more.
    pub(super) fn start_node(&mut self, request: u64, node: (u32, Option<String>, u64)) {
        let begun = self.announce(request, node);
        let done = begun.and_then(|joining| {
            self.joining = Some(joining);
            self.link_once_expected()
        });
        self.fail_if(request, done);
    }

    pub(super) fn fail_if(&mut self, request: u64, done: Result<(), String>) {
        if let Err(reason) = done {
            self.joining = None;
            self.tell_home(&LauncherMessage::NodeFailed { request, reason });
        }
    }

    /// Has the daemons of slices on other hosts expect the node's links.
    pub(super) fn announce(
        &mut self,
        request: u64,
        (number, host, memory_bytes): (u32, Option<String>, u64),
    ) -> Result<Joining, String> {
        let nodes = &mut self.aggregate.nodes;
        let is_used = nodes.iter().any(|node| node.number == number);
        if number == 0 || number as usize >= MAX_NODES || is_used {
            return Err(format!("there cannot be a further node {number}"));
        }
        let mut far = Vec::new();
        for node in nodes.iter_mut() {
            if let (Body::Remote(slice), NodeState::Running) = (&mut node.body, node.state) {
                let end = FarEnd::announce(slice, number).map_err(|error| sentence(&error))?;
                far.push((node.number, end));
            }
        }
        Ok(Joining {
            request,
            number,
            memory_bytes,
            host,
            daemons: None,
            unexpected: far.iter().map(|(peer, _)| *peer).collect(),
            far,
            linking: None,
        })
    }

    /// Once all daemons expect the node's links, they are made.
    pub(super) fn link_once_expected(&mut self) -> Result<(), String> {
        let is_ready = |joining: &mut Joining| joining.unexpected.is_empty();
        let Some(mut joining) = self.joining.take_if(is_ready) else {
            return Ok(());
        };
        let host = joining.host.clone();
        let there = host.map(|host| self.there(&mut joining, host));
        let far = std::mem::take(&mut joining.far);
        if there.is_none() && far.is_empty() {
            let links = Vec::new();
            return self.admit(&joining, Made { slice: None, links });
        }
        let order = Order {
            number: joining.number,
            lease_ms: self.aggregate.workload.lease().as_millis() as u32,
            far,
            there,
        };
        let linking = Linking::begin(order);
        let failed = |error| format!("cannot begin with its links: {error}");
        joining.linking = Some(linking.map_err(failed)?);
        self.joining = Some(joining);
        Ok(())
    }

    /// What another host is asked for.
    fn there(&self, joining: &mut Joining, host: String) -> There {
        let workload = &self.aggregate.workload;
        let plan = &workload.plan;
        // Any of the machine's vCPUs may move there. A node 0 without memory is no place for them.
        let cpus = plan.shares.iter().map(|share| share.cpus).sum();
        let reserved_for = if joining.daemons.is_some() { 0 } else { cpus };
        let bytes = reservation_bytes(joining.memory_bytes, reserved_for);
        let is_running = |node: &&Node<_>| node.state == NodeState::Running;
        let running = self.aggregate.nodes.iter().filter(is_running);
        let others: Vec<u32> = running.map(|node| node.number).chain([0]).collect();
        let is_far = |node: &u32| joining.far.iter().any(|(peer, _)| peer == node);
        There {
            host,
            configuration: plan.configuration.clone(),
            features: plan.features,
            reservation: DaemonRequest::Open {
                command: format!("vm {}", plan.name),
                node: joining.number,
                budget_pages: Some(bytes.div_ceil(PAGE_BYTES)),
                lease_ms: plan.lease.as_millis() as u32,
            },
            what: match joining.daemons.as_mut().map(std::mem::take) {
                Some(daemons) => Started::Heir(daemons),
                None => Started::Slice {
                    here: (others.iter().copied())
                        .filter(|node| !is_far(node))
                        .collect(),
                    start: MachineStart {
                        slices: plan.placement.nodes() as u32,
                        cpus,
                        settings: workload.settings.machine.clone(),
                        joins: Some(MachineJoin {
                            memory_bytes: joining.memory_bytes,
                            peers: others,
                        }),
                    },
                },
            },
        }
    }

    /// Takes what the thread made.
    pub(super) fn hear_linking(&mut self) {
        let Some(made) = self.joining.as_ref().and_then(Joining::made) else {
            return;
        };
        if let Some(joining) = self.joining.take() {
            let admitted = made.and_then(|made| self.admit(&joining, made));
            self.fail_if(joining.request, admitted);
        }
    }

    /// Hands out the links; a process here is started for a node of this host.
    fn admit(&mut self, joining: &Joining, made: Made) -> Result<(), String> {
        let number = joining.number;
        match (made.slice, &joining.host) {
            (Some(slice), Some(host)) => {
                self.hand_out(number, made.links)?;
                let body = Body::Remote(slice);
                let node = Node::joined((number, host.clone()), body);
                self.aggregate.nodes.push(node);
                let request = joining.request;
                if joining.daemons.is_some() {
                    self.move_home(request, number, HomeStep::Prepare);
                    return Ok(());
                }
                self.tell_home(&LauncherMessage::NodeReady { request });
                Ok(())
            }
            _ => self.start_here(joining, made.links),
        }
    }

    fn start_here(&mut self, joining: &Joining, far: Vec<(u32, Link)>) -> Result<(), String> {
        let workload = &self.aggregate.workload;
        let number = joining.number;
        let failed =
            |what: &'static str| move |error: std::io::Error| format!("cannot {what}: {error}");
        let process = spawn::start(workload.executable(), &workload.role())
            .map_err(failed("start weft-monitor"))?;
        let kept = workload.keep().map_err(|error| error.to_string())?;
        let mut links: Links = (0..MAX_NODES).map(|_| None).collect();
        for (peer, link) in far {
            links[peer as usize] = Some(link);
        }
        let mut others = Vec::new();
        for (peer, _) in self.nodes_here() {
            let ends = Link::pair(workload.transport()).map_err(failed("make a link"))?;
            links[peer as usize] = Some(ends.0);
            others.push((peer, ends.1));
        }
        self.hand_out(number, others)?;
        workload
            .boot_into(&process, (number, Some(joining.memory_bytes)), links, &[])
            .map_err(failed("describe the machine to its monitor"))?;
        let node = Node::joining(joining.request, number, process, kept);
        self.aggregate.nodes.push(node);
        Ok(())
    }

    /// The nodes of this host that run, with their control sockets.
    fn nodes_here(&self) -> impl Iterator<Item = (u32, BorrowedFd<'_>)> {
        let home = (0, self.aggregate.home.control.as_fd());
        let others = self.aggregate.nodes.iter();
        let others = others.filter(|node| node.state == NodeState::Running);
        let others = others.filter_map(|node| match &node.body {
            Body::Local(local) => Some((node.number, local.process.as_ref()?.control.as_fd())),
            Body::Remote(_) => None,
        });
        others.chain([home])
    }

    /// Gives nodes of this host their links to a node that joins.
    fn hand_out(&self, number: u32, links: Vec<(u32, Link)>) -> Result<(), String> {
        for (peer, link) in links {
            let mut nodes = self.nodes_here();
            let (_, control) = (nodes.find(|(node, _)| *node == peer))
                .ok_or_else(|| format!("node {peer} has gone"))?;
            monitor_protocol::send_link(control, number, link)
                .map_err(|error| format!("cannot hand out a link: {error}"))?;
        }
        Ok(())
    }

    /// Home says that a node did not join, or has left: its number can be used again at once.
    pub(super) fn end_node(&mut self, number: u32) {
        self.joining.take_if(|joining| joining.number == number);
        let nodes = &mut self.aggregate.nodes;
        let at = nodes.iter().position(|node| node.number == number);
        if let Some(mut node) = at.map(|at| nodes.remove(at)) {
            node.end();
        }
    }

    /// Whether an event is about a node that is joining: home hears of it.
    pub(super) fn grew(&mut self, index: usize, event: &NodeEvent) -> bool {
        let Some(node) = self.aggregate.nodes.get_mut(index) else {
            return false;
        };
        if let NodeEvent::Expects(answer) = event {
            let number = node.number;
            self.expected(number, answer.clone());
            return true;
        }
        let Some(request) = node.joins_for else {
            return false;
        };
        let message = match event {
            NodeEvent::Ready => LauncherMessage::NodeReady { request },
            NodeEvent::Said(reason) | NodeEvent::Ended { why: reason, .. } => {
                LauncherMessage::NodeFailed {
                    request,
                    reason: reason.clone(),
                }
            }
            _ => return false,
        };
        node.joins_for = None;
        self.tell_home(&message);
        true
    }

    /// A daemon has answered whether it expects the link.
    fn expected(&mut self, peer: u32, answer: Result<(), String>) {
        let name = self.aggregate.name(peer);
        let Some(joining) = &mut self.joining else {
            return;
        };
        joining.unexpected.remove(&peer);
        let request = joining.request;
        let done = answer.map_err(|why| format!("{name}: {why}"));
        let done = done.and_then(|()| self.link_once_expected());
        self.fail_if(request, done);
    }

    pub(super) fn tell_home(&self, message: &LauncherMessage) {
        // One that has ended asks for no more nodes.
        let _ = monitor_protocol::tell(self.aggregate.home.control.as_fd(), message);
    }
}
