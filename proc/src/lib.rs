//! The elastic process: everything of it that is pure. The freestanding half
//! that runs inside the program is `weft-runtime` (`runtime/`).
//!
//! - [`boot`]: what a runtime is handed at start
//! - [`layout`]: which addresses of a process are mapped, and how
//! - [`marshal`]: carrying a system call to another node and back
//! - [`stats`]: counters and commands shared with the launcher
//! - [`table`]: what is known of every system call
#![cfg_attr(not(test), no_std)]

pub mod boot;
pub mod layout;
pub mod marshal;
pub mod stats;
pub mod table;
