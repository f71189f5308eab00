//! The process around the switch: one thread and one loop for all sockets, and short-lived
//! threads for handshakes.
//!
//! ```text
//!  machines (UNIX socket, 0600) ──▶ machine ─┐                ┌─ orders   ◀── standard input
//!                                            ├── core::Switch ─┤
//!  switches (TCP, Noise)        ──▶ peer ────┘                └─ report   ──▶ standard output
//!        dial, accept: handshakes
//! ```
//!
//! Invariants: the loop waits in one place, for at most [`TICK`]; no socket and no stream of
//! ours blocks it. What a connection may hold has a bound: one buffer of input, one record of
//! output, and what waits at its port in the core. It ends when its standard input does.
//!
//! A machine's card may not connect again when the switch was killed, since its process is
//! confined by then. So it listens at a socket beside the switch's, `SOCKET.` and 16
//! hexadecimal digits, and a switch that starts connects to all of these.
//!
//! A peer's link: down → (dialling) → up → down. The side with the smaller key dials, and
//! tries again after 0.1 to 2 s. A new connection takes the place of the old one. Each side
//! says something at least each second, and takes a peer to be gone that said nothing for
//! four.

mod door;
mod handshakes;
mod machine;
mod orders;
mod peer;
mod report;
mod run;
mod tap;

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use weft_wire::keys::{self, KeyError, StaticKeys};

pub use orders::Order;
pub use report::{MachineReport, PeerReport, Report};
pub use run::run;

/// How long the loop waits at most.
pub const TICK: Duration = Duration::from_millis(250);
/// After how long a peer hears something.
pub const KEEPALIVE: Duration = Duration::from_secs(1);
/// How long a peer may be silent. It is noticed within a tick.
pub const SILENCE_MAX: Duration = Duration::from_secs(4);
/// How long a peer may take no byte of a record that is under way.
pub const STALL_MAX: Duration = Duration::from_secs(10);
/// How long to wait before a peer is dialled again, at first and at most.
pub const AGAIN: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(2)];
/// How long a connection may take that is dialled.
pub const DIAL_MAX: Duration = Duration::from_secs(2);
/// How long its handshake may take. A cut that ends meanwhile is noticed by the next one.
pub const HANDSHAKE_MAX: Duration = Duration::from_secs(3);

/// What a switch is started with.
#[derive(Debug)]
pub struct Options {
    /// Where other switches dial in.
    pub listen: SocketAddr,
    /// The socket that machines connect to.
    pub machines: PathBuf,
    /// This switch's keys.
    pub keys: StaticKeys,
    /// A tap device on a bridge, by its name.
    pub tap: Option<String>,
}

impl Options {
    /// With the keys of a file.
    ///
    /// # Errors
    /// It cannot be read, is no key file, or others may read it.
    pub fn with_key_file(
        listen: SocketAddr,
        machines: PathBuf,
        key: &Path,
    ) -> Result<Options, KeyError> {
        let keys = keys::load(key)?;
        Ok(Options {
            listen,
            machines,
            keys,
            tap: None,
        })
    }
}

/// Why a switch does not run.
#[derive(Debug, thiserror::Error)]
pub enum ShellError {
    /// The address for other switches is taken, or not this host's.
    #[error("cannot listen at {address}: choose an address of this host and a port that is free")]
    Listen {
        address: SocketAddr,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Another switch has the socket.
    #[error("another process serves {}: end it, or choose another path", path.display())]
    Taken {
        /// The socket.
        path: PathBuf,
    },
    /// The tap device cannot be used.
    #[error("cannot use the tap device `{name}`: {why}")]
    Tap {
        /// As `ip link` shows it.
        name: String,
        /// With a remedy, where one is known.
        why: String,
    },
    /// The socket for machines cannot be made.
    #[error(
        "cannot make the socket {}: its directory must exist and be writable, and the path \
        shorter than 108 bytes",
        path.display()
    )]
    Machines {
        /// The socket.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A pipe or a wait.
    #[error("the switch cannot go on")]
    System(#[source] io::Error),
}
