//! Rates, from one reading of a machine's counters to the next.

use std::collections::BTreeMap;

use serde::Serialize;
use weft_api::{Counters, LocationView, VmView};
use weft_machine::SLICES_MAX;
use weft_node::size::PAGE_BYTES;

/// Counters of a vCPU that stand for leaving the guest's code.
const EXITS: [&str; 7] = [
    "mmio",
    "apic",
    "ports",
    "msrs",
    "halts",
    "kicks",
    "deadlines",
];

/// A machine at one moment.
pub struct Reading {
    /// What it is and does.
    pub view: VmView,
    /// Its numbers.
    pub counters: Counters,
}

impl Reading {
    fn counter(&self, name: &str) -> Option<u64> {
        self.counters.counters.get(name).copied()
    }
}

/// A vCPU; rates are per second.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct VcpuSample {
    /// Its number.
    pub vcpu: u32,
    pub node: usize,
    /// How often it moved until it was there.
    pub epoch: u64,
    pub state: String,
    /// How often it left the guest's code.
    pub exits: f64,
    /// Interrupts that it took.
    pub interrupts: f64,
    /// Faults that needed another node.
    pub faults: f64,
    /// The share of time that it waited for pages, 0 to 1.
    pub waited: f64,
}

/// A node; rates are per second.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NodeSample {
    /// Its number.
    pub node: usize,
    /// Guest memory that its host has there now, in bytes.
    pub memory_bytes: u64,
    /// How much it may have; none: as much as there is.
    pub budget_bytes: Option<u64>,
    /// Pages that were evicted.
    pub evicted: f64,
    /// Faults of all who use memory there.
    pub faults: f64,
    /// Pages sent with their bytes.
    pub pages_sent: f64,
    /// Pages received with their bytes.
    pub pages_received: f64,
    pub messages_sent: f64,
    pub messages_received: f64,
    /// Bytes sent, framing and sealing included.
    pub bytes_sent: f64,
    /// Bytes received, sealing not included.
    pub bytes_received: f64,
    /// The same, by the nodes that sent them.
    pub bytes_received_from: BTreeMap<usize, f64>,
}

/// The guest's memory.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MemorySample {
    /// What the guest has, in bytes.
    pub guest_bytes: u64,
    /// What it takes on all hosts together.
    pub host_bytes: u64,
    /// What the guest gave back on request; none: the machine has no balloon.
    pub balloon_bytes: Option<u64>,
    /// What it was asked to give back.
    pub balloon_target_bytes: Option<u64>,
}

impl MemorySample {
    fn at(now: &Reading) -> Self {
        let configuration = &now.view.configuration;
        let nodes = nodes(now).max(1);
        let host_bytes = |node: usize| now.counter(&format!("slice{node}.memory.host-bytes"));
        let balloon = |name: &str| {
            let mut counters = now.counters.counters.iter();
            let is_it = |part: &str| part.starts_with("balloon");
            let found = counters.find(|(key, _)| {
                key.split_once('.')
                    .is_some_and(|(part, rest)| is_it(part) && rest == name)
            });
            found.map(|(_, count)| *count)
        };
        Self {
            guest_bytes: configuration.memory_bytes,
            host_bytes: (0..nodes).filter_map(host_bytes).sum(),
            balloon_bytes: balloon("bytes"),
            balloon_target_bytes: balloon("target-bytes"),
        }
    }
}

/// Nodes of the start, and those that joined up to the last number in use; none of a machine
/// that stays on one node.
fn nodes(now: &Reading) -> usize {
    let number = |name: &String| {
        let (slice, _) = name.strip_prefix("slice")?.split_once(".memory.")?;
        slice.parse::<usize>().ok()
    };
    match now.view.configuration.slices.len() {
        0 => 0,
        start => {
            let last = now.counters.counters.keys().filter_map(number).max();
            start.max(last.map_or(0, |last| last + 1)).min(SLICES_MAX)
        }
    }
}

/// A machine over some time.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Sample {
    pub name: String,
    pub state: String,
    /// Since it was put together, at the end of the time.
    pub uptime_s: f64,
    /// How long the time was.
    pub seconds: f64,
    pub memory: MemorySample,
    pub vcpus: Vec<VcpuSample>,
    /// Each node up to the last; none of a machine that stays on one node.
    pub nodes: Vec<NodeSample>,
}

