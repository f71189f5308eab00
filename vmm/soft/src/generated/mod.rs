//! Generated code: what the host's own processor runs for the guest.
//!
//! - [`arena`]: memory for code, never writable and executable at one address;
//! - [`assembler`] and [`encoding`]: instructions written, and taken apart;
//! - [`thunk`]: one SSE, MMX or x87 instruction, for the interpreter.

pub mod arena;
mod assembler;
mod encoding;
pub mod thunk;
