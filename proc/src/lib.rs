//! The elastic process: everything of it that is pure. The freestanding half
//! that runs inside the program is `weft-runtime` (`runtime/`).
//!
//! - [`boot`]: what a runtime is handed at start
//! - [`context`]: the execution, as it travels
//! - [`mod@elf`]: programs, from their first bytes to their mappings
//! - [`layout`]: which addresses of a process are mapped, and how
//! - [`marshal`]: carrying a system call to another node and back
//! - [`message`]: messages between the slices of a process
//! - [`path`]: paths that name the program by way of /proc
//! - [`script`]: the `#!` line
//! - [`silence`]: which node does not answer
//! - [`stack`]: the stack with which a program starts
//! - [`stats`]: counters and commands shared with the launcher
//! - [`table`]: what is known of every system call
#![cfg_attr(not(test), no_std)]

pub mod boot;
pub mod context;
pub mod elf;
pub mod layout;
pub mod marshal;
pub mod message;
pub mod path;
pub mod script;
pub mod silence;
pub mod stack;
pub mod stats;
pub mod table;
