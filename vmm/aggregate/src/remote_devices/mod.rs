//! Remote devices. One slice has a device's file or network link, the primary has its
//! registers, and each slice serves the queues of its own vCPUs.
//!
//! ```text
//!  slice 0                            slice 1                      slice 2
//!  Transport ─── QueueProxy ════════▶ QueueBackEnd                  file
//!   registers     activate, stop       Worker ── Handler             ▲
//!   MSI-X table                         │ ring, buffers              │
//!   RoutePublisher ──── routes ───────▶ │ in its own memory          │
//!                                      RemoteBlock ── chunks ─────▶ Server
//! ```
//!
//! Invariants: at most one slice serves a queue, and only that slice reports on it; it is
//! served only between `Activate` and `Stopped`; a message that the driver has taken back
//! is not sent any more once the driver's write has returned; where a queue is served changes
//! only while it is not served.
//!
//! | file | holds |
//! | --- | --- |
//! | `queue_placement` | which slice serves which queues |
//! | `moves` | queues go to another slice |
//! | `partitioned`, `proxy` | slice 0: proxies of queues that other slices serve |
//! | `routes` | slice 0: publishes where interrupts and notifications go |
//! | `back_end` | secondaries: serve queues |
//! | `doorbells` | secondaries: notifications that wait for nobody |
//! | [`block`] | requests of disks: client and server |
//! | [`net`] | frames of networks: ports and switch |

mod back_end;
pub mod block;
mod doorbells;
mod moves;
pub mod net;
mod partitioned;
mod proxy;
pub(super) mod queue_placement;
mod routes;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::mpsc::{SyncSender, TrySendError};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, Weak};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use vmm_sys_util::eventfd::EventFd;
use weft_confine::lock;
use weft_platform::bus::Bus;
use weft_virtio::block::Disk;
use weft_virtio::ring::QueueState;
use weft_virtio::worker::Cause;
use weft_virtio::{ConfigSpace, DeviceError, NOTIFY_MULTIPLIER, RouteObserver, Transport};

use super::PRIMARY;
use super::message::device::{Address, DeviceMessage};
use super::peers::Peers;
use super::pending_requests::PendingRequests;
use back_end::{BackEndCommand, Route};
pub use back_end::{QueueBackEnd, ServedQueues, Tools};
use block::{ReplyQueue, Server};
use doorbells::Doorbells;
use net::{FrameQueue, Switch};
pub use partitioned::PartitionedDevice;
use proxy::StopCompletion;
use queue_placement::QueuePlaces;
pub use queue_placement::{DataPath, QueuePlacement, Servers, takers};
use routes::RoutePublisher;

/// What a queue back end needs to serve a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Activation {
    /// What the driver took.
    pub features: u64,
    /// The queues that it uses, and how far they got.
    pub queues: Vec<(u16, QueueState)>,
}

/// How far the queues of a group got before they stopped.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stopped(pub Vec<(u16, QueueState)>);

/// The receivers of messages, by device. Filled while the machine is put together; afterwards
/// only the places change.
#[derive(Default)]
struct Table {
    /// What users call the devices.
    names: BTreeMap<u8, String>,
    places: QueuePlaces,
    /// Those whose file is here.
    disks: BTreeMap<u8, Arc<Disk>>,
    replies: HashMap<Address, Arc<ReplyQueue>>,
    servers: HashMap<u8, Arc<Server>>,
    frames: HashMap<Address, Arc<FrameQueue>>,
    switches: HashMap<u8, Arc<Switch>>,
    configurations: HashMap<u8, Arc<ConfigSpace>>,
    routes: HashMap<Address, Route>,
    completions: HashMap<Address, Arc<StopCompletion>>,
    kicks: HashMap<Address, Arc<EventFd>>,
    transports: HashMap<u8, Weak<Transport>>,
    back_end: Option<SyncSender<BackEndCommand>>,
    /// Groups that are served here, on a secondary.
    served: HashSet<Address>,
}

/// One slice's part in the devices of all.
pub struct RemoteDevices {
    number: usize,
    peers: Arc<Peers>,
    seen: PendingRequests<()>,
    patience: Duration,
    /// Never held across a call.
    table: RwLock<Table>,
    mmio: OnceLock<Bus>,
    /// Where the doorbells of a device are, on a secondary.
    placed: Mutex<HashMap<u8, u64>>,
}

impl RemoteDevices {
    /// Of slice `number`, which waits `patience` for others.
    pub(super) fn new(number: usize, peers: Arc<Peers>, patience: Duration) -> Arc<Self> {
        Arc::new(Self {
            number,
            peers,
            seen: PendingRequests::default(),
            patience,
            table: RwLock::default(),
            mmio: OnceLock::new(),
            placed: Mutex::default(),
        })
    }

    /// Says where the memory-mapped registers of devices are, once.
    pub(super) fn join(&self, mmio: &Bus) {
        let _ = self.mmio.set(mmio.clone());
    }

