//! The switch: what machines and other switches send.

use crate::random::Random;
use weft_switch::core::{ADDRESS_AGE_MS, Outgoing, Switch};
use weft_switch::frames::{Address, LENGTH, Message, Way, first};

/// Messages on the sockets of a switch, in turn of two machines and a peer.
pub fn messages(input: &[u8]) {
    let mut switch = Switch::default();
    let machines = [0; 2].map(|_| switch.add_machine().expect("two machines are allowed"));
    let peer = switch.add_peer().expect("a peer is allowed");
    switch.peer_up(peer);
    let (mut rest, mut now, mut turn) = (input, 1 << 40, 0);
    let mut way = Way::Directed;
    while let Ok(Some(bytes)) = first(rest) {
        rest = &rest[LENGTH + bytes.len()..];
        now += 7;
        match machines.get(turn) {
            Some(machine) => switch.receive(*machine, bytes, Way::Directed, now),
            None => match Message::parse(bytes) {
                Ok(Message::KeepAlive) => {}
                Ok(Message::Way(next)) => way = next,
                Ok(Message::Frame(frame)) => {
                    switch.receive(peer, frame, std::mem::take(&mut way), now)
                }
                Ok(Message::Here { address, age_ms }) => {
                    switch.receive_here(peer, address, age_ms, now);
                }
                Ok(Message::Gone(address)) => switch.receive_gone(peer, address),
                Err(_) => break,
            },
        }
        turn = (turn + 1) % 3;
    }
    for machine in machines {
        while let Some(outgoing) = switch.next(machine, now) {
            assert!(matches!(outgoing, Outgoing::Frame(_, Way::Directed)));
        }
    }
    while let Some(outgoing) = switch.next(peer, now) {
        let mut bytes = Vec::new();
        outgoing.write(&mut bytes);
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let found = first(rest).expect("a switch sends messages");
            let found = found.expect("it sends whole ones");
            assert!(Message::parse(found).is_ok());
            rest = &rest[LENGTH + found.len()..];
        }
    }
    switch.tick(now + ADDRESS_AGE_MS + 1);
    assert_eq!((switch.known(), switch.frames_waiting()), (0, 0));
}

/// Frames, announcements and notices among a few addresses.
pub fn valid_messages(random: &mut Random) -> Vec<u8> {
    let mut out = Vec::new();
    let card = |random: &mut Random| Address([2, 0, 0, 0, 0, random.below(4) as u8]);
    for turn in 0..1 + random.below(12) {
        let (source, address) = (card(random), card(random));
        let all = random.below(3) == 0;
        let mut frame = if all { [0xff; 6] } else { address.0 }.to_vec();
        frame.extend(source.0);
        if all {
            frame.extend([0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3]);
            for _ in ["sender", "target"] {
                frame.extend(source.0);
                frame.extend([0; 4]);
            }
        }
        frame.resize(60 + random.below(40), 0);
        let message = match (turn % 3, random.below(4)) {
            (2, 0) => Message::KeepAlive,
            (2, 1) => Message::Gone(address),
            (2, 2) => Message::Here {
                address,
                age_ms: random.below(10_000) as u32,
            },
            _ => Message::Frame(&frame),
        };
        message.write(&mut out);
    }
    out
}
