//! Several switches, with machines that move, stand and go on, links that break and come
//! back, and switches that are killed. What is right is judged here by what each machine sent and
//! received, without a look at any table.
//!
//! A failing run prints its seed: `WEFT_SEED=N cargo test -p weft-switch simulation`.

use std::collections::{HashMap, HashSet, VecDeque};

use super::*;

/// SplitMix64 (Steele et al. 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }
}

const ALL: Address = Address([0xff; 6]);

/// A machine's card.
struct Machine {
    address: Address,
    switch: usize,
    port: PortId,
    stands: bool,
    /// Where its former process still holds a connection.
    former: Option<(usize, PortId)>,
}

/// What a switch has for another.
struct Side {
    port: PortId,
    /// It takes the link to be up.
    up: bool,
}

/// A frame that a machine sent.
struct Sent {
    machine: usize,
    /// One machine; without it, all.
    to: Option<usize>,
    switch: usize,
    port: PortId,
    /// It went to several ports.
    flooded: bool,
}

/// The hosts' bridges and the VXLAN between them, which learn from each frame where its source is.
struct Bridge {
    /// The port of each switch.
    ports: Vec<PortId>,
    /// By host and address: the host where it was heard.
    learned: HashMap<(usize, Address), usize>,
    under_way: HashMap<(usize, usize), VecDeque<Arc<[u8]>>>,
}

impl Bridge {
    /// A switch sends a frame.
    fn enter(&mut self, host: usize, frame: Arc<[u8]>) {
        let header = Header::parse(&frame).unwrap();
        self.learned.insert((host, header.source), host);
        let to = self.learned.get(&(host, header.destination)).copied();
        for other in (0..self.ports.len()).filter(|other| *other != host) {
            if to.is_none_or(|to| to == other) {
                let cable = self.under_way.entry((host, other)).or_default();
                cable.push_back(frame.clone());
            }
        }
    }

    /// What arrives at a host, if it goes to the switch there.
    fn leave(&mut self, from: usize, host: usize) -> Option<Option<Arc<[u8]>>> {
        let frame = self.under_way.get_mut(&(from, host))?.pop_front()?;
        let header = Header::parse(&frame).unwrap();
        self.learned.insert((host, header.source), from);
        let to = self.learned.get(&(host, header.destination));
        Some(Some(frame).filter(|_| to.is_none_or(|to| *to == host)))
    }
}

struct World {
    random: Random,
    now: u64,
    switches: Vec<Switch>,
    /// By switch and peer.
    sides: HashMap<(usize, usize), Side>,
    /// Links that carry something, by their lower and higher end.
    working: HashSet<(usize, usize)>,
    under_way: HashMap<(usize, usize), VecDeque<Outgoing>>,
    /// Then links are detours.
    bridge: Option<Bridge>,
    machines: Vec<Machine>,
    sent: Vec<Sent>,
    /// Frames by machine, and where it was then.
    received: HashMap<(usize, usize), (usize, PortId)>,
    /// The last frame from one machine to another: they arrive in order.
    last: HashMap<(usize, usize), usize>,
    /// Frames that were passed on, and the switch that got them.
    passed_on: HashSet<(u32, usize)>,
    /// No machine has moved since the last time that nothing was under way.
    calm: bool,
}

fn pair(a: usize, b: usize) -> (usize, usize) {
    (a.min(b), a.max(b))
}

impl World {
    fn new(seed: u64) -> World {
        World::with(seed, Switch::add_peer)
    }

    /// All switches have a tap device on one bridge.
    fn bridged(seed: u64) -> World {
        let mut world = World::with(seed, Switch::add_detour);
        let ports = world.switches.iter_mut().map(Switch::add_bridge);
        world.bridge = Some(Bridge {
            ports: ports.collect::<Result<_, _>>().unwrap(),
            learned: HashMap::new(),
            under_way: HashMap::new(),
        });
        world
    }

