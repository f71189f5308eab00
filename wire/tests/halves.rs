//! Halves of links between threads, over TCP, UNIX sockets and sealed. Needs
//! nothing.

mod common;

use common::tcp_pair;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use weft_wire::frame::MAX_PAYLOAD;
use weft_wire::halves::{BACKLOG_MAX, HalvesConfig, Receiver, Sender, SessionKeys, open};
use weft_wire::seal::{LENGTH_BYTES, Sealer};
use weft_wire::{Header, LinkError};

const PATIENCE: Duration = Duration::from_secs(20);
const LEASE: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Tcp,
    Unix,
    Sealed,
}

const KINDS: [Kind; 3] = [Kind::Tcp, Kind::Unix, Kind::Sealed];

fn config(socket: OwnedFd, keys: Option<(u8, u8)>, lease: Duration) -> HalvesConfig {
    HalvesConfig {
        socket,
        keys: keys.map(|(send, receive)| SessionKeys {
            send: [send; 32],
            receive: [receive; 32],
        }),
        lease,
        spin: Duration::from_micros(10),
        name: "test".into(),
    }
}

fn sockets(kind: Kind) -> (OwnedFd, OwnedFd) {
    if kind == Kind::Unix {
        let (near, far) = UnixStream::pair().unwrap();
        return (near.into(), far.into());
    }
    let (near, far) = tcp_pair();
    (near.into(), far.into())
}

/// An end with its flusher.
struct End {
    sender: Sender,
    receiver: Receiver,
    flusher: JoinHandle<LinkError>,
}

fn end(socket: OwnedFd, keys: Option<(u8, u8)>, lease: Duration) -> End {
    let (sender, receiver) = open(config(socket, keys, lease)).unwrap();
    let flushing = sender.clone();
    End {
        sender,
        receiver,
        flusher: std::thread::spawn(move || flushing.flush_forever()),
    }
}

fn pair(kind: Kind, lease: Duration) -> (End, End) {
    let (near, far) = sockets(kind);
    let keys = |keys| (kind == Kind::Sealed).then_some(keys);
    (
        end(near, keys((1, 2)), lease),
        end(far, keys((2, 1)), lease),
    )
}

fn header(word: u64) -> Header {
    let mut header = Header::new(128);
    header.words[0] = word;
    header
}

fn pattern(seed: u64, length: usize) -> Vec<u8> {
    (0..length)
        .map(|at| (seed as usize + at * 31 + (at >> 8)) as u8)
        .collect()
}

fn expect(receiver: &mut Receiver, word: u64, payload: &[u8], context: &str) {
    let frame = receiver.receive(PATIENCE).unwrap().expect("a frame");
    assert_eq!(frame.header.words[0], word, "{context}");
    assert_eq!(frame.payload.len(), payload.len(), "{context}");
    assert!(frame.payload == payload, "{context}: the payload differs");
}

/// Bytes sent, once nothing waits: the flusher counts after the peer may read.
fn traffic_when_idle(sender: &Sender) -> u64 {
    let start = Instant::now();
    while sender.waiting() > 0 {
        assert!(start.elapsed() < PATIENCE, "{} wait", sender.waiting());
        std::thread::sleep(Duration::from_millis(1));
    }
    sender.traffic()
}

#[test]
fn frames_of_all_sizes_arrive_in_order() {
    const RECORD: usize = 60 * 1024;
    let mut sizes: Vec<usize> = (0..200).collect();
    for edge in [4096, RECORD - 48, RECORD, 2 * RECORD - 48, 4 * RECORD - 48] {
        sizes.extend(edge - 2..=edge + 2);
    }
    sizes.extend((0..=MAX_PAYLOAD).step_by(9973));
    sizes.extend([MAX_PAYLOAD - 1, MAX_PAYLOAD]);
    for kind in KINDS {
        let (near, mut far) = pair(kind, LEASE);
        let (sender, sizes) = (near.sender.clone(), &sizes);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for (at, &size) in sizes.iter().enumerate() {
                    let payload = pattern(at as u64, size);
                    // More parts than one call gathers, with empty ones.
                    let parts: Vec<&[u8]> = payload
                        .chunks((size / 100).max(1))
                        .flat_map(|part| [part, &[]])
                        .collect();
                    sender.send(&header(at as u64), &parts).unwrap();
                }
            });
            for (at, &size) in sizes.iter().enumerate() {
                let payload = pattern(at as u64, size);
                expect(&mut far.receiver, at as u64, &payload, &format!("{kind:?}"));
            }
        });
        let too_long = near.sender.send(&header(0), &[&[0; MAX_PAYLOAD + 1]]);
        let length = MAX_PAYLOAD + 1;
        assert_eq!(too_long, Err(LinkError::TooLong { length }), "{kind:?}");
        near.sender.send(&header(7), &[b"goes on"]).unwrap();
        expect(&mut far.receiver, 7, b"goes on", "after one too long");
        let sent = traffic_when_idle(&near.sender);
        assert_eq!(sent, far.receiver.traffic(), "{kind:?}");
    }
}

