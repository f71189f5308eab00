//! Virtio over PCI (4.1), modern only: one function with two windows.
//!
//! | BAR | offset | what |
//! | --- | --- | --- |
//! | 0 (64-bit) | 0x0000 | common configuration |
//! | | 0x1000 | ISR status |
//! | | 0x2000 | device configuration |
//! | | 0x3000 | notifications, four bytes per queue |
//! | 2 (32-bit) | 0x000, 0x800 | MSI-X table, pending bits |

mod capabilities;
mod common;
mod persist;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use weft_confine::lock;
use weft_guest_memory::{DeviceMemory, WriteObserver};
use weft_platform::bus::BusDevice;
use weft_platform::pci::{Bar, Endpoint, EndpointOptions, Function, Identity, Root};

pub use persist::TransportState;

use super::interrupt::Interrupt;
use super::ring::{Ring, RingParts};
use super::worker::{Handler, Worker};
use super::{
    ConfigSpace, DeviceError, FEATURE_EVENT_INDEX, TRANSPORT_FEATURES, VirtioDevice, VirtioError,
};
use common::Registers;

/// Vendor of every virtio device (4.1.2).
const VENDOR: u16 = 0x1af4;
/// Device numbers start here (4.1.2).
const FIRST_DEVICE: u16 = 0x1040;
const REGISTERS_BAR: u8 = 0;
const MSIX_BAR: u8 = 2;
const REGISTERS_SIZE: u64 = 0x4000;
const ISR: u64 = 0x1000;
const DEVICE: u64 = 0x2000;
const NOTIFY: u64 = 0x3000;
/// Bytes from one queue's notification to the next.
pub const NOTIFY_MULTIPLIER: u64 = 4;
/// How long a vCPU that resets a device waits; a device that needs longer goes
/// on in its own thread and shows its old status until then (4.1.4.3.2).
const RESET_WAIT: Duration = Duration::from_millis(100);

/// What devices are attached to.
#[derive(Clone)]
pub struct Attach {
    /// Guest RAM.
    pub memory: DeviceMemory,
    /// Hears of what devices write there.
    pub observer: Option<Arc<dyn WriteObserver>>,
    /// Hears of how driver and device reach each other.
    pub route_observer: Option<Arc<dyn RouteObserver>>,
}

/// How a driver and its device reach each other, while the driver is ready.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NotificationRoutes {
    /// Guest-physical address of the first queue's notification; the next is
    /// [`NOTIFY_MULTIPLIER`] bytes further.
    pub doorbells: Option<u64>,
    /// By queue: address and data of its interrupt, if it may be sent at once.
    pub messages: Vec<Option<(u64, u32)>>,
}

/// Is called when [`NotificationRoutes`] change, for whatever serves queues elsewhere.
pub trait RouteObserver: Send + Sync {
    /// They may have changed; `routes` says what they are at the moment that it is
    /// called. Called on the thread of the vCPU that changed them, with no lock of
    /// the device held; may wait for other hosts, not for the guest.
    fn changed(&self, routes: &dyn Fn() -> NotificationRoutes);
}

/// Where the device is in its life.
enum Phase {
    /// Not activated, or reset.
    Idle,
    /// Its handlers are with the workers.
    Running,
    /// They are wanted back.
    Resetting,
    Paused(Vec<Box<dyn Handler>>),
    /// Detached.
    Gone,
}

struct State {
    registers: Registers,
    device: Box<dyn VirtioDevice>,
    phase: Phase,
}

/// A virtio device in its slot.
pub struct Transport {
    name: String,
    slot: u8,
    endpoint: Arc<Endpoint>,
    interrupt: Arc<Interrupt>,
    configuration: Arc<ConfigSpace>,
    attach: Attach,
    kicks: Vec<Arc<EventFd>>,
    kick_count: AtomicU64,
    taken: Arc<AtomicU64>,
    /// Offset of the capability that looks into the BAR.
    window_capability: u16,
    workers: Vec<Worker>,
    /// Held while workers are waited for, with a bound; a worker never takes it.
    state: Mutex<State>,
}

/// What a device has done so far.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Counters {
    /// Type and slot.
    pub name: String,
    /// Notifications by the driver.
    pub kicks: u64,
    /// Requests taken from its queues.
    pub requests: u64,
    /// Interrupts sent.
    pub interrupts: u64,
    /// Times that it stopped because of its driver.
    pub faults: u64,
}

