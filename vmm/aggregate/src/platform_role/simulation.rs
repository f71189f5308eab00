//! Hand-overs with random links, devices and vCPUs, and slices that refuse. The protocol, the
//! places and the interrupt routers are the real ones; links, devices, vCPUs, the pause and
//! the judge are the test's. Broken versions of the slices are found.
//!
//! A device is a counter: a level on the I/O APIC's pin asks the vCPU to take what is in it.
//! So an interrupt or an EOI that is lost leaves something in it for ever.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};

use weft_platform::bus::BusDevice;
use weft_platform::interrupts::{
    InterruptLink, InterruptRouter, InterruptTopology, IoApicState, Locations, Message,
    VcpuLocation,
};
use weft_platform::part::Persist;
use weft_platform::role::{RoleError, RolePlace};
use weft_test_support::Random;

use super::*;

const PIN: u8 = 9;
const VECTOR: u8 = 0x51;
const LEVEL: u32 = 1 << 15;

#[derive(Debug)]
enum Frame {
    Interrupt(u32, Message, u64),
    EndOfInterrupt(u8),
    Pin(u8, bool),
    /// A vCPU takes what is in the device.
    Take,
}

type Links = Arc<Mutex<BTreeMap<(usize, usize), VecDeque<Frame>>>>;

struct Way {
    me: usize,
    links: Links,
}

impl Way {
    fn send(&self, to: usize, frame: Frame) {
        assert_ne!(to, self.me, "a link to itself");
        let mut links = self.links.lock().unwrap();
        links.entry((self.me, to)).or_default().push_back(frame);
    }
}

impl InterruptLink for Way {
    fn deliver(&self, location: VcpuLocation, vcpu: u32, message: Message) {
        let frame = Frame::Interrupt(vcpu, message, location.epoch);
        self.send(location.slice, frame);
    }

    fn end_of_interrupt(&self, slice: usize, vector: u8) {
        self.send(slice, Frame::EndOfInterrupt(vector));
    }

    fn set_pin(&self, slice: usize, pin: u8, high: bool) {
        self.send(slice, Frame::Pin(pin, high));
    }
}

/// What is wrong with the slices.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mutant {
    None,
    /// The platform goes while EOIs are on their way, and the old holder does not send them
    /// on.
    DoesNotPause,
    /// The state goes without the I/O APIC's.
    ForgetsState,
    /// The old holder believes that it has the platform still.
    KeepsIt,
    /// Slice 1 is not told where the platform is.
    IsNotTold,
    /// After a refusal the old holder has a copy from an earlier time.
    TakesOldBack,
}

/// How a slice fails at a message.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Failure {
    Refuses,
    /// It obeys, and is lost before its reply arrives.
    IsLost,
}

struct Node {
    router: Arc<InterruptRouter>,
    place: Arc<RolePlace>,
    /// What waits in the device as it is here.
    device: u64,
    /// What a mutant has of an earlier hand-over.
    old: Option<serde_json::Value>,
    is_lost: bool,
}

struct World {
    nodes: Vec<Node>,
    links: Links,
    mutant: Mutant,
    random: Random,
    /// Put into the device, and taken from it.
    put: u64,
    taken: u64,
    refusals: u64,
    moves: u64,
    /// Of this hand-over.
    messages: usize,
    /// The message that fails, and how.
    fails: Option<(usize, Failure)>,
}

impl World {
    /// A machine with one vCPU on each slice.
    fn new(slices: usize, mutant: Mutant, seed: u64) -> Self {
        let links = Links::default();
        let node = |me| {
            let place = Arc::new(RolePlace::new(me, 0));
            let topology = InterruptTopology {
                slice: me,
                locations: Arc::new(Locations::new((0..slices).map(|_| 1))),
                io_apic: place.clone(),
                link: Arc::new(Way {
                    me,
                    links: links.clone(),
                }),
            };
            let router = InterruptRouter::of_slice(slices as u32, Some(topology));
            Node {
                router,
                place,
                device: 0,
                old: None,
                is_lost: false,
            }
        };
        let world = Self {
            nodes: (0..slices).map(node).collect(),
            links,
            mutant,
            random: Random::new(seed),
            put: 0,
            taken: 0,
            refusals: 0,
            moves: 0,
            messages: 0,
            fails: None,
        };
        world.route(0);
        world
    }

    /// The guest sends the interrupt to `vcpu` from now on.
    fn route(&self, vcpu: u32) {
        let apic = &self.nodes[self.holder()].router;
        let pin = u32::from(PIN);
        for (index, value) in [
            (0x11 + 2 * pin, vcpu << 24),
            (0x10 + 2 * pin, LEVEL | u32::from(VECTOR)),
        ] {
            apic.write(0, &index.to_le_bytes());
            apic.write(0x10, &value.to_le_bytes());
        }
    }

    fn holder(&self) -> usize {
        self.nodes[0].place.holder()
    }

