//! Several slices in one process, joined by channels, and threads that use their pages
//! as vCPUs do.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, Weak};
use std::thread::{JoinHandle, spawn};
use std::time::{Duration, Instant};

use weft_dsm::message::{Run, encode};
use weft_dsm::{Body, Config, ManagerOf, Message, NodeId, Page};
use weft_guest_memory::Ram;
use weft_vcpu::{Access, Memory};
use weft_vcpu_soft::SoftMachine;
use weft_vcpu_soft::requests::{Demand, VcpuRequests, request};
use weft_wire::Header;

use super::*;

mod absent;
pub(super) mod evict;
mod exchange;
mod history;
mod membership;
mod prefetch;
mod reclaim;
mod relocation;
mod rest;
mod subscriptions;
mod turns;

pub(super) const RAM: u64 = 8 << 20;
pub(super) const PAGE: u64 = 4096;

/// The software vCPUs of a slice.
struct SoftMmuNotifier(Weak<SoftMachine>);

impl MmuNotifier for SoftMmuNotifier {
    fn revoke(
        &self,
        address: u64,
        kept: Option<Access>,
        patience: Duration,
    ) -> Result<(), NotifierError> {
        let Some(machine) = self.0.upgrade() else {
            return Ok(());
        };
        Ok(machine.revoke(address, kept, patience)?)
    }
}

type Frame = (NodeId, Header, Vec<u8>);

struct Channels {
    me: NodeId,
    to: Vec<Mutex<Sender<Frame>>>,
}

std::thread_local! {
    /// Whether this thread holds the lock of a slice's memory.
    static LOCKED: Cell<bool> = const { Cell::new(false) };
}

pub(super) fn set_locked(locked: bool) {
    LOCKED.set(locked);
}

/// What takes long, or waits, is not done under the lock.
pub(super) fn assert_unlocked(what: &str) {
    assert!(!LOCKED.get(), "{what} under the lock of all guest memory");
}

impl Transport for Channels {
    fn transmit(&self, to: NodeId, header: &Header, parts: &[&[u8]]) {
        assert_unlocked("a frame is sent");
        let frame = (self.me, *header, parts.concat());
        // A slice that is gone needs nothing.
        let _ = self.to[to.index()].lock().unwrap().send(frame);
    }
}

/// What becomes of frames.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Links {
    Open,
    /// None arrives.
    Silent,
}

/// Slices in one process, with threads that carry their frames. What may go wrong in
/// other orders than those that these threads happen to make, `weft_dsm::controller::sim`
/// looks for by seed.
pub(super) struct Rig {
    pub(super) memories: Vec<Arc<SharedMemory>>,
    machines: Vec<Arc<SoftMachine>>,
    threads: Vec<JoinHandle<()>>,
    failures: Arc<Mutex<Vec<String>>>,
}

impl Rig {
    pub(super) fn new(nodes: u8, manager: ManagerOf) -> Self {
        let budgets = vec![Budget::UNLIMITED; nodes.into()];
        Self::with_budgets(nodes, manager, budgets)
    }

    /// The same, with a budget for each slice.
    pub(super) fn with_budgets(nodes: u8, manager: ManagerOf, budgets: Vec<Budget>) -> Self {
        let mut machines = Vec::new();
        let mut rig = Self::of(nodes, manager, Links::Open, budgets, |memory| {
            let machine = SoftMachine::new(memory.clone());
            memory.register_notifier(Box::new(SoftMmuNotifier(Arc::downgrade(&machine))));
            machines.push(machine);
            Vec::new()
        });
        rig.machines = machines;
        rig
    }

    /// Slices to which `connect` adds users, and threads of theirs.
    pub(super) fn of(
        nodes: u8,
        manager: ManagerOf,
        links: Links,
        budgets: Vec<Budget>,
        mut connect: impl FnMut(&Arc<SharedMemory>) -> Vec<JoinHandle<()>>,
    ) -> Self {
        let failures = Arc::<Mutex<Vec<String>>>::default();
        let (senders, receivers): (Vec<Sender<Frame>>, Vec<Receiver<Frame>>) =
            (0..nodes).map(|_| channel()).unzip();
        let mut rig = Self {
            memories: Vec::new(),
            machines: Vec::new(),
            threads: Vec::new(),
            failures: failures.clone(),
        };
        for ((node, receiver), budget) in (0..nodes).zip(receivers).zip(budgets) {
            let me = NodeId(node);
            let failures = failures.clone();
            let memory = SharedMemory::new(SharedMemoryOptions {
                ram: Ram::new(RAM).unwrap(),
                config: Config::new(me, nodes, manager),
                budget,
                transport: Arc::new(Channels {
                    me,
                    to: senders.iter().cloned().map(Mutex::new).collect(),
                }),
                lease: Duration::from_secs(20),
                on_failure: Box::new(move |reason| failures.lock().unwrap().push(reason)),
            });
            rig.threads.extend(connect(&memory));
            let deferred = memory.clone();
            rig.threads
                .push(spawn(move || deferred.run_deferred_work()));
            let evictor = memory.clone();
            rig.threads.push(spawn(move || evictor.keep_to_budget()));
            let shell = memory.clone();
            rig.threads.push(spawn(move || {
                while !shell.is_over() {
                    let Ok((from, header, payload)) =
                        receiver.recv_timeout(Duration::from_millis(50))
                    else {
                        continue;
                    };
                    if links == Links::Silent {
                        continue;
                    }
                    shell.receive(from, &header, &payload).unwrap();
                }
            }));
            rig.memories.push(memory);
        }
        rig
    }