/// Six threads send on each side; a receiver begins when frames wait for the kernel,
/// so that frames which wait, frames which go directly and the flusher meet.
#[test]
fn many_senders_and_a_backlog() {
    const SENDERS: u64 = 6;
    const FRAMES: u64 = 60;
    let size = |sender: u64, frame: u64| (sender * 7919 + frame * 4801) as usize % 60_000;
    for kind in KINDS {
        let (near, far) = pair(kind, LEASE);
        std::thread::scope(|scope| {
            let mut receiving = Vec::new();
            let ways = [(&near.sender, far.receiver), (&far.sender, near.receiver)];
            for (side, mut receiver) in ways {
                let (waits, backlog) = mpsc::channel();
                for sender in 0..SENDERS {
                    let waits = waits.clone();
                    scope.spawn(move || {
                        for frame in 0..FRAMES {
                            let payload = pattern(frame, size(sender, frame));
                            let word = sender << 32 | frame;
                            side.send(&header(word), &[&payload]).unwrap();
                            if side.waiting() > 0 {
                                // A receiver that has begun needs no more words.
                                let _ = waits.send(());
                            }
                        }
                    });
                }
                drop(waits);
                receiving.push(scope.spawn(move || {
                    let begun = backlog.recv_timeout(PATIENCE);
                    begun.unwrap_or_else(|_| panic!("{kind:?}: no backlog"));
                    let mut next = [0; SENDERS as usize];
                    for _ in 0..SENDERS * FRAMES {
                        let frame = receiver.receive(PATIENCE).unwrap().expect("a frame");
                        let word = frame.header.words[0];
                        let (sender, number) = (word >> 32, word & 0xffff_ffff);
                        assert_eq!(number, next[sender as usize], "{kind:?} sender {sender}");
                        next[sender as usize] += 1;
                        let payload = pattern(number, size(sender, number));
                        assert!(frame.payload == payload, "{kind:?}: the payload differs");
                    }
                    receiver
                }));
            }
            // Joined together: a receiver that is dropped ends its link.
            let receivers = receiving.into_iter().map(|thread| thread.join().unwrap());
            drop(receivers.collect::<Vec<_>>());
        });
    }
}

/// 100 MB of requests each way; each is answered, by the thread that receives,
/// with as much.
#[test]
fn receivers_that_answer_do_not_deadlock() {
    const PAYLOAD: usize = 256 << 10;
    const REQUESTS: u64 = 400;
    const AHEAD: u64 = 100;
    for kind in KINDS {
        let (near, far) = pair(kind, LEASE);
        let payload = pattern(5, PAYLOAD);
        let payload = &payload[..];
        std::thread::scope(|scope| {
            let run = |end: End| {
                move || {
                    let (sender, mut receiver) = (end.sender, end.receiver);
                    let (mut asked, mut requests, mut answers) = (0, 0, 0);
                    while requests < REQUESTS || answers < REQUESTS {
                        while asked < REQUESTS && asked < answers + AHEAD {
                            sender.send(&header(asked), &[payload]).unwrap();
                            asked += 1;
                        }
                        let frame = receiver.receive(PATIENCE).unwrap().expect("a frame");
                        let word = frame.header.words[0];
                        if frame.header.flags == 1 {
                            assert_eq!(word, answers, "{kind:?}");
                            assert!(frame.payload == payload, "{kind:?}");
                            answers += 1;
                        } else {
                            assert_eq!(word, requests, "{kind:?}");
                            let mut answer = header(word);
                            answer.flags = 1;
                            sender.send(&answer, &[frame.payload]).unwrap();
                            requests += 1;
                        }
                    }
                    (sender, receiver)
                }
            };
            let other = scope.spawn(run(far));
            let near = run(near)();
            // The other's last answers may wait in this side's backlog.
            let far = other.join().unwrap();
            drop((near, far));
        });
    }
}

