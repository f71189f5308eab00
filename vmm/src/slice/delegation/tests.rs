//! Two slices in one process, joined by links that may be slow; a driver on each,
//! which reaches RAM and registers as its slice does.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use weft_wire::halves::{self, HalvesConfig, Receiver, Sender};

use super::*;
use crate::clock::{Clock, Reference, Source, measure_host_tsc};
use crate::interrupts::{Hub, MessageSink};
use crate::machine::{Configuration, DataPath, Disk, Placement, disks};
use crate::memory::{DeviceMemory, Ram};
use crate::slice::{Joints, Slice, SliceLinks};
use crate::virtio::double::{Buffer, Driver, DriverQueue, Machine, Messages};
use crate::virtio::{Attach, VirtioDevice};

const SECTORS: u64 = 8192;
const SECTOR: u64 = 512;
const LEASE: Duration = Duration::from_secs(20);

/// One end of a link of which each chunk of bytes may take a while.
fn slow(end: UnixStream, seed: u64, delay: Duration) -> UnixStream {
    if delay.is_zero() {
        return end;
    }
    let (inside, outside) = UnixStream::pair().unwrap();
    for (mut from, mut to, seed) in [
        (
            end.try_clone().unwrap(),
            outside.try_clone().unwrap(),
            seed + 1,
        ),
        (outside, end, seed + 2),
    ] {
        std::thread::spawn(move || {
            let mut random = seed;
            let mut buffer = [0; 8192];
            while let Ok(count @ 1..) = from.read(&mut buffer) {
                random = random.wrapping_mul(6_364_136_223_846_793_005) + 1;
                std::thread::sleep(delay * ((random >> 40) as u32 % 256) / 256);
                if to.write_all(&buffer[..count]).is_err() {
                    break;
                }
            }
            let _ = to.shutdown(std::net::Shutdown::Both);
        });
    }
    inside
}

fn open_link(end: UnixStream) -> (Sender, Receiver) {
    halves::open(HalvesConfig {
        socket: end.into(),
        keys: None,
        lease: LEASE,
        spin: Duration::ZERO,
        name: "test".into(),
    })
    .unwrap()
}

struct Rig {
    slices: Vec<Arc<Slice>>,
    machines: Vec<Machine>,
    transport: Arc<Transport>,
    /// Of slice 1's interrupts.
    far: Arc<Messages>,
    file: PathBuf,
    failures: Arc<Mutex<Vec<String>>>,
}

