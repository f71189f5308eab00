//! The pins of pages: a thread that gives the last one back while the controller
//! defers a page has the controller look, or the controller sees that it went.

use loom::sync::Mutex;
use loom::thread;
use std::time::Duration;

use crate::sync::Arc;
use crate::weak::{Mutant, holds_within};

const PAGE: u64 = 7;
const OTHER: u64 = 8;
const NOW: Duration = Duration::ZERO;

/// The model with one version of the file, and of its callers.
macro_rules! version {
    ($name:ident, $pins:literal) => {
        mod $name {
            #![allow(dead_code, clippy::all, reason = "a copy: linted where it is")]

            include!(concat!(env!("OUT_DIR"), "/", $pins, ".rs"));
            use super::*;

            /// What the controller's lock guards: whether the page is deferred.
            struct Controller {
                pins: Arc<Pins>,
                locked: Mutex<bool>,
            }

            impl Controller {
                /// As `Controller::take`, and the tick that it may ask for.
                fn take(&self, looks_again: bool) {
                    let mut deferred = self.locked.lock().unwrap();
                    if !self.pins.hold(PAGE, NOW) {
                        return;
                    }
                    *deferred = true;
                    self.pins.count_deferred(true);
                    let look = looks_again && !self.pins.hold(PAGE, NOW);
                    drop(deferred);
                    if look {
                        self.look();
                    }
                }

                /// As `Controller::look_at_deferred`.
                fn look(&self) {
                    let mut deferred = self.locked.lock().unwrap();
                    if self.pins.has_deferred() && *deferred && !self.pins.hold(PAGE, NOW) {
                        *deferred = false;
                        self.pins.count_deferred(false);
                    }
                }

                /// As `SharedMemory::unpin`, and what the deferred-work thread does.
                fn unpin(&self) {
                    self.pins.remove(PAGE);
                    if self.pins.has_deferred() {
                        self.look();
                    }
                }
            }

            fn run(users: usize, looks_again: bool) {
                let pins = Arc::new(Pins::default());
                (0..users).for_each(|_| assert!(pins.add(PAGE)));
                let controller = Arc::new(Controller {
                    pins,
                    locked: Mutex::new(false),
                });
                let users: Vec<_> = (0..users)
                    .map(|_| {
                        let far = controller.clone();
                        thread::spawn(move || far.unpin())
                    })
                    .collect();
                controller.take(looks_again);
                users.into_iter().for_each(|user| user.join().unwrap());
                assert!(!controller.pins.hold(PAGE, NOW));
                assert!(!*controller.locked.lock().unwrap(), "deferred for ever");
                assert!(!controller.pins.has_deferred());
            }

            pub fn one() {
                run(1, true);
            }

            pub fn two() {
                run(2, true);
            }

            pub fn without_a_second_look() {
                run(1, false);
            }

            /// Two threads give back the same page's pins, and the controller pins another
            /// page at a place that became free: that pin stays.
            pub fn reuse() {
                let pins = Arc::new(Pins::default());
                assert!(pins.add(PAGE) && pins.add(PAGE));
                let users = [(), ()].map(|()| {
                    let far = pins.clone();
                    thread::spawn(move || far.remove(PAGE))
                });
                let added = pins.add(OTHER);
                users.into_iter().for_each(|user| user.join().unwrap());
                assert!(!pins.hold(PAGE, NOW));
                assert_eq!(pins.hold(OTHER, NOW), added);
            }
        }
    };
}

version!(production, "pins");
version!(no_claim, "pins_pin_is_removed_without_a_claim");

/// Times in all that a thread is interrupted where it could go on.
fn holds(mutant: Mutant, model: fn()) -> bool {
    holds_within(Some(3), mutant, model)
}

#[test]
fn no_page_is_deferred_for_ever_and_no_pin_lost() {
    assert!(holds(Mutant::None, production::one));
    assert!(holds(Mutant::None, production::two));
    assert!(holds(Mutant::None, production::reuse));
}

#[test]
fn mutants_are_found() {
    assert!(!holds(Mutant::None, production::without_a_second_look));
    assert!(!holds(Mutant::None, no_claim::reuse));
    assert!(!holds(Mutant::NoFence, production::one));
}
