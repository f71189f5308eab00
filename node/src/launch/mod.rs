//! Launching an aggregate, a program's or a machine's, and staying with it until it
//! ends.
//!
//! One thread, the *owner*, does everything that changes the aggregate: a loop
//! over `poll` in [`aggregate`]. Each source of requests (signals, a `weft
//! stretch`, a daemon, a process) is a descriptor in that loop. No other thread
//! touches a process, so there are no locks.
//!
//! | room | holds |
//! | --- | --- |
//! | [`aggregate`] | the processes of an aggregate, and the loop |
//! | [`nodes`] | those other than home: started, linked, heard, ended, here or on other hosts |
//! | [`workload`] | what differs in that between a program and a machine |
//! | [`cause`], [`pulse`] | why a slice ended; whether it runs |
//! | [`signals`] | the launcher's own signals |
//! | [`program`] | a program: its plan, its owner |
//! | [`machine`] | a machine: its plan, its owner |

mod aggregate;
mod cause;
pub mod machine;
mod nodes;
mod program;
mod pulse;
mod signals;
mod workload;

pub use program::{ProgramOutcome, ProgramPlan, end_like, launch};
pub use signals::{SignalEvent, Signals, is_ignored};