impl Sample {
    /// What happened between two readings.
    pub fn between(before: &Reading, now: &Reading) -> Sample {
        let seconds = (now.counters.uptime_s - before.counters.uptime_s).max(0.0);
        let rate = |name: String| {
            let value = |reading: &Reading| reading.counters.counters.get(&name).copied();
            let grown = value(now)
                .unwrap_or_default()
                .saturating_sub(value(before).unwrap_or_default());
            // After a restart the clock begins anew, and so do the numbers.
            if seconds > 0.0 {
                grown as f64 / seconds
            } else {
                0.0
            }
        };
        let vcpu = |(vcpu, (state, location)): (u32, (&String, &LocationView))| {
            let of = |name: &str| rate(format!("vcpu{vcpu}.{name}"));
            VcpuSample {
                vcpu,
                node: location.node,
                epoch: location.epoch,
                state: state.clone(),
                exits: EXITS.iter().map(|name| of(name)).sum(),
                interrupts: of("interrupts"),
                faults: of("faults"),
                waited: of("waited-ns") / 1e9,
            }
        };
        let node = |node: usize| {
            let of = |name: &str| rate(format!("slice{node}.{name}"));
            let now = |name: &str| now.counter(&format!("slice{node}.memory.{name}"));
            NodeSample {
                node,
                memory_bytes: now("host-bytes").unwrap_or(0),
                budget_bytes: now("budget-pages").map(|pages| pages * PAGE_BYTES),
                evicted: of("memory.evicted-dropped") + of("memory.evicted-sent"),
                faults: of("memory.read-faults")
                    + of("memory.write-faults")
                    + of("memory.upgrade-faults"),
                pages_sent: of("memory.pages-sent"),
                pages_received: of("memory.pages-received"),
                messages_sent: of("sent-messages"),
                messages_received: of("received-messages"),
                bytes_sent: of("sent-bytes"),
                bytes_received: of("received-bytes"),
                bytes_received_from: (0..SLICES_MAX)
                    .map(|from| (from, of(&format!("from{from}.received-bytes"))))
                    .filter(|(_, rate)| *rate > 0.0)
                    .collect(),
            }
        };
        Sample {
            name: now.view.name.clone(),
            state: now.view.state.name().to_owned(),
            uptime_s: now.counters.uptime_s,
            seconds,
            memory: MemorySample::at(now),
            vcpus: (0..)
                .zip(now.view.vcpus.iter().zip(&now.view.locations))
                .map(vcpu)
                .collect(),
            nodes: (0..nodes(now)).map(node).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weft_api::{BackEndView, ConsoleView, State};
    use weft_machine::{Configuration, Share};

    fn reading(uptime_s: f64, counts: &[(&str, u64)]) -> Reading {
        let mut configuration = Configuration::new("vmlinux".into(), 128 << 20);
        let share = Share {
            cpus: 1,
            memory_bytes: 64 << 20,
        };
        configuration.cpus = 2;
        configuration.slices = vec![share, share];
        Reading {
            view: VmView {
                name: "t".into(),
                pid: 1,
                machine_pid: 2,
                version: "0".into(),
                state: State::Running,
                end: None,
                back_end: BackEndView {
                    name: "soft".into(),
                    reason: String::new(),
                },
                uptime_s,
                guest_time_s: uptime_s,
                restarts: 0,
                vcpus: vec!["running".into(), "halted".into()],
                locations: [(0, 0), (1, 4)]
                    .map(|(node, epoch)| LocationView { node, epoch })
                    .into(),
                console: ConsoleView::Stdio,
                configuration,
            },
            counters: Counters {
                uptime_s,
                counters: counts
                    .iter()
                    .map(|(name, count)| ((*name).to_owned(), *count))
                    .collect(),
            },
        }
    }

    #[test]
    fn rates_are_per_second_and_of_the_right_node() {
        let before = reading(10.0, &[("vcpu1.halts", 5), ("vcpu1.waited-ns", 0)]);
        let now = reading(
            12.0,
            &[
                ("vcpu1.halts", 25),
                ("vcpu1.ports", 4),
                ("vcpu1.waited-ns", 500_000_000),
                ("slice1.sent-messages", 8),
                ("slice1.from0.received-bytes", 512),
                ("slice1.memory.upgrade-faults", 6),
                ("slice0.memory.host-bytes", 3 << 20),
                ("slice1.memory.host-bytes", 2 << 20),
                ("balloon5.bytes", 1 << 20),
                ("balloon5.target-bytes", 4 << 20),
                ("slice1.memory.budget-pages", 1024),
                ("slice1.memory.evicted-sent", 4),
            ],
        );
        let sample = Sample::between(&before, &now);
        let vcpu = &sample.vcpus[1];
        assert_eq!((vcpu.node, vcpu.exits, vcpu.waited), (1, 12.0, 0.25));
        assert_eq!((sample.vcpus[0].epoch, vcpu.epoch), (0, 4));
        assert_eq!((sample.vcpus[0].node, sample.vcpus[0].exits), (0, 0.0));
        let node = &sample.nodes[1];
        assert_eq!((node.messages_sent, node.faults), (4.0, 3.0));
        assert_eq!((node.memory_bytes, node.evicted), (2 << 20, 2.0));
        assert_eq!(node.budget_bytes, Some(4 << 20));
        let memory = MemorySample {
            guest_bytes: 128 << 20,
            host_bytes: 5 << 20,
            balloon_bytes: Some(1 << 20),
            balloon_target_bytes: Some(4 << 20),
        };
        assert_eq!(sample.memory, memory);
        assert_eq!(sample.nodes[0].budget_bytes, None);
        let text = super::super::render::render(&sample);
        assert!(text.contains("halted") && text.contains("25.0 %"), "{text}");
        assert_eq!(sample.nodes.len(), 2);
        // Node 3 joined, and node 2 has left.
        let mut grown = now;
        let mut count = |name: &str| grown.counters.counters.insert(name.to_owned(), 1);
        count("slice3.memory.host-bytes");
        let nodes = Sample::between(&before, &grown).nodes;
        assert_eq!(nodes.len(), 4);
        assert_eq!((nodes[2].memory_bytes, nodes[3].memory_bytes), (0, 1));
        let now = grown;
        // A machine that restarted must not show negative rates.
        let again = Sample::between(&now, &before);
        assert_eq!(again.vcpus[1].exits, 0.0);
    }
}
