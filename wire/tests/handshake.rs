//! The handshake and the control channel, with good and bad peers. Needs
//! loopback.

mod common;

use common::{open, tcp_pair};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use weft_wire::channel::{Channel, ChannelError, MESSAGE_MAX};
use weft_wire::handshake::{
    HandshakeError, Keyed, Opening, accept, dial_control, dial_link, dial_switch,
};
use weft_wire::hello::{self, Hello};
use weft_wire::keys::{self, PublicKey, StaticKeys};
use weft_wire::socket::Socket;
use weft_wire::{Header, LinkKind, PROTOCOL_VERSION};

const LONG: Duration = Duration::from_secs(5);
const SHORT: Duration = Duration::from_millis(300);

fn serve(
    socket: TcpStream,
    keys: StaticKeys,
    trusted: PublicKey,
) -> std::thread::JoinHandle<Result<(Channel, PublicKey), HandshakeError>> {
    std::thread::spawn(move || {
        let incoming = accept(socket.into(), LONG)?;
        assert_eq!(incoming.opening(), Opening::Control);
        incoming.control(&keys, |key| *key == trusted)
    })
}

fn channels() -> (Channel, Channel) {
    let (near, far) = tcp_pair();
    let (launcher, daemon) = (keys::generate().unwrap(), keys::generate().unwrap());
    let expected = daemon.public();
    let server = serve(far, daemon, launcher.public());
    let near = dial_control(near.into(), &launcher, &expected, LONG).unwrap();
    let (far, who) = server.join().unwrap().unwrap();
    assert_eq!(who, launcher.public());
    (near, far)
}

#[test]
fn trusted_peers_say_hello() {
    let (mut near, mut far) = channels();
    let there = std::thread::spawn(move || hello::exchange(&mut far, &Hello::here(), LONG));
    let theirs = hello::exchange(&mut near, &Hello::here(), LONG).unwrap();
    assert_eq!(hello::check(&Hello::here(), &theirs), Ok(()));
    assert_eq!(there.join().unwrap().unwrap(), Hello::here());
}

#[test]
fn a_host_with_another_key_is_named() {
    let (near, far) = tcp_pair();
    let (launcher, daemon) = (keys::generate().unwrap(), keys::generate().unwrap());
    let other = keys::generate().unwrap().public();
    let real = daemon.public();
    let server = serve(far, daemon, launcher.public());
    match dial_control(near.into(), &launcher, &other, LONG).map(|_| ()) {
        Err(HandshakeError::WrongKey { expected, found }) => {
            assert_eq!((expected, found), (other, real));
        }
        outcome => panic!("{outcome:?}"),
    }
    let outcome = server.join().unwrap().map(|_| ());
    assert!(
        matches!(outcome, Err(HandshakeError::Closed)),
        "{outcome:?}"
    );
}

#[test]
fn switches_prove_their_keys_and_are_served_by_no_daemon() {
    let (one, other) = (keys::generate().unwrap(), keys::generate().unwrap());
    let (ours, theirs) = (one.public(), other.public());
    let serve = |far: TcpStream, keys: StaticKeys| {
        std::thread::spawn(move || {
            let incoming = accept(far.into(), LONG)?;
            assert_eq!(incoming.opening(), Opening::Switch);
            incoming.switch(&keys, |key| *key == ours)
        })
    };
    let (near, far) = tcp_pair();
    let server = serve(far, other.clone());
    let near = dial_switch(near.into(), &one, &theirs, LONG).unwrap();
    let (far, who) = server.join().unwrap().unwrap();
    assert_eq!(who, ours);
    assert_eq!(
        (near.send_key, near.receive_key),
        (far.receive_key, far.send_key)
    );
    let (near, far) = tcp_pair();
    let server = serve(far, one.clone());
    let refused = dial_switch(near.into(), &other, &ours, LONG).map(|_| ());
    assert!(matches!(refused, Err(HandshakeError::Refused { .. })));
    let untrusted = server.join().unwrap().map(|_| ());
    assert!(matches!(untrusted, Err(HandshakeError::Untrusted { .. })));
    // The purpose is part of what both sides authenticate.
    let (near, far) = tcp_pair();
    let daemon = std::thread::spawn(move || {
        accept(far.into(), LONG).and_then(|incoming| incoming.control(&other, |_| true).map(|_| ()))
    });
    assert!(dial_switch(near.into(), &one, &theirs, LONG).is_err());
    assert!(matches!(
        daemon.join().unwrap(),
        Err(HandshakeError::Malformed(_))
    ));
}

