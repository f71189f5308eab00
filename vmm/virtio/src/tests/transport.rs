//! Registers, relocation, the wire, save and restore.

use std::sync::Arc;
use std::time::Duration;

use weft_guest_memory::FOUR_GIB;

use super::{started, to_write};
use crate::fake_driver::{Driver, DriverQueue, Machine, NEEDS_RESET};
use crate::rng::Rng;
use crate::{
    FEATURE_EVENT_INDEX, FEATURE_INDIRECT, FEATURE_VERSION_1, Transport, TransportState,
    VirtioDevice,
};

const BOUND: Duration = Duration::from_secs(5);

/// A device that went to another machine with the same RAM.
pub struct Moved {
    pub machine: Machine,
    pub device: Arc<Transport>,
}

impl Moved {
    pub fn driver(&self, queues: Vec<DriverQueue>) -> Driver<'_> {
        let mut driver = Driver::find(&self.machine, self.device.slot());
        driver.adopt(queues);
        driver
    }
}

/// Pauses and saves a device, drops it, and restores it as `fresh` into the
/// same slot of a new machine, through text.
pub fn moved(machine: &Machine, device: &Transport, fresh: impl VirtioDevice + 'static) -> Moved {
    device.pause(BOUND).unwrap();
    let text = serde_json::to_string(&device.save().unwrap()).unwrap();
    device.detach(BOUND).unwrap();
    let machine = machine.successor();
    for _ in 1..device.slot() {
        machine.root.reserve().unwrap();
    }
    let fresh = machine.attach(fresh).unwrap();
    fresh
        .restore(&serde_json::from_str(&text).unwrap())
        .unwrap();
    assert_eq!(
        serde_json::to_string(&fresh.save().unwrap()).unwrap(),
        text,
        "what was restored is not what was saved"
    );
    fresh.resume();
    Moved {
        machine,
        device: fresh,
    }
}

#[test]
fn features_are_negotiated() {
    let machine = Machine::new();
    let device = machine.attach(Rng::new(None)).unwrap();
    let mut driver = Driver::find(&machine, device.slot());
    driver.reset();
    let offered = driver.offered();
    assert_eq!(
        offered,
        FEATURE_VERSION_1 | FEATURE_EVENT_INDEX | FEATURE_INDIRECT
    );
    assert!(!driver.accept(offered & !FEATURE_VERSION_1), "not legacy");
    driver.reset();
    assert!(!driver.accept(offered | 1 << 40), "not offered");
    driver.reset();
    assert!(driver.accept(FEATURE_VERSION_1));
    // Too late.
    driver.set_common(8, 0, 4);
    driver.set_common(12, FEATURE_EVENT_INDEX, 4);
    assert_eq!(driver.common(12, 4), 0);
}

#[test]
fn driver_ok_out_of_turn_needs_a_reset() {
    let machine = Machine::new();
    let device = machine.attach(Rng::new(None)).unwrap();
    let mut driver = Driver::find(&machine, device.slot());
    driver.reset();
    driver.set_common(0x14, 4, 1);
    assert_eq!(driver.status(), 4 | NEEDS_RESET);
    driver.reset();
    assert_eq!(driver.status(), 0);
}

#[test]
fn a_queue_outside_of_memory_needs_a_reset() {
    let machine = Machine::new();
    let device = machine.attach(Rng::new(None)).unwrap();
    let mut driver = Driver::find(&machine, device.slot());
    for place in [!0xfff, 0x1_0001, machine.ram.size() - 16] {
        driver.reset();
        assert!(driver.accept(FEATURE_VERSION_1));
        driver.set_up_queue(0, 64);
        // Enabled queues do not change.
        driver.set_common(0x20, place, 8);
        assert_ne!(driver.common(0x20, 8), place);
        driver.reset();
        assert!(driver.accept(FEATURE_VERSION_1));
        driver.set_common(0x16, 0, 2);
        driver.set_common(0x20, place, 8);
        driver.set_common(0x1c, 1, 2);
        driver.set_common(0x14, 15, 1);
        assert!(driver.status() & NEEDS_RESET != 0, "{place:#x}");
    }
}

/// What a device is now.
fn state(device: &Transport) -> TransportState {
    device.pause(BOUND).unwrap();
    let state = device.save().unwrap();
    device.resume();
    state
}

