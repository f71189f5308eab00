//! Disks against temporary files.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use super::transport::moved;
use super::{started, to_read, to_write};
use crate::VirtioDevice;
use crate::block::{Block, BlockError, BlockOptions};
use crate::fake_driver::{Buffer, Driver, Machine};

const SECTORS: u64 = 2048;

/// A file that goes when the test ends.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("weft-block-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let file = File::create(&path).unwrap();
        file.set_len(SECTORS * 512).unwrap();
        Self(path)
    }

    pub fn options(&self) -> BlockOptions {
        BlockOptions::new(&self.0)
    }

    fn bytes(&self, sector: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        let file = File::open(&self.0).unwrap();
        file.read_exact_at(&mut bytes, sector * 512).unwrap();
        bytes
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn header(machine: &Machine, kind: u32, sector: u64) -> Buffer {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&kind.to_le_bytes());
    bytes[8..].copy_from_slice(&sector.to_le_bytes());
    to_read(machine, &bytes)
}

/// One request; its status.
fn ask(driver: &mut Driver, machine: &Machine, kind: u32, sector: u64, data: &[Buffer]) -> u8 {
    let status = Buffer {
        address: machine.buffer(&[0xee]),
        ..to_write(machine, 1)
    };
    let mut chain = vec![header(machine, kind, sector)];
    chain.extend(data);
    chain.push(status);
    driver.request(0, &chain);
    machine.bytes(status.address, 1)[0]
}

fn write(driver: &mut Driver, machine: &Machine, sector: u64, bytes: &[u8]) -> u8 {
    ask(driver, machine, 1, sector, &[to_read(machine, bytes)])
}

fn read(driver: &mut Driver, machine: &Machine, sector: u64, length: usize) -> (u8, Vec<u8>) {
    let data = to_write(machine, length);
    let status = ask(driver, machine, 0, sector, &[data]);
    (status, machine.bytes(data.address, length))
}

fn range(machine: &Machine, sector: u64, sectors: u32, flags: u32) -> Buffer {
    let mut bytes = sector.to_le_bytes().to_vec();
    bytes.extend(sectors.to_le_bytes());
    bytes.extend(flags.to_le_bytes());
    to_read(machine, &bytes)
}

fn every_request(options: &BlockOptions, scratch: &Scratch) {
    let machine = Machine::new();
    let device = machine.attach(Block::open(options).unwrap()).unwrap();
    let mut driver = started(&machine, device.slot());
    let mut capacity = [0; 8];
    driver.device(0, &mut capacity);
    assert_eq!(u64::from_le_bytes(capacity), SECTORS);

    let pattern: Vec<u8> = (0..8192_u32).map(|byte| (byte * 7) as u8).collect();
    assert_eq!(write(&mut driver, &machine, 8, &pattern), 0);
    assert_eq!(ask(&mut driver, &machine, 4, 0, &[]), 0, "flush");
    assert_eq!(scratch.bytes(8, 8192), pattern);
    assert_eq!(read(&mut driver, &machine, 8, 8192), (0, pattern.clone()));
    assert!(machine.messages.wait(1), "no interrupt");

    // The data in pieces, header and status in one buffer each with them.
    let pieces = [to_write(&machine, 512), to_write(&machine, 1536)];
    assert_eq!(ask(&mut driver, &machine, 0, 8, &pieces), 0);
    assert_eq!(machine.bytes(pieces[1].address, 1536), pattern[512..2048]);

    // Past the end, half a sector, nothing, and what nobody knows.
    assert_eq!(read(&mut driver, &machine, SECTORS, 512).0, 1);
    assert_eq!(read(&mut driver, &machine, SECTORS - 1, 1024).0, 1);
    assert_eq!(read(&mut driver, &machine, u64::MAX, 512).0, 1);
    assert_eq!(read(&mut driver, &machine, 0, 100).0, 1);
    assert_eq!(ask(&mut driver, &machine, 0, 0, &[]), 1);
    assert_eq!(ask(&mut driver, &machine, 77, 0, &[]), 2);

    let id = to_write(&machine, 20);
    assert_eq!(ask(&mut driver, &machine, 8, 0, &[id]), 0);
    assert!(machine.bytes(id.address, 20).starts_with(b"weft-block-"));

    let zeroed = range(&machine, 8, 8, 0);
    assert_eq!(ask(&mut driver, &machine, 13, 0, &[zeroed]), 0);
    assert_eq!(scratch.bytes(8, 4096), [0; 4096]);
    let discarded = range(&machine, 16, 8, 0);
    assert_eq!(ask(&mut driver, &machine, 11, 0, &[discarded]), 0);
    let outside = range(&machine, SECTORS, 1, 1);
    assert_eq!(ask(&mut driver, &machine, 13, 0, &[outside]), 1);
    let flags = range(&machine, 0, 1, 2);
    assert_eq!(ask(&mut driver, &machine, 13, 0, &[flags]), 2);
    assert_eq!(driver.status() & 64, 0);
}

