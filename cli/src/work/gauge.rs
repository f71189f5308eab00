//! What an aggregate does on its hosts: memory, where it executes, and the bytes between them.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use weft_api::{Counters, VmView};
use weft_cluster::{Flow, Live, LiveHost};
use weft_machine::membership::JobView;
use weft_node::report::{AggregateView, NodeState};
use weft_node::rundir::{self, AggregateReply, AggregateRequest};
use weft_node::size::PAGE_BYTES;

use super::mover::Spread;

/// How long a machine may take to answer.
const BOUND: Duration = Duration::from_secs(1);

/// A machine at one moment.
struct Reading {
    view: VmView,
    counters: Counters,
}

/// The program of this launcher, if it answers.
fn program_of(launcher: u32) -> Option<AggregateView> {
    let directory = rundir::directory().ok()?;
    match rundir::ask(&directory, launcher, &AggregateRequest::View).ok()? {
        AggregateReply::View(view) => Some(*view),
        AggregateReply::Done | AggregateReply::Refused(_) => None,
    }
}

/// The hosts that the program of this launcher has left; none if it does not answer.
pub fn left_hosts(launcher: u32) -> Vec<String> {
    let nodes = program_of(launcher).map_or_else(Vec::new, |view| view.nodes);
    let nodes = nodes.into_iter().filter(|node| node.node > 0);
    // A program survives the loss of a node without pages.
    let left = nodes.filter(|node| node.state != NodeState::Running);
    left.map(|node| node.name).collect()
}

/// What was read last.
#[derive(Default)]
pub struct Gauge {
    machine: Option<Reading>,
    program: Option<(AggregateView, Instant)>,
}

impl Gauge {
    /// This machine since the last reading; `None` the first time, or if it does not answer.
    pub fn machine(&mut self, spread: &Spread) -> Option<Live> {
        let client = spread.client().ok()?;
        let now = Reading {
            view: client.view(BOUND).ok()?,
            counters: client.counters().ok()?,
        };
        let before = self.machine.replace(now)?;
        let live = of_machine(&before, self.machine.as_ref()?, &spread.hosts);
        let change = client.change().ok().filter(|change| !change.is_over());
        Some(Live {
            moved: change.and_then(|change| moved(&change.progress)),
            ..live
        })
    }

    /// The program of this launcher since the last reading.
    pub fn program(&mut self, launcher: u32, home: &str) -> Option<Live> {
        let now = program_of(launcher)?;
        let (before, at) = self.program.replace((now, Instant::now()))?;
        let (now, _) = self.program.as_ref()?;
        Some(of_program(&before, now, at.elapsed().as_secs_f64(), home))
    }
}

/// The part of a move's bytes that has been sent, 0 to 1.
fn moved(progress: &JobView) -> Option<f64> {
    let all = progress.bytes_sent + progress.bytes_left;
    (all > 0).then(|| progress.bytes_sent as f64 / all as f64)
}

/// What a machine does, from its counters.
fn of_machine(before: &Reading, now: &Reading, hosts: &BTreeMap<usize, String>) -> Live {
    let count = |of: &Reading, name: &str| of.counters.counters.get(name).copied();
    let seconds = now.counters.uptime_s - before.counters.uptime_s;
    let mut live = Live::default();
    for (node, host) in hosts {
        let locations = now.view.locations.iter();
        let vcpus = locations.filter(|location| location.node == *node).count();
        live.hosts.push(LiveHost {
            host: host.clone(),
            memory_bytes: count(now, &format!("slice{node}.memory.host-bytes")).unwrap_or(0),
            vcpus: Some(vcpus as u32),
            executes: vcpus > 0,
        });
        for (sender, from) in hosts {
            let name = format!("slice{node}.from{sender}.received-bytes");
            let Some(bytes) = count(now, &name) else {
                continue;
            };
            // After a restart of the guest the numbers begin anew.
            let grown = bytes.saturating_sub(count(before, &name).unwrap_or(0));
            live.flows.push(Flow {
                from: from.clone(),
                to: host.clone(),
                bytes_per_s: grown as f64 / seconds.max(0.001),
            });
        }
    }
    live
}

/// The bytes between three nodes are known by node only: there, all that a node receives counts
/// as home's, and all that it sends, too.
fn of_program(before: &AggregateView, now: &AggregateView, seconds: f64, home: &str) -> Live {
    let mut live = Live::default();
    let running = now
        .nodes
        .iter()
        .filter(|node| node.state == NodeState::Running);
    for node in running {
        let host = match node.node {
            0 => home.to_owned(),
            _ => node.name.clone(),
        };
        live.hosts.push(LiveHost {
            host: host.clone(),
            memory_bytes: node.owned_pages.unwrap_or(0) * PAGE_BYTES,
            vcpus: None,
            executes: node.node == now.executing_node,
        });
        let earlier = before
            .nodes
            .iter()
            .find(|earlier| earlier.node == node.node);
        let (Some(earlier), true) = (earlier, node.node > 0 && seconds > 0.0) else {
            continue;
        };
        let (earlier, latest) = (&earlier.counters, &node.counters);
        let rate = |before: u64, now: u64| now.saturating_sub(before) as f64 / seconds;
        let flow = |from: &str, to: &str, bytes_per_s| Flow {
            from: from.to_owned(),
            to: to.to_owned(),
            bytes_per_s,
        };
        let received = rate(earlier.bytes_received, latest.bytes_received);
        let sent = rate(earlier.bytes_sent, latest.bytes_sent);
        live.flows.push(flow(home, &host, received));
        live.flows.push(flow(&host, home, sent));
    }
    live
}

#[cfg(test)]
mod tests {
    use super::*;
    use weft_node::report::{FORMAT, NodeView};
    use weft_node::shared::Snapshot;

    fn view(nodes: &[(u64, u64)]) -> AggregateView {
        let node = |(number, (sent, owned)): (u32, &(u64, u64))| NodeView {
            node: number,
            name: ["home", "beta"][number as usize].into(),
            state: NodeState::Running,
            pid: None,
            budget_pages: 256,
            owned_pages: Some(*owned),
            counters: Snapshot {
                bytes_sent: *sent,
                bytes_received: 10 * sent,
                ..Snapshot::default()
            },
        };
        AggregateView {
            format: FORMAT,
            pid: 1,
            program_pid: 1,
            command: vec!["sort".into()],
            wall_time_s: 1.0,
            generation: 0,
            stretched: true,
            executing_node: 1,
            nodes: (0..).zip(nodes).map(node).collect(),
        }
    }

    #[test]
    fn a_program_has_its_memory_and_traffic_by_host() {
        let (before, now) = (view(&[(0, 9), (100, 1)]), view(&[(7, 8), (300, 2)]));
        let live = of_program(&before, &now, 2.0, "alpha");
        let hosts: Vec<(&str, u64, bool)> = live
            .hosts
            .iter()
            .map(|here| (&here.host[..], here.memory_bytes, here.executes))
            .collect();
        assert_eq!(hosts, [("alpha", 8 << 12, false), ("beta", 2 << 12, true)]);
        let flow = |from: &str, to: &str, bytes_per_s| Flow {
            from: from.into(),
            to: to.into(),
            bytes_per_s,
        };
        let expected = [flow("alpha", "beta", 1000.0), flow("beta", "alpha", 100.0)];
        assert_eq!(live.flows, expected);
    }
}
