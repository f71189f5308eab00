//! The network, against the other end of socket pairs.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::RawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use weft_guest_memory::DeviceMemory;

use super::transport::moved;
use super::{started, to_read, to_write};
use crate::VirtioDevice;
use crate::fake_driver::{Buffer, Driver, Machine};
use crate::net::{Link, Mac, Net, NetBackEnd, NetError, NetOptions, Stream, User};
use crate::ring::Segment;

const MAC: Mac = Mac([2, 0, 0, 0, 0, 1]);

/// The other end of a link.
pub struct Far(UnixStream);

impl Far {
    fn send(&mut self, frame: &[u8]) {
        let mut bytes = (frame.len() as u32).to_be_bytes().to_vec();
        bytes.extend(frame);
        self.0.write_all(&bytes).unwrap();
    }

    fn receive(&mut self) -> Vec<u8> {
        let mut length = [0; 4];
        self.0.read_exact(&mut length).unwrap();
        let mut frame = vec![0; u32::from_be_bytes(length) as usize];
        self.0.read_exact(&mut frame).unwrap();
        frame
    }

    /// Sends a whole frame, or a part of nothing.
    pub fn try_send(&mut self, frame: &[u8]) {
        self.0.set_nonblocking(true).unwrap();
        let mut bytes = (frame.len() as u32).to_be_bytes().to_vec();
        bytes.extend(frame);
        let mut sent = 0;
        while sent < bytes.len() {
            match self.0.write(&bytes[sent..]) {
                Ok(count) => sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock && sent > 0 => {
                    std::thread::sleep(Duration::from_micros(20));
                    // The device may be stopped: then the stream is of no use.
                    if self.drain() == 0 && sent > 0 {
                        return;
                    }
                }
                Err(_) => return,
            }
        }
    }

    /// Reads what is there.
    pub fn drain(&mut self) -> usize {
        let mut all = 0;
        let mut bytes = [0; 4096];
        while let Ok(count @ 1..) = self.0.read(&mut bytes) {
            all += count;
        }
        all
    }
}

/// A link and its other end.
fn link() -> (Stream, Far) {
    let (near, far) = UnixStream::pair().unwrap();
    far.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    (Stream::new(near).unwrap(), Far(far))
}

/// A network of this many queue pairs.
pub fn network(pairs: usize) -> (Net, Vec<Far>) {
    let (links, far): (Vec<_>, Vec<_>) = (0..pairs)
        .map(|_| {
            let (near, far) = link();
            (Box::new(near) as Box<dyn Link>, far)
        })
        .unzip();
    (Net::new(links, MAC, Some(9000), 0).unwrap(), far)
}

/// What a device did with a link.
#[derive(Default)]
struct Seen {
    /// How often a frame found too few buffers.
    short: AtomicU32,
    attached: AtomicBool,
}

/// A link that tells.
struct Telling(Stream, Arc<Seen>);

impl Link for Telling {
    fn descriptor(&self) -> RawFd {
        self.0.descriptor()
    }
    fn receive(&mut self, frame: &mut [u8]) -> std::io::Result<Option<usize>> {
        self.0.receive(frame)
    }
    fn read_ahead(&mut self) -> std::io::Result<()> {
        self.1.short.fetch_add(1, Ordering::Relaxed);
        self.0.read_ahead()
    }
    fn send(&mut self, memory: &DeviceMemory, frame: &[Segment]) -> std::io::Result<()> {
        self.0.send(memory, frame)
    }
    fn set_attached(&mut self, attached: bool) {
        self.1.attached.store(attached, Ordering::Relaxed);
    }
}

/// A network of links that tell.
fn telling(pairs: usize) -> (Net, Vec<Far>, Vec<Arc<Seen>>) {
    let (mut links, mut far, mut seen) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..pairs {
        let (near, other) = link();
        let told = Arc::new(Seen::default());
        links.push(Box::new(Telling(near, told.clone())) as Box<dyn Link>);
        far.push(other);
        seen.push(told);
    }
    (Net::new(links, MAC, None, 0).unwrap(), far, seen)
}

