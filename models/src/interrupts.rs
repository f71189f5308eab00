//! The posted-interrupt descriptor and the waker of a vCPU: what is posted is taken, once,
//! and a vCPU that waits is woken for it.

use loom::thread;
use std::time::{Duration, Instant};

use crate::message::Message;
use crate::sync::Arc;
use crate::weak::{Mutant, holds_within};

/// Two fixed interrupts in one word, one of them level-triggered, and the other kinds.
const LEVEL: Message = Message::Fixed {
    vector: 0x41,
    level: true,
};
const EDGE: Message = Message::Fixed {
    vector: 0x42,
    level: false,
};

/// The model with one version of each file.
macro_rules! version {
    ($name:ident, $waker:literal, $posted:literal) => {
        mod $name {
            #![allow(dead_code, clippy::all, reason = "a copy: linted where it is")]

            mod waker {
                include!(concat!(env!("OUT_DIR"), "/", $waker, ".rs"));
            }
            mod posted {
                include!(concat!(env!("OUT_DIR"), "/", $posted, ".rs"));
            }
            use super::*;
            use posted::PostedInterrupts;

            /// As `InterruptRouter::deliver`.
            fn deliver(to: &PostedInterrupts, message: Message) {
                assert!(to.post(message));
                to.waker.ring();
            }

            /// As a vCPU's thread that is halted: waits until something lies there, takes
            /// it, and goes on until all of it came. loom knows no time: where no ring
            /// comes it says that all threads are blocked.
            fn wait_for(own: &PostedInterrupts, count: usize) -> Vec<Message> {
                let mut came = Vec::new();
                while came.len() < count {
                    let deadline = Instant::now() + Duration::from_secs(3600);
                    own.waker.wait(deadline, || own.has_pending());
                    came.extend(own.take_messages());
                }
                came
            }

            /// Each thread delivers one message to a vCPU that waits for all.
            fn run(messages: &[Message]) {
                let own = Arc::new(PostedInterrupts::default());
                let senders: Vec<_> = messages
                    .iter()
                    .map(|message| {
                        let (far, message) = (own.clone(), *message);
                        thread::spawn(move || deliver(&far, message))
                    })
                    .collect();
                let came = wait_for(&own, messages.len());
                senders
                    .into_iter()
                    .for_each(|sender| sender.join().unwrap());
                for message in messages {
                    assert_eq!(came.iter().filter(|other| *other == message).count(), 1);
                }
                assert!(own.take_messages().is_empty());
            }

            pub fn one() {
                run(&[LEVEL]);
            }

            pub fn two() {
                run(&[LEVEL, EDGE]);
            }

            /// One is at the vCPU's summary alone.
            pub fn two_kinds() {
                run(&[EDGE, Message::NonMaskable]);
            }
        }
    };
}

version!(production, "waker", "posted");
version!(looks_first, "waker_looks_before_it_announces", "posted");
version!(looks_once, "waker_does_not_look_again", "posted");
version!(no_mark, "waker_rings_without_a_mark", "posted");
version!(summary_first, "waker", "posted_summary_before_the_bit");
version!(summary_last, "waker", "posted_summary_taken_last");
version!(mode_late, "waker", "posted_trigger_mode_after_the_bit");
version!(apart, "waker", "posted_bits_read_and_cleared_apart");

/// Times in all that a thread is interrupted where it could go on. With two senders and no
/// bound the model does not end within ten minutes.
const PREEMPTIONS: usize = 3;

fn holds(mutant: Mutant, model: fn()) -> bool {
    holds_within(Some(PREEMPTIONS), mutant, model)
}

#[test]
fn what_is_posted_is_taken_once() {
    assert!(holds(Mutant::None, production::one));
    assert!(holds(Mutant::None, production::two));
    assert!(holds(Mutant::None, production::two_kinds));
}

#[test]
fn mutants_of_the_waker_are_found() {
    let mutants: [(&str, fn()); 3] = [
        ("looks before it announces", looks_first::one),
        ("does not look again", looks_once::one),
        ("rings without a mark", no_mark::one),
    ];
    for (name, model) in mutants {
        assert!(!holds(Mutant::None, model), "{name}: not found");
    }
    assert!(!holds(Mutant::NoFence, production::one));
}

#[test]
fn mutants_of_the_posted_interrupts_are_found() {
    let mutants: [(&str, fn()); 4] = [
        ("summary before the bit", summary_first::one),
        ("summary taken last", summary_last::two),
        ("trigger mode after the bit", mode_late::two),
        ("bits read and cleared apart", apart::two),
    ];
    for (name, model) in mutants {
        assert!(!holds(Mutant::None, model), "{name}: not found");
    }
}