#[test]
fn closing_wakes_everybody() {
    for kind in KINDS {
        let (near, mut far) = pair(kind, LEASE);
        let start = Instant::now();
        let mut receiver = near.receiver;
        let waiting = std::thread::spawn(move || {
            let received = receiver.receive(PATIENCE).map(|_| ());
            (received, receiver)
        });
        let other = std::thread::spawn(move || far.receiver.receive(PATIENCE).map(|_| ()));
        std::thread::sleep(Duration::from_millis(5));
        near.sender.close();
        near.sender.close();
        let (received, mut receiver) = waiting.join().unwrap();
        assert_eq!(received, Err(LinkError::ClosedHere), "{kind:?}");
        let again = receiver.receive(PATIENCE).map(|_| ());
        assert_eq!(again, Err(LinkError::ClosedHere), "{kind:?}");
        assert_eq!(other.join().unwrap(), Err(LinkError::Closed), "{kind:?}");
        let sent = near.sender.send(&header(0), &[]);
        assert_eq!(sent, Err(LinkError::ClosedHere), "{kind:?}");
        assert_eq!(near.flusher.join().unwrap(), LinkError::ClosedHere);
        assert_eq!(far.flusher.join().unwrap(), LinkError::Closed);
        assert!(start.elapsed() < Duration::from_secs(5), "{kind:?}");
    }
}

#[test]
fn what_was_sent_before_the_end_is_received() {
    for kind in KINDS {
        let (near, mut far) = pair(kind, LEASE);
        for word in 0..3 {
            near.sender.send(&header(word), &[b"last words"]).unwrap();
        }
        drop(near.receiver);
        for word in 0..3 {
            expect(&mut far.receiver, word, b"last words", &format!("{kind:?}"));
        }
        for _ in 0..2 {
            let end = far.receiver.receive(PATIENCE).map(|_| ());
            assert_eq!(end, Err(LinkError::Closed), "{kind:?}");
        }
        let sent = far.sender.send(&header(0), &[]);
        assert_eq!(sent, Err(LinkError::Closed), "{kind:?}");
    }
}

#[test]
fn silence_ends_with_the_timeout() {
    for kind in KINDS {
        let (_near, mut far) = pair(kind, LEASE);
        for wait_ms in [0, 1, 30, 99, 100, 230] {
            let wait = Duration::from_millis(wait_ms);
            let start = Instant::now();
            assert!(far.receiver.receive(wait).unwrap().is_none(), "{kind:?}");
            let took = start.elapsed();
            // The kernel counts a socket's timeout in ticks.
            assert!(
                took + Duration::from_millis(10) >= wait,
                "{kind:?} {took:?}"
            );
            assert!(took < wait + Duration::from_secs(2), "{kind:?} {took:?}");
        }
    }
}

#[test]
fn a_peer_that_takes_nothing_ends_the_link_after_a_lease() {
    for kind in KINDS {
        let (near, far) = pair(kind, Duration::from_millis(200));
        let start = Instant::now();
        // More than the kernel may take while the flusher tries.
        while near.sender.waiting() < 16 << 20 {
            near.sender.send(&header(1), &[&[1; 65536]]).unwrap();
        }
        let stalled = LinkError::Stalled { lease_ms: 200 };
        assert_eq!(near.flusher.join().unwrap(), stalled, "{kind:?}");
        let took = start.elapsed();
        assert!(took >= Duration::from_millis(200), "{kind:?}: {took:?}");
        assert!(took < Duration::from_secs(5), "{kind:?}: {took:?}");
        assert_eq!(near.sender.send(&header(1), &[]), Err(stalled), "{kind:?}");
        let mut receiver = near.receiver;
        let received = receiver.receive(PATIENCE).map(|_| ());
        assert_eq!(received, Err(stalled), "{kind:?}");
        drop(far);
    }
}

/// A peer that takes little, but something within each lease, is not stalled.
#[test]
fn a_slow_peer_is_not_a_stalled_one() {
    let (near, far) = UnixStream::pair().unwrap();
    let near = end(near.into(), None, Duration::from_millis(400));
    let mut sent = 0;
    while near.sender.waiting() < 1 << 20 {
        near.sender.send(&header(1), &[&[1; 65536 - 48]]).unwrap();
        sent += 65536;
    }
    let (mut far, mut taken) = (far, 0);
    let start = Instant::now();
    let mut piece = vec![0; 16 << 10];
    while start.elapsed() < Duration::from_millis(1200) {
        taken += far.read(&mut piece).unwrap();
        std::thread::sleep(Duration::from_millis(50));
    }
    while taken < sent {
        taken += far.read(&mut piece).unwrap();
    }
    near.sender.send(&header(2), &[]).unwrap();
    assert_eq!(traffic_when_idle(&near.sender), sent as u64 + 48);
}