fn frame(length: usize, first: u8) -> Vec<u8> {
    (0..length)
        .map(|byte| (byte as u8).wrapping_add(first))
        .collect()
}

/// A header of zeroes and a frame, as a driver sends it.
fn outgoing(machine: &Machine, frame: &[u8]) -> Vec<Buffer> {
    let (first, rest) = frame.split_at(frame.len() / 2);
    let mut start = vec![0; 12];
    start.extend(first);
    vec![to_read(machine, &start), to_read(machine, rest)]
}

fn offer_room(driver: &mut Driver, machine: &Machine, queue: usize, length: usize) -> Buffer {
    let buffer = to_write(machine, length);
    let head = driver.chain(queue, &[buffer]);
    driver.offer(queue, head);
    driver.kick(queue);
    buffer
}

#[test]
fn a_network_that_has_come_announces_its_address() {
    let (mut net, mut far) = network(2);
    net.announce();
    // The length, and the shortest frame.
    assert_eq!(far[0].drain(), 4 + 60);
    assert_eq!(far[1].drain(), 0);
}

#[test]
fn frames_go_both_ways() {
    let (net, mut far) = network(1);
    let machine = Machine::new();
    let device = machine.attach(net).unwrap();
    let mut driver = started(&machine, device.slot());
    let mut configuration = [0; 12];
    driver.device(0, &mut configuration);
    assert_eq!(configuration[..6], MAC.0);
    assert_eq!(configuration[6..], [1, 0, 1, 0, 0x28, 0x23]);

    for length in [14, 60, 1514, 9014] {
        let sent = frame(length, 1);
        driver.request(1, &outgoing(&machine, &sent));
        assert!(far[0].receive() == sent, "{length}");
    }
    let room = offer_room(&mut driver, &machine, 0, 2000);
    let sent = frame(1000, 9);
    far[0].send(&sent);
    assert_eq!(driver.wait_used(0).1, 1012);
    let got = machine.bytes(room.address, 1012);
    assert_eq!(got[..12], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
    assert!(got[12..] == sent);
    assert!(machine.messages.wait(1), "no interrupt");
}

#[test]
fn a_large_frame_is_spread_over_buffers_all_at_once() {
    let (net, mut far) = network(1);
    let machine = Machine::new();
    let device = machine.attach(net).unwrap();
    let mut driver = started(&machine, device.slot());
    let sent = frame(5000, 3);
    far[0].send(&sent);
    // Too few buffers: none is used.
    let mut rooms = vec![offer_room(&mut driver, &machine, 0, 1536)];
    rooms.push(offer_room(&mut driver, &machine, 0, 1536));
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(driver.used(0), None);
    for _ in 0..3 {
        rooms.push(offer_room(&mut driver, &machine, 0, 1536));
    }
    let mut got = Vec::new();
    for room in &rooms[..4] {
        let (_, length) = driver.wait_used(0);
        got.extend(machine.bytes(room.address, length as usize));
    }
    assert_eq!(got[10..12], [4, 0]);
    assert!(got[12..] == sent);
    // The fifth is for the next frame.
    far[0].send(&frame(60, 0));
    assert_eq!(driver.wait_used(0).1, 72);
}

/// With and without FEATURE_EVENT_INDEX.
#[test]
fn a_frame_that_waits_for_buffers_keeps_nobody_busy() {
    for wanted in [u64::MAX, !(1 << 29)] {
        let (net, mut far, seen) = telling(1);
        let machine = Machine::new();
        let device = machine.attach(net).unwrap();
        let mut driver = Driver::find(&machine, device.slot());
        driver.start(wanted, 64);
        let mut rooms: Vec<_> = (0..3)
            .map(|_| offer_room(&mut driver, &machine, 0, 1536))
            .collect();
        let sent = frame(9000, 3);
        far[0].send(&sent);
        std::thread::sleep(Duration::from_millis(100));
        let looks = seen[0].short.load(Ordering::Relaxed);
        assert!((1..20).contains(&looks), "{looks} looks for buffers");
        // It hears of every buffer that comes.
        for _ in 0..3 {
            rooms.push(offer_room(&mut driver, &machine, 0, 1536));
        }
        let mut got = Vec::new();
        for room in &rooms {
            let (_, length) = driver.wait_used(0);
            got.extend(machine.bytes(room.address, length as usize));
        }
        assert!(got[12..] == sent);
    }
}

#[test]
fn a_reset_device_has_one_pair_again() {
    let (net, _far, seen) = telling(2);
    let machine = Machine::new();
    let device = machine.attach(net).unwrap();
    let mut driver = started(&machine, device.slot());
    let attached = |link: usize| seen[link].attached.load(Ordering::Relaxed);
    let until = |link: usize, wanted: bool| {
        let deadline = Instant::now() + Duration::from_secs(10);
        while attached(link) != wanted {
            assert!(Instant::now() < deadline, "link {link}: not {wanted}");
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    until(0, true);
    assert!(!attached(1));
    let answer = to_write(&machine, 1);
    let command = [
        to_read(&machine, &[4, 0]),
        to_read(&machine, &[2, 0]),
        answer,
    ];
    driver.request(4, &command);
    assert!(attached(1));
    driver.start(u64::MAX, 64);
    until(1, false);
    assert!(attached(0));
}

#[test]
fn a_network_without_its_drivers_features_is_not_restored_to() {
    const CHECKSUM: u64 = 1;
    let able = |offloads| Net::new(vec![Box::new(link().0)], MAC, None, offloads).unwrap();
    let machine = Machine::new();
    let device = machine.attach(able(CHECKSUM)).unwrap();
    let mut driver = Driver::find(&machine, device.slot());
    let wait = Duration::from_secs(5);
    for (features, fits) in [(u64::MAX, false), (!CHECKSUM, true)] {
        driver.start(features, 64);
        device.pause(wait).unwrap();
        let state = device.save().unwrap();
        let next = Machine::new();
        let fresh = next.attach(able(0)).unwrap();
        let restored = fresh.restore(&state);
        assert_eq!(restored.is_ok(), fits, "{restored:?}");
        let same = Machine::new();
        same.attach(able(CHECKSUM))
            .unwrap()
            .restore(&state)
            .unwrap();
        device.resume();
    }
}

#[test]
fn a_slow_other_end_loses_nothing() {
    let (net, mut far) = network(1);
    let machine = Machine::new();
    let device = machine.attach(net).unwrap();
    let mut driver = started(&machine, device.slot());
    let sent: Vec<_> = (0..20).map(|number| frame(60_000, number)).collect();
    for frame in &sent {
        let head = driver.chain(1, &outgoing(&machine, frame));
        driver.offer(1, head);
        driver.kick(1);
    }
    std::thread::sleep(Duration::from_millis(50));
    for frame in &sent {
        assert!(far[0].receive() == *frame);
    }
    for _ in &sent {
        driver.wait_used(1);
    }
}

#[test]
fn pairs_are_used_when_asked_for() {
    let (net, mut far) = network(2);
    let machine = Machine::new();
    let device = machine.attach(net).unwrap();
    let mut driver = started(&machine, device.slot());
    assert_eq!(driver.queues.len(), 5);
    let mut ask = |pairs: u8| {
        let answer = to_write(&machine, 1);
        let header = to_read(&machine, &[4, 0]);
        driver.request(4, &[header, to_read(&machine, &[pairs, 0]), answer]);
        machine.bytes(answer.address, 1)[0]
    };
    assert_eq!([ask(2), ask(0), ask(3)], [0, 1, 1]);
    let sent = frame(100, 5);
    driver.request(3, &outgoing(&machine, &sent));
    assert!(far[1].receive() == sent);
}

#[test]
fn a_network_that_goes_takes_the_link_down() {
    let (net, far) = network(1);
    let machine = Machine::new();
    let device = machine.attach(net).unwrap();
    let mut driver = started(&machine, device.slot());
    drop(far);
    assert!(machine.messages.wait(0), "no configuration interrupt");
    let mut status = [0; 2];
    driver.device(6, &mut status);
    assert_eq!(status, [0, 0]);
    // Frames go nowhere, and the device lives.
    driver.request(1, &outgoing(&machine, &frame(60, 0)));
    assert_eq!(driver.status() & 64, 0);
}

#[test]
fn a_switch_that_comes_back_puts_the_link_up() {
    let directory = std::env::temp_dir().join(format!("weft-card-{}", std::process::id()));
    // What a test that failed has left.
    let _ = std::fs::remove_dir_all(&directory);
    std::fs::create_dir_all(&directory).unwrap();
    let path = directory.join("switch");
    let options = NetOptions {
        mac: Some(MAC),
        ..NetOptions::new(NetBackEnd::Switch { path: path.clone() })
    };
    let error = Net::open(&options).err().unwrap().to_string();
    assert!(error.contains("start `weft switch`"), "{error}");
    let switch = UnixListener::bind(&path).unwrap();
    let net = Net::open(&options).unwrap();
    let mut far = Far(switch.accept().unwrap().0);
    let machine = Machine::new();
    let device = machine.attach(net).unwrap();
    let mut driver = started(&machine, device.slot());
    driver.request(1, &outgoing(&machine, &frame(60, 0)));
    assert!(far.receive() == frame(60, 0));
    let is_up = |driver: &Driver<'_>, wanted: u8| {
        let deadline = Instant::now() + Duration::from_secs(10);
        let mut status = [0; 2];
        while Instant::now() < deadline {
            driver.device(6, &mut status);
            if status == [wanted, 0] {
                return true;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        false
    };
    let card = || {
        let mut files = std::fs::read_dir(&directory).unwrap();
        let found = files.find_map(|file| {
            let path = file.unwrap().path();
            path.extension().is_some().then_some(path)
        });
        found.unwrap()
    };
    for round in 0..3 {
        drop(far);
        assert!(is_up(&driver, 0), "round {round}: the link stays up");
        // Frames go nowhere, and the device lives.
        driver.request(1, &outgoing(&machine, &frame(60, 1)));
        // One that calls and ends at once does no harm.
        drop(UnixStream::connect(card()).unwrap());
        let called = UnixStream::connect(card()).unwrap();
        called
            .set_read_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        far = Far(called);
        // It hears first where the card is.
        let announcement = far.receive();
        assert_eq!(announcement[6..14], [2, 0, 0, 0, 0, 1, 0x80, 0x35]);
        assert!(is_up(&driver, 1), "round {round}: the link stays down");
        driver.request(1, &outgoing(&machine, &frame(60, 2)));
        assert!(far.receive() == frame(60, 2));
        let room = offer_room(&mut driver, &machine, 0, 2000);
        far.send(&frame(60, 3));
        driver.wait_used(0);
        assert!(machine.bytes(room.address + 12, 60) == frame(60, 3));
    }
    std::fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn a_network_moves_with_its_state() {
    let (net, mut far) = network(1);
    let machine = Machine::new();
    let device = machine.attach(net).unwrap();
    let mut driver = started(&machine, device.slot());
    driver.request(1, &outgoing(&machine, &frame(60, 0)));
    far[0].receive();
    let room = offer_room(&mut driver, &machine, 0, 2000);
    let (fresh, mut far) = network(1);
    let next = moved(&machine, &device, fresh);
    let mut driver = next.driver(driver.queues);
    far[0].send(&frame(60, 1));
    driver.wait_used(0);
    assert!(next.machine.bytes(room.address + 12, 60) == frame(60, 1));
    driver.request(1, &outgoing(&next.machine, &frame(60, 2)));
    assert!(far[0].receive() == frame(60, 2));
}

#[test]
fn what_cannot_be_opened_is_named() {
    let tap = |name: &str| Net::open(&NetOptions::new(NetBackEnd::Tap { name: name.into() }));
    for wrong in ["", "a-name-that-is-too-long", "a/b", "a b"] {
        assert!(matches!(tap(wrong), Err(NetError::Name(_))), "{wrong}");
    }
    let user = User {
        program: "/nonexistent".into(),
        ..User::default()
    };
    let options = NetOptions::new(NetBackEnd::User(user));
    assert!(matches!(
        Net::open(&options),
        Err(NetError::NoProgram { .. })
    ));
    let many = NetOptions {
        pairs: 9,
        ..options
    };
    assert!(matches!(Net::open(&many), Err(NetError::Pairs(9))));
}
