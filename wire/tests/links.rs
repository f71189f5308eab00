//! Links of all kinds between two threads. Needs nothing.

mod common;

use common::{Kind, open, pair, pair_with, tcp_pair};
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use weft_wire::frame::MAX_PAYLOAD;
use weft_wire::seal::{LENGTH_BYTES, RECORD_MAX, Sealer};
use weft_wire::{FRAMES_MAX, FrameError, Header, LinkError, LinkKind, Received, Wake, wait_any};

const PATIENCE_NS: u64 = 10_000_000_000;

fn header(kind: u8, word: u64) -> Header {
    let mut header = Header::new(kind);
    header.words[0] = word;
    header
}

fn pattern(seed: u64, length: usize) -> Vec<u8> {
    (0..length)
        .map(|at| (seed as usize + at * 31 + (at >> 8)) as u8)
        .collect()
}

#[test]
fn ping_pong() {
    for kind in Kind::ALL {
        let (mut near, far) = pair(kind);
        let echo = std::thread::spawn(move || {
            let mut far = far;
            for _ in 0..1000 {
                let frame = far.link.receive(PATIENCE_NS).unwrap().expect("a frame");
                let header = frame.header;
                let payload = frame.payload.to_vec();
                far.link.send(&header, &[&payload]).unwrap();
            }
        });
        for round in 0..1000u64 {
            let payload = pattern(round, (round * 7 % 5000) as usize);
            let (first, second) = payload.split_at(payload.len() / 2);
            near.link
                .send(&header(1, round), &[first, &[], second])
                .unwrap();
            let frame = near.link.receive(PATIENCE_NS).unwrap().expect("a frame");
            assert_eq!(frame.header.words[0], round, "{kind:?}");
            assert_eq!(frame.payload, payload, "{kind:?}");
        }
        echo.join().unwrap();
        let end = near.link.receive(PATIENCE_NS).map(|_| ());
        assert_eq!(end, Err(LinkError::Closed), "{kind:?}");
    }
}

/// Frames that are sent together arrive one by one, with and without payload.
#[test]
fn frames_that_go_together() {
    for kind in Kind::ALL {
        let (mut near, mut far) = pair(kind);
        let payloads: Vec<Vec<u8>> = (0..FRAMES_MAX)
            .map(|index| pattern(index as u64, index * 900))
            .collect();
        let frames: Vec<(Header, &[u8])> = payloads
            .iter()
            .zip(0..)
            .map(|(payload, index)| (header(1, index), &payload[..]))
            .collect();
        let sender = std::thread::spawn({
            let frames: Vec<_> = frames.iter().map(|(h, p)| (*h, p.to_vec())).collect();
            move || {
                let frames: Vec<_> = frames.iter().map(|(h, p)| (*h, &p[..])).collect();
                for _ in 0..20 {
                    near.link.send_frames(&frames).unwrap();
                }
                near
            }
        });
        for _ in 0..20 {
            for (header, payload) in &frames {
                let frame = far.link.receive(PATIENCE_NS).unwrap().expect("a frame");
                assert_eq!(frame.header.words[0], header.words[0], "{kind:?}");
                assert!(frame.payload == *payload, "{kind:?}: payload differs");
            }
        }
        let mut near = sender.join().unwrap();
        let many = vec![(header(1, 0), &[][..]); FRAMES_MAX + 1];
        assert!(near.link.send_frames(&many).is_err(), "{kind:?}");
        near.link.send(&header(1, 7), &[]).unwrap();
        let frame = far.link.receive(PATIENCE_NS).unwrap().expect("a frame");
        assert_eq!(frame.header.words[0], 7, "a refusal does not end the link");
    }
}

/// Both sides send the largest frames at once, 64 MiB each, and neither reads
/// before it has sent four of them.
#[test]
fn two_senders_do_not_deadlock() {
    for kind in Kind::ALL {
        let (near, far) = pair(kind);
        let run = |mut end: common::End| {
            move || {
                let payload = pattern(3, MAX_PAYLOAD);
                for burst in 0..60u64 {
                    for _ in 0..4 {
                        end.link.send(&header(1, burst), &[&payload]).unwrap();
                    }
                    for _ in 0..4 {
                        let frame = end.link.receive(PATIENCE_NS).unwrap().expect("a frame");
                        assert_eq!(frame.header.words[0], burst);
                        assert!(frame.payload == payload, "{kind:?}: payload differs");
                    }
                }
                let traffic = end.link.traffic();
                (traffic, end)
            }
        };
        let other = std::thread::spawn(run(far));
        let (ours, _end) = run(near)();
        let (theirs, _other_end) = other.join().unwrap();
        assert_eq!(ours.sent_bytes, theirs.received_bytes, "{kind:?}");
        assert!(ours.sent_bytes >= 240 * MAX_PAYLOAD as u64, "{kind:?}");
    }
}

