//! What a slice of a machine hears from another: messages, commands, frames of networks.

use std::io;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex};

use crate::random::Random;
use weft_aggregate::Placement;
use weft_aggregate::commands::{SliceCommand, SliceReply};
use weft_aggregate::message::SliceMessage;
use weft_aggregate::remote_devices::net::{FrameQueue, FrameSender, RemotePort, Switch, window};
use weft_aggregate::{page_history, working_set};
use weft_guest_memory::DeviceMemory;
use weft_platform::interrupts::{
    InterruptLink, InterruptRouter, InterruptTopology, Locations, Message, VcpuLocation,
};
use weft_platform::role::RolePlace;
use weft_virtio::net::{FRAME_MAX, HEADER, Link};
use weft_virtio::ring::Segment;
use weft_wire::Header;
use weft_wire::frame::HEADER_BYTES;

/// Kinds of messages that there are, and some that there are not.
const KINDS: std::ops::Range<usize> = 128..177;
/// vCPUs of each slice of the machine of the locations.
const VCPUS: [u32; 3] = [1, 2, 1];

/// Headers of messages, most with fields that mean something; behind them, half of the
/// time, a table of vCPU locations like the router's, or nearly so.
pub fn valid_messages(random: &mut Random) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..1 + random.below(20) {
        let mut header = Header::new((KINDS.start + random.below(KINDS.len())) as u8);
        header.flags = random.below(5) as u8;
        header.count = random.below(10) as u16;
        header.words[0] = match random.below(2) {
            0 => random.below(4) as u64,
            _ => random.below(256) as u64,
        };
        header.words[1] = match random.below(4) {
            0 => random.next(),
            _ => random.below(4) as u64,
        };
        bytes.extend_from_slice(&header.encode());
    }
    if random.below(2) == 0 {
        let start = bytes.len();
        bytes.extend_from_slice(&Locations::new(VCPUS).to_bytes());
        if random.below(2) == 0 {
            let at = start + random.below(bytes.len() - start);
            bytes[at] ^= 1 << random.below(8);
        }
    }
    bytes
}

/// A message is refused, or encodes to the same frame again; so is a working set. A history of
/// pages is refused, or encodes to such.
pub fn message(input: &[u8]) {
    let (headers, rest) = input.as_chunks::<HEADER_BYTES>();
    for pages in [input, rest] {
        if let Ok(runs) = working_set::decode(pages) {
            assert_eq!(working_set::encode(&runs), pages);
        }
        if let Ok(runs) = page_history::decode(pages) {
            let again = page_history::encode(&runs);
            assert!(
                again
                    .iter()
                    .all(|bytes| page_history::decode(bytes).is_ok())
            );
        }
    }
    for bytes in headers {
        let Ok(header) = Header::decode(bytes) else {
            continue;
        };
        for payload in [&[][..], rest] {
            if let Ok(message) = SliceMessage::decode(&header, payload) {
                let (again, content) = message.encode();
                assert_eq!((again.kind, again.words), (header.kind, header.words));
                assert_eq!(content, payload);
            }
        }
    }
}

/// The interrupt router of a machine of three slices accepts what other slices send or says
/// why not; what it accepts is possible.
pub fn places(input: &[u8]) {
    let (headers, rest) = input.as_chunks::<HEADER_BYTES>();
    let locations = Arc::new(Locations::new(VCPUS));
    let _ = locations.compare(rest);
    let interrupts = InterruptRouter::of_slice(
        4,
        Some(InterruptTopology {
            slice: 1,
            locations: locations.clone(),
            io_apic: Arc::new(RolePlace::new(1, 0)),
            link: Arc::new(Nowhere),
        }),
    );
    for header in headers
        .iter()
        .filter_map(|bytes| Header::decode(bytes).ok())
    {
        let _ = match SliceMessage::decode(&header, &[]) {
            Ok(SliceMessage::Interrupt {
                vcpu,
                epoch,
                message,
            }) => interrupts.receive(vcpu, message, epoch),
            Ok(SliceMessage::Identity {
                vcpu,
                identity,
                epoch,
            }) => interrupts.identify(vcpu, identity, epoch),
            Ok(SliceMessage::Moved { vcpu, location }) => {
                interrupts.moved(vcpu, location).map(drop)
            }
            _ => Ok(()),
        };
        // Without commands none comes here or leaves.
        assert_eq!(locations.at(1), [1, 2]);
        assert!(locations.all().iter().all(|location| location.slice < 3));
    }
}