impl Rig {
    fn new(owner: u32, data_path: DataPath, delay: Duration) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("weft-delegation-{}-{number}", std::process::id());
        let file = std::env::temp_dir().join(name);
        File::create(&file)
            .unwrap()
            .set_len(SECTORS * SECTOR)
            .unwrap();
        let placement = Placement::deal(2, 2, 128 << 20).unwrap();
        let mut configuration = Configuration::new("none".into(), 128 << 20);
        configuration.cpus = 2;
        configuration.slices = placement.shares().to_vec();
        configuration.disks = vec![Disk {
            path: file.clone(),
            read_only: false,
            direct: false,
            slice: owner,
            data_path,
        }];
        let failures = Arc::<Mutex<Vec<String>>>::default();
        let (one, other) = UnixStream::pair().unwrap();
        let ends = [slow(one, number.into(), delay), other];
        let made: Vec<_> = (0..2)
            .zip(ends)
            .map(|(number, end)| {
                let mut links = vec![Some(open_link(end)), None];
                links.rotate_right(1 - number);
                let ram = Ram::new(128 << 20).unwrap();
                let links = SliceLinks {
                    number,
                    links,
                    lease: LEASE,
                    delay_max: Duration::ZERO,
                    reference: Reference::here(),
                };
                let told = failures.clone();
                let broken: crate::slice::Broken =
                    Arc::new(move |reason| told.lock().unwrap().push(reason));
                let slice = Slice::new(&configuration, links, &ram, broken.clone());
                (slice, ram, broken)
            })
            .collect();
        let far = Arc::new(Messages::default());
        let open = |slice: usize| disks::open_for(&configuration, &made[slice].0).unwrap();
        // Who has the disk describes it before the other one asks.
        let mut devices = [None, None];
        for slice in [owner as usize, 1 - owner as usize] {
            devices[slice] = open(slice).pop();
        }
        let mut machines: Vec<Machine> = Vec::new();
        let mut transport = None;
        for (number, ((slice, ram, broken), device)) in made.iter().zip(devices).enumerate() {
            let memory = DeviceMemory::shared(ram, slice.memory().clone());
            let mmio = (number == 1).then(Bus::default);
            let apart = (number as u64) << 23;
            let machine = Machine::of_slice(ram.clone(), memory.clone(), mmio, apart);
            let (scheme, block) = device.unwrap();
            let delegation = slice.delegation().clone();
            if number == 0 {
                let watch = Some(delegation.watch(0));
                let device = Spread::new(Box::new(block), 0, scheme, delegation.clone()).unwrap();
                let attach = Attach {
                    memory,
                    observer: None,
                    watch,
                };
                let made = Transport::attach(&machine.root, &attach, Box::new(device)).unwrap();
                delegation.add_transport(0, &made);
                transport = Some(made);
            } else {
                let device: Box<dyn VirtioDevice> = Box::new(block);
                let tools = Tools {
                    memory,
                    observer: None,
                    sink: far.clone() as Arc<dyn MessageSink>,
                };
                Station::start(delegation, tools, vec![(0, scheme, device)]).unwrap();
            }
            let joints = Joints {
                hub: Hub::of_slice(2, Some(slice.apart())),
                mmio: machine.mmio.clone(),
                ports: machine.ports.clone(),
                clock: Arc::new(Clock::new(Source::Host, measure_host_tsc())),
                broken: broken.clone(),
                ended: Box::new(|_, _| {}),
            };
            drop(slice.join(joints).unwrap());
            machines.push(machine);
        }
        Self {
            slices: made.into_iter().map(|(slice, ..)| slice).collect(),
            machines,
            transport: transport.unwrap(),
            far,
            file,
            failures,
        }
    }

    /// The device, ready, as slice 0's driver has it; and what a driver elsewhere
    /// needs to go on.
    fn started(&self) -> (Driver<'_>, Vec<DriverQueue>) {
        let mut driver = Driver::find(&self.machines[0], self.transport.slot());
        driver.start(u64::MAX, 64);
        let queues = driver.queues.clone();
        (driver, queues)
    }

    /// The driver on slice 1.
    fn other(&self, queues: Vec<DriverQueue>) -> Driver<'_> {
        let mut driver = Driver::find(&self.machines[1], self.transport.slot());
        driver.adopt(queues);
        driver
    }

    fn bytes(&self, sector: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        let file = File::open(&self.file).unwrap();
        file.read_exact_at(&mut bytes, sector * SECTOR).unwrap();
        bytes
    }

    fn end(self) {
        // That the links end is no failure.
        assert_eq!(*self.failures.lock().unwrap(), Vec::<String>::new());
        for slice in &self.slices {
            slice.close();
        }
        drop(self.transport);
        std::fs::remove_file(&self.file).unwrap();
    }
}

fn buffer(machine: &Machine, bytes: &[u8], writable: bool) -> Buffer {
    Buffer {
        address: machine.buffer(bytes),
        length: bytes.len() as u32,
        writable,
    }
}

/// The buffers of a request; the last is its status.
fn request(machine: &Machine, kind: u32, sector: u64, data: &[Buffer]) -> Vec<Buffer> {
    let mut header = [0; 16];
    header[..4].copy_from_slice(&kind.to_le_bytes());
    header[8..].copy_from_slice(&sector.to_le_bytes());
    let mut chain = vec![buffer(machine, &header, false)];
    chain.extend(data);
    chain.push(buffer(machine, &[0xee], true));
    chain
}

fn ask(
    driver: &mut Driver<'_>,
    machine: &Machine,
    queue: usize,
    (kind, sector): (u32, u64),
    data: &[Buffer],
) -> u8 {
    let chain = request(machine, kind, sector, data);
    driver.request(queue, &chain);
    machine.bytes(chain.last().unwrap().address, 1)[0]
}

