//! Hosts for a time, from a batch system: Slurm, Grid Engine, or a list of hosts.
//!
//! A job is one host, never several: ends, preemption and losses are then of one host. What a
//! batch system says of a job changes (a preempted job ends sooner), so all jobs are asked about
//! again and again, with one call for all of them. See `docs/malleable.md`.
//!
//! Each system is used through its own commands, without a shell, with a bound for each call.

mod command;
mod grid_engine;
mod job;
mod local;
mod slurm;

pub use command::CALL_BOUND;
pub use grid_engine::GridEngine;
pub use job::{Job, JobId, Wanted};
pub use local::{Local, LocalHost};
pub use slurm::Slurm;

use std::collections::BTreeMap;
use std::time::SystemTime;

/// What gives hosts for a time.
pub trait BatchSystem: Send {
    /// As a user writes it.
    fn name(&self) -> &'static str;

    /// Asks for one host. The job's program gets TERM, USR1 or USR2 before its end.
    fn ask(&self, wanted: &Wanted) -> Result<JobId, BatchError>;

    /// The state of each of these jobs. A job that the system does not know any more has ended.
    fn jobs(&self, ids: &[JobId]) -> Result<BTreeMap<JobId, Job>, BatchError>;

    /// The user's jobs that wait or run, with their names. By these a launcher finds the jobs of an
    /// earlier one that was killed before it knew their numbers.
    fn names(&self) -> Result<Vec<(String, JobId)>, BatchError>;

    /// Asks for a later end of a job that runs.
    fn extend(&self, id: &JobId, until: SystemTime) -> Result<(), BatchError>;

    /// Ends a job, whether it waits or runs. A job that has ended stays so.
    fn give_back(&self, id: &JobId) -> Result<(), BatchError>;
}

impl BatchError {
    /// Whether the same request would be answered so again, unless something changes at the site.
    pub fn is_lasting(&self) -> bool {
        matches!(
            self,
            BatchError::Missing { .. } | BatchError::Refused { .. }
        )
    }
}

/// Why a batch system did not do something. Each text is a sentence without its full stop.
#[derive(Debug, thiserror::Error)]
pub enum BatchError {
    #[error("{system} is not here: its command {command} is not in PATH")]
    Missing {
        system: &'static str,
        command: &'static str,
    },
    #[error("{system} does not answer: {said}; what runs goes on, and it is asked again")]
    Silent { system: &'static str, said: String },
    #[error("{system} refuses: {said}")]
    Refused { system: &'static str, said: String },
    #[error("{system} cannot extend a job that runs: ask for another host")]
    NoExtension { system: &'static str },
    #[error("the answer of {command} cannot be read: {said}")]
    Unreadable { command: &'static str, said: String },
    #[error("{what}: {error}")]
    System { what: String, error: std::io::Error },
}
