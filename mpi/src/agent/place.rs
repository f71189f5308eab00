//! The folder of an agent: its keys, its run directory, and the mark by which what it starts ends
//! with it. Several agents on one host do not meet.

use std::ffi::OsString;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, bail};
use nix::unistd::mkdtemp;
use weft_node::keeper::{self, KeeperId};

/// Set for the process that has entered its folder.
const FOLDER: &str = "WEFT_MPI_FOLDER";

/// How often the folder is removed at the end, until it is gone.
const TIDIES: u32 = 20;
const TIDY_AGAIN: Duration = Duration::from_millis(50);

pub struct Place {
    folder: PathBuf,
}

impl Place {
    /// Makes the folder, and becomes this program again with an environment that names it: the
    /// daemon's children have it from there, too.
    pub fn enter() -> anyhow::Result<Place> {
        if let Some(folder) = std::env::var_os(FOLDER) {
            return Ok(Place {
                folder: folder.into(),
            });
        }
        // Short: a socket's path has 107 bytes.
        let template = std::env::temp_dir().join("weft-mpi-XXXXXX");
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
