//! The socket for clients of the same user.

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use weft_wire::listener::{ListenError, PrivateListener};
use weft_wire::socket::check_peer;

use crate::GatewayError;

/// Connections that are accepted in one round.
const ACCEPTED: usize = 16;
/// How long none is accepted after that failed: out of descriptors, for example.
const REST: Duration = Duration::from_millis(200);

pub struct Door {
    listener: PrivateListener,
    /// No connection is accepted before.
    pub rests_until: Option<Instant>,
}

impl Door {
    /// Makes the socket. That of a gateway that was killed is replaced.
    pub fn open(path: &Path) -> Result<Door, GatewayError> {
        let listener = PrivateListener::bind(path).map_err(|error| match error {
            ListenError::Served => GatewayError::Taken(path.to_path_buf()),
            ListenError::System(source) => GatewayError::Listen {
                path: path.to_path_buf(),
                source,
            },
        })?;
        Ok(Door {
            listener,
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
                Ok(None) => break,
                Ok(Some(client)) => {
                    if check_peer(&client).is_ok() && client.set_nonblocking(true).is_ok() {
                        clients.push(client);
                    }
                }
                Err(_) => {
                    self.rests_until = Some(now + REST);
                    break;
                }
            }
        }
        clients
    }
}
