//! vCPUs that move while interrupts for them are under way, between routers of several
//! slices in one process.
//!
//! The test plays the part of what moves a vCPU (slice 0's commands and the state that is
//! sent) and of the vCPU's thread, which takes its pending events.

use super::*;
use std::collections::{BTreeMap, VecDeque};

use weft_test_support::Random;

const VECTORS: std::ops::RangeInclusive<u8> = 0x20..=0xff;

fn fixed(vector: u8) -> Message {
    Message::Fixed {
        vector,
        level: vector.is_multiple_of(2),
    }
}

/// What goes over a link.
enum Frame {
    Interrupt(u32, Message, u64),
    /// To where the vCPU is.
    HandOver(u32, VcpuLocation),
    /// The reply: its pending events.
    HandedOver(u32, VcpuLocation, Vec<Message>),
    TakeOver(u32, VcpuLocation, Vec<Message>),
    TakenOver(u32),
    Moved(u32, VcpuLocation),
}

/// From one slice to another, each first in, first out.
type Links = Arc<Mutex<BTreeMap<(usize, usize), VecDeque<Frame>>>>;

/// One slice's link to the others.
struct SliceLink {
    me: usize,
    links: Links,
}

impl SliceLink {
    fn send(&self, to: usize, frame: Frame) {
        assert_ne!(to, self.me, "a link to itself");
        let mut links = self.links.lock().unwrap();
        links.entry((self.me, to)).or_default().push_back(frame);
    }
}

impl InterruptLink for SliceLink {
    fn deliver(&self, location: VcpuLocation, vcpu: u32, message: Message) {
        self.send(
            location.slice,
            Frame::Interrupt(vcpu, message, location.epoch),
        );
    }

    fn end_of_interrupt(&self, _: usize, _: u8) {}

    fn set_pin(&self, _: usize, _: u8, _: bool) {}
}

fn slices(count: usize, cpus: u32) -> (Vec<(Arc<InterruptRouter>, SliceLink)>, Links) {
    let links = Links::default();
    let router = |me| {
        let link = |_| SliceLink {
            me,
            links: links.clone(),
        };
        let counts = (0..count).map(|slice| if slice == 0 { cpus } else { 0 });
        let topology = InterruptTopology {
            slice: me,
            locations: Arc::new(Locations::new(counts)),
            io_apic: Arc::new(RolePlace::new(me, 0)),
            link: Arc::new(link(())),
        };
        (InterruptRouter::of_slice(cpus, Some(topology)), link(()))
    };
    ((0..count).map(router).collect(), links)
}

/// A vCPU: what it took, in order, wherever it was.
#[derive(Default)]
struct Taken {
    /// By vector.
    fixed: BTreeMap<u8, usize>,
    non_maskable: usize,
    /// It waits for a start-up, after an INIT.
    waits: bool,
    starts: usize,
}

/// Slices, the links between, and the vCPUs.
struct World {
    slices: Vec<(Arc<InterruptRouter>, SliceLink)>,
    links: Links,
    taken: Vec<Taken>,
    /// The vCPU that slice 0 is having moved.
    moving: Option<u32>,
    random: Random,
    moves: u64,
    /// Messages that are sent after their vCPU, the most of any.
    steps: u64,
}

impl World {
    fn new(count: usize, cpus: u32, seed: u64) -> Self {
        let (slices, links) = slices(count, cpus);
        Self {
            slices,
            links,
            taken: (0..cpus).map(|_| Taken::default()).collect(),
            moving: None,
            random: Random::new(seed * 2),
            moves: 0,
            steps: 0,
        }
    }

    fn location(&self, slice: usize, vcpu: u32) -> VcpuLocation {
        let topology = self.slices[slice].0.topology.as_ref().unwrap();
        topology.locations.of(vcpu).unwrap()
    }

    /// Slice 0 has a vCPU moved, if none is.
    fn start_move(&mut self) {
        if self.moving.is_some() {
            return;
        }
        let vcpu = self.random.index(self.taken.len()) as u32;
        let from = self.location(0, vcpu);
        let to = self.random.index(self.slices.len());
        if from.slice == to {
            return;
        }
        self.moving = Some(vcpu);
        self.moves += 1;
        let epoch = from.epoch + 1;
        let location = VcpuLocation { slice: to, epoch };
        self.order(from.slice, Frame::HandOver(vcpu, location));
    }

