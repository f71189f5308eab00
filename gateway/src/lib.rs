//! The gateway of the user's host to the machines' network of a malleable cluster: TCP
//! connections to the machines, for processes of this host and without root.
//!
//! ```text
//!  clients (UNIX socket, 0600)        one thread                          a switch (UNIX socket)
//!  ─ caller ── asks ─▶ connection ── stack ─┐
//!  ─ caller ── asks ─▶ connection ── stack ─┼── card ── frames after their lengths ──▶
//!                            base stack ────┘
//! ```
//!
//! A client writes one line, `10.77.0.1:22 10000` (address, patience in milliseconds), and is
//! answered by `ok` or by `error` and a sentence. After `ok` the socket carries the bytes of a
//! TCP connection; [`connect`] does this. `shutdown` of one direction is passed on as FIN, FIN
//! as `shutdown`. A reset closes the socket.
//!
//! Each connection has a TCP/IP stack (smoltcp) with a clock of its own, and all stacks have
//! one address; a frame goes to the stack whose port it names. The base stack answers ARP and
//! pings, and refuses connections. While there is no switch the stacks stand.
//!
//! Invariants: the loop waits in one place, and no socket of ours blocks it. It wakes for a
//! socket, a timer or its end, never otherwise. What a client can make it hold has a bound.

mod caller;
mod card;
mod client;
mod connection;
mod door;
mod frame;
mod output;
mod run;
mod stack;

use std::io;
use std::net::Ipv4Addr;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};
use std::time::Duration;

pub use client::{ConnectError, connect};

/// Connections at once, with clients that have not asked yet. Those in TIME-WAIT are others.
pub const CONNECTIONS_MAX: usize = 64;
/// Bytes that a connection holds each way, beside what its UNIX socket does.
pub const BUFFER: usize = 256 << 10;
/// Bytes of what a client asks.
pub const LINE_MAX: usize = 64;
/// How long a client may take to ask.
pub const ASK_MAX: Duration = Duration::from_secs(5);
/// How patient a client may be.
pub const PATIENCE_MAX: Duration = Duration::from_secs(600);
/// How long a machine may be silent. It is asked each half minute.
pub const SILENCE_MAX: Duration = Duration::from_secs(900);
/// How long what was not acknowledged waits before it is sent again, at most.
pub const RETRY_MAX: Duration = Duration::from_secs(2);
/// The largest packet of the machines' network, in bytes without the Ethernet header.
pub const MTU: usize = 65_520;
/// Longest path of a UNIX socket, in bytes.
const PATH_MAX: usize = 107;

/// What a gateway is started with.
#[derive(Debug, Clone)]
pub struct Options {
    /// The socket of the switch.
    pub switch: PathBuf,
    /// The card's address: of one card, and of no machine.
    pub mac: [u8; 6],
    /// The gateway's address in the machines' network.
    pub address: Ipv4Addr,
    /// Bits of the network's part of the address.
    pub prefix: u8,
    /// The socket for clients. The file of a gateway that was killed is replaced.
    pub listen: PathBuf,
}

