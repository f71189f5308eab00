//! The ordinary, std half of Weft around the runtimes: the launcher of an
//! aggregate, the daemon that lends a host's memory and CPU, and what both need.
//!
//! - [`options`]: what a run is asked to be; [`error`]: why it was refused
//! - [`program`], [`host`]: what can be run, and whether this host can
//! - [`spawn`], [`links`], [`shared`]: starting a runtime, connecting it, and
//!   reading what it counts
//! - [`config`]: keys and trusted nodes; [`member`]: this host in a cluster
//! - [`launch`]: an aggregate from its start to its end; [`report`] and
//!   [`rundir`]: what it tells, and how to talk to one that runs
//! - [`daemon`]: lending this host; [`protocol`], [`remote`]: how launcher and
//!   daemon talk

pub mod cgroup;
pub mod config;
pub mod consent;
pub mod control;
pub mod daemon;
pub mod error;
pub mod host;
pub mod keeper;
pub mod launch;
pub mod lending;
pub mod links;
pub mod mark;
pub mod member;
pub mod monitor_protocol;
pub mod oom;
pub mod options;
pub mod program;
pub mod protocol;
pub mod remote;
pub mod report;
pub mod rundir;
pub mod said;
pub mod shared;
pub mod shell;
pub mod size;
pub mod spawn;
pub mod sys;
