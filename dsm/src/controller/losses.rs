//! When a node dies. The protocol determines what that means for a page
//! ([`crate::Event::PeerLost`]); here are the requests and transitions around it.
//!
//! - A page in transition learns of the death in its turn, behind the messages that queued
//!   up before. Those of the dead node are ignored then, as if they had not arrived.
//! - A request for a lost page ends in [`Failure::Lost`], once for all users that wait for
//!   the page. A lost page for which no user waits is reported when one asks for it.
//! - What was offered to the dead node stays here; it is no longer on its way.

use std::time::Duration;

use super::{Action, Controller, Count, Failure, Mutant, Sink};
use crate::protocol::{self, Refusal};
use crate::state::Tables;
use crate::types::{NodeId, Page};

impl<T: Tables, B> Controller<T, B> {
    pub(super) fn peer_lost(&mut self, node: NodeId, now: Duration, sink: &mut impl Sink<B>) {
        self.forget_precopies_of(node, sink);
        for part in self.parts.clone() {
            for page in part {
                let event = protocol::Event::PeerLost {
                    node,
                    page: Page(page),
                };
                if self.is_in_transition(page) && !self.is(Mutant::LossOvertakes) {
                    self.queue_loss(page, event);
                } else {
                    self.carry_out_event(page, event, now, sink);
                }
            }
        }
    }

    /// A page is lost, and with it the requests for it.
    pub(super) fn lost(&mut self, page: u64, node: NodeId, sink: &mut impl Sink<B>) {
        self.subscriptions.answered(page);
        let waits = self.is_waited_for(page);
        self.async_faults.remove(&page);
        if waits && !self.is(Mutant::ForgetLoss) {
            sink.act(Action::Fail(Failure::Lost { page, node }));
        }
    }

    /// A page that was offered to its home stays, or left in another way.
    pub(super) fn offer_failed(&mut self, reason: Option<Refusal>, sink: &mut impl Sink<B>) {
        let keeps = reason == Some(Refusal::ManagerLost) && self.is(Mutant::KeepOffers);
        self.leaving = self.leaving.saturating_sub(u64::from(!keeps));
        sink.act(Action::Count(Count::EvictionDenied, 1));
    }
}
