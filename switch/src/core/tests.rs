//! One switch, and what it does with each kind of frame.

use super::*;
use proptest::prelude::*;

fn card(number: u8) -> Address {
    Address([2, 0, 0, 0, 0, number])
}

const ALL: Address = Address([0xff; 6]);

fn frame(source: Address, destination: Address, number: u32) -> Vec<u8> {
    let mut frame = [destination.0, source.0].concat();
    frame.extend([8, 0]);
    frame.extend(number.to_be_bytes());
    frame
}

fn announcement(source: Address) -> Vec<u8> {
    let mut frame = [ALL.0, source.0].concat();
    frame.extend([0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3]);
    for _ in 0..2 {
        frame.extend(source.0);
        frame.extend([0; 4]);
    }
    frame.resize(60, 0);
    frame
}

/// All that goes out at a port now.
fn out(switch: &mut Switch, port: PortId, now: u64) -> Vec<Outgoing> {
    std::iter::from_fn(|| switch.next(port, now)).collect()
}

/// The numbers of the frames that go out.
fn numbers(switch: &mut Switch, port: PortId) -> Vec<u32> {
    let frames = out(switch, port, 0).into_iter();
    let number = |outgoing| match outgoing {
        Outgoing::Frame(frame, _) => Some(u32::from_be_bytes(frame[14..18].try_into().unwrap())),
        _ => None,
    };
    frames.filter_map(number).collect()
}

/// A switch with machines 0 and 1, which are known, and a peer that is up.
fn small() -> (Switch, [PortId; 3]) {
    let mut switch = Switch::default();
    let ports = [
        switch.add_machine().unwrap(),
        switch.add_machine().unwrap(),
        switch.add_peer().unwrap(),
    ];
    switch.peer_up(ports[2]);
    for (number, port) in (0..).zip(&ports[..2]) {
        switch.receive(*port, &announcement(card(number)), Way::Directed, 0);
    }
    for port in ports {
        out(&mut switch, port, 0);
    }
    (switch, ports)
}

#[test]
fn a_known_address_gets_it_alone_and_an_unknown_one_by_all() {
    let (mut switch, [a, b, peer]) = small();
    switch.receive(a, &frame(card(0), card(1), 1), Way::Directed, 0);
    assert_eq!(numbers(&mut switch, b), [1]);
    assert_eq!(out(&mut switch, peer, 0), []);
    switch.receive(a, &frame(card(0), card(9), 2), Way::Directed, 0);
    switch.receive(a, &frame(card(0), ALL, 3), Way::Directed, 0);
    assert_eq!(numbers(&mut switch, b), [2, 3]);
    assert_eq!(numbers(&mut switch, peer), [2, 3]);
    assert_eq!(out(&mut switch, a, 0), []);
    assert_eq!(switch.totals().flooded, 4);
}

#[test]
fn a_frame_of_a_peer_goes_to_no_peer_but_where_its_destination_went() {
    let (mut switch, [a, b, peer]) = small();
    let other = switch.add_peer().unwrap();
    switch.peer_up(other);
    out(&mut switch, other, 0);
    switch.receive(other, &frame(card(5), ALL, 1), Way::Directed, 0);
    switch.receive(other, &frame(card(5), card(9), 2), Way::Directed, 0);
    assert_eq!(numbers(&mut switch, a), [1, 2]);
    assert_eq!(numbers(&mut switch, b), [1, 2]);
    assert_eq!(out(&mut switch, peer, 0), []);
    // The one at which the address is gets it if it has no copy; its sender hears that it is
    // not here.
    for (way, goes) in [
        (Way::ToAll, false),
        (Way::PassedOn, false),
        (Way::Directed, true),
    ] {
        let late = frame(card(6), card(5), 3);
        switch.receive(peer, &late, way, 0);
        let passed_on = Outgoing::Frame(late.into(), Way::PassedOn);
        let expected: &[Outgoing] = if goes { &[passed_on] } else { &[] };
        assert_eq!(out(&mut switch, other, 0), expected);
        assert_eq!(out(&mut switch, peer, 0), [Outgoing::Gone(card(5))]);
    }
    assert_eq!(switch.counters(peer).unwrap().misdirected, 3);
}

