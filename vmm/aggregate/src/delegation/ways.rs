//! Tells the slices that serve a device's queues how driver and device reach each
//! other. On the primary, where the registers are.

use std::sync::{Arc, Mutex};

use weft_confine::lock;
use weft_virtio::{Watch, Ways};

use super::Delegation;
use crate::PRIMARY;
use crate::message::device::{Address, DeviceMessage};

/// One device's.
pub(super) struct Teller {
    pub device: u8,
    pub delegation: Arc<Delegation>,
    /// What the others know. Held until they have seen what is new, so that they
    /// see changes in the order in which they came about; who changes something
    /// waits for at most twice the lease.
    pub told: Mutex<(Ways, usize)>,
}

impl Teller {
    /// Publishes what changed; returns the tickets of the replies, with their slices.
    fn publish(&self, told: &Ways, ways: &Ways, queues: usize) -> Vec<(usize, u64)> {
        let delegation = &self.delegation;
        let mut asked = Vec::new();
        if told.doorbells != ways.doorbells {
            for slice in delegation.peers.others() {
                let ticket = delegation.seen.open(slice);
                let message = DeviceMessage::Doorbells {
                    ticket,
                    address: ways.doorbells,
                    queues: queues as u64,
                };
                delegation.send(slice, Address::new(self.device, 0), message);
                asked.push((slice, ticket));
            }
        }
        for queue in 0..queues {
            let of = |ways: &Ways| ways.messages.get(queue).copied().flatten();
            let address = Address::new(self.device, queue as u16);
            let slice = delegation.server_of(address);
            if slice == PRIMARY || of(told) == of(ways) {
                continue;
            }
            let ticket = delegation.seen.open(slice);
            let message = of(ways);
            let message = DeviceMessage::Route { ticket, message };
            delegation.send(slice, address, message);
            asked.push((slice, ticket));
        }
        asked
    }
}

impl Watch for Teller {
    fn changed(&self, ways: &dyn Fn() -> Ways) {
        let mut told = lock(&self.told);
        let ways = ways();
        if told.0 == ways {
            return;
        }
        let queues = told.1.max(ways.messages.len());
        for (slice, ticket) in self.publish(&told.0, &ways, queues) {
            if !self.delegation.was_seen(ticket) {
                let peers = &self.delegation.peers;
                peers.lost(slice, "it did not acknowledge a device's interrupt routes");
            }
        }
        *told = (ways, queues);
    }
}
