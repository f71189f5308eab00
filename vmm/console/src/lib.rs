//! The guest's console, carried to a terminal, to pipes, or to a UNIX socket.
//!
//! ```text
//!  devices ── Output (bounded) ──▶ ┌─────────┐ ──▶ standard output │ the one client
//!                                  │ console │
//!  devices ◀── Keys (bounded) ──── │ thread  │ ◀── standard input  │ of the socket
//!                                  └─────────┘ ──▶ Notice: quit
//! ```
//!
//! One thread, [`Carrier`], does all reading and writing. A device is held up
//! only when its output is not read for long: see [`Output`]. What a client of
//! the socket does holds nobody up, and keys and signals are heard while nobody
//! reads standard output.
//!
//! - [`escape`]: Ctrl-] and a letter, on a terminal
//! - [`terminal`]: raw mode, and back in every case
//! - [`output`]: what devices wrote and nobody carried yet
//! - [`socket`]: one client at a time, and what it missed
//! - [`stdout`]: standard output, and what waits for it
//! - [`attach`]: the other end of the socket: `weft vm console`

pub mod attach;
mod carrier;
pub mod escape;
mod output;
mod socket;
mod stdout;
pub mod terminal;

pub use carrier::{Carrier, Keys, Notice, Place};
pub use output::{OUTPUT_BYTES_MAX, Output, Port, PortOutput};
pub use socket::SCROLLBACK_BYTES;
