//! Drivers that violate the specification: each violation by itself, then random rings.

use std::time::{Duration, Instant};

use vm_memory::{Bytes, GuestAddress};
use weft_test_support::Random;

use super::block::Scratch;
use super::console::Screen;
use super::{started, to_read, to_write};
use crate::Transport;
use crate::block::Block;
use crate::console::Console;
use crate::fake_driver::{Buffer, Driver, INDIRECT, Machine, NEEDS_RESET, NEXT};
use crate::ring::CHAIN_MAX;
use crate::rng::Rng;

/// Offers one head that is a lie, and expects the device to stop, and to work
/// again after a reset.
fn must_stop(what: &str, lie: impl FnOnce(&Machine, &mut Driver) -> u16) {
    let machine = Machine::new();
    let device = machine.attach(Rng::new(None)).unwrap();
    let mut driver = started(&machine, device.slot());
    let head = lie(&machine, &mut driver);
    driver.offer(0, head);
    driver.kick(0);
    assert!(driver.wait_needs_reset(), "{what}");
    assert_eq!(device.counters().faults, 1, "{what}");
    driver.start(u64::MAX, 64);
    assert_eq!(driver.request(0, &[to_write(&machine, 8)]), 8, "{what}");
}

fn buffer(address: u64, length: u32) -> Buffer {
    Buffer {
        address,
        length,
        writable: true,
    }
}

#[test]
fn lies_in_descriptors() {
    must_stop("a loop", |machine, driver| {
        let good = to_write(machine, 8);
        driver.describe(0, 0, good, NEXT, 1);
        driver.describe(0, 1, good, NEXT, 0);
        0
    });
    must_stop("a head outside of the table", |_, _| 64);
    must_stop("a link outside of the table", |machine, driver| {
        driver.describe(0, 0, to_write(machine, 8), NEXT, 64);
        0
    });
    let end = Machine::new().ram.size();
    for (what, lie) in [
        ("an empty buffer", buffer(0x1000, 0)),
        ("a buffer that starts outside of RAM", buffer(end, 1)),
        ("a buffer that ends outside of RAM", buffer(end - 4, 8)),
        ("a buffer that wraps around", buffer(u64::MAX - 3, 8)),
        ("a buffer over registers", buffer(0xfee0_0000, 64)),
        ("a buffer of 4 GiB", buffer(0, u32::MAX)),
    ] {
        must_stop(what, |_, driver| driver.chain(0, &[lie]));
    }
    must_stop("readable after writable", |machine, driver| {
        driver.chain(0, &[to_write(machine, 8), to_read(machine, b"12345678")])
    });
    must_stop("readable and writable at once", |machine, driver| {
        let read = to_read(machine, b"12345678");
        driver.chain(0, &[read, buffer(read.address + 7, 8)])
    });
}

#[test]
fn lies_in_indirect_tables() {
    let table = |machine: &Machine, count: usize| Buffer {
        address: machine.buffer(&vec![0; 16 * count]),
        length: 16 * count as u32,
        writable: false,
    };
    for (what, address, length) in [
        ("a table outside of RAM", u64::MAX - 64, 16),
        ("an empty table", 0x1000, 0),
        ("a table of half an entry", 0x1000, 24),
        ("a table of too many entries", 0, 16 * 65537),
    ] {
        must_stop(what, |_, driver| {
            let lie = Buffer {
                writable: false,
                ..buffer(address, length)
            };
            driver.describe(0, 0, lie, INDIRECT, 0);
            0
        });
    }
    must_stop("a table in a table", |machine, driver| {
        let place = table(machine, 1);
        driver.describe_at(place.address, place, INDIRECT, 0);
        driver.describe(0, 0, place, INDIRECT, 0);
        0
    });
    must_stop("a loop in a table", |machine, driver| {
        let place = table(machine, 2);
        let good = to_write(machine, 8);
        driver.describe_at(place.address, good, NEXT, 0);
        driver.describe(0, 0, place, INDIRECT, 0);
        0
    });
    must_stop("a chain that is too long", |machine, driver| {
        let place = table(machine, CHAIN_MAX + 1);
        let good = to_write(machine, 8);
        for at in 0..=CHAIN_MAX as u16 {
            let flags = if usize::from(at) == CHAIN_MAX {
                0
            } else {
                NEXT
            };
            driver.describe_at(place.address + 16 * u64::from(at), good, flags, at + 1);
        }
        driver.describe(0, 0, place, INDIRECT, 0);
        0
    });
}

