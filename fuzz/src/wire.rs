//! The wire: frames, links of all kinds, hello, the control channel and the
//! handshake.

use crate::random::Random;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::time::Duration;
use weft_wire::channel::Channel;
use weft_wire::frame::{HEADER_BYTES, MAX_PAYLOAD};
use weft_wire::hello::{self, Hello};
use weft_wire::ring::{CAPACITY_MIN, create, file_bytes};
use weft_wire::seal::{LENGTH_BYTES, RECORD_MAX, Sealer};
use weft_wire::{Header, Link, LinkConfig, LinkError, LinkKind, PROTOCOL_VERSION, keys};

const KEY: [u8; 32] = [1; 32];

/// A few frames as they look in the clear.
pub fn valid_frames(random: &mut Random) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..1 + random.below(5) {
        let length = [0, random.below(100), random.below(9000)][random.below(3)];
        let header = Header {
            kind: 1 + random.below(191) as u8,
            flags: random.next() as u8,
            count: random.next() as u16,
            length: length as u32,
            words: core::array::from_fn(|_| random.next()),
        };
        bytes.extend_from_slice(&header.encode());
        bytes.extend(random.bytes(length));
    }
    bytes
}

/// A header decodes to itself or is refused.
pub fn frame(input: &[u8]) {
    for bytes in input.as_chunks::<HEADER_BYTES>().0 {
        if let Ok(header) = Header::decode(bytes) {
            assert_eq!(header.encode(), *bytes);
            assert!(header.length as usize <= MAX_PAYLOAD);
        }
    }
}

fn open(kind: LinkKind) -> Link {
    let config = LinkConfig {
        kind,
        spin_ns: 0,
        lease_ms: 1,
    };
    // SAFETY: each caller keeps the descriptors open longer than the link and
    // uses them for nothing else.
    unsafe { Link::open(&config) }.expect("descriptors and memory are at hand")
}

/// What a stream of bytes means, found out by code that shares nothing with
/// the link's: where each whole frame's payload lies.
fn expected_frames(mut stream: &[u8]) -> Vec<&[u8]> {
    let mut found = Vec::new();
    while stream.len() >= 48 {
        let length = u32::from_le_bytes([stream[4], stream[5], stream[6], stream[7]]) as usize;
        if !(1..=191).contains(&stream[0]) || length > MAX_PAYLOAD || stream.len() - 48 < length {
            break;
        }
        found.push(&stream[48..48 + length]);
        stream = &stream[48 + length..];
    }
    found
}

/// Feeds the bytes in pieces and compares what comes out.
fn feed(link: &mut Link, mut out: UnixStream, wire: &[u8], expected: &[&[u8]]) {
    let mut seen = 0;
    let step = 1 + usize::from(wire.first().copied().unwrap_or(0)) * 97;
    'fed: for piece in wire.chunks(step) {
        out.write_all(piece).expect("the link reads what is sent");
        loop {
            match link.try_receive() {
                Ok(Some(frame)) => {
                    assert_eq!(frame.payload, expected[seen]);
                    seen += 1;
                }
                Ok(None) => break,
                // It reads no more, so the socket would fill up.
                Err(_) => break 'fed,
            }
        }
    }
    drop(out);
    let end = loop {
        match link.try_receive() {
            Ok(Some(frame)) => {
                assert_eq!(frame.payload, expected[seen]);
                seen += 1;
            }
            Ok(None) => {}
            Err(error) => break error,
        }
    };
    assert_eq!(seen, expected.len());
    assert!(matches!(
        end,
        LinkError::Closed | LinkError::Frame(_) | LinkError::Forged
    ));
    assert_eq!(link.try_receive().map(|_| ()), Err(end));
}

/// A link in the clear against any bytes.
pub fn stream(input: &[u8]) {
    let (out, inbound) = UnixStream::pair().expect("descriptors");
    let fd = inbound.as_raw_fd();
    let mut link = open(LinkKind::Stream { fd });
    feed(&mut link, out, input, &expected_frames(input));
}

fn records(plain: &[u8]) -> Vec<u8> {
    let mut sealer = Sealer::new(&KEY);
    let mut wire = Vec::new();
    let mut record = vec![0; RECORD_MAX];
    let step = 1 + plain.len() / 3;
    for piece in plain.chunks(step) {
        record[LENGTH_BYTES..LENGTH_BYTES + piece.len()].copy_from_slice(piece);
        let length = sealer.seal(&mut record, piece.len()).expect("few records");
        wire.extend_from_slice(&record[..length]);
    }
    wire
}

fn sealed_link(inbound: &UnixStream) -> Link {
    open(LinkKind::Sealed {
        fd: inbound.as_raw_fd(),
        send_key: [2; 32],
        receive_key: KEY,
    })
}

/// A sealed link whose peer has the key and sends any plaintext.
pub fn sealed_inside(input: &[u8]) {
    let (out, inbound) = UnixStream::pair().expect("descriptors");
    let mut link = sealed_link(&inbound);
    feed(&mut link, out, &records(input), &expected_frames(input));
}

/// Frames, each in a record of its own.
pub fn valid_records(random: &mut Random) -> Vec<u8> {
    records(&valid_frames(random))
}

