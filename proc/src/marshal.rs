//! Carrying a system call to another node and its results back.
//!
//! The caller and home share nothing but the message. The life of one call:
//!
//! ```text
//! caller                                home
//! gather  program memory → bytes   ──▶  DecodedCall::decode    check everything
//!                                       DecodedCall::relocate  six machine words
//!                                       the system call
//! Request::scatter  reply → memory ◀──  DecodedCall::reply     what was produced
//! ```
//!
//! A request is a header and the inputs; room for outputs is added at home. Its
//! parts are [pieces](plan): which pieces a call has follows from the table
//! ([`crate::table`]) alone, and where each lies follows from the lengths, so a
//! request carries neither pointers nor offsets, and a peer cannot make home
//! read or write outside its buffer. Vectors (`struct iovec[]`, `struct msghdr`)
//! are flattened: the data travels in one piece and home builds a vector of one.
//!
//! Invariants:
//!
//! - [`DecodedCall::decode`] is total: any bytes give a `DecodedCall` or a
//!   [`Malformed`]. The machine words of a `DecodedCall` point into the buffer or
//!   are what the table calls integers.
//! - Pieces do not overlap; `HEADER <= sent <= space <= SPACE_MAX`.
//! - Only what the kernel produced is written into the program's memory.
//! - A signal mask arrives as the program gave it: home removes the signals that must
//!   not be blocked before it makes the call.

mod decoded;
mod gather;
mod plan;
mod scatter;
#[cfg(test)]
mod tests;
mod transfer;

pub use decoded::{DecodedCall, Malformed, Output};
pub use gather::{gather, gather_plain};
pub use scatter::{Request, ScatterError};
pub use transfer::{Step, Transfer};

use linux_raw_sys::errno;

/// Most data of one transfer, bytes; longer ones are made in pieces.
pub const BULK_MAX: usize = 1 << 20;
/// Room for everything beside the data: header, addresses, control data, bytes.
pub const SLACK: usize = 256 << 10;
/// Bytes before the first piece.
pub const HEADER: usize = 96;
/// Most room that any request needs at home, bytes. A buffer of this size fits
/// every request and every reply.
pub const SPACE_MAX: usize = HEADER + BULK_MAX + SLACK;
/// Most entries of a vector, as Linux has it (`UIO_MAXIOV`).
pub const VECTOR_MAX: u64 = 1024;

/// The program's memory could not be read or written there.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the program's memory at {address:#x} is not accessible")]
pub struct Fault {
    /// The first address that failed, or the start of the access.
    pub address: u64,
}

/// The program's memory, on the node where the program is.
pub trait Memory {
    /// Copies `into.len()` bytes from `address`.
    fn read(&mut self, address: u64, into: &mut [u8]) -> Result<(), Fault>;
    /// Copies `from` to `address`.
    fn write(&mut self, address: u64, from: &[u8]) -> Result<(), Fault>;
    /// How many of the `length` bytes from `address` can be written. A transfer
    /// into partly unmapped memory is cut to it before the call, so that no data
    /// is consumed that could not be delivered.
    fn writable(&mut self, address: u64, length: u64) -> u64 {
        let _ = address;
        length
    }
    /// Copies a string with its NUL; the length with the NUL, or `None` when
    /// there is none within `into`.
    fn read_c_string(&mut self, address: u64, into: &mut [u8]) -> Result<Option<usize>, Fault> {
        /// Reads never cross a multiple of this, hence never into a page that
        /// the string does not reach.
        const STEP: u64 = 256;
        let mut read = 0;
        while read < into.len() {
            let from = address.checked_add(read as u64).ok_or(Fault { address })?;
            let length = (STEP - from % STEP).min((into.len() - read) as u64) as usize;
            let part = &mut into[read..read + length];
            self.read(from, part)?;
            if let Some(end) = part.iter().position(|&byte| byte == 0) {
                return Ok(Some(read + end + 1));
            }
            read += length;
        }
        Ok(None)
    }
}

/// Why a call was not gathered.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Gather {
    /// It cannot be carried (unknown, or too large): go home and run it there.
    #[error("the call must run at home")]
    Home,
    /// Its result is known without a call: minus this error number.
    #[error("the call fails with error {0}")]
    Errno(i32),
    /// The engine does it itself; [`crate::table::classify`] says how it counts.
    #[error("the call is the engine's own")]
    Engine,
}

impl From<Fault> for Gather {
    fn from(_: Fault) -> Gather {
        Gather::Errno(errno::EFAULT as i32)
    }
}
