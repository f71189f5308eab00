//! The control channel: typed messages in JSON, one at a time, each way.
//!
//! A message is a little-endian `u32` (bytes that follow, at most
//! [`MESSAGE_MAX`]) and that many bytes of JSON. Over TCP the stream of
//! messages travels in sealed records (see [`crate::seal`]); over a UNIX socket
//! in the clear, after the peer's credentials were checked.
//!
//! Invariants: a channel over TCP is always sealed; a message is written whole
//! or the channel is dead; no more than one message and one record are held; a
//! [`Reader`] that timed out goes on where it was.

use crate::LinkError;
use crate::seal::{KEY_BYTES, LENGTH_BYTES, Opener, RECORD_MAX, RECORD_PLAIN_MAX, Sealer};
use crate::socket::{CredentialError, Socket, check_peer};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, ErrorKind};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Most bytes of JSON in one message.
pub const MESSAGE_MAX: usize = 1 << 20;
/// How long a send may wait for the peer, unless set otherwise.
pub const SEND_TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes of the length before a message.
const PREFIX_BYTES: usize = 4;

/// Why a channel failed. After any but [`ChannelError::Timeout`] on receiving,
/// [`ChannelError::Malformed`] and [`ChannelError::TooLong`] on sending, the
/// channel is of no more use.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// The peer closed the connection.
    #[error("the peer closed the control connection")]
    Closed,
    /// No whole message arrived, or the peer took nothing, in time.
    #[error("the peer was silent on the control connection for {0:?}")]
    Timeout(Duration),
    /// A message is longer than a channel carries.
    #[error("a control message of {length} bytes; at most {MESSAGE_MAX} are allowed")]
    TooLong {
        /// Its bytes.
        length: usize,
    },
    /// The message is not what was expected.
    #[error("the peer's control message is malformed")]
    Malformed(#[source] serde_json::Error),
    /// The message to send has no JSON form.
    #[error("the control message cannot be written as JSON")]
    Unwritable(#[source] serde_json::Error),
    /// A record was altered on the way.
    #[error("the control connection was tampered with")]
    Sealing(#[source] LinkError),
    /// The connection failed.
    #[error("the control connection failed")]
    Io(#[source] io::Error),
}

impl ChannelError {
    fn from_io(error: io::Error, timeout: Duration) -> ChannelError {
        match error.kind() {
            ErrorKind::TimedOut | ErrorKind::WouldBlock => ChannelError::Timeout(timeout),
            ErrorKind::UnexpectedEof
            | ErrorKind::ConnectionReset
            | ErrorKind::BrokenPipe
            | ErrorKind::NotConnected
            | ErrorKind::WriteZero
            | ErrorKind::ConnectionAborted => ChannelError::Closed,
            _ => ChannelError::Io(error),
        }
    }
}

/// A control connection.
pub struct Channel {
    reader: Reader,
    writer: Writer,
}

/// The receiving half.
pub struct Reader {
    socket: Socket,
    opener: Option<Opener>,
    raw: Vec<u8>,
    plain: Vec<u8>,
}

/// The sending half.
pub struct Writer {
    socket: Socket,
    sealer: Option<Sealer>,
    timeout: Duration,
    dead: bool,
}

impl Channel {
    /// A sealed channel over a connection that a handshake has keyed. The keys
    /// must be fresh.
    ///
    /// # Errors
    /// Out of descriptors.
    pub fn sealed(
        socket: Socket,
        send_key: [u8; KEY_BYTES],
        receive_key: [u8; KEY_BYTES],
    ) -> io::Result<Channel> {
        let sealer = Some(Sealer::new(&send_key));
        let opener = Some(Opener::new(&receive_key));
        Channel::new(socket, sealer, opener)
    }

    /// A channel in the clear to a process of the same user (or root) on this
    /// host.
    ///
    /// # Errors
    /// It is somebody else's.
    pub fn local(socket: UnixStream) -> Result<Channel, CredentialError> {
        check_peer(&socket)?;
        Channel::new(socket.into(), None, None).map_err(CredentialError::Unknown)
    }

    fn new(socket: Socket, sealer: Option<Sealer>, opener: Option<Opener>) -> io::Result<Channel> {
        let writer = Writer {
            socket: socket.try_clone()?,
            sealer,
            timeout: SEND_TIMEOUT,
            dead: false,
        };
        let reader = Reader {
            socket,
            opener,
            raw: Vec::new(),
            plain: Vec::new(),
        };
        Ok(Channel { reader, writer })
    }

    /// Sends one message.
    ///
    /// # Errors
    /// See [`ChannelError`].
    pub fn send<T: Serialize>(&mut self, message: &T) -> Result<(), ChannelError> {
        self.writer.send(message)
    }

    /// Receives one message.
    ///
    /// # Errors
    /// See [`ChannelError`].
    pub fn receive<T: DeserializeOwned>(&mut self, timeout: Duration) -> Result<T, ChannelError> {
        self.reader.receive(timeout)
    }

    /// Two halves for two threads.
    pub fn split(self) -> (Reader, Writer) {
        (self.reader, self.writer)
    }
}

impl Writer {
    /// Sends one message, within the send timeout.
    ///
    /// # Errors
    /// See [`ChannelError`].
    pub fn send<T: Serialize>(&mut self, message: &T) -> Result<(), ChannelError> {
        if self.dead {
            return Err(ChannelError::Closed);
        }
        let mut bytes = vec![0; PREFIX_BYTES];
        serde_json::to_writer(&mut bytes, message).map_err(ChannelError::Unwritable)?;
        let length = bytes.len() - PREFIX_BYTES;
        if length > MESSAGE_MAX {
            return Err(ChannelError::TooLong { length });
        }
        bytes[..PREFIX_BYTES].copy_from_slice(&(length as u32).to_le_bytes());
        let written = self.write(&bytes);
        self.dead = written.is_err();
        written
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), ChannelError> {
        let timeout = self.timeout;
        let end = Instant::now() + timeout;
        let failed = |error| ChannelError::from_io(error, timeout);
        let Some(sealer) = &mut self.sealer else {
            return self.socket.write_all_by(bytes, end).map_err(failed);
        };
        let mut record = vec![0; RECORD_MAX.min(bytes.len() + RECORD_MAX - RECORD_PLAIN_MAX)];
        for piece in bytes.chunks(RECORD_PLAIN_MAX) {
            record[LENGTH_BYTES..LENGTH_BYTES + piece.len()].copy_from_slice(piece);
            let sealed = sealer
                .seal(&mut record, piece.len())
                .map_err(ChannelError::Sealing)?;
            self.socket
                .write_all_by(&record[..sealed], end)
                .map_err(failed)?;
        }
        Ok(())
    }

    /// Sets how long a send may wait for the peer.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Ends the connection both ways; a blocked [`Reader`] returns.
    pub fn shutdown(&self) {
        self.socket.shutdown();
    }
}

impl Reader {
    /// Receives one message.
    ///
    /// # Errors
    /// See [`ChannelError`].
    pub fn receive<T: DeserializeOwned>(&mut self, timeout: Duration) -> Result<T, ChannelError> {
        let end = Instant::now() + timeout;
        loop {
            if let Some(length) = self.message_bytes()? {
                let message = PREFIX_BYTES..PREFIX_BYTES + length;
                let parsed = serde_json::from_slice(&self.plain[message.clone()]);
                self.plain.drain(..message.end);
                return parsed.map_err(ChannelError::Malformed);
            }
            self.read_some(end)
                .map_err(|error| ChannelError::from_io(error, timeout))?;
            self.open_records()?;
        }
    }

    /// The length of the first message, if it is here whole.
    fn message_bytes(&self) -> Result<Option<usize>, ChannelError> {
        let Some((prefix, rest)) = self.plain.split_first_chunk::<PREFIX_BYTES>() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(*prefix) as usize;
        if length > MESSAGE_MAX {
            return Err(ChannelError::TooLong { length });
        }
        Ok((rest.len() >= length).then_some(length))
    }

    fn read_some(&mut self, end: Instant) -> io::Result<()> {
        let into = if self.opener.is_some() {
            &mut self.raw
        } else {
            &mut self.plain
        };
        let mut bytes = [0; 16 << 10];
        match self.socket.read_by(&mut bytes, end)? {
            0 => Err(ErrorKind::UnexpectedEof.into()),
            count => {
                into.extend_from_slice(&bytes[..count]);
                Ok(())
            }
        }
    }

    fn open_records(&mut self) -> Result<(), ChannelError> {
        let Some(opener) = &mut self.opener else {
            return Ok(());
        };
        while let Some((length, rest)) = self.raw.split_first_chunk_mut::<LENGTH_BYTES>() {
            let bytes = Opener::announced(*length).map_err(ChannelError::Sealing)?;
            let Some(record) = rest.get_mut(..bytes) else {
                return Ok(());
            };
            let plain = opener.open(record).map_err(ChannelError::Sealing)?;
            self.plain.extend_from_slice(&record[..plain]);
            self.raw.drain(..LENGTH_BYTES + bytes);
        }
        Ok(())
    }
}