/// Takes what goes to other slices.
struct Nowhere;

impl InterruptLink for Nowhere {
    fn deliver(&self, location: VcpuLocation, _: u32, _: Message) {
        assert!(location.slice < 3 && location.slice != 1);
    }

    fn end_of_interrupt(&self, slice: usize, _: u8) {
        assert_eq!(slice, 0);
    }

    fn set_pin(&self, slice: usize, _: u8, _: bool) {
        assert_eq!(slice, 0);
    }
}

/// Text of commands, answers and placements.
pub fn valid_texts(random: &mut Random) -> Vec<u8> {
    let command = match random.below(4) {
        0 => serde_json::to_vec(&SliceCommand::Run {
            tsc_offset: random.next(),
            tsc_zero: random.next(),
            updated: std::iter::once(random.next()..random.next()).collect(),
        }),
        1 => serde_json::to_vec(&SliceCommand::Pause),
        2 => serde_json::to_vec(&SliceReply::Refused("no".into())),
        _ => serde_json::to_vec(&Placement::whole(3, 64 << 20)),
    };
    command.unwrap_or_default()
}

/// Commands, answers and placements are refused or mean something that can be.
pub fn text(input: &[u8]) {
    let _ = serde_json::from_slice::<SliceCommand>(input);
    let _ = serde_json::from_slice::<SliceReply>(input);
    if let Ok(placement) = serde_json::from_slice::<Placement>(input) {
        let cpus: u32 = (0..placement.slices())
            .map(|slice| placement.cpus_of(slice).len() as u32)
            .sum();
        assert_eq!(cpus, placement.cpus());
        assert_eq!(placement.page_ends().len(), placement.slices());
    }
}

/// A batch of frames; some of their lengths are at a bound, or behind it.
pub fn valid_frames(random: &mut Random) -> Vec<u8> {
    let mut batch = Vec::new();
    for _ in 0..1 + random.below(5) {
        let most = match random.below(8) {
            0 => HEADER + FRAME_MAX + 2,
            1 => HEADER + 2,
            _ => 2000,
        };
        let length = random.below(most);
        batch.extend((length as u32).to_le_bytes());
        batch.resize(batch.len() + length, random.next() as u8);
    }
    batch
}

/// Nobody is at the other end.
struct Nobody;

impl FrameSender for Nobody {
    fn frames(&self, _: &[u8]) {}

    fn taken(&self, _: u64) {}
}

/// A link that keeps what it is given, as a batch.
#[derive(Clone, Default)]
struct Kept(Arc<Mutex<Vec<u8>>>);

impl Link for Kept {
    fn descriptor(&self) -> RawFd {
        -1
    }

    fn receive(&mut self, _: &mut [u8]) -> io::Result<Option<usize>> {
        Ok(None)
    }

    fn send(&mut self, _: &DeviceMemory, _: &[Segment]) -> io::Result<()> {
        Ok(())
    }

    fn send_bytes(&mut self, frame: &[u8]) -> io::Result<()> {
        let mut kept = self.0.lock().expect("nobody panicked");
        kept.extend((frame.len() as u32).to_le_bytes());
        kept.extend(frame);
        Ok(())
    }
}

/// A batch of frames is refused at both ends, or all of it comes out at both.
pub fn frames(input: &[u8]) {
    let window = window(1);
    let kept = Kept::default();
    let servers: Vec<Option<Arc<dyn FrameSender>>> = vec![None, Some(Arc::new(Nobody))];
    let gone = Box::new(|_: &io::Error| {});
    let switch = Switch::new(Box::new(kept.clone()), servers, window, gone).expect("a descriptor");
    let queue = FrameQueue::new(window).expect("a descriptor");
    let taken = switch.put(1, input);
    assert_eq!(taken, queue.put(input.to_vec()));
    // Pairs that are served here, and those that are not there.
    assert!(switch.put(0, input).is_err() && switch.put(2, input).is_err());
    assert!(switch.taken(1, 1).is_err() && queue.taken(1).is_err());
    let mut port = RemotePort::new(Arc::new(Nobody), queue);
    let mut frame = vec![0; HEADER + FRAME_MAX];
    let mut out = Vec::new();
    while let Ok(Some(length)) = port.receive(&mut frame) {
        out.extend((length as u32).to_le_bytes());
        out.extend(&frame[..length]);
    }
    let expected = if taken.is_ok() { input } else { &[] };
    assert_eq!(out, expected);
    assert_eq!(*kept.0.lock().expect("nobody panicked"), expected);
}
