//! A slice joins and leaves while threads of all slices read and write the same pages.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use weft_dsm::{ManagerOf, NodeId, Ranges, Standing};
use weft_vcpu::Access;

use super::{PAGE, RAM, Rig, User};
use crate::*;

const PAGES: u64 = RAM / PAGE;
/// The slice that comes and goes.
const GUEST: NodeId = NodeId(2);
/// Words that all users increment, each on a page of its own.
const WORDS: u64 = 40;

/// On pages of both slices that stay.
fn address(word: u64) -> u64 {
    word * 50 * PAGE + 8 * word
}

/// Two slices with memory, and a third that is not there.
fn rig() -> Rig {
    let ends = [PAGES / 3, PAGES, PAGES];
    let rig = Rig::new(3, ManagerOf::Ranges(Ranges::new(&ends).unwrap()));
    for memory in &rig.memories[..2] {
        memory.set_member(GUEST, Standing::Absent).unwrap();
    }
    rig
}

fn count_up(user: &mut User, word: u64, done: &AtomicU64) {
    user.word(address(word % WORDS), Access::Write)
        .fetch_add(1, Ordering::Relaxed);
    user.boundary();
    done.fetch_add(1, Ordering::Relaxed);
}

/// Looks until it is so, for a bounded time.
pub(super) fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::yield_now();
    }
}

fn hold(memories: &[std::sync::Arc<SharedMemory>]) {
    for memory in memories {
        memory.hold().unwrap();
    }
}

fn tell(memories: &[std::sync::Arc<SharedMemory>], standing: Standing) {
    for memory in memories {
        memory.set_member(GUEST, standing).unwrap();
    }
}

fn resume(memories: &[std::sync::Arc<SharedMemory>]) {
    for memory in memories {
        memory.resume();
    }
}

fn join(rig: &Rig) {
    let (present, guest) = (&rig.memories[..2], &rig.memories[2]);
    hold(present);
    for memory in present {
        until("a page does not settle", || memory.unsettled().is_none());
    }
    let mut next = Some(0);
    while let Some(first) = next {
        let runs;
        (runs, next) = present[1].managers(first, 3);
        guest.learn_managers(&runs).unwrap();
    }
    guest.learn_dead(0);
    tell(present, Standing::Present);
    resume(&rig.memories);
}

pub(super) fn plan(pages: std::ops::Range<u64>, to: &[u8]) -> DrainPlan {
    let target = |node: &u8| DrainTarget {
        node: NodeId(*node),
        pages: PAGES,
    };
    DrainPlan {
        pages: vec![pages],
        targets: to.iter().map(target).collect(),
        window_pages: 64,
    }
}

/// The guest gives away what it has. Breaks off after `steps`.
fn drain(rig: &Rig, steps: Option<u32>) -> DrainProgress {
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut left = steps;
    rig.memories[2].drain(plan(0..PAGES, &[1, 0]), |progress| {
        assert!(Instant::now() < deadline, "the drain stays at {progress:?}");
        left = left.map(|left| left.saturating_sub(1));
        match left {
            Some(0) => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        }
    })
}

fn leave(rig: &Rig) {
    let (others, guest) = (&rig.memories[..2], &rig.memories[2]);
    tell(&rig.memories, Standing::Draining);
    assert!(drain(rig, None).is_over);
    hold(&rig.memories);
    tell(&rig.memories, Standing::Leaving);
    // What came after the drain had been there leaves, too; entries did not come.
    assert!(drain(rig, None).is_over);
    until("the guest has something", || guest.holdings().is_nothing());
    for memory in others {
        until("a slice knows of the guest", || {
            memory.mentions(GUEST).is_none()
        });
    }
    assert_eq!(guest.holdings(), Holdings::default());
    tell(others, Standing::Absent);
    resume(others);
}

/// A leave that is cancelled, in the drain or when all hold.
fn change_its_mind(rig: &Rig, steps: u32) {
    tell(&rig.memories, Standing::Draining);
    drain(rig, Some(steps));
    if steps.is_multiple_of(2) {
        hold(&rig.memories);
        tell(&rig.memories, Standing::Leaving);
        rig.memories[2].holdings();
    }
    tell(&rig.memories, Standing::Present);
    resume(&rig.memories);
}

/// Stops the threads of a scope at its end, also when a check in it fails.
pub(super) struct StopsThreads<'a>(pub &'a AtomicBool);

impl Drop for StopsThreads<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// One run: each increment is there in the end, and the guest has no memory filled.
fn come_and_go(round: u32) {
    let rig = rig();
    let (done, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let _stop = StopsThreads(&stop);
        for node in [0, 1, 1] {
            let (mut user, done, stop) = (rig.user(node), &done, &stop);
            scope.spawn(move || {
                user.inside();
                let mut word = node as u64;
                while !stop.load(Ordering::Relaxed) {
                    count_up(&mut user, word, done);
                    word += 7;
                }
            });
        }
        join(&rig);
        let mut user = rig.user(2);
        user.inside();
        (0..WORDS).for_each(|word| count_up(&mut user, word, &done));
        // A part of the first slice's memory gets the guest as its manager.
        user.outside();
        let given = rig.memories[0].drain(plan(0..PAGES / 4, &[2]), |_| ControlFlow::Continue(()));
        assert!(given.is_over && given.handed_over == PAGES / 4, "{given:?}");
        user.inside();
        (0..WORDS).for_each(|word| count_up(&mut user, word, &done));
        user.outside();
        change_its_mind(&rig, round % 7);
        user.inside();
        (0..WORDS).for_each(|word| count_up(&mut user, word, &done));
        drop(user);
        leave(&rig);
        let before = done.load(Ordering::Relaxed);
        until("the others stand", || {
            done.load(Ordering::Relaxed) > before + 100
        });
    });
    let mut user = rig.user(1);
    user.inside();
    let total: u64 = (0..WORDS)
        .map(|word| {
            user.word(address(word), Access::Read)
                .load(Ordering::Relaxed)
        })
        .sum();
    drop(user);
    assert_eq!(total, done.load(Ordering::Relaxed));
    let guest = &rig.memories[2];
    until("the guest's memory is filled", || {
        guest.rights.resident() == 0
    });
    rig.end();
}

#[test]
fn a_slice_joins_and_leaves_while_others_work() {
    let rounds = std::env::var("WEFT_MEMBERSHIP_ROUNDS");
    let rounds = rounds.ok().and_then(|rounds| rounds.parse().ok());
    (0..rounds.unwrap_or(5)).for_each(come_and_go);
}
