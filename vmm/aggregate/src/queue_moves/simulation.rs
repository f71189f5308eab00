//! Queues that go to and fro between random links, with slices that refuse. The protocol, the
//! places, and the switch and ports of a network are the real ones; links, rings, disk, cable,
//! the pause and the judge are the test's. Broken versions of the slices are found.
//!
//! Device 0 is a disk with a queue for each slice's vCPU, device 1 a network with a pair for
//! each. All requests are counted, and frames have numbers.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::{self, ErrorKind};
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex};

use weft_guest_memory::{DeviceMemory, GuestBytes, Ram};
use weft_platform::interrupts::Locations;
use weft_test_support::Random;
use weft_virtio::net::{FRAME_MAX, HEADER, Link, Usage};
use weft_virtio::ring::Segment;

use super::*;
use crate::remote_devices::net::{FrameQueue, FrameSender, RemotePort, Switch};
use crate::remote_devices::queue_placement::QueuePlaces;
use crate::remote_devices::{DataPath, QueuePlacement};

const DISK: u8 = 0;
const NETWORK: u8 = 1;
/// The least that there is, so that it is often used up.
const WINDOW: usize = 128 << 10;
const FRAME: usize = 20_000;

#[derive(Debug)]
enum Message {
    /// A vCPU notified a queue of the disk.
    Kick(u16),
    Ask(u16, u64),
    Answered(u16, u64),
    Frames(u16, Vec<u8>),
    Taken(u16, u64),
}

type Links = Arc<Mutex<BTreeMap<(usize, usize), VecDeque<Message>>>>;

/// The way of a pair from one slice to another.
struct Way {
    pair: u16,
    ends: (usize, usize),
    links: Links,
}

impl Way {
    fn send(&self, message: Message) {
        let mut links = self.links.lock().unwrap();
        links.entry(self.ends).or_default().push_back(message);
    }
}

impl FrameSender for Way {
    fn frames(&self, batch: &[u8]) {
        self.send(Message::Frames(self.pair, batch.to_vec()));
    }

    fn taken(&self, bytes: u64) {
        self.send(Message::Taken(self.pair, bytes));
    }
}

/// What came out of the network: pair and number.
#[derive(Clone, Default)]
struct Cable {
    sent: Arc<Mutex<Vec<(u16, u64)>>>,
    /// It takes nothing now.
    is_full: Arc<Mutex<bool>>,
}

impl Link for Cable {
    fn descriptor(&self) -> RawFd {
        -1
    }

    fn receive(&mut self, _: &mut [u8]) -> io::Result<Option<usize>> {
        Ok(None)
    }

    fn send(&mut self, _: &DeviceMemory, _: &[Segment]) -> io::Result<()> {
        Err(ErrorKind::Unsupported.into())
    }

    fn send_bytes(&mut self, frame: &[u8]) -> io::Result<()> {
        if *self.is_full.lock().unwrap() {
            return Err(ErrorKind::WouldBlock.into());
        }
        self.sent.lock().unwrap().push(read(frame));
        Ok(())
    }
}

fn frame(pair: u16, number: u64) -> Vec<u8> {
    let mut frame = vec![0; FRAME];
    frame[HEADER..HEADER + 8].copy_from_slice(&number.to_le_bytes());
    frame[HEADER + 8..HEADER + 10].copy_from_slice(&pair.to_le_bytes());
    frame
}

fn read(frame: &[u8]) -> (u16, u64) {
    let number = frame[HEADER..HEADER + 8].try_into().unwrap();
    let pair = frame[HEADER + 8..HEADER + 10].try_into().unwrap();
    (u16::from_le_bytes(pair), u64::from_le_bytes(number))
}

/// What is wrong with the slices.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mutant {
    None,
    /// Queues go while they are served.
    DoesNotPause,
    /// Slice 1 is not told who serves what.
    IsNotTold,
    /// A slice that gets a pair again goes on with its end of the way as it was.
    KeepsItsEnd,
    /// The network's slice goes on with its ends of the ways as they were.
    KeepsTheSwitch,
    /// A slice that gives a pair away drops what it has got for the guest.
    KeepsFrames,
    /// The other slices hear of it before those that get queues.
    TellsTakersLast,
}

struct Node {
    places: QueuePlaces,
    /// Requests that were sent to the disk's slice.
    asked: BTreeSet<(u16, u64)>,
    /// Of the pair that it may serve, if the network is elsewhere.
    port: Option<(Arc<FrameQueue>, RemotePort)>,
}

