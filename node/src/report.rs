//! What an aggregate tells about itself: while it runs ([`AggregateView`]) and
//! at its end ([`Report`]). Both are JSON with the units last in the names;
//! `docs/cli.md` lists the fields.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use serde::{Deserialize, Serialize};

use crate::shared::Snapshot;

/// Version of the JSON: raised when a field changes its meaning or goes.
pub const FORMAT: u32 = 1;

/// What became of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeState {
    /// In the aggregate.
    Running,
    /// Given back.
    Left,
    /// Gone without having been asked.
    Lost,
}

/// One node of a view or report.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct NodeView {
    /// Its number; home is 0.
    pub node: u32,
    /// `home`, `local N`, or the host as the user named it.
    pub name: String,
    /// What became of it.
    pub state: NodeState,
    /// Its runtime's process id, on its own host.
    pub pid: Option<u32>,
    /// Its budget for the program's pages.
    pub budget_pages: u64,
    /// Pages it owns, as home's directory has it; `None` before home stretched.
    pub owned_pages: Option<u64>,
    #[serde(flatten)]
    pub counters: Snapshot,
}

/// A running aggregate.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct AggregateView {
    /// [`FORMAT`].
    pub format: u32,
    /// The launcher's process id, by which the aggregate is known.
    pub pid: u32,
    /// The program's process id.
    pub program_pid: u32,
    /// The program and its arguments.
    pub command: Vec<String>,
    /// How long it has been running.
    pub wall_time_s: f64,
    /// Images executed before this one (`execve` of the main process).
    pub generation: u32,
    /// Whether it spans its nodes.
    pub stretched: bool,
    /// The node where the program executes.
    pub executing_node: u32,
    /// All nodes, home first.
    pub nodes: Vec<NodeView>,
}

/// What a run came to.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Report {
    /// The aggregate as it was at the end.
    #[serde(flatten)]
    pub aggregate: AggregateView,
    /// Exit code of the program, unless a signal ended it.
    pub exit_code: Option<i32>,
    /// Signal that ended the program.
    pub signal: Option<i32>,
}

/// The view that the launcher renews and anyone may read.
///
/// The lock guards the view alone; it is held for copying it, never during I/O.
#[derive(Default)]
pub struct LiveView {
    view: Mutex<Option<Arc<AggregateView>>>,
    watched: AtomicBool,
    finished: AtomicBool,
}

impl LiveView {
    /// A view that nobody watches yet.
    pub fn new() -> Arc<LiveView> {
        Arc::default()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<AggregateView>>> {
        // A panic aborts the process, so the lock cannot be poisoned.
        self.view
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Asks for a new view five times a second instead of once.
    pub fn watch(&self) {
        self.watched.store(true, Ordering::Relaxed);
    }

    /// Whether somebody looks.
    pub fn watched(&self) -> bool {
        self.watched.load(Ordering::Relaxed)
    }

    /// The newest view; `None` before the program started.
    pub fn view(&self) -> Option<Arc<AggregateView>> {
        self.lock().clone()
    }

    /// Replaces the view.
    pub fn publish(&self, view: AggregateView) {
        let view = Some(Arc::new(view));
        *self.lock() = view;
    }

    /// Whether the program has ended.
    pub fn finished(&self) -> bool {
        self.finished.load(Ordering::Relaxed)
    }

    /// Says that the program has ended.
    pub fn finish(&self) {
        self.finished.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_has_the_documented_fields() {
        let report = Report {
            aggregate: AggregateView {
                format: FORMAT,
                pid: 1,
                program_pid: 2,
                command: vec!["true".into()],
                wall_time_s: 0.5,
                generation: 0,
                stretched: true,
                executing_node: 0,
                nodes: vec![NodeView {
                    node: 0,
                    name: "home".into(),
                    state: NodeState::Running,
                    pid: Some(2),
                    budget_pages: 256,
                    owned_pages: Some(1),
                    counters: Snapshot::default(),
                }],
            },
            exit_code: Some(0),
            signal: None,
        };
        let json = serde_json::to_value(&report).unwrap();
        for field in [
            "format",
            "wall_time_s",
            "exit_code",
            "signal",
            "stretched",
            "nodes",
        ] {
            assert!(json.get(field).is_some(), "{field}");
        }
        let fields = [
            "resident_pages",
            "resident_pages_max",
            "budget_pages",
            "owned_pages",
            "read_faults",
            "write_faults",
            "upgrade_faults",
            "first_touch_faults",
            "pulls",
            "pushes",
            "read_ahead",
            "read_ahead_used",
            "jumps_in",
            "jumps_out",
            "bytes_sent",
            "bytes_received",
            "state",
            "name",
            "node",
        ];
        for field in fields {
            assert!(json["nodes"][0].get(field).is_some(), "{field}");
        }
        for latency in ["pull_latency", "jump_latency"] {
            for field in ["count", "p50_ns", "p90_ns", "p99_ns", "max_ns"] {
                assert!(
                    json["nodes"][0][latency].get(field).is_some(),
                    "{latency}.{field}"
                );
            }
        }
        let back: Report = serde_json::from_value(json).unwrap();
        assert_eq!(back.aggregate.nodes[0].budget_pages, 256);
    }
}
