//! Benchmarks: every figure is a ratio of two things measured in one run.
//!
//! What is compared is run alternately, several times, and the medians are
//! compared; all samples go to `bench/results/*.json`, the tables to
//! `bench/RESULTS.md`.
//!
//! - [`program`] runs a program natively or under `weft` and reads what it says.
//! - [`raw`] is the baseline: sockets without Weft.
//! - [`ping`] asks a guest for echoes while its machine moves, and draws what came back.
//! - [`memcached`] is a load for a guest's memcached.
//! - [`micro`], [`elastic`], [`vm`], [`cluster`] and [`placement`] are the benchmarks; [`results`]
//!   writes.

pub mod cluster;
pub mod elastic;
pub mod memcached;
pub mod micro;
pub mod mpi;
pub mod ping;
pub mod placement;
pub mod program;
pub mod raw;
pub mod results;
pub mod vm;
pub mod working_set;