    /// The vCPU of a slice takes its interrupts: it empties the device, then ends them.
    fn run_vcpu(&mut self, me: usize) {
        let node = &self.nodes[me];
        let posted = node.router.posted(me as u32).unwrap();
        for message in posted.take_messages() {
            assert!(matches!(message, Message::Fixed { vector: VECTOR, .. }));
            match self.nodes[me].place.is_here() {
                true => self.empty(me),
                // It waits for the answer, so nothing of this vCPU comes before it.
                false => self.ask(me),
            }
            let router = self.nodes[me].router.clone();
            router.end_of_interrupt(VECTOR, me as u32);
        }
    }

    fn ask(&mut self, me: usize) {
        let to = self.nodes[me].place.holder();
        let way = Way {
            me,
            links: self.links.clone(),
        };
        way.send(to, Frame::Take);
        while self.arrive(me, to, true) {}
    }

    fn empty(&mut self, me: usize) {
        let node = &mut self.nodes[me];
        self.taken += std::mem::take(&mut node.device);
        node.router.set_pin(PIN, false);
    }

    fn fill(&mut self) {
        let holder = self.holder();
        self.put += 1;
        self.nodes[holder].device += 1;
        self.nodes[holder].router.set_pin(PIN, true);
    }

    /// A frame of a link arrives, if there is one; with `all` until it is a vCPU's question.
    fn arrive(&mut self, from: usize, to: usize, all: bool) -> bool {
        let frame = self
            .links
            .lock()
            .unwrap()
            .get_mut(&(from, to))
            .and_then(VecDeque::pop_front);
        let Some(frame) = frame else {
            return false;
        };
        let router = self.nodes[to].router.clone();
        let is_question = matches!(frame, Frame::Take);
        let is_lost = self.mutant == Mutant::DoesNotPause && !self.nodes[to].place.is_here();
        match frame {
            Frame::Interrupt(vcpu, message, epoch) => {
                router.receive(vcpu, message, epoch).unwrap();
            }
            Frame::EndOfInterrupt(_) | Frame::Pin(..) if is_lost => {}
            Frame::EndOfInterrupt(vector) => router.end_at_io_apic(vector, None),
            Frame::Pin(pin, high) => router.set_pin(pin, high),
            Frame::Take => self.empty(to),
        }
        all && !is_question
    }

    /// No frame is on its way: what a pause waits for.
    fn settle(&mut self) {
        loop {
            let links = self.links.lock().unwrap();
            let busy = links.iter().find(|(_, frames)| !frames.is_empty());
            let Some((&(from, to), _)) = busy else {
                return;
            };
            drop(links);
            self.arrive(from, to, false);
        }
    }

    fn tell(&mut self, to: usize, command: &SliceCommand) -> Result<SliceReply, String> {
        let at = self.messages;
        self.messages += 1;
        let failure = self.fails.filter(|(failing, _)| *failing == at);
        if self.nodes[to].is_lost || failure == Some((at, Failure::Refuses)) {
            return Err("no".into());
        }
        let reply = self.obey(at, to, command)?;
        match failure {
            None => Ok(reply),
            Some(_) => {
                self.nodes[to].is_lost = true;
                Err("lost".into())
            }
        }
    }

    fn obey(
        &mut self,
        message: usize,
        to: usize,
        command: &SliceCommand,
    ) -> Result<SliceReply, String> {
        let mutant = self.mutant;
        let node = &mut self.nodes[to];
        let refused = |error: RoleError| error.to_string();
        match command {
            SliceCommand::GivePlatform { to, epoch } => {
                let state = (node.device, node.router.save().unwrap());
                let state = serde_json::to_value(state).unwrap();
                if mutant != Mutant::KeepsIt {
                    node.place.give(*to, *epoch).map_err(refused)?;
                }
                Ok(SliceReply::Platform(state))
            }
            SliceCommand::TakePlatform { epoch, state } => {
                let old = node.old.replace(state.clone());
                let is_back = message == 3;
                let state = match old.filter(|_| is_back && mutant == Mutant::TakesOldBack) {
                    Some(old) => old,
                    None => state.clone(),
                };
                let (device, apic): (u64, IoApicState) = serde_json::from_value(state).unwrap();
                node.device = device;
                if mutant != Mutant::ForgetsState {
                    node.router.restore(&apic).unwrap();
                }
                node.place.take(*epoch).map_err(refused)?;
                Ok(SliceReply::Done)
            }
            SliceCommand::PlatformAt { .. } if mutant == Mutant::IsNotTold && to == 1 => {
                Ok(SliceReply::Done)
            }
            SliceCommand::PlatformAt { holder, epoch } => {
                node.place.learn(*holder, *epoch).map_err(refused)?;
                Ok(SliceReply::Done)
            }
            other => panic!("{other:?}"),
        }
    }

    fn hand_over(&mut self, to: usize) -> Result<(), HandOverError> {
        let from = self.holder();
        let members = (0..self.nodes.len()).collect();
        let epoch = self.nodes[from].place.epoch();
        self.messages = 0;
        let mut tell = |to: usize, command: &SliceCommand| self.tell(to, command);
        let went = hand_over((from, epoch), to, &members, &mut tell)?;
        assert_eq!(went.epoch, epoch + 1);
        Ok(())
    }

