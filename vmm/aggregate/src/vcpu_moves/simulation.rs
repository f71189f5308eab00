//! Moves with random links, random interrupts and a slice that is lost at a random
//! message. The protocol and the interrupt routers are the real ones; links, vCPUs and
//! the judge are the test's.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex};

use weft_platform::interrupts::{
    InterruptLink, InterruptRouter, InterruptTopology, Locations, Message, VcpuLocation,
};
use weft_platform::role::RolePlace;

use super::protocol::{Action, Event, Move, Phase};

const VCPU: u32 = 0;

#[derive(Debug)]
enum Frame {
    Interrupt(Message, u64),
    HandOver(VcpuLocation),
    HandedOver(VcpuLocation, State),
    Kept(VcpuLocation),
    TakeOver(VcpuLocation, State),
    TakenOver(VcpuLocation),
    Moved(VcpuLocation),
    Known(VcpuLocation),
}

/// All that the vCPU is: what it took, by vector, and what waits for it.
#[derive(Clone, Debug, Default)]
struct State {
    taken: BTreeMap<u8, usize>,
    pending: Vec<Message>,
}

type Links = Arc<Mutex<BTreeMap<(usize, usize), VecDeque<Frame>>>>;

struct Way {
    me: usize,
    links: Links,
}

impl InterruptLink for Way {
    fn deliver(&self, location: VcpuLocation, _: u32, message: Message) {
        let frame = Frame::Interrupt(message, location.epoch);
        let mut links = self.links.lock().unwrap();
        links
            .entry((self.me, location.slice))
            .or_default()
            .push_back(frame);
    }

    fn end_of_interrupt(&self, _: usize, _: u8) {}

    fn set_pin(&self, _: usize, _: u8, _: bool) {}
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }
}

struct World {
    routers: Vec<Arc<InterruptRouter>>,
    tables: Vec<Arc<Locations>>,
    links: Links,
    /// By slice: the vCPU, where it runs.
    running: Vec<Option<State>>,
    current: Option<Move>,
    lost: BTreeSet<usize>,
    moves: usize,
    kept: usize,
    random: Random,
}

impl World {
    fn new(slices: usize, seed: u64) -> Self {
        let links = Links::default();
        let table = || {
            Arc::new(Locations::new(
                (0..slices).map(|slice| u32::from(slice == 0)),
            ))
        };
        let tables: Vec<_> = (0..slices).map(|_| table()).collect();
        let router = |me: usize| {
            let topology = InterruptTopology {
                slice: me,
                locations: tables[me].clone(),
                io_apic: Arc::new(RolePlace::new(me, 0)),
                link: Arc::new(Way {
                    me,
                    links: links.clone(),
                }),
            };
            InterruptRouter::of_slice(1, Some(topology))
        };
        let mut running = vec![None; slices];
        running[0] = Some(State::default());
        Self {
            routers: (0..slices).map(router).collect(),
            tables,
            links,
            running,
            current: None,
            lost: BTreeSet::new(),
            moves: 0,
            kept: 0,
            random: Random(seed * 2 + 1),
        }
    }

    fn send(&mut self, from: usize, to: usize, frame: Frame) {
        if from == to {
            return self.arrive(from, to, frame);
        }
        let mut links = self.links.lock().unwrap();
        links.entry((from, to)).or_default().push_back(frame);
    }

    fn start(&mut self) {
        if self
            .current
            .as_ref()
            .is_some_and(|current| !current.is_over())
        {
            return;
        }
        let known = self.tables[0].of(VCPU).unwrap();
        let slice = self.random.below(self.routers.len());
        if slice == known.slice || self.lost.contains(&slice) || self.lost.contains(&known.slice) {
            return;
        }
        let location = VcpuLocation {
            slice,
            epoch: known.epoch + 1,
        };
        self.current = Some(Move::new(
            VCPU,
            known.slice,
            location,
            0,
            0..self.routers.len(),
        ));
        self.moves += 1;
        self.send(0, known.slice, Frame::HandOver(location));
    }

    fn report(&mut self, from: usize, location: VcpuLocation, event: Event, state: State) {
        let current = self.current.as_mut().unwrap();
        let actions = current.step(from, (VCPU, location), event).unwrap();
        if !actions.is_empty() && from != 0 && location.slice != 0 {
            assert!(self.routers[0].moved(VCPU, location).unwrap());
        }
        for action in actions {
            match action {
                Action::Send => {
                    let frame = Frame::TakeOver(location, state.clone());
                    self.send(0, location.slice, frame);
                }
                Action::Tell(slice) => self.send(0, slice, Frame::Moved(location)),
            }
        }
    }

