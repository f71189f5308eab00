//! Networks whose pairs of queues two slices serve.

use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixDatagram;
use std::time::Instant;

use weft_platform::interrupts::Locations;
use weft_virtio::net;
use weft_virtio::net::{Link, Mac, Net, Usage};
use weft_virtio::ring::{Segment, copy_out, total};

use super::*;
use crate::devices::DataPath;
use crate::remote_devices::net::{BATCH_MAX, Switch, window};

const HEADER: usize = 12;
/// Where the headers of frames say that they leave the checksum to the other side.
const NEEDS_CHECKSUM: u8 = 1;
const CONTROL: usize = 4;
const STATUS: u64 = 6;

/// A cable over which headers travel, too, as with a tap device.
pub(crate) struct Cable(pub UnixDatagram);

impl Link for Cable {
    fn descriptor(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    fn receive(&mut self, frame: &mut [u8]) -> io::Result<Option<usize>> {
        match self.0.recv(frame) {
            Ok(length) => Ok(Some(length)),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn send(&mut self, memory: &DeviceMemory, frame: &[Segment]) -> io::Result<()> {
        let mut bytes = vec![0; total(frame) as usize];
        copy_out(memory, frame, 0, &mut bytes);
        self.send_bytes(&bytes)
    }

    fn send_bytes(&mut self, frame: &[u8]) -> io::Result<()> {
        self.0.send(frame).map(drop)
    }
}

/// Two slices with a network of two pairs; the cable's other end.
fn rig(owner: usize, delay: Duration) -> (Rig, UnixDatagram) {
    let (rig, far, _) = rig_with_plug(owner, delay);
    (rig, far)
}

/// The same, and the near end, with which the cable can be pulled.
fn rig_with_plug(owner: usize, delay: Duration) -> (Rig, UnixDatagram, UnixDatagram) {
    let (near, far) = UnixDatagram::pair().unwrap();
    near.set_nonblocking(true).unwrap();
    far.set_read_timeout(Some(PATIENCE)).unwrap();
    let placement = QueuePlacement::new(&Locations::new([1, 1]), owner, DataPath::Bypass, 2, 2);
    let links = (0..2).map(|_| Box::new(Cable(near.try_clone().unwrap())) as Box<dyn Link>);
    let whole = Net::new(links.collect(), Mac([2, 0, 0, 0, 0, 1]), None, u64::MAX).unwrap();
    let description = whole.describe();
    let plug = near.try_clone().unwrap();
    let mut near = Some(near);
    let rig = Rig::new(owner, delay, &mut |slice| {
        let remote = slice.remote_devices().clone();
        remote.add_placement(0, "network 0".into(), &placement);
        let here = (slice.number() == owner).then(|| near.take().unwrap());
        let link = here.map(|near| Box::new(Cable(near)) as Box<dyn Link>);
        let links = remote.links(0, &placement, link, window(20));
        let user = remote.clone();
        let user = slice.is_primary().then(|| {
            let tell = move |usage| user.use_network(0, usage);
            Box::new(tell) as net::Use
        });
        let net = Net::with_links(&description, links.unwrap(), user);
        remote.add_configuration(0, net.configuration());
        (placement.clone(), Box::new(net))
    });
    (rig, far, plug)
}

/// A frame of TCP, its header first, with `length` bytes of content.
fn frame(from: u16, to: u16, length: usize, seed: u8) -> Vec<u8> {
    let mut frame = vec![0; HEADER];
    frame[0] = NEEDS_CHECKSUM;
    frame.extend([0; 12]);
    frame.extend([8, 0]);
    let mut packet = [0; 20];
    (packet[0], packet[9]) = (0x45, 6);
    frame.extend(packet);
    frame.extend(from.to_be_bytes());
    frame.extend(to.to_be_bytes());
    let content = (0..length).map(|byte| (byte as u8).wrapping_mul(7) ^ seed);
    frame.extend(content);
    frame
}

/// Offers a frame on the pair of `slice`.
fn offer(rig: &Rig, driver: &mut Driver<'_>, slice: usize, frame: &[u8]) {
    let machine = &rig.machines[slice];
    let (first, rest) = frame.split_at(HEADER + 3);
    let chain = [buffer(machine, first, false), buffer(machine, rest, false)];
    let queue = 2 * slice + 1;
    let head = driver.chain(queue, &chain);
    driver.offer(queue, head);
    driver.kick(queue);
}

/// Offers room for a frame.
fn room(rig: &Rig, driver: &mut Driver<'_>, slice: usize, length: usize) -> Buffer {
    let room = buffer(&rig.machines[slice], &vec![0; length], true);
    let head = driver.chain(2 * slice, &[room]);
    driver.offer(2 * slice, head);
    driver.kick(2 * slice);
    room
}

fn received(far: &UnixDatagram) -> Vec<u8> {
    let mut frame = vec![0; 100_000];
    let length = far.recv(&mut frame).unwrap();
    frame.truncate(length);
    frame
}

/// Has the driver use both pairs.
fn use_both(rig: &Rig, driver: &mut Driver<'_>) {
    let machine = &rig.machines[0];
    let answer = buffer(machine, &[9], true);
    let command = [
        buffer(machine, &[4, 0], false),
        buffer(machine, &[2, 0], false),
        answer,
    ];
    driver.request(CONTROL, &command);
    assert_eq!(machine.bytes(answer.address, 1), [0]);
}

/// Frames of one flow out and in on the pair of `slice`.
fn there_and_back(rig: &Rig, far: &UnixDatagram, driver: &mut Driver<'_>, slice: usize) {
    let port = 5000 + slice as u16;
    for length in [1, 1400, 60_000] {
        let sent = frame(port, 80, length, slice as u8);
        offer(rig, driver, slice, &sent);
        driver.wait_used(2 * slice + 1);
        assert!(received(far) == sent, "{length}");
        let room = room(rig, driver, slice, 70_000);
        let mut answer = frame(80, port, length, !slice as u8);
        driver.rearm(2 * slice);
        far.send(&answer).unwrap();
        assert_eq!(driver.wait_used(2 * slice).1 as usize, answer.len());
        // Over how many buffers it went.
        answer[10] = 1;
        let bytes = rig.machines[slice].bytes(room.address, answer.len());
        assert!(bytes == answer, "{length}");
    }
    let sink = match slice {
        0 => &rig.machines[0].messages,
        _ => &rig.far,
    };
    // The vector of a queue is its number and one.
    assert!(sink.wait(2 * slice + 1), "no interrupt on slice {slice}");
}

#[test]
fn frames_go_both_ways_wherever_the_network_is() {
    for owner in [0, 1] {
        for delay in [Duration::ZERO, Duration::from_millis(2)] {
            let (rig, far) = rig(owner, delay);
            let (mut driver, queues) = rig.started();
            let mut other = rig.other(queues);
            there_and_back(&rig, &far, &mut driver, 0);
            use_both(&rig, &mut driver);
            for _ in 0..3 {
                there_and_back(&rig, &far, &mut other, 1);
                there_and_back(&rig, &far, &mut driver, 0);
            }
            drop((driver, other));
            rig.end();
        }
    }
}

/// A cable that takes nothing for a while: what was transmitted waits, also with the
/// driver, and comes out whole and in order.
#[test]
fn a_cable_that_is_full_loses_nothing() {
    /// As many as a queue of 64 has entries for, two each.
    const FRAMES: u8 = 30;
    for (owner, slice) in [(0, 1), (1, 0), (0, 0)] {
        let (rig, far) = rig(owner, Duration::ZERO);
        let (mut driver, queues) = rig.started();
        use_both(&rig, &mut driver);
        let mut other = rig.other(queues);
        let user = if slice == 0 { &mut driver } else { &mut other };
        for seed in 0..FRAMES {
            offer(&rig, user, slice, &frame(1, 2, 50_000, seed));
        }
        std::thread::sleep(Duration::from_millis(100));
        for seed in 0..FRAMES {
            assert!(received(&far) == frame(1, 2, 50_000, seed), "{seed}");
        }
        for _ in 0..FRAMES {
            user.wait_used(2 * slice + 1);
        }
        drop((driver, other));
        rig.end();
    }
}

/// Pauses with frames under way, both ways.
#[test]
fn a_pause_loses_nothing_and_a_reset_ends_all() {
    let (rig, far) = rig(0, Duration::from_micros(200));
    for _ in 0..3 {
        let (mut driver, queues) = rig.started();
        use_both(&rig, &mut driver);
        let mut other = rig.other(queues);
        for round in 0..20_u8 {
            let sent = frame(1, 2, 4000, round);
            offer(&rig, &mut other, 1, &sent);
            rig.transport.pause(PATIENCE).unwrap();
            rig.transport.resume();
            other.wait_used(3);
            assert!(received(&far) == sent);
            let answer = frame(2, 1, 4000, round);
            let mut place = room(&rig, &mut other, 1, 5000);
            far.send(&answer).unwrap();
            rig.transport.pause(PATIENCE).unwrap();
            rig.transport.resume();
            // Before it may come what was on its way when the driver reset.
            loop {
                other.wait_used(2);
                let bytes = rig.machines[1].bytes(place.address, answer.len());
                if bytes[HEADER..] == answer[HEADER..] {
                    break;
                }
                assert_eq!(round, 0);
                place = room(&rig, &mut other, 1, 5000);
            }
        }
        // On its way when the driver resets: it may reach the next one.
        far.send(&frame(2, 1, 4000, 255)).unwrap();
        driver.reset();
        // Nobody is there for these.
        for _ in 0..200 {
            far.send(&frame(2, 1, 1000, 0)).unwrap();
            std::thread::sleep(Duration::from_micros(50));
        }
    }
    rig.end();
}

/// A pair goes to the network's slice and back with frames under way: what was transmitted and
/// what was received comes out once and in order.
#[test]
fn frames_come_out_once_wherever_their_pair_goes() {
    let (rig, far) = rig(0, Duration::from_micros(200));
    let (mut driver, queues) = rig.started();
    use_both(&rig, &mut driver);
    let mut other = rig.other(queues);
    for round in 0..60_u8 {
        let to = usize::from(round % 2 == 1);
        let sent = [4000, 4001].map(|length| frame(1, 2, length, round));
        for sent in &sent {
            offer(&rig, &mut other, 1, sent);
        }
        // More than one batch for the guest, which has no room for them.
        let brought: Vec<_> = (0..4)
            .map(|number| frame(2, 1, 40_000 + number, round))
            .collect();
        for brought in &brought {
            far.send(brought).unwrap();
        }
        rig.move_queue(1, to);
        for sent in &sent {
            other.wait_used(3);
            assert!(received(&far) == *sent, "round {round}");
        }
        for brought in &brought {
            let place = room(&rig, &mut other, 1, 70_000);
            let (_, length) = other.wait_used(2);
            let bytes = rig.machines[1].bytes(place.address, length as usize);
            assert!(bytes[HEADER..] == brought[HEADER..], "round {round}");
        }
    }
    // Nothing of a window is lost for good: much more than one goes through.
    for round in 60..160_u8 {
        if round % 20 == 0 {
            rig.move_queue(1, usize::from(round % 40 == 0));
        }
        let answer = frame(2, 1, 60_000, round);
        let place = room(&rig, &mut other, 1, 70_000);
        far.send(&answer).unwrap();
        other.wait_used(2);
        let bytes = rig.machines[1].bytes(place.address, answer.len());
        assert!(bytes[HEADER..] == answer[HEADER..], "round {round}");
        let sent = frame(1, 2, 60_000, round);
        offer(&rig, &mut other, 1, &sent);
        other.wait_used(3);
        assert!(received(&far) == sent, "round {round}");
    }
    drop((driver, other));
    rig.end();
}

/// Wherever the cable is pulled, the driver is told.
#[test]
fn a_cable_that_is_out_is_seen() {
    for owner in [0, 1] {
        let (rig, _far, plug) = rig_with_plug(owner, Duration::ZERO);
        let (mut driver, queues) = rig.started();
        use_both(&rig, &mut driver);
        let mut status = [0; 2];
        driver.device(STATUS, &mut status);
        assert_eq!(status, [1, 0]);
        plug.shutdown(std::net::Shutdown::Both).unwrap();
        // What is transmitted now is lost, and given back.
        let mut other = rig.other(queues);
        for slice in [1, 0] {
            let driver = if slice == 0 { &mut driver } else { &mut other };
            offer(&rig, driver, slice, &frame(1, 2, 1000, 0));
            driver.wait_used(2 * slice + 1);
        }
        assert!(rig.machines[0].messages.wait(0), "the driver was not told");
        driver.device(STATUS, &mut status);
        assert_eq!(status, [0, 0]);
        drop((driver, other));
        rig.end();
    }
}

/// A pair with no room for frames holds up no other, and gets what it has room for.
/// A switch with one pair, which is served here, and the far end of its cable.
fn lone_switch() -> (std::sync::Arc<Switch>, UnixDatagram) {
    let (near, far) = UnixDatagram::pair().unwrap();
    near.set_nonblocking(true).unwrap();
    let gone = Box::new(|error: &io::Error| panic!("{error}"));
    let switch = Switch::new(Box::new(Cable(near)), vec![None], window(20), gone);
    (switch.unwrap(), far)
}

/// The machine goes to another process: what came before it ran there, too, waits.
#[test]
fn frames_go_along_with_the_machine() {
    let frames: Vec<Vec<u8>> = (0..5).map(|seed| frame(1, 2, 40, seed)).collect();
    let one_pair = Usage {
        features: 0,
        pairs: 1,
    };
    // As its thread does.
    let waiting = |switch: &Switch, port: &mut Box<dyn Link>| {
        switch.bring(&mut vec![0; 1 << 16]);
        port.waiting()
    };
    let (before, far) = lone_switch();
    let mut port = before.port(0);
    before.use_as(one_pair);
    far.send(&frames[0]).unwrap();
    far.send(&frames[1]).unwrap();
    assert_eq!(waiting(&before, &mut port), frames[..2]);
    // The pair stands: it gives back what it has taken.
    let mut taken = vec![0; frames[0].len()];
    assert_eq!(port.receive(&mut taken).unwrap(), Some(taken.len()));
    assert!(port.give_back(Some(&taken)));
    let along = port.waiting();
    assert_eq!(along, frames[..2]);

    let (after, far) = lone_switch();
    let mut port = after.port(0);
    far.send(&frames[2]).unwrap();
    assert!(waiting(&after, &mut port).is_empty(), "it is not used yet");
    far.send(&frames[3]).unwrap();
    // Others learn where it is now, before it runs.
    port.send_bytes(&frames[0]).unwrap();
    assert_eq!(received(&far), frames[0]);
    port.put_first(along);
    after.use_as(one_pair);
    far.send(&frames[4]).unwrap();
    assert_eq!(waiting(&after, &mut port), frames);
    after.use_as(Usage::default());
    far.send(&frames[0]).unwrap();
    assert!(waiting(&after, &mut port).is_empty(), "its driver is gone");
}

#[test]
fn a_pair_without_buffers_holds_up_no_other() {
    let (rig, far) = rig(0, Duration::ZERO);
    let (mut driver, queues) = rig.started();
    use_both(&rig, &mut driver);
    let mut other = rig.other(queues);
    for (driver, slice) in [(&mut driver, 0), (&mut other, 1)] {
        offer(&rig, driver, slice, &frame(slice as u16, 80, 100, 0));
        driver.wait_used(2 * slice + 1);
        received(&far);
    }
    // More than a window and a queue hold: some are lost.
    for _ in 0..200 {
        far.send(&frame(80, 1, 60_000, 1)).unwrap();
    }
    for seed in 0..10 {
        let room = room(&rig, &mut driver, 0, 2000);
        let sent = frame(80, 0, 1000, seed);
        far.send(&sent).unwrap();
        driver.wait_used(0);
        let bytes = rig.machines[0].bytes(room.address, sent.len());
        assert!(bytes[HEADER..] == sent[HEADER..]);
    }
    for _ in 0..50 {
        let room = room(&rig, &mut other, 1, 70_000);
        let (_, length) = other.wait_used(2);
        let bytes = rig.machines[1].bytes(room.address, length as usize);
        assert!(bytes[HEADER..] == frame(80, 1, 60_000, 1)[HEADER..]);
    }
    drop((driver, other));
    rig.end();
}

/// What a driver gets wrong on one slice stops the device where its registers are.
#[test]
fn a_fault_elsewhere_wants_a_reset() {
    let (rig, far) = rig(0, Duration::ZERO);
    let (mut driver, queues) = rig.started();
    use_both(&rig, &mut driver);
    let mut other = rig.other(queues);
    let head = other.chain(3, &[buffer(&rig.machines[1], &[0; 5], false)]);
    other.offer(3, head);
    other.kick(3);
    assert!(driver.wait_needs_reset());
    driver.reset();
    drop((driver, other));
    let (mut driver, queues) = rig.started();
    use_both(&rig, &mut driver);
    let mut other = rig.other(queues);
    there_and_back(&rig, &far, &mut other, 1);
    drop((driver, other));
    rig.end();
}

/// A slice that says what no slice would is broken, and is named with the reason.
#[test]
fn what_no_slice_says_ends_the_machine() {
    let batch = |lengths: &[usize]| {
        let mut bytes = Vec::new();
        for length in lengths {
            bytes.extend((*length as u32).to_le_bytes());
            bytes.resize(bytes.len() + length, 0);
        }
        DeviceMessage::Frames(bytes.into())
    };
    let usage = Usage::default();
    let (own, other) = (Address::new(0, 1), Address::new(0, 0));
    let too_long = batch(&[70_000]);
    let flood = vec![batch(&[60_000]); 100];
    // Who has the network, who says it, about which pair, what, and the reason.
    type Case = (
        usize,
        usize,
        Address,
        Vec<DeviceMessage<'static>>,
        &'static str,
    );
    let cases: Vec<Case> = vec![
        (0, 1, own, vec![too_long], "a frame of 70000 bytes"),
        (0, 1, own, vec![batch(&[])], "0 bytes of frames"),
        (
            0,
            1,
            own,
            vec![batch(&[BATCH_MAX])],
            "bytes of frames at once",
        ),
        (
            0,
            1,
            other,
            vec![batch(&[60])],
            "to a node without a queue pair",
        ),
        (
            0,
            1,
            own,
            vec![DeviceMessage::Frames(vec![1; 9].into())],
            "a partial frame",
        ),
        (
            0,
            1,
            own,
            vec![DeviceMessage::Taken { bytes: 1 }],
            "too many",
        ),
        (
            0,
            1,
            other,
            vec![DeviceMessage::Use(usage)],
            "sent a command",
        ),
        (
            0,
            1,
            other,
            vec![DeviceMessage::Configured(vec![0; 12])],
            "of another kind",
        ),
        (
            1,
            1,
            other,
            vec![DeviceMessage::Configured(vec![0; 3])],
            "of another kind",
        ),
        // Nobody has given the pair buffers.
        (1, 1, other, flood.clone(), "more frames than allowed"),
        (
            1,
            1,
            own,
            vec![batch(&[60])],
            "to a node without a queue pair",
        ),
        (
            1,
            0,
            own,
            vec![batch(&[60])],
            "to a node without a queue pair",
        ),
        (
            0,
            0,
            other,
            vec![DeviceMessage::Use(usage)],
            "a network that this node does not have",
        ),
        (0, 0, own, flood, "more frames than allowed"),
    ];
    for (owner, from, address, messages, reason) in cases {
        let (rig, _far) = rig(owner, Duration::ZERO);
        let remote = rig.slices[from].remote_devices();
        for message in messages {
            remote.send(1 - from, address, message);
        }
        let deadline = Instant::now() + PATIENCE;
        while rig.failures().is_empty() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        let said = rig.failures();
        let whole = format!("{said:?}, not {reason}");
        let first = said.first().unwrap_or(&whole);
        assert!(first.contains(reason), "{whole}");
        assert!(first.contains(&format!("lost node {from}")), "{whole}");
        for slice in &rig.slices {
            slice.close();
        }
    }
}