    /// Slice 0 tells a slice, or does itself, what an order says.
    fn order(&mut self, to: usize, frame: Frame) {
        match to {
            0 => self.arrive(0, 0, frame),
            to => self.slices[0].1.send(to, frame),
        }
    }

    /// A secondary answers an order, or slice 0 itself.
    fn answer(&mut self, from: usize, frame: Frame) {
        match from {
            0 => self.arrive(0, 0, frame),
            from => self.slices[from].1.send(0, frame),
        }
    }

    fn arrive(&mut self, from: usize, to: usize, frame: Frame) {
        let router = self.slices[to].0.clone();
        match frame {
            Frame::Interrupt(vcpu, message, epoch) => {
                self.steps += 1;
                router.receive(vcpu, message, epoch).unwrap();
            }
            Frame::HandOver(vcpu, location) => {
                let pending = router.hand_over(vcpu, location).unwrap();
                self.answer(to, Frame::HandedOver(vcpu, location, pending));
            }
            Frame::HandedOver(vcpu, location, pending) => {
                assert_eq!(to, 0);
                self.order(location.slice, Frame::TakeOver(vcpu, location, pending));
                // The others hear of it at any time from now on.
                for other in (0..self.slices.len()).rev() {
                    if other != from && other != location.slice {
                        self.order(other, Frame::Moved(vcpu, location));
                    }
                }
            }
            Frame::TakeOver(vcpu, location, pending) => {
                router.take_over(vcpu, location.epoch, &pending).unwrap();
                self.answer(to, Frame::TakenOver(vcpu));
            }
            Frame::TakenOver(vcpu) => assert_eq!(self.moving.take(), Some(vcpu)),
            Frame::Moved(vcpu, location) => assert!(router.moved(vcpu, location).unwrap()),
        }
    }

    /// One frame of a random link arrives; whether there was one.
    fn step(&mut self) -> bool {
        let frame = {
            let mut links = self.links.lock().unwrap();
            links.retain(|_, frames| !frames.is_empty());
            if links.is_empty() {
                return false;
            }
            let nth = self.random.index(links.len());
            let (ends, frames) = links.iter_mut().nth(nth).unwrap();
            frames.pop_front().map(|frame| (*ends, frame)).unwrap()
        };
        let ((from, to), frame) = frame;
        self.arrive(from, to, frame);
        true
    }

    /// A vCPU's thread takes its pending events, on its slice.
    fn look(&mut self, vcpu: u32) {
        for slice in 0..self.slices.len() {
            if self.location(slice, vcpu).slice != slice {
                continue;
            }
            let pending = self.slices[slice].0.posted(vcpu).unwrap().take();
            let taken = &mut self.taken[vcpu as usize];
            for message in pending.messages() {
                match message {
                    Message::Fixed { vector, level } => {
                        assert_eq!(level, vector.is_multiple_of(2));
                        *taken.fixed.entry(vector).or_default() += 1;
                    }
                    Message::NonMaskable => taken.non_maskable += 1,
                    Message::Init => taken.waits = true,
                    Message::StartUp { .. } => {
                        taken.starts += usize::from(taken.waits);
                        taken.waits = false;
                    }
                }
            }
        }
    }

    /// Something happens.
    fn turn(&mut self) {
        match self.random.index(8) {
            0 => self.start_move(),
            1 => {
                let vcpu = self.random.index(self.taken.len()) as u32;
                self.look(vcpu);
            }
            _ => drop(self.step()),
        }
    }

    /// All that is under way arrives and is taken.
    fn settle(&mut self) {
        while self.step() {}
        for vcpu in 0..self.taken.len() as u32 {
            self.look(vcpu);
        }
        assert!(self.moving.is_none());
        // Nothing waits at a location where the vCPU is not.
        for (router, _) in &self.slices {
            assert!(router.all_posted.iter().all(|posted| !posted.has_pending()));
        }
    }
}