impl Transport {
    /// Puts `device` into the next slot of `root` and starts its threads, idle.
    pub fn attach(
        root: &Root,
        attach: &Attach,
        device: Box<dyn VirtioDevice>,
    ) -> Result<Arc<Self>, VirtioError> {
        let kind = device.kind();
        let slot = root.reserve()?;
        let number = slot.number();
        let name = format!("{}{number}", kind.name);
        let sizes = device.queue_sizes();
        let endpoint = Arc::new(Endpoint::new(
            slot,
            &EndpointOptions {
                identity: Identity {
                    vendor: VENDOR,
                    device: FIRST_DEVICE + kind.id,
                    class: kind.class,
                    revision: 1,
                    subsystem_vendor: VENDOR,
                    subsystem: FIRST_DEVICE + kind.id,
                },
                bars: vec![Bar {
                    index: REGISTERS_BAR,
                    size: REGISTERS_SIZE,
                    wide: true,
                }],
                vectors: sizes.len() as u16 + 1,
                msix_bar: MSIX_BAR,
            },
        )?);
        let configuration = device.configuration();
        let window_capability =
            capabilities::add(&endpoint, configuration.size() as u32, sizes.len() as u32)?;
        let started = |source| VirtioError::Start {
            device: name.clone(),
            source,
        };
        let kicks = sizes
            .iter()
            .map(|_| EventFd::new(EFD_NONBLOCK).map(Arc::new))
            .collect::<Result<_, _>>()
            .map_err(started)?;
        let workers = (0..device.workers())
            .map(|worker| Worker::new(&format!("weft-{name}-{worker}"), device.thread_kind()))
            .collect::<Result<_, _>>()
            .map_err(started)?;
        let transport = Arc::new(Self {
            interrupt: Arc::new(Interrupt::new(endpoint.clone(), sizes.len(), &name)),
            slot: number,
            configuration,
            attach: attach.clone(),
            kicks,
            kick_count: AtomicU64::new(0),
            taken: Arc::default(),
            window_capability,
            workers,
            state: Mutex::new(State {
                registers: Registers::new(device.features() | TRANSPORT_FEATURES, &sizes),
                device,
                phase: Phase::Idle,
            }),
            endpoint: endpoint.clone(),
            name,
        });
        let window = Window(Arc::downgrade(&transport));
        endpoint.connect(REGISTERS_BAR, Arc::new(window));
        if transport.attach.route_observer.is_some() {
            let watched = Arc::downgrade(&transport);
            endpoint.on_message_change(Box::new(move || {
                if let Some(transport) = watched.upgrade() {
                    transport.publish_routes();
                }
            }));
        }
        root.insert(number, transport.clone())?;
        Ok(transport)
    }

    /// Type and slot.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Which slot it is in.
    pub fn slot(&self) -> u8 {
        self.slot
    }

    pub fn counters(&self) -> Counters {
        let (interrupts, faults) = self.interrupt.counts();
        Counters {
            name: self.name.clone(),
            kicks: self.kick_count.load(Ordering::Relaxed),
            requests: self.taken.load(Ordering::Relaxed),
            interrupts,
            faults,
        }
    }

    /// Ends all I/O in flight and keeps new requests waiting. When the device is
    /// not quiet within `bound` it goes on as before. vCPUs should be paused
    /// already: what they write to a paused device's registers may wait or be lost.
    pub fn pause(&self, bound: Duration) -> Result<(), VirtioError> {
        let mut state = lock(&self.state);
        let deadline = Instant::now() + bound;
        match state.phase {
            Phase::Paused(_) | Phase::Gone => return Ok(()),
            Phase::Idle => state.phase = Phase::Paused(Vec::new()),
            Phase::Running | Phase::Resetting => {
                let Some(handlers) = self.stop(deadline) else {
                    if matches!(state.phase, Phase::Running) {
                        self.workers.iter().for_each(Worker::cancel_stop);
                    }
                    return Err(VirtioError::Busy {
                        device: self.name.clone(),
                        milliseconds: bound.as_millis(),
                    });
                };
                if matches!(state.phase, Phase::Resetting) {
                    drop(handlers);
                    self.finish_reset(&mut state);
                    state.phase = Phase::Paused(Vec::new());
                } else {
                    state.phase = Phase::Paused(handlers);
                }
            }
        }
        Ok(())
    }