#[test]
fn requests_through_io_uring() {
    let scratch = Scratch::new();
    every_request(&scratch.options(), &scratch);
}

#[test]
fn requests_without_io_uring() {
    let scratch = Scratch::new();
    let options = BlockOptions {
        io_uring: false,
        ..scratch.options()
    };
    every_request(&options, &scratch);
}

/// Dirty pages of a file, where the kernel tells (cachestat, Linux 6.5).
fn dirty_pages(path: &PathBuf) -> Option<u64> {
    const CACHESTAT: i64 = 451;
    let file = File::open(path).unwrap();
    let range = [0_u64; 2];
    // Pages that are cached, dirty, and others.
    let mut pages = [0_u64; 5];
    // SAFETY: both arrays are as long as the structures that the kernel reads and
    // fills.
    let asked = unsafe {
        libc::syscall(
            CACHESTAT,
            std::os::fd::AsRawFd::as_raw_fd(&file),
            range.as_ptr(),
            pages.as_mut_ptr(),
            0,
        )
    };
    (asked == 0).then_some(pages[1])
}

#[test]
fn writes_of_a_driver_that_cannot_flush_are_durable_at_once() {
    const FLUSH: u64 = 1 << 9;
    let scratch = Scratch::new();
    for io_uring in [true, false] {
        let options = BlockOptions {
            io_uring,
            ..scratch.options()
        };
        let machine = Machine::new();
        let device = machine.attach(Block::open(&options).unwrap()).unwrap();
        let mut driver = Driver::find(&machine, device.slot());
        driver.start(u64::MAX, 64);
        assert_eq!(write(&mut driver, &machine, 8, &[1; 8192]), 0);
        if dirty_pages(&scratch.0).is_none_or(|pages| pages == 0) {
            eprintln!("skipped: what is not durable does not show here");
            return;
        }
        assert_eq!(ask(&mut driver, &machine, 4, 0, &[]), 0);
        assert_eq!(dirty_pages(&scratch.0), Some(0));
        driver.start(!FLUSH, 64);
        assert_eq!(write(&mut driver, &machine, 8, &[2; 8192]), 0);
        assert_eq!(dirty_pages(&scratch.0), Some(0), "io_uring: {io_uring}");
        assert_eq!(scratch.bytes(8, 8192), [2; 8192]);
        let zeroed = range(&machine, 9, 1, 0);
        assert_eq!(ask(&mut driver, &machine, 13, 0, &[zeroed]), 0);
        assert_eq!(dirty_pages(&scratch.0), Some(0), "io_uring: {io_uring}");
    }
}