#[test]
fn a_peer_that_takes_nothing_is_noticed_in_time() {
    for kind in Kind::ALL {
        let (mut near, far) = pair_with(kind, 0, 200);
        let payload = pattern(1, MAX_PAYLOAD);
        let mut last = Instant::now();
        let error = loop {
            last = Instant::now().max(last);
            match near.link.send(&header(1, 0), &[&payload]) {
                Ok(()) => {}
                Err(error) => break error,
            }
        };
        assert_eq!(error, LinkError::Stalled { lease_ms: 200 }, "{kind:?}");
        let waited = last.elapsed();
        assert!(waited < Duration::from_secs(2), "{kind:?}: {waited:?}");
        // A frame that was cut short is never followed by another.
        let again = near.link.send(&header(1, 0), &[]);
        assert_eq!(again, Err(error), "{kind:?}");
        drop(far);
    }
}

#[test]
fn what_was_sent_before_the_end_is_received() {
    for kind in Kind::ALL {
        let (mut near, far) = pair(kind);
        for round in 0..3 {
            near.link.send(&header(2, round), &[b"last words"]).unwrap();
        }
        drop(near);
        let mut far = far;
        for round in 0..3 {
            let frame = far.link.receive(PATIENCE_NS).unwrap().expect("a frame");
            assert_eq!(
                (frame.header.words[0], frame.payload),
                (round, &b"last words"[..])
            );
        }
        for _ in 0..2 {
            let end = far.link.receive(PATIENCE_NS).map(|_| ());
            assert_eq!(end, Err(LinkError::Closed), "{kind:?}");
        }
        let mut sent = Ok(());
        for _ in 0..200 {
            sent = sent.and_then(|()| far.link.send(&header(2, 0), &[&[0; 65536]]));
        }
        assert_eq!(sent, Err(LinkError::Closed), "{kind:?}");
    }
}

#[test]
fn silence_ends_with_the_timeout() {
    for kind in Kind::ALL {
        let (mut near, far) = pair(kind);
        for timeout_ms in [0, 1, 5, 50] {
            let start = Instant::now();
            assert!(near.link.receive(timeout_ms * 1_000_000).unwrap().is_none());
            let waited = start.elapsed().as_millis() as u64;
            assert!(
                (timeout_ms..timeout_ms + 500).contains(&waited),
                "{kind:?}: {waited} ms"
            );
        }
        drop(far);
    }
}

#[test]
fn an_oversized_payload_is_refused_and_the_link_goes_on() {
    let (mut near, mut far) = pair(Kind::Unix);
    let half = vec![0; MAX_PAYLOAD / 2 + 1];
    let refused = near.link.send(&header(1, 0), &[&half, &half]);
    assert!(matches!(refused, Err(LinkError::TooLong { .. })));
    near.link.send(&header(1, 5), &[]).unwrap();
    let frame = far.link.receive(PATIENCE_NS).unwrap().expect("a frame");
    assert_eq!(frame.header.words[0], 5);
}

/// The bytes of three frames, as a `kind` link puts them on a socket.
fn bytes_of_three_frames(kind: Kind) -> Vec<u8> {
    let (mut near, far) = pair(kind);
    for round in 0..3u64 {
        let payload = pattern(round, 100 + round as usize * 4000);
        near.link.send(&header(1, round), &[&payload]).unwrap();
    }
    drop(near);
    let mut bytes = Vec::new();
    std::fs::File::from(far.fd).read_to_end(&mut bytes).unwrap();
    bytes
}

fn receiver(kind: Kind, fd: OwnedFd) -> common::End {
    let raw = fd.as_raw_fd();
    let kind = match kind {
        Kind::Sealed => LinkKind::Sealed {
            fd: raw,
            send_key: [2; 32],
            receive_key: [1; 32],
        },
        _ => LinkKind::Stream { fd: raw },
    };
    open(kind, fd, common::SPIN_NS, 5000)
}

