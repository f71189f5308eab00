//! Virtio devices and PCI configuration space against a driver that may do
//! anything: write its rings and buffers, kick, poke registers, reset, and have
//! the device saved and restored at any moment.
//!
//! An input is a list of steps, see [`Steps::next`]. Afterwards the device is
//! reset, and must serve a proper request.

use crate::random::Random;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use weft_guest_memory::ECAM;
use weft_virtio::Transport;
use weft_virtio::balloon::Balloon;
use weft_virtio::block::{Block, BlockOptions};
use weft_virtio::console::{Console, ConsoleHandle, ConsoleOutput};
use weft_virtio::fake_driver::{Buffer, Driver, Machine, NEXT, WRITE};
use weft_virtio::net::{Link, Mac, Net, Stream};
use weft_virtio::rng::Rng;

const RAM: u64 = 32 << 20;
/// Where buffers are, and how far apart.
const BUFFERS: u64 = 16 << 20;
const APART: u64 = 4096;
const RING_SIZE: u16 = 16;
const BOUND: Duration = Duration::from_secs(10);
/// How long a device may look at what it was given before it is reset.
const LOOK: Duration = Duration::from_micros(150);

/// Takes an input apart.
struct Steps<'a>(&'a [u8]);

enum Step<'a> {
    /// Bytes into a buffer.
    Fill(u64, &'a [u8]),
    /// Bytes into the rings of a queue.
    Ring(usize, u64, &'a [u8]),
    /// A descriptor: queue, index, buffer, flags, next.
    Describe(usize, u16, Buffer, u16, u16),
    /// A head into the available ring, and a kick.
    Offer(usize, u16),
    /// A register of the common configuration.
    Register(u64, u64, usize),
    /// A reset by the driver, and the device up again.
    Restart(u64),
    /// Pause, save, restore, resume.
    Move,
    /// The same, with a byte of the saved state changed.
    Damage(usize, u8),
    /// Something from outside of the machine.
    Outside(&'a [u8]),
}

impl<'a> Steps<'a> {
    fn take(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        taken
    }

    fn number(&mut self, bytes: usize) -> u64 {
        let taken = self.take(bytes).iter().rev();
        taken.fold(0, |number, byte| number << 8 | u64::from(*byte))
    }

    fn next(&mut self, queues: usize) -> Option<Step<'a>> {
        if self.0.is_empty() {
            return None;
        }
        let kind = self.number(1);
        let queue = (kind >> 4) as usize % queues;
        Some(match kind & 0xf {
            0 | 8 => {
                let at = BUFFERS + APART * (self.number(1) % 64);
                let length = self.number(1) as usize;
                Step::Fill(at, self.take(length))
            }
            1 => {
                let at = self.number(2) % 0x3100;
                let length = self.number(1) as usize % 32;
                Step::Ring(queue, at, self.take(length))
            }
            2 | 9 | 10 => {
                let [index, place] = [self.number(1), self.number(1)];
                let address = match place {
                    0xff => self.number(8),
                    0xfe => RAM - self.number(1),
                    place => BUFFERS + APART * (place % 64),
                };
                let length = self.number(if place == 0xff { 4 } else { 2 }) as u32;
                let flags = self.number(2) as u16;
                let buffer = Buffer {
                    address,
                    length,
                    writable: flags & WRITE != 0,
                };
                let next = self.number(1) as u16;
                Step::Describe(queue, index as u16 % RING_SIZE, buffer, flags, next)
            }
            4 => Step::Register(self.number(1) % 64, self.number(8), 1 << (queue % 4)),
            5 => Step::Restart(self.number(8)),
            6 => Step::Move,
            11 => Step::Damage(self.number(2) as usize, self.number(1) as u8),
            7 => {
                let length = self.number(2) as usize;
                Step::Outside(self.take(length))
            }
            _ => Step::Offer(queue, self.number(1) as u16),
        })
    }
}

/// Writes steps.
#[derive(Default)]
struct Script(Vec<u8>);

impl Script {
    fn fill(&mut self, buffer: u8, bytes: &[u8]) {
        self.0.extend([0, buffer, bytes.len() as u8]);
        self.0.extend(bytes);
    }

    fn chain(&mut self, queue: u8, first: u8, buffers: &[(u8, u16, bool)]) {
        for (at, (buffer, length, writable)) in (first..).zip(buffers) {
            let last = usize::from(at - first) + 1 == buffers.len();
            let flags = if last { 0 } else { NEXT } | if *writable { WRITE } else { 0 };
            self.0.extend([2 | queue << 4, at % 16, *buffer]);
            self.0.extend(length.to_le_bytes());
            self.0.extend(flags.to_le_bytes());
            self.0.push((at + 1) % 16);
        }
        self.0.extend([3 | queue << 4, first % 16]);
    }

    fn sometimes(&mut self, random: &mut Random) {
        match random.below(8) {
            0 => self.0.push(6),
            1 => {
                self.0.push(5);
                self.0.extend(random.next().to_le_bytes());
            }
            2 => {
                self.0.push(11);
                self.0.extend(&random.next().to_le_bytes()[..3]);
            }
            _ => {}
        }
    }
}

/// What comes from outside of the machine.
type Outside = Box<dyn FnMut(&[u8])>;

/// A machine with one device, and how to poke it from outside.
struct Bench {
    machine: Machine,
    device: Arc<Transport>,
    outside: Outside,
}

fn play(mut bench: Bench, input: &[u8], serves: impl Fn(&Machine, &mut Driver)) {
    let mut driver = Driver::find(&bench.machine, bench.device.slot());
    driver.start(u64::MAX, RING_SIZE);
    let queues = driver.queues.len();
    let mut steps = Steps(input);
    while let Some(step) = steps.next(queues) {
        match step {
            Step::Fill(at, bytes) => bench.machine.put(at, bytes),
            Step::Ring(queue, at, bytes) => {
                let base = driver.queues[queue].places[0];
                bench.machine.put(base + at, bytes);
            }
            Step::Describe(queue, index, buffer, flags, next) => {
                driver.describe(queue, index, buffer, flags, next);
            }
            Step::Offer(queue, head) => {
                driver.offer(queue, head);
                driver.kick(queue);
            }
            Step::Register(offset, value, length) => driver.set_common(offset, value, length),
            Step::Restart(features) => {
                driver.start(features, RING_SIZE);
            }
            Step::Move => {
                bench.device.pause(BOUND).expect("it gets quiet");
                let state = bench.device.save().expect("it is paused");
                // A device that stopped may have invalid queues.
                let _ = bench.device.restore(&state);
                bench.device.resume();
            }
            Step::Damage(at, byte) => {
                bench.device.pause(BOUND).expect("it gets quiet");
                let state = bench.device.save().expect("it is paused");
                let mut text = serde_json::to_vec(&state).expect("a state is plain data");
                let at = at % text.len();
                text[at] = byte;
                // A damaged state does no harm, and the device can still become another.
                if let Ok(damaged) = serde_json::from_slice(&text) {
                    let _ = bench.device.restore(&damaged);
                    let _ = bench.device.restore(&state);
                }
                bench.device.resume();
            }
            Step::Outside(bytes) => (bench.outside)(bytes),
        }
    }
    std::thread::sleep(LOOK);
    driver.start(u64::MAX, RING_SIZE);
    serves(&bench.machine, &mut driver);
    bench.device.detach(BOUND).expect("it gets quiet");
}

fn readable(machine: &Machine, bytes: &[u8]) -> Buffer {
    Buffer {
        address: machine.buffer(bytes),
        length: bytes.len() as u32,
        writable: false,
    }
}

fn writable(machine: &Machine, length: usize) -> Buffer {
    Buffer {
        writable: true,
        ..readable(machine, &vec![0; length])
    }
}

/// The entropy device.
pub fn rng(input: &[u8]) {
    let machine = Machine::new();
    let device = machine.attach(Rng::new(Some(1))).expect("a device");
    let bench = Bench {
        machine,
        device,
        outside: Box::new(|_| {}),
    };
    play(bench, input, |machine, driver| {
        assert_eq!(driver.request(0, &[writable(machine, 8)]), 8);
    });
}

/// Requests for bytes.
pub fn valid_rng(random: &mut Random) -> Vec<u8> {
    let mut script = Script::default();
    for _ in 0..1 + random.below(6) {
        let first = random.below(16) as u8;
        let buffers: Vec<_> = (0..1 + random.below(3))
            .map(|_| (random.below(64) as u8, 1 + random.below(4096) as u16, true))
            .collect();
        script.chain(0, first, &buffers);
        script.sometimes(random);
    }
    script.0
}

/// The balloon, whose pages go back to the host.
pub fn balloon(input: &[u8]) {
    let machine = Machine::new();
    let (balloon, handle) = Balloon::new(Arc::new(machine.ram.clone())).expect("a balloon");
    let device = machine.attach(balloon).expect("a device");
    let bench = Bench {
        machine,
        device,
        outside: Box::new(move |bytes| {
            handle.set_target(bytes.iter().map(|byte| u64::from(*byte) << 12).sum());
        }),
    };
    play(bench, input, |machine, driver| {
        driver.set_device(12, &[0; 4]);
        let page = writable(machine, 2 * 4096);
        let inside = page.address.next_multiple_of(4096);
        machine.put(inside, &[7; 4096]);
        driver.request(2, &[page]);
        assert_eq!(machine.bytes(inside, 4096), [0; 4096]);
    });
}

/// Page numbers, and reports.
pub fn valid_balloon(random: &mut Random) -> Vec<u8> {
    let mut script = Script::default();
    for _ in 0..1 + random.below(5) {
        let first = random.below(16) as u8;
        let numbers: Vec<u8> = (0..1 + random.below(16))
            .flat_map(|_| (random.below(8200) as u32).to_le_bytes())
            .collect();
        script.fill(0, &numbers);
        let queue = random.below(2) as u8;
        script.chain(queue, first, &[(0, numbers.len() as u16, false)]);
        let buffers: Vec<_> = (0..1 + random.below(3))
            .map(|_| (random.below(64) as u8, 4096 << random.below(4), true))
            .collect();
        script.chain(2, first + 4, &buffers);
        script.sometimes(random);
    }
    script.0
}

/// A disk of one MiB in memory.
pub fn block(input: &[u8]) {
    // SAFETY: the name is a terminated string.
    let descriptor = unsafe { libc::memfd_create(c"disk".as_ptr(), libc::MFD_CLOEXEC) };
    assert!(descriptor >= 0, "a memory file");
    // SAFETY: the descriptor was just made for us alone.
    let file = unsafe { <File as std::os::fd::FromRawFd>::from_raw_fd(descriptor) };
    file.set_len(1 << 20).expect("memory");
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let options = BlockOptions {
        queues: 2,
        io_uring: input.len().is_multiple_of(2),
        ..BlockOptions::new(path)
    };
    let machine = Machine::new();
    let block = Block::open(&options).expect("a disk");
    let device = machine.attach(block).expect("a device");
    let bench = Bench {
        machine,
        device,
        outside: Box::new(|_| {}),
    };
    play(bench, input, |machine, driver| {
        let mut header = [0; 16];
        header[0] = 8;
        let status = writable(machine, 21);
        driver.request(0, &[readable(machine, &header), status]);
        assert_eq!(machine.bytes(status.address, 21)[20], 0);
    });
    assert_eq!(file.metadata().expect("it is open").len(), 1 << 20);
}

/// Requests of every kind.
pub fn valid_block(random: &mut Random) -> Vec<u8> {
    let mut script = Script::default();
    for _ in 0..1 + random.below(5) {
        let kind = [0_u8, 1, 4, 8, 11, 13][random.below(6)];
        let sector = random.below(2100) as u64;
        let mut header = vec![kind, 0, 0, 0, 0, 0, 0, 0];
        header.extend(sector.to_le_bytes());
        script.fill(0, &header);
        let mut range = sector.to_le_bytes().to_vec();
        range.extend((random.below(64) as u32).to_le_bytes());
        range.extend([random.below(2) as u8, 0, 0, 0]);
        script.fill(1, &range);
        let length = 512 * (1 + random.below(8)) as u16;
        let data = match kind {
            0 => vec![(2, length, true), (3, 512, true)],
            1 => vec![(2, length, false)],
            8 => vec![(2, 20, true)],
            11 | 13 => vec![(1, 16, false)],
            _ => vec![],
        };
        let mut buffers = vec![(0, 16, false)];
        buffers.extend(data);
        buffers.push((4, 1, true));
        script.chain(random.below(2) as u8, random.below(16) as u8, &buffers);
        script.sometimes(random);
    }
    script.0
}

struct Nowhere;

impl ConsoleOutput for Nowhere {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        Ok(bytes.len())
    }
}

