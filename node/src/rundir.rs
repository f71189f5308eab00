//! The private directory where running aggregates can be found, and the
//! conversation with one of them: one JSON line each way over a UNIX socket.
//!
//! `$XDG_RUNTIME_DIR/weft`, else `/run/weft` for root, else `/tmp/weft-UID`.
//! The directory must belong to this user and be closed to all others: a process that
//! can connect to a socket in it can take memory from the program. The peer's
//! credentials are checked as well.

use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::report::AggregateView;

/// Longest request or answer, bytes: sixteen nodes with all their counters.
const LINE_BYTES_MAX: u64 = 256 << 10;
/// How long a launcher may take to accept a connection: it accepts at once, unless it is
/// stopped.
const CONNECT_BOUND: Duration = Duration::from_secs(2);
/// A launcher answers at once, unless it shrinks; then within its bound.
pub(crate) const ANSWER_BOUND: Duration = Duration::from_secs(2);
/// How long leaving a node may take: its pages have to go somewhere.
pub const SHRINK_BOUND: Duration = Duration::from_secs(60);
/// How long a client may take to say what it wants. The launcher waits for it.
const REQUEST_BOUND: Duration = Duration::from_millis(100);
/// How often an aggregate is asked that does not answer.
const ASKED_MAX: u32 = 3;

