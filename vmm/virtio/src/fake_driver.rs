//! A guest's side for tests: a machine without CPUs, and a driver that finds a
//! device through configuration space and plays it through its registers and
//! rings, as a kernel would. What it does wrong on purpose, it does through
//! [`Driver::common`] and [`Ram`] itself.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use vm_memory::{Bytes, GuestAddress};
use weft_confine::lock;
use weft_guest_memory::{DeviceMemory, ECAM, FOUR_GIB, Ram, Visit};
use weft_platform::bus::Bus;
use weft_platform::interrupts::{InterruptLine, MessageSink};
use weft_platform::pci::{Root, RootOptions, Windows};

use super::{Attach, Transport, VirtioDevice, VirtioError};

/// Descriptor flags (2.7.5).
pub const NEXT: u16 = 1;
/// The device writes.
pub const WRITE: u16 = 2;
/// A table of descriptors.
pub const INDIRECT: u16 = 4;
/// Device status bits (2.1).
pub const DRIVER_OK: u8 = 4;
/// Stopped because of us.
pub const NEEDS_RESET: u8 = 64;
/// Where buffers are made; below are rings.
const BUFFERS: u64 = 8 << 20;
const RINGS: u64 = 0x1_0000;
const RING_SPACE: u64 = 0x4000;
/// How long a device may take for anything here: a host's disk may stand still for ten
/// seconds and more.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Takes messages and remembers how many of each there were.
#[derive(Default)]
pub struct Messages {
    counts: Mutex<Vec<u32>>,
    arrived: Condvar,
}

impl MessageSink for Messages {
    fn send(&self, _: u64, data: u32) {
        let mut counts = lock(&self.counts);
        let index = data as usize & 0xff;
        if counts.len() <= index {
            counts.resize(index + 1, 0);
        }
        counts[index] += 1;
        self.arrived.notify_all();
    }
}

impl Messages {
    /// How many of this number are there.
    pub fn count(&self, number: usize) -> u32 {
        lock(&self.counts).get(number).copied().unwrap_or(0)
    }

    /// Takes one message of this number, waiting a while for it.
    pub fn wait(&self, number: usize) -> bool {
        let none = |counts: &mut Vec<u32>| counts.get(number).is_none_or(|count| *count == 0);
        let waited = self
            .arrived
            .wait_timeout_while(lock(&self.counts), PATIENCE, none);
        let (mut counts, timeout) = waited.unwrap_or_else(|poison| poison.into_inner());
        if !timeout.timed_out() {
            counts[number] -= 1;
        }
        !timeout.timed_out()
    }
}

/// A wire that remembers its level.
#[derive(Default)]
pub struct Wire(Mutex<bool>);

impl InterruptLine for Wire {
    fn set(&self, high: bool) {
        *lock(&self.0) = high;
    }
}

impl Wire {
    /// Its level.
    pub fn is_high(&self) -> bool {
        *lock(&self.0)
    }
}

/// RAM, buses, and a PCI root.
pub struct Machine {
    /// Guest RAM.
    pub ram: Ram,
    /// Memory-mapped registers.
    pub mmio: Bus,
    pub ports: Bus,
    /// Messages sent.
    pub messages: Arc<Messages>,
    pub wires: Vec<Arc<Wire>>,
    /// The bus.
    pub root: Root,
    memory: DeviceMemory,
    next_buffer: AtomicU64,
}

impl Machine {
    /// With 32 MiB of RAM.
    pub fn new() -> Self {
        let ram = Ram::new(32 << 20).expect("memory");
        Self::with(ram)
    }

    /// With RAM that another machine had.
    pub fn with(ram: Ram) -> Self {
        let wires: Vec<Arc<Wire>> = (0..8).map(|_| Arc::default()).collect();
        let (mmio, ports) = (Bus::default(), Bus::default());
        let messages = Arc::new(Messages::default());
        let root = Root::new(RootOptions {
            mmio: mmio.clone(),
            ports: ports.clone(),
            lines: std::array::from_fn(|pin| wires[pin].clone() as Arc<dyn InterruptLine>),
            sink: messages.clone(),
            windows: Windows::new(FOUR_GIB..FOUR_GIB + (16 << 30)),
            on_reset: None,
        })
        .expect("an empty bus");
        Self {
            memory: DeviceMemory::whole(&ram),
            ram,
            mmio,
            ports,
            messages,
            wires,
            root,
            next_buffer: AtomicU64::new(BUFFERS),
        }
    }