/// Why a gateway does not start.
#[derive(Debug, thiserror::Error)]
pub enum GatewayError {
    /// The kernel's limit for addresses of UNIX sockets.
    #[error("the path {} has {} bytes, and a socket's has at most {PATH_MAX}: choose a shorter one", .0.display(), .0.as_os_str().len())]
    PathTooLong(PathBuf),
    /// The address cannot be a host's.
    #[error(
        "{address}/{prefix} is no address of a host: give one inside a network of at most 30 bits"
    )]
    Address {
        address: Ipv4Addr,
        /// Bits of the network's part.
        prefix: u8,
    },
    /// The card's address is a group's, or zero.
    #[error("the card's address {0} is not that of one card: give one such as 02:00:00:00:00:01")]
    Card(weft_switch::frames::Address),
    /// No process serves the switch's socket.
    #[error("cannot connect to the switch at {}: start it before", path.display())]
    NoSwitch {
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Another gateway has the socket for clients.
    #[error("another process serves {}: end it, or choose another path", .0.display())]
    Taken(PathBuf),
    /// The socket for clients cannot be made.
    #[error("cannot make the socket {}: its directory must exist and be writable", path.display())]
    Listen {
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Out of descriptors or threads.
    #[error("the gateway's thread cannot be made: raise the limits of processes and open files")]
    System(#[source] io::Error),
}

/// A gateway that runs on a thread. When it is dropped its connections are reset and its socket
/// is removed.
#[derive(Debug)]
pub struct Gateway {
    /// Its other end is the thread's, which ends when this one does.
    life: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Gateway {
    /// Connects to the switch, and serves clients from then on.
    ///
    /// # Errors
    /// [`GatewayError`]: there is no switch, or no socket can be made.
    pub fn start(options: Options) -> Result<Gateway, GatewayError> {
        check(&options)?;
        let (life, end) = UnixStream::pair().map_err(GatewayError::System)?;
        let shell = run::Shell::open(&options, end)?;
        let thread = thread::Builder::new().name("weft-gateway".into());
        let thread = thread.spawn(move || shell.run());
        Ok(Gateway {
            life: Some(life),
            thread: Some(thread.map_err(GatewayError::System)?),
        })
    }

    /// Whether clients are served: false only after the kernel has refused a wait.
    pub fn is_running(&self) -> bool {
        self.thread
            .as_ref()
            .is_some_and(|thread| !thread.is_finished())
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.life = None;
        if let Some(thread) = self.thread.take() {
            // A panic there was said by the panic's hook.
            let _ = thread.join();
        }
    }
}

/// What can be seen without the kernel.
fn check(options: &Options) -> Result<(), GatewayError> {
    let Options {
        address, prefix, ..
    } = *options;
    for path in [&options.switch, &options.listen] {
        check_path(path)?;
    }
    let card = weft_switch::frames::Address(options.mac);
    if card.is_group() || options.mac == [0; 6] {
        return Err(GatewayError::Card(card));
    }
    let hosts = u32::MAX.checked_shr(prefix.into()).unwrap_or(0);
    let host = address.to_bits() & hosts;
    let is_host = (1..=30).contains(&prefix) && host != 0 && host != hosts;
    if !is_host || address.is_multicast() || address.is_loopback() {
        return Err(GatewayError::Address { address, prefix });
    }
    Ok(())
}

fn check_path(path: &Path) -> Result<(), GatewayError> {
    match path.as_os_str().len() > PATH_MAX {
        true => Err(GatewayError::PathTooLong(path.to_path_buf())),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> Options {
        Options {
            switch: "/run/switch".into(),
            mac: [2, 0, 0, 0, 0, 1],
            address: [10, 77, 255, 254].into(),
            prefix: 16,
            listen: "/run/gateway".into(),
        }
    }

    fn said(change: impl FnOnce(&mut Options)) -> String {
        let mut options = options();
        change(&mut options);
        check(&options).unwrap_err().to_string()
    }

    #[test]
    fn options_that_cannot_work_are_refused_with_a_reason() {
        check(&options()).unwrap();
        assert!(said(|options| options.listen = "x".repeat(108).into()).contains("108 bytes"));
        assert!(said(|options| options.mac[0] = 3).contains("03:00:00:00:00:01"));
        assert!(said(|options| options.mac = [0; 6]).contains("one card"));
        for (address, prefix) in [
            ([10, 77, 255, 255], 16),
            ([10, 77, 0, 0], 16),
            ([10, 77, 0, 1], 0),
            ([10, 77, 0, 1], 31),
            ([10, 77, 0, 1], 33),
            ([224, 0, 0, 1], 16),
        ] {
            let text = said(|options| {
                (options.address, options.prefix) = (address.into(), prefix);
            });
            assert!(text.contains("no address of a host"), "{text}");
        }
    }
}
