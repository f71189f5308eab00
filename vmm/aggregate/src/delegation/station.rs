//! Serves, on a secondary, the queues whose registers are on the primary.
//!
//! ```text
//! Idle ──activate──> Serving ──stop──> Stopping ──quiet──> Idle, and `Stopped` is told
//! ```
//!
//! One thread takes the orders, `weft-station`, and never waits for long: a unit
//! that does not get quiet holds up no other.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::Value;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use weft_confine::{ThreadKind, lock};
use weft_guest_memory::{DeviceMemory, WriteObserver};
use weft_platform::interrupts::MessageSink;
use weft_platform::part::{Part, PartError};
use weft_virtio::interrupt::{FarRegisters, Interrupt};
use weft_virtio::ring::RingParts;
use weft_virtio::worker::Worker;
use weft_virtio::{FEATURE_EVENT_INDEX, Fault, Ring, VirtioDevice};

use super::scheme::Scheme;
use super::{Activation, Delegation, Stopped};
use crate::PRIMARY;
use crate::message::device::{Address, DeviceMessage};

/// Orders that may wait: each unit has two at most, one to start and one to stop.
const ORDERS_MAX: usize = 1024;
/// How often the thread looks whether the machine is over.
const LOOK: Duration = Duration::from_millis(500);
/// How often it looks whether units have stopped.
const STOP_LOOK: Duration = Duration::from_millis(1);

/// What the primary wants.
pub(super) enum Order {
    /// Serve a unit.
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

/// A device of which units are served here.
struct Served {
    device: Box<dyn VirtioDevice>,
    name: String,
    /// Requests taken.
    taken: Arc<AtomicU64>,
}

/// A unit that may be served here.
struct Unit {
    worker: Worker,
    kicks: Vec<(u16, Arc<EventFd>)>,
    stopping: bool,
}

/// The orders' thread's.
pub struct Station {
    tools: Tools,
    delegation: Arc<Delegation>,
    devices: HashMap<u8, Served>,
    units: HashMap<Address, Unit>,
}

/// What was counted, for the machine's counters.
pub struct StationPart(Vec<Arc<AtomicU64>>);

/// Address and data of a queue's interrupt, while it may be sent from here.
pub(super) type Route = Arc<Mutex<Option<(u64, u32)>>>;

/// The way from a queue here to its driver.
struct Far {
    device: u8,
    delegation: Arc<Delegation>,
    sink: Arc<dyn MessageSink>,
}

impl FarRegisters for Far {
    fn queue(&self, index: u16) {
        let address = Address::new(self.device, index);
        if let Some(route) = self.delegation.route(address) {
            // Held while it is sent: after a change was seen the old one is not.
            let route = lock(&route);
            if let Some((place, data)) = *route {
                return self.sink.send(place, data);
            }
        }
        self.delegation.send(PRIMARY, address, DeviceMessage::Used);
    }

    fn configuration(&self) {
        self.delegation.configured(self.device);
    }