#[test]
fn frames_for_a_machine_that_stands_wait_and_the_oldest_make_room() {
    let (mut switch, [a, b, _]) = small();
    let count = FRAMES_MAX as u32;
    for number in 0..count + 7 {
        switch.receive(a, &frame(card(0), card(1), number), Way::Directed, 0);
    }
    assert_eq!(switch.waiting(b).count(), FRAMES_MAX);
    let expected: Vec<u32> = (7..count + 7).collect();
    assert_eq!(numbers(&mut switch, b), expected);
    assert_eq!(switch.counters(b).unwrap().overflowed, 7);
    // Large ones by their bytes.
    let mut large = frame(card(0), card(1), 0);
    large.resize(crate::frames::FRAME_MAX, 0);
    for _ in 0..FRAMES_MAX {
        switch.receive(a, &large, Way::Directed, 0);
    }
    let bytes: usize = switch.waiting(b).map(<[u8]>::len).sum();
    assert!(bytes <= BYTES_MAX && bytes > BYTES_MAX - large.len());
}

#[test]
fn no_frame_waits_for_ever() {
    let (mut switch, [a, b, _]) = small();
    switch.receive(a, &frame(card(0), card(1), 1), Way::Directed, 1000);
    switch.receive(a, &frame(card(0), card(1), 2), Way::Directed, 2000);
    switch.tick(FRAME_AGE_MS + 1500);
    assert_eq!(numbers(&mut switch, b), [2]);
    assert_eq!(switch.counters(b).unwrap().stale, 1);
    switch.tick(ADDRESS_AGE_MS + 1500);
    assert_eq!(switch.port_of(card(1)), None);
    assert_eq!(switch.known(), 1);
}

/// The machine has moved from one peer to another; its last frame from there comes later than
/// its announcement.
#[test]
fn an_old_frame_does_not_move_a_machine_back() {
    let (mut switch, [a, b, old]) = small();
    let new = switch.add_peer().unwrap();
    switch.peer_up(new);
    switch.receive(old, &frame(card(7), card(0), 1), Way::Directed, 10);
    assert_eq!(switch.port_of(card(7)), Some(old));
    switch.receive(new, &announcement(card(7)), Way::Directed, 20);
    out(&mut switch, a, 20);
    switch.receive(old, &frame(card(7), card(0), 2), Way::Directed, 25);
    assert_eq!(numbers(&mut switch, a), [2], "it is passed on");
    assert_eq!(switch.port_of(card(7)), Some(new));
    // The same where it was: what its former process sent is read late.
    switch.receive(new, &announcement(card(1)), Way::Directed, 30);
    out(&mut switch, a, 30);
    switch.receive(b, &frame(card(1), card(0), 3), Way::Directed, 35);
    assert_eq!(switch.port_of(card(1)), Some(new));
    assert_eq!(numbers(&mut switch, a), [3]);
    // Another announcement counts at once, and after a while each frame.
    switch.receive(old, &announcement(card(7)), Way::Directed, 40);
    assert_eq!(switch.port_of(card(7)), Some(old));
    switch.receive(new, &frame(card(7), card(0), 4), Way::Directed, 40 + NEW_MS);
    assert_eq!(switch.port_of(card(7)), Some(new));
}

#[test]
fn what_waits_follows_a_machine_to_where_it_announces_itself() {
    let (mut switch, [a, b, peer]) = small();
    switch.receive(a, &frame(card(0), card(1), 1), Way::Directed, 0);
    switch.receive(a, &frame(card(0), ALL, 2), Way::Directed, 0);
    switch.receive(peer, &frame(card(5), card(1), 3), Way::Directed, 0);
    switch.receive(peer, &announcement(card(1)), Way::Directed, 1);
    // Its copy of frame 2 has gone to the peer already; frame 3 came from there, and goes back.
    assert_eq!(numbers(&mut switch, peer), [2, 1, 3]);
    assert_eq!(switch.totals().passed_on, 1);
    assert_eq!(switch.counters(b).unwrap().stale, 0);
    switch.receive(a, &frame(card(0), card(1), 4), Way::Directed, 1);
    assert_eq!(numbers(&mut switch, peer), [4]);
    // And back, to another port: all of them.
    switch.peer_down(peer);
    switch.receive(a, &frame(card(0), card(1), 5), Way::Directed, 1);
    let again = switch.add_machine().unwrap();
    switch.receive(again, &announcement(card(1)), Way::Directed, 2);
    assert_eq!(numbers(&mut switch, again), [5]);
    assert_eq!(switch.totals().followed, 3);
}

