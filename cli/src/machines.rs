//! Where the machines of this user are found.

use std::path::{Path, PathBuf};

use weft_node::rundir::{self, RunDirError};

/// What the name of an API's socket ends with.
pub const API: &str = "sock";

/// The directory, made and checked.
pub fn directory() -> Result<PathBuf, RunDirError> {
    let path = rundir::directory()?.join("vm");
    rundir::prepare(&path)?;
    Ok(path)
}

/// The socket of the API of the machine called `name`.
pub fn api_path(directory: &Path, name: &str) -> PathBuf {
    directory.join(format!("{name}.{API}"))
}
