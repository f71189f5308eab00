//! A UNIX socket that serves one user.

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, fchmod};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};

/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;
const FLAGS: SocketFlags = SocketFlags::NONBLOCK.union(SocketFlags::CLOEXEC);

/// A socket whose file only its user may open, and which goes with it. It never blocks.
#[derive(Debug)]
pub struct PrivateListener {
    listener: UnixListener,
    path: PathBuf,
}

/// Why a socket cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Another process listens there.
    #[error("another process listens there")]
    Served,
    /// The kernel refuses it: the directory is missing, the path too long, a file has its name.
    #[error(transparent)]
    System(#[from] io::Error),
}

impl PrivateListener {
    /// Makes the socket. That of a process that was killed is replaced; a file of another kind
    /// stays.
    ///
    /// # Errors
    /// See [`ListenError`].
    pub fn bind(path: &Path) -> Result<PrivateListener, ListenError> {
        let is_socket = path
            .symlink_metadata()
            .is_ok_and(|file| file.file_type().is_socket());
        if is_socket {
            match connect_now(path) {
                Ok(_) => return Err(ListenError::Served),
                Err(error) => match error.kind() {
                    ErrorKind::ConnectionRefused => std::fs::remove_file(path)?,
                    ErrorKind::WouldBlock => return Err(ListenError::Served),
                    _ => return Err(error.into()),
                },
            }
        }
        let listener = PrivateListener {
            listener: private(path)?,
            path: path.to_path_buf(),
        };
        listen(&listener.listener, BACKLOG).map_err(io::Error::from)?;
        Ok(listener)
    }

    /// Its file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The next connection, if one waits. Its other end may be any user who reached the socket
    /// before: see [`check_peer`](crate::socket::check_peer).
    ///
    /// # Errors
    /// The kernel's: out of descriptors, for example.
    pub fn accept(&self) -> io::Result<Option<UnixStream>> {
        match self.listener.accept() {
            Ok((stream, _)) => Ok(Some(stream)),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl AsFd for PrivateListener {
    /// Readable when a connection waits.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Drop for PrivateListener {
    fn drop(&mut self) {
        // It may have been removed by hand.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// A bound socket. Its file gets the socket's mode: it is private from its first moment.
fn private(path: &Path) -> io::Result<UnixListener> {
    let made = socket_with(AddressFamily::UNIX, SocketType::STREAM, FLAGS, None)?;
    fchmod(&made, Mode::RUSR | Mode::WUSR)?;
    bind(&made, &SocketAddrUnix::new(path)?)?;
    Ok(made.into())
}

/// Connects to a UNIX socket without waiting. The stream does not block.
///
/// # Errors
/// [`ErrorKind::ConnectionRefused`] if no process listens there, [`ErrorKind::WouldBlock`] if its
/// backlog is full.
pub fn connect_now(path: &Path) -> io::Result<UnixStream> {
    let stream = socket_with(AddressFamily::UNIX, SocketType::STREAM, FLAGS, None)?;
    connect(&stream, &SocketAddrUnix::new(path)?)?;
    Ok(stream.into())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn one_process_has_a_socket_and_its_file_goes_with_it() {
        let folder = std::env::temp_dir().join(format!("weft-listener-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("socket");
        // What a process that was killed leaves.
        drop(UnixListener::bind(&path).unwrap());
        let refused = connect_now(&path).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);

        let listener = PrivateListener::bind(&path).unwrap();
        let mode = path.metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert!(listener.accept().unwrap().is_none());
        let served = PrivateListener::bind(&path).unwrap_err();
        assert!(matches!(served, ListenError::Served), "{served}");
        assert!(path.exists(), "the socket that is served was removed");
        let _client = connect_now(&path).unwrap();
        // The attempt to take the socket came first, and has ended.
        assert!(listener.accept().unwrap().is_some());
        assert!(listener.accept().unwrap().is_some());

        drop(listener);
        assert!(!path.exists());
        std::fs::write(&path, "a file of the user's").unwrap();
        let error = PrivateListener::bind(&path).unwrap_err();
        assert!(matches!(error, ListenError::System(_)), "{error}");
        assert!(path.exists(), "a file that is no socket was removed");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