/// A sealed link against any bytes. What comes out was sealed with the key, so
/// it must be a prefix of something that opens; the link must end.
pub fn sealed(input: &[u8]) {
    let (mut out, inbound) = UnixStream::pair().expect("descriptors");
    let mut link = sealed_link(&inbound);
    out.write_all(input)
        .expect("the input fits into the socket");
    drop(out);
    for _ in 0..=input.len() {
        if link.try_receive().is_err() {
            return;
        }
    }
    panic!("the link does not end");
}

/// Steps of a hostile producer: where to write, and what.
pub fn valid_ring(random: &mut Random) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..1 + random.below(8) {
        bytes.push(random.below(6) as u8);
        bytes.extend((random.below(CAPACITY_MIN * 2) as u64).to_le_bytes());
    }
    bytes.extend(valid_frames(random));
    bytes
}

/// A ring whose other side writes anything anywhere in the shared memory.
pub fn ring(input: &[u8]) {
    let (out, inbound) = UnixStream::pair().expect("descriptors");
    let memory = create(CAPACITY_MIN).expect("memory");
    let mut link = open(LinkKind::Ring {
        bell_fd: inbound.as_raw_fd(),
        memory_fd: memory.as_raw_fd(),
        side: 0,
    });
    let memory = std::fs::File::from(memory);
    let half = file_bytes(CAPACITY_MIN) as u64 / 2;
    // Frames where a producer would put them; it cannot lie about these.
    let data = &input[..input.len().min(CAPACITY_MIN)];
    memory.write_all_at(data, half + 4096).expect("sealed size");
    for step in input.as_chunks::<9>().0.iter().take(64) {
        let value: [u8; 8] = core::array::from_fn(|at| step[1 + at]);
        match step[0] % 8 {
            0 | 1 => memory.write_all_at(&value, half).expect("their tail"),
            2 => memory.write_all_at(&value, 128).expect("their head"),
            3 => {
                let at = u64::from_le_bytes(value) % (2 * half - 8);
                memory.write_all_at(&value, at).expect("anywhere");
            }
            4 => drop(link.send(&Header::new(1), &[&value, &[7; 5000]])),
            5 => drop((&out).write(&value)),
            6 => drop(link.receive(1000)),
            _ => while let Ok(Some(_)) = link.try_receive() {},
        }
        let _ = link.try_receive();
    }
    drop(out);
    let _ = link.receive(1000);
}

/// A node's description of itself.
pub fn valid_hello(_: &mut Random) -> Vec<u8> {
    serde_json::to_vec(&Hello::here()).expect("a description is JSON")
}

/// A description from a peer is refused or can be compared and printed.
pub fn hello(input: &[u8]) {
    if let Ok(theirs) = serde_json::from_slice::<Hello>(input)
        && let Err(mismatch) = hello::check(&Hello::here(), &theirs)
    {
        assert!(!mismatch.to_string().is_empty());
    }
}

/// A control message in the clear.
pub fn valid_channel(random: &mut Random) -> Vec<u8> {
    let json = valid_hello(random);
    [&(json.len() as u32).to_le_bytes()[..], &json].concat()
}

/// A control channel against any bytes, in the clear and sealed.
pub fn channel(input: &[u8]) {
    const SHORT: Duration = Duration::from_millis(50);
    for sealed in [false, true] {
        let (mut out, inbound) = UnixStream::pair().expect("descriptors");
        let mut channel = if sealed {
            Channel::sealed(inbound.into(), KEY, KEY).expect("descriptors")
        } else {
            Channel::local(inbound).expect("the same user")
        };
        out.write_all(input)
            .expect("the input fits into the socket");
        drop(out);
        for _ in 0..=input.len() {
            match channel.receive::<Hello>(SHORT) {
                Ok(_) | Err(weft_wire::channel::ChannelError::Malformed(_)) => {}
                Err(_) => break,
            }
        }
    }
}

/// A preamble, an opening and what might be a first message.
pub fn valid_handshake(random: &mut Random) -> Vec<u8> {
    let mut bytes = [&b"WEFT"[..], &PROTOCOL_VERSION.to_le_bytes()].concat();
    bytes.push(1 + random.below(2) as u8);
    bytes.extend([0; 16]);
    bytes.extend([0, 32]);
    bytes.extend(random.bytes(32));
    bytes.extend([0, 64]);
    bytes.extend(random.bytes(64));
    bytes
}

/// The accepting side of a handshake against any bytes: never a connection.
pub fn handshake(input: &[u8]) {
    const SHORT: Duration = Duration::from_millis(50);
    let (mut out, inbound) = UnixStream::pair().expect("descriptors");
    out.write_all(input)
        .expect("the input fits into the socket");
    out.shutdown(std::net::Shutdown::Write).expect("open");
    let Ok(incoming) = weft_wire::handshake::accept(inbound.into(), SHORT) else {
        return;
    };
    let ours = keys::generate().expect("random bytes");
    match incoming.opening() {
        weft_wire::handshake::Opening::Link { .. } => assert!(incoming.link(&KEY).is_err()),
        weft_wire::handshake::Opening::Control => {
            assert!(incoming.control(&ours, |_| true).is_err());
        }
        weft_wire::handshake::Opening::Switch => {
            assert!(incoming.switch(&ours, |_| true).is_err());
        }
    }
}