/// Why running aggregates cannot be found, or one of them not be asked.
#[derive(Debug, thiserror::Error)]
pub enum RunDirError {
    /// The directory cannot be made.
    #[error("cannot make the run directory {path}")]
    Make {
        /// The directory.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// Whether the directory is private cannot be told.
    #[error("cannot look at the run directory {path}")]
    Look {
        /// The directory.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// A file is in its place.
    #[error("the run directory {0} is not a directory: remove it")]
    NotADirectory(PathBuf),
    /// No socket fits in it.
    #[error(
        "the run directory {path} has {length} bytes, but the path of a UNIX socket in it has at \
         most {SOCKET_PATH_MAX}: set XDG_RUNTIME_DIR to a directory whose path is {} bytes \
         shorter",
        length - PATH_MAX
    )]
    TooLong {
        /// The directory.
        path: PathBuf,
        /// Of its path.
        length: usize,
    },
    /// Another user made it.
    #[error("the run directory {path} belongs to user {user}: remove it, or set XDG_RUNTIME_DIR")]
    Foreign {
        /// The directory.
        path: PathBuf,
        /// Its owner.
        user: u32,
    },
    /// Its permissions let others in.
    #[error("the run directory {0} is open to others: run `chmod 700 {0}`")]
    Open(PathBuf),
    /// It names no switch.
    #[error(
        "`{0}` is not the name of a switch: 1 to {SWITCH_NAME_MAX} letters, digits, `-` and `_`; \
         a path has a slash, as in ./{0}"
    )]
    SwitchName(String),
    /// The sockets of a switch and its cards do not fit.
    #[error(
        "the socket of a switch has at most {SWITCH_SOCKET_MAX} bytes in its path, and {path} has \
         {length}: use a shorter name, or a shorter XDG_RUNTIME_DIR"
    )]
    SwitchTooLong {
        /// The socket.
        path: PathBuf,
        /// Of its path.
        length: usize,
    },
    /// It cannot be listed.
    #[error("cannot read {path}")]
    List {
        /// The directory.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// No launcher has this number.
    #[error("no running aggregate has pid {0}: `weft list` shows those that run")]
    NoAggregate(u32),
    /// Its socket refuses.
    #[error("cannot connect to {path}")]
    Connect {
        /// The socket.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// It did not take the request, or gave no answer.
    #[error("aggregate {pid} did not answer")]
    Silent {
        /// Its launcher.
        pid: u32,
        /// What the kernel said.
        source: io::Error,
    },
}

/// What can be asked of a running aggregate.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AggregateRequest {
    /// What it is and how it is doing.
    View,
    /// Span its nodes now.
    Stretch,
    /// Give a node back.
    Shrink {
        /// Its number.
        node: u32,
    },
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AggregateReply {
    /// To [`AggregateRequest::View`].
    View(Box<AggregateView>),
    Done,
    /// Not done, and why.
    Refused(String),
}

/// Longest path of a UNIX socket, in bytes (`sun_path`, without its zero).
pub const SOCKET_PATH_MAX: usize = 107;
/// Longest path of a run directory, in bytes: a socket with a pid as its name fits in it.
const PATH_MAX: usize = SOCKET_PATH_MAX - "/4194304.sock".len();

/// Longest path of a switch's socket: there is room behind it for what names a card's own socket
/// beside it, `.` and 16 hexadecimal digits.
pub const SWITCH_SOCKET_MAX: usize = SOCKET_PATH_MAX - 17;
/// Longest name of a switch.
const SWITCH_NAME_MAX: usize = 32;

/// Where this host's switches are that have a name. It may not exist.
pub fn switches() -> PathBuf {
    path().join("switch")
}

/// The same directory, made and checked.
pub fn switches_directory() -> Result<PathBuf, RunDirError> {
    let path = directory()?.join("switch");
    prepare(&path).map(|()| path)
}

/// The socket of the switch called `name`, in a directory of switches.
///
/// # Errors
/// It is no name, or the path is too long.
pub fn switch_socket(switches: &Path, name: &str) -> Result<PathBuf, RunDirError> {
    if !is_switch_name(name) {
        return Err(RunDirError::SwitchName(name.to_owned()));
    }
    let path = switches.join(name);
    let length = path.as_os_str().len();
    match length <= SWITCH_SOCKET_MAX {
        true => Ok(path),
        false => Err(RunDirError::SwitchTooLong { path, length }),
    }
}

/// Whether a text can be the name of a switch.
pub fn is_switch_name(text: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    (1..=SWITCH_NAME_MAX).contains(&text.len()) && text.bytes().all(is_plain)
}

/// The directory, made and checked.
pub fn directory() -> Result<PathBuf, RunDirError> {
    let path = path();
    prepare(&path).map(|()| path)
}

/// The same directory, which may be missing, or another user's.
fn path() -> PathBuf {
    let user = nix::unistd::geteuid();
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").filter(|value| !value.is_empty());
    match runtime {
        Some(base) => Path::new(&base).join("weft"),
        None if user.is_root() => PathBuf::from("/run/weft"),
        None => std::env::temp_dir().join(format!("weft-{user}")),
    }
}

/// Makes the directory, or checks that the one that is there is private.
pub fn prepare(path: &Path) -> Result<(), RunDirError> {
    let path = path.to_path_buf();
    let length = path.as_os_str().len();
    if length > PATH_MAX {
        return Err(RunDirError::TooLong { path, length });
    }
    match fs::DirBuilder::new().mode(0o700).create(&path) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(source) => return Err(RunDirError::Make { path, source }),
    }
    let metadata = match fs::symlink_metadata(&path) {
        Ok(metadata) => metadata,
        Err(source) => return Err(RunDirError::Look { path, source }),
    };
    if !metadata.is_dir() {
        return Err(RunDirError::NotADirectory(path));
    }
    if metadata.uid() != nix::unistd::geteuid().as_raw() {
        let user = metadata.uid();
        return Err(RunDirError::Foreign { path, user });
    }
    if metadata.mode() & 0o077 != 0 {
        return Err(RunDirError::Open(path));
    }
    Ok(())
}

/// This launcher's socket; removed when dropped.
pub struct Entry {
    path: PathBuf,
    listener: UnixListener,
}

impl Entry {
    /// Makes the socket of the aggregate that process `pid` leads.
    pub fn new(directory: &Path, pid: u32) -> io::Result<Entry> {
        // A socket with our pid can only be left over from an earlier process.
        Entry::at(directory.join(format!("{pid}.sock")))
    }

    /// Makes a socket in the place of what is there.
    pub(crate) fn at(path: PathBuf) -> io::Result<Entry> {
        let _ = fs::remove_file(&path);
        let listener = UnixListener::bind(&path)?;
        listener.set_nonblocking(true)?;
        Ok(Entry { path, listener })
    }

