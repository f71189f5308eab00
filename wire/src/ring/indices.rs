//! The shared part of a ring: two indices, and who sleeps. All of a ring that two
//! processes write at the same time is here.
//!
//! `models/` has a copy of this file with other atomics (`super::atomic`), and tries all
//! interleavings of two threads that the memory model allows.

use super::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// Each field has a cache line (two, because of the adjacent-line prefetcher) of its own.
#[derive(Default)]
#[repr(C)]
pub struct Indices {
    tail: Line<AtomicU64>,
    head: Line<AtomicU64>,
    consumer_sleeps: Line<AtomicU32>,
    producer_sleeps: Line<AtomicU32>,
}

#[derive(Default)]
#[repr(C, align(128))]
struct Line<T>(T);

impl Indices {
    /// Bytes ever produced; they may be read now.
    pub fn tail(&self) -> u64 {
        self.tail.0.load(Ordering::Acquire)
    }

    /// Bytes ever consumed; their place may be written now.
    pub fn head(&self) -> u64 {
        self.head.0.load(Ordering::Acquire)
    }

    /// The producer has written all bytes before `tail`. Says whether the consumer must
    /// be woken.
    pub fn produced(&self, tail: u64) -> bool {
        self.tail.0.store(tail, Ordering::Release);
        wakes(&self.consumer_sleeps.0)
    }

    /// The consumer has read all bytes before `head`. Says whether the producer must be
    /// woken.
    pub fn consumed(&self, head: u64) -> bool {
        self.head.0.store(head, Ordering::Release);
        wakes(&self.producer_sleeps.0)
    }

    /// The consumer is about to block, after [`before_last_look`] and a last look at
    /// [`Indices::tail`].
    pub fn consumer_sleeps(&self, sleeps: bool) {
        self.consumer_sleeps
            .0
            .store(sleeps.into(), Ordering::Relaxed);
    }

    /// The producer is about to block, after [`before_last_look`] and a last look at
    /// [`Indices::head`].
    pub fn producer_sleeps(&self, sleeps: bool) {
        self.producer_sleeps
            .0
            .store(sleeps.into(), Ordering::Relaxed);
    }
}

/// Orders what a side announced before its last look; see the invariants of the ring.
pub fn before_last_look() {
    fence(Ordering::SeqCst);
}

fn wakes(sleeps: &AtomicU32) -> bool {
    fence(Ordering::SeqCst);
    sleeps.load(Ordering::Relaxed) != 0 && sleeps.swap(0, Ordering::Relaxed) != 0
}
