//! A rest of all slices, after users of all of them have stopped.

use std::collections::BTreeSet;

use weft_dsm::controller::unrest;

use super::*;

const FIRST: u64 = 0x100;
const PAGES: u64 = 60;

fn address(page: u64) -> u64 {
    (FIRST + page) * PAGE
}

/// Slices whose users have read and written the same pages, and stand.
pub(super) fn used(budgets: Vec<Budget>) -> Rig {
    let ranges = weft_dsm::Ranges::new(&[FIRST + 20, FIRST + 40, RAM / PAGE]).unwrap();
    let rig = Rig::with_budgets(3, ManagerOf::Ranges(ranges), budgets);
    rig.all_at_once(2, |number, user| {
        for round in 0..2000 {
            let page = (round * 13 + number * 7) % PAGES;
            match round % 3 {
                0 => {
                    let word = user.word(address(page), Access::Write);
                    word.fetch_add(1, Ordering::Relaxed);
                }
                _ => drop(
                    user.word(address(page), Access::Read)
                        .load(Ordering::Relaxed),
                ),
            }
            user.boundary();
        }
    });
    rig
}

pub(super) fn wait_until(mut done: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(20);
    while !done() {
        assert!(Instant::now() < until, "it does not end");
        std::thread::yield_now();
    }
}

pub(super) fn rest(rig: &Rig) {
    rig.memories.iter().for_each(|memory| memory.rest());
    wait_until(|| {
        let memories = rig.memories.iter().enumerate();
        let reports = memories.map(|(node, memory)| (NodeId(node as u8), memory.rest_report()));
        unrest(&reports.collect::<Vec<_>>()).is_none()
    });
}

pub(super) fn end_rest(rig: &Rig) {
    rig.memories.iter().for_each(|memory| memory.end_rest());
}

/// Each page is in the part of one slice, with the sum of what all wrote; nothing is fetched.
pub(super) fn each_page_is_owned_once(rig: &Rig) {
    let received =
        |memory: &Arc<SharedMemory>| memory.counters.pages_received.load(Ordering::SeqCst);
    let before: Vec<u64> = rig.memories.iter().map(received).collect();
    let (mut seen, mut sum) = (BTreeSet::new(), 0);
    for memory in &rig.memories {
        assert_eq!(memory.restless(), None);
        for page in memory.walk().flat_map(|pages| memory.owned(pages)) {
            assert!(seen.insert(page), "page {page:#x} has two owners");
            let mut word = [0; 8];
            assert!(weft_guest_memory::GuestBytes::read(
                &**memory,
                page * PAGE,
                &mut word
            ));
            sum += u64::from_le_bytes(word);
        }
    }
    assert!(seen.into_iter().eq(FIRST..FIRST + PAGES));
    // A third of the rounds of six users, the first included.
    assert_eq!(sum, 6 * 2000_u64.div_ceil(3));
    let after: Vec<u64> = rig.memories.iter().map(received).collect();
    assert_eq!(before, after);
}

#[test]
fn at_rest_each_page_is_at_its_owner() {
    let rig = used(vec![Budget::UNLIMITED; 3]);
    for _ in 0..3 {
        rest(&rig);
        each_page_is_owned_once(&rig);
        end_rest(&rig);
    }
    rig.end();
}

#[test]
fn a_slice_without_room_rests_too() {
    let rig = used(vec![
        Budget::new(20, 4),
        Budget::new(20, 4),
        Budget::UNLIMITED,
    ]);
    rest(&rig);
    each_page_is_owned_once(&rig);
    end_rest(&rig);
    rig.end();
}

#[test]
fn what_a_user_asks_for_during_a_rest_waits_for_its_end() {
    let rig = used(vec![Budget::UNLIMITED; 3]);
    rest(&rig);
    // Owned elsewhere, so not here to write.
    let memory = &rig.memories[0];
    let elsewhere = (0..PAGES).find(|page| memory.held(address(*page), Access::Write).is_none());
    let page = elsewhere.expect("a page that slice 0 may not write");
    std::thread::scope(|scope| {
        let user = scope.spawn(|| {
            let host = memory.acquire(address(page), Access::Write);
            memory.unpin(address(page));
            host.is_ok()
        });
        wait_until(|| memory.counters.room_waits.load(Ordering::SeqCst) > 0);
        each_page_is_owned_once(&rig);
        end_rest(&rig);
        assert!(user.join().unwrap());
    });
    assert!(memory.held(address(page), Access::Write).is_some());
    rig.end();
}
