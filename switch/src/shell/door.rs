//! The socket that machines connect to, and those that cards of machines have beside it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::Path;

use weft_wire::listener::{ListenError, PrivateListener, connect_now};

use super::ShellError;
use crate::core::MACHINES_MAX;

pub struct Door(PrivateListener);

impl Door {
    /// Makes the socket. That of a switch that was killed is replaced.
    pub fn open(path: &Path) -> Result<Door, ShellError> {
        let path = path.to_path_buf();
        match PrivateListener::bind(&path) {
            Ok(listener) => Ok(Door(listener)),
            Err(ListenError::Served) => Err(ShellError::Taken { path }),
            Err(ListenError::System(source)) => Err(ShellError::Machines { path, source }),
        }
    }

    /// What becomes readable when a machine has connected.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// See [`PrivateListener::accept`].
    pub fn accept(&self) -> io::Result<Option<UnixStream>> {
        self.0.accept()
    }

    /// Connections to the cards that had one with a switch before. The sockets of those that
    /// have ended are removed.
    pub fn callers(&self) -> io::Result<Vec<UnixStream>> {
        let (Some(name), Some(directory)) = (self.0.path().file_name(), self.0.path().parent())
        else {
            return Ok(Vec::new());
        };
        let directory = match directory == Path::new("") {
            true => Path::new("."),
            false => directory,
        };
        let mut callers = Vec::new();
        for entry in directory.read_dir()? {
            let entry = entry?;
            if !entry.file_type().is_ok_and(|kind| kind.is_socket()) {
                continue;
            }
            let path = entry.path();
            let found = path.file_name().unwrap_or_default().as_bytes();
            if !is_card(found.strip_prefix(name.as_bytes()).unwrap_or_default()) {
                continue;
            }
            match connect_now(&path) {
                Ok(socket) if callers.len() < MACHINES_MAX => callers.push(socket),
                // Another process may have removed it by now.
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    drop(std::fs::remove_file(&path));
                }
                _ => {}
            }
        }
        Ok(callers)
    }
}

/// Whether what follows the switch's socket in a name makes it that of a card.
fn is_card(rest: &[u8]) -> bool {
    let is_digit = |byte: &u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    matches!(rest, [b'.', digits @ ..] if digits.len() == 16 && digits.iter().all(is_digit))
}
