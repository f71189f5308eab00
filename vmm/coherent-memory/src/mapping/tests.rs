//! Slices whose users touch a watched mapping, as KVM does; here in user mode, which
//! needs no privilege.

use std::collections::HashSet;
use std::sync::Mutex;
use std::thread::{JoinHandle, spawn};

use weft_dsm::{ManagerOf, NodeId, Ranges};

use super::*;
use crate::Budget;
use crate::tests::evict::resident;
use crate::tests::{Links, PAGE as PAGE_BYTES, RAM, Rig, fight};
use weft_guest_memory::GuestBytes;

/// Slices with watched mappings.
struct Watched {
    rig: Rig,
    mappings: Vec<Arc<GuestMapping>>,
}

impl Watched {
    fn new(nodes: u8, manager: ManagerOf) -> Self {
        Self::with(nodes, manager, |mapping| mapping)
    }

    fn with(
        nodes: u8,
        manager: ManagerOf,
        change: impl FnMut(GuestMapping) -> GuestMapping,
    ) -> Self {
        let budgets = vec![Budget::UNLIMITED; nodes.into()];
        Self::with_budgets(nodes, manager, Links::Open, budgets, change)
    }

    fn with_budgets(
        nodes: u8,
        manager: ManagerOf,
        links: Links,
        budgets: Vec<Budget>,
        mut change: impl FnMut(GuestMapping) -> GuestMapping,
    ) -> Self {
        let mut mappings = Vec::new();
        let rig = Rig::of(nodes, manager, links, budgets, |memory| {
            let mapping = GuestMapping::new(memory.ram(), Whose::UserMode).unwrap();
            let mapping = Arc::new(change(mapping));
            memory.register_notifier(Box::new(mapping.clone()));
            mappings.push(mapping.clone());
            let memory = memory.clone();
            vec![spawn(move || mapping.serve(&memory))]
        });
        Self { rig, mappings }
    }

    /// A word of guest memory as a vCPU of `node` sees it.
    fn word(&self, node: usize, address: u64) -> &'static AtomicU64 {
        let (start, length, host) = self.mappings[node].watched().parts()[0];
        assert!(address - start < length);
        // SAFETY: in a mapping that outlives every use: tests end with `end`, after
        // their threads.
        unsafe { &*host.add((address - start) as usize).cast() }
    }

    fn end(self) {
        self.rig.end();
    }
}

