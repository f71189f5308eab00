//! The processes of an aggregate, and the loop that watches them: the same for a
//! program and a machine.
//!
//! Invariants:
//! - exactly one home process, until it was reaped;
//! - a slice of a node that is not `Running` is dead or being told to die;
//! - one thread changes all of it: the one that calls [`attend`].

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use crate::remote;
use crate::report::NodeState;
use crate::spawn::{Ended, Process};
use crate::sys;

use super::nodes::{Node, NodeEvent};
use super::signals::{SignalEvent, Signals};
use super::workload::Workload;

/// See the module.
pub struct Aggregate<'a, W: Workload> {
    /// What its nodes run.
    pub workload: W,
    /// The launcher's signals.
    pub signals: &'a Signals,
    /// Node 0's process.
    pub home: Process,
    /// Whether home's control socket is still open.
    pub home_talks: bool,
    /// All others, by number.
    pub nodes: Vec<Node<W>>,
    /// The time of this turn of the loop, or of the last, to notice that this process
    /// was stopped. Leases are compared with it and not with a later time: a stop since
    /// would count against the nodes.
    turn: Instant,
}

impl<'a, W: Workload> Aggregate<'a, W> {
    /// Of processes that were just started.
    pub fn new(
        workload: W,
        signals: &'a Signals,
        home: Process,
        nodes: Vec<Node<W>>,
    ) -> Aggregate<'a, W> {
        Aggregate {
            workload,
            signals,
            home,
            home_talks: true,
            nodes,
            turn: Instant::now(),
        }
    }

    fn wait(&self, others: &[BorrowedFd<'_>], bound: Duration) -> io::Result<()> {
        let mut set = vec![self.signals.descriptor(), self.home.pidfd()];
        if self.home_talks {
            set.push(self.home.control.as_fd());
        }
        set.extend(others);
        for node in &self.nodes {
            set.extend(node.descriptors());
        }
        sys::wait_readable(&set, bound).map(drop)
    }

    /// After a stop of this process (Ctrl-Z) every lease starts anew: nobody could have
    /// been heard meanwhile. How long it was, if it was.
    pub fn allow_for_a_stop(&mut self, now: Instant) -> Option<Duration> {
        let passed = now.duration_since(self.turn);
        self.turn = now;
        if passed <= remote::STALL.max(self.workload.lease() / 2) {
            return None;
        }
        for node in &mut self.nodes {
            node.pulse.renew(now);
        }
        Some(passed)
    }

    /// Asks the node at this index for a sign of life if it runs; what it did if it gave
    /// none for the lease.
    pub fn heartbeat(&mut self, index: usize) -> Option<NodeEvent> {
        let node = &mut self.nodes[index];
        match node.state {
            NodeState::Running => node.heartbeat(self.turn, self.workload.lease()),
            NodeState::Left | NodeState::Lost => None,
        }
    }

    /// The node, unless it is home.
    pub fn node(&mut self, number: u32) -> Option<&mut Node<W>> {
        self.nodes.iter_mut().find(|node| node.number == number)
    }

    /// What a node is called in messages.
    pub fn name(&self, number: u32) -> String {
        let node = self.nodes.iter().find(|node| node.number == number);
        node.map_or_else(|| format!("{number}"), |node| node.name.clone())
    }

    /// What a running node did; nothing of one that is not.
    pub fn listen(&mut self, index: usize) -> Vec<NodeEvent> {
        let node = &mut self.nodes[index];
        match node.state {
            NodeState::Running => node.listen(),
            NodeState::Left | NodeState::Lost => Vec::new(),
        }
    }
}

/// Decides what becomes of an aggregate: a program's owner, or a machine's.
pub trait AggregateOwner<'a> {
    /// What its nodes run.
    type Workload: Workload;

    /// Its processes.
    fn aggregate(&mut self) -> &mut Aggregate<'a, Self::Workload>;
    /// What else to wait for, and how long at most.
    fn waits_for(&self) -> (Vec<BorrowedFd<'_>>, Duration);
    /// The same processes, to wait for.
    fn processes(&self) -> &Aggregate<'a, Self::Workload>;
    /// A signal came.
    fn signalled(&mut self, request: SignalEvent);
    /// Home may have said something.
    fn hear_home(&mut self);
    /// The node at this index may have said something, or ended.
    fn hear_node(&mut self, index: usize);
    /// The rest of a round: clients, what is due.
    fn keep_time(&mut self);
}

/// Serves an aggregate until home has ended.
pub fn attend<'a>(owner: &mut impl AggregateOwner<'a>) -> io::Result<Ended> {
    loop {
        if let Some(ended) = turn(owner)? {
            return Ok(ended);
        }
    }
}

/// One round of the loop: wait, then handle what came. Home's messages before slices'
/// ends, so that a slice that was told to go is not mistaken for a lost one.
fn turn<'a>(owner: &mut impl AggregateOwner<'a>) -> io::Result<Option<Ended>> {
    let (others, bound) = owner.waits_for();
    owner.processes().wait(&others, bound)?;
    while let Some(request) = owner.aggregate().signals.next() {
        owner.signalled(request);
    }
    owner.hear_home();
    for index in 0..owner.aggregate().nodes.len() {
        owner.hear_node(index);
    }
    if let Some(ended) = owner.aggregate().home.try_wait()? {
        owner.hear_home();
        return Ok(Some(ended));
    }
    owner.keep_time();
    Ok(None)
}