#[test]
fn a_peer_that_writes_byte_by_byte_is_understood() {
    for kind in [Kind::Tcp, Kind::Sealed] {
        let bytes = bytes_of_three_frames(kind);
        let (mut out, inbound) = tcp_pair();
        let mut end = receiver(kind, inbound.into());
        let writer = std::thread::spawn(move || {
            for byte in bytes {
                out.write_all(&[byte]).unwrap();
            }
        });
        for round in 0..3u64 {
            let frame = end.link.receive(PATIENCE_NS).unwrap().expect("a frame");
            assert_eq!(frame.header.words[0], round);
            assert_eq!(frame.payload, pattern(round, 100 + round as usize * 4000));
        }
        let closed = end.link.receive(PATIENCE_NS).map(|_| ());
        assert_eq!(closed, Err(LinkError::Closed));
        writer.join().unwrap();
    }
}

/// Flips one bit at a time in what three sealed frames look like.
#[test]
fn tampering_ends_a_sealed_link() {
    let bytes = bytes_of_three_frames(Kind::Sealed);
    for bit in (0..bytes.len() * 8).step_by(977) {
        let mut altered = bytes.clone();
        altered[bit / 8] ^= 1 << (bit % 8);
        let (mut out, inbound) = UnixStream::pair().unwrap();
        let mut end = receiver(Kind::Sealed, inbound.into());
        out.write_all(&altered).unwrap();
        drop(out);
        let mut whole = 0;
        let error = loop {
            match end.link.receive(PATIENCE_NS) {
                Ok(Some(frame)) => {
                    let round = frame.header.words[0];
                    assert_eq!(frame.payload, pattern(round, 100 + round as usize * 4000));
                    whole += 1;
                }
                Ok(None) => panic!("no end"),
                Err(error) => break error,
            }
        };
        assert!(whole < 3, "bit {bit} was not noticed");
        // A longer length makes the link wait for bytes that never come.
        assert!(matches!(error, LinkError::Forged | LinkError::Closed));
        assert_eq!(end.link.try_receive().map(|_| ()), Err(error));
        assert_eq!(end.link.send(&header(1, 0), &[]), Err(error));
    }
}

#[test]
fn a_record_of_another_key_or_place_is_forged() {
    let (mut out, inbound) = UnixStream::pair().unwrap();
    let mut end = receiver(Kind::Sealed, inbound.into());
    let mut record = vec![0; RECORD_MAX];
    record[LENGTH_BYTES..LENGTH_BYTES + 48].copy_from_slice(&header(1, 0).encode());
    let mut sealer = Sealer::new(&[1; 32]);
    let length = sealer.seal(&mut record, 48).unwrap();
    out.write_all(&record[..length]).unwrap();
    out.write_all(&record[..length]).unwrap();
    assert!(end.link.receive(PATIENCE_NS).unwrap().is_some());
    let replayed = end.link.receive(PATIENCE_NS).map(|_| ());
    assert_eq!(replayed, Err(LinkError::Forged));
}

#[test]
fn an_impossible_header_ends_the_link_by_name() {
    for (bytes, expected) in [
        ([0u8; 48], FrameError::Kind(0)),
        ([0xff; 48], FrameError::Kind(255)),
        ([1; 48], FrameError::TooLong(0x0101_0101)),
    ] {
        let (mut out, inbound) = UnixStream::pair().unwrap();
        let mut end = receiver(Kind::Unix, inbound.into());
        out.write_all(&bytes).unwrap();
        let error = end.link.receive(PATIENCE_NS).map(|_| ());
        assert_eq!(error, Err(LinkError::Frame(expected)));
        assert_eq!(
            end.link.try_receive().map(|_| ()),
            Err(LinkError::Frame(expected))
        );
    }
}