    /// One slice's part of a machine: RAM as it reaches it, and its bus of registers.
    /// Drivers of different slices have buffers `apart` bytes from one another.
    pub fn of_slice(ram: Ram, memory: DeviceMemory, mmio: Option<Bus>, apart: u64) -> Self {
        let mut machine = Self::with(ram);
        machine.memory = memory;
        // Its own bus stays with its root, which nobody looks at then.
        machine.mmio = mmio.unwrap_or(machine.mmio);
        machine.next_buffer.fetch_add(apart, Ordering::Relaxed);
        machine
    }

    fn guest(&self) -> Visit<'_> {
        self.memory.visit()
    }

    /// Another machine with the same RAM; its buffers are new ones.
    pub fn successor(&self) -> Self {
        let next = Self::with(self.ram.clone());
        let used = self.next_buffer.load(Ordering::Relaxed);
        next.next_buffer.store(used, Ordering::Relaxed);
        next
    }

    /// Plugs a device in.
    pub fn attach(
        &self,
        device: impl VirtioDevice + 'static,
    ) -> Result<Arc<Transport>, VirtioError> {
        let attach = Attach {
            memory: DeviceMemory::whole(&self.ram),
            observer: None,
            route_observer: None,
        };
        Transport::attach(&self.root, &attach, Box::new(device))
    }

    /// A new piece of RAM with these bytes.
    pub fn buffer(&self, bytes: &[u8]) -> u64 {
        let space = (bytes.len() as u64).next_multiple_of(512);
        let address = self.next_buffer.fetch_add(space, Ordering::Relaxed);
        let slice = GuestAddress(address);
        self.guest().write_slice(bytes, slice).expect("RAM left");
        address
    }

    /// Changes RAM.
    pub fn put(&self, address: u64, bytes: &[u8]) {
        let slice = GuestAddress(address);
        self.guest().write_slice(bytes, slice).expect("RAM");
    }

    /// What is in RAM.
    pub fn bytes(&self, address: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        let slice = GuestAddress(address);
        self.guest().read_slice(&mut bytes, slice).expect("RAM");
        bytes
    }
}

impl Default for Machine {
    fn default() -> Self {
        Self::new()
    }
}

/// A buffer of a chain.
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    /// Guest-physical address.
    pub address: u64,
    /// Bytes.
    pub length: u32,
    /// The device writes it.
    pub writable: bool,
}

/// The driver's side of one queue.
#[derive(Clone, Debug)]
pub struct DriverQueue {
    /// Entries.
    pub size: u16,
    /// Descriptor table, available ring and used ring.
    pub places: [u64; 3],
    next_descriptor: u16,
    available: u16,
    seen: u16,
    notify: u64,
}

/// The driver of the device in one slot.
pub struct Driver<'a> {
    machine: &'a Machine,
    slot: u8,
    /// Addresses of the structures: common, notify, ISR, device.
    places: [u64; 4],
    multiplier: u64,
    /// The queues that were set up.
    pub queues: Vec<DriverQueue>,
}

impl<'a> Driver<'a> {
    /// Finds the structures through the capabilities.
    pub fn find(machine: &'a Machine, slot: u8) -> Self {
        let mut driver = Self {
            machine,
            slot,
            places: [0; 4],
            multiplier: 0,
            queues: Vec::new(),
        };
        let mut at = driver.configuration(0x34) as u16 & 0xff;
        while at != 0 {
            let first = driver.configuration(at);
            let kind = (first >> 24) as usize;
            if first & 0xff == 9 && (1..=4).contains(&kind) {
                let bar = driver.configuration(at + 4) & 0xff;
                let offset = driver.configuration(at + 8);
                let base = driver.bar(bar as u16);
                driver.places[kind - 1] = base + u64::from(offset);
                if kind == 2 {
                    driver.multiplier = driver.configuration(at + 16).into();
                }
            }
            at = (first >> 8) as u16 & 0xff;
        }
        driver
    }

    /// Reads a word of configuration space.
    pub fn configuration(&self, register: u16) -> u32 {
        let mut data = [0; 4];
        let address = ECAM + (u64::from(self.slot) << 15) + u64::from(register);
        self.machine.mmio.read(address, &mut data);
        u32::from_le_bytes(data)
    }

    /// Writes configuration space.
    pub fn configure(&self, register: u16, data: &[u8]) {
        let address = ECAM + (u64::from(self.slot) << 15) + u64::from(register);
        self.machine.mmio.write(address, data);
    }

    /// Where a BAR is.
    pub fn bar(&self, index: u16) -> u64 {
        let low = self.configuration(0x10 + 4 * index);
        let wide = low & 4 != 0;
        let high = if wide {
            self.configuration(0x14 + 4 * index)
        } else {
            0
        };
        u64::from(low & !0xf) | u64::from(high) << 32
    }

