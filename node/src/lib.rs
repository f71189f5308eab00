//! The ordinary, std half of Weft around the runtimes: the launcher of an
//! aggregate, the daemon that lends a host's memory and CPU, and what both need.
//!
//! - [`options`]: what a run is asked to be; [`error`]: why it was refused
//! - [`program`], [`host`]: what can be run, and whether this host can
//! - [`spawn`], [`links`], [`shared`]: starting a runtime, connecting it, and
//!   reading what it counts
//! - [`config`]: keys and trusted nodes

pub mod config;
pub mod error;
pub mod host;
pub mod links;
pub mod options;
pub mod program;
pub mod shared;
pub mod size;
pub mod spawn;
pub mod sys;