#[test]
fn an_index_that_jumps() {
    let machine = Machine::new();
    let device = machine.attach(Rng::new(None)).unwrap();
    let driver = started(&machine, device.slot());
    let index = GuestAddress(driver.queues[0].places[1] + 2);
    machine.ram.guest().write_obj(1000_u16, index).unwrap();
    driver.kick(0);
    assert!(driver.wait_needs_reset());
}

#[test]
fn lies_to_a_disk() {
    let scratch = Scratch::new();
    let header = |machine: &Machine, kind: u32| {
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&kind.to_le_bytes());
        to_read(machine, &bytes)
    };
    type Lie<'a> = (&'a str, &'a dyn Fn(&Machine) -> Vec<Buffer>);
    let lies: [Lie; 5] = [
        ("no status", &|machine| vec![header(machine, 0)]),
        ("half a header", &|machine| {
            vec![to_read(machine, &[0; 8]), to_write(machine, 1)]
        }),
        ("no header", &|machine| vec![to_write(machine, 513)]),
        ("a read into readable data", &|machine| {
            let data = to_read(machine, &[0; 512]);
            vec![header(machine, 0), data, to_write(machine, 1)]
        }),
        ("a write from writable data", &|machine| {
            let data = to_write(machine, 512);
            vec![header(machine, 1), data, to_write(machine, 1)]
        }),
    ];
    for (what, lie) in lies {
        let machine = Machine::new();
        let block = Block::open(&scratch.options()).unwrap();
        let device = machine.attach(block).unwrap();
        let mut driver = started(&machine, device.slot());
        let head = driver.chain(0, &lie(&machine));
        driver.offer(0, head);
        driver.kick(0);
        assert!(driver.wait_needs_reset(), "{what}");
        device.detach(Duration::from_secs(5)).unwrap();
    }
}

/// A descriptor; one in `sane` of its fields is nonsense.
fn random_descriptor(random: &mut Random, sane: u64, ram: u64) -> [u8; 16] {
    let mut odd = || random.below(sane) == 0;
    let (odd_address, odd_length, odd_flags) = (odd(), odd(), odd());
    let address = match random.below(2) {
        0 if odd_address => random.next(),
        _ if odd_address => ram - random.below(64),
        _ => (8 << 20) + random.below(1 << 16) * 16,
    };
    let length = match random.below(2) {
        0 if odd_length => random.next() as u32,
        _ if odd_length => 0,
        _ => 1 << random.below(14),
    };
    let flags = match odd_flags {
        true => random.next() as u16,
        false => random.below(4) as u16,
    };
    let next = random.below(64) as u16 + 64 * u16::from(odd_flags);
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&address.to_le_bytes());
    bytes[8..12].copy_from_slice(&length.to_le_bytes());
    bytes[12..14].copy_from_slice(&flags.to_le_bytes());
    bytes[14..].copy_from_slice(&next.to_le_bytes());
    bytes
}

