//! The guest's console on a terminal, on pipes or at a UNIX socket.
//!
//! ```text
//!  devices ── Output (bounded) ──▶ ┌─────────┐ ──▶ standard output │ the one client
//!                                  │ console │
//!  devices ◀── Keys (bounded) ──── │ thread  │ ◀── standard input  │ of the socket
//!                                  └─────────┘ ──▶ Notice: quit
//! ```
//!
//! One thread, [`ConsoleThread`], does all reading and writing. A device waits only if its output
//! is not read for long ([`Output`]). A client of the socket delays no device, and the thread
//! reads keys and signals also while standard output is blocked.
//!
//! - [`escape`]: Ctrl-] and a letter, on a terminal
//! - [`terminal`]: raw mode, and its end in every case
//! - [`output`]: the devices' output that waits for the console thread
//! - [`socket`]: one client at a time, with a scrollback for the next
//! - [`stdout`]: standard output, written to without blocking
//! - [`attach`]: the client of the socket, `weft vm console`

pub mod attach;
pub mod escape;
mod output;
mod socket;
mod stdout;
pub mod terminal;
mod thread;

pub use output::{OUTPUT_BYTES_MAX, Output, Port, PortOutput};
pub use socket::SCROLLBACK_BYTES;
pub use thread::{ConsoleEndpoint, ConsoleThread, Keys, Notice};