/// Its former switch passes on what others send there before they know, once; and what it had
/// sent itself.
#[test]
fn what_comes_too_late_for_a_machine_that_moved_is_passed_on() {
    let (mut switch, [_, b, sender]) = small();
    let new = switch.add_peer().unwrap();
    switch.peer_up(new);
    out(&mut switch, new, 0);
    switch.receive(sender, &announcement(card(5)), Way::Directed, 0);
    switch.receive(b, &frame(card(1), card(5), 1), Way::Directed, 1);
    switch.receive(new, &announcement(card(1)), Way::Directed, 2);
    let late = frame(card(5), card(1), 2);
    switch.receive(sender, &late, Way::Directed, 3);
    let passed_on = |frame: Vec<u8>| Outgoing::Frame(frame.into(), Way::PassedOn);
    assert_eq!(
        out(&mut switch, sender, 3),
        [
            Outgoing::Gone(card(1)),
            passed_on(frame(card(1), card(5), 1))
        ]
    );
    assert_eq!(out(&mut switch, new, 3), [passed_on(late.clone())]);
    // It has moved again: not a second time. Nothing is learned of the sender.
    switch.receive(new, &late, Way::PassedOn, 4);
    assert_eq!(switch.port_of(card(5)), Some(sender));
    assert_eq!(out(&mut switch, new, 4), [Outgoing::Gone(card(1))]);
    assert!(!switch.has_output(sender));
    // It is here: it gets what is passed on.
    switch.receive(b, &announcement(card(1)), Way::Directed, 5);
    out(&mut switch, b, 5);
    switch.receive(new, &frame(card(5), card(1), 3), Way::PassedOn, 6);
    assert_eq!(numbers(&mut switch, b), [3]);
}

#[test]
fn a_machine_that_is_gone_for_a_moment_loses_no_frame() {
    let (mut switch, [a, b, peer]) = small();
    switch.receive(a, &frame(card(0), card(1), 1), Way::Directed, 0);
    switch.receive(a, &frame(card(0), ALL, 2), Way::Directed, 0);
    switch.machine_gone(b, 10);
    switch.receive(a, &frame(card(0), card(1), 3), Way::Directed, 20);
    assert!(!switch.has_output(b));
    let again = switch.add_machine().unwrap();
    switch.receive(again, &frame(card(1), card(0), 4), Way::Directed, 30);
    assert_eq!(numbers(&mut switch, again), [1, 3]);
    assert_eq!(switch.counters(b), None);
    // One that does not come back is forgotten, also by the peers.
    switch.machine_gone(again, 100);
    switch.receive(a, &frame(card(0), card(1), 5), Way::Directed, 200);
    out(&mut switch, peer, 200);
    switch.tick(100 + GONE_MS - 1);
    assert_eq!(switch.frames_waiting(), 2);
    switch.tick(100 + GONE_MS);
    assert_eq!(out(&mut switch, peer, 200), [Outgoing::Gone(card(1))]);
    assert_eq!(switch.port_of(card(1)), None);
    assert_eq!(numbers(&mut switch, a), [4]);
    assert_eq!(switch.frames_waiting(), 0);
}

#[test]
fn an_old_frame_of_a_peer_moves_no_machine_away() {
    let (mut switch, [a, b, peer]) = small();
    switch.receive(peer, &frame(card(1), card(0), 1), Way::Directed, 5);
    assert_eq!(switch.port_of(card(1)), Some(b));
    assert_eq!(numbers(&mut switch, a), [1]);
    switch.receive(peer, &announcement(card(1)), Way::Directed, 6);
    assert_eq!(switch.port_of(card(1)), Some(peer));
}