    fn with(seed: u64, add: fn(&mut Switch) -> Result<PortId, Full>) -> World {
        let mut random = Random(seed);
        let count = 2 + random.below(5);
        let mut world = World {
            random,
            now: 1_000_000,
            switches: (0..count).map(|_| Switch::default()).collect(),
            sides: HashMap::new(),
            working: HashSet::new(),
            under_way: HashMap::new(),
            bridge: None,
            machines: Vec::new(),
            sent: Vec::new(),
            received: HashMap::new(),
            last: HashMap::new(),
            passed_on: HashSet::new(),
            calm: false,
        };
        for a in 0..count {
            for b in (0..count).filter(|b| *b != a) {
                let port = add(&mut world.switches[a]).unwrap();
                world.sides.insert((a, b), Side { port, up: false });
            }
        }
        for number in 0..2 + world.random.below(7) {
            let switch = world.random.below(count);
            world.machines.push(Machine {
                address: Address([2, 0, 0, 0, 1, number as u8]),
                switch,
                port: world.switches[switch].add_machine().unwrap(),
                stands: false,
                former: None,
            });
        }
        world
    }

    fn some_pair(&mut self) -> (usize, usize) {
        let count = self.switches.len();
        let a = self.random.below(count);
        let b = (a + 1 + self.random.below(count - 1)) % count;
        (a, b)
    }

    /// A machine sends to another, or to all.
    fn send(&mut self, machine: usize, to: Option<usize>) {
        let Machine {
            address,
            switch,
            port,
            stands,
            ..
        } = self.machines[machine];
        if stands {
            return;
        }
        let destination = to.map_or(ALL, |to| self.machines[to].address);
        let mut frame = [destination.0, address.0].concat();
        frame.extend([8, 0]);
        frame.extend((self.sent.len() as u32).to_be_bytes());
        let before = self.switches[switch].totals().flooded;
        self.switches[switch].receive(port, &frame, Way::Directed, self.now);
        self.sent.push(Sent {
            machine,
            to,
            switch,
            port,
            flooded: self.switches[switch].totals().flooded > before,
        });
    }

    fn announce(&mut self, machine: usize) {
        let Machine {
            address,
            switch,
            port,
            ..
        } = self.machines[machine];
        let mut frame = [ALL.0, address.0].concat();
        frame.extend([0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3]);
        for _ in 0..2 {
            frame.extend(address.0);
            frame.extend([0; 4]);
        }
        // A frame crosses the bridge in less time than a machine needs to move.
        self.cross_bridge();
        self.switches[switch].receive(port, &frame, Way::Directed, self.now);
        self.take_at_bridge(switch, usize::MAX);
        self.cross_bridge();
    }

    /// What a switch has for the bridge goes there.
    fn take_at_bridge(&mut self, host: usize, most: usize) {
        let Some(bridge) = &mut self.bridge else {
            return;
        };
        for _ in 0..most {
            match self.switches[host].next(bridge.ports[host], self.now) {
                None => return,
                Some(Outgoing::Frame(frame, way)) => {
                    assert_ne!(way, Way::PassedOn, "the bridge would learn a wrong place");
                    bridge.enter(host, frame);
                }
                Some(_) => {}
            }
        }
    }

    fn deliver_from_bridge(&mut self, from: usize, host: usize, most: usize) {
        let Some(bridge) = &mut self.bridge else {
            return;
        };
        for _ in 0..most {
            let Some(arrived) = bridge.leave(from, host) else {
                return;
            };
            if let Some(frame) = arrived {
                let port = bridge.ports[host];
                self.switches[host].receive(port, &frame, Way::Directed, self.now);
            }
        }
    }

    /// All that is on the bridge arrives.
    fn cross_bridge(&mut self) {
        for from in 0..self.switches.len() {
            for host in 0..self.switches.len() {
                self.deliver_from_bridge(from, host, usize::MAX);
            }
        }
    }

    /// What waits for a machine arrives there.
    fn take_at_machine(&mut self, machine: usize) {
        let Machine {
            switch,
            port,
            stands,
            ..
        } = self.machines[machine];
        while !stands && let Some(outgoing) = self.switches[switch].next(port, self.now) {
            let Outgoing::Frame(frame, _) = outgoing else {
                panic!("a machine was told {outgoing:?}");
            };
            if frame[12..14] == [8, 0] {
                self.arrived(
                    machine,
                    u32::from_be_bytes(frame[14..18].try_into().unwrap()),
                );
            }
        }
    }

