//! The socket for clients: a file that only its user may open, and that goes with the gateway.

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, connect, listen, socket,
};
use nix::sys::stat::{Mode, fchmod};
use weft_wire::socket::check_peer;

use crate::GatewayError;

/// Connections that wait for the gateway: more than it serves at once.
const BACKLOG: i32 = 128;
/// Connections that are accepted in one round.
const ACCEPTED: usize = 16;
/// How long none is accepted after that failed: out of descriptors, for example.
const REST: Duration = Duration::from_millis(200);

/// A listener, and its file.
pub struct Door {
    listener: UnixListener,
    path: PathBuf,
    /// No connection is accepted before.
    pub rests_until: Option<Instant>,
}

impl Door {
    /// Makes the socket. That of a gateway that was killed is replaced.
    pub fn open(path: &Path) -> Result<Door, GatewayError> {
        let failed = |source| GatewayError::Listen {
            path: path.to_path_buf(),
            source,
        };
        let is_socket = path
            .symlink_metadata()
            .is_ok_and(|file| file.file_type().is_socket());
        if is_socket {
            match is_served(path) {
                Ok(false) => std::fs::remove_file(path).map_err(failed)?,
                Ok(true) => return Err(GatewayError::Taken(path.to_path_buf())),
                Err(error) => return Err(failed(error.into())),
            }
        }
        Ok(Door {
            listener: private_listener(path).map_err(failed)?,
            path: path.to_path_buf(),
            rests_until: None,
        })
    }

    /// What becomes readable when a client has connected.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    /// Clients of the same user that have connected. Others are turned away without a word.
    pub fn accept(&mut self, now: Instant) -> Vec<UnixStream> {
        let mut clients = Vec::new();
        for _ in 0..ACCEPTED {
            match self.listener.accept() {
                Ok((client, _)) => {
                    if check_peer(&client).is_ok() && client.set_nonblocking(true).is_ok() {
                        clients.push(client);
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => {
                    self.rests_until = Some(now + REST);
                    break;
                }
            }
        }
        clients
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        // It may have been removed by hand.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Whether a process listens there.
fn is_served(path: &Path) -> nix::Result<bool> {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let probe = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    match connect(probe.as_raw_fd(), &UnixAddr::new(path)?) {
        Ok(()) | Err(nix::Error::EAGAIN) => Ok(true),
        Err(nix::Error::ECONNREFUSED) => Ok(false),
        Err(error) => Err(error),
    }
}

/// A socket for its user only, from its first moment: the file gets the mode of the socket.
fn private_listener(path: &Path) -> io::Result<UnixListener> {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let made = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    fchmod(&made, Mode::S_IRUSR | Mode::S_IWUSR)?;
    bind(made.as_raw_fd(), &UnixAddr::new(path)?)?;
    listen(&made, Backlog::new(BACKLOG)?)?;
    Ok(made.into())
}