#[test]
fn every_interrupt_arrives_once_wherever_its_vcpu_went() {
    let (mut after, mut ahead, mut moves) = (0, 0, 0);
    for seed in 0..600 {
        let mut world = World::new(2 + seed as usize % 4, 2, seed);
        for vector in VECTORS {
            for vcpu in 0..2 {
                let sender = world.random.index(world.slices.len());
                let router = world.slices[sender].0.clone();
                match vector % 3 {
                    // A device's, an IPI of a vCPU there, and one that names many.
                    0 => {
                        let address = 0xfee0_0000 | u64::from(vcpu) << 12;
                        let level = u32::from(vector.is_multiple_of(2)) << 15;
                        MessageSink::send(&*router, address, level | u32::from(vector));
                    }
                    1 => assert!(router.deliver(vcpu, fixed(vector), None)),
                    _ if vcpu == 1 => {}
                    _ => {
                        let interrupt = Interrupt {
                            vector,
                            delivery: Delivery::Fixed,
                            destination: Destination::Everybody,
                            level: vector.is_multiple_of(2),
                        };
                        assert!(router.send(&interrupt, None));
                    }
                }
                for _ in 0..world.random.index(8) {
                    world.turn();
                }
            }
        }
        world.settle();
        for (vcpu, taken) in world.taken.iter().enumerate() {
            for vector in VECTORS {
                let times = taken.fixed.get(&vector).copied().unwrap_or(0);
                assert_eq!(times, 1, "seed {seed}: vector {vector} of vCPU {vcpu}");
            }
        }
        moves += world.moves;
        for (router, _) in &world.slices {
            after += router.counters.forwarded.load(Ordering::Relaxed);
            ahead += router.counters.ahead.load(Ordering::Relaxed);
            assert_eq!(router.counters.dropped.load(Ordering::Relaxed), 0);
        }
    }
    // Everything expected was seen.
    assert!(after > 1000 && ahead > 100 && moves > 1000);
}

#[test]
fn a_start_up_never_overtakes_its_init() {
    for seed in 0..600 {
        let mut world = World::new(2 + seed as usize % 4, 1, seed);
        for round in 1..20 {
            let sender = world.random.index(world.slices.len());
            let router = world.slices[sender].0.clone();
            for message in [
                Message::Init,
                Message::StartUp { vector: 1 },
                Message::StartUp { vector: 1 },
            ] {
                router.deliver(0, message, None);
                for _ in 0..world.random.index(12) {
                    world.turn();
                }
            }
            // The next bringing up follows what this one did.
            world.settle();
            assert_eq!(world.taken[0].starts, round, "seed {seed}");
        }
    }
}

#[test]
fn a_message_is_sent_on_no_more_often_than_its_vcpu_moved() {
    for seed in 0..300 {
        let mut world = World::new(4, 1, seed);
        for vector in VECTORS {
            let sender = world.random.index(4);
            let known = world.location(sender, 0).epoch;
            let (steps, moves) = (world.steps, world.moves);
            assert!(world.slices[sender].0.deliver(0, fixed(vector), None));
            for _ in 0..world.random.index(200) {
                world.turn();
            }
            let under_way = world.moves - moves;
            world.settle();
            let last = world.location(0, 0).epoch;
            let bound = last - known + 1;
            assert!(world.steps - steps <= bound, "{under_way} moves");
        }
    }
}