struct World {
    nodes: Vec<Node>,
    /// The slices of the disk and of the network.
    owners: [usize; 2],
    links: Links,
    switch: Arc<Switch>,
    cable: Cable,
    memory: (Ram, DeviceMemory),
    mutant: Mutant,
    random: Random,
    /// By queue: requests that were offered, those begun, and how often each was completed.
    offered: Vec<u64>,
    begun: Vec<u64>,
    completed: Vec<Vec<u32>>,
    /// By pair: the next numbers to transmit and to bring, and the last that was received.
    transmitted: Vec<u64>,
    brought: Vec<u64>,
    received: Vec<Option<u64>>,
    moves: u64,
    refusals: u64,
    messages: usize,
    fails_at: Option<usize>,
}

impl World {
    fn new(slices: usize, owners: [usize; 2], mutant: Mutant, random: Random) -> Self {
        let links = Links::default();
        let locations = Locations::new((0..slices).map(|_| 1));
        let placement = |owner, queues| {
            QueuePlacement::new(&locations, owner, DataPath::Bypass, slices as u16, queues)
        };
        let network = placement(owners[1], 2);
        let way = |pair, ends| -> Arc<dyn FrameSender> {
            let links = links.clone();
            Arc::new(Way { pair, ends, links })
        };
        let node = |me| {
            let mut places = QueuePlaces::default();
            places.insert(DISK, placement(owners[0], 1));
            places.insert(NETWORK, network.clone());
            let port = (me != owners[1]).then(|| {
                let queue = FrameQueue::new(WINDOW).unwrap();
                let sender = way(me as u16, (me, owners[1]));
                (queue.clone(), RemotePort::new(sender, queue))
            });
            Node {
                places,
                asked: BTreeSet::new(),
                port,
            }
        };
        let pairs = (0..slices as u16).map(|pair| {
            let server = network.server(pair);
            (server != owners[1]).then(|| way(pair, (owners[1], server)))
        });
        let cable = Cable::default();
        let gone = Box::new(|error: &io::Error| panic!("{error}"));
        let link = Box::new(cable.clone());
        let switch = Switch::new(link, pairs.collect(), WINDOW, gone).unwrap();
        let (features, pairs) = (0, slices as u16);
        switch.use_as(Usage { features, pairs });
        let ram = Ram::new(4 << 20).unwrap();
        let memory = DeviceMemory::whole(&ram);
        Self {
            nodes: (0..slices).map(node).collect(),
            owners,
            links,
            switch,
            cable,
            memory: (ram, memory),
            mutant,
            random,
            offered: vec![0; slices],
            begun: vec![0; slices],
            completed: vec![Vec::new(); slices],
            transmitted: vec![0; slices],
            brought: vec![0; slices],
            received: vec![None; slices],
            moves: 0,
            refusals: 0,
            messages: 0,
            fails_at: None,
        }
    }

    fn below(&mut self, bound: usize) -> usize {
        self.random.below(bound as u64) as usize
    }

    fn server(&self, slice: usize, device: u8, group: u16) -> usize {
        self.nodes[slice].places.get(device).unwrap().server(group)
    }

    fn send(&self, ends: (usize, usize), message: Message) {
        let mut links = self.links.lock().unwrap();
        links.entry(ends).or_default().push_back(message);
    }

    /// A vCPU on `slice` offers a request in a queue.
    fn offer(&mut self, slice: usize, queue: u16) -> Result<(), String> {
        self.offered[usize::from(queue)] += 1;
        self.completed[usize::from(queue)].push(0);
        match self.server(slice, DISK, queue) {
            server if server == slice => self.serve(slice, queue),
            server => {
                self.send((slice, server), Message::Kick(queue));
                Ok(())
            }
        }
    }

    /// The slice that serves a queue takes what was offered.
    fn serve(&mut self, slice: usize, queue: u16) -> Result<(), String> {
        let at = usize::from(queue);
        while self.begun[at] < self.offered[at] {
            let number = self.begun[at];
            self.begun[at] += 1;
            if slice == self.owners[0] {
                self.complete(queue, number);
            } else {
                self.nodes[slice].asked.insert((queue, number));
                self.send((slice, self.owners[0]), Message::Ask(queue, number));
            }
        }
        Ok(())
    }

    fn complete(&mut self, queue: u16, number: u64) {
        self.completed[usize::from(queue)][number as usize] += 1;
    }

