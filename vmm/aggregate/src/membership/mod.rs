//! Slices that join a running machine and slices that leave it: the authority over their
//! membership, which is on the primary. `docs/membership.md` has the sequences and why they
//! are so, and what does not exist yet.
//!
//! | file | holds |
//! | --- | --- |
//! | `protocol` | the primary's side as a state machine |

mod protocol;
#[cfg(test)]
mod simulation;

pub use protocol::{Answer, Authority, Change, Progress, Step};
