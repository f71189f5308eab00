//! A page that is not idle: the operation about it, what is left of the step, and what
//! queued up behind them.

use std::collections::VecDeque;
use std::time::Duration;

use super::{Bytes, Sink};
use crate::protocol::{self, Content};
use crate::types::NodeId;

/// Messages of one node about a page in transition that wait, at most: more than a
/// correct node has under way about a page.
pub(super) const QUEUED_MAX: usize = 8;

/// What the shell does about a page, outside the lock.
#[derive(Debug)]
pub(super) enum Operation {
    /// The users give the page up.
    Revoke,
    /// The users are given the page.
    Map {
        /// It stays for a while then.
        pin: bool,
        /// A request ends with it.
        request: Option<Granted>,
    },
    /// The page is taken out of the users' mapping.
    Hide,
    /// The page's memory is given back.
    GiveBack,
    /// The page is read from a file.
    Load,
    /// The users may only read the page, so that its bytes can be sent ahead.
    Protect,
}

/// A request whose page is here.
#[derive(Debug)]
pub(super) struct Granted {
    pub since: Duration,
    pub asking: Duration,
    pub here: Duration,
}

/// A page that is not idle.
#[derive(Debug)]
pub(super) struct Transition<B> {
    pub operation: Option<Operation>,
    /// Waits for a pin to go.
    pub deferred: bool,
    /// Deferred before the step: a request for a page that its user here is about to
    /// write. That write need not wait.
    pub visit: bool,
    /// What is left of the step.
    pub work: Work<B>,
    /// What came meanwhile.
    pub queue: VecDeque<(protocol::Event, Option<B>)>,
}

impl<B> Default for Transition<B> {
    fn default() -> Self {
        Self {
            operation: None,
            deferred: false,
            visit: false,
            work: Work::default(),
            queue: VecDeque::new(),
        }
    }
}

impl<B> Transition<B> {
    /// Whether only the page's memory goes back to the host, and nothing waits for that.
    pub fn only_gives_back(&self) -> bool {
        matches!(self.operation, Some(Operation::GiveBack)) && self.queue.is_empty()
    }

    /// Messages of a node that wait.
    pub fn queued(&self, node: NodeId) -> usize {
        let is_from = |(event, _): &&(protocol::Event, Option<B>)| matches!(event, protocol::Event::Message { from, .. } if *from == node);
        self.queue.iter().filter(is_from).count()
    }
}

/// What is left to do of a step.
#[derive(Debug)]
pub(super) struct Work<B> {
    pub actions: VecDeque<protocol::Action>,
    /// The page that came with the message.
    pub bytes: Option<Bytes<B>>,
    /// The page goes to make room.
    pub evicts: bool,
}

impl<B> Default for Work<B> {
    fn default() -> Self {
        Self::new(VecDeque::new(), None)
    }
}

impl<B> Work<B> {
    pub fn new(actions: VecDeque<protocol::Action>, bytes: Option<Bytes<B>>) -> Self {
        Self {
            actions,
            bytes,
            evicts: false,
        }
    }

    pub fn evicting(actions: VecDeque<protocol::Action>) -> Self {
        Self {
            evicts: true,
            ..Self::new(actions, None)
        }
    }

    /// For later, when the event is over.
    pub fn kept(mut self, sink: &mut impl Sink<B>) -> Self {
        let fills = |action: &protocol::Action| {
            matches!(
                action,
                protocol::Action::Install {
                    content: Content::Bytes,
                    ..
                }
            )
        };
        if matches!(self.bytes, Some(Bytes::Arrived)) {
            let needed = self.actions.iter().any(fills);
            self.bytes = needed.then(|| Bytes::Kept(sink.keep()));
        }
        self
    }
}
