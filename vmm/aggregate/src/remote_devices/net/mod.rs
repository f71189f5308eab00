//! Networks of other slices.
//!
//! ```text
//!  slice that serves a pair                     slice that has the network
//!  Pair ── RemotePort ─────── frames ─────────▶ Switch ── Uplink
//!          FrameQueue ◀────── frames ──────────  port
//! ```
//!
//! | file | holds |
//! | --- | --- |
//! | `port` | the link of a pair whose network is on another slice |
//! | `switch`, `steering` | a network that is here, for the pairs of all slices |
//! | `frames` | batches of frames, and how many may be in flight |
//! | `front` | the registers of a network that another slice serves alone |

mod frames;
mod front;
mod port;
mod steering;
mod switch;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::io;
use std::sync::Arc;

use weft_confine::ThreadKind;
use weft_virtio::ConfigSpace;
use weft_virtio::net::{Link, Usage, unplug};

use super::RemoteDevices;
use super::queue_placement::QueuePlacement;
use crate::PRIMARY;
use crate::message::device::{self, Address, DeviceMessage};

pub use frames::{BATCH_MAX, window};
pub use front::NetworkFront;
pub use port::{FrameQueue, FrameSender, RemotePort};
pub use switch::{Gone, Switch};

/// Sends frames between a queue pair and a network on two slices.
struct PeerNet {
    pair: Address,
    /// The slice at the other end.
    slice: usize,
    remote: Arc<RemoteDevices>,
}

impl FrameSender for PeerNet {
    fn frames(&self, batch: &[u8]) {
        let header = device::frames(self.pair);
        self.remote.peers.send_frame(self.slice, &header, &[batch]);
    }

    fn taken(&self, bytes: u64) {
        let message = DeviceMessage::Taken { bytes };
        self.remote.send(self.slice, self.pair, message);
    }
}

impl RemoteDevices {
    /// The links of those pairs of a network that this slice may serve, where several slices
    /// serve pairs. `link`: the network's own, if it is here. At most
    /// `window` bytes are in flight between two slices, for each pair and way.
    ///
    /// # Errors
    /// No descriptors left, or no thread.
    pub fn links(
        self: &Arc<Self>,
        device: u8,
        placement: &QueuePlacement,
        link: Option<Box<dyn Link>>,
        window: usize,
    ) -> io::Result<Vec<Option<Box<dyn Link>>>> {
        let switch = link
            .map(|link| self.switch(device, placement, link, window))
            .transpose()?;
        let link = |pair| {
            if !placement.may_serve(self.number, pair) {
                return Ok(None);
            }
            if let Some(switch) = &switch {
                return Ok(Some(switch.port(pair)));
            }
            let queue = FrameQueue::new(window)?;
            let address = Address::new(device, pair);
            self.write(|table| table.frames.insert(address, queue.clone()));
            let sender = self.frame_sender(address, placement.owner());
            Ok(Some(
                Box::new(RemotePort::new(sender, queue)) as Box<dyn Link>
            ))
        };
        (0..placement.groups()).map(link).collect()
    }

    pub(super) fn frame_sender(
        self: &Arc<Self>,
        pair: Address,
        slice: usize,
    ) -> Arc<dyn FrameSender> {
        let remote = self.clone();
        Arc::new(PeerNet {
            pair,
            slice,
            remote,
        })
    }

    /// The way to the slice that serves a pair of a network that is here, if that is another.
    pub(super) fn server_sender(
        self: &Arc<Self>,
        pair: Address,
        server: usize,
    ) -> Option<Arc<dyn FrameSender>> {
        (server != self.number).then(|| self.frame_sender(pair, server))
    }

    /// Starts the switch of a network that is here.
    fn switch(
        self: &Arc<Self>,
        device: u8,
        placement: &QueuePlacement,
        link: Box<dyn Link>,
        window: usize,
    ) -> io::Result<Arc<Switch>> {
        let server = |pair| {
            let address = Address::new(device, pair);
            self.server_sender(address, placement.server(pair))
        };
        let remote = self.clone();
        let gone = Box::new(move |error: &io::Error| {
            eprintln!("weft: net{device}: the network failed: {error}");
            remote.unplug(device);
        });
        let servers = (0..placement.groups()).map(server).collect();
        let switch = Switch::new(link, servers, window, gone)?;
        self.write(|table| table.switches.insert(device, switch.clone()));
        let thread = switch.clone();
        let name = format!("weft-net{device}");
        weft_confine::spawn(&name, ThreadKind::Network, move || thread.run())?;
        Ok(switch)
    }

