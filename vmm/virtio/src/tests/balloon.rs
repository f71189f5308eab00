//! Memory balloon.

use std::io;
use std::sync::{Arc, Mutex};

use weft_guest_memory::{Ram, Reclaim};

use super::{started, to_read, to_write};
use crate::balloon::{Balloon, BalloonHandle};
use crate::fake_driver::{Buffer, Driver, Machine};

const PAGE: u64 = 4096;
/// Where the reported pages are.
const FREE: u64 = 24 << 20;
const POISON: u64 = 12;
const ALL: u64 = u64::MAX;
const PAGE_POISON: u64 = 1 << 4;

/// Guest memory that also writes down what went back.
struct Logged(Ram, Mutex<Vec<(u64, u64)>>);

impl Reclaim for Logged {
    fn reclaim(&self, address: u64, length: u64) -> io::Result<()> {
        self.1.lock().unwrap().push((address, length));
        self.0.reclaim(address, length)
    }
}

fn balloon(machine: &Machine) -> (Balloon, BalloonHandle, Arc<Logged>) {
    let logged = Arc::new(Logged(machine.ram.clone(), Mutex::default()));
    let (balloon, handle) = Balloon::new(logged.clone()).unwrap();
    (balloon, handle, logged)
}

fn reported(address: u64, length: u64) -> Buffer {
    Buffer {
        address,
        length: length as u32,
        writable: true,
    }
}

/// A request of page numbers.
fn numbers(machine: &Machine, pages: &[u64]) -> Buffer {
    let bytes: Vec<u8> = pages
        .iter()
        .flat_map(|page| (*page as u32).to_le_bytes())
        .collect();
    to_read(machine, &bytes)
}

/// The pages of these addresses that have memory.
fn populated(machine: &Machine, start: u64, end: u64) -> u64 {
    let ranges = machine.ram.populated().unwrap();
    let inside = ranges
        .iter()
        .map(|range| range.end.min(end).saturating_sub(range.start.max(start)));
    inside.sum::<u64>() / PAGE
}

fn fill(machine: &Machine, pages: u64) {
    for page in 0..pages {
        machine.put(FREE + page * PAGE, &[0xa5; PAGE as usize]);
    }
}

#[test]
fn reported_pages_go_back_and_their_neighbours_stay() {
    let machine = Machine::new();
    let (balloon, _, _) = balloon(&machine);
    let device = machine.attach(balloon).unwrap();
    let mut driver = started(&machine, device.slot());
    fill(&machine, 12);
    // The partial pages at both ends stay.
    let buffers = [
        reported(FREE + PAGE + 1, 3 * PAGE),
        reported(FREE + 8 * PAGE, 2 * PAGE),
    ];
    assert_eq!(driver.request(2, &buffers), 0);
    assert!(machine.messages.wait(3), "no interrupt");
    assert_eq!(populated(&machine, FREE, FREE + 12 * PAGE), 8);
    for page in 0..12 {
        let gone = [2, 3, 8, 9].contains(&page);
        let expected = if gone { [0; 8] } else { [0xa5; 8] };
        assert_eq!(machine.bytes(FREE + page * PAGE, 8), expected, "{page}");
    }
    let counters = weft_platform::part::Part::counters(&*device);
    assert!(counters.contains(&("reported-bytes", 4 * PAGE)));
}

#[test]
fn inflated_pages_go_back_in_runs_and_come_again() {
    let machine = Machine::new();
    let (balloon, handle, logged) = balloon(&machine);
    let device = machine.attach(balloon).unwrap();
    let mut driver = started(&machine, device.slot());
    fill(&machine, 8);
    let first = FREE / PAGE;
    let pages = [first + 3, first + 1, first + 2, first + 6, first + 2];
    driver.request(0, &[numbers(&machine, &pages)]);
    let runs = [(FREE + PAGE, 3 * PAGE), (FREE + 6 * PAGE, PAGE)];
    assert_eq!(*logged.1.lock().unwrap(), runs);
    assert_eq!(populated(&machine, FREE, FREE + 8 * PAGE), 4);
    driver.set_device(4, &4_u32.to_le_bytes());
    assert_eq!(handle.actual(), 4 * PAGE);

    driver.request(1, &[numbers(&machine, &pages[..1])]);
    machine.put(FREE + 3 * PAGE, &[7; 16]);
    assert_eq!(machine.bytes(FREE + 3 * PAGE, 16), [7; 16]);
    let counters = weft_platform::part::Part::counters(&*device);
    assert!(counters.contains(&("deflated-bytes", PAGE)));
}

