//! The console.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use weft_confine::lock;

use super::transport::moved;
use super::{started, to_read, to_write};
use crate::console::{Console, ConsoleOutput, INPUT_MAX};
use crate::fake_driver::Machine;

#[derive(Clone, Default)]
pub struct Screen(Arc<Mutex<Vec<u8>>>);

impl ConsoleOutput for Screen {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // A little at a time.
        let count = bytes.len().min(1000);
        lock(&self.0).extend(&bytes[..count]);
        Ok(count)
    }
}

/// The end of a pipe that does not block.
struct Pipe(File);

impl ConsoleOutput for Pipe {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        io::Write::write(&mut self.0, bytes)
    }
    fn descriptor(&self) -> Option<RawFd> {
        Some(self.0.as_raw_fd())
    }
}

#[test]
fn bytes_go_both_ways() {
    let screen = Screen::default();
    let (console, outside) = Console::new(Box::new(screen.clone())).unwrap();
    let machine = Machine::new();
    let device = machine.attach(console).unwrap();
    let mut driver = started(&machine, device.slot());
    let text: Vec<u8> = (0..10_000_u32).map(|byte| byte as u8).collect();
    driver.request(
        1,
        &[
            to_read(&machine, &text[..9000]),
            to_read(&machine, &text[9000..]),
        ],
    );
    assert_eq!(*lock(&screen.0), text);

    let buffer = to_write(&machine, 64);
    let head = driver.chain(0, &[buffer]);
    driver.offer(0, head);
    driver.kick(0);
    assert_eq!(outside.input(b"hello"), 5);
    assert_eq!(driver.wait_used(0), (head.into(), 5));
    assert_eq!(machine.bytes(buffer.address, 5), b"hello");
    assert!(machine.messages.wait(1));
}

#[test]
fn input_is_bounded_and_waits() {
    let (console, outside) = Console::new(Box::new(Screen::default())).unwrap();
    let machine = Machine::new();
    let device = machine.attach(console).unwrap();
    assert_eq!(outside.input(&vec![b'x'; INPUT_MAX - 1]), INPUT_MAX - 1);
    assert_eq!(outside.input(b"ab"), 1);
    assert_eq!(outside.input(b"c"), 0);
    let mut driver = started(&machine, device.slot());
    assert_eq!(driver.request(0, &[to_write(&machine, 100)]), 100);
    assert_eq!(outside.input(b"c"), 1);
}

#[test]
fn a_new_size_is_told() {
    let (console, outside) = Console::new(Box::new(Screen::default())).unwrap();
    let machine = Machine::new();
    let device = machine.attach(console).unwrap();
    let driver = started(&machine, device.slot());
    let generation = driver.common(0x15, 1);
    outside.resize(132, 50);
    assert!(machine.messages.wait(0), "no configuration interrupt");
    assert_ne!(driver.common(0x15, 1), generation);
    let mut size = [0; 4];
    driver.device(0, &mut size);
    assert_eq!(size, [132, 0, 50, 0]);
}

#[test]
fn output_that_nobody_takes_waits_and_moves_with_the_device() {
    // SAFETY: the array holds two descriptors.
    let (reader, writer) = unsafe {
        let mut ends = [0; 2];
        assert_eq!(libc::pipe2(ends.as_mut_ptr(), libc::O_NONBLOCK), 0);
        use std::os::fd::FromRawFd;
        (File::from_raw_fd(ends[0]), File::from_raw_fd(ends[1]))
    };
    let output = || Box::new(Pipe(writer.try_clone().unwrap()));
    let (console, outside) = Console::new(output()).unwrap();
    let machine = Machine::new();
    let device = machine.attach(console).unwrap();
    let mut driver = started(&machine, device.slot());
    let text: Vec<u8> = (0..200_000_u32).map(|byte| (byte / 3) as u8).collect();
    let head = driver.chain(1, &[to_read(&machine, &text)]);
    driver.offer(1, head);
    driver.kick(1);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(driver.used(1), None, "the pipe is smaller than that");
    outside.input(b"typed");

    let (fresh, _) = Console::new(output()).unwrap();
    let next = moved(&machine, &device, fresh);
    let mut driver = next.driver(driver.queues);
    let mut seen: Vec<u8> = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(10);
    while seen.len() < text.len() {
        assert!(Instant::now() < deadline);
        let mut piece = [0; 4096];
        match io::Read::read(&mut &reader, &mut piece) {
            Ok(count) => seen.extend(&piece[..count]),
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    assert_eq!(seen, text);
    assert_eq!(driver.wait_used(1).0, u32::from(head));
    let buffer = to_write(&next.machine, 16);
    assert_eq!(driver.request(0, &[buffer]), 5);
    assert_eq!(next.machine.bytes(buffer.address, 5), b"typed");
}
