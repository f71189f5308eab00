//! The folder of an agent: its keys, its run directory, and the mark by which what it starts ends
//! with it. Several agents on one host do not meet.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, bail};
use nix::fcntl::{Flock, FlockArg};
use nix::unistd::mkdtemp;
use weft_node::keeper::{self, KeeperId};

/// Set for the process that has entered its folder.
const FOLDER: &str = "WEFT_MPI_FOLDER";

/// How often the folder is removed at the end, until it is gone.
const TIDIES: u32 = 20;
const TIDY_AGAIN: Duration = Duration::from_millis(50);

/// A folder that is not locked and older than this is of an agent that was killed: one that starts
/// locks its own at once.
const ABANDONED_AFTER: Duration = Duration::from_secs(10);
const PREFIX: &str = "weft-mpi-";

pub struct Place {
    folder: PathBuf,
    /// Held for the agent's life.
    _lock: Flock<File>,
}

impl Place {
    /// Makes the folder, and becomes this program again with an environment that names it: the
    /// daemon's children have it from there, too.
    pub fn enter() -> anyhow::Result<Place> {
        if let Some(folder) = std::env::var_os(FOLDER) {
            let folder = PathBuf::from(folder);
            let lock =
                lock(&folder).with_context(|| format!("cannot lock {}", folder.display()))?;
            tidy_up();
            return Ok(Place {
                folder,
                _lock: lock,
            });
        }
        // Short: a socket's path has 107 bytes.
        let template = std::env::temp_dir().join(format!("{PREFIX}XXXXXX"));
        let folder = mkdtemp(&template)
            .with_context(|| format!("cannot make a folder {}", template.display()))?;
        let run = folder.join("run");
        fs::create_dir(&run).with_context(|| format!("cannot make {}", run.display()))?;
        let own_id = KeeperId::here().context("cannot find out this process's mark")?;
        let own = std::env::current_exe().context("cannot find this program")?;
        let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
        let error = Command::new(own)
            .args(arguments)
            .env(FOLDER, &folder)
            .env("XDG_RUNTIME_DIR", &run)
            .env("WEFT_CONFIG", folder.join("config"))
            // Machines end with this process, also those that come from other hosts.
            .env(keeper::VARIABLE, own_id.to_string())
            .exec();
        let _ = fs::remove_dir_all(&folder);
        bail!("cannot start this program again: {error}")
    }

    /// Of keys and `node.toml`.
    pub fn config(&self) -> PathBuf {
        self.folder.join("config")
    }

    /// Nothing of it is needed any more.
    pub fn leave(&self) {
        for _ in 0..TIDIES {
            match fs::remove_dir_all(&self.folder) {
                // A process that ends with this one may just write there.
                Err(error) if error.kind() != ErrorKind::NotFound => thread::sleep(TIDY_AGAIN),
                _ if !self.folder.exists() => return,
                _ => {}
            }
        }
    }
}

fn lock(folder: &Path) -> std::io::Result<Flock<File>> {
    let locked = Flock::lock(File::open(folder)?, FlockArg::LockExclusiveNonblock);
    locked.map_err(|(_, errno)| errno.into())
}

/// Removes what agents of this user have left here that were killed.
fn tidy_up() {
    let own = nix::unistd::geteuid().as_raw();
    for entry in fs::read_dir(std::env::temp_dir())
        .into_iter()
        .flatten()
        .flatten()
    {
        let is_folder = entry.file_name().to_string_lossy().starts_with(PREFIX);
        let is_abandoned = entry.metadata().is_ok_and(|status| {
            let age = status.modified().ok().and_then(|at| at.elapsed().ok());
            status.is_dir() && status.uid() == own && age > Some(ABANDONED_AFTER)
        });
        if is_folder && is_abandoned && lock(&entry.path()).is_ok() {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}
