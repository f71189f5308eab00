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
    pub published: Mutex<Published>,
}

/// What the other slices know of a device.
#[derive(Clone, Default, PartialEq, Eq)]
pub(super) struct Published {
    routes: NotificationRoutes,
    /// By queue: who serves it, and so knows its route.
    servers: Vec<usize>,
}

impl Published {
    /// Where a queue's interrupts go, and who knows.
    fn route(&self, queue: usize) -> (Option<usize>, Option<(u64, u32)>) {
        let route = self.routes.messages.get(queue).copied().flatten();
        (self.servers.get(queue).copied(), route)
    }
}

impl RoutePublisher {
    /// Publishes what changed; returns the tickets of the replies, with their slices.
    fn publish(&self, published: &Published, new: &Published) -> Vec<(usize, u64)> {
        let remote = &self.remote;
        let queues = new.servers.len();
        let mut asked = Vec::new();
        if published.routes.doorbells != new.routes.doorbells {
            for slice in remote.peers.others() {
                let ticket = remote.seen.open(slice);
                let message = DeviceMessage::Doorbells {
                    ticket,
                    address: new.routes.doorbells,
                    queues: queues as u64,
                };
                remote.send(slice, Address::new(self.device, 0), message);
                asked.push((slice, ticket));
            }
        }
        for queue in 0..queues {
            let (Some(slice), message) = new.route(queue) else {
                continue;
            };
            // What a slice knew before the queue was elsewhere may be over.
            if slice == PRIMARY || published.route(queue) == (Some(slice), message) {
                continue;
            }
            let ticket = remote.seen.open(slice);
            let message = DeviceMessage::Route { ticket, message };
            remote.send(slice, Address::new(self.device, queue as u16), message);
            asked.push((slice, ticket));
        }
        asked
    }
}

impl RouteObserver for RoutePublisher {
    fn changed(&self, routes: &dyn Fn() -> NotificationRoutes) {
        let mut published = lock(&self.published);
        let routes = routes();
        let queues = published.servers.len().max(routes.messages.len()) as u16;
        let address = |queue| Address::new(self.device, queue);
        let server = |queue| self.remote.server_of(address(queue));
        let new = Published {
            routes,
            servers: (0..queues).map(server).collect(),
        };
        if *published == new {
            return;
        }
        for (slice, ticket) in self.publish(&published, &new) {
            if !self.remote.was_seen(ticket) {
                let peers = &self.remote.peers;
                peers.lost(slice, "it did not acknowledge a device's interrupt routes");
            }
        }
        *published = new;
    }
}
