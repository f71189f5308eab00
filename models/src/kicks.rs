//! The kick of a vCPU in KVM: a vCPU whose thread is about to enter the guest, or is in it,
//! comes back for each event that was posted before a kick.

use loom::sync::{Condvar, Mutex};
use loom::thread;
use std::mem::ManuallyDrop;

use crate::strong::{AtomicBool, AtomicU8, Ordering};
use crate::sync::Arc;
use crate::weak::{Mutant, holds_within};

/// The number of the vCPU's thread.
const THREAD: i32 = 7;

/// The model with one version of the file.
macro_rules! version {
    ($name:ident, $kick:literal) => {
        mod $name {
            #![allow(dead_code, clippy::all, reason = "a copy: linted where it is")]

            mod kick {
                include!(concat!(env!("OUT_DIR"), "/", $kick, ".rs"));
            }
            use super::*;
            use kick::{Kicker, RunControl};
            use weft_vcpu::Kick;

            /// What the kernel has of the vCPU and its thread.
            #[derive(Default)]
            struct Kernel {
                immediate_exit: AtomicU8,
                /// Whether the thread has a signal that its handler has not got.
                signal: Mutex<bool>,
                signalled: Condvar,
            }

            impl RunControl for Kernel {
                fn immediate_exit(&self) -> &AtomicU8 {
                    &self.immediate_exit
                }

                fn signal(&self, thread: i32) {
                    assert_eq!(thread, THREAD);
                    *self.signal.lock().unwrap() = true;
                    self.signalled.notify_one();
                }
            }

            impl Kernel {
                /// KVM_RUN with a guest that never leaves by itself. A signal that came
                /// before it was handled outside, where its handler does nothing.
                fn run(&self) {
                    *self.signal.lock().unwrap() = false;
                    if self.immediate_exit.load(Ordering::SeqCst) != 0 {
                        return;
                    }
                    let mut signal = self.signal.lock().unwrap();
                    while !*signal {
                        signal = self.signalled.wait(signal).unwrap();
                    }
                }
            }

            /// As `KvmVcpu::run`; `passes_gate`: whether it goes on before the next KVM_RUN.
            fn run_vcpu(kicker: &Arc<Kicker<Kernel>>, passes_gate: impl Fn() -> bool) {
                let Some(listening) = kicker.listen(THREAD) else {
                    return;
                };
                // Where loom reports a deadlock, a destructor must not use its atomics.
                let listening = ManuallyDrop::new(listening);
                while passes_gate() {
                    kicker.control().run();
                    if kicker.was_kicked() {
                        break;
                    }
                }
                drop(ManuallyDrop::into_inner(listening));
            }

            /// Each of some threads posts an event and kicks. The vCPU's thread runs the
            /// vCPU until it has found all. loom says that all threads are blocked where a
            /// kick is lost.
            fn run(kicks: usize) {
                let kicker = Kicker::new(Kernel::default());
                let events = Arc::new([AtomicBool::new(false), AtomicBool::new(false)]);
                let kickers: Vec<_> = (0..kicks)
                    .map(|number| {
                        let (kicker, events) = (kicker.clone(), events.clone());
                        thread::spawn(move || {
                            events[number].store(true, Ordering::SeqCst);
                            kicker.kick();
                        })
                    })
                    .collect();
                let came = |event: &AtomicBool| event.load(Ordering::SeqCst);
                while !events[..kicks].iter().all(came) {
                    run_vcpu(&kicker, || true);
                }
                for kicker in kickers {
                    kicker.join().unwrap();
                }
            }

            /// A thread interrupts the vCPU once, as `Shadows::close` does: the vCPU passes
            /// the gate before it is in the guest again.
            pub fn interrupted() {
                let kicker = Kicker::new(Kernel::default());
                let closed = Arc::new(AtomicBool::new(false));
                let (far, gate) = (kicker.clone(), closed.clone());
                let closer = thread::spawn(move || {
                    gate.store(true, Ordering::SeqCst);
                    far.interrupt();
                });
                run_vcpu(&kicker, || !closed.load(Ordering::SeqCst));
                closer.join().unwrap();
            }

            pub fn one() {
                run(1);
            }

            pub fn two() {
                run(2);
            }
        }
    };
}

version!(production, "kick");
version!(asked_late, "kick_asks_last");
version!(flag_late, "kick_signals_before_the_flag");
version!(cleared, "kick_clears_what_a_kick_set");
version!(no_flag, "kick_sets_no_flag");

/// Times in all that a thread is interrupted where it could go on.
const PREEMPTIONS: usize = 3;

fn holds(mutant: Mutant, model: fn()) -> bool {
    holds_within(Some(PREEMPTIONS), mutant, model)
}

#[test]
fn no_kick_is_lost() {
    assert!(holds(Mutant::None, production::one));
    assert!(holds(Mutant::None, production::two));
    assert!(holds(Mutant::None, production::interrupted));
}

#[test]
fn mutants_of_the_kick_are_found() {
    let mutants: [(&str, fn()); 5] = [
        ("asks last", asked_late::one),
        ("signals before the flag", flag_late::one),
        ("signals before the flag, once", flag_late::interrupted),
        ("clears what a kick set", cleared::two),
        ("sets no flag", no_flag::one),
    ];
    for (name, model) in mutants {
        assert!(!holds(Mutant::None, model), "{name}: not found");
    }
}
