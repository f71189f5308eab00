//! Transfers that are longer than a buffer, made in pieces.
//!
//! The result is what one call would have returned: the sum of the pieces. A
//! short piece ends the transfer; an error ends it too, and is reported only
//! when nothing was transferred before, as Linux does within one call.

use super::Request;
use crate::table::Next;

/// What to do after a piece.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Gather again with [`Transfer::done`].
    More,
    /// The call's result.
    Finished(i64),
}

/// How far a transfer has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Transfer {
    done: u64,
}

impl Transfer {
    /// At the start.
    pub const fn new() -> Transfer {
        Transfer { done: 0 }
    }
    /// Bytes transferred, for [`super::gather()`].
    pub const fn done(&self) -> u64 {
        self.done
    }
    /// Counts the piece that `request` was and that returned `result`.
    /// `regular_file` says whether the descriptor is one; it is asked only when
    /// it matters, after a piece that was read whole and is not the last.
    pub fn advance(
        &mut self,
        request: &Request,
        result: i64,
        regular_file: impl FnOnce() -> bool,
    ) -> Step {
        let Ok(transferred) = u64::try_from(result) else {
            let before = self.done as i64;
            return Step::Finished(if before > 0 { before } else { result });
        };
        self.done += transferred;
        let whole = transferred >= request.bulk() && request.bulk() > 0;
        let goes_on = whole
            && request.is_clamped()
            && match request.next() {
                Next::Always => true,
                Next::RegularFile => regular_file(),
                Next::Never | Next::Whole => false,
            };
        if goes_on {
            Step::More
        } else {
            Step::Finished(self.done as i64)
        }
    }
}