    /// A message of a link arrives, if there is one.
    fn arrive(&mut self, from: usize, to: usize) -> Result<bool, String> {
        let message = {
            let mut links = self.links.lock().unwrap();
            links.get_mut(&(from, to)).and_then(VecDeque::pop_front)
        };
        let Some(message) = message else {
            return Ok(false);
        };
        match message {
            Message::Kick(queue) if self.server(to, DISK, queue) != to => {
                return Err(format!("a kick of queue {queue} at slice {to}"));
            }
            Message::Kick(queue) => self.serve(to, queue)?,
            Message::Ask(queue, number) => {
                self.send((to, from), Message::Answered(queue, number));
            }
            Message::Answered(queue, number) => {
                let is_served = self.server(to, DISK, queue) == to;
                if !self.nodes[to].asked.remove(&(queue, number)) || !is_served {
                    return Err(format!("a reply for queue {queue} at slice {to}"));
                }
                self.complete(queue, number);
            }
            Message::Frames(pair, batch) if to == self.owners[1] => {
                match self.server(to, NETWORK, pair) {
                    server if server == from => self.switch.put(pair, &batch)?,
                    server if server == to => self.switch.take_back(pair, &batch)?,
                    _ => return Err(format!("frames of pair {pair} from slice {from}")),
                }
            }
            Message::Taken(pair, bytes) if to == self.owners[1] => {
                self.switch.taken(pair, bytes)?;
            }
            Message::Frames(_, batch) => self.queue(to).put(batch)?,
            Message::Taken(_, bytes) => self.queue(to).taken(bytes)?,
        }
        Ok(true)
    }

    fn queue(&self, slice: usize) -> Arc<FrameQueue> {
        self.nodes[slice].port.as_ref().unwrap().0.clone()
    }

