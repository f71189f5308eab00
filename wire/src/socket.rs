//! Sockets of the control side: dialling, tuning, peer credentials, and reads
//! and writes that end by a point in time whatever the peer does.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Kernel buffers of a link's socket, bytes each way: a frame of 64 pages.
/// Larger ones, and those that the kernel grows by itself, are several times
/// slower over loopback (measured, see `docs/wire.md`).
pub const BUFFER_BYTES: usize = 256 << 10;

/// A connected stream socket.
#[derive(Debug)]
pub enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// Why the other end of a UNIX socket is not served.
#[derive(Debug, thiserror::Error)]
pub enum CredentialError {
    /// The process belongs to another user.
    #[error("process {pid} of user {uid} connected, but only user {allowed} and root may")]
    Foreign {
        /// The peer's process.
        pid: i32,
        /// The peer's user.
        uid: u32,
        /// Who may.
        allowed: u32,
    },
    /// The kernel does not say who it is.
    #[error("the kernel does not say who connected")]
    Unknown(#[source] io::Error),
}

/// Resolves `address` (`HOST:PORT`) and connects to the first address that
/// answers, within `timeout` in all. The socket is tuned.
///
/// # Errors
/// The last address's error.
pub fn dial(address: &str, timeout: Duration) -> io::Result<TcpStream> {
    let end = Instant::now() + timeout;
    let mut last = io::Error::new(ErrorKind::NotFound, format!("{address} has no address"));
    for candidate in address.to_socket_addrs()? {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        match TcpStream::connect_timeout(&candidate, left) {
            Ok(stream) => {
                tune(&stream)?;
                return Ok(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Sets what a link's TCP socket needs: no delay for small segments, and
/// buffers of [`BUFFER_BYTES`]. Both ends do it.
///
/// # Errors
/// Not a TCP socket.
pub fn tune(socket: impl AsFd) -> io::Result<()> {
    rustix::net::sockopt::set_tcp_nodelay(&socket, true)?;
    set_buffers(socket, BUFFER_BYTES)
}

/// Sets both kernel buffers (the kernel may cap them at its limits).
///
/// # Errors
/// Not a socket.
pub fn set_buffers(socket: impl AsFd, bytes: usize) -> io::Result<()> {
    rustix::net::sockopt::set_socket_send_buffer_size(&socket, bytes)?;
    rustix::net::sockopt::set_socket_recv_buffer_size(&socket, bytes)?;
    Ok(())
}

/// Checks that the process at the other end belongs to the same user, or root.
///
/// # Errors
/// It does not.
pub fn check_peer(socket: &UnixStream) -> Result<(), CredentialError> {
    let peer = rustix::net::sockopt::socket_peercred(socket)
        .map_err(|errno| CredentialError::Unknown(errno.into()))?;
    let allowed = rustix::process::geteuid().as_raw();
    let uid = peer.uid.as_raw();
    if uid != allowed && uid != 0 {
        let pid = peer.pid.as_raw_nonzero().get();
        return Err(CredentialError::Foreign { pid, uid, allowed });
    }
    Ok(())
}

impl Socket {
    /// Another handle of the same socket.
    ///
    /// # Errors
    /// Out of descriptors.
    pub fn try_clone(&self) -> io::Result<Socket> {
        Ok(match self {
            Socket::Tcp(stream) => Socket::Tcp(stream.try_clone()?),
            Socket::Unix(stream) => Socket::Unix(stream.try_clone()?),
        })
    }

    /// Ends both directions; a blocked reader returns.
    pub fn shutdown(&self) {
        // It fails only when the peer did it first, which is as good.
        let _ = match self {
            Socket::Tcp(stream) => stream.shutdown(std::net::Shutdown::Both),
            Socket::Unix(stream) => stream.shutdown(std::net::Shutdown::Both),
        };
    }

    /// Reads some bytes before `end`; 0 is the end of the stream.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] when the time passed.
    pub fn read_by(&mut self, bytes: &mut [u8], end: Instant) -> io::Result<usize> {
        loop {
            let left = Some(left(end)?);
            let outcome = match self {
                Socket::Tcp(stream) => {
                    stream.set_read_timeout(left)?;
                    stream.read(bytes)
                }
                Socket::Unix(stream) => {
                    stream.set_read_timeout(left)?;
                    stream.read(bytes)
                }
            };
            match outcome {
                Err(error) if is_wait(&error) => {}
                other => return other,
            }
        }
    }

    /// Fills `bytes` before `end`.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`], or [`ErrorKind::UnexpectedEof`].
    pub fn read_exact_by(&mut self, mut bytes: &mut [u8], end: Instant) -> io::Result<()> {
        while !bytes.is_empty() {
            match self.read_by(bytes, end)? {
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                count => bytes = &mut bytes[count..],
            }
        }
        Ok(())
    }

    /// Writes all of `bytes` before `end`.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`]; an unknown part was then written.
    pub fn write_all_by(&mut self, mut bytes: &[u8], end: Instant) -> io::Result<()> {
        while !bytes.is_empty() {
            let left = Some(left(end)?);
            let outcome = match self {
                Socket::Tcp(stream) => {
                    stream.set_write_timeout(left)?;
                    stream.write(bytes)
                }
                Socket::Unix(stream) => {
                    stream.set_write_timeout(left)?;
                    stream.write(bytes)
                }
            };
            match outcome {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => bytes = &bytes[count..],
                Err(error) if is_wait(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

fn left(end: Instant) -> io::Result<Duration> {
    let left = end.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(ErrorKind::TimedOut.into());
    }
    // The kernel counts in microseconds; less would mean "for ever".
    Ok(left.max(Duration::from_micros(1)))
}

fn is_wait(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
    )
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Socket::Tcp(stream) => stream.as_fd(),
            Socket::Unix(stream) => stream.as_fd(),
        }
    }
}

impl From<Socket> for OwnedFd {
    fn from(socket: Socket) -> OwnedFd {
        match socket {
            Socket::Tcp(stream) => stream.into(),
            Socket::Unix(stream) => stream.into(),
        }
    }
}

impl From<TcpStream> for Socket {
    fn from(stream: TcpStream) -> Socket {
        Socket::Tcp(stream)
    }
}

impl From<UnixStream> for Socket {
    fn from(stream: UnixStream) -> Socket {
        Socket::Unix(stream)
    }
}
