//! The move of node 0's part to another host, as far as hosts are concerned: home says what the
//! next step is, the daemon of the host of its last node carries it out.
//!
//! ```text
//! home ── Home(step) ──▶ launcher ── Home(step) ──▶ daemon
//!      ◀─ HomeReady, NodeReady, NodeFailed ── as the daemon answers
//!      ◀─ HomeLost ── the daemon cannot be reached
//! ```

use super::owner::{Awaited, Machine};
use crate::error::sentence;
use crate::launch::nodes::{Body, NodeEvent};
use crate::monitor_protocol::{HomeStep, LauncherMessage};
use crate::protocol::HomeRequest;
use crate::remote::HomePlace;
use crate::report::NodeState;

impl Machine<'_> {
    /// Home asks for a step.
    pub(super) fn move_home(&mut self, request: u64, number: u32, step: HomeStep) {
        let is_first = step == HomeStep::Prepare;
        let workload = &self.aggregate.workload;
        let home = HomeRequest {
            request,
            name: workload.plan.name.clone(),
            settings: match is_first {
                true => workload.settings.machine.clone(),
                false => String::new(),
            },
            step,
        };
        let node = self.aggregate.node(number);
        let node = node.filter(|node| node.state == NodeState::Running);
        let Some(Body::Remote(slice)) = node.map(|node| &mut node.body) else {
            // A host that was asked before may go on with the machine.
            self.tell_home(&match is_first {
                true => LauncherMessage::NodeFailed {
                    request,
                    reason: format!("node {number} is on this host"),
                },
                false => LauncherMessage::HomeLost {
                    request,
                    reason: format!("node {number} has ended"),
                },
            });
            return;
        };
        let sent = slice.move_home(home);
        self.home_step = Some(Awaited { request, number });
        if let Err(error) = sent {
            self.lose_home(number, sentence(&error));
        }
    }

    /// Whether an event of the node at `index` is about the move only.
    pub(super) fn moved_home(&mut self, index: usize, event: &NodeEvent) -> bool {
        let node = &self.aggregate.nodes[index];
        let (number, host) = (node.number, node.name.clone());
        match event {
            NodeEvent::Home { request, outcome } => {
                let is_awaited = |awaited: &mut Awaited| awaited.request == *request;
                if let Some(Awaited { request, .. }) = self.home_step.take_if(is_awaited) {
                    let message = match outcome.clone() {
                        Ok(HomePlace::Ready) => LauncherMessage::HomeReady { request, host },
                        Ok(HomePlace::Taken | HomePlace::Runs) => {
                            LauncherMessage::NodeReady { request }
                        }
                        Err(reason) => LauncherMessage::NodeFailed {
                            request,
                            reason: format!("{host}: {reason}"),
                        },
                    };
                    self.tell_home(&message);
                }
                true
            }
            NodeEvent::Unreachable(why) => {
                self.lose_home(number, why.clone());
                false
            }
            _ => false,
        }
    }

    fn lose_home(&mut self, number: u32, why: String) {
        let is_awaited = |awaited: &mut Awaited| awaited.number == number;
        if let Some(Awaited { request, .. }) = self.home_step.take_if(is_awaited) {
            let reason = format!("{} does not answer: {why}", self.aggregate.name(number));
            self.tell_home(&LauncherMessage::HomeLost { request, reason });
        }
    }
}
