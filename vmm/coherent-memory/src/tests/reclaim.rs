//! Pages that the guest gives back, while slices use others.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::scope;

use weft_dsm::{ManagerOf, Ranges};
use weft_vcpu::Access;

use super::evict::resident;
use super::membership::{plan, until};
use super::{PAGE, RAM, Rig};

const PAGES: u64 = RAM / PAGE;
const HALF: u64 = PAGES / 2;

fn rig() -> Rig {
    let ranges = Ranges::new(&[HALF, PAGES]).unwrap();
    Rig::new(2, ManagerOf::Ranges(ranges))
}

/// What the balloon does: see `weft_aggregate`.
fn give_back(rig: &Rig, pages: std::ops::Range<u64>) {
    for memory in &rig.memories {
        memory.reclaim(pages.clone()).unwrap();
    }
    for memory in &rig.memories {
        memory.release_vacant(pages.clone());
    }
}

/// Each page is written on one slice and read on the other, so that both have memory for
/// it; a part is given back from the middle of both slices' parts.
#[test]
fn reclaimed_pages_take_memory_nowhere_and_are_zero() {
    let rig = rig();
    let given = HALF - 100..HALF + 100;
    for (writer, reader) in [(0, 1), (1, 0)] {
        for (node, access) in [(writer, Access::Write), (reader, Access::Read)] {
            let mut user = rig.user(node);
            user.inside();
            for page in 0..PAGES {
                let word = user.word(page * PAGE, access);
                match access {
                    Access::Write => word.store(page + 1, Ordering::SeqCst),
                    Access::Read => assert_eq!(word.load(Ordering::SeqCst), page + 1),
                }
            }
        }
        let before: Vec<u64> = rig.memories.iter().map(|one| resident(one.ram())).collect();
        give_back(&rig, given.clone());
        for (memory, before) in rig.memories.iter().zip(before) {
            assert_eq!(before - resident(memory.ram()), 200);
        }
        let reclaimed = rig.memories.iter().map(|one| one.reclaimed().unwrap());
        let reclaimed: Vec<_> = reclaimed.collect();
        for page in 0..PAGES {
            let manager = usize::from(page >= HALF);
            let is_marked = reclaimed[manager].has(page * PAGE);
            // A page that the other slice has is not marked.
            assert_eq!(is_marked, given.contains(&page), "{page}");
        }
        // The other slice first: it has to ask for what is zero.
        for node in [reader, writer] {
            let mut user = rig.user(node);
            user.inside();
            for page in 0..PAGES {
                let expected = if given.contains(&page) { 0 } else { page + 1 };
                let word = user.word(page * PAGE, Access::Read);
                assert_eq!(word.load(Ordering::SeqCst), expected, "{page}");
            }
        }
    }
    rig.end();
}

/// A page that was never touched stays so.
#[test]
fn untouched_pages_are_not_asked_for() {
    let rig = rig();
    give_back(&rig, 0..PAGES);
    for memory in &rig.memories {
        assert_eq!(resident(memory.ram()), 0);
        assert!(memory.touched(0..PAGES).is_empty());
    }
    rig.end();
}

/// A page whose manager changed is written to a checkpoint, and given back, by the new one.
#[test]
fn a_page_belongs_to_its_manager_of_the_moment() {
    let rig = rig();
    let (moved, given) = (100..200, 150..HALF + 50);
    let mut user = rig.user(0);
    user.inside();
    for page in 0..PAGES {
        user.word(page * PAGE, Access::Write)
            .store(page + 1, Ordering::SeqCst);
    }
    user.outside();
    let plan = plan(moved.clone(), &[1]);
    let drained = rig.memories[0].drain(plan, |_| ControlFlow::Continue(()));
    assert!(drained.is_over, "{drained:?}");
    let of_each = |range: std::ops::Range<u64>| -> Vec<Vec<u64>> {
        let memories = rig.memories.iter();
        memories.map(|one| one.touched(range.clone())).collect()
    };
    let second = |page: &u64| moved.contains(page) || *page >= HALF;
    let (of_second, of_first): (Vec<_>, Vec<_>) = (0..PAGES).partition(second);
    // The last entries may still be on their way to the second slice.
    until("the second slice has got its entries", || {
        of_each(0..PAGES) == [of_first.as_slice(), &of_second]
    });
    give_back(&rig, given.clone());
    let reclaimed: Vec<_> = rig
        .memories
        .iter()
        .map(|one| one.reclaimed().unwrap())
        .collect();
    for page in given {
        let marked = [0, 1].map(|node| reclaimed[node].has(page * PAGE));
        assert_eq!(marked, [!second(&page), second(&page)], "{page}");
        user.inside();
        let word = user.word(page * PAGE, Access::Read);
        assert_eq!(word.load(Ordering::SeqCst), 0, "{page}");
        user.outside();
    }
    drop(user);
    rig.end();
}