/// Rounds of random rings against one device; it must live, and serve after a
/// reset as if nothing had been.
fn torture(machine: &Machine, device: &Transport, seed: u64) {
    eprintln!("{}: seed {seed}", device.name());
    let mut random = Random::new(seed);
    let memory = machine.ram.guest();
    let mut driver = Driver::find(machine, device.slot());
    let deadline = Instant::now() + Duration::from_secs(60);
    // On a busy host a device seldom looks in time.
    let enough = || {
        let counters = device.counters();
        counters.faults > 100 && counters.requests > 100
    };
    for round in 0.. {
        if round >= 1000 && (enough() || Instant::now() > deadline) {
            break;
        }
        driver.start(random.next() | random.next(), 64);
        let queues = driver.queues.len() as u64;
        let sane = [2, 30, 1000][random.below(3) as usize];
        for places in driver.queues.iter().map(|queue| queue.places) {
            for at in 0..64 {
                let bytes = random_descriptor(&mut random, 1000, machine.ram.size());
                let at = GuestAddress(places[0] + 16 * at);
                memory.write_slice(&bytes, at).unwrap();
            }
        }
        for _ in 0..random.below(20) {
            let queue = random.below(queues) as usize;
            let places = driver.queues[queue].places;
            for _ in 0..random.below(16) {
                let bytes = random_descriptor(&mut random, sane, machine.ram.size());
                let at = places[0] + 16 * random.below(64);
                memory.write_slice(&bytes, GuestAddress(at)).unwrap();
            }
            match random.below(sane * 4) {
                0 => {
                    let at = GuestAddress(places[1] + random.below(132));
                    memory.write_obj(random.next() as u8, at).unwrap();
                }
                1 => driver.set_common(random.below(0x38), random.next(), 1 << random.below(3)),
                2 => driver.set_common(0x14, 0, 1),
                3 => driver.offer(queue, random.next() as u16),
                _ => driver.offer(queue, random.below(64) as u16),
            }
            driver.kick(queue);
        }
        if random.below(2) == 0 {
            // Long enough for the device to look.
            std::thread::sleep(Duration::from_micros(100));
        }
        if random.below(4) == 0 {
            device.pause(Duration::from_secs(10)).unwrap();
            let state = device.save().unwrap();
            device.restore(&state).unwrap();
            // A damaged state does no harm, and the device can still become another.
            let mut text = serde_json::to_vec(&state).unwrap();
            let at = random.below(text.len() as u64) as usize;
            text[at] = b'0' + random.below(10) as u8;
            if let Ok(damaged) = serde_json::from_slice(&text) {
                let _ = device.restore(&damaged);
                device.restore(&state).unwrap();
            }
            device.resume();
        }
    }
    driver.reset();
    assert_eq!(driver.status() & NEEDS_RESET, 0);
    assert!(enough(), "{:?}", device.counters());
}

fn seeds() -> impl Iterator<Item = u64> {
    (1..4_u64).map(|seed| seed.wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

#[test]
fn random_rings_of_an_entropy_device() {
    for seed in seeds() {
        let machine = Machine::new();
        let device = machine.attach(Rng::new(Some(seed))).unwrap();
        torture(&machine, &device, seed);
    }
}

#[test]
fn random_rings_of_a_console() {
    for seed in seeds() {
        let machine = Machine::new();
        let (console, outside) = Console::new(Box::<Screen>::default()).unwrap();
        let device = machine.attach(console).unwrap();
        outside.input(&[b'x'; 4096]);
        torture(&machine, &device, seed);
    }
}

#[test]
fn random_rings_of_a_disk() {
    for seed in seeds() {
        let scratch = Scratch::new();
        let machine = Machine::new();
        let mut options = scratch.options();
        options.queues = 2;
        options.io_uring = !seed.is_multiple_of(2);
        let device = machine.attach(Block::open(&options).unwrap()).unwrap();
        torture(&machine, &device, seed);
        device.detach(Duration::from_secs(5)).unwrap();
    }
}

#[test]
fn random_rings_of_a_network() {
    for seed in seeds() {
        let machine = Machine::new();
        let (net, mut far) = super::net::network(2);
        let device = machine.attach(net).unwrap();
        let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let stopping = stop.clone();
        // The other end sends frames, and reads what comes.
        let peer = std::thread::spawn(move || {
            while !stopping.load(std::sync::atomic::Ordering::Relaxed) {
                for far in &mut far {
                    far.try_send(&[7; 9000]);
                    far.drain();
                }
                std::thread::yield_now();
            }
        });
        torture(&machine, &device, seed);
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        peer.join().unwrap();
    }
}
