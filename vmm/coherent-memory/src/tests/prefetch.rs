//! Pages that follow a vCPU to another slice.

use super::*;
use weft_vcpu::PageRun;

const FIRST: u64 = 0x100;
const PAGES: u64 = 500;

fn address(page: u64) -> u64 {
    page * PAGE
}

fn runs() -> [PageRun; 2] {
    let access = Access::Write;
    [(FIRST + 100, PAGES - 100), (FIRST, 100)].map(|(first, count)| PageRun {
        first,
        count,
        access,
    })
}

/// Slices of which the first has written its number into each page.
fn written() -> Rig {
    let rig = Rig::new(2, ManagerOf::Fixed(NodeId(0)));
    let mut user = rig.user(0);
    user.inside();
    for page in FIRST..FIRST + PAGES {
        let word = user.word(address(page), Access::Write);
        word.store(page, Ordering::Relaxed);
    }
    drop(user);
    rig
}

fn prefetched(memory: &SharedMemory) -> u64 {
    memory.counters.prefetched.load(Ordering::Relaxed)
}

fn are_all_here(memory: &SharedMemory) -> bool {
    (FIRST..FIRST + PAGES).all(|page| memory.held(address(page), Access::Write).is_some())
}

fn wait_until(done: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_secs(20);
    while !done() {
        assert!(Instant::now() < until, "it does not end");
        std::thread::yield_now();
    }
}

#[test]
fn pages_come_without_a_fault_and_with_their_bytes() {
    let rig = written();
    let there = &rig.memories[1];
    there.prefetch(3, &runs()).unwrap();
    wait_until(|| are_all_here(there));
    assert_eq!(prefetched(there), PAGES);
    let mut user = rig.user(1);
    user.inside();
    for page in FIRST..FIRST + PAGES {
        let word = user.word(address(page), Access::Write);
        assert_eq!(word.fetch_add(1, Ordering::Relaxed), page);
    }
    drop(user);
    for counter in [&there.counters.reads, &there.counters.writes] {
        assert_eq!(counter.load(Ordering::Relaxed), 0, "faults");
    }
    rig.end();
}

#[test]
fn nothing_comes_while_prefetches_are_held() {
    let rig = written();
    let there = &rig.memories[1];
    there.prefetch(3, &runs()).unwrap();
    for _ in 0..5 {
        there.hold_prefetches();
        let requested = prefetched(there);
        let is_here = |page: &u64| there.held(address(*page), Access::Read).is_some();
        let here = || (FIRST..FIRST + PAGES).filter(is_here).count() as u64;
        assert_eq!(here(), requested, "all that was requested is here");
        there.do_deferred_work();
        assert_eq!(prefetched(there), requested);
        there.resume_prefetches();
    }
    wait_until(|| are_all_here(there));
    there.hold_prefetches();
    rig.end();
}

#[test]
fn pages_beyond_memory_are_refused() {
    let rig = written();
    let there = &rig.memories[1];
    let beyond = |first, count| {
        let access = Access::Read;
        let run = PageRun {
            first,
            count,
            access,
        };
        there.prefetch(0, &[runs()[0], run]).unwrap_err()
    };
    let pages = RAM / PAGE;
    assert_eq!(beyond(pages, 1), "page 0x800 is beyond guest memory");
    assert_eq!(beyond(pages - 1, 2), "page 0x7ff is beyond guest memory");
    assert_eq!(beyond(0, pages + 1), "page 0x0 is beyond guest memory");
    assert_eq!(
        beyond(u64::MAX, 1),
        format!("page {:#x} is beyond guest memory", u64::MAX)
    );
    assert_eq!(prefetched(there), 0);
    rig.end();
}
