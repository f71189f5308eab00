//! The elastic process: everything of it that is pure. The freestanding half
//! that runs inside the program is `weft-runtime` (`runtime/`).
//!
//! - [`boot`]: what a runtime is handed at start
//! - [`stats`]: counters and commands shared with the launcher
#![cfg_attr(not(test), no_std)]

pub mod boot;
pub mod stats;
