//! Rates and their recent history, from one view to the next.

use std::collections::VecDeque;
use std::time::Instant;

use weft_node::report::AggregateView;
use weft_node::shared::Snapshot;

/// Frames of history: what the widest sparkline can show.
const HISTORY: usize = 120;

/// One node's rates, per second.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Rate {
    /// Pages fetched, read ahead included.
    pub pulls: f64,
    /// Pages sent away.
    pub pushes: f64,
    /// Executions that arrived.
    pub jumps: f64,
    pub sent_bytes: f64,
    pub received_bytes: f64,
}

/// See the module.
#[derive(Default)]
pub struct Rates {
    last: Option<(Instant, f64, Vec<Snapshot>)>,
    now: Vec<Rate>,
    history: Vec<VecDeque<(u64, u64)>>,
}

impl Rates {
    /// Takes the next view. One that was taken before changes nothing.
    pub fn take(&mut self, view: &AggregateView, now: Instant) {
        let counters: Vec<Snapshot> = view.nodes.iter().map(|n| n.counters.clone()).collect();
        self.history.resize_with(counters.len(), VecDeque::new);
        if let Some((_, time_s, before)) = &self.last {
            let seconds = view.wall_time_s - time_s;
            if seconds <= 0.0 {
                return;
            }
            self.now = counters
                .iter()
                .zip(before)
                .map(|(now, before)| rate(before, now, seconds))
                .collect();
            for (history, rate) in self.history.iter_mut().zip(&self.now) {
                let rounded = (
                    rate.sent_bytes.round() as u64,
                    rate.received_bytes.round() as u64,
                );
                history.push_back(rounded);
                if history.len() > HISTORY {
                    history.pop_front();
                }
            }
        }
        self.last = Some((now, view.wall_time_s, counters));
    }

    /// A node's rates.
    pub fn node(&self, index: usize) -> Rate {
        self.now.get(index).copied().unwrap_or_default()
    }

    /// All nodes together. What one sends another receives, so bytes count once.
    pub fn total(&self) -> Rate {
        self.now.iter().fold(Rate::default(), |sum, rate| Rate {
            pulls: sum.pulls + rate.pulls,
            pushes: sum.pushes + rate.pushes,
            jumps: sum.jumps + rate.jumps,
            sent_bytes: sum.sent_bytes + rate.sent_bytes,
            received_bytes: sum.received_bytes + rate.received_bytes,
        })
    }

    /// The last `length` rates of bytes sent and received, oldest first.
    pub fn history(&self, index: usize, length: usize) -> (Vec<u64>, Vec<u64>) {
        let Some(history) = self.history.get(index) else {
            return Default::default();
        };
        let skipped = history.len().saturating_sub(length);
        history.iter().skip(skipped).copied().unzip()
    }
}

fn rate(before: &Snapshot, now: &Snapshot, seconds: f64) -> Rate {
    let per_second = |before: u64, now: u64| now.saturating_sub(before) as f64 / seconds;
    Rate {
        pulls: per_second(before.pulls + before.read_ahead, now.pulls + now.read_ahead),
        pushes: per_second(before.pushes, now.pushes),
        jumps: per_second(before.jumps_in, now.jumps_in),
        sent_bytes: per_second(before.bytes_sent, now.bytes_sent),
        received_bytes: per_second(before.bytes_received, now.bytes_received),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weft_node::report::{FORMAT, NodeState, NodeView};

    fn view(wall_time_s: f64, pulls: u64) -> AggregateView {
        let counters = Snapshot {
            pulls,
            bytes_sent: pulls * 100,
            ..Snapshot::default()
        };
        AggregateView {
            format: FORMAT,
            pid: 1,
            program_pid: 1,
            command: vec!["sort".into()],
            wall_time_s,
            generation: 0,
            stretched: true,
            executing_node: 0,
            nodes: vec![NodeView {
                node: 0,
                name: "home".into(),
                state: NodeState::Running,
                pid: None,
                budget_pages: 256,
                owned_pages: None,
                counters,
            }],
        }
    }

    #[test]
    fn rates_are_per_second_and_history_is_bounded() {
        let mut rates = Rates::default();
        for step in 0..1000_u64 {
            rates.take(&view(step as f64 / 5.0, step * 10), Instant::now());
        }
        assert_eq!(rates.node(0).pulls.round(), 50.0);
        assert_eq!(rates.history(0, 1000).0.len(), HISTORY);
        assert_eq!(rates.history(0, 3).0, [5000; 3]);
        rates.take(&view(199.8, 9990), Instant::now());
        assert_eq!(
            rates.node(0).pulls.round(),
            50.0,
            "an old view changes nothing"
        );
    }

    #[test]
    fn the_line_names_every_node() {
        let mut rates = Rates::default();
        rates.take(&view(1.0, 0), Instant::now());
        rates.take(&view(2.0, 1234), Instant::now());
        let line = super::super::line(&view(2.0, 1234), &rates);
        assert!(
            line.contains("1234 pulls/s") && line.contains("home 0 B/1.0 MiB"),
            "{line}"
        );
    }
}