    /// All pages are kept up to date.
    pub(super) fn updated(self) -> Self {
        for memory in &self.memories {
            memory.subscribe(&(0..RAM));
        }
        self
    }

    pub(super) fn user(&self, node: usize) -> User {
        User {
            memory: self.memories[node].clone(),
            machine: self.machines[node].clone(),
            requests: self.machines[node].join(),
            known: HashMap::new(),
        }
    }

    /// Makes `users` users of each slice do `work` at the same time, each with its number,
    /// until all are done. They are inside when it begins.
    pub(super) fn all_at_once(&self, users: u64, work: impl Fn(u64, &mut User) + Sync) {
        let nodes = self.memories.len() as u64;
        let work = &work;
        std::thread::scope(|scope| {
            for number in 0..nodes * users {
                let mut user = self.user((number % nodes) as usize);
                scope.spawn(move || {
                    user.inside();
                    work(number, &mut user);
                });
            }
        });
    }

    /// Ends all threads; nothing must have failed.
    pub(super) fn end(self) {
        for memory in &self.memories {
            memory.end_waits();
        }
        for thread in self.threads {
            thread.join().unwrap();
        }
        assert_eq!(*self.failures.lock().unwrap(), Vec::<String>::new());
    }
}

/// A thread that uses pages as a vCPU does.
pub(super) struct User {
    memory: Arc<SharedMemory>,
    machine: Arc<SoftMachine>,
    requests: Arc<VcpuRequests>,
    known: HashMap<u64, (usize, Access)>,
}

impl User {
    /// The word at `address`, while the user is inside and passes no boundary.
    pub(super) fn word(&mut self, address: u64, access: Access) -> &AtomicU64 {
        let page = address & !(PAGE - 1);
        let host = match self.known.get(&page) {
            Some((host, held)) if *held == Access::Write || access == Access::Read => *host,
            _ => self.acquire(page, access),
        };
        // SAFETY: the page is held, and the word is on it.
        unsafe { &*((host + (address - page) as usize) as *const AtomicU64) }
    }

    /// The page has to be looked for when it is used next.
    pub(super) fn forget(&mut self, page: u64) {
        self.known.remove(&page);
    }

    fn acquire(&mut self, page: u64, access: Access) -> usize {
        let host = loop {
            if let Some(host) = self.memory.held(page, access) {
                break host;
            }
            self.outside();
            let host = self.memory.acquire(page, access).unwrap();
            let lost = self.requests.step_inside() && self.answer(Some(page));
            if self.memory.unpin_and_check(page) {
                self.requests.ask(request::DEFERRED_WORK);
            }
            if !lost {
                break host;
            }
        };
        self.known.insert(page, (host as usize, access));
        host as usize
    }

    fn answer(&mut self, watched: Option<u64>) -> bool {
        let (demands, number) = self.requests.drain();
        let mut lost = false;
        for demand in demands {
            match demand {
                Demand::Page { page, keep_read } => {
                    lost |= watched == Some(page);
                    match keep_read {
                        true => {
                            if let Some((_, held)) = self.known.get_mut(&page) {
                                *held = Access::Read;
                            }
                        }
                        false => drop(self.known.remove(&page)),
                    }
                }
                Demand::Code { .. } => {}
                Demand::Everything => {
                    lost = true;
                    self.known.clear();
                }
            }
        }
        self.requests.report(number);
        lost
    }

    pub(super) fn boundary(&mut self) {
        let asked = self.requests.request().load(Ordering::SeqCst);
        if asked & request::DEFERRED_WORK != 0 {
            self.outside();
            self.inside();
        } else if asked & request::DEMANDS != 0 {
            self.answer(None);
        }
    }

    pub(super) fn outside(&mut self) {
        self.requests.step_outside();
        if self.requests.take(request::DEFERRED_WORK) != 0 {
            self.memory.do_deferred_work();
        }
    }

