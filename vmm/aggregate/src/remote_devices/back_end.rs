//! Serves, on a secondary, the queues whose registers are on the primary.
//!
//! ```text
//! Idle ──activate──> Serving ──stop──> Stopping ──quiet──> Idle, and `Stopped` is sent
//! ```
//!
//! One thread executes the commands, `weft-queues`, and never waits for long: a group
//! that does not become quiet delays no other.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use weft_confine::{ThreadKind, lock};
use weft_guest_memory::{DeviceMemory, WriteObserver};
use weft_platform::interrupts::MessageSink;
use weft_platform::part::Part;
use weft_virtio::interrupt::{FarRegisters, Interrupt};
use weft_virtio::ring::RingParts;
use weft_virtio::worker::Worker;
use weft_virtio::{DeviceError, FEATURE_EVENT_INDEX, Ring, VirtioDevice};

use super::queue_placement::QueuePlacement;
use super::{Activation, RemoteDevices, Stopped};
use crate::PRIMARY;
use crate::message::device::{Address, DeviceMessage};

/// Commands that may wait: each group has two at most, one to start and one to stop.
const COMMANDS_MAX: usize = 1024;
/// How often the thread looks whether the machine is over.
const LOOK: Duration = Duration::from_millis(500);
/// How often it looks whether groups have stopped.
const STOP_LOOK: Duration = Duration::from_millis(1);

/// What the primary asks for.
pub(super) enum BackEndCommand {
    /// Serve a group.
    Activate(Address, Vec<u8>),
    Stop(Address),
}

/// What queues are served with.
pub struct Tools {
    /// Guest RAM.
    pub memory: DeviceMemory,
    /// Hears of what devices write there.
    pub observer: Option<Arc<dyn WriteObserver>>,
    /// Takes interrupts.
    pub sink: Arc<dyn MessageSink>,
}

/// A device that has queue groups on this slice.
struct Served {
    device: Box<dyn VirtioDevice>,
    name: String,
    /// Requests taken.
    taken: Arc<AtomicU64>,
}

/// A queue group that this slice may serve.
struct Group {
    worker: Worker,
    kicks: Vec<(u16, Arc<EventFd>)>,
    stopping: bool,
}

/// The state of the thread that executes the commands.
pub struct QueueBackEnd {
    tools: Tools,
    remote: Arc<RemoteDevices>,
    devices: HashMap<u8, Served>,
    groups: HashMap<Address, Group>,
}

/// Request counters of the devices that have queues on this slice.
pub struct ServedQueues(Vec<Arc<AtomicU64>>);

/// Address and data of a queue's interrupt, while it may be sent from here.
pub(super) type Route = Arc<Mutex<Option<(u64, u32)>>>;

/// The way from a queue here to its driver.
struct Far {
    device: u8,
    remote: Arc<RemoteDevices>,
    sink: Arc<dyn MessageSink>,
}

impl FarRegisters for Far {
    fn queue(&self, index: u16) {
        let address = Address::new(self.device, index);
        if let Some(route) = self.remote.route(address) {
            // Held while it is sent: after a change was seen the old one is not.
            let route = lock(&route);
            if let Some((place, data)) = *route {
                return self.sink.send(place, data);
            }
        }
        self.remote.send(PRIMARY, address, DeviceMessage::Used);
    }

    fn configuration(&self) {
        self.remote.configured(self.device);
    }

    fn fail(&self, reason: &str) {
        let address = Address::new(self.device, 0);
        let message = DeviceMessage::Broken(reason.as_bytes().to_vec());
        self.remote.send(PRIMARY, address, message);
    }
}

impl QueueBackEnd {
    /// Starts the threads of all groups that may be served here, idle, and the one that
    /// executes the commands.
    ///
    /// # Errors
    /// No thread, or no descriptors left.
    pub fn start(
        remote: Arc<RemoteDevices>,
        tools: Tools,
        devices: Vec<(u8, QueuePlacement, Box<dyn VirtioDevice>)>,
    ) -> io::Result<ServedQueues> {
        let mut back_end = Self {
            tools,
            remote: remote.clone(),
            devices: HashMap::new(),
            groups: HashMap::new(),
        };
        let mut counted = Vec::new();
        for (number, placement, device) in devices {
            let name = format!("{}{number}", device.kind().name);
            for group in placement.groups_for(remote.number) {
                let worker = Worker::new(&format!("weft-{name}-{group}"), device.thread_kind())?;
                let mut kicks = Vec::new();
                for queue in placement.queues(group) {
                    let kick = Arc::new(EventFd::new(EFD_NONBLOCK)?);
                    remote.add_kick(Address::new(number, queue), kick.clone());
                    kicks.push((queue, kick));
                }
                let group = Address::new(number, group);
                let stopping = false;
                back_end.groups.insert(
                    group,
                    Group {
                        worker,
                        kicks,
                        stopping,
                    },
                );
            }
            let taken = Arc::<AtomicU64>::default();
            counted.push(taken.clone());
            let served = Served {
                device,
                name,
                taken,
            };
            back_end.devices.insert(number, served);
        }
        let (sender, commands): (SyncSender<BackEndCommand>, _) = sync_channel(COMMANDS_MAX);
        remote.set_back_end(sender);
        weft_confine::spawn("weft-queues", ThreadKind::Device, move || {
            back_end.run(&commands);
        })?;
        Ok(ServedQueues(counted))
    }