/// A save stops the hand-overs of a drain that is under way: then each page belongs to one
/// slice, and the drain ends later.
#[test]
fn each_page_has_one_manager_while_hand_overs_are_held() {
    let rig = rig();
    let mut user = rig.user(0);
    user.inside();
    for page in 0..PAGES {
        user.word(page * PAGE, Access::Write)
            .store(page + 1, Ordering::SeqCst);
    }
    user.outside();
    let mut under_way = 0;
    for round in 0..10_u64 {
        let from = (round % 2) as usize;
        scope(|scope| {
            let drain = scope.spawn(|| {
                let plan = plan(0..PAGES, &[1 - from as u8]);
                rig.memories[from].drain(plan, |_| ControlFlow::Continue(()))
            });
            for _ in 0..5 {
                for memory in &rig.memories {
                    memory.hold().unwrap();
                }
                for memory in &rig.memories {
                    until("a page does not settle", || memory.unsettled().is_none());
                }
                let both = rig.memories.iter().map(|one| one.touched(0..PAGES));
                let both: Vec<_> = both.collect();
                under_way += u64::from(both.iter().all(|pages| !pages.is_empty()));
                let mut pages: Vec<u64> = both.concat();
                pages.sort_unstable();
                assert!(pages.into_iter().eq(0..PAGES), "round {round}");
                rig.memories.iter().for_each(|memory| memory.resume());
            }
            assert!(drain.join().unwrap().is_over);
        });
    }
    println!("{under_way} of 50 looks came in the middle of a drain");
    drop(user);
    rig.end();
}

/// Users on both slices count on some pages while others, between them, are given back
/// again and again, and written in between.
#[test]
fn users_of_other_pages_lose_nothing() {
    const ROUNDS: u64 = 200;
    let rig = rig();
    let over = AtomicBool::new(false);
    // Every eighth page counts, in both parts.
    let counted: Vec<u64> = (HALF - 64..HALF + 64)
        .filter(|page| page % 8 == 3)
        .collect();
    scope(|scope| {
        for node in 0..2 {
            let mut user = rig.user(node);
            let (counted, over) = (&counted, &over);
            scope.spawn(move || {
                user.inside();
                while !over.load(Ordering::SeqCst) {
                    for page in counted {
                        user.boundary();
                        user.word(page * PAGE + 8 * node as u64, Access::Write)
                            .fetch_add(1, Ordering::SeqCst);
                        user.word(page * PAGE + 64 + 8 * node as u64, Access::Write)
                            .fetch_add(1, Ordering::SeqCst);
                    }
                }
            });
        }
        for round in 0..ROUNDS {
            let mut user = rig.user((round % 2) as usize);
            for page in counted.iter().map(|page| page + 1) {
                user.inside();
                let word = user.word(page * PAGE, Access::Write);
                assert_eq!(word.load(Ordering::SeqCst), 0, "round {round}, page {page}");
                word.store(round + 1, Ordering::SeqCst);
            }
            drop(user);
            for page in counted.iter().map(|page| page + 1) {
                give_back(&rig, page..page + 1);
            }
        }
        over.store(true, Ordering::SeqCst);
    });
    let mut user = rig.user(0);
    user.inside();
    for page in &counted {
        for node in 0..2 {
            let first = user
                .word(page * PAGE + 8 * node, Access::Read)
                .load(Ordering::SeqCst);
            let second = user
                .word(page * PAGE + 64 + 8 * node, Access::Read)
                .load(Ordering::SeqCst);
            assert_eq!(first, second, "page {page}, node {node}");
            assert!(first > 0);
        }
    }
    drop(user);
    rig.end();
}