#[test]
fn a_target_is_announced() {
    let machine = Machine::new();
    let (balloon, handle, _) = balloon(&machine);
    let device = machine.attach(balloon).unwrap();
    let driver = started(&machine, device.slot());
    handle.set_target(10 * PAGE + 1);
    assert!(machine.messages.wait(0), "no configuration interrupt");
    let mut target = [0; 4];
    driver.device(0, &mut target);
    assert_eq!(u32::from_le_bytes(target), 10);
    // Only the device changes it.
    driver.set_device(0, &[9; 4]);
    assert_eq!(handle.target(), 10 * PAGE);
}

#[test]
fn poisoned_pages_keep_their_content() {
    let machine = Machine::new();
    let (balloon, _, logged) = balloon(&machine);
    let device = machine.attach(balloon).unwrap();
    let mut driver = Driver::find(&machine, device.slot());
    fill(&machine, 1);
    for (features, poison, goes) in [
        (ALL, 0xaa, false),
        (ALL, 0, true),
        (!PAGE_POISON, 0xaa, true),
    ] {
        driver.start(features, 64);
        driver.set_device(POISON, &u32::to_le_bytes(poison));
        logged.1.lock().unwrap().clear();
        driver.request(2, &[reported(FREE, PAGE)]);
        let count = logged.1.lock().unwrap().len();
        assert_eq!(count, usize::from(goes), "{features:#x} {poison:#x}");
    }
}

/// A driver without reports leaves the third queue off.
#[test]
fn two_queues_are_enough() {
    let machine = Machine::new();
    let (balloon, _, logged) = balloon(&machine);
    let device = machine.attach(balloon).unwrap();
    let mut driver = started(&machine, device.slot());
    driver.start(!(1 << 5), 64);
    driver.request(0, &[numbers(&machine, &[FREE / PAGE])]);
    assert_eq!(logged.1.lock().unwrap().len(), 1);
}

#[test]
fn what_a_driver_gets_wrong_stops_the_device() {
    let machine = Machine::new();
    let (balloon, _, logged) = balloon(&machine);
    let device = machine.attach(balloon).unwrap();
    let mut driver = started(&machine, device.slot());
    let wrong = [
        (0, vec![to_read(&machine, &[1, 2, 3])]),
        (0, vec![to_write(&machine, 4)]),
        (0, vec![numbers(&machine, &[machine.ram.size() / PAGE])]),
        (0, vec![numbers(&machine, &[u64::from(u32::MAX)])]),
        (1, vec![numbers(&machine, &[0, machine.ram.size() / PAGE])]),
        (1, vec![reported(FREE, 512 << 10)]),
        (2, vec![to_read(&machine, &[0; 4096])]),
    ];
    for (number, (queue, buffers)) in wrong.into_iter().enumerate() {
        let head = driver.chain(queue, &buffers);
        driver.offer(queue, head);
        driver.kick(queue);
        assert!(driver.wait_needs_reset(), "case {number}");
        driver.start(ALL, 64);
    }
    assert!(logged.1.lock().unwrap().is_empty());
    driver.request(2, &[reported(FREE, PAGE)]);
    assert_eq!(logged.1.lock().unwrap().len(), 1);
}

#[test]
fn a_target_and_the_size_survive_a_restore() {
    let machine = Machine::new();
    let (first, handle, _) = balloon(&machine);
    let device = machine.attach(first).unwrap();
    let driver = started(&machine, device.slot());
    handle.set_target(6 * PAGE);
    driver.set_device(4, &5_u32.to_le_bytes());
    let (fresh, handle, logged) = balloon(&machine);
    let moved = super::transport::moved(&machine, &device, fresh);
    assert_eq!((handle.target(), handle.actual()), (6 * PAGE, 5 * PAGE));
    let mut driver = moved.driver(driver.queues);
    driver.request(2, &[reported(FREE, 2 * PAGE)]);
    assert_eq!(*logged.1.lock().unwrap(), [(FREE, 2 * PAGE)]);
}

/// A pause in the middle of a report of many steps: each page goes back, and the buffer
/// is used once.
#[test]
fn a_report_continues_after_a_pause() {
    let machine = Machine::new();
    let (balloon, _, logged) = balloon(&machine);
    let device = machine.attach(balloon).unwrap();
    let mut driver = started(&machine, device.slot());
    let bound = std::time::Duration::from_secs(10);
    let start = 8 << 20;
    for _ in 0..20 {
        logged.1.lock().unwrap().clear();
        let head = driver.chain(2, &[reported(start, 20 << 20)]);
        driver.offer(2, head);
        driver.kick(2);
        device.pause(bound).unwrap();
        device.resume();
        assert_eq!(driver.wait_used(2), (u32::from(head), 0));
        let log = logged.1.lock().unwrap().clone();
        let last = log.rsplit(|(address, _)| *address == start).next().unwrap();
        let rest: u64 = last.iter().map(|(_, length)| length).sum();
        assert_eq!(rest + (4 << 20), 20 << 20, "{log:?}");
        assert_eq!(driver.used(2), None);
    }
}