#[test]
fn what_cannot_be_true_is_refused_and_changes_nothing() {
    let (slices, links) = slices(3, 2);
    let router = &slices[1].0;
    let at = |slice, epoch| VcpuLocation { slice, epoch };
    let error = |refused: Result<bool, LocationError>| refused.unwrap_err().to_string();
    for (vcpu, location, words) in [
        (2, at(2, 1), "vCPU 2, but there are 2"),
        (0, at(3, 1), "but there are 3"),
        (0, at(2, 2), "a move is missing"),
        (0, at(2, 0), "the two tables contradict each other"),
        (0, at(2, u64::MAX), "cannot move any more"),
        (0, at(1, 1), "neither sent nor received its state"),
    ] {
        let said = error(router.moved(vcpu, location));
        assert!(said.contains(words), "{said}");
    }
    assert_eq!(router.moved(0, at(0, 0)), Ok(false));
    // Only who has it hands it over, and to somebody else.
    assert!(router.hand_over(0, at(2, 1)).is_err());
    assert!(slices[0].0.hand_over(0, at(0, 1)).is_err());
    assert!(slices[0].0.take_over(0, 1, &[]).is_err());
    assert!(router.take_over(0, 2, &[]).is_err());
    // A vCPU that is here does not leave by a note.
    let said = error(slices[0].0.moved(0, at(2, 1)));
    assert!(said.contains("without") || said.contains("state"), "{said}");
    for (vcpu, epoch) in [(2, 0), (u32::MAX, 0), (0, 0), (0, u64::MAX)] {
        assert!(router.receive(vcpu, fixed(0x40), epoch).is_err());
        assert!(slices[0].0.identify(vcpu.max(2), 1, epoch).is_err());
    }
    assert!(router.identify(0, 1, u64::MAX).is_err());
    let topology = router.topology.as_ref().unwrap();
    assert_eq!(topology.locations.all(), [at(0, 0); 2]);
    assert!(router.all_posted.iter().all(|posted| !posted.has_pending()));
    assert!(links.lock().unwrap().is_empty());
    // A machine of one slice has nobody who could send.
    let whole = InterruptRouter::new(2);
    assert!(whole.receive(0, fixed(0x40), 0).is_err());
    assert!(whole.moved(0, at(0, 1)).is_err());
}

/// Real threads post to one descriptor while its vCPU leaves and comes back: the order of
/// checking and leaving matters here.
#[test]
fn no_interrupt_is_lost_between_looking_and_leaving() {
    for round in 0..400_u64 {
        let (slices, links) = slices(2, 1);
        let stop = std::sync::atomic::AtomicBool::new(false);
        let mut seen = BTreeMap::<u8, usize>::new();
        std::thread::scope(|scope| {
            let sending: Vec<_> = (0..2_u8)
                .map(|sender| {
                    let router = slices[0].0.clone();
                    scope.spawn(move || {
                        for vector in VECTORS.filter(|vector| vector % 2 == sender) {
                            assert!(router.deliver(0, fixed(vector), None));
                        }
                    })
                })
                .collect();
            // Carries frames from slice 0 to slice 1 and back.
            let (links, slices, stop) = (&links, &slices, &stop);
            let carrying = scope.spawn(move || {
                loop {
                    let stopped = stop.load(Ordering::SeqCst);
                    let found: Vec<_> = {
                        let mut links = links.lock().unwrap();
                        let ends = links.iter_mut();
                        ends.flat_map(|(ends, frames)| frames.drain(..).map(|frame| (*ends, frame)))
                            .collect()
                    };
                    if found.is_empty() && stopped {
                        return;
                    }
                    for ((_, to), frame) in found {
                        if let Frame::Interrupt(vcpu, message, epoch) = frame {
                            slices[to].0.receive(vcpu, message, epoch).unwrap();
                        }
                    }
                }
            });
            // The vCPU: takes what there is, goes, and comes back.
            let mut epoch = 0;
            let mut take = |slice: usize| {
                for message in slices[slice].0.posted(0).unwrap().take().messages() {
                    if let Message::Fixed { vector, .. } = message {
                        *seen.entry(vector).or_default() += 1;
                    }
                }
            };
            let mut here = 0;
            while !sending.iter().all(|sender| sender.is_finished()) || epoch < 1 + round % 4 {
                take(here);
                let there = 1 - here;
                epoch += 1;
                let location = VcpuLocation {
                    slice: there,
                    epoch,
                };
                let pending = slices[here].0.hand_over(0, location).unwrap();
                slices[there].0.take_over(0, epoch, &pending).unwrap();
                here = there;
            }
            stop.store(true, Ordering::SeqCst);
            carrying.join().unwrap();
            take(here);
        });
        for vector in VECTORS {
            assert_eq!(seen.get(&vector), Some(&1), "round {round}: {vector}");
        }
    }
}
