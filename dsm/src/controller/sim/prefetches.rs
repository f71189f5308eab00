//! Judge 11: prefetches, as others can see them.

use std::collections::BTreeSet;

use crate::controller::{Action, Event, UNDER_WAY_MAX, WAITED_MAX};
use crate::protocol::Body;

/// The prefetches of one node.
#[derive(Debug, Default)]
pub(super) struct Prefetched {
    /// Users whose prefetch was not ended.
    users: BTreeSet<u32>,
    /// The page that the controller is about to request.
    next: Option<u64>,
    /// Requests of prefetches that were not answered.
    under_way: BTreeSet<u64>,
    pub held: bool,
}

impl Prefetched {
    /// What an event tells of them.
    pub fn arrive(&mut self, event: &Event) {
        match event {
            Event::Prefetch { user, .. } => drop(self.users.insert(*user)),
            Event::EndPrefetch { user } => drop(self.users.remove(user)),
            Event::HoldPrefetches => self.held = true,
            Event::ResumePrefetches => self.held = false,
            Event::Message { message, .. }
                if !matches!(message.body, Body::Forward { .. } | Body::Invalidate) =>
            {
                self.under_way.remove(&message.page.0);
            }
            Event::PeerLost { .. } | Event::Member { .. } => self.under_way.clear(),
            _ => {}
        }
    }
}

impl Prefetched {
    /// Looks at an action before it is carried out; `waits`: a thread of the node waits for
    /// a page. What is wrong with it.
    pub fn judge(&mut self, action: &Action<u32>, waits: bool) -> Option<&'static str> {
        match action {
            Action::Prefetch { page } => {
                self.next = Some(*page);
                match () {
                    () if self.users.is_empty() => {
                        Some("a page is prefetched for a user that left")
                    }
                    () if self.held => Some("a page is prefetched while prefetches are held"),
                    () if waits && self.under_way.len() >= WAITED_MAX => {
                        Some("many pages are prefetched while a user waits")
                    }
                    () => None,
                }
            }
            Action::Send { message, .. } => {
                let page = message.page.0;
                let prefetched = self.next.take_if(|next| *next == page);
                if prefetched.is_some() && matches!(message.body, Body::Get { .. }) {
                    self.under_way.insert(page);
                }
                let many = self.under_way.len() > UNDER_WAY_MAX;
                many.then_some("more prefetches are under way than allowed")
            }
            _ => None,
        }
    }
}
