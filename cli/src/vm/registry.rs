//! Where machines are found: `vm` in the run directory, one socket each.
//!
//! | file | is |
//! | --- | --- |
//! | `NAME.sock` | the API; with `--api PATH` a link to that |
//! | `NAME.console` | the console, with `--console socket` |
//!
//! Invariant: names are taken and given back, and what gone machines left is
//! removed, with the directory locked (flock): a socket there at which nobody
//! listens is a leftover, and not one that is just being made.

use std::fs::{self, File};
use std::io;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::fcntl::{Flock, FlockArg};
use nix::sys::stat::{Mode, umask};
use weft_api::State;
use weft_api::client::Client;
use weft_node::rundir::{self, SOCKET_PATH_MAX};

use crate::machines::API;
pub use crate::machines::{api_path, directory};

use super::error::VmError;
use super::plan::Plan;
use super::suboptions::ConsoleArg;

/// How long a machine may take to say what it is: it answers at once, unless
/// something long is asked of it at the same time.
pub const VIEW_BOUND: Duration = Duration::from_secs(2);
/// How long a machine that has ended may keep its name.
const END_BOUND: Duration = Duration::from_secs(5);
/// Between two looks at it.
const LOOK: Duration = Duration::from_millis(20);

/// Every machine's name and the socket of its API, whether it answers or not.
pub fn machines(directory: &Path) -> io::Result<Vec<(String, PathBuf)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)?.flatten() {
        let path = entry.path();
        let is_api = path.extension().is_some_and(|extension| extension == API);
        if let (true, Some(name)) = (is_api, path.file_stem().and_then(|name| name.to_str())) {
            found.push((name.to_owned(), path.clone()));
        }
    }
    found.sort();
    Ok(found)
}

/// Whether a process listens at a socket, even if it accepts no connection at the moment.
pub fn answers(path: &Path) -> bool {
    match rundir::connect(path) {
        Ok(_) => true,
        Err(error) => error.kind() == io::ErrorKind::TimedOut,
    }
}

/// Whether a machine has the name of this API. Waits for one that has ended and still has its
/// sockets: `weft vm stop` returns before its processes have ended.
pub fn is_taken(api: &Path) -> bool {
    let has_ended = || match Client::new(api).view(VIEW_BOUND) {
        Ok(view) => view.state == State::Ended,
        Err(error) => error.has_ended(),
    };
    let deadline = Instant::now() + END_BOUND;
    while answers(api) {
        if !has_ended() || Instant::now() > deadline {
            return true;
        }
        std::thread::sleep(LOOK);
    }
    false
}

/// The lock of the directory, held while names change; until dropped.
pub fn lock(directory: &Path) -> io::Result<Flock<File>> {
    let directory = File::open(directory)?;
    Flock::lock(directory, FlockArg::LockExclusive).map_err(|(_, error)| error.into())
}

/// The sockets of one machine; removed when dropped.
pub struct Registration {
    pub api: UnixListener,
    /// Of the console, unless it is on standard input and output.
    pub console: Option<(UnixListener, PathBuf)>,
    made: Vec<PathBuf>,
    directory: PathBuf,
}

impl Registration {
    /// Makes the sockets that the plan asks for, in this process alone.
    pub fn claim(plan: &Plan) -> Result<Registration, VmError> {
        let directory = directory()?;
        if is_taken(&api_path(&directory, &plan.name)) {
            return Err(VmError::NameTaken(plan.name.clone()));
        }
        Self::claim_in(directory, &plan.name, plan.api.as_deref(), &plan.console)
    }

