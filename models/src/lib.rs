//! The lock-free parts of Weft under loom, which tries all interleavings of their threads
//! that the memory model of C11 allows.
//!
//! A model includes the file that production compiles, and gives it the atomics of
//! [`weak`] instead of the processor's. What the model must find, each test shows with a
//! *mutant*: one ordering that is weaker than in production.

#![cfg(test)]

mod ring;
mod weak;