/// Makes a device what it was.
fn be(device: &Transport, state: &TransportState) {
    device.pause(BOUND).unwrap();
    device.restore(state).unwrap();
    device.resume();
}

#[test]
fn bars_move_and_answer_only_inside_the_windows() {
    let machine = Machine::new();
    let device = machine.attach(Rng::new(None)).unwrap();
    let driver = Driver::find(&machine, device.slot());
    let before = state(&device);
    let first = driver.bar(0);
    let read = |address: u64| {
        let mut data = [0; 2];
        machine.mmio.read(address + 0x12, &mut data);
        u16::from_le_bytes(data)
    };
    assert_eq!(read(first), 1, "one queue");
    let place = |address: u64| {
        driver.configure(0x10, &(address as u32).to_le_bytes());
        driver.configure(0x14, &((address >> 32) as u32).to_le_bytes());
    };
    place(FOUR_GIB + 0x10_0000);
    assert_eq!(read(FOUR_GIB + 0x10_0000), 1);
    assert_eq!(read(first), 0xffff);
    for outside in [0x10_0000, 0xfee0_0000, 0xe000_0000, u64::MAX << 14] {
        place(outside);
        assert_eq!(read(FOUR_GIB + 0x10_0000), 0xffff, "{outside:#x}");
    }
    place(first);
    assert_eq!(read(first), 1);
    // Memory decoding off, on.
    driver.configure(4, &[0]);
    assert_eq!(read(first), 0xffff);
    driver.configure(4, &[2]);
    assert_eq!(read(first), 1);
    // Over the MSI-X table: who was there first stays.
    place(driver.bar(2) & !0x3fff);
    be(&device, &before);
    assert_eq!(driver.bar(0), first);
    assert_eq!(read(first), 1);
}

#[test]
fn bars_change_places() {
    let machine = Machine::new();
    let device = machine.attach(Rng::new(None)).unwrap();
    let driver = Driver::find(&machine, device.slot());
    let before = state(&device);
    let [registers, table] = [driver.bar(0), driver.bar(2)];
    let below = |address: u64| (address as u32).to_le_bytes();
    driver.configure(0x18, &below(registers));
    driver.configure(0x10, &below(registers + 0x10_0000));
    driver.configure(0x18, &below(registers));
    let mut masked = [0; 4];
    machine.mmio.read(registers + 12, &mut masked);
    assert_eq!(masked, [1, 0, 0, 0], "the first vector's control");
    be(&device, &before);
    assert_eq!([driver.bar(0), driver.bar(2)], [registers, table]);
    let mut queues = [0; 2];
    machine.mmio.read(registers + 0x12, &mut queues);
    assert_eq!(queues, [1, 0]);
}

#[test]
fn without_msix_the_wire_is_pulled_until_the_status_is_read() {
    let machine = Machine::new();
    let device = machine.attach(Rng::new(None)).unwrap();
    let mut driver = Driver::find(&machine, device.slot());
    driver.reset();
    assert!(driver.accept(FEATURE_VERSION_1));
    driver.set_up_queue(0, 64);
    driver.set_common(0x14, 15, 1);
    driver.request(0, &[to_write(&machine, 8)]);
    let wire = &machine.wires[usize::from(device.slot()) % 8];
    let deadline = std::time::Instant::now() + BOUND;
    while !wire.is_high() {
        assert!(std::time::Instant::now() < deadline, "no interrupt");
        std::thread::yield_now();
    }
    assert_ne!(driver.configuration(4) >> 16 & 8, 0, "interrupt status");
    assert_eq!(driver.isr(), 1);
    assert!(!wire.is_high());
    assert_eq!(driver.isr(), 0);
}

#[test]
fn a_driver_hears_when_it_wants_to() {
    let machine = Machine::new();
    let device = machine.attach(Rng::new(None)).unwrap();
    let mut driver = started(&machine, device.slot());
    driver.request(0, &[to_write(&machine, 8)]);
    assert!(machine.messages.wait(1));
    // used_event stays behind: not any more. The device looks at it when the
    // answer is there already, so it gets a moment.
    let moment = || std::thread::sleep(Duration::from_millis(20));
    driver.request(0, &[to_write(&machine, 8)]);
    moment();
    driver.rearm(0);
    driver.request(0, &[to_write(&machine, 8)]);
    assert!(machine.messages.wait(1));
    assert_eq!(machine.messages.count(1), 0);

    // Without used_event there is a flag.
    driver.start(!FEATURE_EVENT_INDEX, 64);
    driver.request(0, &[to_write(&machine, 8)]);
    assert!(machine.messages.wait(1));
    let flags = driver.queues[0].places[1];
    machine.put(flags, &[1, 0]);
    driver.request(0, &[to_write(&machine, 8)]);
    moment();
    machine.put(flags, &[0, 0]);
    driver.request(0, &[to_write(&machine, 8)]);
    assert!(machine.messages.wait(1));
    assert_eq!(machine.messages.count(1), 0);
}