#[test]
fn each_side_of_a_new_link_says_what_is_there() {
    let (mut switch, [_, b, peer]) = small();
    switch.receive(peer, &announcement(card(5)), Way::Directed, 0);
    switch.peer_down(peer);
    switch.receive(b, &announcement(card(7)), Way::Directed, 1000);
    switch.machine_gone(b, 1000);
    switch.peer_up(peer);
    // Frames of a machine that is gone do not bring it back.
    let told = out(&mut switch, peer, 3000);
    let here = |number: u8, age_ms| Outgoing::Here {
        address: card(number),
        age_ms,
    };
    let old = Outgoing::Frame(announcement(card(7)).into(), Way::PassedOn);
    assert_eq!(told, [here(0, 3000), old]);
    assert_eq!(switch.port_of(card(5)), None);
    // Of two claims the younger one counts.
    switch.receive_here(peer, card(0), 4000, 4000);
    assert_ne!(switch.port_of(card(0)), Some(peer));
    switch.receive_here(peer, card(0), 500, 4000);
    assert_eq!(switch.port_of(card(0)), Some(peer));
    switch.receive_gone(peer, card(0));
    assert_eq!(switch.port_of(card(0)), None);
}

#[test]
fn broken_frames_are_counted_and_a_table_has_an_end() {
    let (mut switch, [a, b, peer]) = small();
    switch.receive(a, &[1; 13], Way::Directed, 0);
    switch.receive(a, &frame(ALL, card(1), 0), Way::Directed, 0);
    assert_eq!(switch.counters(a).unwrap().broken, 2);
    for number in 0..1000_u32 {
        let [_, _, c, d] = number.to_be_bytes();
        let source = Address([6, 0, 0, 0, c, d]);
        switch.receive(a, &frame(source, card(1), number), Way::Directed, 0);
    }
    assert_eq!(switch.addresses(a).len(), MACHINE_ADDRESSES_MAX);
    let counters = switch.counters(a).unwrap();
    assert_eq!(counters.refused, 1001 - MACHINE_ADDRESSES_MAX as u64);
    assert_eq!(numbers(&mut switch, b).len(), MACHINE_ADDRESSES_MAX - 1);
    assert_eq!(out(&mut switch, peer, 0), []);
    for _ in 0..MACHINES_MAX - 2 {
        switch.add_machine().unwrap();
    }
    let full = switch.add_machine().unwrap_err().to_string();
    assert_eq!(
        full,
        "the switch has 64 machines already, and no more are allowed"
    );
}

#[derive(Debug, Clone)]
enum Event {
    Frame(usize, u8, u8),
    Broken(usize, Vec<u8>),
    Here(usize, u8, u32),
    Gone(usize, u8),
    Up(usize),
    Down(usize),
    Leave(usize),
    Join,
    Take(usize),
    Tick(u32),
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let port = 0_usize..8;
    let event = prop_oneof![
        8 => (port.clone(), 0_u8..6, 0_u8..7).prop_map(|(port, from, to)| Event::Frame(port, from, to)),
        1 => (port.clone(), proptest::collection::vec(any::<u8>(), 0..40)).prop_map(|(port, bytes)| Event::Broken(port, bytes)),
        1 => (port.clone(), 0_u8..6, 0_u32..5000).prop_map(|(port, card, age)| Event::Here(port, card, age)),
        1 => (port.clone(), 0_u8..6).prop_map(|(port, card)| Event::Gone(port, card)),
        1 => port.clone().prop_map(Event::Up),
        1 => port.clone().prop_map(Event::Down),
        1 => port.clone().prop_map(Event::Leave),
        1 => Just(Event::Join),
        3 => port.prop_map(Event::Take),
        1 => (0_u32..20_000).prop_map(Event::Tick),
    ];
    proptest::collection::vec(event, 0..300)
}