/// All that a disk does, from one slice's driver on the queue of its vCPU.
fn every_request(rig: &Rig, driver: &mut Driver<'_>, slice: usize) {
    let machine = &rig.machines[slice];
    let first = 2000 * slice as u64;
    let pattern: Vec<u8> = (0..700_000_u32 / 512 * 512)
        .map(|byte| (byte.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect();
    let data = buffer(machine, &pattern, false);
    assert_eq!(ask(driver, machine, slice, (1, first), &[data]), 0);
    assert_eq!(ask(driver, machine, slice, (4, 0), &[]), 0, "flush");
    assert!(rig.bytes(first, pattern.len()) == pattern);
    let back = buffer(machine, &vec![0; pattern.len()], true);
    assert_eq!(ask(driver, machine, slice, (0, first), &[back]), 0);
    assert!(machine.bytes(back.address, pattern.len()) == pattern);
    // What is not there.
    let small = buffer(machine, &[0; 512], true);
    assert_eq!(ask(driver, machine, slice, (0, SECTORS), &[small]), 1);
    // Discard and zero.
    for (kind, at) in [(11_u32, first), (13, first + 16)] {
        let mut range = at.to_le_bytes().to_vec();
        range.extend(8_u32.to_le_bytes());
        range.extend(0_u32.to_le_bytes());
        let range = buffer(machine, &range, false);
        assert_eq!(ask(driver, machine, slice, (kind, 0), &[range]), 0);
    }
    assert_eq!(rig.bytes(first + 16, 4096), [0; 4096]);
    let queue = Address::new(0, slice as u16);
    let sink = match rig.slices[slice].delegation().server_of(queue) {
        0 => &rig.machines[0].messages,
        _ => &rig.far,
    };
    assert!(sink.wait(slice + 1), "no interrupt on slice {slice}");
}

fn served_from_both(owner: u32, path: DataPath, delay: Duration) {
    let rig = Rig::new(owner, path, delay);
    let (mut driver, queues) = rig.started();
    let mut other = rig.other(queues);
    std::thread::scope(|scope| {
        scope.spawn(|| every_request(&rig, &mut driver, 0));
        scope.spawn(|| every_request(&rig, &mut other, 1));
    });
    drop((driver, other));
    rig.end();
}

#[test]
fn disks_are_served_wherever_they_are_and_either_way() {
    for owner in [0, 1] {
        for path in [DataPath::Bypass, DataPath::Dsm] {
            served_from_both(owner, path, Duration::ZERO);
        }
    }
}

#[test]
fn slow_links_change_nothing() {
    for owner in [0, 1] {
        served_from_both(owner, DataPath::Bypass, Duration::from_millis(2));
    }
}

/// Queues on another slice stop with the device and go on with it, again and again,
/// with requests under way.
#[test]
fn a_pause_loses_nothing_and_a_reset_ends_all() {
    let rig = Rig::new(0, DataPath::Bypass, Duration::from_micros(200));
    for _ in 0..3 {
        let (mut driver, queues) = rig.started();
        let mut other = rig.other(queues);
        let machine = &rig.machines[1];
        for round in 0..20_u64 {
            let data = buffer(machine, &[round as u8 + 1; 4096], false);
            let chain = request(machine, 1, 8 * round, &[data]);
            let head = other.chain(1, &chain);
            other.offer(1, head);
            other.kick(1);
            rig.transport.pause(Duration::from_secs(10)).unwrap();
            rig.transport.resume();
            assert_eq!(other.wait_used(1).0, u32::from(head));
            assert_eq!(rig.bytes(8 * round, 4096), [round as u8 + 1; 4096]);
        }
        // Under way when the driver resets.
        let data = buffer(machine, &[9; 65536], false);
        let chain = request(machine, 1, 512, &[data]);
        let head = other.chain(1, &chain);
        other.offer(1, head);
        other.kick(1);
        driver.reset();
    }
    rig.end();
}

/// A message that is masked is not sent from anywhere, and not forgotten.
#[test]
fn masked_messages_wait_on_the_bootstrap_slice() {
    let rig = Rig::new(0, DataPath::Bypass, Duration::ZERO);
    let (driver, queues) = rig.started();
    let mut other = rig.other(queues);
    let machine = &rig.machines[1];
    let table = driver.bar(2);
    let mask = |masked: u32| {
        let entry = table + 16 * 2 + 12;
        rig.machines[1].mmio.write(entry, &masked.to_le_bytes());
    };
    let data = buffer(machine, &[0; 512], true);
    for _ in 0..20 {
        mask(1);
        assert_eq!(ask(&mut other, machine, 1, (0, 0), &[data]), 0);
        other.rearm(1);
        mask(0);
        // It came from slice 0, or, where the driver was seen to want none then, not.
        assert_eq!(ask(&mut other, machine, 1, (0, 0), &[data]), 0);
        other.rearm(1);
        assert!(rig.far.wait(2));
    }
    assert!(rig.machines[0].messages.wait(2));
    drop((driver, other));
    rig.end();
}

/// What a driver gets wrong on one slice stops the device where its registers are.
#[test]
fn a_fault_elsewhere_wants_a_reset() {
    let rig = Rig::new(0, DataPath::Bypass, Duration::ZERO);
    let (mut driver, queues) = rig.started();
    let mut other = rig.other(queues);
    let machine = &rig.machines[1];
    // No room for a status.
    let chain = [buffer(machine, &[0; 16], false)];
    let head = other.chain(1, &chain);
    other.offer(1, head);
    other.kick(1);
    assert!(driver.wait_needs_reset());
    driver.reset();
    drop((driver, other));
    let (driver, queues) = rig.started();
    every_request(&rig, &mut rig.other(queues), 1);
    drop(driver);
    rig.end();
}