#[test]
fn a_flipped_bit_is_refused() {
    for bit in [0, 40, 8 * 100 + 3, 8 * 8192 + 5] {
        let (mut near, far) = UnixStream::pair().unwrap();
        let mut far = end(far.into(), Some((2, 1)), LEASE);
        let mut sealer = Sealer::new(&[1; 32]);
        let mut record = |word: u64, payload: &[u8]| {
            let mut header = header(word);
            header.length = payload.len() as u32;
            let plain = [&header.encode(), payload].concat();
            let mut record = vec![0; LENGTH_BYTES + plain.len() + 16];
            record[LENGTH_BYTES..LENGTH_BYTES + plain.len()].copy_from_slice(&plain);
            sealer.seal(&mut record, plain.len()).unwrap();
            record
        };
        near.write_all(&record(1, b"good")).unwrap();
        let mut bad = record(2, &[5; 9000]);
        bad[LENGTH_BYTES + bit / 8] ^= 1 << (bit % 8);
        near.write_all(&bad).unwrap();
        near.write_all(&record(3, b"never seen")).unwrap();
        expect(&mut far.receiver, 1, b"good", "before the forgery");
        for _ in 0..2 {
            let end = far.receiver.receive(PATIENCE).map(|_| ());
            assert_eq!(end, Err(LinkError::Forged), "bit {bit}");
        }
        let sent = far.sender.send(&header(0), &[]);
        assert_eq!(sent, Err(LinkError::Forged), "bit {bit}");
        assert_eq!(far.flusher.join().unwrap(), LinkError::Forged);
    }
}

#[test]
fn the_backlog_is_bounded() {
    for kind in [Kind::Unix, Kind::Sealed] {
        let (near, far) = pair(kind, Duration::from_secs(60));
        let payload = vec![0; MAX_PAYLOAD];
        let mut waiting_max = 0;
        let error = loop {
            match near.sender.send(&header(0), &[&payload]) {
                Ok(()) => waiting_max = near.sender.waiting().max(waiting_max),
                Err(error) => break error,
            }
        };
        assert!(
            matches!(error, LinkError::Backlog { bytes } if bytes > BACKLOG_MAX),
            "{kind:?}: {error}"
        );
        assert!(waiting_max <= BACKLOG_MAX && waiting_max > BACKLOG_MAX - (1 << 20));
        assert_eq!(near.flusher.join().unwrap(), error, "{kind:?}");
        assert_eq!(near.sender.send(&header(0), &[]), Err(error), "{kind:?}");
        assert_eq!(near.sender.waiting(), 0, "{kind:?}");
        drop(far);
    }
}

#[test]
fn a_second_flusher_is_refused() {
    let (near, _far) = sockets(Kind::Unix);
    let (sender, _receiver) = open(config(near, None, LEASE)).unwrap();
    let (ended, ends) = std::sync::mpsc::channel();
    for _ in 0..2 {
        let (sender, ended) = (sender.clone(), ended.clone());
        std::thread::spawn(move || ended.send(sender.flush_forever()));
    }
    // Whichever comes second returns while the link is open.
    let refused = ends.recv_timeout(PATIENCE).unwrap();
    assert!(matches!(refused, LinkError::Configuration(_)), "{refused}");
    sender.close();
    let end = ends.recv_timeout(PATIENCE).unwrap();
    assert_eq!(end, LinkError::ClosedHere);
}

#[test]
fn what_cannot_be_a_link_is_refused() {
    let refused = |config| match open(config) {
        Err(LinkError::Configuration(why)) => why,
        Err(error) => panic!("another error: {error}"),
        Ok(_) => panic!("opened"),
    };
    let (datagram, _other) = UnixDatagram::pair().unwrap();
    assert!(refused(config(datagram.into(), None, LEASE)).contains("stream"));
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    assert!(refused(config(listener.into(), None, LEASE)).contains("connected"));
    for lease in [Duration::ZERO, Duration::from_secs(1 << 40)] {
        let (near, _far) = UnixStream::pair().unwrap();
        assert!(refused(config(near.into(), None, lease)).contains("lease"));
    }
    let file = std::fs::File::open("/dev/null").unwrap();
    assert!(matches!(
        open(config(file.into(), None, LEASE)),
        Err(LinkError::System {
            call: "getsockopt",
            ..
        })
    ));
}
