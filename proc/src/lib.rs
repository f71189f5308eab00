//! The elastic process: everything of it that is pure. The freestanding half
//! that runs inside the program is `weft-runtime` (`runtime/`).
//!
//! - [`boot`]: what a runtime is handed at start
//! - [`layout`]: which addresses of a process are mapped, and how
//! - [`stats`]: counters and commands shared with the launcher
#![cfg_attr(not(test), no_std)]

pub mod boot;
pub mod layout;
pub mod stats;