/// A console whose output goes nowhere.
pub fn console(input: &[u8]) {
    let console = Console::new(Box::new(Nowhere));
    let (console, handle): (_, ConsoleHandle) = console.expect("a console");
    let machine = Machine::new();
    let device = machine.attach(console).expect("a device");
    let bench = Bench {
        machine,
        device,
        outside: Box::new(move |bytes| {
            handle.input(bytes);
            handle.resize(bytes.len() as u16, 25);
        }),
    };
    play(bench, input, |machine, driver| {
        driver.request(1, &[readable(machine, b"alive")]);
    });
}

/// Input and output.
pub fn valid_console(random: &mut Random) -> Vec<u8> {
    let mut script = Script::default();
    for _ in 0..1 + random.below(5) {
        let first = random.below(16) as u8;
        let length = 1 + random.below(4096) as u16;
        script.chain(0, first, &[(5, length, true)]);
        script.chain(1, first, &[(6, length, false), (7, 9, false)]);
        let typed = random.below(300);
        script.0.push(7);
        script.0.extend((typed as u16).to_le_bytes());
        script.0.extend(random.bytes(typed));
        script.sometimes(random);
    }
    script.0
}

/// A network of two pairs, whose other ends say anything.
pub fn net(input: &[u8]) {
    let pair = || UnixStream::pair().expect("sockets");
    let ends = [pair(), pair()];
    let link = |near: &UnixStream| {
        let near = near.try_clone().expect("a descriptor");
        Box::new(Stream::new(near).expect("a socket")) as Box<dyn Link>
    };
    let links = ends.iter().map(|(near, _)| link(near)).collect();
    let net = Net::new(links, Mac([2, 0, 0, 0, 0, 1]), Some(9000), 0).expect("a network");
    let machine = Machine::new();
    let device = machine.attach(net).expect("a device");
    let mut far = ends.map(|(_, far)| far);
    for far in &far {
        far.set_nonblocking(true).expect("a socket");
    }
    let bench = Bench {
        machine,
        device,
        outside: Box::new(move |bytes| {
            // Full or gone is as good.
            let _ = far[bytes.len() % 2].write(bytes);
            let _ = far[0].read(&mut [0; 65536]);
        }),
    };
    play(bench, input, |machine, driver| {
        driver.request(1, &[readable(machine, &[0; 72])]);
    });
}