    fn arrive(&mut self, from: usize, me: usize, frame: Frame) {
        let router = self.routers[me].clone();
        match frame {
            Frame::Interrupt(message, epoch) => router.receive(VCPU, message, epoch).unwrap(),
            // Some vCPUs cannot leave.
            Frame::HandOver(location) if self.random.below(8) == 0 => {
                self.send(me, 0, Frame::Kept(location));
            }
            Frame::HandOver(location) => {
                let mut state = self.running[me].take().expect("the vCPU is here");
                state.pending = router.hand_over(VCPU, location).unwrap();
                self.send(me, 0, Frame::HandedOver(location, state));
            }
            Frame::HandedOver(location, state) => {
                self.report(from, location, Event::HandedOver, state);
            }
            Frame::Kept(location) => {
                self.kept += 1;
                let event = Event::Kept("busy".into());
                self.report(from, location, event, State::default());
            }
            Frame::TakeOver(location, mut state) => {
                let pending = std::mem::take(&mut state.pending);
                router.take_over(VCPU, location.epoch, &pending).unwrap();
                self.running[me] = Some(state);
                self.send(me, 0, Frame::TakenOver(location));
            }
            Frame::TakenOver(location) => {
                self.report(from, location, Event::TakenOver, State::default());
            }
            Frame::Moved(location) => {
                assert!(router.moved(VCPU, location).unwrap());
                self.send(me, 0, Frame::Known(location));
            }
            Frame::Known(location) => {
                self.report(from, location, Event::Known, State::default());
            }
        }
        let copies = self.running.iter().flatten().count();
        assert!(copies <= 1, "{copies} copies run");
    }

    /// One frame of a random link arrives, if there is one.
    fn step(&mut self) -> bool {
        let lost = &self.lost;
        let next = {
            let mut links = self.links.lock().unwrap();
            links.retain(|(from, to), frames| {
                !frames.is_empty() && !lost.contains(from) && !lost.contains(to)
            });
            let nth = match links.len() {
                0 => return false,
                count => self.random.below(count),
            };
            let (ends, frames) = links.iter_mut().nth(nth).unwrap();
            (*ends, frames.pop_front().unwrap())
        };
        let ((from, to), frame) = next;
        self.arrive(from, to, frame);
        true
    }

    /// The vCPU, where it runs, takes what waits.
    fn look(&mut self) {
        for (slice, state) in self.running.iter_mut().enumerate() {
            let Some(state) = state else { continue };
            for message in self.routers[slice].posted(VCPU).unwrap().take_messages() {
                let Message::Fixed { vector, .. } = message else {
                    panic!("{message:?}");
                };
                *state.taken.entry(vector).or_default() += 1;
            }
        }
    }

    fn turn(&mut self) {
        match self.random.below(6) {
            0 => self.start(),
            1 => self.look(),
            _ => drop(self.step()),
        }
    }

    fn settle(&mut self) {
        while self.step() {}
        self.look();
    }
}

#[test]
fn one_copy_runs_and_takes_every_interrupt_once() {
    let (mut moves, mut kept) = (0, 0);
    for seed in 0..500 {
        let slices = 2 + seed as usize % 4;
        let mut world = World::new(slices, seed);
        for vector in 0x20..0xf0 {
            let sender = world.random.below(slices);
            let message = Message::Fixed {
                vector,
                level: false,
            };
            assert!(world.routers[sender].deliver(VCPU, message, None));
            for _ in 0..world.random.below(9) {
                world.turn();
            }
        }
        world.settle();
        assert!(world.current.as_ref().is_none_or(Move::is_over));
        let location = world.tables[0].of(VCPU).unwrap();
        for table in &world.tables {
            assert_eq!(table.of(VCPU), Some(location), "seed {seed}");
        }
        let state = world.running[location.slice].take().expect("it runs there");
        for vector in 0x20..0xf0 {
            let times = state.taken.get(&vector).copied();
            assert_eq!(times, Some(1), "seed {seed}: vector {vector:#x}");
        }
        moves += world.moves;
        kept += world.kept;
    }
    assert!(moves > 2000 && kept > 100, "{moves} {kept}");
}

#[test]
fn a_move_whose_slice_is_lost_at_any_message_waits_for_that_slice() {
    let (mut broken, mut survived) = (0, 0);
    for seed in 0..2000 {
        let slices = 2 + seed as usize % 4;
        let mut world = World::new(slices, seed);
        for _ in 0..world.random.below(120) {
            world.turn();
        }
        let victim = 1 + world.random.below(slices - 1);
        world.lost.insert(victim);
        world.settle();
        let Some(current) = &world.current else {
            continue;
        };
        if current.is_over() {
            survived += 1;
        } else {
            // The caller that waits for the move learns which node it was.
            assert!(current.waits_for(victim), "seed {seed}: {current:?}");
            broken += 1;
        }
        let copies = world.running.iter().flatten().count();
        // None only while it was on its way from or to the lost slice.
        let under_way = matches!(current.phase, Phase::HandingOver | Phase::TakingOver { .. });
        assert!(copies == 1 || under_way, "seed {seed}: {current:?}");
    }
    assert!(broken > 100 && survived > 100, "{broken} {survived}");
}
