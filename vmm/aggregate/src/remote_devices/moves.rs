//! Queues go to another slice while the machine is paused: what one slice does. The order of
//! the slices is in [`crate::queue_moves`].

use std::collections::BTreeSet;
use std::sync::Arc;

use super::queue_placement::{MovedGroup, Servers};
use super::{RemoteDevices, Table};
use crate::message::device::Address;

impl RemoteDevices {
    /// Where all queues are served now, and the epoch of that.
    pub fn queue_servers(&self) -> (u64, Servers) {
        self.read(|table| (table.places.epoch(), table.places.servers()))
    }

    /// See [`QueuePlaces::has_dealt_pairs`].
    ///
    /// [`QueuePlaces::has_dealt_pairs`]: super::queue_placement::QueuePlaces::has_dealt_pairs
    pub fn has_dealt_pairs(&self) -> bool {
        self.read(|table| table.places.has_dealt_pairs())
    }

    /// Where they are served if `slice` serves all that any slice may serve.
    pub fn queue_servers_open_at(&self, slice: usize) -> Servers {
        self.read(|table| table.places.open_at(slice))
    }

    /// Where they are served if the devices' slices serve what `slice` serves now.
    pub fn queue_servers_without(&self, slice: usize) -> Servers {
        self.read(|table| table.places.without(slice))
    }

    /// Whether the queues can be served there from `epoch` on. Nothing changes.
    ///
    /// # Errors
    /// Why not.
    pub fn check_queues(&self, epoch: u64, servers: &Servers) -> Result<(), String> {
        let moved = self.read(|table| {
            let moved = table.places.check(epoch, servers)?;
            check_idle(table, &moved).map(|()| moved)
        })?;
        for device in devices(&moved) {
            if self
                .transport(device)
                .is_some_and(|device| !device.is_paused())
            {
                return Err(format!("device {device} is not paused"));
            }
        }
        Ok(())
    }

    /// The queues are served there from now on. On the primary, devices whose queues go
    /// elsewhere have other handlers when they go on.
    ///
    /// # Errors
    /// As with [`RemoteDevices::check_queues`]; nothing has changed.
    pub fn place_queues(self: &Arc<Self>, epoch: u64, servers: &Servers) -> Result<(), String> {
        self.check_queues(epoch, servers)?;
        let moved = self.write(|table| table.places.place(epoch, servers))?;
        for group in &moved {
            self.move_frames(group);
        }
        for device in devices(&moved) {
            if let Some(transport) = self.transport(device) {
                transport.remake_handlers();
            }
        }
        Ok(())
    }

    /// On the primary: tells the slices that serve queues now where interrupts go.
    pub fn publish_routes(&self) {
        let transports = self.read(|table| table.transports.values().cloned().collect::<Vec<_>>());
        for transport in transports.iter().filter_map(std::sync::Weak::upgrade) {
            transport.publish_routes();
        }
    }

    /// The ends of a pair's way to its network begin anew: on the slice that gets it, before
    /// the network's slice sends to it, and there. What a slice that gives the pair away has
    /// got for the guest goes back to the network's.
    fn move_frames(self: &Arc<Self>, moved: &MovedGroup) {
        let pair = Address::new(moved.device, moved.group);
        let (switch, frames) = self.read(|table| {
            let switch: Option<Arc<_>> = table.switches.get(&pair.device).cloned();
            (switch, table.frames.get(&pair).cloned())
        });
        if let Some(switch) = switch {
            switch.serve(moved.group, self.server_sender(pair, moved.to));
        } else if let Some(frames) = frames {
            let left = frames.begin_anew();
            if moved.from == self.number {
                let way = self.frame_sender(pair, moved.to);
                left.iter().for_each(|batch| way.frames(batch));
            }
        }
    }
}

/// Refuses a change of what is served here.
fn check_idle(table: &Table, moved: &[MovedGroup]) -> Result<(), String> {
    let served = moved.iter().find(|group| {
        let address = Address::new(group.device, group.group);
        table.served.contains(&address)
    });
    match served {
        None => Ok(()),
        Some(MovedGroup { device, group, .. }) => {
            Err(format!("queue {group} of device {device} is served still"))
        }
    }
}

fn devices(moved: &[MovedGroup]) -> BTreeSet<u8> {
    moved.iter().map(|group| group.device).collect()
}