proptest! {
    /// Whatever comes, a frame goes to each port once at most, not back, and from peer to peer
    /// only if it is passed on for the first time, and then not to the bridge; a detour has
    /// nothing else. What is remembered has its bounds, and is forgotten in the end.
    #[test]
    fn any_events_keep_the_invariants(events in events()) {
        let mut switch = Switch::default();
        let mut ports: Vec<PortId> = (0..3).map(|_| switch.add_machine().unwrap()).collect();
        ports.extend((0..2).map(|_| switch.add_peer().unwrap()));
        let bridge = switch.add_bridge().unwrap();
        ports.extend([bridge, switch.add_detour().unwrap(), switch.add_detour().unwrap()]);
        let (mut now, mut sent) = (0, 0);
        // By frame: the port that it came from, and how, if that was a peer's.
        let mut origins: Vec<(PortId, Option<Way>)> = Vec::new();
        let mut taken = std::collections::HashSet::new();
        for event in events {
            let at = |index: usize| ports[index % ports.len()];
            let kind = |switch: &Switch, id| switch.ports().find(|(port, _)| *port == id).map(|(_, kind)| kind);
            match event {
                Event::Frame(port, from, to) => {
                    let port = at(port);
                    // A port that is gone receives nothing.
                    let Some(kind) = kind(&switch, port) else { continue };
                    if !kind.is_switch() && !kind.is_connected_machine() { continue }
                    let to = if to == 6 { ALL } else { card(to) };
                    let ways = [Way::Directed, Way::PassedOn, Way::ToAll];
                    let way = match kind {
                        Kind::Machine { .. } => None,
                        Kind::Peer { .. } => Some(ways[sent as usize % 3]),
                        Kind::Detour { .. } => Some(Way::PassedOn),
                    };
                    let number = frame(card(from), to, sent);
                    switch.receive(port, &number, way.unwrap_or_default(), now);
                    origins.push((port, way));
                    sent += 1;
                }
                Event::Broken(port, bytes) => {
                    if Header::parse(&bytes).is_none() {
                        switch.receive(at(port), &bytes, Way::Directed, now);
                    }
                }
                Event::Here(port, number, age) => switch.receive_here(at(port), card(number), age, now),
                Event::Gone(port, number) => switch.receive_gone(at(port), card(number)),
                Event::Up(port) => switch.peer_up(at(port)),
                Event::Down(port) => switch.peer_down(at(port)),
                Event::Leave(port) => match kind(&switch, at(port)) {
                    Some(kind) if kind.is_switch() => switch.remove_peer(at(port)),
                    _ => switch.machine_gone(at(port), now),
                },
                Event::Join => {
                    let joined = if sent % 2 == 0 { switch.add_machine() } else { switch.add_peer() };
                    ports.extend(joined);
                }
                Event::Take(port) => {
                    let port = at(port);
                    let is_switch = kind(&switch, port).is_some_and(Kind::is_switch);
                    let is_detour = matches!(kind(&switch, port), Some(Kind::Detour { .. }));
                    for outgoing in out(&mut switch, port, now) {
                        let Outgoing::Frame(frame, way) = outgoing else { continue };
                        let number = u32::from_be_bytes(frame[14..18].try_into().unwrap());
                        let (origin, came) = origins[number as usize];
                        let passed_on = is_switch && way == Way::PassedOn;
                        prop_assert!(port != bridge || !passed_on);
                        prop_assert!(!is_detour || passed_on);
                        prop_assert!(origin != port || passed_on);
                        prop_assert!(!is_switch || came.is_none() || passed_on);
                        prop_assert!(!is_switch || came != Some(Way::PassedOn));
                        prop_assert!(taken.insert((number, port)));
                    }
                }
                Event::Tick(passed) => {
                    now += u64::from(passed);
                    switch.tick(now);
                }
            }
            for id in &ports {
                prop_assert!(switch.waiting(*id).count() <= FRAMES_MAX);
            }
            prop_assert!(switch.known() <= 6);
        }
        switch.tick(now + ADDRESS_AGE_MS + 1);
        prop_assert_eq!(switch.known(), 0);
        prop_assert_eq!(switch.frames_waiting(), 0);
        prop_assert!(switch.ports().all(|(_, kind)| kind.is_switch() || kind.is_connected_machine()));
    }
}