    fn claim_in(
        directory: PathBuf,
        name: &str,
        api: Option<&Path>,
        console: &ConsoleArg,
    ) -> Result<Registration, VmError> {
        let _locked = lock(&directory).map_err(VmError::system("lock the run directory"))?;
        let own = api_path(&directory, name);
        if answers(&own) {
            return Err(VmError::NameTaken(name.to_owned()));
        }
        // What is left over from a machine that is gone.
        let _ = fs::remove_file(&own);
        let mut made = Removed(Vec::new());
        let api = match api {
            None => listen("--name", &own, &mut made)?,
            Some(path) => {
                let listener = listen("--api", path, &mut made)?;
                let whole = std::path::absolute(path).map_err(VmError::system("find --api"))?;
                std::os::unix::fs::symlink(whole, &own)
                    .map_err(VmError::system("link to the API's socket"))?;
                made.0.push(own);
                listener
            }
        };
        let console = match console {
            ConsoleArg::Stdio => None,
            ConsoleArg::Socket(path) => {
                let default = directory.join(format!("{name}.console"));
                let is_own = path.is_none();
                let path = path.clone().unwrap_or(default);
                if is_own {
                    // The name is ours, so nobody else's console is there.
                    let _ = fs::remove_file(&path);
                }
                let listener = listen("--console socket", &path, &mut made)?;
                let whole = std::path::absolute(&path);
                Some((listener, whole.map_err(VmError::system("find --console"))?))
            }
        };
        Ok(Registration {
            api,
            console,
            made: std::mem::take(&mut made.0),
            directory,
        })
    }
}

impl Registration {
    /// Files that are removed with it.
    pub fn files(&self) -> Vec<PathBuf> {
        self.made.clone()
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // Without the lock it is removed as well.
        let _locked = lock(&self.directory);
        remove(&self.made);
    }
}

/// Removes what was made when the rest could not be.
struct Removed(Vec<PathBuf>);

impl Drop for Removed {
    fn drop(&mut self) {
        remove(&self.0);
    }
}

fn remove(paths: &[PathBuf]) {
    for path in paths {
        let _ = fs::remove_file(path);
    }
}

/// A socket that only this user may connect to.
fn listen(option: &'static str, path: &Path, made: &mut Removed) -> Result<UnixListener, VmError> {
    let taken = |what: String| VmError::SocketTaken {
        option,
        path: path.to_owned(),
        what,
    };
    let length = path.as_os_str().len();
    if length > SOCKET_PATH_MAX {
        let what = format!(
            "a socket's path has at most {SOCKET_PATH_MAX} bytes, this one has {length}: \
             use a shorter one, or a shorter XDG_RUNTIME_DIR"
        );
        return Err(taken(what));
    }
    let before = umask(Mode::from_bits_truncate(0o177));
    let bound = UnixListener::bind(path);
    umask(before);
    match bound {
        Ok(listener) => {
            made.0.push(path.to_owned());
            Ok(listener)
        }
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => Err(taken(match answers(path) {
            true => "another process listens there: choose another path".into(),
            false => "a file exists there: remove it, or choose another path".into(),
        })),
        Err(source) => Err(VmError::Socket {
            option,
            path: path.to_owned(),
            source,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_name_is_one_machines_whoever_asks_at_once() {
        let directory = std::env::temp_dir().join(format!("weft-names-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let own = api_path(&directory, "one");
        for round in 0..100 {
            // What a machine that was killed leaves.
            drop(UnixListener::bind(&own).unwrap());
            let together = std::sync::Barrier::new(4);
            let claim = || {
                together.wait();
                Registration::claim_in(directory.clone(), "one", None, &ConsoleArg::Socket(None))
            };
            let claims: Vec<_> = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..4).map(|_| scope.spawn(claim)).collect();
                threads
                    .into_iter()
                    .map(|thread| thread.join().unwrap())
                    .collect()
            });
            let taken = claims.iter().filter(|claim| claim.is_ok()).count();
            assert_eq!(taken, 1, "round {round}");
            assert!(answers(&own));
            drop(claims);
            assert!(!own.exists());
        }
        fs::remove_dir(&directory).unwrap();
    }

    #[test]
    fn a_socket_is_private_and_taken_once() {
        let directory = std::env::temp_dir().join(format!("weft-registry-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let path = directory.join("one");
        let mut made = Removed(Vec::new());
        let listener = listen("--api", &path, &mut made).unwrap();
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let again = listen("--api", &path, &mut Removed(Vec::new()));
        assert!(again.unwrap_err().to_string().contains("another process"));
        drop(listener);
        let again = listen("--api", &path, &mut Removed(Vec::new()));
        assert!(again.unwrap_err().to_string().contains("remove it"));
        let long = directory.join("x".repeat(SOCKET_PATH_MAX));
        let long = listen("--api", &long, &mut Removed(Vec::new()));
        assert!(long.unwrap_err().to_string().contains("at most 107"));
        drop(made);
        assert!(!path.exists());
        fs::remove_dir(&directory).unwrap();
    }
}