    fn arrived(&mut self, machine: usize, number: u32) {
        let number = number as usize;
        let Sent {
            machine: from,
            to,
            switch,
            port,
            flooded,
        } = self.sent[number];
        let place = (self.machines[machine].switch, self.machines[machine].port);
        let before = self.received.insert((number, machine), place);
        // A copy may come late to where the machine has moved meanwhile, also one of its own.
        let late = |before, flooded| flooded && before != place && !self.calm;
        assert!(
            before.is_none_or(|before| late(before, flooded)),
            "frame {number} came twice"
        );
        assert!(
            from != machine || late((switch, port), true),
            "frame {number} came back to its sender"
        );
        if self.calm {
            assert!(
                to.is_none_or(|to| to == machine),
                "frame {number} came to machine {machine}"
            );
        }
        // Others may see what was sent to all who might be it.
        if self.calm && to == Some(machine) {
            let before = self.last.insert((from, machine), number);
            assert!(
                before < Some(number),
                "frame {number} came after {before:?}"
            );
        }
    }

    /// What a switch has for a peer goes onto the link.
    fn take_at_peer(&mut self, a: usize, b: usize, most: usize) {
        let Side { port, up } = self.sides[&(a, b)];
        for _ in 0..most {
            let Some(outgoing) = self.switches[a].next(port, self.now).filter(|_| up) else {
                return;
            };
            if let Outgoing::Frame(frame, way) = &outgoing
                && frame[12..14] == [8, 0]
            {
                let number = u32::from_be_bytes(frame[14..18].try_into().unwrap());
                let is_passed_on = *way == Way::PassedOn;
                let origin = self.sent[number as usize].switch;
                assert!(is_passed_on || origin == a, "switch {a}, frame {number}");
                // Of one to all it may be another copy.
                let flooded = self.sent[number as usize].flooded;
                let again = !flooded && self.passed_on.contains(&(number, a));
                assert!(!again, "frame {number} goes on from switch {a}");
                if is_passed_on {
                    self.passed_on.insert((number, b));
                }
            }
            if self.working.contains(&pair(a, b)) {
                self.under_way
                    .entry((a, b))
                    .or_default()
                    .push_back(outgoing);
            }
        }
    }

    /// What is on a link arrives at a switch.
    fn deliver(&mut self, a: usize, b: usize, most: usize) {
        for _ in 0..most {
            let under_way = self.under_way.get_mut(&(a, b));
            let Some(outgoing) = under_way.and_then(VecDeque::pop_front) else {
                return;
            };
            let port = self.sides[&(b, a)].port;
            let switch = &mut self.switches[b];
            match outgoing {
                Outgoing::Frame(frame, way) => switch.receive(port, &frame, way, self.now),
                Outgoing::Here { address, age_ms } => {
                    switch.receive_here(port, address, age_ms, self.now);
                }
                Outgoing::Gone(address) => switch.receive_gone(port, address),
            }
        }
    }

    /// A link ends; each side may notice later.
    fn break_link(&mut self, a: usize, b: usize) {
        self.working.remove(&pair(a, b));
        self.under_way.remove(&(a, b));
        self.under_way.remove(&(b, a));
    }

    fn notice_break(&mut self, a: usize, b: usize) {
        if !self.working.contains(&pair(a, b)) {
            let side = self.sides.get_mut(&(a, b)).unwrap();
            side.up = false;
            self.switches[a].peer_down(side.port);
        }
    }

    /// A new link, in place of the old one.
    fn make_link(&mut self, a: usize, b: usize) {
        self.break_link(a, b);
        self.working.insert(pair(a, b));
        for (a, b) in [(a, b), (b, a)] {
            let side = self.sides.get_mut(&(a, b)).unwrap();
            side.up = true;
            self.switches[a].peer_up(side.port);
        }
    }

    fn move_machine(&mut self, machine: usize) {
        self.end_former(machine);
        let to = self.random.below(self.switches.len());
        let Machine { switch, port, .. } = self.machines[machine];
        let Ok(new) = self.switches[to].add_machine() else {
            return;
        };
        if self.random.below(2) == 0 {
            self.switches[switch].machine_gone(port, self.now);
        } else {
            self.machines[machine].former = Some((switch, port));
        }
        let moved = &mut self.machines[machine];
        (moved.switch, moved.port, moved.stands) = (to, new, false);
        self.now += self.random.below(20) as u64 + 1;
        self.announce(machine);
    }

    fn end_former(&mut self, machine: usize) {
        if let Some((switch, port)) = self.machines[machine].former.take() {
            self.switches[switch].machine_gone(port, self.now);
        }
    }

