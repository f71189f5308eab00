//! A console at a UNIX socket: one client at a time, and a scrollback for the next.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use nix::unistd::Uid;

/// Bytes of output that are kept for the next client.
pub const SCROLLBACK_BYTES: usize = 64 << 10;
/// Most bytes that wait for a client. A client that reads more slowly is disconnected; when it
/// attaches again the scrollback has the last of its output.
const BACKLOG_BYTES_MAX: usize = 256 << 10;

/// The listening socket, with the client that is attached.
pub(super) struct Socket {
    listener: UnixListener,
    /// The users besides root that may attach.
    owners: Vec<Uid>,
    client: Option<Client>,
    scrollback: VecDeque<u8>,
}

struct Client {
    stream: UnixStream,
    backlog: VecDeque<u8>,
}

impl Socket {
    pub(super) fn new(listener: UnixListener, owners: Vec<Uid>) -> io::Result<Socket> {
        listener.set_nonblocking(true)?;
        Ok(Socket {
            listener,
            owners,
            client: None,
            scrollback: VecDeque::new(),
        })
    }

    pub(super) fn listener(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    /// The client's descriptor, and whether output waits for it.
    pub(super) fn client(&self) -> Option<(BorrowedFd<'_>, bool)> {
        let client = self.client.as_ref()?;
        Some((client.stream.as_fd(), !client.backlog.is_empty()))
    }

    /// Accepts a client, or refuses it with a message.
    pub(super) fn accept(&mut self) {
        let Ok((mut stream, _)) = self.listener.accept() else {
            return;
        };
        if stream.set_nonblocking(true).is_err() || !self.is_owner(&stream) {
            return;
        }
        if self.client.is_some() {
            let _ = stream.write_all(b"weft: another client is attached to this console\r\n");
            return;
        }
        self.client = Some(Client {
            stream,
            backlog: self.scrollback.clone(),
        });
        self.flush();
    }

    fn is_owner(&self, stream: &UnixStream) -> bool {
        getsockopt(stream, PeerCredentials).is_ok_and(|peer| {
            let user = Uid::from_raw(peer.uid());
            user.is_root() || self.owners.contains(&user)
        })
    }

    /// Takes output of the guest.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.scrollback.extend(bytes);
        let old = self.scrollback.len().saturating_sub(SCROLLBACK_BYTES);
        self.scrollback.drain(..old);
        if let Some(client) = &mut self.client {
            client.backlog.extend(bytes);
        }
        self.flush();
    }

    /// Writes to the client without blocking; disconnects it if it reads too slowly.
    pub(super) fn flush(&mut self) {
        let Some(client) = &mut self.client else {
            return;
        };
        if !client.flush() || client.backlog.len() > BACKLOG_BYTES_MAX {
            self.client = None;
        }
    }

    /// Reads what the client typed; 0 if it typed nothing or has gone.
    pub(super) fn read(&mut self, buffer: &mut [u8]) -> usize {
        let Some(client) = &mut self.client else {
            return 0;
        };
        match client.stream.read(buffer) {
            Ok(count @ 1..) => count,
            Err(error) if is_temporary(&error) => 0,
            Ok(_) | Err(_) => {
                self.client = None;
                0
            }
        }
    }
}

impl Client {
    /// Writes without blocking; `false` if the client has gone.
    fn flush(&mut self) -> bool {
        while !self.backlog.is_empty() {
            match self.stream.write(self.backlog.as_slices().0) {
                Ok(count @ 1..) => drop(self.backlog.drain(..count)),
                Err(error) if is_temporary(&error) => return true,
                Ok(_) | Err(_) => return false,
            }
        }
        true
    }
}

fn is_temporary(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}