#[test]
fn an_untrusted_launcher_is_named_on_both_sides() {
    let (near, far) = tcp_pair();
    let (launcher, daemon) = (keys::generate().unwrap(), keys::generate().unwrap());
    let expected = daemon.public();
    let server = serve(far, daemon, keys::generate().unwrap().public());
    match dial_control(near.into(), &launcher, &expected, LONG).map(|_| ()) {
        Err(HandshakeError::Refused { ours }) => assert_eq!(ours, launcher.public()),
        outcome => panic!("{outcome:?}"),
    }
    match server.join().unwrap().map(|_| ()) {
        Err(HandshakeError::Untrusted { found }) => assert_eq!(found, launcher.public()),
        outcome => panic!("{outcome:?}"),
    }
}

#[test]
fn another_version_is_named_before_anything_else() {
    let theirs = PROTOCOL_VERSION + 7;
    let preamble = [&b"WEFT"[..], &theirs.to_le_bytes()].concat();
    for dialling in [true, false] {
        let outcome = against(&preamble, dialling, LONG);
        let Err(HandshakeError::Version { ours, theirs: seen }) = outcome else {
            panic!("{outcome:?}");
        };
        assert_eq!((ours, seen), (PROTOCOL_VERSION, theirs));
    }
}

/// What a handshake makes of a peer that sends `bytes` and then nothing.
fn against(bytes: &[u8], dialling: bool, timeout: Duration) -> Result<(), HandshakeError> {
    let (near, mut far) = tcp_pair();
    far.write_all(bytes).unwrap();
    let keys = keys::generate().unwrap();
    if dialling {
        dial_control(near.into(), &keys, &keys.public(), timeout).map(|_| ())
    } else {
        let incoming = accept(near.into(), timeout)?;
        incoming.control(&keys, |_| true).map(|_| ())
    }
}

#[test]
fn garbage_and_silence_end_in_time_and_by_name() {
    let preamble = [&b"WEFT"[..], &PROTOCOL_VERSION.to_le_bytes()].concat();
    let start = Instant::now();
    for dialling in [true, false] {
        let http = against(b"HTTP/1.1 400 Bad Request\r\n\r\n", dialling, SHORT);
        assert!(matches!(http, Err(HandshakeError::NotWeft)), "{http:?}");
        for silent in [&b""[..], b"WE", &preamble] {
            let outcome = against(silent, dialling, SHORT);
            assert!(
                matches!(outcome, Err(HandshakeError::Timeout(_))),
                "{outcome:?}"
            );
        }
        let opening = [&[1u8][..], &[0; 16]].concat();
        let opening = if dialling { &[][..] } else { &opening };
        let long = [&preamble, opening, &[0xff, 0xff], &[7; 300]].concat();
        let outcome = against(&long, dialling, SHORT);
        assert!(
            matches!(outcome, Err(HandshakeError::Malformed(_))),
            "{outcome:?}"
        );
        let random = [&preamble, opening, &[0, 96], &[7; 96]].concat();
        let outcome = against(&random, dialling, SHORT);
        let expected = [
            matches!(outcome, Err(HandshakeError::NotAuthentic)),
            matches!(outcome, Err(HandshakeError::Malformed(_))),
        ];
        assert!(expected.contains(&true), "{outcome:?}");
    }
    let unknown = [&preamble[..], &[9; 17]].concat();
    let outcome = against(&unknown, false, SHORT);
    assert!(
        matches!(outcome, Err(HandshakeError::Malformed(_))),
        "{outcome:?}"
    );
    assert!(start.elapsed() < Duration::from_secs(10));
}