#[test]
fn direct_io_takes_any_buffer() {
    let scratch = Scratch::new();
    let options = BlockOptions {
        direct: true,
        ..scratch.options()
    };
    let block = match Block::open(&options) {
        Ok(block) => block,
        Err(BlockError::Open { source, .. }) if source.raw_os_error() == Some(libc::EINVAL) => {
            weft_test_support::skipped(&"the temporary folder has no direct I/O");
            return;
        }
        Err(error) => panic!("{error}"),
    };
    let machine = Machine::new();
    let device = machine.attach(block).unwrap();
    let mut driver = started(&machine, device.slot());
    let mut size = [0; 4];
    driver.device(20, &mut size);
    let size = u32::from_le_bytes(size) as usize;
    let pattern: Vec<u8> = (0..2 * size as u32).map(|byte| (byte * 5) as u8).collect();
    assert_eq!(write(&mut driver, &machine, 0, &pattern), 0);
    // Buffers at odd addresses.
    let room = machine.buffer(&vec![0; 4 * size]);
    let odd = |address, length| Buffer {
        address,
        length,
        writable: true,
    };
    let pieces = [odd(room + 3, 7), odd(room + 1001, 2 * size as u32 - 7)];
    assert_eq!(ask(&mut driver, &machine, 0, 0, &pieces), 0);
    assert_eq!(machine.bytes(room + 3, 7), pattern[..7]);
    assert!(machine.bytes(room + 1001, 2 * size - 7) == pattern[7..]);
}

#[test]
fn a_read_only_disk_refuses_writes() {
    let scratch = Scratch::new();
    let options = BlockOptions {
        read_only: true,
        ..scratch.options()
    };
    let machine = Machine::new();
    let device = machine.attach(Block::open(&options).unwrap()).unwrap();
    let mut driver = started(&machine, device.slot());
    assert_ne!(driver.offered() & 1 << 5, 0);
    assert_eq!(write(&mut driver, &machine, 0, &[1; 512]), 1);
    assert_eq!(scratch.bytes(0, 512), [0; 512]);
    assert_eq!(read(&mut driver, &machine, 0, 512).0, 0);
}

#[test]
fn a_disk_has_one_writer_or_many_readers() {
    let scratch = Scratch::new();
    let reader = BlockOptions {
        read_only: true,
        ..scratch.options()
    };
    let in_use = |options: &BlockOptions| matches!(Block::open(options), Err(BlockError::InUse(_)));
    let writer = Block::open(&scratch.options()).unwrap();
    assert!(in_use(&scratch.options()));
    assert!(in_use(&reader));
    drop(writer);
    let readers = [Block::open(&reader).unwrap(), Block::open(&reader).unwrap()];
    assert!(in_use(&scratch.options()));
    drop(readers);
    Block::open(&scratch.options()).unwrap();
}

#[test]
fn a_disk_goes_to_another_process_with_its_lock() {
    let scratch = Scratch::new();
    let elsewhere = BlockOptions {
        locked_elsewhere: true,
        ..scratch.options()
    };
    // Nobody has it: it is another file than the machine's.
    let opened = Block::open(&elsewhere);
    assert!(matches!(opened, Err(BlockError::NotShared(_))));
    let mut old = Block::open(&scratch.options()).unwrap();
    let mut new = Block::open(&elsewhere).unwrap();
    let refused = new.claim_backing().unwrap_err();
    assert!(refused.contains("in use"), "{refused}");
    old.release_backing();
    new.claim_backing().unwrap();
    assert!(old.claim_backing().is_err());
    // What is left of the old one does not unlock it.
    drop(old);
    assert!(matches!(
        Block::open(&scratch.options()),
        Err(BlockError::InUse(_))
    ));
    drop(new);
    let mut back = Block::open(&scratch.options()).unwrap();
    back.release_backing();
    back.claim_backing().unwrap();
}

#[test]
fn what_is_no_disk_is_named() {
    let open = |path: &str| Block::open(&BlockOptions::new(path)).err().unwrap();
    assert!(matches!(open("/nonexistent"), BlockError::Open { .. }));
    assert!(matches!(open("/dev/zero"), BlockError::Kind(_)));
    let folder = BlockOptions {
        read_only: true,
        ..BlockOptions::new(std::env::temp_dir())
    };
    assert!(matches!(Block::open(&folder), Err(BlockError::Kind(_))));
    let scratch = Scratch::new();
    File::create(&scratch.0).unwrap();
    assert!(matches!(
        Block::open(&scratch.options()),
        Err(BlockError::Empty(_))
    ));
}

