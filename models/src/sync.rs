//! What production takes from `std::sync`: locks of loom; and of the standard library what
//! no model lets threads race for.

pub use loom::sync::{Condvar, Mutex};
pub use std::sync::{Arc, OnceLock};