    /// The driver transmits a frame, where its pair is served.
    fn transmit(&mut self, pair: u16) -> Result<(), String> {
        let server = self.server(self.owners[1], NETWORK, pair);
        let number = self.transmitted[usize::from(pair)];
        let bytes = frame(pair, number);
        let segment = Segment {
            address: 0x1000,
            length: bytes.len() as u32,
        };
        let (ram, memory) = &self.memory;
        assert!(ram.write(0x1000, &bytes));
        let sent = match &mut self.nodes[server].port {
            Some((_, port)) => {
                let sent = port.send(memory, &[segment]);
                port.finish();
                sent
            }
            None => self.switch.port(pair).send(memory, &[segment]),
        };
        match sent {
            Ok(()) => self.transmitted[usize::from(pair)] += 1,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.to_string()),
        }
        Ok(())
    }

    /// A frame comes over the cable.
    fn bring(&mut self, pair: u16) {
        let number = &mut self.brought[usize::from(pair)];
        self.switch.queue(pair, &frame(pair, *number));
        *number += 1;
        self.switch.pass_on();
    }

    /// The driver has room for a frame, where its pair is served.
    fn receive(&mut self, pair: u16) -> Result<bool, String> {
        let server = self.server(self.owners[1], NETWORK, pair);
        let mut room = vec![0; HEADER + FRAME_MAX];
        let found = match &mut self.nodes[server].port {
            Some((_, port)) => port.receive(&mut room),
            None => self.switch.port(pair).receive(&mut room),
        };
        if found.map_err(|error| error.to_string())?.is_none() {
            return Ok(false);
        }
        let (of, number) = read(&room);
        let last = self.received[usize::from(pair)].replace(number);
        match of == pair && number == last.map_or(0, |last| last + 1) {
            true => Ok(true),
            false => Err(format!(
                "frame {number} of pair {of} after {last:?} of {pair}"
            )),
        }
    }

    /// No message is on its way.
    fn settle(&mut self) -> Result<(), String> {
        let slices = self.nodes.len();
        loop {
            let mut was_quiet = true;
            for from in 0..slices {
                for to in 0..slices {
                    was_quiet &= !self.arrive(from, to)?;
                }
            }
            if was_quiet {
                return Ok(());
            }
        }
    }

    fn tell(&mut self, to: usize, command: &SliceCommand) -> Result<SliceReply, String> {
        let at = self.messages;
        self.messages += 1;
        if self.fails_at == Some(at) {
            return Err("no".into());
        }
        // The cable and the links go on meanwhile.
        for _ in 0..self.below(4) {
            let pair = self.below(self.nodes.len()) as u16;
            self.bring(pair);
            let (from, to) = (self.below(self.nodes.len()), self.below(self.nodes.len()));
            self.arrive(from, to)?;
        }
        match command {
            SliceCommand::CheckQueues { epoch, servers } => {
                self.nodes[to].places.check(*epoch, servers)?;
            }
            SliceCommand::PlaceQueues { .. } if to == 1 && self.mutant == Mutant::IsNotTold => {}
            SliceCommand::PlaceQueues { epoch, servers } => {
                let moved = self.nodes[to].places.place(*epoch, servers)?;
                for group in moved.iter().filter(|group| group.device == NETWORK) {
                    let is_here = group.to == to;
                    if to == self.owners[1] {
                        if self.mutant != Mutant::KeepsTheSwitch {
                            let way = || -> Arc<dyn FrameSender> {
                                Arc::new(Way {
                                    pair: group.group,
                                    ends: (to, group.to),
                                    links: self.links.clone(),
                                })
                            };
                            self.switch.serve(group.group, (!is_here).then(way));
                        }
                    } else if group.from == to || is_here {
                        self.begin_anew(to, group.group, group.from == to);
                    }
                }
            }
            SliceCommand::Settle => {
                for other in 0..self.nodes.len() {
                    while self.arrive(to, other)? {}
                }
            }
            other => panic!("{other:?}"),
        }
        Ok(SliceReply::Done)
    }

    /// A slice's end of a pair's way begins anew.
    fn begin_anew(&mut self, slice: usize, pair: u16, gives: bool) {
        if self.mutant == Mutant::KeepsItsEnd {
            return;
        }
        let (queue, port) = self.nodes[slice].port.as_mut().unwrap();
        if gives {
            // As the pair does when it stops.
            port.give_back(None);
        }
        let left = queue.begin_anew();
        if gives && self.mutant != Mutant::KeepsFrames {
            for batch in left {
                self.send((slice, self.owners[1]), Message::Frames(pair, batch));
            }
        }
    }

    /// Queues that another slice can serve, some of them, go there.
    fn wander(&mut self) -> Result<(), String> {
        let (epoch, from) = (self.nodes[0].places.epoch(), self.nodes[0].places.servers());
        let mut to = from.clone();
        // To the devices' slices, or back: one is the way of a node that leaves.
        let leaves = self.below(self.nodes.len());
        let is_back = self.below(2) == 1;
        for device in [DISK, NETWORK] {
            let owner = self.owners[usize::from(device)];
            let servers = to.get_mut(&device).unwrap();
            if leaves > 0 && owner != leaves {
                servers[leaves] = if is_back { leaves } else { owner };
            }
        }
        if self.mutant != Mutant::DoesNotPause {
            self.settle()?;
        }
        let fails_at = self.below(4 * self.nodes.len());
        // In the first round of messages.
        self.fails_at = (fails_at < self.nodes.len()).then_some(fails_at);
        self.messages = 0;
        let mut members: BTreeSet<usize> = (0..self.nodes.len()).collect();
        if self.mutant == Mutant::TellsTakersLast {
            // The others hear of it first.
            members.retain(|slice| !takers(&from, &to).contains(slice));
            let place = SliceCommand::PlaceQueues {
                epoch: epoch + 1,
                servers: to.clone(),
            };
            self.fails_at = None;
            for slice in std::mem::take(&mut members) {
                self.tell(slice, &place)?;
            }
        }
        let went = move_queues((epoch, &from), &to, &members, &mut |slice, command| {
            self.tell(slice, command)
        });
        self.fails_at = None;
        match went {
            Ok(epoch) => {
                self.moves += u64::from(from != to);
                let agree =
                    |node: &Node| node.places.servers() == to && node.places.epoch() == epoch;
                if !self.nodes.iter().all(agree) {
                    return Err("slices know different servers".into());
                }
            }
            Err(MoveQueuesError::Refused(_)) => {
                self.refusals += 1;
                let same =
                    |node: &Node| node.places.servers() == from && node.places.epoch() == epoch;
                if !self.nodes.iter().all(same) {
                    return Err("a refusal has changed something".into());
                }
            }
            Err(broken) => return Err(broken.to_string()),
        }
        // What may have waited when they stopped.
        for queue in 0..self.nodes.len() as u16 {
            self.serve(self.server(0, DISK, queue), queue)?;
        }
        Ok(())
    }

    /// Something happens.
    fn step(&mut self) -> Result<(), String> {
        let slices = self.nodes.len();
        let (slice, group) = (self.below(slices), self.below(slices) as u16);
        match self.below(40) {
            0 => return self.wander(),
            1..8 => self.offer(slice, group)?,
            8..13 => self.transmit(group)?,
            13..18 => self.bring(group),
            18..23 => drop(self.receive(group)?),
            23 => {
                let is_full = self.below(3) == 0;
                *self.cable.is_full.lock().unwrap() = is_full;
                self.switch.flush();
            }
            _ => drop(self.arrive(slice, usize::from(group))?),
        }
        Ok(())
    }

    /// All requests were completed once, all that was transmitted came out in order, and what
    /// comes now is received.
    fn finish(&mut self) -> Result<(), String> {
        *self.cable.is_full.lock().unwrap() = false;
        let pairs = 0..self.nodes.len() as u16;
        for pair in pairs.clone() {
            // More than windows and queues hold.
            for _ in 0..40 {
                self.transmit(pair)?;
                self.bring(pair);
                self.switch.flush();
                self.settle()?;
                while self.receive(pair)? {
                    self.settle()?;
                }
            }
            let last = self.received[usize::from(pair)];
            let number = self.brought[usize::from(pair)] - 1;
            if last != Some(number) {
                return Err(format!("pair {pair} received {last:?}, not {number}"));
            }
        }
        let sent = self.cable.sent.lock().unwrap().clone();
        for pair in pairs {
            let numbers = sent
                .iter()
                .filter(|(of, _)| *of == pair)
                .map(|(_, number)| *number);
            if !numbers.eq(0..self.transmitted[usize::from(pair)]) {
                return Err(format!(
                    "what pair {pair} transmitted did not come out once"
                ));
            }
        }
        for (queue, counts) in self.completed.iter().enumerate() {
            if let Some(number) = counts.iter().position(|count| *count != 1) {
                let count = counts[number];
                return Err(format!(
                    "request {number} of queue {queue} ended {count} times"
                ));
            }
        }
        Ok(())
    }
}

