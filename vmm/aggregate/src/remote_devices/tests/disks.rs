//! Disks: every request, from either slice, either way.

use std::fs::File;
use std::ops::Deref;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use weft_platform::pci::PENDING;
use weft_virtio::block::{Operation, Status};

use super::*;
use crate::devices::{DataPath, DeviceList, Disk, OpenDisks, OpenSwitches};
use crate::message::chunk::{Chunk, ChunkReply};

const SECTORS: u64 = 8192;
const SECTOR: u64 = 512;

/// Two slices with a disk.
struct DiskRig {
    rig: Rig,
    file: PathBuf,
}

impl Deref for DiskRig {
    type Target = Rig;

    fn deref(&self) -> &Rig {
        &self.rig
    }
}

impl DiskRig {
    fn new(owner: u32, data_path: DataPath, delay: Duration) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("weft-remote-{}-{number}", std::process::id());
        let file = std::env::temp_dir().join(name);
        File::create(&file)
            .unwrap()
            .set_len(SECTORS * SECTOR)
            .unwrap();
        let disks = [Disk {
            path: file.clone(),
            read_only: false,
            direct: false,
            slice: owner,
            data_path,
        }];
        let list = DeviceList {
            cpus: CPUS,
            disks: &disks,
            networks: &[],
        };
        let rig = Rig::new(owner as usize, delay, &mut |slice| {
            let opened = (&OpenDisks::default(), &OpenSwitches::default());
            let devices = list.of_slice(slice, opened);
            devices.unwrap().pop().unwrap()
        });
        Self { rig, file }
    }

    fn bytes(&self, sector: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        let file = File::open(&self.file).unwrap();
        file.read_exact_at(&mut bytes, sector * SECTOR).unwrap();
        bytes
    }

    fn end(self) {
        self.rig.end();
        std::fs::remove_file(&self.file).unwrap();
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
fn every_request(rig: &DiskRig, driver: &mut Driver<'_>, slice: usize) {
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
    let sink = match rig.slices[slice].remote_devices().server_of(queue) {
        0 => &rig.machines[0].messages,
        _ => &rig.far,
    };
    assert!(sink.wait(slice + 1), "no interrupt on slice {slice}");
}

#[test]
fn a_drivers_error_keeps_no_page_from_the_other_slice() {
    let rig = DiskRig::new(0, DataPath::default(), Duration::ZERO);
    let (driver, _) = rig.started();
    let available = driver.queues[0].places[1];
    // So many cannot be in the queue.
    rig.machines[0].put(available + 2, &500_u16.to_le_bytes());
    driver.kick(0);
    assert!(driver.wait_needs_reset());
    rig.machines[1].put(available, &[1]);
    assert_eq!(rig.machines[0].bytes(available, 1), [1]);
    drop(driver);
    rig.end();
}

fn served_from_both(owner: u32, path: DataPath, delay: Duration) {
    let rig = DiskRig::new(owner, path, delay);
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
    let rig = DiskRig::new(0, DataPath::Bypass, Duration::from_micros(200));
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
            rig.transport.pause(PATIENCE).unwrap();
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

/// Many requests under way, which end on whatever thread has what they need, while the
/// device is paused now and then and the other slice wants the pages of the rings.
#[test]
fn requests_at_once_end_whole_and_once() {
    requests_at_once(4, &mut |rig, _| {
        rig.transport.pause(PATIENCE).unwrap();
        rig.transport.resume();
    });
}

/// The same, while the queue goes to the disk's slice and back.
#[test]
fn requests_end_once_wherever_their_queue_goes() {
    requests_at_once(1, &mut |rig, times| rig.move_queue(1, 1 - times % 2));
}

/// Does `meanwhile` each `every` rounds, with requests under way.
fn requests_at_once(every: u8, meanwhile: &mut dyn FnMut(&DiskRig, usize)) {
    const SIZES: [usize; 8] = [512, 4096, 65_536, 1024, 70_144, 4096, 16_384, 140_288];
    let rig = DiskRig::new(0, DataPath::Bypass, Duration::ZERO);
    let (driver, queues) = rig.started();
    let rings = queues[1].places;
    let mut other = rig.other(queues);
    let machine = &rig.machines[1];
    let over = AtomicBool::new(false);
    let chains: Vec<_> = (0..2_u32)
        .flat_map(|kind| SIZES.map(|size| (kind, size)))
        .zip(0_u64..)
        .map(|((kind, size), number)| {
            let data = buffer(machine, &vec![0; size], kind == 0);
            let sector = 300 * (number % 8);
            (request(machine, kind, sector, &[data]), data, sector)
        })
        .collect();
    let (reads, writes) = chains.split_at(SIZES.len());
    let mut times = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::SeqCst) {
                for place in rings {
                    rig.machines[0].bytes(place, 16);
                }
                std::thread::sleep(Duration::from_micros(300));
            }
        });
        for round in 1..=24_u8 {
            for group in [writes, reads] {
                for (chain, data, _) in group {
                    let fill = if data.writable { 0 } else { round };
                    machine.put(data.address, &vec![fill; data.length as usize]);
                    machine.put(chain[2].address, &[0xee]);
                }
                let mut heads = Vec::new();
                for (number, (chain, ..)) in group.iter().enumerate() {
                    heads.push(u32::from(other.chain(1, chain)));
                    other.offer(1, heads[number] as u16);
                    if (number + usize::from(round)).is_multiple_of(3) {
                        other.kick(1);
                    }
                }
                other.kick(1);
                if round % every == 0 {
                    times += 1;
                    meanwhile(&rig, times);
                }
                let mut ended: Vec<u32> = group.iter().map(|_| other.wait_used(1).0).collect();
                heads.sort_unstable();
                ended.sort_unstable();
                assert_eq!(ended, heads);
                assert_eq!(other.used(1), None);
                for (chain, data, sector) in group {
                    let (length, status) = (data.length as usize, chain[2].address);
                    assert_eq!(machine.bytes(status, 1), [0]);
                    let there = match data.writable {
                        true => machine.bytes(data.address, length),
                        false => rig.bytes(*sector, length),
                    };
                    assert!(there == vec![round; length], "round {round}");
                }
            }
        }
        over.store(true, Ordering::SeqCst);
    });
    drop((driver, other));
    rig.end();
}