    /// The platform goes to a slice, or a slice refuses.
    fn wander(&mut self) -> Result<(), String> {
        let to = self.random.below(self.nodes.len() as u64) as usize;
        if to == self.holder() {
            return Ok(());
        }
        if self.mutant != Mutant::DoesNotPause {
            self.settle();
        }
        // The old holder or the taker.
        let failing = self.random.below(6) as usize;
        self.fails = (failing < 2).then_some((failing, Failure::Refuses));
        match self.hand_over(to) {
            Ok(()) => self.moves += 1,
            Err(HandOverError::Kept(..)) => self.refusals += 1,
            Err(broken) => return Err(broken.to_string()),
        }
        self.judge_places()
    }

    /// Exactly one slice has the platform, and all know which.
    fn judge_places(&self) -> Result<(), String> {
        let holders: Vec<_> = self.nodes.iter().map(|node| node.place.holder()).collect();
        match holders.iter().all(|holder| *holder == holders[0]) {
            true => Ok(()),
            false => Err(format!("the platform is at {holders:?}")),
        }
    }

    /// Something happens.
    fn step(&mut self) -> Result<(), String> {
        let slices = self.nodes.len() as u64;
        match self.random.below(20) {
            0 => return self.wander(),
            1 => self.route((self.put % slices) as u32),
            2..6 => self.fill(),
            6..12 => {
                let me = self.random.below(slices) as usize;
                self.run_vcpu(me);
            }
            _ => {
                let (from, to) = (self.random.below(slices), self.random.below(slices));
                self.arrive(from as usize, to as usize, false);
            }
        }
        Ok(())
    }

    /// All that was put into the device is taken from it, and the last interrupt ended.
    fn finish(&mut self) -> Result<(), String> {
        for _ in 0..10 {
            self.settle();
            for me in 0..self.nodes.len() {
                self.run_vcpu(me);
            }
        }
        self.settle();
        match self.put == self.taken {
            true => Ok(()),
            false => Err(format!("{} of {} were taken", self.taken, self.put)),
        }
    }
}

/// What the judge finds, and hand-overs and refusals.
fn run(slices: usize, mutant: Mutant, seed: u64) -> Result<(u64, u64), String> {
    let mut world = World::new(slices, mutant, seed);
    for _ in 0..400 {
        world.step()?;
    }
    world.finish()?;
    // And it still works.
    world.fill();
    world.finish()?;
    Ok((world.moves, world.refusals))
}

#[test]
fn interrupts_of_devices_are_taken_wherever_the_platform_is() {
    let mut sums = (0, 0);
    for seed in 0..600 {
        let slices = 2 + (seed % 4) as usize;
        match run(slices, Mutant::None, seed) {
            Ok((moves, refusals)) => sums = (sums.0 + moves, sums.1 + refusals),
            Err(wrong) => panic!("{slices} slices, seed {seed}: {wrong}"),
        }
    }
    assert!(sums.0 > 2000 && sums.1 > 500, "{sums:?}");
}

#[test]
fn broken_slices_are_found() {
    for mutant in [
        Mutant::DoesNotPause,
        Mutant::ForgetsState,
        Mutant::KeepsIt,
        Mutant::IsNotTold,
        Mutant::TakesOldBack,
    ] {
        let found = (0..200).filter(|seed| run(3, mutant, *seed).is_err());
        let found = found.count();
        assert!(found > 5, "{mutant:?} is found in {found} of 200 runs");
    }
}

/// Each message of a hand-over fails in turn, and of the way back as well.
#[test]
fn a_message_that_fails_leaves_one_holder_or_ends_the_machine() {
    let mut outcomes = [0; 3];
    for slices in 2..6_usize {
        let messages = 0..slices + 3;
        for (at, failure) in
            messages.flat_map(|at| [Failure::Refuses, Failure::IsLost].map(|failure| (at, failure)))
        {
            let mut world = World::new(slices, Mutant::None, 7);
            world.fails = Some((at, failure));
            let went = world.hand_over(1);
            let holders = world.nodes.iter().filter(|node| node.place.is_here());
            assert!(holders.count() <= 1, "{at} {failure:?}");
            let is_lost = world.nodes.iter().any(|node| node.is_lost);
            match went {
                Ok(()) => {
                    assert!(world.nodes[1].place.is_here() && !is_lost);
                    assert_eq!(world.judge_places(), Ok(()));
                    outcomes[0] += 1;
                }
                // With a lost slice the machine ends, whatever this says.
                Err(HandOverError::Kept(..)) => {
                    assert!(is_lost || world.nodes[0].place.is_here());
                    assert!(is_lost || world.judge_places() == Ok(()));
                    outcomes[1] += 1;
                }
                Err(HandOverError::Broken(..)) => {
                    assert!(at > 0, "{failure:?}");
                    outcomes[2] += 1;
                }
            }
        }
    }
    assert!(outcomes.iter().all(|count| *count > 5), "{outcomes:?}");
}
