//! Why a process that was started did not get ready.

use std::io;
use std::time::Duration;

use super::{Ended, Process};

/// Each message is the end of a sentence that starts with the process: "the runtime of …".
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// It sent its reason.
    #[error("failed: {0}")]
    Failed(String),
    /// A machine's node sent its reason.
    #[error("cannot be made: {0}")]
    Refused(String),
    /// It speaks, but another language.
    #[error("sent unexpected message {0}")]
    Unexpected(u32),
    /// It was built from other sources than this process.
    #[error("is of version {theirs}, this launcher of version {ours}: install both from one build")]
    Version {
        /// What it said.
        theirs: u64,
        /// What was expected.
        ours: u32,
    },
    /// It took no packet.
    #[error("did not take its settings: {0}")]
    Settings(io::Error),
    /// It closed its control socket.
    #[error("ended at start: it {0}")]
    Ended(Ended),
    /// The kernel refused to wait for it.
    #[error("cannot be waited for: {0}")]
    Wait(io::Error),
    /// It said nothing.
    #[error("did not answer within {} s", .0.as_secs_f32())]
    Timeout(Duration),
}

impl StartError {
    /// Of a process that has closed its control socket, and ends.
    pub(crate) fn of(process: &mut Process) -> StartError {
        match process.end_within(Duration::from_secs(1)) {
            Ok(ended) => StartError::Ended(ended),
            Err(error) => StartError::Wait(error),
        }
    }
}