    /// A switch is killed, and another started in its place. Its machines connect again, and
    /// announce themselves.
    fn restart(&mut self, a: usize) {
        let mut switch = Switch::default();
        for b in (0..self.switches.len()).filter(|b| *b != a) {
            self.break_link(a, b);
            let port = switch.add_peer().unwrap();
            self.sides.insert((a, b), Side { port, up: false });
        }
        for machine in &mut self.machines {
            machine.former = machine.former.filter(|(former, _)| *former != a);
            if machine.switch == a {
                machine.port = switch.add_machine().unwrap();
            }
        }
        self.switches[a] = switch;
        // As a card does whose link is back.
        for machine in 0..self.machines.len() {
            if self.machines[machine].switch == a {
                self.announce(machine);
            }
        }
    }

    fn step(&mut self) {
        let machine = self.random.below(self.machines.len());
        let (a, b) = self.some_pair();
        self.now += self.random.below(50) as u64;
        match self.random.below(100) {
            0..40 => {
                let to = self.random.below(self.machines.len());
                let to = (self.random.below(8) > 0).then_some(to);
                self.send(machine, to.filter(|to| *to != machine));
            }
            40..60 => self.take_at_machine(machine),
            60..75 => self.take_at_peer(a, b, 20),
            75..88 => self.deliver(a, b, 20),
            88 => self.move_machine(machine),
            89 => self.end_former(machine),
            90 => self.machines[machine].stands = true,
            91 => self.machines[machine].stands = false,
            92 => self.break_link(a, b),
            93..95 => self.notice_break(a, b),
            95..98 => self.make_link(a, b),
            98 if self.random.below(10) == 0 => self.restart(a),
            _ => {
                self.now += self.random.below(3000) as u64;
                self.switches
                    .iter_mut()
                    .for_each(|switch| switch.tick(self.now));
            }
        }
    }

    /// Until nothing is under way.
    fn settle(&mut self) {
        let count = self.switches.len();
        for round in 0.. {
            assert!(round < 100, "it does not come to rest");
            for machine in 0..self.machines.len() {
                self.take_at_machine(machine);
            }
            for a in 0..count {
                self.take_at_bridge(a, usize::MAX);
                for b in (0..count).filter(|b| *b != a) {
                    self.take_at_peer(a, b, usize::MAX);
                    self.deliver(a, b, usize::MAX);
                }
            }
            self.cross_bridge();
            if self.machines.iter().all(|machine| {
                let waiting = self.switches[machine.switch].waiting(machine.port);
                waiting.count() == 0
            }) && self.under_way.values().all(VecDeque::is_empty)
                && self
                    .sides
                    .iter()
                    .all(|((a, _), side)| !self.switches[*a].has_output(side.port))
                && self.bridge.iter().all(|bridge| {
                    let mut at = bridge.ports.iter().zip(&self.switches);
                    !at.any(|(port, switch)| switch.has_output(*port))
                })
            {
                return;
            }
        }
    }

    /// For each switch its ports, and where each machine is and seems to be.
    fn places(&self) -> String {
        let of = |switch: &Switch| {
            let machines = self.machines.iter().map(|machine| {
                let seems = switch.port_of(machine.address);
                (machine.switch, machine.port, seems)
            });
            format!(
                "{:?}, {:?}",
                switch.ports().collect::<Vec<_>>(),
                machines.collect::<Vec<_>>()
            )
        };
        self.switches.iter().map(of).collect::<Vec<_>>().join("\n")
    }

    /// All links work, and every machine has said where it is.
    fn heal(&mut self) {
        let count = self.switches.len();
        for a in 0..count {
            for b in a + 1..count {
                if !self.working.contains(&(a, b))
                    || !self.sides[&(a, b)].up
                    || !self.sides[&(b, a)].up
                {
                    self.make_link(a, b);
                }
            }
        }
        for machine in 0..self.machines.len() {
            self.machines[machine].stands = false;
            self.end_former(machine);
        }
        self.settle();
    }