    /// No vCPU waits for anything any more.
    pub(super) fn end_waits(&self) {
        self.seen.end();
    }

    /// `slice` no longer replies.
    pub(super) fn peer_lost(&self, slice: usize) {
        self.seen.peer_lost(slice);
    }

    /// `slice` has left.
    pub(super) fn departed(&self, slice: usize) {
        self.seen.departed(slice);
    }

    /// The devices whose file or link `slice` has, by the names that users know.
    pub(super) fn devices_of(&self, slice: usize) -> Vec<String> {
        self.read(|table| {
            let owner = |device: &u8| table.places.get(*device).map(QueuePlacement::owner);
            let of_slice = (table.names.iter()).filter(|(device, _)| owner(device) == Some(slice));
            of_slice.map(|(_, name)| name.clone()).collect()
        })
    }

    /// The disks whose file is here, by their number.
    pub fn disks_here(&self) -> Vec<(u8, Arc<Disk>)> {
        self.read(|table| {
            let disks = table.disks.iter();
            disks
                .map(|(number, disk)| (*number, disk.clone()))
                .collect()
        })
    }

    /// The machine is over: threads end.
    pub(super) fn close(&self) {
        self.end_waits();
        for server in self.read(|table| table.servers.values().cloned().collect::<Vec<_>>()) {
            server.close();
        }
        for switch in self.read(|table| table.switches.values().cloned().collect::<Vec<_>>()) {
            switch.close();
        }
    }

    /// Where the queues of a device are served; `name` is for users.
    pub fn add_placement(&self, device: u8, name: String, placement: &QueuePlacement) {
        self.write(|table| {
            table.names.insert(device, name);
            table.places.insert(device, placement.clone());
        });
    }

    /// The observer of the routes of a device whose registers are here.
    pub fn route_publisher(self: &Arc<Self>, device: u8) -> Arc<dyn RouteObserver> {
        Arc::new(RoutePublisher {
            device,
            remote: self.clone(),
            published: Mutex::default(),
        })
    }

    /// A device whose registers are here.
    pub fn add_transport(&self, device: u8, transport: &Arc<Transport>) {
        let transport = Arc::downgrade(transport);
        self.write(|table| table.transports.insert(device, transport));
    }

    fn add_completion(&self, group: Address, completion: Arc<StopCompletion>) {
        self.write(|table| table.completions.insert(group, completion));
    }

    fn add_kick(&self, queue: Address, kick: Arc<EventFd>) {
        self.write(|table| {
            table.routes.insert(queue, Arc::default());
            table.kicks.insert(queue, kick);
        });
    }

    fn set_back_end(&self, commands: SyncSender<BackEndCommand>) {
        self.write(|table| table.back_end = Some(commands));
    }

    fn route(&self, queue: Address) -> Option<Route> {
        self.read(|table| table.routes.get(&queue).cloned())
    }

    /// Where the queues of a device are served now.
    fn placement(&self, device: u8) -> Option<QueuePlacement> {
        self.read(|table| table.places.get(device).cloned())
    }

    /// The slice that serves a queue.
    fn server_of(&self, queue: Address) -> usize {
        self.read(|table| {
            let placement = table.places.get(queue.device);
            placement.map_or(PRIMARY, |placement| {
                placement.server_of_queue(queue.index())
            })
        })
    }

    /// The slice that serves a group.
    fn server_of_group(&self, group: Address) -> usize {
        self.read(|table| {
            let placement = table.places.get(group.device);
            placement.map_or(PRIMARY, |placement| placement.server(group.index()))
        })
    }

    /// Whether a slice serves a queue of a device.
    fn serves(&self, slice: usize, device: u8) -> bool {
        self.read(|table| {
            let placement = table.places.get(device);
            placement.is_some_and(|placement| placement.groups_of(slice).next().is_some())
        })
    }

    /// The driver notified a queue that is served here. On the vCPU's thread, or on the
    /// one that reads the link of its slice: a request that goes to another slice goes
    /// at once if that needs no waiting.
    fn kick(&self, queue: Address) {
        let replies = self.read(|table| table.replies.get(&queue).cloned());
        if replies.is_some_and(|replies| replies.work(Cause::Kick(0))) {
            return;
        }
        if let Some(kick) = self.read(|table| table.kicks.get(&queue).cloned()) {
            // A full counter wakes as well.
            let _ = kick.write(1);
        } else if let Some(transport) = self.transport(queue.device) {
            transport.kick(queue.index());
        }
    }

    fn transport(&self, device: u8) -> Option<Arc<Transport>> {
        self.read(|table| table.transports.get(&device).and_then(Weak::upgrade))
    }

    fn send(&self, slice: usize, address: Address, message: DeviceMessage) {
        let (header, payload) = message.encode(address);
        self.peers.send_frame(slice, &header, &[payload]);
    }

    /// Waits until the slice that got the message with this ticket has acknowledged it.
    fn was_seen(&self, ticket: u64) -> bool {
        self.seen.wait(ticket, self.patience).is_some() || self.peers.is_over()
    }

