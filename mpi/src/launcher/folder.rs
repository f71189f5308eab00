//! The files of a cluster: in the state folder what outlives the launcher, in the run directory
//! its sockets.

use std::fs::{self, DirBuilder, File};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use weft_node::rundir;

/// How long to wait for another launcher's end.
const LOCK_MAX: Duration = Duration::from_secs(1);
const LOCK_AGAIN: Duration = Duration::from_millis(50);
/// Longest name of a cluster.
const NAME_MAX: usize = 32;

/// Of one cluster.
#[derive(Clone, Debug)]
pub struct Folder {
    name: String,
    state: PathBuf,
    run: PathBuf,
}

/// `$XDG_STATE_HOME/weft/mpi`, else `~/.local/state/weft/mpi`.
pub fn base() -> anyhow::Result<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    let state = match (variable("XDG_STATE_HOME"), variable("HOME")) {
        (Some(state), _) => PathBuf::from(state),
        (None, Some(home)) => Path::new(&home).join(".local/state"),
        (None, None) => bail!("neither XDG_STATE_HOME nor HOME is set: set one to a folder"),
    };
    Ok(state.join("weft/mpi"))
}

/// The names of all clusters of this user.
pub fn names() -> anyhow::Result<Vec<String>> {
    let base = base()?;
    let entries = match fs::read_dir(&base) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", base.display())),
    };
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut names: Vec<String> = names.collect();
    names.sort();
    Ok(names)
}

impl Folder {
    /// Of the cluster of that name, which may not exist yet.
    pub fn of(name: &str) -> anyhow::Result<Folder> {
        let letters = name
            .chars()
            .all(|letter| letter.is_ascii_alphanumeric() || "-_".contains(letter));
        ensure!(
            letters && name.starts_with(|letter: char| letter.is_ascii_alphabetic()),
            "`{name}` is no name of a cluster: use letters, digits, - and _, a letter first"
        );
        ensure!(
            name.len() <= NAME_MAX,
            "`{name}` is longer than {NAME_MAX} letters"
        );
        let run = rundir::directory()?.join("mpi");
        rundir::prepare(&run)?;
        Ok(Folder {
            name: name.to_owned(),
            state: base()?.join(name),
            run,
        })
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Makes the state folder of a new cluster.
    pub fn make(&self) -> anyhow::Result<()> {
        let base = base()?;
        let make = |path: &Path, recursive| {
            let mut builder = DirBuilder::new();
            builder.mode(0o700).recursive(recursive).create(path)
        };
        make(&base, true).with_context(|| format!("cannot make {}", base.display()))?;
        match make(&self.state, false) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => bail!(
                "there is a cluster {name}: `weft mpi attach {name}` goes on with it, `weft mpi \
                 forget {name}` removes what is left of it",
                name = self.name
            ),
            Err(error) => {
                Err(error).with_context(|| format!("cannot make {}", self.state.display()))
            }
        }
    }

    /// One launcher has the cluster at a time.
    pub fn lock(&self) -> anyhow::Result<Flock<File>> {
        let file = File::open(&self.state).with_context(|| {
            format!(
                "there is no cluster {}: {}",
                self.name,
                self.state.display()
            )
        })?;
        let begun = Instant::now();
        let mut file = file;
        loop {
            let errno = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => return Ok(lock),
                Err((unlocked, errno)) => {
                    file = unlocked;
                    errno
                }
            };
            if errno != Errno::EWOULDBLOCK {
                bail!("cannot lock {}: {errno}", self.state.display());
            }
            // One that was just killed may not have gone yet.
            if begun.elapsed() > LOCK_MAX {
                bail!(
                    "a launcher has the cluster {name} already: `weft mpi status {name}`",
                    name = self.name
                );
            }
            thread::sleep(LOCK_AGAIN);
        }
    }

    /// Removes the state folder.
    pub fn remove(&self) -> anyhow::Result<()> {
        fs::remove_dir_all(&self.state)
            .with_context(|| format!("cannot remove {}", self.state.display()))
    }

    /// A file of the state folder.
    pub fn file(&self, name: &str) -> PathBuf {
        self.state.join(name)
    }

    /// Whether there was a job.
    pub fn has_logs(&self) -> bool {
        let entries = fs::read_dir(&self.state).into_iter().flatten().flatten();
        let mut names = entries.map(|entry| entry.file_name());
        names.any(|name| name.to_string_lossy().ends_with(".log") && name != "switch.log")
    }

    fn socket(&self, kind: &str) -> PathBuf {
        self.run.join(format!("{}.{kind}", self.name))
    }

    /// Where the launcher answers its user.
    pub fn requests(&self) -> PathBuf {
        self.socket("sock")
    }

    /// Of the switch on the launcher's host.
    pub fn switch(&self) -> PathBuf {
        self.socket("switch")
    }

    pub fn gateway(&self) -> PathBuf {
        self.socket("gateway")
    }
}
