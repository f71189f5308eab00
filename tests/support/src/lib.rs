//! What the unit tests of several crates share.

mod random;
mod skipped;

pub use random::{Random, seed};
pub use skipped::skipped;