    /// Until the machine is over.
    fn run(mut self, commands: &Receiver<BackEndCommand>) {
        while !self.remote.peers.is_over() {
            let stopping = self.groups.values().any(|group| group.stopping);
            match commands.recv_timeout(if stopping { STOP_LOOK } else { LOOK }) {
                Ok(BackEndCommand::Activate(group, json)) => self.activate(group, &json),
                Ok(BackEndCommand::Stop(group)) => self.stop(group),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            self.report_stopped();
        }
    }

    fn activate(&mut self, group: Address, json: &[u8]) {
        self.remote.write(|table| table.served.insert(group));
        let outcome = serde_json::from_slice(json)
            .map_err(|error| DeviceError::Reported(format!("a malformed activation: {error}")))
            .and_then(|activation| self.serve(group, &activation));
        if let Err(error) = outcome {
            let message = DeviceMessage::Broken(error.to_string().into_bytes());
            self.remote.send(PRIMARY, group, message);
        }
    }

    fn serve(&mut self, address: Address, activation: &Activation) -> Result<(), DeviceError> {
        let nothing = || {
            DeviceError::Reported(
                "an activation of queues that another slice \
        serves"
                    .into(),
            )
        };
        let group = self.groups.get(&address).ok_or_else(nothing)?;
        let served = self.devices.get_mut(&address.device).ok_or_else(nothing)?;
        let far = Far {
            device: address.device,
            remote: self.remote.clone(),
            sink: self.tools.sink.clone(),
        };
        let interrupt = Arc::new(Interrupt::far(Arc::new(far), &served.name));
        let sizes = served.device.queue_sizes();
        let mut rings: Vec<Option<Ring>> = sizes.iter().map(|_| None).collect();
        for (queue, kick) in &group.kicks {
            let named = activation.queues.iter().find(|(index, _)| index == queue);
            let (Some((_, state)), Some(size)) = (named, sizes.get(usize::from(*queue))) else {
                continue;
            };
            let parts = RingParts {
                memory: Arc::new(self.tools.memory.clone()),
                observer: self.tools.observer.clone(),
                interrupt: interrupt.clone(),
                kick: kick.clone(),
                taken: served.taken.clone(),
            };
            let event_index = activation.features & FEATURE_EVENT_INDEX != 0;
            let ring = Ring::new(*queue, *size, event_index, state, parts)?;
            rings[usize::from(*queue)] = Some(ring);
        }
        for handler in served.device.activate(activation.features, rings)? {
            group.worker.start(handler);
        }
        Ok(())
    }

    fn stop(&mut self, address: Address) {
        if let Some(group) = self.groups.get_mut(&address) {
            group.worker.request_stop();
            group.stopping = true;
        }
    }

    /// Reports the groups that have become quiet.
    fn report_stopped(&mut self) {
        for (address, group) in &mut self.groups {
            if !group.stopping || !group.worker.wait_quiet(Instant::now()) {
                continue;
            }
            group.stopping = false;
            let handler = group.worker.take();
            let rings = handler.iter().flat_map(|handler| handler.rings());
            let stopped = Stopped(rings.map(|ring| (ring.index(), ring.state())).collect());
            drop(handler);
            self.remote.write(|table| table.served.remove(address));
            // It is plain data: it always has a text.
            let json = serde_json::to_vec(&stopped).unwrap_or_default();
            let message = DeviceMessage::Stopped(json);
            self.remote.send(PRIMARY, *address, message);
        }
    }
}

impl Part for ServedQueues {
    fn counters(&self) -> Vec<(&'static str, u64)> {
        let requests = self.0.iter().map(|taken| taken.load(Ordering::Relaxed));
        vec![("requests", requests.sum())]
    }
}
