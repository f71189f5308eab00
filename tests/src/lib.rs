//! End to end: the same command natively and under `weft`, and what differs.
//!
//! The harness knows Weft only through its command line, its exit codes and
//! `--stats json`: it shares no code with what it judges. A run ends in one of
//! three ways, each with its reason printed: passed, failed, skipped.
//!
//! - [`run`] runs one command in a session of its own, bounded in time, and
//!   finds what it left behind ([`processes`]).
//! - [`case`] and [`corpus`] say what to run; [`matrix`] under which nodes,
//!   budgets, jump policy and transport.
//! - [`judge`] compares. [`stats`] reads the counters.
//! - [`loss`], [`setup`] and [`user`] are the suites that need more than a
//!   comparison: nodes that die, errors before the start, an ordinary user;
//!   [`tamper`] alters what hosts send to each other.
//! - [`members`] tries the command `weft cluster` with a real etcd.
//! - [`mpi`] runs MPI programs on machines that move between hosts, under `weft mpi`.
//! - [`vm`] tries the command `weft vm` with guests of a few instructions.
//! - [`machines`] boots Linux under `weft vm run`, [`devices`] tries its devices.
//! - [`aggregate`] boots one Linux over several nodes of this host.
//! - [`cluster`] starts daemons, [`namespace`] makes several hosts out of one, [`fleet`] a
//!   cluster with daemons and an etcd out of these.
//! - [`guest`] is a virtual machine and its console; [`boot`] says what to boot
//!   and under which monitor; [`web`] carries files to and from it.
//! - [`report`] prints.

pub mod aggregate;
pub mod boot;
pub mod case;
pub mod cluster;
pub mod context;
pub mod corpus;
pub mod counters;
pub mod devices;
pub mod ends;
mod executable;
pub mod fleet;
pub mod guest;
pub mod judge;
pub mod lend;
pub mod loss;
pub mod machines;
pub mod matrix;
pub mod members;
pub mod mpi;
pub mod namespace;
pub mod owner;
pub mod processes;
pub mod random;
pub mod report;
pub mod run;
pub mod setup;
pub mod stats;
pub mod suite;
pub mod tamper;
pub mod user;
pub mod vm;
pub mod web;