/// Frames both ways, and a command.
pub fn valid_net(random: &mut Random) -> Vec<u8> {
    let mut script = Script::default();
    script.fill(1, &[4, 0, 1 + random.below(2) as u8, 0]);
    script.chain(4, 0, &[(1, 4, false), (2, 1, true)]);
    for _ in 0..1 + random.below(5) {
        let (first, pair) = (random.below(16) as u8, random.below(2) as u8);
        for at in 0..3 {
            script.chain(2 * pair, first + at, &[(8 + at, 1536, true)]);
        }
        let length = 14 + random.below(4000) as u16;
        script.chain(2 * pair + 1, first, &[(20, 12, false), (21, length, false)]);
        let length = random.below(2000);
        script.0.push(7);
        script.0.extend((length as u16 + 4).to_le_bytes());
        script.0.extend((length as u32).to_be_bytes());
        script.0.extend(random.bytes(length));
        script.sometimes(random);
    }
    script.0
}

/// Accesses to configuration space both ways, and to what BARs may lead to.
pub fn pci(input: &[u8]) {
    let machine = Machine::new();
    let device = machine.attach(Rng::new(Some(1))).expect("a device");
    device.pause(BOUND).expect("a quiet device");
    let first = device.save().expect("it is paused");
    device.resume();
    let driver = Driver::find(&machine, device.slot());
    let bars = [driver.bar(0), driver.bar(2)];
    let mut steps = Steps(input);
    while !steps.0.is_empty() {
        let kind = steps.number(1);
        let offset = steps.number(3);
        let length = 1 << (kind >> 4 & 3);
        let value = steps.number(length);
        let mut data = value.to_le_bytes();
        let data = &mut data[..length];
        let slot = u64::from(device.slot()) << 15;
        let (bus, address) = match kind & 7 {
            0 | 1 => (&machine.mmio, ECAM + slot + offset % 0x100),
            2 => (&machine.mmio, ECAM + offset % (1 << 20)),
            3 => (&machine.ports, 0xcf8 + offset % 8),
            4 => (&machine.mmio, bars[0] + offset % 0x4000),
            5 => (&machine.mmio, bars[1] + offset % 0x1000),
            6 => (&machine.mmio, driver.bar(0).wrapping_add(offset % 0x4000)),
            _ => (&machine.mmio, driver.bar(2).wrapping_add(offset % 0x1000)),
        };
        if kind & 8 == 0 {
            bus.write(address, data);
        } else {
            bus.read(address, data);
        }
    }
    let state = machine.root.save();
    machine.root.restore(&state).expect("its own state");
    device.pause(BOUND).expect("a quiet device");
    device.restore(&first).expect("its own state");
    device.resume();
    let mut driver = Driver::find(&machine, device.slot());
    assert_eq!([driver.bar(0), driver.bar(2)], bars);
    driver.start(u64::MAX, RING_SIZE);
    assert_eq!(driver.request(0, &[writable(&machine, 8)]), 8);
    assert!(machine.messages.wait(1), "no interrupt");
}

/// Sizing, moving and masking as drivers do it.
pub fn valid_pci(random: &mut Random) -> Vec<u8> {
    let mut input = Vec::new();
    let mut step = |kind: u8, offset: u32, value: &[u8]| {
        input.push(kind | (value.len().ilog2() as u8) << 4);
        input.extend(&offset.to_le_bytes()[..3]);
        input.extend(value);
    };
    for _ in 0..1 + random.below(20) {
        let word = (random.next() as u32).to_le_bytes();
        match random.below(7) {
            0 => step(0, 0x10 + 4 * random.below(6) as u32, &[0xff; 4]),
            1 => step(
                0,
                0x10,
                &(0xc000_0000 | (random.next() as u32 & 0xff_c000)).to_le_bytes(),
            ),
            2 => step(0, 4, &[random.next() as u8, random.below(5) as u8]),
            3 => step(5, 4 * random.below(12) as u32, &word),
            4 => step(0, 0x42, &[0, random.next() as u8]),
            5 => step(4, [0x14, 0x1c, 0x20, 0x3000][random.below(4)], &word),
            _ => step(0, 0x40 + 4 * random.below(48) as u32, &word),
        }
    }
    input
}