/// A message that is masked is not sent from anywhere, and not forgotten.
#[test]
fn masked_messages_wait_on_the_primary() {
    let rig = DiskRig::new(0, DataPath::Bypass, Duration::ZERO);
    let (driver, queues) = rig.started();
    let mut other = rig.other(queues);
    let machine = &rig.machines[1];
    let table = driver.bar(2);
    let mask = |masked: u32| {
        let entry = table + 16 * 2 + 12;
        rig.machines[1].mmio.write(entry, &masked.to_le_bytes());
    };
    let data = buffer(machine, &[0; 512], true);
    let pending = || {
        let mut bits = [0; 8];
        let place = table + u64::from(PENDING);
        rig.machines[1].mmio.read(place, &mut bits);
        u64::from_le_bytes(bits) & 1 << 2 != 0
    };
    // The driver says what it wants before it asks, and again only after it got that: a
    // device that sees a later wish sends nothing for what was used before it.
    for round in 0..20 {
        mask(1);
        other.rearm(1);
        assert_eq!(ask(&mut other, machine, 1, (0, 0), &[data]), 0);
        let until = Instant::now() + PATIENCE;
        while !pending() {
            assert!(Instant::now() < until, "round {round}: nothing is pending");
            std::thread::sleep(Duration::from_micros(200));
        }
        assert_eq!(rig.far.count(2), 0, "round {round}");
        assert_eq!(rig.machines[0].messages.count(2), 0, "round {round}");
        mask(0);
        assert!(rig.machines[0].messages.wait(2), "round {round}");
        assert!(!pending(), "round {round}");
        other.rearm(1);
        assert_eq!(ask(&mut other, machine, 1, (0, 0), &[data]), 0);
        assert!(rig.far.wait(2), "round {round}");
        assert_eq!(rig.machines[0].messages.count(2), 0, "round {round}");
    }
    drop((driver, other));
    rig.end();
}

/// The slice that serves the queue sends its interrupts, by the route of the moment.
#[test]
fn interrupts_come_from_wherever_the_queue_went() {
    let rig = DiskRig::new(0, DataPath::Bypass, Duration::from_micros(100));
    let (driver, queues) = rig.started();
    let mut other = rig.other(queues);
    let machine = &rig.machines[1];
    let data = buffer(machine, &[0; 512], true);
    let entry = driver.bar(2) + 16 * 2;
    for round in 0..30_u32 {
        // Slice 1 serves it in even rounds. It missed what changed while it did not.
        let here = usize::from(round % 2 == 0);
        if round > 0 {
            rig.move_queue(1, here);
        }
        let word = 0x40 + round;
        machine.mmio.write(entry + 8, &word.to_le_bytes());
        other.rearm(1);
        assert_eq!(ask(&mut other, machine, 1, (0, 0), &[data]), 0);
        let sinks = [&rig.machines[0].messages, &rig.far];
        assert!(sinks[here].wait(word as usize), "round {round}");
        assert_eq!(sinks[1 - here].count(word as usize), 0, "round {round}");
    }
    drop((driver, other));
    rig.end();
}

