//! Waits until other slices have handled what this one sent them.
//!
//! Links keep an order each, but none among each other. What a slice sent may still be on its
//! way to a second one when a third acts on it, and whatever the third then sends to the second
//! can come first. Where that would be wrong, the sender waits for all.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use weft_confine::lock;
use weft_platform::interrupts::{InterruptRouter, Locations};

use super::message::SliceMessage;
use super::peers::Peers;
use super::pending_requests::PendingRequests;
use super::{PRIMARY, Slice};

/// Longest wait of a vCPU for slices that do not answer: they are lost, or read nothing yet.
const IDENTITY_WAIT: Duration = Duration::from_secs(2);

/// Waits until each of these slices has handled all messages that this one sent it; the first
/// that has not after `patience`. A look at the clock is answered behind them.
fn wait_for(
    peers: &Peers,
    looks: &PendingRequests<(u64, u64)>,
    slices: impl IntoIterator<Item = usize>,
    patience: Duration,
) -> Option<usize> {
    let ask = |slice| {
        let ticket = looks.open(slice);
        peers.send(slice, &SliceMessage::Look { ticket });
        (slice, ticket)
    };
    let asked: Vec<(usize, u64)> = slices.into_iter().map(ask).collect();
    let deadline = Instant::now() + patience;
    // All are waited for, so that none stays open.
    let silent: Vec<usize> = asked
        .into_iter()
        .filter(|(_, ticket)| {
            let patience = deadline.saturating_duration_since(Instant::now());
            looks.wait(*ticket, patience).is_none()
        })
        .map(|(slice, _)| slice)
        .collect();
    silent.first().copied()
}

impl Slice {
    /// On a secondary: waits until every other secondary has handled all messages that this
    /// one sent it.
    pub fn settle(&self) -> Result<(), String> {
        let others = self.peers.others().into_iter();
        let secondaries = others.filter(|slice| *slice != PRIMARY);
        match wait_for(&self.peers, &self.looks, secondaries, 2 * self.lease) {
            None => Ok(()),
            Some(slice) => Err(format!("node {slice} is lost, or did not answer")),
        }
    }
}

/// Tells other slices the identities of the local APICs here.
pub(crate) struct Identities {
    pub peers: Arc<Peers>,
    pub looks: Arc<PendingRequests<(u64, u64)>>,
    pub locations: Arc<Locations>,
    /// Orders the identities as others are told of them.
    pub order: Arc<Mutex<()>>,
    /// Silence of this length is death.
    pub lease: Duration,
}

impl Identities {
    /// Has a vCPU that changes its local APIC's identity go on when all slices know it: a
    /// slice that believes that the APIC takes nothing would drop what a vCPU there sends in
    /// reply to the next instruction.
    pub fn tell(self: &Arc<Self>, interrupts: &InterruptRouter) {
        for vcpu in 0..self.locations.cpus() {
            let told = self.clone();
            if let Some(posted) = interrupts.posted(vcpu) {
                // Only the local APIC calls it, so where the vCPU is, and on its thread.
                posted.listen(Box::new(move |identity| told.change(vcpu, identity)));
            }
        }
    }

    fn change(&self, vcpu: u32, identity: u16) {
        {
            let _order = lock(&self.order);
            let epoch = self.locations.of(vcpu).map_or(0, |location| location.epoch);
            self.peers.broadcast(&SliceMessage::Identity {
                vcpu,
                identity,
                epoch,
            });
        }
        // Without an answer the machine ends, or that slice runs no guest code yet.
        let others = self.peers.others();
        let patience = self.lease.min(IDENTITY_WAIT);
        let _ = wait_for(&self.peers, &self.looks, others, patience);
    }
}