    pub(super) fn inside(&mut self) {
        if self.requests.step_inside() {
            self.answer(None);
        }
    }
}

impl Drop for User {
    fn drop(&mut self) {
        self.outside();
        for page in self.known.keys() {
            assert!(!self.memory.is_pinned_here(page / PAGE));
        }
        self.machine.leave(&self.requests);
    }
}

/// Increments of words that all users share: none is lost.
pub(super) fn increments(rig: Rig, users: u64, rounds: u64) {
    const WORDS: u64 = 5;
    let nodes = rig.memories.len() as u64;
    // On three pages of two chunks.
    let address = |word: u64| 0x1f_e000 + word * 2048;
    rig.all_at_once(users, |number, user| {
        for round in 0..rounds {
            let word = (round * 7 + number) % WORDS;
            if round % 3 == 0 {
                user.word(address(word), Access::Read)
                    .load(Ordering::Relaxed);
            }
            user.word(address(word), Access::Write)
                .fetch_add(1, Ordering::Relaxed);
            user.boundary();
        }
    });
    let mut user = rig.user(0);
    user.inside();
    let total: u64 = (0..WORDS)
        .map(|word| {
            user.word(address(word), Access::Read)
                .load(Ordering::Relaxed)
        })
        .sum();
    drop(user);
    assert_eq!(total, nodes * users * rounds);
    rig.end();
}

#[test]
fn no_increment_is_lost_between_two_slices() {
    let rig = Rig::new(2, ManagerOf::Interleaved);
    increments(rig, 1, 3000);
}

#[test]
fn no_increment_is_lost_between_three_slices_of_two_users() {
    let rig = Rig::new(3, ManagerOf::Interleaved);
    increments(rig, 2, 1000);
}

#[test]
fn no_increment_is_lost_where_one_of_three_manages_all() {
    increments(Rig::new(3, ManagerOf::Fixed(NodeId(1))), 1, 1000);
}

/// Pages that are held together stay until they are given back, and nobody waits for
/// them in vain.
#[test]
fn pages_that_are_held_together_stay() {
    const ROUNDS: u64 = 2000;
    let rig = Rig::new(2, ManagerOf::Interleaved);
    let pages = [0x10_0000, 0x30_0000, 0x10_3000];
    let held_together = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for (node, memory) in rig.memories.iter().enumerate() {
            let mut user = rig.user(node);
            scope.spawn(move || {
                user.inside();
                for round in 0..ROUNDS {
                    let page = pages[(round % 3) as usize];
                    user.word(page, Access::Write)
                        .fetch_add(1, Ordering::Relaxed);
                    user.boundary();
                }
            });
            let held_together = &held_together;
            scope.spawn(move || {
                for _ in 0..ROUNDS {
                    if !memory.acquire_held(&pages, Access::Write) {
                        // It never waits, nor keeps a part.
                        std::thread::yield_now();
                        continue;
                    }
                    for page in pages {
                        let host = memory.held(page, Access::Write).unwrap();
                        // SAFETY: the page is pinned, and the word is on it.
                        let word = unsafe { &*host.cast::<AtomicU64>() };
                        word.fetch_add(1, Ordering::Relaxed);
                    }
                    held_together.fetch_add(3, Ordering::SeqCst);
                    for page in pages {
                        memory.unpin(page);
                    }
                }
            });
        }
    });
    assert!(!rig.memories[0].acquire_held(&[0x10_0000, RAM], Access::Read));
    let mut user = rig.user(0);
    user.inside();
    let total: u64 = pages
        .map(|page| user.word(page, Access::Read).load(Ordering::Relaxed))
        .iter()
        .sum();
    drop(user);
    assert_eq!(total, 2 * ROUNDS + held_together.load(Ordering::SeqCst));
    rig.end();
}

/// Message passing: who sees the flag sees the data, and a word never goes back.
#[test]
fn stores_are_seen_in_order() {
    in_order(Rig::new(2, ManagerOf::Interleaved), 2000);
}

pub(super) fn in_order(rig: Rig, rounds: u64) {
    let (data, flag) = (0x10_0000, 0x30_0000);
    let mut writer = rig.user(0);
    let writing = spawn(move || {
        writer.inside();
        for round in 1..=rounds {
            writer
                .word(data, Access::Write)
                .store(round, Ordering::Release);
            writer.boundary();
            writer
                .word(flag, Access::Write)
                .store(round, Ordering::Release);
            writer.boundary();
        }
    });
    let mut reader = rig.user(1);
    let reading = spawn(move || {
        reader.inside();
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut last = 0;
        while last < rounds {
            assert!(Instant::now() < deadline, "stuck at {last}");
            let seen = reader.word(flag, Access::Read).load(Ordering::Acquire);
            assert!(seen >= last);
            reader.boundary();
            let value = reader.word(data, Access::Read).load(Ordering::Acquire);
            assert!(value >= seen, "{value} after {seen}");
            reader.boundary();
            last = seen;
        }
    });
    writing.join().unwrap();
    reading.join().unwrap();
    rig.end();
}