/// What the judge finds, and moves and refusals.
fn run(slices: usize, mutant: Mutant, seed: u64) -> Result<(u64, u64), String> {
    let mut random = Random::new(seed);
    let owners = [0, 1].map(|_| random.below(slices as u64) as usize);
    let mut world = World::new(slices, owners, mutant, random);
    for _ in 0..1000 {
        world.step()?;
    }
    world.finish()?;
    Ok((world.moves, world.refusals))
}

#[test]
fn requests_and_frames_come_once_wherever_their_queues_are() {
    let mut sums = (0, 0);
    for seed in 0..200 {
        let slices = 2 + (seed % 4) as usize;
        match run(slices, Mutant::None, seed) {
            Ok((moves, refusals)) => sums = (sums.0 + moves, sums.1 + refusals),
            Err(wrong) => panic!("{slices} slices, seed {seed}: {wrong}"),
        }
    }
    assert!(sums.0 > 700 && sums.1 > 250, "{sums:?}");
}

#[test]
fn broken_slices_are_found() {
    for mutant in [
        Mutant::DoesNotPause,
        Mutant::IsNotTold,
        Mutant::KeepsItsEnd,
        Mutant::KeepsTheSwitch,
        Mutant::KeepsFrames,
        Mutant::TellsTakersLast,
    ] {
        let found = (0..100).filter(|seed| run(3, mutant, *seed).is_err());
        let found = found.count();
        assert!(found > 5, "{mutant:?} is found in {found} of 100 runs");
    }
}

/// Each message fails in turn: until all slices have agreed nothing changes, and from then on
/// the machine ends.
#[test]
fn a_message_that_fails_changes_nothing_or_ends_the_machine() {
    for slices in 2..6_usize {
        for at in 0..=3 * slices {
            let mut world = World::new(slices, [0, 0], Mutant::None, Random::new(7));
            world.fails_at = Some(at);
            let (from, members) = (world.nodes[0].places.servers(), (0..slices).collect());
            let to = world.nodes[0].places.without(1);
            let mut tell = |slice: usize, command: &SliceCommand| world.tell(slice, command);
            let went = move_queues((0, &from), &to, &members, &mut tell);
            let known: Vec<_> = world.nodes.iter().map(|node| node.places.epoch()).collect();
            match at {
                at if at < slices => {
                    assert!(matches!(went, Err(MoveQueuesError::Refused(_))), "{went:?}");
                    assert_eq!(known, vec![0; slices]);
                }
                at if at < 3 * slices => {
                    assert!(matches!(went, Err(MoveQueuesError::Broken(_))), "{went:?}");
                }
                _ => {
                    assert_eq!(went, Ok(1));
                    assert_eq!(known, vec![1; slices]);
                }
            }
        }
    }
}
