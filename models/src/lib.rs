//! The lock-free parts of Weft under loom, which tries all interleavings of their threads
//! that the memory model of C11 allows.
//!
//! A model includes the file that production compiles, and gives it the atomics of
//! [`weak`] or [`strong`] instead of the processor's. What the model must find, each test
//! shows with a *mutant*: one ordering that is weaker than in production, or one edit of
//! the file (`build.rs`).

#![cfg(test)]

mod interrupts;
mod kicks;
#[allow(dead_code, reason = "a file of production, of which a part is used")]
#[path = "../../vmm/platform/src/interrupts/message.rs"]
mod message;
mod pins;
mod ring;
mod strong;
mod sync;
mod wakeups;
mod weak;