    fn fault(&self, reason: &str) {
        let address = Address::new(self.device, 0);
        let message = DeviceMessage::Broken(reason.as_bytes().to_vec());
        self.delegation.send(PRIMARY, address, message);
    }
}

impl Station {
    /// Makes the threads of all units that `devices` have here, idle, and that which
    /// takes the orders.
    ///
    /// # Errors
    /// No thread, or no descriptors left.
    pub fn start(
        delegation: Arc<Delegation>,
        tools: Tools,
        devices: Vec<(u8, Scheme, Box<dyn VirtioDevice>)>,
    ) -> io::Result<StationPart> {
        let mut station = Self {
            tools,
            delegation: delegation.clone(),
            devices: HashMap::new(),
            units: HashMap::new(),
        };
        let mut counted = Vec::new();
        for (number, scheme, device) in devices {
            let name = format!("{}{number}", device.kind().name);
            for unit in scheme.units_of(delegation.number) {
                let worker = Worker::new(&format!("weft-{name}-{unit}"), device.thread_kind())?;
                let mut kicks = Vec::new();
                for queue in scheme.queues(unit) {
                    let kick = Arc::new(EventFd::new(EFD_NONBLOCK)?);
                    delegation.add_kick(Address::new(number, queue), kick.clone());
                    kicks.push((queue, kick));
                }
                let unit = Address::new(number, unit);
                let stopping = false;
                station.units.insert(
                    unit,
                    Unit {
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
            station.devices.insert(number, served);
        }
        let (orders, ordered): (SyncSender<Order>, _) = sync_channel(ORDERS_MAX);
        delegation.set_station(orders);
        weft_confine::spawn("weft-station", ThreadKind::Device, move || {
            station.run(&ordered);
        })?;
        Ok(StationPart(counted))
    }

    /// Until the machine is over.
    fn run(mut self, ordered: &Receiver<Order>) {
        while !self.delegation.peers.is_over() {
            let stopping = self.units.values().any(|unit| unit.stopping);
            match ordered.recv_timeout(if stopping { STOP_LOOK } else { LOOK }) {
                Ok(Order::Activate(unit, json)) => self.activate(unit, &json),
                Ok(Order::Stop(unit)) => self.stop(unit),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            self.report_stopped();
        }
    }

    fn activate(&mut self, unit: Address, json: &[u8]) {
        let outcome = serde_json::from_slice(json)
            .map_err(|error| Fault::Elsewhere(format!("a malformed activation: {error}")))
            .and_then(|activation| self.serve(unit, &activation));
        if let Err(fault) = outcome {
            let message = DeviceMessage::Broken(fault.to_string().into_bytes());
            self.delegation.send(PRIMARY, unit, message);
        }
    }

    fn serve(&mut self, address: Address, activation: &Activation) -> Result<(), Fault> {
        let nothing = || {
            Fault::Elsewhere(
                "an activation of queues that another slice \
        serves"
                    .into(),
            )
        };
        let unit = self.units.get(&address).ok_or_else(nothing)?;
        let served = self.devices.get_mut(&address.device).ok_or_else(nothing)?;
        let far = Far {
            device: address.device,
            delegation: self.delegation.clone(),
            sink: self.tools.sink.clone(),
        };
        let interrupt = Arc::new(Interrupt::far(Arc::new(far), &served.name));
        let sizes = served.device.queue_sizes();
        let mut rings: Vec<Option<Ring>> = sizes.iter().map(|_| None).collect();
        for (queue, kick) in &unit.kicks {
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
            unit.worker.start(handler);
        }
        Ok(())
    }

    fn stop(&mut self, address: Address) {
        if let Some(unit) = self.units.get_mut(&address) {
            unit.worker.request_stop();
            unit.stopping = true;
        }
    }

    /// Tells of the units that have got quiet.
    fn report_stopped(&mut self) {
        for (address, unit) in &mut self.units {
            if !unit.stopping || !unit.worker.wait_quiet(Instant::now()) {
                continue;
            }
            unit.stopping = false;
            let handler = unit.worker.take();
            let rings = handler.iter().flat_map(|handler| handler.rings());
            let stopped = Stopped(rings.map(|ring| (ring.index(), ring.state())).collect());
            drop(handler);
            // It is plain data: it always has a text.
            let json = serde_json::to_vec(&stopped).unwrap_or_default();
            let message = DeviceMessage::Stopped(json);
            self.delegation.send(PRIMARY, *address, message);
        }
    }
}

impl Part for StationPart {
    fn save(&self) -> Result<Value, PartError> {
        Err(PartError::Busy("queues of another slice's devices".into()))
    }

    fn restore(&self, _: Value) -> Result<(), PartError> {
        let reason = "queues of another slice's devices".to_owned();
        Err(PartError::Misfit(reason))
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let requests = self.0.iter().map(|taken| taken.load(Ordering::Relaxed));
        vec![("requests", requests.sum())]
    }
}
