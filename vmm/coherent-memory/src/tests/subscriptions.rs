//! Pages that are kept up to date: readers find them, and see no more than they may.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Barrier};
use std::thread::spawn;
use std::time::{Duration, Instant};

use weft_dsm::{ManagerOf, NodeId};
use weft_vcpu::Access;

use super::{PAGE, Rig, User, in_order, increments};
use crate::{MemoryCounters, SharedMemory};

const WORD: u64 = 0x10_0000;

fn count(memory: &SharedMemory, name: &str) -> u64 {
    let figures = memory.figures();
    let found = figures.iter().find(|(known, _)| *known == name);
    found.map(|(_, count)| *count).unwrap()
}

/// Until it holds, for a while.
fn eventually(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::yield_now();
    }
}

fn write(user: &mut User, value: u64) {
    user.word(WORD, Access::Write)
        .store(value, Ordering::Release);
    user.boundary();
}

fn read(user: &mut User) -> u64 {
    let value = user.word(WORD, Access::Read).load(Ordering::Acquire);
    user.boundary();
    value
}

/// A user whose thread answers while another one is at work.
fn at_rest<T>(user: &mut User, work: impl FnOnce() -> T) -> T {
    user.outside();
    let result = work();
    user.inside();
    result
}

#[test]
fn readers_find_the_page_and_ask_for_nothing() {
    const ROUNDS: u64 = 50;
    let rig = Rig::new(2, ManagerOf::Fixed(NodeId(0))).updated();
    let (mut writer, mut reader) = (rig.user(0), rig.user(1));
    let (here, there) = (rig.memories[0].clone(), rig.memories[1].clone());
    writer.inside();
    reader.inside();
    write(&mut writer, 1);
    at_rest(&mut writer, || assert_eq!(read(&mut reader), 1));
    for round in 2..ROUNDS {
        at_rest(&mut reader, || write(&mut writer, round));
        at_rest(&mut writer, || {
            at_rest(&mut reader, || {
                eventually("no copy came", || there.rights.of(WORD / PAGE).is_some());
            });
            assert_eq!(read(&mut reader), round);
        });
    }
    // Only the first look was a fault, and all that came was looked at.
    assert_eq!(there.counters.reads.load(Ordering::Relaxed), 1);
    assert_eq!(count(&there, "subscription-requests"), ROUNDS - 2);
    assert_eq!(count(&there, "subscription-hits"), ROUNDS - 2);
    assert_eq!(count(&here, "subscription-requests"), 0);
    drop((writer, reader));
    rig.end();
}

#[test]
fn after_some_copies_that_nobody_looks_at_there_are_no_more() {
    const COPIES: u64 = 4;
    let rig = Rig::new(2, ManagerOf::Fixed(NodeId(0))).updated();
    let (mut writer, mut reader) = (rig.user(0), rig.user(1));
    let there = rig.memories[1].clone();
    let (requests, upgrades) = (
        || count(&there, "subscription-requests"),
        &rig.memories[0].counters.upgrades,
    );
    writer.inside();
    reader.inside();
    write(&mut writer, 1);
    at_rest(&mut writer, || assert_eq!(read(&mut reader), 1));
    reader.outside();
    for round in 2..2 + COPIES {
        write(&mut writer, round);
        at_rest(&mut writer, || {
            eventually("no copy came", || there.rights.of(WORD / PAGE).is_some());
        });
    }
    for round in 10..20 {
        write(&mut writer, round);
        std::thread::yield_now();
    }
    assert_eq!(
        (requests(), count(&there, "subscription-hits")),
        (COPIES, 0)
    );
    assert_eq!(upgrades.load(Ordering::Relaxed), COPIES + 1);
    // A fault begins it again.
    writer.outside();
    reader.inside();
    assert_eq!(read(&mut reader), 19);
    reader.outside();
    writer.inside();
    write(&mut writer, 20);
    at_rest(&mut writer, || {
        eventually("not again", || requests() == COPIES + 1)
    });
    drop((writer, reader));
    rig.end();
}

#[test]
fn other_pages_are_not_asked_for_again() {
    let rig = Rig::new(2, ManagerOf::Fixed(NodeId(0)));
    for memory in &rig.memories {
        memory.subscribe(&(WORD + PAGE..WORD + PAGE + 8));
        // Beyond the memory's end there is nothing.
        memory.subscribe(&(1 << 40..1 << 41));
    }
    increments(rig, 1, 200);
    let rig = Rig::new(2, ManagerOf::Fixed(NodeId(0)));
    let mut user = rig.user(1);
    user.inside();
    write(&mut user, 1);
    drop(user);
    let counters: &MemoryCounters = &rig.memories[1].counters;
    assert_eq!(counters.subscription_requests.load(Ordering::Relaxed), 0);
    rig.end();
}

#[test]
fn no_increment_is_lost_and_stores_stay_in_order() {
    let rig = || Rig::new(2, ManagerOf::Interleaved).updated();
    increments(rig(), 1, 2000);
    in_order(rig(), 1000);
    let three = || Rig::new(3, ManagerOf::Fixed(NodeId(1))).updated();
    increments(three(), 2, 500);
    in_order(three(), 500);
}

/// Each writes its word, then reads the other's: one of them sees what the other wrote.
/// And two that read two words in different orders agree on which was written first.
#[test]
fn nobody_sees_effects_in_another_order() {
    const ROUNDS: u64 = 300;
    let rig = Rig::new(3, ManagerOf::Interleaved).updated();
    let (x, y) = (0x10_0000, 0x30_0000);
    let barrier = Arc::new(Barrier::new(4));
    // Two writers, which read each other's word, and two readers.
    let threads: Vec<_> = [(0, x, y), (1, y, x), (2, x, y), (2, y, x)]
        .into_iter()
        .enumerate()
        .map(|(number, (node, first, second))| {
            let (mut user, barrier) = (rig.user(node), barrier.clone());
            spawn(move || {
                let mut seen = Vec::new();
                for round in 1..=ROUNDS {
                    barrier.wait();
                    user.inside();
                    let one = if number < 2 {
                        let word = user.word(first, Access::Write);
                        word.store(round, Ordering::SeqCst);
                        round
                    } else {
                        user.word(first, Access::Read).load(Ordering::SeqCst)
                    };
                    user.boundary();
                    let other = user.word(second, Access::Read).load(Ordering::SeqCst);
                    user.boundary();
                    user.outside();
                    seen.push((one, other));
                }
                seen
            })
        })
        .collect();
    let seen: Vec<Vec<(u64, u64)>> = threads
        .into_iter()
        .map(|thread| thread.join().unwrap())
        .collect();
    for (index, round) in (0..).zip(1..=ROUNDS) {
        let of = |thread: usize| seen[thread][index];
        assert!(
            of(0).1 == round || of(1).1 == round,
            "round {round}: {seen:?}"
        );
        // The new word, then the old other one.
        let first_only = |(first, second)| first == round && second < round;
        assert!(
            !(first_only(of(2)) && first_only(of(3))),
            "round {round}: {seen:?}"
        );
    }
    rig.end();
}
