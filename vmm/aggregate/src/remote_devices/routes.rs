//! Publishes notification routes to the slices that serve a device's queues: how driver
//! and device reach each other. On the primary, where the registers are.

use std::sync::{Arc, Mutex};

use weft_confine::lock;
use weft_virtio::{NotificationRoutes, RouteObserver};

use super::RemoteDevices;
use crate::PRIMARY;
use crate::message::device::{Address, DeviceMessage};

/// The publisher of one device's routes.
pub(super) struct RoutePublisher {
    pub device: u8,
    pub remote: Arc<RemoteDevices>,
    /// What the other slices know. Held until they have seen what is new, so that they
    /// see changes in the order in which they were made; a thread that makes a change
    /// waits for at most twice the lease.
    pub published: Mutex<(NotificationRoutes, usize)>,
}

impl RoutePublisher {
    /// Publishes what changed; returns the tickets of the replies, with their slices.
    fn publish(
        &self,
        published: &NotificationRoutes,
        routes: &NotificationRoutes,
        queues: usize,
    ) -> Vec<(usize, u64)> {
        let remote = &self.remote;
        let mut asked = Vec::new();
        if published.doorbells != routes.doorbells {
            for slice in remote.peers.others() {
                let ticket = remote.seen.open(slice);
                let message = DeviceMessage::Doorbells {
                    ticket,
                    address: routes.doorbells,
                    queues: queues as u64,
                };
                remote.send(slice, Address::new(self.device, 0), message);
                asked.push((slice, ticket));
            }
        }
        for queue in 0..queues {
            let of = |routes: &NotificationRoutes| routes.messages.get(queue).copied().flatten();
            let address = Address::new(self.device, queue as u16);
            let slice = remote.server_of(address);
            if slice == PRIMARY || of(published) == of(routes) {
                continue;
            }
            let ticket = remote.seen.open(slice);
            let message = of(routes);
            let message = DeviceMessage::Route { ticket, message };
            remote.send(slice, address, message);
            asked.push((slice, ticket));
        }
        asked
    }
}

impl RouteObserver for RoutePublisher {
    fn changed(&self, routes: &dyn Fn() -> NotificationRoutes) {
        let mut published = lock(&self.published);
        let routes = routes();
        if published.0 == routes {
            return;
        }
        let queues = published.1.max(routes.messages.len());
        for (slice, ticket) in self.publish(&published.0, &routes, queues) {
            if !self.remote.was_seen(ticket) {
                let peers = &self.remote.peers;
                peers.lost(slice, "it did not acknowledge a device's interrupt routes");
            }
        }
        *published = (routes, queues);
    }
}
