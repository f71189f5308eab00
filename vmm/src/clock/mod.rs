//! Guest time.

mod base;

pub use base::TimeBase;