#[test]
fn wait_any_finds_the_link_that_has_something() {
    let mut nears = Vec::new();
    let mut fars = Vec::new();
    for kind in Kind::ALL {
        let (near, far) = pair(kind);
        nears.push(near);
        fars.push(far);
    }
    let (near_fds, near_links): (Vec<_>, Vec<_>) = nears
        .into_iter()
        .map(|end| (end.fd, Some(end.link)))
        .unzip();
    let mut links = near_links;
    links.insert(0, None);
    assert_eq!(wait_any(&mut links, 10_000_000, None), Ok(Wake::Timeout));
    for round in 0..200u64 {
        let index = round as usize % fars.len();
        let sender = &mut fars[index].link;
        std::thread::scope(|scope| {
            scope.spawn(move || {
                std::thread::sleep(Duration::from_micros(round));
                sender.send(&header(1, round), &[b"x"]).unwrap();
                sender.send(&header(1, round), &[b"y"]).unwrap();
            });
            for expected in [b"x", b"y"] {
                loop {
                    assert_eq!(
                        wait_any(&mut links, PATIENCE_NS, None),
                        Ok(Wake::Ready(index + 1))
                    );
                    let link = links[index + 1].as_mut().unwrap();
                    if let Some(frame) = link.try_receive().unwrap() {
                        assert_eq!(frame.payload, expected);
                        break;
                    }
                }
            }
        });
    }
    drop(fars);
    for _ in 1..links.len() {
        let Ok(Wake::Ready(index)) = wait_any(&mut links, PATIENCE_NS, None) else {
            panic!("an end was not reported");
        };
        let link = links[index].take();
        let received = link.unwrap().try_receive().map(|_| ());
        assert_eq!(received, Err(LinkError::Closed));
    }
    assert_eq!(wait_any(&mut links, 1_000_000, None), Ok(Wake::Timeout));
    drop(near_fds);
}

/// A signal that is blocked until the wait is not lost before it.
#[test]
fn a_signal_interrupts_a_masked_wait() {
    extern "C" fn handler(_: i32) {}
    let signal = libc::SIGUSR1;
    // SAFETY: installs an empty handler and blocks the signal in this thread.
    let thread = unsafe {
        let mut action: libc::sigaction = core::mem::zeroed();
        action.sa_sigaction = handler as *const () as usize;
        libc::sigaction(signal, &action, core::ptr::null_mut());
        let mut set: libc::sigset_t = core::mem::zeroed();
        libc::sigaddset(&mut set, signal);
        libc::pthread_sigmask(libc::SIG_BLOCK, &set, core::ptr::null_mut());
        libc::pthread_self()
    };
    for kind in Kind::ALL {
        let (near, far) = pair(kind);
        let common::End { link, fd } = near;
        let mut links = [Some(link)];
        for round in 0..20 {
            // Even rounds: the signal is pending already; odd: it comes later.
            let later = (round % 2 == 1).then(|| {
                std::thread::spawn(move || {
                    std::thread::sleep(Duration::from_millis(5));
                    // SAFETY: the thread waits for this one.
                    unsafe { libc::pthread_kill(thread, signal) };
                })
            });
            if later.is_none() {
                // SAFETY: this is the calling thread.
                unsafe { libc::pthread_kill(thread, signal) };
            }
            if round < 10 {
                let link = links[0].as_mut().unwrap();
                let received = link.receive_masked(PATIENCE_NS, Some(0)).unwrap();
                assert!(
                    matches!(received, Received::Interrupted),
                    "{kind:?} {round}"
                );
            } else {
                assert_eq!(
                    wait_any(&mut links, PATIENCE_NS, Some(0)),
                    Ok(Wake::Interrupted)
                );
            }
            if let Some(thread) = later {
                thread.join().unwrap();
            }
        }
        drop((far, fd));
    }
}

/// A plain receive goes on after a signal.
#[test]
fn signals_do_not_disturb_a_plain_receive() {
    extern "C" fn handler(_: i32) {}
    // SAFETY: installs an empty handler.
    let receiver = unsafe {
        let mut action: libc::sigaction = core::mem::zeroed();
        action.sa_sigaction = handler as *const () as usize;
        libc::sigaction(libc::SIGUSR2, &action, core::ptr::null_mut());
        libc::pthread_self()
    };
    for kind in Kind::ALL {
        let (mut near, far) = pair(kind);
        let sender = std::thread::spawn(move || {
            let mut far = far;
            for _ in 0..50 {
                // SAFETY: the receiver joins this thread.
                unsafe { libc::pthread_kill(receiver, libc::SIGUSR2) };
                std::thread::sleep(Duration::from_micros(300));
            }
            far.link.send(&header(1, 9), &[]).unwrap();
            far
        });
        let frame = near.link.receive(PATIENCE_NS).unwrap().expect("a frame");
        assert_eq!(frame.header.words[0], 9, "{kind:?}");
        sender.join().unwrap();
    }
}