    /// Goes on after [`Transport::pause`].
    pub fn resume(&self) {
        let mut state = lock(&self.state);
        if let Phase::Paused(handlers) = &mut state.phase {
            let handlers = std::mem::take(handlers);
            state.phase = self.run(handlers);
        }
    }

    /// See [`VirtioDevice::announce`].
    pub fn announce(&self) {
        lock(&self.state).device.announce();
    }

    /// See [`VirtioDevice::release_backing`].
    pub fn release_backing(&self) {
        lock(&self.state).device.release_backing();
    }

    /// See [`VirtioDevice::claim_backing`].
    ///
    /// # Errors
    /// As there.
    pub fn claim_backing(&self) -> Result<(), String> {
        lock(&self.state).device.claim_backing()
    }

    /// Takes the device off the bus, ends its I/O and gives its handlers up: save the
    /// state before.
    /// Threads end when the last reference goes.
    pub fn detach(&self, bound: Duration) -> Result<(), VirtioError> {
        self.endpoint.disconnect();
        self.pause(bound)?;
        lock(&self.state).phase = Phase::Gone;
        Ok(())
    }

    /// The driver notified a queue, from wherever.
    pub fn kick(&self, queue: u16) {
        if let Some(kick) = self.kicks.get(usize::from(queue)) {
            self.kick_count.fetch_add(1, Ordering::Relaxed);
            // A full counter wakes as well.
            let _ = kick.write(1);
        }
    }

    /// The way to the driver.
    pub fn interrupt(&self) -> &Interrupt {
        &self.interrupt
    }

    /// Whether it is paused.
    pub fn is_paused(&self) -> bool {
        matches!(lock(&self.state).phase, Phase::Paused(_))
    }

    /// Makes the handlers of a paused device anew from where its queues are, for one that
    /// chooses others now. Does nothing while it is not paused.
    pub fn remake_handlers(&self) {
        let mut state = lock(&self.state);
        let Phase::Paused(handlers) = &mut state.phase else {
            return;
        };
        let handlers = std::mem::take(handlers);
        if handlers.is_empty() {
            return;
        }
        for ring in handlers.iter().flat_map(|handler| handler.rings()) {
            if let Some(queue) = state.registers.queues.get_mut(usize::from(ring.index())) {
                *queue = ring.state();
            }
        }
        // Before others use what these have.
        drop(handlers);
        match self.make_handlers(&mut state) {
            Ok(handlers) => state.phase = Phase::Paused(handlers),
            Err(error) => self.interrupt.fail(&error),
        }
    }

    /// Tells the observer that the routes may have changed, or who serves the queues. No lock
    /// is held.
    pub fn publish_routes(&self) {
        if let Some(route_observer) = &self.attach.route_observer {
            route_observer.changed(&|| self.routes());
        }
    }

    fn routes(&self) -> NotificationRoutes {
        if !lock(&self.state).registers.driver_ok() {
            return NotificationRoutes::default();
        }
        let base = self.endpoint.place_of(REGISTERS_BAR);
        let message = |queue| self.endpoint.message(self.interrupt.vector(Some(queue)));
        NotificationRoutes {
            doorbells: base.map(|base| base + NOTIFY),
            messages: (0..self.kicks.len() as u16).map(message).collect(),
        }
    }

    fn run(&self, handlers: Vec<Box<dyn Handler>>) -> Phase {
        if handlers.is_empty() {
            return Phase::Idle;
        }
        for (worker, handler) in self.workers.iter().zip(handlers) {
            worker.start(handler);
        }
        Phase::Running
    }

    /// The handlers of all workers, or nothing when one is not quiet in time.
    fn stop(&self, deadline: Instant) -> Option<Vec<Box<dyn Handler>>> {
        self.workers.iter().for_each(Worker::request_stop);
        if !self
            .workers
            .iter()
            .all(|worker| worker.wait_quiet(deadline))
        {
            return None;
        }
        Some(self.workers.iter().filter_map(Worker::take).collect())
    }

    /// The driver wrote 0 to the status.
    fn start_reset(&self, state: &mut State, bound: Duration) {
        match state.phase {
            Phase::Idle | Phase::Paused(_) => self.finish_reset(state),
            Phase::Gone => {}
            Phase::Running | Phase::Resetting => {
                state.phase = Phase::Resetting;
                self.try_reset(state, Instant::now() + bound);
            }
        }
    }

