//! Slices whose memory is much smaller than what their users work with.

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::spawn;
use std::time::{Duration, Instant};

use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};
use weft_dsm::{ManagerOf, Ranges};
use weft_vcpu::{Access, Asker, Memory, Purpose};

use super::{PAGE, RAM, Rig};
use crate::*;
use weft_guest_memory::Ram;
use weft_test_support::Random;

const PAGES: u64 = RAM / PAGE;
/// Room for pages of other slices' parts, in the tests here.
const OTHERS: u64 = 48;

/// RAM dealt out to slices, the first of which has `first` pages.
fn parts(nodes: u8, first: u64) -> Vec<u64> {
    let rest = (PAGES - first) / u64::from(nodes - 1);
    (0..u64::from(nodes) - 1)
        .map(|node| first + node * rest)
        .chain([PAGES])
        .collect()
}

/// Slices that manage their parts of RAM, each with its budget.
fn rig(ends: &[u64], others: u64) -> Rig {
    let manager = ManagerOf::Ranges(Ranges::new(ends).unwrap());
    let nodes = ends.len() as u8;
    let mut starts = vec![0];
    starts.extend(ends);
    let budgets = ends
        .iter()
        .zip(starts)
        .map(|(end, start)| Budget::new(end - start, others))
        .collect();
    Rig::with_budgets(nodes, manager, budgets)
}

fn figure(memory: &SharedMemory, name: &str) -> u64 {
    let figures = memory.figures();
    figures.iter().find(|(known, _)| *known == name).unwrap().1
}

/// Pages of a memory's file that the host has.
pub(crate) fn resident(ram: &Ram) -> u64 {
    let region = ram.guest().iter().next().unwrap();
    let file = region.file_offset().unwrap().file();
    file.metadata().unwrap().blocks() * 512 / PAGE
}

/// What a page holds after `round` writers.
fn pattern(page: u64, round: u64) -> u64 {
    page.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ round
}

/// One slice writes and reads far more than it may keep; what it kept is counted by
/// the kernel.
fn walk(first: u64) {
    let rig = rig(&parts(2, first), OTHERS);
    let mut user = rig.user(0);
    let walker = spawn(move || {
        user.inside();
        for round in 0..3 {
            for page in 0..PAGES {
                let word = user.word(page * PAGE + 8 * (page % 512), Access::Write);
                let before = word.swap(pattern(page, round), Ordering::Relaxed);
                let expected = match round {
                    0 => 0,
                    _ => pattern(page, round - 1),
                };
                assert_eq!(before, expected, "page {page:#x} in round {round}");
                user.boundary();
            }
        }
    });
    let budget = first + OTHERS;
    let mut most = 0;
    while !walker.is_finished() {
        most = most.max(resident(rig.memories[0].ram()));
        std::thread::yield_now();
    }
    walker.join().unwrap();
    assert!(most <= budget + 1, "{most} pages of {budget}");
    let near = &rig.memories[0];
    assert!(
        figure(near, "evicted-sent") > PAGES - first,
        "{:?}",
        near.figures()
    );
    assert!(figure(near, "given-back") > PAGES - first);
    assert!(figure(near, "held-pages") <= budget);
    rig.end();
}

#[test]
fn a_slice_that_writes_more_than_it_may_keep_keeps_to_its_budget() {
    walk(PAGES / 4);
}

#[test]
fn a_slice_without_memory_keeps_to_its_budget() {
    walk(0);
}

#[test]
fn a_slice_beside_a_small_one_keeps_to_its_budget() {
    walk(PAGES * 7 / 8);
}

/// Sums up what the faults of a vCPU brought.
#[derive(Default)]
struct Brought {
    faults: AtomicU64,
    bytes: AtomicU64,
}

impl FaultObserver for Arc<Brought> {
    fn waits(&self, _: u32) {}

    fn served(&self, fault: &ServedFault) -> bool {
        assert_eq!(fault.vcpu, 5);
        self.faults.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(fault.bytes, Ordering::Relaxed);
        false
    }
}

#[test]
fn pages_that_are_read_ahead_belong_to_the_fault_that_requests_them() {
    let rig = rig(&parts(2, 0), OTHERS);
    let near = &rig.memories[0];
    let brought = Arc::<Brought>::default();
    near.observe_faults(Box::new(brought.clone()));
    let asker = Asker {
        vcpu: 5,
        user: true,
        purpose: Purpose::Data,
        address: 0,
        rip: 0,
        gs_base: 0,
    };
    let read_all = || {
        for address in (0..PAGES).map(|page| page * PAGE) {
            near.acquire_for(address, Access::Read, &asker).unwrap();
            near.unpin(address);
        }
        let sums = [&brought.faults, &brought.bytes];
        sums.map(|sum| sum.swap(0, Ordering::Relaxed))
    };
    let first = read_all();
    // All pages but the last few had to leave.
    let again = read_all();
    assert!(again[0] > 0 && again[1] > again[0] * PAGE, "{again:?}");
    let counted = |name: &str| {
        let counters = near.served_counters(5);
        counters.iter().find(|(known, _)| known == name).unwrap().1
    };
    assert!(counted("from1.faults") <= first[0] + again[0]);
    assert!(counted("from1.bytes") <= first[1] + again[1]);
    rig.end();
}

