//! The caller's side, after: a reply into program memory.

use super::plan::{MESSAGE, PIECES_MAX, Piece, Plan, Role, word_u32, word_u64};
use super::{Fault, Gather, Memory};
use crate::table::{Next, Wait, When};
use linux_raw_sys::errno;

/// Where a piece is in the program: an address, or a vector of `count` entries.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Place {
    pub address: u64,
    pub count: u64,
}

/// A gathered call: what the caller remembers until the reply is there.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    pub(super) plan: Plan,
    pub(super) places: [Place; PIECES_MAX],
    pub(super) wait: Wait,
    pub(super) next: Next,
    pub(super) clamped: bool,
    pub(super) bulk: u64,
    pub(super) done: u64,
}

/// Why a reply was not accepted. The peer is broken or hostile.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ScatterError {
    /// Ends in the middle of an output.
    #[error("a system call's reply ends early, after {length} bytes")]
    Short {
        /// Bytes of the reply.
        length: usize,
    },
    /// Brings an output that the call does not have, or more of it than fits.
    #[error("a system call's reply brings {length} bytes for piece {piece}, which is smaller")]
    NoSuchOutput {
        /// The piece's number.
        piece: u32,
        /// The bytes it brings.
        length: u32,
    },
    /// Goes on after the last output.
    #[error("a system call's reply has {extra} bytes too many")]
    Trailing {
        /// Bytes after the last output.
        extra: usize,
    },
}

impl Request {
    /// Bytes at the front of the buffer that are the request.
    pub fn sent(&self) -> usize {
        self.plan.sent
    }
    /// Bytes of buffer that home needs for it.
    pub fn space(&self) -> usize {
        self.plan.space
    }
    /// Whether the call can block, and what a signal does to it.
    pub fn wait(&self) -> Wait {
        self.wait
    }
    /// Bytes of data in this piece of a transfer; 0 for other calls.
    pub fn bulk(&self) -> u64 {
        self.bulk
    }
    /// Whether more data was asked for than this piece holds.
    pub fn is_clamped(&self) -> bool {
        self.clamped
    }
    /// What may follow this piece.
    pub fn next(&self) -> Next {
        self.next
    }

    /// Copies what the call produced into the program's memory; the call's
    /// result, or -EFAULT when that memory cannot be written.
    pub fn scatter<M: Memory + ?Sized>(
        &self,
        reply: &[u8],
        memory: &mut M,
    ) -> Result<i64, ScatterError> {
        let short = ScatterError::Short {
            length: reply.len(),
        };
        let head = reply.get(..REPLY_HEADER).ok_or(short)?;
        let result = word_u64(head, 0) as i64;
        let mut at = REPLY_HEADER;
        let mut faulted = false;
        for _ in 0..word_u32(head, 8) {
            let entry = reply.get(at..at + OUTPUT_HEADER).ok_or(short)?;
            let (index, length) = (word_u32(entry, 0), word_u32(entry, 4));
            at += OUTPUT_HEADER;
            let bytes = reply.get(at..).and_then(|b| b.get(..length as usize));
            let bytes = bytes.ok_or(short)?;
            at += bytes.len();
            let refused = ScatterError::NoSuchOutput {
                piece: index,
                length,
            };
            let (piece, place) = self.output(index, length).ok_or(refused)?;
            let written = self.write(piece, place, bytes, memory);
            faulted |= written.is_err() && piece.spec.when != When::Quietly;
        }
        if at != reply.len() {
            return Err(ScatterError::Trailing {
                extra: reply.len() - at,
            });
        }
        if faulted {
            return Ok(-(errno::EFAULT as i64));
        }
        Ok(result)
    }

    fn output(&self, index: u32, length: u32) -> Option<(&Piece, &Place)> {
        use super::plan::Direction::{InOut, Out};
        let index = index as usize;
        let piece = self.plan.pieces().get(index)?;
        let fits = piece.is_present() && length <= piece.length;
        let whole_header = piece.spec.role != Role::MessageHeader || length == MESSAGE;
        (fits && whole_header && matches!(piece.spec.direction, Out | InOut))
            .then_some((piece, &self.places[index]))
    }

    fn write<M: Memory + ?Sized>(
        &self,
        piece: &Piece,
        place: &Place,
        bytes: &[u8],
        memory: &mut M,
    ) -> Result<(), Fault> {
        match piece.spec.role {
            Role::VectorData(_) | Role::MessageData => self.write_vector(place, bytes, memory),
            Role::MessageHeader => {
                // Only what the kernel updates, and the address's length only
                // where there is an address.
                let named = self.plan.part(piece.spec.argument, Role::Name);
                if named.is_some_and(Piece::is_present) {
                    memory.write(place.address + 8, &bytes[8..12])?;
                }
                memory.write(place.address + 40, &bytes[40..52])
            }
            _ => memory.write(place.address, bytes),
        }
    }
    fn write_vector<M: Memory + ?Sized>(
        &self,
        place: &Place,
        bytes: &[u8],
        memory: &mut M,
    ) -> Result<(), Fault> {
        let mut skip = self.done;
        let mut left = bytes;
        place
            .each(memory, |memory, address, length| {
                let skipped = skip.min(length);
                skip -= skipped;
                let part = (length - skipped).min(left.len() as u64) as usize;
                if part > 0 {
                    memory.write(address.wrapping_add(skipped), &left[..part])?;
                    left = &left[part..];
                }
                Ok(!left.is_empty())
            })
            .map_err(|_: Gather| Fault {
                address: place.address,
            })
    }
}

/// Bytes before the first output of a reply: result, number of outputs.
pub(super) const REPLY_HEADER: usize = 16;
/// Bytes before each output: piece, length.
pub(super) const OUTPUT_HEADER: usize = 8;
