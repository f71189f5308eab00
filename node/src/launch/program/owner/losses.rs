//! Nodes that are lost: what is known of why, and what home is told.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use weft_proc::boot::{ControlMessage, KICK_SIGNAL};
use weft_proc::stats::COMMAND_LOST;

use super::{Command, Owner, Pending};
use crate::launch::aggregate::AggregateOwner as _;
use crate::report::NodeState;
use crate::{control, sys};

/// How much later than its slices home may be seen to end.
const HOME_END_GRACE: Duration = Duration::from_millis(200);

/// How much later than home's word that a node is gone its reason may come.
const CAUSE_GRACE: Duration = Duration::from_secs(1);

impl Owner<'_> {
    /// Home says that a node has gone, and what went with it. It ends with 122.
    pub(super) fn home_lost(&mut self, message: &ControlMessage) {
        let name = self.aggregate.name(message.node);
        let mut parts = Vec::new();
        match message.words[0] {
            0 => {}
            1 => parts.push("1 page had its only copy there".to_owned()),
            pages => parts.push(format!("{pages} pages had their only copy there")),
        }
        if message.words[1] != 0 {
            parts.push("the program was executing there".to_owned());
        }
        if parts.is_empty() {
            parts.push("nothing of the program was there".to_owned());
        }
        let lost = parts.join(", and ");
        let why = self.learn_why(message.node).or_else(|| {
            let text = control::text(message);
            (!text.is_empty()).then_some(text)
        });
        self.tell(&match why {
            Some(why) => format!("node {name} was lost: {why}; {lost}"),
            None => format!("node {name} was lost: {lost}"),
        });
        if let Some(node) = self.aggregate.node(message.node) {
            node.state = NodeState::Lost;
            node.stop();
        }
    }

    /// Why a node that home misses has gone. Its slice's parent sees the end
    /// later than home, whose link closes first.
    fn learn_why(&mut self, number: u32) -> Option<String> {
        let deadline = Instant::now() + CAUSE_GRACE;
        let node = self.aggregate.node(number)?;
        // Otherwise the reason was told when it became known.
        while node.state == NodeState::Running {
            node.listen();
            let left = deadline.saturating_duration_since(Instant::now());
            if node.cause.reason().is_some() || node.cause.has_ended() || left.is_zero() {
                return node.cause.reason().map(str::to_owned);
            }
            sys::wait_readable(&node.descriptors(), left).ok()?;
        }
        None
    }

    /// A slice is gone without home having said so.
    pub(super) fn slice_gone(&mut self, number: u32) {
        // When home ends, its links close and the slices end with it: which of
        // the ends is seen first is chance.
        let home_ends = sys::wait_readable(&[self.aggregate.home.pidfd()], HOME_END_GRACE);
        // What home says of it counts first: home knows what was lost.
        self.hear_home();
        let node = self.aggregate.node(number);
        let gone = node.filter(|node| node.state == NodeState::Running && node.cause.has_ended());
        let Some(node) = gone else {
            return;
        };
        if home_ends.is_ok_and(|ready| ready[0]) {
            node.stop();
            // A slice that was killed is why home ended: worth a sentence.
            if let Some(why) = node.cause.reason().map(str::to_owned) {
                let name = self.aggregate.name(number);
                self.tell(&format!("node {name} was lost: {why}"));
            }
            return;
        }
        let why = node.cause.reason_to_be_gone().to_owned();
        let leaving =
            self.position(|what| matches!(what, Command::Shrink { node, .. } if *node == number));
        let name = self.aggregate.name(number);
        // While home brings a node's pages elsewhere it closes the link at the
        // end, and the slice goes; home's answer is on its way.
        if leaving.is_some() && self.home_shared.command.load(Ordering::Acquire) == 0 {
            if let Some(node) = self.aggregate.node(number) {
                node.state = NodeState::Left;
                node.stop();
            }
            return;
        }
        self.tell(&format!("node {name} was lost: {why}"));
        if let Some(node) = self.aggregate.node(number) {
            node.state = NodeState::Lost;
            node.stop();
        }
        self.home_shared
            .lost_nodes
            .fetch_or(1 << number, Ordering::Release);
        self.losses.push(number);
        self.sequence += 1;
        self.pending.push(Pending {
            sequence: self.sequence,
            deadline: Instant::now() + self.aggregate.workload.options.lease,
            what: Command::Lost,
        });
        self.announce_losses();
    }

    /// Tells home of losses, one command at a time; the bit in `lost_nodes` is
    /// already set, so a busy home knows as well.
    pub(super) fn announce_losses(&mut self) {
        if let Some(&node) = self.losses.first()
            && self.home_shared.command(COMMAND_LOST, node, self.sequence)
        {
            self.losses.remove(0);
        }
        let _ = self.aggregate.home.signal(KICK_SIGNAL);
    }
}