    /// What the driver of a device reads, on the slice that shows it and on that which
    /// has it.
    pub fn add_configuration(&self, device: u8, configuration: Arc<ConfigSpace>) {
        self.write(|table| table.configurations.insert(device, configuration));
    }

    /// The driver of a network uses this from now on. On the primary; waits
    /// for nothing.
    pub fn use_network(&self, device: u8, usage: Usage) {
        let (switch, owner) = self.read(|table| {
            let owner = table.places.get(device).map(QueuePlacement::owner);
            (table.switches.get(&device).cloned(), owner)
        });
        match (switch, owner) {
            (Some(switch), _) => switch.use_as(usage),
            (None, Some(owner)) if owner != self.number => {
                let address = Address::new(device, 0);
                self.send(owner, address, DeviceMessage::Use(usage));
            }
            _ => {}
        }
    }

    /// The cable of a network that is here is out.
    fn unplug(&self, device: u8) {
        let configuration = self.read(|table| table.configurations.get(&device).cloned());
        if configuration.is_some_and(|configuration| unplug(&configuration)) {
            self.configured(device);
        }
    }

    /// What the driver of a device that is here reads has changed.
    pub(super) fn configured(&self, device: u8) {
        if let Some(transport) = self.transport(device) {
            transport.interrupt().configuration();
        } else if self.number != PRIMARY
            && let Some(configuration) =
                self.read(|table| table.configurations.get(&device).cloned())
        {
            let message = DeviceMessage::Configured(configuration.bytes());
            self.send(PRIMARY, Address::new(device, 0), message);
        }
    }

    /// The device's slice says what its driver reads now.
    pub(super) fn configure(&self, from: usize, device: u8, bytes: &[u8]) -> Result<(), String> {
        let (configuration, owner) = self.read(|table| {
            let owner = table.places.get(device).map(QueuePlacement::owner);
            (table.configurations.get(&device).cloned(), owner)
        });
        let (Some(configuration), Some(transport)) = (configuration, self.transport(device)) else {
            return Err("it sent a message about an unknown device".into());
        };
        if owner != Some(from) || configuration.size() != bytes.len() {
            return Err("it sent a message about a device of another kind".into());
        }
        configuration.set(0, bytes);
        transport.interrupt().configuration();
        Ok(())
    }

    /// This slice's end of the connection between a pair and its network, whose other end
    /// is on slice `from`.
    fn frame_end(&self, from: usize, pair: Address) -> Result<FrameEnd, String> {
        self.read(|table| {
            let placement = table.places.get(pair.device);
            let far = |placement: &QueuePlacement| match placement.owner() {
                owner if owner == self.number => placement.server(pair.index()),
                owner => owner,
            };
            // It gives back what it got for a pair that went from there to here.
            let returns = |placement: &QueuePlacement| {
                let server = placement.server(pair.index());
                let had = placement.is_open() || placement.other_server(pair.index()) == Some(from);
                server == self.number && had
            };
            let switch = table
                .switches
                .get(&pair.device)
                .cloned()
                .map(FrameEnd::Switch);
            let queue = || table.frames.get(&pair).cloned().map(FrameEnd::Queue);
            if let (Some(FrameEnd::Switch(switch)), Some(true)) = (&switch, placement.map(returns))
            {
                return Ok(FrameEnd::Back(switch.clone()));
            }
            match switch.or_else(queue) {
                Some(end) if placement.map(far) == Some(from) => Ok(end),
                _ => Err("it sends frames to a node without a queue pair".into()),
            }
        })
    }

    /// Frames arrived.
    pub(super) fn take_frames(
        &self,
        from: usize,
        pair: Address,
        batch: Cow<'_, [u8]>,
    ) -> Result<(), String> {
        match self.frame_end(from, pair)? {
            FrameEnd::Switch(switch) => switch.put(pair.index(), &batch),
            FrameEnd::Back(switch) => switch.take_back(pair.index(), &batch),
            FrameEnd::Queue(queue) => queue.put(batch.into_owned()),
        }
    }

    /// The other end is done with frames that were sent.
    pub(super) fn frames_taken(
        &self,
        from: usize,
        pair: Address,
        bytes: u64,
    ) -> Result<(), String> {
        match self.frame_end(from, pair)? {
            FrameEnd::Switch(switch) | FrameEnd::Back(switch) => switch.taken(pair.index(), bytes),
            FrameEnd::Queue(queue) => queue.taken(bytes),
        }
    }
}

/// One end of the connection between a pair and its network.
enum FrameEnd {
    Switch(Arc<Switch>),
    /// Of a pair that is served here now.
    Back(Arc<Switch>),
    Queue(Arc<FrameQueue>),
}