/// Increments of words that all users share: none is lost.
fn increments(nodes: u8, users: usize, rounds: u64, manager: ManagerOf) {
    const WORDS: u64 = 5;
    let watched = Watched::new(nodes, manager);
    // On three pages of two chunks.
    let address = |word: u64| 0x1f_e000 + word * 2048;
    let threads: Vec<JoinHandle<()>> = (0..usize::from(nodes) * users)
        .map(|number| {
            let words: Vec<&AtomicU64> = (0..WORDS)
                .map(|word| watched.word(number % usize::from(nodes), address(word)))
                .collect();
            spawn(move || {
                for round in 0..rounds {
                    let word = words[((round * 7 + number as u64) % WORDS) as usize];
                    if round % 3 == 0 {
                        word.load(Ordering::Relaxed);
                    }
                    word.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    let total: u64 = (0..WORDS)
        .map(|word| watched.word(0, address(word)).load(Ordering::Relaxed))
        .sum();
    assert_eq!(total, u64::from(nodes) * users as u64 * rounds);
    watched.end();
}

#[test]
fn no_increment_is_lost_between_two_watched_mappings() {
    increments(2, 1, 1500, ManagerOf::Interleaved);
}

#[test]
fn no_increment_is_lost_between_three_watched_mappings_of_two_users() {
    increments(3, 2, 400, ManagerOf::Interleaved);
}

#[test]
fn no_increment_is_lost_between_watched_mappings_that_one_manages() {
    increments(3, 1, 400, ManagerOf::Fixed(NodeId(1)));
}

/// Message passing: who sees the flag sees the data.
#[test]
fn stores_through_watched_mappings_are_seen_in_order() {
    const ROUNDS: u64 = 1000;
    let watched = Watched::new(2, ManagerOf::Interleaved);
    let at = |node| (watched.word(node, 0x10_0000), watched.word(node, 0x30_0000));
    let (data, flag) = at(0);
    let writing = spawn(move || {
        for round in 1..=ROUNDS {
            data.store(round, Ordering::Release);
            flag.store(round, Ordering::Release);
        }
    });
    let (data, flag) = at(1);
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut last = 0;
    while last < ROUNDS {
        assert!(Instant::now() < deadline, "stuck at {last}");
        let seen = flag.load(Ordering::Acquire);
        assert!(seen >= last);
        let value = data.load(Ordering::Acquire);
        assert!(value >= seen, "{value} after {seen}");
        last = seen;
    }
    writing.join().unwrap();
    watched.end();
}

/// Adopted pages are there, first touches are zero, and what is written beside the
/// mapping is seen in it, and the other way round.
#[test]
fn both_mappings_are_the_same_memory() {
    let watched = Watched::new(2, ManagerOf::Fixed(NodeId(0)));
    let memories = &watched.rig.memories;
    let address = 0x5000;
    memories[0]
        .ram()
        .put(address, &77_u64.to_le_bytes())
        .unwrap();
    memories[0].adopt(address..address + PAGE_BYTES).unwrap();
    let load = |node, address| watched.word(node, address).load(Ordering::SeqCst);
    assert_eq!(load(1, address), 77);
    assert_eq!(load(0, address), 77);
    assert_eq!(load(1, 0x9000), 0);
    watched.word(1, 0x9000).store(5, Ordering::SeqCst);
    assert_eq!(load(0, 0x9000), 5);
    assert!(memories[1].write(0x9000, &6_u64.to_le_bytes()));
    assert_eq!(load(0, 0x9000), 6);
    watched.word(0, 0x9000).store(7, Ordering::SeqCst);
    let mut bytes = [0; 8];
    assert!(memories[1].read(0x9000, &mut bytes));
    assert_eq!(u64::from_le_bytes(bytes), 7);
    watched.end();
}

/// A page that is fought over gets work done on both sides.
#[test]
fn two_watched_mappings_that_fight_both_get_on() {
    let watched = Watched::new(2, ManagerOf::Interleaved);
    let done = fight(|node| {
        let word = watched.word(node, 0x8000);
        move || {
            word.fetch_add(1, Ordering::Relaxed);
        }
    });
    assert_eq!(
        watched.word(0, 0x8000).load(Ordering::Relaxed),
        done[0] + done[1]
    );
    watched.end();
}

/// A vCPU writes and reads, three times over, far more than its slice may keep; in the
/// kernel's account, the memory file stays within the budget.
fn walk(shadows: bool) {
    const PAGES: u64 = RAM / PAGE_BYTES;
    const OTHERS: u64 = 64;
    let own = PAGES / 4;
    let manager = ManagerOf::Ranges(Ranges::new(&[own, PAGES]).unwrap());
    let budgets = vec![Budget::new(own, OTHERS), Budget::new(PAGES - own, OTHERS)];
    let watched =
        Watched::with_budgets(2, manager, Links::Open, budgets, |mapping| match shadows {
            true => mapping.with_shadows(Arc::new(Seen::default())),
            false => mapping,
        });
    let words: Vec<&AtomicU64> = (0..PAGES)
        .map(|page| watched.word(0, page * PAGE_BYTES + 8 * (page % 512)))
        .collect();
    let walker = spawn(move || {
        for round in 0..3 {
            for (page, word) in (0..).zip(&words) {
                let before = word.swap(page << 8 | round, Ordering::SeqCst);
                let expected = match round {
                    0 => 0,
                    _ => page << 8 | (round - 1),
                };
                assert_eq!(before, expected, "page {page:#x} in round {round}");
            }
        }
    });
    let near = &watched.rig.memories[0];
    let mut most = 0;
    while !walker.is_finished() {
        most = most.max(resident(near.ram()));
        std::thread::yield_now();
    }
    walker.join().unwrap();
    assert!(most <= own + OTHERS + 1, "{most} pages");
    let sent = near.counters.evicted_sent.load(Ordering::Relaxed);
    assert!(sent > 2 * (PAGES - own), "{sent} sent");
    watched.end();
}

#[test]
fn a_watched_mapping_keeps_to_its_budget() {
    walk(false);
}

#[test]
fn a_watched_mapping_with_shadows_keeps_to_its_budget() {
    walk(true);
}

/// Two mappings whose memory is small: no increment is lost while the pages move.
#[test]
fn no_increment_is_lost_between_small_watched_mappings() {
    const PAGES: u64 = 200;
    const ROUNDS: u64 = 1500;
    let manager = ManagerOf::Ranges(Ranges::new(&[64, RAM / PAGE_BYTES]).unwrap());
    let budgets = vec![Budget::new(64, 32), Budget::new(RAM / PAGE_BYTES - 64, 32)];
    let watched = Watched::with_budgets(2, manager, Links::Open, budgets, |mapping| mapping);
    let word = |node, number: u64| watched.word(node, number * 7 % PAGES * PAGE_BYTES);
    let threads: Vec<JoinHandle<()>> = (0..2)
        .map(|node| {
            let words: Vec<&AtomicU64> = (0..PAGES).map(|number| word(node, number)).collect();
            spawn(move || {
                for round in 0..ROUNDS {
                    words[(round * 13 % PAGES) as usize].fetch_add(1, Ordering::SeqCst);
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    let total: u64 = (0..PAGES)
        .map(|number| word(0, number).load(Ordering::SeqCst))
        .sum();
    assert_eq!(total, 2 * ROUNDS);
    watched.end();
}

/// A thread that sleeps on a page continues when the machine ends.
#[test]
fn the_end_wakes_a_thread_that_sleeps_on_a_page() {
    let manager = ManagerOf::Fixed(NodeId(1));
    let budgets = vec![Budget::UNLIMITED; 2];
    let watched = Watched::with_budgets(2, manager, Links::Silent, budgets, |mapping| mapping);
    let word = watched.word(0, 0x7000);
    let sleeping = spawn(move || word.load(Ordering::SeqCst));
    // It has asked.
    while watched.rig.memories[0]
        .counters
        .reads
        .load(Ordering::SeqCst)
        == 0
    {
        assert!(!sleeping.is_finished());
        std::thread::yield_now();
    }
    watched.rig.memories[0].end_waits();
    assert_eq!(sleeping.join().unwrap(), 0);
    watched.end();
}

/// Keeps which pages were taken, with their first words, and which were written.
#[derive(Default)]
struct Seen {
    taken: Mutex<Vec<(u64, u64)>>,
    written: Mutex<HashSet<u64>>,
}

impl Shadows for Seen {
    fn taken(&self, address: u64, words: &[AtomicU64; PAGE_WORDS]) -> io::Result<()> {
        let first = words[0].load(Ordering::SeqCst);
        self.taken.lock().unwrap().push((address, first));
        Ok(())
    }

    fn written(&self, address: u64) {
        self.written.lock().unwrap().insert(address);
    }
}

/// What is derived from a page is made void before another slice writes to it.
#[test]
fn shadows_hear_of_pages_that_go() {
    let seen: Vec<Arc<Seen>> = (0..2).map(|_| Arc::default()).collect();
    let mut next = seen.iter();
    let watched = Watched::with(2, ManagerOf::Fixed(NodeId(0)), |mapping| {
        mapping.with_shadows(next.next().unwrap().clone())
    });
    let address = 0xa000;
    watched.word(1, address).store(3, Ordering::SeqCst);
    assert_eq!(watched.word(0, address).load(Ordering::SeqCst), 3);
    assert!(seen[1].taken.lock().unwrap().is_empty());
    watched.word(0, address).store(4, Ordering::SeqCst);
    assert_eq!(*seen[1].taken.lock().unwrap(), [(address, 3)]);
    assert!(watched.rig.memories[1].write(address + 16, &[1]));
    assert_eq!(*seen[0].taken.lock().unwrap(), [(address, 4)]);
    assert!(seen[1].written.lock().unwrap().contains(&address));
    watched.end();
}
