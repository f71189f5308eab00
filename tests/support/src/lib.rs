//! What the unit tests of several crates share.

mod folder;
mod random;
mod skipped;

pub use folder::Folder;
pub use random::{Random, seed};
pub use skipped::skipped;
