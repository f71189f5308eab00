//! What the owner shows of the aggregate, while it runs and at its end.

use super::Owner;
use crate::launch::nodes::{Body, Node};
use crate::launch::program::{ProgramOutcome, ProgramPlan};
use crate::report::{AggregateView, FORMAT, NodeState, NodeView, Report};
use crate::shared::Snapshot;
use crate::spawn::Ended;

impl Owner<'_> {
    /// After home's end: last counters, no process left, the report.
    pub(super) fn finish(mut self, ended: Ended) -> ProgramOutcome {
        self.entry = None;
        let wall_time_s = self.started.elapsed().as_secs_f64();
        for node in &mut self.aggregate.nodes {
            node.stop();
        }
        if let Some(why) = self
            .aggregate
            .home
            .killed_for_memory()
            .filter(|_| self.verdict.is_none())
        {
            self.tell(&format!("the program {ended}: {why}"));
        }
        let ended = self.verdict.map_or(ended, Ended::Exited);
        let (exit_code, signal) = match ended {
            Ended::Exited(code) => (Some(code), None),
            Ended::Signaled(signal) => (None, Some(signal)),
        };
        let aggregate = AggregateView {
            wall_time_s,
            ..self.view()
        };
        self.live.publish(aggregate.clone());
        ProgramOutcome {
            ended,
            report: Report {
                aggregate,
                exit_code,
                signal,
            },
        }
    }

    pub(super) fn view(&self) -> AggregateView {
        let home = Snapshot::of(&self.home_shared);
        let stretched = home.stretched;
        let owned = home.owned_pages_by_node.clone();
        let owned_pages = |node: u32| stretched.then(|| owned[node as usize]);
        let budget = |node: u32| self.aggregate.workload.settings.budget_pages[node as usize];
        let mut nodes = vec![NodeView {
            node: 0,
            name: "home".into(),
            state: NodeState::Running,
            pid: Some(self.aggregate.home.pid() as u32),
            budget_pages: self.home_budget_pages(),
            owned_pages: owned_pages(0),
            counters: home,
        }];
        nodes.extend(self.aggregate.nodes.iter().map(|node| NodeView {
            node: node.number,
            name: node.name.clone(),
            state: node.state,
            pid: node.pid(),
            budget_pages: budget(node.number),
            owned_pages: owned_pages(node.number),
            counters: node.counters(),
        }));
        let executing = nodes
            .iter()
            .find(|node| node.node != 0 && node.counters.executing);
        let executing_node = executing.map_or(0, |node| node.node);
        for node in &mut nodes {
            node.counters.owned_pages_by_node.clear();
            node.counters.beats = 0;
        }
        let arguments = self.aggregate.workload.program.arguments.iter();
        AggregateView {
            format: FORMAT,
            pid: std::process::id(),
            program_pid: self.aggregate.home.pid() as u32,
            command: arguments
                .map(|text| text.to_string_lossy().into_owned())
                .collect(),
            wall_time_s: self.started.elapsed().as_secs_f64(),
            generation: self.generation,
            stretched,
            executing_node,
            nodes,
        }
    }

    pub(super) fn publish(&self) {
        self.live.publish(self.view());
    }
}

impl Node<ProgramPlan> {
    /// Its counters as last heard.
    fn counters(&self) -> Snapshot {
        match &self.body {
            Body::Local(local) => Snapshot::of(&local.kept),
            Body::Remote(slice) => slice.counters().clone(),
        }
    }
}