    /// Readable when a client connects.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    /// The next client and its request; `None` when nobody waits or it said
    /// nothing sensible in time.
    pub fn accept<R: DeserializeOwned>(&self) -> Option<(R, Client)> {
        let (stream, _) = self.listener.accept().ok()?;
        let user = getsockopt(&stream, PeerCredentials).ok()?.uid();
        if user != nix::unistd::geteuid().as_raw() && user != 0 {
            return None;
        }
        stream.set_nonblocking(false).ok()?;
        stream.set_read_timeout(Some(REQUEST_BOUND)).ok()?;
        stream.set_write_timeout(Some(REQUEST_BOUND)).ok()?;
        let request = read_line(&stream).ok()?;
        Some((request, Client { stream }))
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Somebody who waits for an answer.
pub struct Client {
    stream: UnixStream,
}

impl Client {
    /// Answers. A client that has gone is no concern of the aggregate's.
    pub fn answer(mut self, answer: &impl Serialize) {
        let _ = write_line(&mut self.stream, answer);
    }
}

/// Connects to a socket of the directory, within a bound.
///
/// # Errors
/// See [`weft_wire::socket::connect_unix`].
pub fn connect(path: &Path) -> io::Result<UnixStream> {
    weft_wire::socket::connect_unix(path, CONNECT_BOUND)
}

/// Asks the aggregate of `pid`.
pub fn ask(
    directory: &Path,
    pid: u32,
    request: &AggregateRequest,
) -> Result<AggregateReply, RunDirError> {
    let path = directory.join(format!("{pid}.sock"));
    let mut stream = connect(&path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => RunDirError::NoAggregate(pid),
        _ => RunDirError::Connect {
            path: path.clone(),
            source: error,
        },
    })?;
    let bound = match request {
        AggregateRequest::Shrink { .. } => SHRINK_BOUND + ANSWER_BOUND,
        _ => ANSWER_BOUND,
    };
    converse(&mut stream, request, bound).map_err(|source| RunDirError::Silent { pid, source })
}

/// Says something, and hears the answer within `bound`.
pub(crate) fn converse<Q: Serialize, A: DeserializeOwned>(
    stream: &mut UnixStream,
    request: &Q,
    bound: Duration,
) -> io::Result<A> {
    stream.set_read_timeout(Some(bound))?;
    stream.set_write_timeout(Some(bound))?;
    write_line(stream, request)?;
    read_line(stream)
}

/// Aggregates that run.
#[derive(Debug, Default)]
pub struct Listed {
    pub views: Vec<AggregateView>,
    /// The pids of those that run and do not answer.
    pub silent: Vec<u32>,
}

/// Every aggregate. Sockets that nobody listens on are removed.
pub fn list(directory: &Path) -> Result<Listed, RunDirError> {
    let entries = fs::read_dir(directory).map_err(|source| RunDirError::List {
        path: directory.to_path_buf(),
        source,
    })?;
    let mut listed = Listed::default();
    for entry in entries.flatten() {
        let path = entry.path();
        let pid = path
            .file_name()
            .and_then(|name| name.to_str()?.strip_suffix(".sock")?.parse::<u32>().ok());
        let Some(pid) = pid else { continue };
        match ask_again(directory, pid) {
            Ok(AggregateReply::View(view)) => listed.views.push(*view),
            Err(RunDirError::Silent { .. }) => listed.silent.push(pid),
            // A launcher that is just starting has a socket that does not listen
            // yet: only those of the dead are removed.
            _ if !Path::new(&format!("/proc/{pid}")).exists()
                && connect(&path)
                    .is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused) =>
            {
                let _ = fs::remove_file(&path);
            }
            _ => {}
        }
    }
    listed.views.sort_by_key(|view| view.pid);
    Ok(listed)
}

/// An aggregate waits for a request for moments only. On a busy host it may have ended the wait
/// before this process could send, so it is asked more than once.
fn ask_again(directory: &Path, pid: u32) -> Result<AggregateReply, RunDirError> {
    let mut asked = ask(directory, pid, &AggregateRequest::View);
    for _ in 1..ASKED_MAX {
        if !matches!(asked, Err(RunDirError::Silent { .. })) {
            break;
        }
        asked = ask(directory, pid, &AggregateRequest::View);
    }
    asked
}