    /// Ends a reset, if the workers are quiet by `deadline`.
    fn try_reset(&self, state: &mut State, deadline: Instant) {
        if matches!(state.phase, Phase::Resetting) && self.stop(deadline).is_some() {
            state.phase = Phase::Idle;
            self.finish_reset(state);
        }
    }

    fn finish_reset(&self, state: &mut State) {
        state.registers.reset();
        state.device.reset();
        self.interrupt.reset();
        if let Phase::Paused(handlers) = &mut state.phase {
            handlers.clear();
        }
    }

    /// The driver set DRIVER_OK.
    fn start_device(&self, state: &mut State) {
        match self.make_handlers(state) {
            Ok(handlers) => match &mut state.phase {
                Phase::Idle => state.phase = self.run(handlers),
                Phase::Paused(parked) => *parked = handlers,
                Phase::Running | Phase::Resetting | Phase::Gone => {}
            },
            Err(error) => self.interrupt.fail(&error),
        }
    }

    fn make_handlers(&self, state: &mut State) -> Result<Vec<Box<dyn Handler>>, DeviceError> {
        let features = state.registers.features();
        let event_index = features & FEATURE_EVENT_INDEX != 0;
        let mut rings = Vec::new();
        for (index, kick) in (0_u16..).zip(&self.kicks) {
            let (queue, max_size) = state.registers.queue(index);
            let parts = RingParts {
                memory: Arc::new(self.attach.memory.clone()),
                observer: self.attach.observer.clone(),
                interrupt: self.interrupt.clone(),
                kick: kick.clone(),
                taken: self.taken.clone(),
            };
            let ring = queue
                .enabled
                .then(|| Ring::new(index, max_size, event_index, queue, parts))
                .transpose()?;
            rings.push(ring);
        }
        state.device.activate(features, rings)
    }
}

impl Function for Transport {
    fn read(&self, register: u16, data: &mut [u8]) {
        if let Some(target) = self.window_access(register, data.len()) {
            let mut value = [0; 4];
            if let Some(value) = value.get_mut(..target.length) {
                self.read_register(target.offset, value);
            }
            self.endpoint.write(self.window_capability + 16, &value);
        }
        self.endpoint.read(register, data);
    }

    fn write(&self, register: u16, data: &[u8]) {
        self.endpoint.write(register, data);
        if let Some(target) = self.window_access(register, data.len()) {
            let mut value = [0; 4];
            self.endpoint.read(self.window_capability + 16, &mut value);
            if let Some(value) = value.get(..target.length) {
                self.write_register(target.offset, value);
            }
        }
        self.publish_routes();
    }
}

/// The registers' BAR.
struct Window(Weak<Transport>);

impl BusDevice for Window {
    fn read(&self, offset: u64, data: &mut [u8]) {
        match self.0.upgrade() {
            Some(transport) => transport.read_register(offset, data),
            None => data.fill(0xff),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let Some(transport) = self.0.upgrade() {
            transport.write_register(offset, data);
        }
    }
}

impl Transport {
    fn read_register(&self, offset: u64, data: &mut [u8]) {
        match offset {
            DEVICE..NOTIFY => self.configuration.read(offset - DEVICE, data),
            ISR => {
                data.fill(0);
                if let Some(first) = data.first_mut() {
                    *first = self.interrupt.take_isr();
                }
            }
            ..ISR => self.read_common(offset, data),
            _ => data.fill(0),
        }
    }

    fn write_register(&self, offset: u64, data: &[u8]) {
        match offset {
            NOTIFY.. => {
                let queue = (offset - NOTIFY) / NOTIFY_MULTIPLIER;
                // A window of 4 KiB has room for 1024 queues.
                self.kick(queue as u16);
            }
            DEVICE.. => self.configuration.write(offset - DEVICE, data),
            ..ISR => self.write_common(offset, data),
            _ => {}
        }
    }

    /// What an access to the data of the PCI configuration access capability
    /// means (4.1.4.9), if it is one and the driver has set it up rightly.
    fn window_access(&self, register: u16, length: usize) -> Option<capabilities::Target> {
        let data = self.window_capability + 16;
        let touches = register < data + 4 && data < register.saturating_add(length as u16);
        touches.then(|| capabilities::target(&self.endpoint, self.window_capability))?
    }
}

impl Drop for Transport {
    fn drop(&mut self) {
        self.endpoint.disconnect();
    }
}