/// Copies are dropped without being sent.
#[test]
fn what_was_only_read_is_dropped() {
    let rig = rig(&parts(2, 0), OTHERS);
    let mut writer = rig.user(1);
    writer.inside();
    for page in 0..PAGES {
        let word = writer.word(page * PAGE, Access::Write);
        word.store(pattern(page, 7), Ordering::Relaxed);
        writer.boundary();
    }
    drop(writer);
    let mut reader = rig.user(0);
    reader.inside();
    for page in (0..PAGES).chain(0..PAGES) {
        let word = reader.word(page * PAGE, Access::Read);
        assert_eq!(word.load(Ordering::Relaxed), pattern(page, 7));
        reader.boundary();
    }
    drop(reader);
    let near = &rig.memories[0];
    assert!(figure(near, "evicted-dropped") > 2 * (PAGES - OTHERS) - OTHERS);
    assert!(figure(near, "held-pages") <= OTHERS);
    rig.end();
}

/// A page that is used all the time stays while others come and go.
#[test]
fn what_is_used_again_stays() {
    let rig = rig(&parts(2, 0), 256);
    let near = rig.memories[0].clone();
    let mut user = rig.user(0);
    user.inside();
    let (mut hot, mut fetched) = (0, 0);
    for page in 1..PAGES {
        user.word(page * PAGE, Access::Write)
            .store(page, Ordering::Relaxed);
        user.boundary();
        // As after a flush of the TLB: looked for anew.
        user.forget(0);
        hot += 1;
        fetched += u64::from(near.held(0, Access::Write).is_none());
        user.word(0, Access::Write).fetch_add(1, Ordering::Relaxed);
        user.boundary();
    }
    assert_eq!(user.word(0, Access::Read).load(Ordering::Relaxed), hot);
    drop(user);
    assert!(fetched <= hot / 256, "fetched {fetched} times of {hot}");
    rig.end();
}

/// Increments of random words by users of all slices, each with a random small
/// budget: none is lost, and nobody gets stuck.
fn soak(seed: u64, rounds: u64) {
    const USERS: u64 = 2;
    let mut random = Random::new(pattern(seed, 0));
    let nodes = 2 + random.below(2) as u8;
    let first = random.below(PAGES / 2);
    let others = 16 + random.below(64);
    let ends = parts(nodes, first);
    let rig = rig(&ends, others);
    // Some twice as many as fit anywhere.
    let pages = 2 * (others + 16);
    // Page 0 counts what is added to all others.
    let address = move |number: u64| {
        let page = 1 + number.wrapping_mul(0x9e37_79b9_7f4a_7c15) % (PAGES - 1);
        page * PAGE
    };
    let deadline = Instant::now() + Duration::from_secs(120);
    rig.all_at_once(USERS, |number, user| {
        let mut random = Random::new(pattern(seed, number << 32));
        for _ in 0..rounds {
            assert!(Instant::now() < deadline, "stuck");
            let place = address(random.below(pages));
            match random.below(3) {
                0 => {
                    user.word(place, Access::Read).load(Ordering::Relaxed);
                }
                _ => {
                    user.word(place, Access::Write)
                        .fetch_add(1, Ordering::Relaxed);
                    user.word(0, Access::Write).fetch_add(1, Ordering::Relaxed);
                }
            }
            user.boundary();
        }
    });
    let mut user = rig.user(0);
    user.inside();
    let places: std::collections::BTreeSet<u64> = (0..pages).map(address).collect();
    let count = |user: &mut super::User, place| {
        let count = user.word(place, Access::Read).load(Ordering::Relaxed);
        user.boundary();
        count
    };
    let all = count(&mut user, 0);
    let sum: u64 = places.iter().map(|place| count(&mut user, *place)).sum();
    drop(user);
    assert_eq!(all, sum, "seed {seed}");
    rig.end();
}

#[test]
fn nothing_is_lost_under_random_budgets() {
    let seeds = std::env::var("WEFT_SOAK_SEEDS").ok();
    let seeds = seeds.and_then(|seeds| seeds.parse().ok()).unwrap_or(4);
    for seed in 1..=seeds {
        soak(seed, 300);
    }
}