#[test]
fn many_requests_on_many_queues_across_a_restore() {
    let scratch = Scratch::new();
    let options = BlockOptions {
        queues: 4,
        ..scratch.options()
    };
    let machine = Machine::new();
    let device = machine.attach(Block::open(&options).unwrap()).unwrap();
    let mut driver = started(&machine, device.slot());
    let offer = |driver: &mut Driver, machine: &Machine, sector: u64| {
        let queue = sector as usize % 4;
        let status = Buffer {
            address: machine.buffer(&[0xee]),
            ..to_write(machine, 1)
        };
        let data = to_read(machine, &[sector as u8 | 1; 512]);
        let head = driver.chain(queue, &[header(machine, 1, sector), data, status]);
        driver.offer(queue, head);
        driver.kick(queue);
        status.address
    };
    let mut statuses: Vec<u64> = (0..40).map(|at| offer(&mut driver, &machine, at)).collect();
    // What is in flight ends before, what was not seen comes after.
    device.pause(std::time::Duration::from_secs(5)).unwrap();
    statuses.extend((40..60).map(|at| offer(&mut driver, &machine, at)));
    let queues = driver.queues.clone();
    let text = serde_json::to_string(&device.save().unwrap()).unwrap();
    // The disk must be free for the next.
    device.detach(std::time::Duration::from_secs(5)).unwrap();
    assert!(device.save().is_none());
    drop(driver);
    drop(device);
    let next = machine.successor();
    drop(machine);
    let device = next.attach(Block::open(&options).unwrap()).unwrap();
    device
        .restore(&serde_json::from_str(&text).unwrap())
        .unwrap();
    device.resume();
    let mut driver = Driver::find(&next, device.slot());
    driver.adopt(queues);
    for at in 0..60 {
        driver.wait_used(at % 4);
    }
    for (sector, status) in (0_u64..).zip(statuses) {
        assert_eq!(next.bytes(status, 1), [0], "sector {sector}");
        assert_eq!(scratch.bytes(sector, 512), [sector as u8 | 1; 512]);
    }
}

#[test]
fn another_disk_is_not_restored_to() {
    let scratch = Scratch::new();
    let machine = Machine::new();
    let block = Block::open(&scratch.options()).unwrap();
    let device = machine.attach(block).unwrap();
    device.pause(std::time::Duration::from_secs(5)).unwrap();
    let state = device.save().unwrap();
    let other = Scratch::new();
    File::options()
        .write(true)
        .open(&other.0)
        .unwrap()
        .set_len(1 << 19)
        .unwrap();
    let next = Machine::new();
    let fresh = Block::open(&other.options()).unwrap();
    let fresh = next.attach(fresh).unwrap();
    assert!(fresh.restore(&state).is_err());
}

#[test]
fn a_device_moves_with_its_state() {
    let scratch = Scratch::new();
    let read_only = BlockOptions {
        read_only: true,
        ..scratch.options()
    };
    let machine = Machine::new();
    let device = machine.attach(Block::open(&read_only).unwrap()).unwrap();
    let mut driver = started(&machine, device.slot());
    assert_eq!(read(&mut driver, &machine, 1, 512).0, 0);
    let next = moved(&machine, &device, Block::open(&read_only).unwrap());
    let mut driver = next.driver(driver.queues);
    assert_eq!(read(&mut driver, &next.machine, 1, 512).0, 0);
}

/// Reads that the disk's interrupt ends, not the submission.
#[test]
fn reads_that_are_not_in_the_page_cache() {
    let scratch = Scratch::new();
    let machine = Machine::new();
    let device = machine
        .attach(Block::open(&scratch.options()).unwrap())
        .unwrap();
    let mut driver = started(&machine, device.slot());
    for round in 1..20_u8 {
        let file = File::options().write(true).open(&scratch.0).unwrap();
        file.write_all_at(&vec![round; 1 << 20], 0).unwrap();
        file.sync_all().unwrap();
        let descriptor = std::os::fd::AsRawFd::as_raw_fd(&file);
        // SAFETY: no memory is involved.
        unsafe { libc::posix_fadvise(descriptor, 0, 0, libc::POSIX_FADV_DONTNEED) };
        for sector in [0, 512, 1024] {
            let (status, bytes) = read(&mut driver, &machine, sector, 64 << 10);
            assert_eq!(status, 0);
            assert!(bytes == vec![round; 64 << 10]);
        }
    }
}
