//! The thread of a slice's memory that sleeps until there is work: it finds all work that
//! was there before a wake-up.

use loom::thread;
use std::time::Duration;

use crate::strong::{AtomicBool, Ordering};
use crate::sync::Arc;
use crate::weak::{Mutant, holds};

/// The model with one version of the file.
macro_rules! version {
    ($name:ident, $wakeup:literal) => {
        mod $name {
            #![allow(dead_code, clippy::all, reason = "a copy: linted where it is")]

            mod wakeup {
                include!(concat!(env!("OUT_DIR"), "/", $wakeup, ".rs"));
            }
            use super::*;
            use wakeup::Wakeup;

            /// Two threads have work and wake the one that does it. loom says that all
            /// threads are blocked where a wake-up is lost.
            pub fn run() {
                let wakeup = Arc::new(Wakeup::default());
                wakeup.serve();
                let work = Arc::new([AtomicBool::new(false), AtomicBool::new(false)]);
                let wakers = [0, 1].map(|number| {
                    let (wakeup, work) = (wakeup.clone(), work.clone());
                    thread::spawn(move || {
                        work[number].store(true, Ordering::Relaxed);
                        wakeup.wake();
                    })
                });
                while !work.iter().all(|work| work.load(Ordering::Relaxed)) {
                    wakeup.sleep(Duration::MAX);
                }
                for waker in wakers {
                    waker.join().unwrap();
                }
            }
        }
    };
}

version!(production, "wakeup");
version!(woken_before, "wakeup_unparks_where_it_was_woken_before");
version!(forgets_early, "wakeup_forgets_before_it_sleeps");
version!(forgets_late, "wakeup_forgets_too_late");

#[test]
fn no_wakeup_is_lost() {
    assert!(holds(Mutant::None, production::run));
}

#[test]
fn mutants_of_the_wakeup_are_found() {
    let mutants: [(&str, fn()); 3] = [
        ("unparks where it was woken before", woken_before::run),
        ("forgets before it sleeps", forgets_early::run),
        ("forgets too late", forgets_late::run),
    ];
    for (name, model) in mutants {
        assert!(!holds(Mutant::None, model), "{name}: not found");
    }
}
