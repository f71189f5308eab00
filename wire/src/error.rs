//! Why a link failed, and which errno means what.

use crate::frame::FrameError;

/// Why a link cannot do what was asked. After any of these but
/// [`LinkError::TooLong`] the link is dead and keeps giving the same answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LinkError {
    /// End of stream, or the peer's process is gone.
    #[error("the peer closed the link")]
    Closed,
    /// The peer took nothing for the whole lease.
    #[error("the peer took no bytes for {lease_ms} ms: it is stopped or unreachable")]
    Stalled {
        /// How long this side waited, milliseconds.
        lease_ms: u32,
    },
    /// The peer sent a header that no peer sends.
    #[error("the peer sent an invalid frame")]
    Frame(#[from] FrameError),
    /// A sealed record was altered, replayed or sealed with another key.
    #[error("a sealed record is not authentic: altered on the way, or sealed with another key")]
    Forged,
    /// The shared indices of a ring cannot be.
    #[error("the peer's ring indices are invalid: it is broken or hostile")]
    RingCorrupt,
    /// This side closed the link.
    #[error("the link was closed on this side")]
    ClosedHere,
    /// The peer takes less than this side sends, for too long.
    #[error(
        "{bytes} bytes are queued for the peer, more than allowed: it receives too slowly or \
        has stopped"
    )]
    Backlog {
        /// Bytes that would wait.
        bytes: usize,
    },
    /// A direction used up its nonces.
    #[error("2^63 records were sealed with one key: make a new link")]
    Exhausted,
    /// The payload to send is longer than a frame may carry.
    #[error("a payload of {length} bytes is longer than a frame may carry")]
    TooLong {
        /// Bytes asked for.
        length: usize,
    },
    /// The configuration of the link is unusable.
    #[error("the link cannot be opened: {0}")]
    Configuration(&'static str),
    /// The kernel refused for a reason that retrying does not cure.
    #[error("{call} failed with errno {errno}")]
    System {
        /// The system call.
        call: &'static str,
        errno: i32,
    },
}

/// What to do about an errno of a socket call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// A signal came first: call again, or let the caller look.
    Interrupted,
    /// Nothing to read, or no room to write, now.
    WouldBlock,
    /// The peer is gone.
    Gone,
    /// A bug of this side, or a kernel out of memory.
    Fatal,
}

/// Classes an errno of recv, sendmsg or ppoll.
pub fn class(errno: i32) -> Class {
    use linux_raw_sys::errno::{
        EAGAIN, ECONNABORTED, ECONNREFUSED, ECONNRESET, EHOSTUNREACH, EINTR, ENETDOWN, ENETUNREACH,
        ENOTCONN, EPIPE, ESHUTDOWN, ETIMEDOUT,
    };
    match errno as u32 {
        EINTR => Class::Interrupted,
        EAGAIN => Class::WouldBlock,
        ECONNRESET | EPIPE | ENOTCONN | ECONNABORTED | ESHUTDOWN | ECONNREFUSED | ETIMEDOUT
        | EHOSTUNREACH | ENETUNREACH | ENETDOWN => Class::Gone,
        _ => Class::Fatal,
    }
}

impl LinkError {
    /// The error for a failed call whose errno is neither a retry nor a wait.
    pub(crate) fn from_errno(call: &'static str, errno: i32) -> LinkError {
        match class(errno) {
            Class::Gone => LinkError::Closed,
            _ => LinkError::System { call, errno },
        }
    }
}