    /// Reads the common configuration.
    pub fn common(&self, offset: u64, length: usize) -> u64 {
        let mut data = [0; 8];
        self.machine
            .mmio
            .read(self.places[0] + offset, &mut data[..length]);
        u64::from_le_bytes(data)
    }

    /// Writes the common configuration.
    pub fn set_common(&self, offset: u64, value: u64, length: usize) {
        let data = value.to_le_bytes();
        self.machine
            .mmio
            .write(self.places[0] + offset, &data[..length]);
    }

    /// Reads the device configuration.
    pub fn device(&self, offset: u64, data: &mut [u8]) {
        self.machine.mmio.read(self.places[3] + offset, data);
    }

    /// Writes the device configuration.
    pub fn set_device(&self, offset: u64, data: &[u8]) {
        self.machine.mmio.write(self.places[3] + offset, data);
    }

    /// Reads, and so clears, the ISR status.
    pub fn isr(&self) -> u8 {
        let mut data = [0];
        self.machine.mmio.read(self.places[2], &mut data);
        data[0]
    }

    /// The device status.
    pub fn status(&self) -> u8 {
        self.common(0x14, 1) as u8
    }

    /// Writes 0 to the status and waits until that is what it says.
    pub fn reset(&mut self) {
        self.set_common(0x14, 0, 1);
        let deadline = Instant::now() + PATIENCE;
        while self.status() != 0 {
            assert!(Instant::now() < deadline, "the device does not reset");
            std::thread::sleep(Duration::from_millis(1));
        }
        self.queues.clear();
    }

    /// What the device offers.
    pub fn offered(&self) -> u64 {
        let half = |select| {
            self.set_common(0, select, 4);
            self.common(4, 4)
        };
        half(0) | half(1) << 32
    }

    /// Accepts features; whether the device agrees.
    pub fn accept(&self, features: u64) -> bool {
        for (select, half) in [features & 0xffff_ffff, features >> 32].iter().enumerate() {
            self.set_common(8, select as u64, 4);
            self.set_common(12, *half, 4);
        }
        self.set_common(0x14, 1 | 2 | 8, 1);
        self.status() & 8 != 0
    }

    /// Brings the device up with all features of `wanted` that it offers, MSI-X
    /// vector n + 1 for queue n, and rings of at most `size` entries.
    pub fn start(&mut self, wanted: u64, size: u16) -> u64 {
        self.reset();
        let features = self.offered() & wanted | super::FEATURE_VERSION_1;
        assert!(self.accept(features), "features {features:#x}");
        self.program_vectors();
        for index in 0..self.common(0x12, 2) as u16 {
            self.set_up_queue(index, size);
        }
        self.set_common(0x14, 1 | 2 | 8 | u64::from(DRIVER_OK), 1);
        features
    }

    /// MSI-X on; vector n sends n.
    pub fn program_vectors(&self) {
        let mut at = self.configuration(0x34) as u16 & 0xff;
        while self.configuration(at) & 0xff != 0x11 {
            at = (self.configuration(at) >> 8) as u16 & 0xff;
        }
        let table = self.bar(self.configuration(at + 4) as u16 & 7);
        let count = (self.configuration(at) >> 16 & 0x7ff) + 1;
        for vector in 0..count {
            let entry = table + 16 * u64::from(vector);
            let write = |offset, value: u32| {
                self.machine
                    .mmio
                    .write(entry + offset, &value.to_le_bytes());
            };
            write(0, 0xfee0_0000);
            write(4, 0);
            write(8, vector);
            write(12, 0);
        }
        self.configure(at + 2, &0x8000_u16.to_le_bytes());
        self.set_common(0x10, 0, 2);
    }

    /// Describes a queue to the device and enables it.
    pub fn set_up_queue(&mut self, index: u16, size: u16) {
        self.set_common(0x16, index.into(), 2);
        let size = size.min(self.common(0x18, 2) as u16);
        let base = RINGS + u64::from(self.slot) * 0x4_0000 + u64::from(index) * RING_SPACE;
        let places = [base, base + 0x2000, base + 0x3000];
        let zeroes = vec![0; RING_SPACE as usize];
        let slice = GuestAddress(base);
        let _ = self.machine.guest().write_slice(&zeroes, slice);
        self.set_common(0x18, size.into(), 2);
        self.set_common(0x1a, u64::from(index) + 1, 2);
        for (offset, place) in [0x20, 0x28, 0x30].into_iter().zip(places) {
            self.set_common(offset, place & 0xffff_ffff, 4);
            self.set_common(offset + 4, place >> 32, 4);
        }
        self.set_common(0x1c, 1, 2);
        let notify = self.places[1] + self.common(0x1e, 2) * self.multiplier;
        let queue = DriverQueue {
            size,
            places,
            next_descriptor: 0,
            available: 0,
            seen: 0,
            notify,
        };
        self.queues.truncate(usize::from(index));
        self.queues.push(queue);
    }

