//! Rest: no message about a page is under way, and none will be until the rest ends.
//!
//! ```text
//!  all users stand ──▶ Rest at all nodes ──▶ reports of all, again and again ──▶ at rest
//!                                                                                  │
//!                        requests that waited go on ◀── EndRest at all nodes ◀─────┘
//! ```
//!
//! A node that was told to rest begins nothing: no request, eviction, prefetch, drain or
//! pre-copy, and no request of a subscription. It still answers. What a user asks for waits,
//! as it does where there is no room, until [`super::Event::EndRest`].
//!
//! A node is *at work* while an operation or a pin is about a page, or a user has been given a
//! page that it has not used: then it may send messages without having got one. Whatever else
//! it has begun (a request, an offer, a transaction) waits for a message, so it is found at
//! the node that has to send that, or on the link.
//!
//! [`unrest`] looks at one report of each node, asked for at any moments. The messages of a
//! link stay in order, and each node counts them by link (the vector counters of Mattern,
//! 1987). Where a link's sender has sent as many as its receiver has received, these are the
//! same messages: so none was on its way from before the one report to behind the other. If
//! that holds for all links, the reports are a consistent cut with empty links; and where no
//! node was at work then, no message was sent afterwards.
//!
//! Invariants, from the moment when the detector says so until the first node ends its rest:
//!
//! - No message about a page is sent, and none is on its way.
//! - Each page that was touched has one owner, which has its newest bytes.

use std::ops::Range;
use std::time::Duration;

use super::{Action, Controller, Look, Mutant, Sink};
use crate::state::Tables;
use crate::types::{NODES_MAX, NodeId, Page, Standing};

/// What a node says of itself while it rests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RestReport {
    /// Why it is at work.
    pub work: Option<String>,
    /// Messages about pages that it sent, by receiver.
    pub sent: Vec<u64>,
    /// Those that it has received, by sender.
    pub received: Vec<u64>,
}

/// Why nodes are not at rest.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unrest {
    #[error("{node} is at work: {work}")]
    AtWork { node: NodeId, work: String },
    #[error("of {sent} messages about pages from {from} to {to}, {received} have come")]
    UnderWay {
        from: NodeId,
        to: NodeId,
        sent: u64,
        received: u64,
    },
}

/// Why nodes are not known to be at rest, from one report of each of them.
pub fn unrest(reports: &[(NodeId, RestReport)]) -> Option<Unrest> {
    for (node, report) in reports {
        if let Some(work) = &report.work {
            let (node, work) = (*node, work.clone());
            return Some(Unrest::AtWork { node, work });
        }
    }
    let count = |counts: &[u64], node: NodeId| counts.get(node.index()).copied();
    let links = reports
        .iter()
        .flat_map(|from| reports.iter().map(move |to| (from, to)));
    links
        .map(|((from, sender), (to, receiver))| Unrest::UnderWay {
            from: *from,
            to: *to,
            sent: count(&sender.sent, *to).unwrap_or_default(),
            received: count(&receiver.received, *from).unwrap_or_default(),
        })
        .find(|link| matches!(link, Unrest::UnderWay { sent, received, .. } if sent != received))
}

/// Messages about pages, by node.
#[derive(Debug, Default)]
pub(super) struct Traffic {
    pub sent: Vec<u64>,
    pub received: Vec<u64>,
}

impl Traffic {
    /// None to or from a node: its number may be used again.
    pub fn forget(&mut self, node: NodeId) {
        for counts in [&mut self.sent, &mut self.received] {
            if let Some(count) = counts.get_mut(node.index()) {
                *count = 0;
            }
        }
    }
}

fn count_one(counts: &mut Vec<u64>, node: NodeId) {
    if counts.is_empty() {
        counts.resize(NODES_MAX, 0);
    }
    if let Some(count) = counts.get_mut(node.index()) {
        *count += 1;
    }
}

/// Counts the messages that a step sends.
pub(super) struct Counted<'a, S> {
    pub sink: &'a mut S,
    pub sent: Vec<u64>,
}

impl<B, S: Sink<B>> Sink<B> for Counted<'_, S> {
    fn act(&mut self, action: Action<B>) {
        if let Action::Send { to, .. } = action {
            count_one(&mut self.sent, to);
        }
        self.sink.act(action);
    }

    fn keep(&mut self) -> B {
        self.sink.keep()
    }
}

