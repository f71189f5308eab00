//! The switch of a malleable cluster: a process for each host that passes Ethernet frames
//! between the machines there and the switches of the other hosts.
//!
//! - [`core`]: which frame goes where, as a pure state machine without sockets, clock and
//!   threads;
//! - [`frames`]: frames and what switches tell each other, on a stream of bytes;
//! - [`shell`]: the process around it, with its sockets, orders and reports.

pub mod core;
pub mod frames;
pub mod shell;