    /// Writes one descriptor.
    pub fn describe(&self, queue: usize, index: u16, buffer: Buffer, flags: u16, next: u16) {
        let table = self.queues[queue].places[0];
        self.describe_at(table + 16 * u64::from(index), buffer, flags, next);
    }

    /// Writes one descriptor anywhere.
    pub fn describe_at(&self, address: u64, buffer: Buffer, flags: u16, next: u16) {
        let write = if buffer.writable { WRITE } else { 0 };
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&buffer.address.to_le_bytes());
        bytes[8..12].copy_from_slice(&buffer.length.to_le_bytes());
        bytes[12..14].copy_from_slice(&(flags | write).to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        let slice = GuestAddress(address);
        self.machine
            .guest()
            .write_slice(&bytes, slice)
            .expect("RAM");
    }

    /// Chains buffers; the first descriptor. Descriptors are used in a circle.
    pub fn chain(&mut self, queue: usize, buffers: &[Buffer]) -> u16 {
        let size = self.queues[queue].size;
        let first = self.queues[queue].next_descriptor;
        for (at, buffer) in (0_u16..).zip(buffers) {
            let index = (first + at) % size;
            let last = usize::from(at) + 1 == buffers.len();
            let flags = if last { 0 } else { NEXT };
            self.describe(queue, index, *buffer, flags, (index + 1) % size);
        }
        self.queues[queue].next_descriptor = (first + buffers.len() as u16) % size;
        first
    }

    /// Puts a chain into the available ring, without a kick.
    pub fn offer(&mut self, queue: usize, head: u16) {
        let memory = self.machine.guest();
        let DriverQueue { size, places, .. } = self.queues[queue];
        let available = &mut self.queues[queue].available;
        let entry = places[1] + 4 + 2 * u64::from(*available % size);
        memory.write_obj(head, GuestAddress(entry)).expect("RAM");
        *available = available.wrapping_add(1);
        let index = GuestAddress(places[1] + 2);
        memory
            .store(*available, index, Ordering::Release)
            .expect("RAM");
    }

    /// Kicks a queue.
    pub fn kick(&self, queue: usize) {
        let notify = self.queues[queue].notify;
        self.machine
            .mmio
            .write(notify, &(queue as u16).to_le_bytes());
    }

    /// The next used chain, if there is one: its head and the bytes written.
    pub fn used(&mut self, queue: usize) -> Option<(u32, u32)> {
        let memory = self.machine.guest();
        let DriverQueue { size, places, .. } = self.queues[queue];
        let seen = &mut self.queues[queue].seen;
        let index: u16 = memory
            .load(GuestAddress(places[2] + 2), Ordering::Acquire)
            .expect("RAM");
        if index == *seen {
            return None;
        }
        let entry = places[2] + 4 + 8 * u64::from(*seen % size);
        *seen = seen.wrapping_add(1);
        memory
            .read_obj::<[u32; 2]>(GuestAddress(entry))
            .ok()
            .map(|[head, length]| (head, length))
    }

    /// Asks for an interrupt at the next used chain (with FEATURE_EVENT_INDEX;
    /// at first that is so).
    pub fn rearm(&self, queue: usize) {
        let DriverQueue {
            size, places, seen, ..
        } = self.queues[queue];
        let event = GuestAddress(places[1] + 4 + 2 * u64::from(size));
        let memory = self.machine.guest();
        memory.store(seen, event, Ordering::SeqCst).expect("RAM");
    }

    /// Waits for the next used chain.
    pub fn wait_used(&mut self, queue: usize) -> (u32, u32) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(used) = self.used(queue) {
                return used;
            }
            let DriverQueue {
                available, seen, ..
            } = self.queues[queue];
            assert!(
                Instant::now() < deadline,
                "queue {queue}: nothing comes back in {PATIENCE:?}: of {available} chains \
                 {seen} are back"
            );
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Offers one chain, kicks, and waits for it.
    pub fn request(&mut self, queue: usize, buffers: &[Buffer]) -> u32 {
        let head = self.chain(queue, buffers);
        self.offer(queue, head);
        self.kick(queue);
        let (used, length) = self.wait_used(queue);
        assert_eq!(used, u32::from(head));
        length
    }

    /// Waits until the device says that it needs a reset.
    pub fn wait_needs_reset(&self) -> bool {
        let deadline = Instant::now() + PATIENCE;
        while self.status() & NEEDS_RESET == 0 {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        true
    }

    /// Goes on with the queues of another driver of the same device: after a
    /// restore.
    pub fn adopt(&mut self, queues: Vec<DriverQueue>) {
        self.queues = queues;
    }
}
