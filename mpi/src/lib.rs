//! A malleable cluster: an MPI program on machines that move between hosts which a batch system
//! gives for a time (ELViC, sections 4 to 6; `docs/malleable.md`).
//!
//! | room | is |
//! | --- | --- |
//! | [`launcher`] | the process on the user's host: decides, and has the program's output |
//! | [`agent`] | the process of each reservation: carries out what the launcher orders |
//! | [`control`] | what they say to each other |
//! | [`request`] | what a user says to a launcher that runs |
//!
//! Everything that a machine can do is a `weft vm` command, which the agent runs as a process of
//! its own.

use std::io::Write as _;

pub mod agent;
pub mod control;
pub mod launcher;
pub mod request;
mod switch;
mod token;
mod wait;

/// A line on standard error. Nobody may read it, or its disk may be full: nothing ends because of
/// that.
fn print(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}
