//! Judge 10: a page that another node requested gets only a few new pins.

use std::collections::BTreeMap;
use std::time::Duration;

use super::USERS_MAX;
use crate::controller::{Action, Event};
use crate::protocol::Body;

/// A request waits for a visit at most so long.
const VISIT_MAX: Duration = Duration::from_micros(100);
/// Pins of a page that may begin between a request and its answer: those of users that had
/// asked for the page before.
const PINS_MAX: usize = 2 * USERS_MAX;

/// Requests of other nodes that a node has not answered, by page.
#[derive(Debug, Default)]
pub(super) struct Requests(BTreeMap<u64, Request>);

#[derive(Debug)]
struct Request {
    since: Duration,
    /// It has waited for a visit as long as it must.
    overdue: bool,
    /// Pins of the page that began since then.
    pins: usize,
}

impl Requests {
    /// What an event tells of them. `dead`: nodes that need no answer, a bit for each.
    pub fn arrive(&mut self, event: &Event, now: Duration, dead: u32) {
        match event {
            Event::Message { message, .. }
                if matches!(message.body, Body::Forward { requester, .. }
                    if dead & requester.bit() != 0) => {}
            Event::Message { message, .. }
                if matches!(message.body, Body::Forward { .. } | Body::Invalidate) =>
            {
                self.0.entry(message.page.0).or_insert(Request {
                    since: now,
                    overdue: false,
                    pins: 0,
                });
            }
            Event::Tick => {
                for request in self.0.values_mut() {
                    request.overdue |= now > request.since + VISIT_MAX;
                }
            }
            // Its requests need no answer.
            Event::PeerLost { .. } => self.0.clear(),
            _ => {}
        }
    }

    /// The page begins to leave, or a message about it does.
    pub fn answer(&mut self, action: &Action<u32>) {
        match action {
            Action::Revoke { page, .. } => drop(self.0.remove(page)),
            Action::Send { message, .. } => drop(self.0.remove(&message.page.0)),
            _ => {}
        }
    }

    /// A user has pinned a page. Whether too many have while a request for it waits.
    pub fn pin(&mut self, page: u64) -> bool {
        let request = self.0.get_mut(&page).filter(|request| request.overdue);
        request.is_some_and(|request| {
            request.pins += 1;
            request.pins > PINS_MAX
        })
    }
}