/// One byte every so often does not stretch the time.
#[test]
fn a_trickling_peer_runs_into_the_deadline() {
    let (near, mut far) = tcp_pair();
    let writer = std::thread::spawn(move || {
        let preamble = [&b"WEFT"[..], &PROTOCOL_VERSION.to_le_bytes(), &[1; 100]].concat();
        for byte in preamble {
            if far.write_all(&[byte]).is_err() {
                break;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    });
    let start = Instant::now();
    let outcome = accept(near.into(), SHORT).map(|_| ());
    assert!(
        matches!(outcome, Err(HandshakeError::Timeout(_))),
        "{outcome:?}"
    );
    assert!(start.elapsed() < SHORT * 4);
    writer.join().unwrap();
}

fn keyed(secrets: [[u8; 32]; 2], tickets: [[u8; 16]; 2]) -> [Result<Keyed, HandshakeError>; 2] {
    let (near, far) = tcp_pair();
    let server = std::thread::spawn(move || {
        let incoming = accept(far.into(), LONG)?;
        assert_eq!(incoming.opening(), Opening::Link { ticket: tickets[1] });
        incoming.link(&secrets[1])
    });
    let near = dial_link(near.into(), &tickets[0], &secrets[0], LONG);
    [near, server.join().unwrap()]
}

#[test]
fn slices_with_one_secret_get_a_sealed_link() {
    let secret = keys::secret().unwrap();
    let [near, far] = keyed([secret; 2], [[5; 16]; 2]).map(Result::unwrap);
    assert_ne!(near.send_key, near.receive_key);
    let [mut near, mut far] = [near, far].map(|end| {
        let Socket::Tcp(stream) = end.socket else {
            panic!("not TCP");
        };
        let kind = LinkKind::Sealed {
            fd: stream.as_raw_fd(),
            send_key: end.send_key,
            receive_key: end.receive_key,
        };
        open(kind, stream.into(), common::SPIN_NS, 5000)
    });
    near.link.send(&Header::new(1), &[b"hello"]).unwrap();
    let frame = far.link.receive(5_000_000_000).unwrap().expect("a frame");
    assert_eq!(frame.payload, b"hello");
}

#[test]
fn slices_with_different_secrets_get_nothing() {
    let secrets = [keys::secret().unwrap(), keys::secret().unwrap()];
    let [near, far] = keyed(secrets, [[5; 16]; 2]);
    assert!(matches!(far, Err(HandshakeError::NotAuthentic)), "{far:?}");
    assert!(matches!(near, Err(HandshakeError::Closed)), "{near:?}");
}

#[test]
fn messages_of_all_sizes_pass_both_ways() {
    let (near, far) = channels();
    let sizes = [0, 1, 100, 61_439, 61_440, 61_441, 200_000, MESSAGE_MAX - 2];
    let (mut reader, mut writer) = far.split();
    let echo = std::thread::spawn(move || {
        for _ in sizes {
            let text: String = reader.receive(LONG).unwrap();
            writer.send(&text).unwrap();
        }
        writer.shutdown();
    });
    let (mut reader, mut writer) = near.split();
    for size in sizes {
        let text = "w".repeat(size);
        writer.send(&text).unwrap();
        assert!(reader.receive::<String>(LONG).unwrap() == text);
    }
    let long = writer.send(&"w".repeat(MESSAGE_MAX));
    assert!(
        matches!(long, Err(ChannelError::TooLong { .. })),
        "{long:?}"
    );
    echo.join().unwrap();
    let end = reader.receive::<String>(LONG);
    assert!(matches!(end, Err(ChannelError::Closed)), "{end:?}");
}

#[test]
fn a_silent_or_wrong_peer_is_named_and_the_channel_goes_on() {
    let (mut near, mut far) = channels();
    let silent = near.receive::<u32>(Duration::from_millis(50));
    assert!(
        matches!(silent, Err(ChannelError::Timeout(_))),
        "{silent:?}"
    );
    far.send(&"text").unwrap();
    let wrong = near.receive::<u32>(LONG);
    assert!(
        matches!(wrong, Err(ChannelError::Malformed(_))),
        "{wrong:?}"
    );
    far.send(&7).unwrap();
    assert_eq!(near.receive::<u32>(LONG).unwrap(), 7);
}

#[test]
fn altered_and_oversized_messages_end_a_channel() {
    let (near, mut far) = tcp_pair();
    let mut channel = Channel::sealed(near.into(), [1; 32], [2; 32]).unwrap();
    far.write_all(&[40, 0, 0, 0]).unwrap();
    far.write_all(&[9; 40]).unwrap();
    let forged = channel.receive::<u32>(LONG);
    assert!(
        matches!(forged, Err(ChannelError::Sealing(_))),
        "{forged:?}"
    );

    let (near, mut far) = UnixStream::pair().unwrap();
    let mut channel = Channel::local(near).unwrap();
    far.write_all(&(MESSAGE_MAX as u32 + 1).to_le_bytes())
        .unwrap();
    let long = channel.receive::<u32>(LONG);
    assert!(
        matches!(long, Err(ChannelError::TooLong { .. })),
        "{long:?}"
    );
}

#[test]
fn a_local_channel_is_in_the_clear_and_bounded() {
    let (near, mut far) = UnixStream::pair().unwrap();
    let (mut reader, mut writer) = Channel::local(near).unwrap().split();
    writer.send(&vec![1, 2]).unwrap();
    let mut bytes = [0; 9];
    far.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"\x05\0\0\0[1,2]");
    far.write_all(b"\x01\0\0\0").unwrap();
    let half = reader.receive::<u32>(Duration::from_millis(30));
    assert!(matches!(half, Err(ChannelError::Timeout(_))), "{half:?}");
    far.write_all(b"4").unwrap();
    assert_eq!(reader.receive::<u32>(LONG).unwrap(), 4);
    // A peer that takes nothing does not hold the writer.
    writer.set_timeout(Duration::from_millis(50));
    let text = "w".repeat(MESSAGE_MAX - 2);
    let stalled = writer.send(&text);
    assert!(
        matches!(stalled, Err(ChannelError::Timeout(_))),
        "{stalled:?}"
    );
    assert!(matches!(writer.send(&1), Err(ChannelError::Closed)));
}
