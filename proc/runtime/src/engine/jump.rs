//! Moving the execution to another node and back. Until it comes back, the node serves
//! (`serve`).
//!
//! The execution travels as one message: registers, extended state, signal mask,
//! FS and GS base, and what the jump policy has learned. The pages at the top of
//! the stack go ahead of it, so that the first push or return does not fault.
//!
//! ```text
//! executing ── jump out ──▶ serving ── jump in ──▶ executing
//! ```
//!
//! Both ends happen inside a signal handler of the thread concerned: the context
//! that arrives is written over the handler's own frame, and returning from the
//! handler continues the program where it left the other node.

use weft_dsm::{Access, Event, NodeId, Page, State};
use weft_jump::PolicyError;
use weft_proc::context::{Context, ContextError};
use weft_proc::layout::PAGE;
use weft_proc::message::Message;
use weft_proc::stats::add;
use zerocopy::IntoBytes;

use core::sync::atomic::Ordering;

use super::clock;
use super::machine::{ENGINE, Engine};
use super::serve::serve;
use super::tables::page_of;
use crate::frame::Frame;
use crate::thread::Thread;
use crate::{context, image};

/// Pages at the top of the stack that travel with a jump.
const STACK_PAGES: u64 = 2;
/// Why an execution that arrived cannot continue here.
#[derive(Debug, thiserror::Error)]
pub(super) enum ArrivalError {
    #[error(transparent)]
    Context(#[from] ContextError),
    #[error(transparent)]
    Policy(#[from] PolicyError),
    #[error("RIP is {0:#x}, inside the runtime")]
    Runtime(usize),
}

/// Sends the execution to `node`, serves until it comes back here, and leaves
/// `frame` as it came.
pub fn jump(thread: &Thread, frame: &mut Frame, node: usize) {
    {
        let mut guard = ENGINE.lock();
        let Some(engine) = guard.as_mut() else {
            return;
        };
        engine.depart(frame, node);
    }
    serve(thread, frame.mask);
    if let Some(engine) = ENGINE.lock().as_ref() {
        context::load(engine.travelling, frame);
    }
}

/// Loads the context that arrived into the thread's start; for the first time
/// that a slice executes.
pub fn take_context(into: &mut Context) {
    if let Some(engine) = ENGINE.lock().as_ref() {
        *into = *engine.travelling;
    }
}

impl Engine {
    /// Whether the program has completed no instruction since the execution came
    /// here. Then what it touches is pulled, whatever the policy says: an instruction
    /// that needs pages of two nodes would be carried to and fro between them for ever.
    pub fn has_just_arrived(&self, frame: &Frame) -> bool {
        frame.registers.general() == self.travelling.registers.general()
    }

    /// Everything up to the moment when the other node executes.
    fn depart(&mut self, frame: &Frame, node: usize) {
        self.finish_offers();
        self.push_stack(frame.registers.rsp, node);
        context::save(self.travelling, frame);
        #[cfg(feature = "damage")]
        self.damage();
        self.departed_at = clock::now();
        let stats = self.io.stats;
        add(&stats.jumps_out, 1);
        stats.executing.store(0, Ordering::Relaxed);
        if self.is_home() {
            self.away = Some(node);
        }
        let (context, policy) = (self.travelling.as_wire(), self.policy.as_bytes());
        let message = Message::Jump {
            context_length: context.len() as u64,
        };
        let header = message.header(context.len() + policy.len());
        self.io.send(node, &header, &[context, policy]);
        self.settle();
        self.count_traffic();
    }

    /// Lets the top of the stack go ahead, where that takes no question.
    fn push_stack(&mut self, stack_pointer: usize, node: usize) {
        let first = page_of(stack_pointer.saturating_sub(128));
        for page in first..first + STACK_PAGES {
            let local = self.core.tables.look(page);
            let sole = local.owner() && local.state() == State::Exclusive && local.evictable();
            // Only the manager, or an owner that pushes to the manager, can
            // give a page away in one message.
            if sole && self.is_home() {
                self.step(Event::Evict {
                    page: Page(page),
                    to: Some(NodeId(node as u8)),
                });
            }
        }
        self.io.flush();
        self.io.no_room = false;
        self.io.left = 0;
    }

    /// Takes the execution that arrived, whose context and policy are the payload.
    pub(super) fn arrive(
        &mut self,
        from: usize,
        payload: &[u8],
        context_length: usize,
    ) -> Result<(), ArrivalError> {
        let (context, policy) = payload.split_at(context_length);
        self.travelling.decode(context)?;
        self.policy.decode(policy, self.nodes)?;
        if image::contains(self.travelling.registers.rip) {
            return Err(ArrivalError::Runtime(self.travelling.registers.rip));
        }
        let stats = self.io.stats;
        add(&stats.jumps_in, 1);
        stats.executing.store(1, Ordering::Relaxed);
        self.away = None;
        self.io.send(from, &Message::Arrived.header(0), &[]);
        // The stack is needed at once.
        let page = page_of(self.travelling.registers.rsp);
        if !self.core.tables.look(page).present() && self.io.layout.lookup(page * PAGE).is_some() {
            self.fetch(page, Access::Write);
        }
        self.left_at = clock::now();
        Ok(())
    }
}
