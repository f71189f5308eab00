//! Pages that must not be taken at the moment.
//!
//! A page that comes for a user is *pinned* until that user is at work with it: else two
//! nodes that want the same page could hand it to each other for ever, and neither get
//! anything done. A pin lasts from the moment the right is there until the user's thread
//! is back at its work; a thread that holds one waits for no other page and for no user. (A
//! thread that copies much pins a few pages at once, if all of them are here.) Where
//! nothing tells when a user is at work, a pin ends by itself.
//!
//! Invariants:
//!
//! - A pin is set by the controller alone, and only while the page may be used; so a
//!   pinned page is here until its last pin goes.
//! - A pin is given back without the controller's lock.

use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// Limit of pins at a time: one for each possible vCPU, and several for each thread of
/// more devices than a machine can have.
const PINS: usize = 2048;
/// Pins that end by themselves: one for each page that a user was just given whose work
/// is not seen. Without a free place such a page may be taken before it was of use:
/// slower, not wrong.
const TIMED: usize = 64;
const FREE: u64 = u64::MAX;

/// The pins of one node.
pub struct Pins {
    places: Box<[AtomicU64]>,
    /// Places from here on were never used.
    end: AtomicUsize,
    /// Pages with the nanosecond at which their pins end. Written by the controller.
    timed: [(AtomicU64, AtomicU64); TIMED],
    /// Pages that wait for a pin to go.
    deferred: AtomicU32,
}

impl Default for Pins {
    fn default() -> Self {
        Self {
            places: (0..PINS).map(|_| AtomicU64::new(FREE)).collect(),
            end: AtomicUsize::new(0),
            timed: [const { (AtomicU64::new(FREE), AtomicU64::new(0)) }; TIMED],
            deferred: AtomicU32::new(0),
        }
    }
}

impl Pins {
    /// Gives one pin of `page` back.
    pub fn remove(&self, page: u64) {
        for pin in self.used() {
            let mine = pin.load(Ordering::Relaxed) == page
                && pin
                    .compare_exchange(page, FREE, Ordering::SeqCst, Ordering::Relaxed)
                    .is_ok();
            if mine {
                return;
            }
        }
    }

    /// Whether pages wait for a pin to go: a thread that gave one back has the controller look.
    pub fn has_deferred(&self) -> bool {
        self.deferred.load(Ordering::SeqCst) != 0
    }

    /// How long until the next of the pins ends that end by themselves.
    pub fn next_end(&self, now: Duration) -> Option<Duration> {
        let now = nanoseconds(now);
        let left = |(_, end): &(AtomicU64, AtomicU64)| {
            let end = end.load(Ordering::SeqCst);
            (end > now).then(|| Duration::from_nanos(end - now))
        };
        self.timed.iter().filter_map(left).min()
    }

    /// Pins `page` for a while, if there is a place.
    pub(super) fn add_for(&self, page: u64, time: Duration, now: Duration) {
        let free = |(other, end): &&(AtomicU64, AtomicU64)| {
            other.load(Ordering::SeqCst) == page || end.load(Ordering::SeqCst) <= nanoseconds(now)
        };
        if let Some((pinned, end)) = self.timed.iter().find(free) {
            end.store(0, Ordering::SeqCst);
            pinned.store(page, Ordering::SeqCst);
            end.store(nanoseconds(now + time), Ordering::SeqCst);
        }
    }

    /// Ends the pin of `page` that would end by itself.
    pub(super) fn end_timed(&self, page: u64) {
        for (pinned, end) in &self.timed {
            if pinned.load(Ordering::SeqCst) == page {
                end.store(0, Ordering::SeqCst);
            }
        }
    }

    /// Pins `page`; false when there is no place.
    pub(super) fn add(&self, page: u64) -> bool {
        let free = |pin: &AtomicU64| pin.load(Ordering::Relaxed) == FREE;
        let Some(place) = self.places.iter().position(free) else {
            return false;
        };
        self.end.fetch_max(place + 1, Ordering::SeqCst);
        self.places[place].store(page, Ordering::SeqCst);
        true
    }

    /// Whether `page` has a pin that ends by itself.
    pub(super) fn hold_timed(&self, page: u64, now: Duration) -> bool {
        let now = nanoseconds(now);
        self.timed.iter().any(|(pin, end)| {
            pin.load(Ordering::SeqCst) == page && end.load(Ordering::SeqCst) > now
        })
    }

    /// Whether `page` has a pin.
    pub(super) fn hold(&self, page: u64, now: Duration) -> bool {
        let is_held = |pin: &AtomicU64| pin.load(Ordering::SeqCst) == page;
        self.used().iter().any(is_held) || self.hold_timed(page, now)
    }

    /// A page that has a pin, if there is one.
    pub(super) fn any(&self, now: Duration) -> Option<u64> {
        let now = nanoseconds(now);
        let pins = self.used().iter().map(|pin| pin.load(Ordering::SeqCst));
        let timed = self.timed.iter();
        let timed = timed.filter(|(_, end)| end.load(Ordering::SeqCst) > now);
        let timed = timed.map(|(pin, _)| pin.load(Ordering::SeqCst));
        pins.chain(timed).find(|page| *page != FREE)
    }

    /// One more page, or one page less, waits for a pin to go.
    pub(super) fn count_deferred(&self, waits: bool) {
        match waits {
            true => self.deferred.fetch_add(1, Ordering::SeqCst),
            false => self.deferred.fetch_sub(1, Ordering::SeqCst),
        };
    }

    fn used(&self) -> &[AtomicU64] {
        &self.places[..self.end.load(Ordering::SeqCst)]
    }
}

fn nanoseconds(time: Duration) -> u64 {
    time.as_nanos() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_pin_is_given_back_by_itself() {
        let (pins, now) = (Pins::default(), Duration::ZERO);
        assert!(pins.add(7) && pins.add(7) && pins.add(8));
        pins.remove(7);
        assert!(pins.hold(7, now));
        pins.remove(7);
        assert!(!pins.hold(7, now) && pins.hold(8, now));
        assert_eq!(pins.any(now), Some(8));
        pins.remove(8);
        assert_eq!(pins.any(now), None);
    }

    #[test]
    fn a_pin_with_a_time_ends_then() {
        let (pins, microsecond) = (Pins::default(), Duration::from_micros(1));
        pins.add_for(7, 3 * microsecond, microsecond);
        assert!(pins.hold(7, 3 * microsecond) && !pins.hold(7, 4 * microsecond));
        assert_eq!(pins.next_end(2 * microsecond), Some(2 * microsecond));
        assert_eq!(pins.next_end(4 * microsecond), None);
    }

    #[test]
    fn there_are_only_so_many() {
        let pins = Pins::default();
        assert_eq!((0..).take_while(|page| pins.add(*page)).count(), PINS);
        pins.remove(3);
        assert!(pins.add(9999));
    }
}