fn read_line<T: DeserializeOwned>(stream: &UnixStream) -> io::Result<T> {
    let mut line = String::new();
    BufReader::new(stream.take(LINE_BYTES_MAX)).read_line(&mut line)?;
    if line.is_empty() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(serde_json::from_str(&line)?)
}

fn write_line<T: Serialize>(stream: &mut UnixStream, value: &T) -> io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    stream.write_all(&line)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn scratch(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("weft-run-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        path
    }

    #[test]
    fn a_directory_open_to_others_is_refused() {
        let path = scratch("open");
        prepare(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o700);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        let error = prepare(&path).unwrap_err();
        assert!(matches!(error, RunDirError::Open(_)), "{error}");
        fs::remove_dir_all(&path).unwrap();
    }

    #[test]
    fn a_directory_whose_sockets_would_not_fit_is_refused() {
        let of_length = |length: usize| {
            let path = scratch("long").display().to_string();
            PathBuf::from(format!("{path:x<length$}"))
        };
        let fits = of_length(PATH_MAX);
        prepare(&fits).unwrap();
        drop(Entry::new(&fits, 4_194_304).unwrap());
        fs::remove_dir(&fits).unwrap();
        let long = of_length(PATH_MAX + 3);
        let error = prepare(&long).unwrap_err().to_string();
        assert!(error.contains(long.to_str().unwrap()), "{error}");
        assert!(
            error.contains("at most 107") && error.contains("3 bytes shorter"),
            "{error}"
        );
        assert!(!long.exists());
    }

    #[test]
    fn a_switch_has_a_name_that_fits() {
        let directory = Path::new("/run/user/1000/weft/switch");
        let socket = |name: &str| switch_socket(directory, name);
        assert_eq!(socket("mpi_0-a").unwrap(), directory.join("mpi_0-a"));
        socket(&"n".repeat(SWITCH_NAME_MAX)).unwrap();
        for name in ["", ".", "..", "a/b", "a.sock", "a b", &"n".repeat(33)] {
            let error = socket(name).unwrap_err().to_string();
            assert!(error.contains("1 to 32 letters"), "{error}");
        }
        let long = PathBuf::from(format!("/{}", "d".repeat(SWITCH_SOCKET_MAX - 3)));
        switch_socket(&long, "n").unwrap();
        let error = switch_socket(&long, "nn").unwrap_err().to_string();
        assert!(
            error.contains("has 91") && error.contains("at most 90"),
            "{error}"
        );
    }

    #[test]
    fn a_request_is_answered() {
        let path = scratch("answer");
        prepare(&path).unwrap();
        let entry = Entry::new(&path, 1).unwrap();
        let directory = path.clone();
        let client =
            std::thread::spawn(move || ask(&directory, 1, &AggregateRequest::Shrink { node: 2 }));
        crate::sys::wait_readable(&[entry.descriptor()], Duration::from_secs(5)).unwrap();
        let (request, client_end) = entry.accept::<AggregateRequest>().unwrap();
        assert_eq!(request, AggregateRequest::Shrink { node: 2 });
        client_end.answer(&AggregateReply::Refused("busy".into()));
        let answer = client.join().unwrap().unwrap();
        assert!(matches!(answer, AggregateReply::Refused(why) if why == "busy"));
        drop(entry);
        assert!(
            ask(&path, 1, &AggregateRequest::View)
                .unwrap_err()
                .to_string()
                .contains("weft list")
        );
        fs::remove_dir_all(&path).unwrap();
    }

    #[test]
    fn leftovers_are_removed() {
        let path = scratch("left");
        prepare(&path).unwrap();
        drop(UnixListener::bind(path.join("4194999.sock")).unwrap());
        assert!(list(&path).unwrap().views.is_empty());
        assert!(!path.join("4194999.sock").exists());
        fs::remove_dir_all(&path).unwrap();
    }
}