    /// From each machine to each other one, and to all: exactly there, exactly once.
    fn everybody_is_reached(&mut self) {
        let all = self.machines.len();
        for from in 0..all {
            for to in (0..all).filter(|to| *to != from) {
                let number = self.sent.len();
                self.send(from, Some(to));
                self.settle();
                assert!(
                    self.received.contains_key(&(number, to)),
                    "{from} does not reach {to}"
                );
            }
            let number = self.sent.len();
            self.send(from, None);
            self.settle();
            for to in (0..all).filter(|to| *to != from) {
                assert!(
                    self.received.contains_key(&(number, to)),
                    "{from} does not reach all"
                );
            }
        }
    }
}

fn simulate(seed: u64) {
    let mut world = World::new(seed);
    let steps = 200 + world.random.below(1500);
    for _ in 0..steps {
        world.step();
    }
    world.heal();
    // A claim seems younger by the time that it was under way, so a former place may count
    // for a machine that is silent, until that place is forgotten.
    world.now += GONE_MS;
    let now = world.now;
    world
        .switches
        .iter_mut()
        .for_each(|switch| switch.tick(now));
    world.settle();
    // Each machine is found, though links were down when it announced itself: the first
    // frame may find that its way was wrong, the second one arrives.
    let all = world.machines.len();
    for from in 0..all {
        for to in (0..all).filter(|to| *to != from) {
            world.send(from, Some(to));
            world.settle();
            let number = world.sent.len();
            world.send(from, Some(to));
            world.settle();
            assert!(
                world.received.contains_key(&(number, to)),
                "{from} does not find {to}: {}",
                world.places()
            );
        }
    }
    for machine in 0..all {
        world.announce(machine);
    }
    world.settle();
    world.calm = true;
    world.everybody_is_reached();
    // Moves one after the other, with working links: no frame goes to a wrong machine.
    for _ in 0..5 {
        let machine = world.random.below(all);
        world.move_machine(machine);
        world.settle();
        world.everybody_is_reached();
    }
    // Nothing is kept for ever.
    for machine in 0..all {
        world.end_former(machine);
    }
    world.now += ADDRESS_AGE_MS + 1;
    for switch in &mut world.switches {
        switch.tick(world.now);
        assert_eq!((switch.known(), switch.frames_waiting()), (0, 0));
        assert!(
            switch
                .ports()
                .all(|(_, kind)| kind.is_peer() || kind.is_connected_machine())
        );
    }
}

/// Links work, and no machine moves twice before all has come to rest: no frame to one machine is
/// lost.
fn move_without_loss(mut world: World) {
    world.heal();
    let all = world.machines.len();
    for machine in 0..all {
        world.announce(machine);
    }
    world.settle();
    for _ in 0..10 {
        let first = world.sent.len();
        let machine = world.random.below(all);
        let at = world.random.below(60);
        for step in 0..80 {
            let any = world.random.below(all);
            let (a, b) = world.some_pair();
            match world.random.below(10) {
                _ if step == at => world.move_machine(machine),
                0..5 => {
                    let to = world.random.below(all);
                    world.send(any, Some(to).filter(|to| *to != any));
                }
                5..7 => world.take_at_machine(any),
                7..9 => {
                    world.take_at_bridge(a, 5);
                    world.take_at_peer(a, b, 5);
                }
                _ => {
                    world.deliver_from_bridge(a, b, 5);
                    world.deliver(a, b, 5);
                }
            }
        }
        world.settle();
        for number in first..world.sent.len() {
            let Some(to) = world.sent[number].to else {
                continue;
            };
            let arrived = world.received.contains_key(&(number, to));
            assert!(
                arrived,
                "frame {number} to machine {to} is lost: {}",
                world.places()
            );
        }
        world.end_former(machine);
        world.settle();
        world.now += NEW_MS;
    }
}

/// Repeats it with seeds, or with the one that is given.
fn with_seeds(simulate: fn(u64)) {
    if let Ok(seed) = std::env::var("WEFT_SEED") {
        return simulate(seed.parse().expect("WEFT_SEED is a number"));
    }
    for seed in 0..2000 {
        let outcome = std::panic::catch_unwind(|| simulate(seed));
        assert!(outcome.is_ok(), "it failed with WEFT_SEED={seed}");
    }
}

#[test]
fn moves_lose_nothing() {
    with_seeds(|seed| move_without_loss(World::new(seed)));
}

#[test]
fn moves_over_a_bridge_lose_nothing() {
    with_seeds(|seed| move_without_loss(World::bridged(seed)));
}

#[test]
fn simulation() {
    with_seeds(simulate);
}
