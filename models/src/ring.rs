//! The rings of `weft-wire`: no wake-up is lost, and bytes are read after they were
//! written and overwritten after they were read.

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::{Condvar, Mutex};
use loom::thread;

use crate::weak::{self as atomic, Mutant, holds};

#[path = "../../wire/src/ring/indices.rs"]
mod indices;

use indices::{Indices, before_last_look};

/// A model of a socket that is readable or not: it stays readable until it is read.
#[derive(Default)]
struct Bell {
    readable: Mutex<bool>,
    changed: Condvar,
}

impl Bell {
    fn ring(&self) {
        *self.readable.lock().unwrap() = true;
        self.changed.notify_one();
    }

    /// Waits for ever where nobody rings: loom then says that all threads are blocked.
    fn wait(&self) {
        let mut readable = self.readable.lock().unwrap();
        while !*readable {
            readable = self.changed.wait(readable).unwrap();
        }
        *readable = false;
    }
}

/// A ring with room for one byte, and the bell of each side.
struct Ring {
    indices: Indices,
    byte: UnsafeCell<u64>,
    consumer: Bell,
    producer: Bell,
}

// SAFETY: loom's cell finds accesses to the byte that are not ordered, which is what the
// model is for.
unsafe impl Sync for Ring {}
// SAFETY: the same.
unsafe impl Send for Ring {}

impl Ring {
    fn new() -> Arc<Ring> {
        Arc::new(Ring {
            indices: Indices::default(),
            byte: UnsafeCell::new(0),
            consumer: Bell::default(),
            producer: Bell::default(),
        })
    }

    /// As `Link::send_ring`: waits for room, writes, shows.
    fn produce(&self, number: u64) {
        // Again, where a bell rang that belongs to what was seen without it.
        while self.indices.head() != number {
            self.indices.producer_sleeps(true);
            before_last_look();
            if self.indices.head() != number {
                self.producer.wait();
            }
            self.indices.producer_sleeps(false);
        }
        // SAFETY: the consumer gave the place back.
        self.byte.with_mut(|byte| unsafe { *byte = number + 1 });
        if self.indices.produced(number + 1) {
            self.consumer.ring();
        }
    }

    /// As `Link::block` and `Link::fill`: waits for a byte, reads, gives its place back.
    fn consume(&self, number: u64) {
        while self.indices.tail() == number {
            self.indices.consumer_sleeps(true);
            before_last_look();
            if self.indices.tail() == number {
                self.consumer.wait();
            }
            self.indices.consumer_sleeps(false);
        }
        // SAFETY: the producer has shown it.
        assert_eq!(self.byte.with(|byte| unsafe { *byte }), number + 1);
        if self.indices.consumed(number + 1) {
            self.producer.ring();
        }
    }
}

/// One side sends two bytes through a ring that holds one; both may have to sleep.
fn two_bytes() {
    let ring = Ring::new();
    let far = ring.clone();
    let consumer = thread::spawn(move || (0..2).for_each(|number| far.consume(number)));
    (0..2).for_each(|number| ring.produce(number));
    consumer.join().unwrap();
}

#[test]
fn no_wake_up_is_lost_and_no_byte_torn() {
    assert!(holds(Mutant::None, two_bytes));
}

#[test]
fn mutants_are_found() {
    for mutant in [Mutant::NoFence, Mutant::RelaxedStore, Mutant::RelaxedLoad] {
        assert!(!holds(mutant, two_bytes), "{mutant:?} is not found");
    }
}
