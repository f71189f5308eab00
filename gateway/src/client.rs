//! The client's side.

use std::io;
use std::net::SocketAddrV4;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use weft_wire::socket::{Socket, connect_unix};

use crate::PATIENCE_MAX;

/// How much longer than the patience the gateway's answer may take.
const GRACE: Duration = Duration::from_secs(5);
/// Bytes of an answer.
const ANSWER_MAX: usize = 1024;

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The gateway has not been started, has ended, or is another user's.
    #[error("no gateway serves {}: start it before", path.display())]
    NoGateway {
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// It was reached, and said nothing.
    #[error("the gateway at {} does not answer: look whether it still runs", path.display())]
    Silent {
        path: PathBuf,
        /// What ended the wait.
        source: io::Error,
    },
    /// The gateway's own words.
    #[error("no connection to {to}: {said}")]
    Refused { to: SocketAddrV4, said: String },
    /// Another program listens there.
    #[error("{} is no gateway's: it answers {said:?}", path.display())]
    Strange { path: PathBuf, said: String },
}

/// Asks the gateway at `socket` for a connection to a machine, which may take as long as
/// `patience` to answer: a socket that carries the connection's bytes.
///
/// # Errors
/// [`ConnectError`]; the machine's refusal and its silence are [`ConnectError::Refused`].
pub fn connect(
    socket: &Path,
    to: SocketAddrV4,
    patience: Duration,
) -> Result<UnixStream, ConnectError> {
    let path = || socket.to_path_buf();
    let silent = |source| ConnectError::Silent {
        path: path(),
        source,
    };
    let end = Instant::now() + patience.min(PATIENCE_MAX) + GRACE;
    let client = connect_unix(socket, GRACE).map_err(|source| match source.kind() {
        io::ErrorKind::TimedOut => silent(source),
        _ => ConnectError::NoGateway {
            path: path(),
            source,
        },
    })?;
    let mut client = Socket::from(client);
    let line = format!("{to} {}\n", patience.as_millis());
    // An answer may be there although the line could not be written: that it is full.
    let written = client.write_all_by(line.as_bytes(), end);
    let said = match answer(&mut client, end) {
        Ok(said) => said,
        Err(error) => return Err(silent(written.err().unwrap_or(error))),
    };
    let Socket::Unix(client) = client else {
        return Err(silent(io::ErrorKind::Unsupported.into()));
    };
    match said.strip_prefix("error ") {
        Some(said) => Err(ConnectError::Refused {
            to,
            said: said.into(),
        }),
        None if said == "ok" => {
            client.set_read_timeout(None).map_err(silent)?;
            client.set_write_timeout(None).map_err(silent)?;
            Ok(client)
        }
        None => Err(ConnectError::Strange { path: path(), said }),
    }
}

/// The line that the gateway answers. What follows stays in the socket, since it belongs to
/// the connection: so the bytes are read one by one.
fn answer(client: &mut Socket, end: Instant) -> io::Result<String> {
    let mut line = Vec::new();
    let mut byte = [0];
    while line.len() < ANSWER_MAX {
        client.read_exact_by(&mut byte, end)?;
        if byte == *b"\n" {
            break;
        }
        line.extend(byte);
    }
    Ok(String::from_utf8_lossy(&line).into_owned())
}