/// What was adopted is there for others, and first touches are zero even where
/// this slice's memory holds old bytes.
#[test]
fn adopted_and_untouched_pages_read_as_they_should() {
    let rig = Rig::new(2, ManagerOf::Fixed(NodeId(0)));
    let address = 0x5000;
    rig.memories[0]
        .ram()
        .put(address, &77_u64.to_le_bytes())
        .unwrap();
    rig.memories[0].adopt(address..address + PAGE).unwrap();
    let mut user = rig.user(1);
    user.inside();
    assert_eq!(user.word(address, Access::Read).load(Ordering::Relaxed), 77);
    assert_eq!(user.word(0x9000, Access::Read).load(Ordering::Relaxed), 0);
    user.word(0x9000, Access::Write).store(5, Ordering::Relaxed);
    drop(user);
    let mut user = rig.user(0);
    user.inside();
    assert_eq!(user.word(0x9000, Access::Read).load(Ordering::Relaxed), 5);
    drop(user);
    let counts = rig.memories[1].hottest();
    assert!(
        counts
            .pages
            .iter()
            .any(|count| count.page == 5 && count.reads == 1)
    );
    rig.end();
}

/// A thread of each of two slices uses a page that the other takes, until both have got on:
/// how often each has. `user`: what a node's thread does again and again.
pub(super) fn fight<F: FnMut() + Send + 'static>(user: impl Fn(usize) -> F) -> [u64; 2] {
    let done: Arc<[AtomicU64; 2]> = Arc::default();
    let stop = Arc::new(AtomicBool::new(false));
    let threads = [0, 1].map(|node| {
        let (mut use_page, stop, done) = (user(node), stop.clone(), done.clone());
        spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                use_page();
                done[node].fetch_add(1, Ordering::Relaxed);
            }
        })
    });
    let counts = || [0, 1].map(|node: usize| done[node].load(Ordering::Relaxed));
    let deadline = Instant::now() + Duration::from_secs(20);
    while counts().iter().any(|count| *count <= 20) {
        assert!(Instant::now() < deadline, "{:?}", counts());
        std::thread::yield_now();
    }
    stop.store(true, Ordering::Relaxed);
    for thread in threads {
        thread.join().unwrap();
    }
    counts()
}

/// A page that is fought over gets work done on both sides.
#[test]
fn two_slices_that_fight_both_get_on() {
    let rig = Rig::new(2, ManagerOf::Interleaved);
    fight(|node| {
        let mut user = rig.user(node);
        user.inside();
        move || {
            user.word(0x8000, Access::Write)
                .fetch_add(1, Ordering::Relaxed);
            user.boundary();
        }
    });
    rig.end();
}

/// Users that do not give a page up, and say so.
struct Stubborn;

impl MmuNotifier for Stubborn {
    fn revoke(&self, _: u64, _: Option<Access>, patience: Duration) -> Result<(), NotifierError> {
        Err(weft_vcpu::NotAnswered(patience).into())
    }
}

/// A user may still be writing to such a page: its bytes are not sent.
#[test]
fn a_page_that_could_not_be_taken_is_not_sent() {
    let (sender, frames) = channel();
    let to = || Mutex::new(sender.clone());
    let memory = SharedMemory::new(SharedMemoryOptions {
        ram: Ram::new(RAM).unwrap(),
        config: Config::new(NodeId(0), 2, ManagerOf::Fixed(NodeId(0))),
        budget: Budget::UNLIMITED,
        transport: Arc::new(Channels {
            me: NodeId(0),
            to: vec![to(), to()],
        }),
        lease: Duration::from_secs(20),
        on_failure: Box::new(|_| ()),
    });
    memory.register_notifier(Box::new(Stubborn));
    memory.adopt(0..2 * PAGE).unwrap();
    for page in [0, 1] {
        let body = Body::Get {
            access: weft_dsm::Access::Write,
            ahead: false,
        };
        let message = Message {
            page: Page(page),
            generation: 0,
            body,
        };
        let header = encode(&Run::one(message));
        memory.receive(NodeId(1), &header, &[]).unwrap();
    }
    assert!(memory.is_over() && frames.try_recv().is_err());
    let reason = memory.failure.lock().unwrap().take().unwrap();
    assert!(reason.contains("revoked from a vCPU"), "{reason}");
}