#[test]
fn registers_answer_through_configuration_space() {
    let machine = Machine::new();
    let device = machine.attach(Rng::new(None)).unwrap();
    let driver = Driver::find(&machine, device.slot());
    let mut at = driver.configuration(0x34) as u16 & 0xff;
    while driver.configuration(at) & 0xff00_00ff != 0x0500_0009 {
        at = (driver.configuration(at) >> 8) as u16 & 0xff;
        assert_ne!(at, 0, "no such capability");
    }
    let point = |offset: u32, length: u32| {
        driver.configure(at + 4, &[0]);
        driver.configure(at + 8, &offset.to_le_bytes());
        driver.configure(at + 12, &length.to_le_bytes());
    };
    point(0x12, 2);
    assert_eq!(driver.configuration(at + 16), 1, "one queue");
    point(0x14, 1);
    driver.configure(at + 16, &[1]);
    assert_eq!(driver.status(), 1);
    // What is not there is not touched.
    for (offset, length) in [(0x14, 3), (0x15, 2), (0x4000, 4), (u32::MAX, 4), (0, 0)] {
        point(offset, length);
        driver.configure(at + 16, &[0xff; 4]);
        driver.configuration(at + 16);
    }
    assert_eq!(driver.status(), 1);
}

#[test]
fn the_ports_reach_the_same_registers() {
    let machine = Machine::new();
    let device = machine.attach(Rng::new(None)).unwrap();
    let driver = Driver::find(&machine, device.slot());
    let address = 0x8000_0000_u32 | u32::from(device.slot()) << 11;
    machine.ports.write(0xcf8, &address.to_le_bytes());
    let mut id = [0; 4];
    machine.ports.read(0xcfc, &mut id);
    assert_eq!(u32::from_le_bytes(id), driver.configuration(0));
    let mut half = [0; 2];
    machine.ports.read(0xcfe, &mut half);
    assert_eq!(half, [0x44, 0x10]);
    machine.ports.write(0xcf8, &0x8001_0000_u32.to_le_bytes());
    machine.ports.read(0xcfc, &mut id);
    assert_eq!(id, [0xff; 4], "another bus");
}

#[test]
fn a_paused_device_keeps_requests_for_later() {
    let machine = Machine::new();
    let device = machine.attach(Rng::new(None)).unwrap();
    let mut driver = started(&machine, device.slot());
    device.pause(BOUND).unwrap();
    let head = driver.chain(0, &[to_write(&machine, 8)]);
    driver.offer(0, head);
    driver.kick(0);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(driver.used(0), None);
    device.resume();
    assert_eq!(driver.wait_used(0).0, u32::from(head));
}

#[test]
fn threads_end_with_the_device() {
    let names = || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm"));
        tasks
            .flatten()
            .filter_map(|task| name(task).ok())
            .filter(|name| name.starts_with("weft-rng31"))
            .count()
    };
    let machine = Machine::new();
    for _ in 1..31 {
        machine.root.reserve().unwrap();
    }
    let device = machine.attach(Rng::new(None)).unwrap();
    // It gives itself its name first thing, but after we have it.
    let deadline = std::time::Instant::now() + BOUND;
    while names() != 1 {
        assert!(std::time::Instant::now() < deadline, "no such thread");
    }
    assert!(machine.attach(Rng::new(None)).is_err(), "no slot left");
    let mut driver = started(&machine, device.slot());
    driver.request(0, &[to_write(&machine, 8)]);
    device.detach(BOUND).unwrap();
    drop((device, machine));
    // It was waited for; the kernel forgets it a little later.
    let deadline = std::time::Instant::now() + BOUND;
    while names() != 0 {
        assert!(std::time::Instant::now() < deadline, "the thread lives on");
    }
}
