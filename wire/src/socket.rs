//! Sockets of the control side: dialling, tuning, peer credentials, and reads
//! and writes that end by a point in time whatever the peer does.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

/// Kernel buffers of a link's socket, bytes each way: a frame of 64 pages.
/// Larger ones, and those that the kernel grows by itself, are several times
/// slower over loopback (measured, see `docs/wire.md`).
pub const BUFFER_BYTES: usize = 256 << 10;

/// Connects to the UNIX socket at `path`. While its backlog is full the kernel waits, `bound`
/// at most.
///
/// # Errors
/// The kernel's; [`ErrorKind::TimedOut`] if the process that listens accepts nobody.
pub fn connect_unix(path: &Path, bound: Duration) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC;
    let stream = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let address = SocketAddrUnix::new(path)?;
    let deadline = Instant::now() + bound;
    loop {
        let patience = left(deadline).unwrap_or(Duration::from_micros(1));
        set_socket_timeout(&stream, Timeout::Send, Some(patience))?;
        match connect(&stream, &address) {
            Ok(()) => break,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                let seconds = bound.as_secs_f32();
                let text = format!("no connection was accepted within {seconds} s");
                return Err(io::Error::new(ErrorKind::TimedOut, text));
            }
            Err(error) => return Err(error.into()),
        }
    }
    let stream = UnixStream::from(stream);
    stream.set_write_timeout(None)?;
    Ok(stream)
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connecting_to_a_full_backlog_is_bounded() {
        let path = std::env::temp_dir().join(format!("weft-backlog-{}", std::process::id()));
        let bound = Duration::from_millis(50);
        let connect = || connect_unix(&path, bound);
        assert_eq!(connect().unwrap_err().kind(), ErrorKind::NotFound);
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let waiting = connect().unwrap();
        assert_eq!(waiting.write_timeout().unwrap(), None);
        let full = connect().unwrap_err();
        assert_eq!(full.kind(), ErrorKind::TimedOut);
        assert_eq!(full.to_string(), "no connection was accepted within 0.05 s");
        drop(listener.accept().unwrap());
        drop(connect().unwrap());
        drop(listener);
        assert_eq!(connect().unwrap_err().kind(), ErrorKind::ConnectionRefused);
        std::fs::remove_file(&path).unwrap();
    }
}