impl<T: Tables, B> Controller<T, B> {
    /// What this node says of itself. Not at work unless it was told to rest.
    pub fn rest_report(&self, now: Duration) -> RestReport {
        let counts = |counts: &[u64]| match counts {
            [] => vec![0; NODES_MAX],
            counts => counts.to_vec(),
        };
        RestReport {
            work: self.work(now),
            sent: counts(&self.traffic.sent),
            received: counts(&self.traffic.received),
        }
    }

    fn work(&self, now: Duration) -> Option<String> {
        if !self.rests {
            return Some("it does not rest".into());
        }
        let mut transitions = self.transitions.iter();
        let is_busy = |(_, transition): &(&u64, &super::Transition<B>)| {
            !(transition.only_gives_back() || self.is(Mutant::RestInTransition))
        };
        if let Some((page, _)) = transitions.find(is_busy) {
            return Some(format!("page {page:#x} is in transition"));
        }
        if let Some(page) = self.pins.any(now).filter(|_| !self.is(Mutant::RestPinned)) {
            return Some(format!("page {page:#x} is pinned"));
        }
        let page = self.waits_for_answer()?;
        Some(format!("a thread waits for page {page:#x}"))
    }

    /// The first of `pages` about which something is under way here, and what. At rest there
    /// is none.
    pub fn restless(&mut self, mut pages: Range<u64>) -> Option<(u64, &'static str)> {
        pages.find_map(|page| {
            let local = *self.node.tables.local(Page(page));
            let manages = self.node.manager_of(Page(page)) == self.node.me();
            let entry = manages.then(|| *self.node.tables.entry(Page(page)));
            let busy = entry.is_some_and(|entry| {
                entry.busy() || entry.waiting() != 0 || entry.heir().is_some()
            });
            let what = match local.under_way() {
                Some(what) => what,
                None if busy => "its manager is at work with it",
                None if self.is_precopying_to(page, None) => "it was sent ahead a moment ago",
                None => return None,
            };
            Some((page, what))
        })
    }

    /// Those of `pages` that this node owns and that are not known to be zero, in ascending
    /// order. At rest each page that was touched is owned by one node, which has its bytes.
    pub fn owned(&mut self, pages: Range<u64>) -> Vec<u64> {
        let copies = self.is(Mutant::SaveCopies);
        let managed = self.is(Mutant::SaveManaged);
        let is_owned = |page: &u64| {
            let local = *self.node.tables.local(Page(*page));
            match () {
                () if managed => self.node.manager_of(Page(*page)) == self.node.me(),
                () => (local.owner() || copies && local.present()) && !local.zero(),
            }
        };
        pages.filter(is_owned).collect()
    }

    /// Whether this node begins nothing.
    pub(super) fn rests(&self) -> bool {
        self.rests
    }

    pub(super) fn rest(&mut self) {
        self.rests = true;
    }

    pub(super) fn end_rest(&mut self, now: Duration, sink: &mut impl Sink<B>) {
        self.rests = false;
        self.admit(now, sink);
        for look in [Look::Tick, Look::Room, Look::Membership] {
            sink.act(Action::Look(look));
        }
    }

    /// The messages to and from a node that is absent count no more.
    pub(super) fn forget_traffic(&mut self, node: NodeId, standing: Standing) {
        if standing == Standing::Absent {
            self.traffic.forget(node);
        }
    }

    /// A message came.
    pub(super) fn count_received(&mut self, from: NodeId) {
        count_one(&mut self.traffic.received, from);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(sent: [u64; 2], received: [u64; 2]) -> RestReport {
        RestReport {
            work: None,
            sent: sent.to_vec(),
            received: received.to_vec(),
        }
    }

    fn reports(received: u64) -> Vec<(NodeId, RestReport)> {
        vec![
            (NodeId(0), report([0, 7], [0, 3])),
            (NodeId(1), report([3, 0], [received, 0])),
        ]
    }

    #[test]
    fn a_message_on_its_way_is_found_on_its_link() {
        assert_eq!(unrest(&reports(7)), None);
        for received in [6, 8] {
            let (from, to, sent) = (NodeId(0), NodeId(1), 7);
            let on_its_way = Unrest::UnderWay {
                from,
                to,
                sent,
                received,
            };
            assert_eq!(unrest(&reports(received)), Some(on_its_way));
        }
    }

    #[test]
    fn a_node_at_work_is_named() {
        let mut reports = reports(7);
        reports[1].1.work = Some("page 0x2 is pinned".into());
        let why = unrest(&reports).unwrap().to_string();
        assert_eq!(why, "node 1 is at work: page 0x2 is pinned");
    }
}
