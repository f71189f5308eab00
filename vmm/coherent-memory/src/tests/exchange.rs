//! Blocks of pages that slices exchange, while threads use them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use weft_dsm::controller::DrainTarget;
use weft_dsm::{ManagerOf, NodeId, Ranges};
use weft_vcpu::{Access, Asker, Memory, Purpose};

use super::membership::StopsThreads;
use super::{PAGE, RAM, Rig};
use crate::{BLOCK_PAGES, BlockMover, FaultObserver, ServedFault};

const PAGES: u64 = RAM / PAGE;
const HALF: u64 = PAGES / 2;
/// Blocks of each half.
const BLOCKS: u64 = HALF / BLOCK_PAGES;
const VCPU: Asker = Asker {
    vcpu: 0,
    user: true,
    purpose: Purpose::Data,
    address: 0,
    rip: 0,
    gs_base: 0,
};

/// Three slices; the first two manage a half of the pages each.
fn rig() -> Rig {
    let ends = [HALF, PAGES, PAGES];
    Rig::new(3, ManagerOf::Ranges(Ranges::new(&ends).unwrap()))
}

/// Slice 1 gives blocks.
struct Mover(Arc<AtomicU64>);

impl BlockMover for Mover {
    fn gives(&self, slice: usize) -> bool {
        slice == 1
    }

    fn wanted(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// Says of each fault whether blocks may come.
#[derive(Default)]
struct Stays(AtomicBool);

impl FaultObserver for Arc<Stays> {
    fn waits(&self, _: u32) {}

    fn served(&self, fault: &ServedFault) -> bool {
        assert_eq!(fault.from, Some(1));
        self.0.load(Ordering::SeqCst)
    }
}

fn block(number: u64) -> std::ops::Range<u64> {
    number * BLOCK_PAGES..(number + 1) * BLOCK_PAGES
}

fn to(node: u8, pages: u64) -> DrainTarget {
    DrainTarget {
        node: NodeId(node),
        pages,
    }
}

#[test]
fn a_block_that_a_vcpu_fetches_comes_and_a_cold_one_goes() {
    let rig = rig();
    let [here, there, _] = &rig.memories[..] else {
        panic!("three slices");
    };
    let calls = Arc::new(AtomicU64::new(0));
    here.exchange_by(Box::new(Mover(calls.clone())));
    let use_page = |page: u64| {
        here.acquire_for(page * PAGE, Access::Write, &VCPU).unwrap();
        here.unpin(page * PAGE);
    };
    // Of this slice itself: no faults.
    block(3).for_each(use_page);
    assert_eq!(
        (calls.load(Ordering::SeqCst), here.take_wanted()),
        (0, None)
    );
    // Pages that were never used come ahead: others of the block are here with the first.
    let wanted = block(BLOCKS + 5);
    use_page(wanted.start + 1);
    assert_eq!(here.take_wanted(), None);
    use_page(wanted.end - 1);
    assert_eq!(calls.load(Ordering::SeqCst), 1);
    assert_eq!(here.take_wanted(), Some((NodeId(1), wanted.clone())));
    assert_eq!(
        there.give_block(to(0, BLOCK_PAGES), wanted.clone(), || false),
        BLOCK_PAGES
    );
    assert_eq!(here.managed_pages(NodeId(0)), HALF + BLOCK_PAGES);
    // Blocks that were used stay.
    let mut cold = Vec::new();
    here.histogram();
    while let Some(pages) = here.take_cold() {
        cold.push(pages.start / BLOCK_PAGES);
    }
    let expected: Vec<u64> = (0..BLOCKS).filter(|number| *number != 3).collect();
    assert_eq!(cold, expected);
    assert_eq!(here.give_block(to(1, 7), block(2), || false), 7);
    assert_eq!(here.managed_pages(NodeId(1)), HALF - BLOCK_PAGES + 7);
    // What came is of this slice now.
    use_page(wanted.start + 2);
    assert_eq!(here.take_wanted(), None);
    let counters = &here.counters;
    assert_eq!(counters.exchanged_out.load(Ordering::Relaxed), 7);
    rig.end();
}

#[test]
fn no_block_comes_to_a_vcpu_that_may_go_instead() {
    let rig = rig();
    let here = &rig.memories[0];
    let calls = Arc::new(AtomicU64::new(0));
    here.exchange_by(Box::new(Mover(calls.clone())));
    let stays = Arc::<Stays>::default();
    here.observe_faults(Box::new(stays.clone()));
    for (may_come, number) in [(false, 5), (true, 6)] {
        stays.0.store(may_come, Ordering::SeqCst);
        let pages = block(BLOCKS + number);
        for page in [pages.start, pages.end - 1] {
            here.acquire_for(page * PAGE, Access::Write, &VCPU).unwrap();
            here.unpin(page * PAGE);
        }
        assert_eq!(here.take_wanted().is_some(), may_come);
    }
    assert_eq!(calls.load(Ordering::SeqCst), 1);
    rig.end();
}

/// Each increment is there in the end.
fn exchange_at_random(round: u64) {
    const WORDS: u64 = 60;
    // On a page of each block, of both halves.
    let address = |word: u64| (word % (2 * BLOCKS) * BLOCK_PAGES + word) * PAGE;
    let rig = rig();
    let (done, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let _stop = StopsThreads(&stop);
        for node in [0, 1, 2] {
            let (mut user, done, stop) = (rig.user(node), &done, &stop);
            scope.spawn(move || {
                user.inside();
                let mut word = node as u64;
                while !stop.load(Ordering::Relaxed) {
                    user.word(address(word % WORDS), Access::Write)
                        .fetch_add(1, Ordering::Relaxed);
                    user.boundary();
                    done.fetch_add(1, Ordering::Relaxed);
                    word += 7;
                }
            });
        }
        for node in [0, 1] {
            let rig = &rig;
            scope.spawn(move || {
                for step in 0..40 {
                    let pages = block((step * (13 + 2 * round) + node * 5) % (2 * BLOCKS));
                    let mut looks = 0;
                    let target = to(1 - node as u8, BLOCK_PAGES - step % 3);
                    rig.memories[node as usize].give_block(target, pages, || {
                        looks += 1;
                        looks > 20
                    });
                }
            });
        }
        let before = done.load(Ordering::Relaxed);
        super::membership::until("users stand", || {
            done.load(Ordering::Relaxed) > before + 3000
        });
    });
    let mut user = rig.user(1);
    user.inside();
    let total: u64 = (0..WORDS)
        .map(|word| {
            let word = user.word(address(word), Access::Read);
            word.load(Ordering::Relaxed)
        })
        .sum();
    drop(user);
    assert_eq!(total, done.load(Ordering::Relaxed));
    rig.end();
}

#[test]
fn nothing_is_lost_while_blocks_go_to_and_fro() {
    let rounds = std::env::var("WEFT_MEMBERSHIP_ROUNDS");
    let rounds = rounds.ok().and_then(|rounds| rounds.parse().ok());
    (0..rounds.unwrap_or(5)).for_each(exchange_at_random);
}
