//! What a daemon lends, asked and changed while it runs: one JSON line each way over a UNIX
//! socket in the directory of its configuration.

use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::rundir;

/// The socket's name, beside `node.toml`.
const SOCKET: &str = "node.sock";

/// What is to change. Nothing: only tell.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LendRequest {
    /// Most memory that slices may hold together from now on.
    pub memory_bytes: Option<u64>,
    /// The host's memory that stays free for its owner from now on; 0: none.
    pub keep_free_bytes: Option<u64>,
}

/// What a daemon lends now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LendState {
    /// What its owner lets it lend.
    pub memory_bytes: u64,
    /// The host's memory that stays free.
    pub keep_free_bytes: u64,
    /// What it lends now: less than its owner lets it if the host has less free.
    pub lends_bytes: u64,
    /// What its slices may hold now.
    pub lent_bytes: u64,
    /// What of that has to leave: beyond what its owner lets it lend, or what the host lacks and
    /// slices hold.
    pub excess_bytes: u64,
    pub slices: u32,
}

/// Why a daemon could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum LendError {
    #[error(
        "no daemon runs with this configuration: nothing listens at {0}; `weft node start` starts \
         one, and `memory` and `keep_free` in node.toml say what it lends from its start on"
    )]
    NoDaemon(PathBuf),
    #[error("the daemon at {path} does not answer")]
    Silent { path: PathBuf, source: io::Error },
}

/// The socket of the daemon with this configuration.
pub(crate) fn socket(directory: &Path) -> PathBuf {
    directory.join(SOCKET)
}

/// Asks the daemon with this configuration.
///
/// # Errors
/// None runs, or it does not answer within two seconds.
pub fn ask(directory: &Path, request: &LendRequest) -> Result<LendState, LendError> {
    let path = socket(directory);
    let silent = |source: io::Error| match source.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
            LendError::NoDaemon(path.clone())
        }
        _ => LendError::Silent {
            path: path.clone(),
            source,
        },
    };
    let mut stream = rundir::connect(&path).map_err(silent)?;
    rundir::converse(&mut stream, request, rundir::ANSWER_BOUND).map_err(silent)
}