    /// A message that came from `from`. Waits for nothing.
    ///
    /// # Errors
    /// What is wrong with it, or with its sender.
    pub(super) fn take(
        self: &Arc<Self>,
        from: usize,
        address: Address,
        message: DeviceMessage,
    ) -> Result<(), String> {
        let commands = matches!(
            message,
            DeviceMessage::Doorbells { .. }
                | DeviceMessage::Route { .. }
                | DeviceMessage::Activate(_)
                | DeviceMessage::Stop
                | DeviceMessage::Use(_)
        );
        if commands && from != PRIMARY {
            return Err("it sent a command about a device".into());
        }
        match message {
            DeviceMessage::Described(_) => return Err("it described a device too late".into()),
            DeviceMessage::Doorbells {
                ticket,
                address: place,
                queues,
            } => {
                self.map_doorbells(address.device, place, queues);
                self.send(from, address, DeviceMessage::Seen { ticket });
            }
            DeviceMessage::Route { ticket, message } => {
                if let Some(route) = self.route(address) {
                    *lock(&route) = message;
                }
                self.send(from, address, DeviceMessage::Seen { ticket });
            }
            DeviceMessage::Seen { ticket } => return self.seen.complete(from, ticket, ()),
            DeviceMessage::Activate(json) => {
                return self.command(BackEndCommand::Activate(address, json));
            }
            DeviceMessage::Stop => return self.command(BackEndCommand::Stop(address)),
            DeviceMessage::Stopped(json) => {
                let stopped = serde_json::from_slice(&json).map_err(|error| {
                    format!(
                        "its report of stopped queues is malformed: \
                    {error}"
                    )
                })?;
                if let Some(completion) =
                    self.read(|table| table.completions.get(&address).cloned())
                {
                    if self.server_of_group(address) != from {
                        return Err(
                            "it reported the stop of queues that another node serves".into()
                        );
                    }
                    completion.put(stopped);
                }
            }
            DeviceMessage::Kick if self.server_of(address) != self.number => {
                return Err("it notified a queue that another node serves".into());
            }
            DeviceMessage::Kick => self.kick(address),
            DeviceMessage::Used => {
                if self.server_of(address) != from {
                    return Err("it used buffers of a queue that another node serves".into());
                }
                if let Some(transport) = self.transport(address.device) {
                    transport.interrupt().queue(address.index());
                }
            }
            DeviceMessage::Broken(text) => {
                if !self.serves(from, address.device) {
                    return Err("it reported a fault of a device that other nodes serve".into());
                }
                if let Some(transport) = self.transport(address.device) {
                    let text = String::from_utf8_lossy(&text).into_owned();
                    transport.interrupt().fail(&DeviceError::Reported(text));
                }
            }
            DeviceMessage::Ask { chunk, data } => {
                return self.take_chunk(from, address, chunk, data.into_owned());
            }
            DeviceMessage::Answered(reply) => return self.take_reply(from, address, reply),
            DeviceMessage::Frames(batch) => return self.take_frames(from, address, batch),
            DeviceMessage::Taken { bytes } => return self.frames_taken(from, address, bytes),
            DeviceMessage::Use(usage) => {
                let switch = self.read(|table| table.switches.get(&address.device).cloned());
                switch
                    .ok_or("it sent a command about a network that this node does not have")?
                    .use_as(usage);
            }
            DeviceMessage::Configured(bytes) => {
                return self.configure(from, address.device, &bytes);
            }
        }
        Ok(())
    }

    fn command(&self, command: BackEndCommand) -> Result<(), String> {
        let back_end = self.read(|table| table.back_end.clone());
        let back_end = back_end.ok_or("it sent commands about devices, but this node has none")?;
        match back_end.try_send(command) {
            Err(TrySendError::Full(_)) => Err("it sent too many commands about devices".into()),
            _ => Ok(()),
        }
    }

    /// Puts a device's doorbells where they are now.
    fn map_doorbells(self: &Arc<Self>, device: u8, place: Option<u64>, queues: u64) {
        let Some(mmio) = self.mmio.get() else {
            return;
        };
        let mut placed = lock(&self.placed);
        if let Some(old) = placed.remove(&device) {
            mmio.remove(old);
        }
        let Some(start) = place else {
            return;
        };
        let end = start.saturating_add(queues.saturating_mul(NOTIFY_MULTIPLIER));
        let remote = self.clone();
        let doorbells = Doorbells { device, remote };
        // Where something else is, the register on slice 0 does it.
        if mmio.insert(start..end, Arc::new(doorbells)).is_ok() {
            placed.insert(device, start);
        }
    }

    fn read<T>(&self, look: impl FnOnce(&Table) -> T) -> T {
        look(&self.table.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn write<T>(&self, change: impl FnOnce(&mut Table) -> T) -> T {
        change(&mut self.table.write().unwrap_or_else(PoisonError::into_inner))
    }
}