/// A queue that is served is not given away, and none goes where it cannot be served.
#[test]
fn a_queue_that_cannot_go_stays() {
    let rig = DiskRig::new(0, DataPath::Bypass, Duration::ZERO);
    let (driver, queues) = rig.started();
    let mut other = rig.other(queues);
    let check = |slice: usize, servers: Vec<usize>| {
        let remote = rig.slices[slice].remote_devices();
        remote.place_queues(1, &[(0, servers)].into()).unwrap_err()
    };
    assert!(check(0, vec![0, 0]).contains("not paused"));
    // It serves the queue when it has answered.
    every_request(&rig, &mut other, 1);
    assert!(check(1, vec![0, 0]).contains("is served still"));
    rig.transport.pause(PATIENCE).unwrap();
    assert!(check(0, vec![1, 1]).contains("node 1 cannot serve queue 0"));
    rig.transport.resume();
    let data = buffer(&rig.machines[1], &[0; 512], true);
    assert_eq!(ask(&mut other, &rig.machines[1], 1, (0, 0), &[data]), 0);
    drop((driver, other));
    rig.end();
}

/// What a driver gets wrong on one slice stops the device where its registers are.
#[test]
fn a_fault_elsewhere_wants_a_reset() {
    let rig = DiskRig::new(0, DataPath::Bypass, Duration::ZERO);
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

/// Has slice `from` send the other one a message that cannot be true: `complaint` is the
/// reason with which it is lost.
fn is_lost_for(from: usize, queue: u16, message: DeviceMessage, complaint: &str) {
    let rig = DiskRig::new(0, DataPath::Bypass, Duration::ZERO);
    let queue = Address::new(0, queue);
    rig.slices[from]
        .remote_devices()
        .send(1 - from, queue, message);
    let deadline = Instant::now() + PATIENCE;
    while rig.failures().is_empty() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    let reason = rig.failures().first().cloned().unwrap_or_default();
    assert!(reason.contains(&format!("lost node {from}")), "{reason}");
    assert!(reason.contains(complaint), "{reason}");
    for slice in &rig.slices {
        slice.close();
    }
}

/// A slice that replies to a request that it did not get is lost, with the reason.
#[test]
fn a_reply_without_a_request_ends_the_machine() {
    let reply = DeviceMessage::Answered(ChunkReply {
        chunk: Chunk {
            slot: 0,
            position: 0,
            operation: Operation::Flush,
            durable: false,
            offset: 0,
            length: 0,
        },
        status: Status::Ok,
        data: Vec::new().into(),
    });
    is_lost_for(0, 1, reply, "it did not get");
}

/// Slice 0 serves queue 0, slice 1 queue 1.
#[test]
fn only_the_slice_that_serves_a_queue_reports_on_it() {
    is_lost_for(1, 0, DeviceMessage::Used, "another node serves");
    is_lost_for(0, 1, DeviceMessage::Used, "another node serves");
    let stopped = || DeviceMessage::Stopped(b"[]".to_vec());
    is_lost_for(1, 0, stopped(), "another node serves");
    for (from, queue) in [(0, 0), (1, 1)] {
        is_lost_for(from, queue, DeviceMessage::Kick, "another node serves");
    }
}

/// With the shared memory as the data path, the disk's slice serves all queues.
#[test]
fn a_slice_that_serves_no_queue_reports_no_fault() {
    let rig = DiskRig::new(0, DataPath::Dsm, Duration::ZERO);
    let broken = DeviceMessage::Broken(b"no".to_vec());
    let taken = rig.slices[0]
        .remote_devices()
        .take(1, Address::new(0, 0), broken.clone());
    assert!(taken.is_err_and(|reason| reason.contains("other nodes serve")));
    rig.end();
    let rig = DiskRig::new(0, DataPath::Bypass, Duration::ZERO);
    let remote = rig.slices[0].remote_devices();
    assert_eq!(remote.take(1, Address::new(0, 0), broken), Ok(()));
    rig.end();
}
