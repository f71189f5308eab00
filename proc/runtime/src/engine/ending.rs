//! Nodes that are lost, and the end of the aggregate: which node is silent, what failed, and
//! which process reports it.

use core::fmt::Write;
use core::sync::atomic::Ordering;

use weft_dsm::{Event, NodeId, PAGES_MAX, Page};
use weft_proc::boot::{
    CONTROL_LOST, CONTROL_NO_ROOM, ControlMessage, EXIT_INTERNAL, EXIT_NO_ROOM, EXIT_NODE_LOST,
};
use weft_proc::layout::PAGE;
use weft_proc::message::Message;
use weft_proc::silence::silent_node;
use weft_wire::LinkError;

use super::io::Failure;
use super::machine::Engine;
use crate::{control, log, own_calls};

impl Engine {
    /// A link ended: its slice has ended, or the link failed.
    pub fn link_ended(&mut self, node: usize, error: LinkError) {
        self.io.links[node] = None;
        if self.is_home() {
            return self.lost(node, Some(error));
        }
        match (node, error) {
            // The aggregate is over; home has said how.
            (0, LinkError::Closed) => own_calls::exit_group(0),
            // Home sees the end of a slice, too, and says what it means.
            (_, LinkError::Closed) => {}
            (_, error) => self.fail(Failure::Link(node, error)),
        }
    }

    /// Home: looks at what the launcher says about nodes.
    pub fn look_for_lost_nodes(&mut self) {
        if !self.is_home() {
            return;
        }
        let Some(shared) = control::shared() else {
            return;
        };
        let lost = shared.lost_nodes.load(Ordering::Acquire);
        for node in 1..self.nodes {
            if lost & 1 << node != 0 && self.io.links[node].is_some() {
                self.lost(node, None);
            }
        }
    }

    /// Home: a node is gone. Without anything on it the aggregate goes on.
    fn lost(&mut self, node: usize, error: Option<LinkError>) {
        self.io.links[node] = None;
        let pages = self.core.owned_pages(NodeId(node as u8));
        // Jumps between other nodes are not told to home: with three nodes it
        // cannot be sure that the execution was not there.
        let executing = self.away.is_some_and(|away| away == node || self.nodes > 2);
        if pages == 0 && !executing {
            self.forget_node(node);
            log::line(format_args!(
                "node {node} was lost; nothing was on it, the program continues without it"
            ));
            return;
        }
        let mut message = ControlMessage::new(CONTROL_LOST, node as u32);
        message.words = [u64::from(pages), u64::from(executing), 0, 0];
        // That the peer closed the link is no reason: the launcher finds one.
        if let Some(error) = error.filter(|&error| error != LinkError::Closed) {
            let mut text = log::Line::new();
            let _ = write!(text, "its link to home failed: {error}");
            message.set_text(text.as_str());
        }
        if control::send(&message).is_err() {
            log::line(format_args!(
                "node {node} was lost, and with it {pages} pages{} ({error:?})",
                if executing { " and the execution" } else { "" }
            ));
        }
        own_calls::exit_group(EXIT_NODE_LOST);
    }

    /// Every record forgets a node that owns nothing.
    pub fn forget_node(&mut self, node: usize) {
        self.core.set_budget_pages(NodeId(node as u8), 0);
        self.io.links[node] = None;
        let count = self.io.layout.regions().len();
        for index in 0..count {
            let region = self.io.layout.regions()[index];
            for page in region.start / PAGE..region.end / PAGE {
                if self.core.tables.look_entry(page).untouched() {
                    continue;
                }
                self.step(Event::PeerLost {
                    node: NodeId(node as u8),
                    page: Page(page),
                });
            }
        }
        self.settle();
    }

    /// No answer came within the lease: the peer counts as lost, if it is certain which
    /// one it is.
    pub fn silent(&mut self, what: &'static str) -> ! {
        let page = self.io.awaited;
        let waits = !self.io.resolved && page < PAGES_MAX;
        let linked = (1..self.nodes).filter(|&node| self.io.links[node].is_some());
        let linked = linked.fold(0, |set, node| set | 1 << node);
        let node = self.is_home().then(|| {
            let owner = waits.then(|| self.core.tables.look_entry(page).owner());
            silent_node(self.unsynced, owner.flatten().map(NodeId::index), linked)
        });
        self.silent_node(node.flatten(), what)
    }

    /// No answer came from this node within the lease.
    pub fn silent_node(&mut self, node: Option<usize>, what: &'static str) -> ! {
        if let Some(node) = node {
            self.lost(node, None);
        }
        let me = self.me;
        self.give_up(
            EXIT_NODE_LOST,
            format_args!("no answer within the lease while waiting for {what} on node {me}"),
        )
    }

    /// Ends the aggregate.
    pub fn fail(&mut self, failure: Failure) -> ! {
        let me = self.me;
        match failure {
            Failure::Link(node, error) => self.give_up(
                EXIT_NODE_LOST,
                format_args!("node {me} lost its link to node {node}: {error}"),
            ),
            Failure::Lost(page, node) => {
                self.give_up(EXIT_NODE_LOST, format_args!("{page} was lost with {node}"))
            }
            Failure::Memory(what, page, error) => self.give_up(
                EXIT_INTERNAL,
                format_args!("cannot {what} page {page:#x} on node {me}: {error}"),
            ),
            Failure::Violation(node, what) => self.give_up(
                EXIT_INTERNAL,
                format_args!("node {node} sent an invalid message to node {me}: {what}"),
            ),
        }
    }

    /// Every budget is full: the program cannot go on.
    pub fn no_room(&mut self) -> ! {
        if self.is_home() {
            // A launcher that is gone needs no word.
            let _ = control::send(&ControlMessage::new(CONTROL_NO_ROOM, 0));
        }
        self.give_up(
            EXIT_NO_ROOM,
            format_args!("every node's budget is full; raise --memory or add a node"),
        )
    }

    /// Ends the aggregate with an exit code. A slice has home do it: were it to
    /// end by itself, home would see a lost node and not why.
    fn give_up(&mut self, code: i32, why: core::fmt::Arguments<'_>) -> ! {
        if !self.is_home() {
            self.tell_home(code, why);
        }
        log::fail(code, why)
    }

    /// A slice: says why the aggregate has to end and waits, within the lease,
    /// until home has ended it. Returns when home cannot be told.
    fn tell_home(&mut self, code: i32, why: core::fmt::Arguments<'_>) {
        let mut text = log::Line::new();
        let _ = text.write_fmt(why);
        let bytes = text.as_str().as_bytes();
        let header = Message::Failed { code: code as u32 }.header(bytes.len());
        let lease_ns = self.lease_ns();
        let deadline_ns = own_calls::monotonic_ns() + lease_ns;
        let Some(home) = &mut self.io.links[0] else {
            return;
        };
        if home.send(&header, &[bytes]).is_err() {
            return;
        }
        while own_calls::monotonic_ns() < deadline_ns {
            // Whatever still comes is for a slice that goes on.
            if home.receive(lease_ns).is_err() {
                own_calls::exit_group(0);
            }
        }
    }

    /// Home: a slice cannot go on.
    pub fn peer_failed(&mut self, from: usize, code: u32, sentence: &[u8]) -> ! {
        if code == EXIT_NO_ROOM as u32 {
            self.no_room();
        }
        let text = core::str::from_utf8(sentence).unwrap_or("it failed without a reason");
        log::fail_for(from, code as i32, text)
    }
}
