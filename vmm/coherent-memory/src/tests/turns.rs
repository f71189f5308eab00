//! A page that threads pin in turns.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use weft_dsm::ManagerOf;
use weft_vcpu::{Access, Memory};

use super::Rig;
use crate::shell::SharedMemory;

const PAGE: u64 = 0x10_0000;

/// Slices, the first of which has the page.
fn rig() -> Rig {
    let rig = Rig::new(2, ManagerOf::Interleaved);
    take(&rig.memories[0]);
    rig
}

/// Gets the page and lets it go.
fn take(memory: &SharedMemory) {
    memory.acquire(PAGE, Access::Write).unwrap();
    memory.unpin(PAGE);
}

/// Whether a request for a page had to wait for a pin.
fn has_deferred(memory: &SharedMemory) -> bool {
    memory.counters.deferred.load(Ordering::SeqCst) > 0
}

#[test]
fn a_page_that_is_pinned_in_turns_leaves() {
    /// Pins that may begin when a request waits already, before the test fails.
    const LATE_MAX: u64 = 1000;
    let rig = rig();
    let [here, there] = &rig.memories[..] else {
        unreachable!()
    };
    let (turn, late, over) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for me in 0..2 {
            let (turn, late, over) = (&turn, &late, &over);
            scope.spawn(move || {
                let mut is_pinned = false;
                while !over.load(Ordering::SeqCst) {
                    if turn.load(Ordering::SeqCst) % 2 != me {
                        std::thread::yield_now();
                        continue;
                    }
                    // The other thread has the page pinned meanwhile.
                    if is_pinned {
                        here.unpin(PAGE);
                    }
                    let waits = has_deferred(here);
                    is_pinned = here.acquire_held(&[PAGE], Access::Write);
                    let late = late.fetch_add((waits && is_pinned).into(), Ordering::SeqCst);
                    if !is_pinned || late > LATE_MAX {
                        over.store(true, Ordering::SeqCst);
                    }
                    turn.fetch_add(1, Ordering::SeqCst);
                }
                if is_pinned {
                    here.unpin(PAGE);
                }
            });
        }
        let (turn, over) = (&turn, &over);
        scope.spawn(move || {
            while turn.load(Ordering::SeqCst) < 2 {
                std::thread::yield_now();
            }
            take(there);
            over.store(true, Ordering::SeqCst);
        });
    });
    assert_eq!(late.into_inner(), 0, "a page was pinned that had to leave");
    rig.end();
}

#[test]
fn a_thread_does_not_wait_for_its_own_pin() {
    let rig = rig();
    let [here, there] = &rig.memories[..] else {
        unreachable!()
    };
    assert!(here.acquire_held(&[PAGE], Access::Write));
    std::thread::scope(|scope| {
        scope.spawn(|| take(there));
        while !has_deferred(here) && !there.is_over() {
            std::thread::yield_now();
        }
        here.acquire(PAGE, Access::Write).unwrap();
        assert!(here.acquire_held(&[PAGE], Access::Read));
        for _ in 0..3 {
            here.unpin(PAGE);
        }
    });
    rig.end();
}
