//! A node that serves: what it does while the execution is on another node.
//!
//! It answers the messages of the other nodes, at home also system calls for the
//! execution, until the execution arrives. At home the program's signals call the
//! execution back.

use weft_proc::boot::{CONTROL_KICK, ControlMessage};
use weft_proc::message::Message;

use core::sync::atomic::Ordering;

use super::clock;
use super::io::Failure;
use super::machine::{ENGINE, Engine, Incoming};
use crate::own_calls::call;
use crate::thread::{PENDING_KICK, Thread};
use crate::{control, log};

/// A serving node checks for lost nodes and signals at least this often, nanoseconds.
const SERVE_NS: u64 = 1_000_000_000;
/// How often the execution is called home while a signal waits for it: it may
/// have jumped on when the call came.
const KICK_NS: u64 = 20_000_000;
const SIG_SETMASK: usize = 2;
const ALL_SIGNALS: u64 = !crate::signal::mask::NEVER_BLOCKED;

/// Serves until the execution arrives; its context is then in [`Engine::travelling`].
/// `mask` is the program's signal mask: at home its signals come through.
pub fn serve(thread: &Thread, mask: u64) {
    let _ = call!(
        rt_sigprocmask,
        SIG_SETMASK,
        &raw const ALL_SIGNALS_WORD,
        0,
        8
    );
    let mut kicked_at = 0;
    loop {
        let mut guard = ENGINE.lock();
        let Some(engine) = guard.as_mut() else {
            return;
        };
        if engine.is_home() {
            engine.look_for_lost_nodes();
            engine.follow_budget();
            if thread.pending() != 0 && clock::ns(clock::now() - kicked_at) > KICK_NS {
                kicked_at = clock::now();
                engine.kick_away();
            }
        }
        let mask = engine.is_home().then_some(mask);
        let timeout_ns = if thread.pending() != 0 {
            KICK_NS
        } else {
            SERVE_NS
        };
        match engine.receive(timeout_ns, mask) {
            Incoming::Timeout | Incoming::Interrupted => {}
            Incoming::Handled => engine.trim_copies(),
            Incoming::Message(from, message, payload) => match message {
                Message::Jump { context_length } => {
                    if let Err(error) = engine.arrive(from, payload, context_length as usize) {
                        log::line(format_args!("node {from}: {error}"));
                        engine.fail(Failure::Violation(from, "a malformed context"));
                    }
                    if !engine.is_home() {
                        // A kick for an execution that has left since is void.
                        let pending = &thread.inbox().pending;
                        pending.fetch_and(!PENDING_KICK, Ordering::AcqRel);
                    }
                    return;
                }
                Message::Call { last } if engine.is_home() => {
                    if super::calls::collect(engine, from, payload, last) {
                        drop(guard);
                        super::calls::run_call(thread, from, mask.unwrap_or(0));
                    }
                }
                Message::MemoryCall if engine.is_home() => {
                    let words = super::calls::memory_words(payload);
                    drop(guard);
                    super::calls::run_memory_call(thread, from, words);
                }
                other => engine.serve_aside(from, other),
            },
        }
    }
}

static ALL_SIGNALS_WORD: u64 = ALL_SIGNALS;

/// Lets the program's signals through while a call runs for it.
pub fn with_mask<T>(mask: u64, run: impl FnOnce() -> T) -> T {
    let _ = call!(rt_sigprocmask, SIG_SETMASK, &raw const mask, 0, 8);
    let result = run();
    let _ = call!(
        rt_sigprocmask,
        SIG_SETMASK,
        &raw const ALL_SIGNALS_WORD,
        0,
        8
    );
    result
}

impl Engine {
    /// Asks the launcher to call the execution home. Home does not follow jumps
    /// between other nodes, so every node is called; one that does not execute
    /// takes no notice.
    fn kick_away(&mut self) {
        for node in 1..self.nodes {
            if self.io.links[node].is_some() {
                // A launcher that is gone has taken the slices with it.
                let _ = control::send(&ControlMessage::new(CONTROL_KICK, node as u32));
            }
        }
    }
}
