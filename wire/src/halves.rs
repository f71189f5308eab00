//! A link whose two directions are used by different threads: any number of
//! them send, one receives.
//!
//! ```text
//! senders ── send ──▶ kernel            while nothing waits
//!               └───▶ backlog ── flusher ──▶ kernel
//! receiver ◀── receive ── kernel
//! ```
//!
//! States, of both halves together: *open* → *ended*. They end once, by a
//! failure on either half, by [`Sender::close`], or when the [`Receiver`] is
//! dropped; the first reason is the one that everybody is given from then on.
//! Ending shuts the socket down, which wakes threads that wait on it, and drops the
//! backlog. Frames that arrived whole before are still received first.
//!
//! Invariants:
//!
//! - Frames leave whole and in the order in which [`Sender::send`] was entered:
//!   one lock orders them, and while anything waits in the backlog or is being
//!   flushed, nothing overtakes it.
//! - A send never waits for the peer, so a thread that receives may answer, on
//!   both sides at once: what the kernel does not take goes to the backlog.
//! - `backlog <= BACKLOG_MAX`, or the link ends.
//! - Every wait is bounded: a receive by its timeout, the flusher's by the
//!   lease. A peer that takes nothing of a backlog for a lease ends the link.
//!
//! No thread is made here, since threads of a confined process are started in
//! one place: somebody has to run [`Sender::flush_forever`], or a backlog stays
//! one. Sockets only, no rings. Once open, the halves call `sendmsg`,
//! `recvfrom`, `poll`, `ppoll`, `shutdown`, and what locks, clocks and the
//! allocator need.

mod backlog;
mod outgoing;
mod sender;

pub use backlog::BACKLOG_MAX;
pub use sender::Sender;

use crate::link::{Frame, Link};
use crate::seal::KEY_BYTES;
use crate::{LinkError, sys};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

/// How long a blocking receive waits at a time: the socket's receive timeout,
/// set once. Shorter waits poll, at the price of one more system call.
const RECEIVE_ROUND: Duration = Duration::from_millis(100);
/// Waits are cut to this, so that sums of times cannot overflow.
const WAIT_MAX: Duration = Duration::from_secs(1 << 30);

/// What a pair of halves runs over.
pub struct HalvesConfig {
    /// A connected stream socket, TCP or UNIX, that nobody else uses.
    pub socket: OwnedFd,
    /// Keys of a link between hosts; none: in the clear, same host only.
    pub keys: Option<SessionKeys>,
    /// Longest time that a peer may take nothing of a backlog; 1 ms to 49 days.
    pub lease: Duration,
    /// Longest busy wait before a receive blocks; zero never spins.
    pub spin: Duration,
    /// The link, for the names of threads and for messages.
    pub name: String,
}

/// The keys of a sealed link, one for each direction.
pub struct SessionKeys {
    /// For what this side sends.
    pub send: [u8; KEY_BYTES],
    /// For what this side receives.
    pub receive: [u8; KEY_BYTES],
}

/// Opens both halves.
///
/// # Errors
/// Not a connected stream socket, a lease out of range, or no memory.
pub fn open(config: HalvesConfig) -> Result<(Sender, Receiver), LinkError> {
    let lease_ms = u32::try_from(config.lease.as_millis()).unwrap_or(0);
    if lease_ms == 0 {
        return Err(LinkError::Configuration(
            "its lease is not between 1 ms and 49 days",
        ));
    }
    prepare(&config.socket)?;
    let fd = config.socket.as_raw_fd();
    let (send_key, receive_key) = match &config.keys {
        None => (None, None),
        Some(keys) => (Some(&keys.send), Some(&keys.receive)),
    };
    let spin_ns = nanoseconds(config.spin);
    // SAFETY: `prepare` found a connected stream socket. It stays open as long
    // as the `Sender` beside the link in `Receiver`, which is dropped after the
    // link; nobody else receives on it.
    let link = unsafe { Link::receiving(fd, receive_key, spin_ns, nanoseconds(RECEIVE_ROUND)) }?;
    let sender = Sender(Arc::new(sender::Shared::new(
        config.socket,
        send_key,
        lease_ms,
        config.name,
    )));
    let receiver = Receiver {
        link,
        sender: sender.clone(),
    };
    Ok((sender, receiver))
}

/// Checks the socket, and sets the options that are needed later, when a
/// confined thread may not.
fn prepare(socket: &OwnedFd) -> Result<(), LinkError> {
    use rustix::net::{SocketType, getpeername, sockopt};
    let failed = |call| {
        move |errno: rustix::io::Errno| LinkError::System {
            call,
            errno: errno.raw_os_error(),
        }
    };
    let kind = sockopt::socket_type(socket).map_err(failed("getsockopt"))?;
    if kind != SocketType::STREAM {
        return Err(LinkError::Configuration("its socket is not a stream"));
    }
    getpeername(socket)
        .map_err(|_| LinkError::Configuration("its socket is not connected to anybody"))?;
    // Small answers must not wait for one another; a UNIX socket has no such
    // option, and no such delay.
    let _ = sockopt::set_tcp_nodelay(socket, true);
    sys::set_receive_timeout(socket.as_raw_fd(), nanoseconds(RECEIVE_ROUND))
        .map_err(|errno| LinkError::from_errno("setsockopt", errno))?;
    Ok(())
}

fn nanoseconds(time: Duration) -> u64 {
    time.min(WAIT_MAX).as_nanos() as u64
}

/// The half that receives. Dropping it ends the link.
pub struct Receiver {
    // The order matters: the link uses the socket that the sender keeps open.
    link: Link,
    sender: Sender,
}

impl Receiver {
    /// The next frame; waits for it at most `timeout` (twice that if signals
    /// come meanwhile, which do not end the wait).
    ///
    /// # Errors
    /// Why the link ended, after all frames that arrived before.
    pub fn receive(&mut self, timeout: Duration) -> Result<Option<Frame<'_>>, LinkError> {
        match self.link.receive(nanoseconds(timeout)) {
            Ok(frame) => Ok(frame),
            Err(error) => {
                let first = self.sender.end(error);
                // The end of the stream may be this side's own doing, which
                // then says why; anything else was found here.
                Err(if error == LinkError::Closed {
                    first
                } else {
                    error
                })
            }
        }
    }

    /// Bytes received so far, framing and sealing included.
    pub fn traffic(&self) -> u64 {
        self.link.traffic().received_bytes
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.sender.close();
    }
}
