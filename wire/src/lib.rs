//! What travels between nodes, and how.
//!
//! Two halves:
//!
//! - the core ([`frame`], [`link`], [`seal`], [`ring`]) is `no_std`, does not
//!   allocate, calls the kernel directly and keeps no state outside its
//!   values, because it runs inside signal handlers of somebody else's program;
//! - with the feature `std`, [`keys`], [`socket`], [`listener`], [`handshake`], [`hello`] and
//!   [`channel`] make, authenticate and key the connections that the core is
//!   handed, and [`halves`] is a link for processes with threads.
//!
//! A [`link::Link`] carries [`frame::Header`]s with payloads to one peer, in
//! order, over one of three kinds: a stream socket in the clear, the same with
//! sealed records, or two rings in shared memory. The crate knows nothing of
//! pages or programs: what a frame means is its users' business.
#![cfg_attr(not(any(test, feature = "std")), no_std)]

#[cfg(feature = "std")]
pub mod channel;
#[cfg(feature = "std")]
pub mod cpu;
pub mod error;
pub mod frame;
#[cfg(feature = "std")]
pub mod halves;
#[cfg(feature = "std")]
pub mod handshake;
#[cfg(feature = "std")]
pub mod hello;
#[cfg(feature = "std")]
pub mod keys;
pub mod link;
#[cfg(feature = "std")]
pub mod listener;
pub mod ring;
pub mod seal;
#[cfg(feature = "std")]
pub mod socket;
mod sys;

pub use error::LinkError;
pub use frame::{FrameError, Header, MAX_PAYLOAD};
pub use link::{FRAMES_MAX, Frame, Link, LinkConfig, LinkKind, Received, Wake, wait_any};

/// Version of everything this crate puts on a wire: frames, records, rings,
/// handshake and hello. Peers must agree exactly.
pub const PROTOCOL_VERSION: u32 = 2;
