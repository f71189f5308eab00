//! Launching a virtual machine, and staying with it for one life: until its guest has
//! powered off, or wants to start again.
//!
//! ```text
//! plan ──▶ hosts reserve ──▶ processes ──▶ links, settings ──▶ running ──▶ ended
//! ```
//!
//! Processes are started before they are told what to be: they link and load while the
//! command still measures. The launcher understands nothing of a machine. What its
//! processes are told, and what home says at its end, is text between the command and
//! them.
//!
//! | signal | the launcher |
//! | --- | --- |
//! | `INT`, `QUIT`, `TERM`, `HUP` | before home runs: ends the launch; afterwards: passes it on to home, unless the kernel sent it to the whole group, and remembers that the machine's end was asked for; one that was ignored when the launcher began (`nohup`) stays ignored |
//! | `TSTP`, `TTIN`, `TTOU`, `CONT` | default: all processes of this host are in the launcher's group |
//! | others | default |
//!
//! - [`plan`]: what is started, and where
//! - [`owner`]: from the start of its processes to their end
//! - [`growth`]: nodes that join and leave meanwhile
//! - [`home_move`]: node 0's part goes to another host
//! - [`inherit`]: the launcher of a process that takes node 0's part among other nodes
//! - [`joining`]: links of a node that joins, and its slice on another host

mod growth;
mod home_move;
mod inherit;
mod joining;
mod owner;
mod plan;

use nix::sys::signal::Signal;

use super::signals::{Signals, is_ignored};
use crate::error::LaunchError;

pub use inherit::Inheritance;
pub use owner::{Machine, MachineOutcome};
pub use plan::{HEIR_BYTES, MachinePlan, MachineSettings, Share, reservation_bytes};

/// Ask for the machine's end.
const ENDS: [Signal; 4] = [
    Signal::SIGTERM,
    Signal::SIGINT,
    Signal::SIGHUP,
    Signal::SIGQUIT,
];

/// Takes this process's signals over, before any other process is started.
///
/// # Errors
/// The kernel's.
pub fn take_signals() -> Result<Signals, LaunchError> {
    // A signal that is blocked waits to be read even if it is ignored.
    let ends: Vec<Signal> = ENDS.into_iter().filter(|end| !is_ignored(*end)).collect();
    Signals::take(&ends, &[]).map_err(LaunchError::system("take over signals"))
}
