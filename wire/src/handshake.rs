//! Making a connection secure: who is there, and with which keys it goes on.
//!
//! On the wire, in this order, everything within one deadline:
//!
//! 1. both sides at once, in the clear: the *preamble*, `WEFT` and the protocol
//!    version (`u32`), so that incompatible versions are reported as such;
//! 2. the dialling side, in the clear: the *opening*, one byte of purpose (1:
//!    control, 2: link, 3: switch) and 16 bytes of ticket (zero for control and
//!    switch);
//! 3. a Noise handshake, each message preceded by its length (`u16`,
//!    big-endian). Control and switch: `XX`, both sides' static keys. Link:
//!    `NNpsk0`, a secret that both sides got over their control connections,
//!    named by the ticket. The prologue is the protocol's name, the version and
//!    the opening, so none of them can be altered;
//! 4. control and switch: one sealed record from the accepting side with its
//!    verdict on the dialling side's key.
//!
//! States of the dialling side: preamble → opening → Noise → (verdict) →
//! keyed; of the accepting side: preamble → opening → [`Incoming`] → Noise →
//! (verdict) → keyed. Any failure drops the connection.
//!
//! `XX` and not `IK`, because then a wrong key is named: the dialling side
//! learns which key the host has, the accepting side which key asked. Both
//! static keys travel encrypted, and no first message can be replayed.

use crate::PROTOCOL_VERSION;
use crate::channel::Channel;
use crate::keys::{PublicKey, StaticKeys};
use crate::seal::{KEY_BYTES, LENGTH_BYTES, Opener, Sealer, TAG_BYTES, rekey};
use crate::socket::Socket;
use snow::{Builder, HandshakeState};
use std::io::{self, ErrorKind};
use std::time::{Duration, Instant};

/// Noise pattern of control connections, and of those between switches.
pub const CONTROL_PATTERN: &str = "Noise_XX_25519_AESGCM_SHA256";
/// Noise pattern of links.
pub const LINK_PATTERN: &str = "Noise_NNpsk0_25519_AESGCM_SHA256";
/// How long a handshake may take in all, unless said otherwise.
pub const TIMEOUT: Duration = Duration::from_secs(5);
const MAGIC: [u8; 4] = *b"WEFT";
const PROTOCOL_NAME: &[u8] = b"weft-wire";
/// No message of either pattern is longer.
const NOISE_MESSAGE_MAX: usize = 256;
const PURPOSE_CONTROL: u8 = 1;
const PURPOSE_LINK: u8 = 2;
const PURPOSE_SWITCH: u8 = 3;
const OPENING_BYTES: usize = 17;
const ACCEPTED: u8 = 1;

/// Names a secret that both sides of a link hold.
pub type Ticket = [u8; 16];
/// A secret that both sides of a link hold; used for one link.
pub type Secret = [u8; 32];

/// Why there is no secure connection.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// Whatever answers there is not Weft.
    #[error("the other end does not speak Weft's protocol: is the port right?")]
    NotWeft,
    /// The versions differ.
    #[error(
        "the other end speaks version {theirs} of the protocol, this one {ours}: install the same Weft on both"
    )]
    Version {
        /// This side's.
        ours: u32,
        /// The other's.
        theirs: u32,
    },
    /// The host has another key than expected.
    #[error(
        "the other end has the key {found}, expected {expected}: either it has a new key, or \
        it is not the host that it claims to be"
    )]
    WrongKey {
        /// The key that was expected.
        expected: PublicKey,
        /// The key it proved to have.
        found: PublicKey,
    },
    /// The other end does not trust our key.
    #[error("the other end does not trust the key {ours}: add it to the keys that it trusts")]
    Refused {
        /// This side's key.
        ours: PublicKey,
    },
    /// The dialling side's key is not trusted here.
    #[error("the key {found} is not trusted here")]
    Untrusted {
        /// The key it proved to have.
        found: PublicKey,
    },
    /// A message is not authentic: other secret, or altered.
    #[error("the handshake is not authentic: the secrets differ, or it was altered on the way")]
    NotAuthentic,
    /// A message that no implementation sends.
    #[error("the other end sent an invalid handshake message ({0})")]
    Malformed(&'static str),
    /// The time passed.
    #[error("the other end did not finish the handshake within {0:?}")]
    Timeout(Duration),
    /// The connection ended.
    #[error("the other end closed the connection during the handshake")]
    Closed,
    /// The connection failed.
    #[error("the connection failed during the handshake")]
    Io(#[source] io::Error),
    /// The Noise library refused for a reason of this side's making.
    #[error("the handshake could not be set up")]
    Setup(#[source] snow::Error),
}

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Opening {
    /// A control connection between launcher and daemon.
    Control,
    /// A link between two slices.
    Link {
        /// Names the secret.
        ticket: Ticket,
    },
    /// A connection between two switches. Its purpose is its own, so that a
    /// connection to a switch that is led to a daemon with the same key is refused.
    Switch,
}

/// A connection with fresh keys, for a [`crate::LinkKind::Sealed`].
pub struct Keyed {
    /// The connection.
    pub socket: Socket,
    /// Key for what this side sends.
    pub send_key: [u8; KEY_BYTES],
    /// Key for what this side receives.
    pub receive_key: [u8; KEY_BYTES],
}

impl Keyed {
    fn into_channel(self) -> Result<Channel, HandshakeError> {
        Channel::sealed(self.socket, self.send_key, self.receive_key).map_err(HandshakeError::Io)
    }
}

impl std::fmt::Debug for Keyed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Keyed")
            .field("socket", &self.socket)
            .finish_non_exhaustive()
    }
}

/// Dials a control connection: proves to have `keys` and demands `expected`.
///
/// # Errors
/// See [`HandshakeError`].
pub fn dial_control(
    socket: Socket,
    keys: &StaticKeys,
    expected: &PublicKey,
    timeout: Duration,
) -> Result<Channel, HandshakeError> {
    dial_known(Opening::Control, socket, keys, expected, timeout)?.into_channel()
}

/// Dials another switch: proves to have `keys` and demands `expected`.
///
/// # Errors
/// See [`HandshakeError`].
pub fn dial_switch(
    socket: Socket,
    keys: &StaticKeys,
    expected: &PublicKey,
    timeout: Duration,
) -> Result<Keyed, HandshakeError> {
    dial_known(Opening::Switch, socket, keys, expected, timeout)
}

/// Dials a connection on which both sides prove their static keys.
fn dial_known(
    opening: Opening,
    socket: Socket,
    keys: &StaticKeys,
    expected: &PublicKey,
    timeout: Duration,
) -> Result<Keyed, HandshakeError> {
    let mut talk = Talk::new(socket, timeout);
    talk.preamble()?;
    let opening = talk.send_opening(opening)?;
    let prologue = prologue(&opening);
    let mut noise = builder(CONTROL_PATTERN, &prologue)?
        .local_private_key(keys.private())
        .and_then(Builder::build_initiator)
        .map_err(HandshakeError::Setup)?;
    talk.write_noise(&mut noise)?;
    talk.read_noise(&mut noise)?;
    let found = remote_key(&noise)?;
    if found != *expected {
        let expected = *expected;
        return Err(HandshakeError::WrongKey { expected, found });
    }
    talk.write_noise(&mut noise)?;
    let keyed = talk.keyed_as_initiator(noise);
    let ours = keys.public();
    let verdict = talk.read_verdict(&keyed.1).map_err(|error| match error {
        // A daemon of the same version sends its verdict; one that just closes
        // did not like the key either.
        HandshakeError::Closed => HandshakeError::Refused { ours },
        other => other,
    })?;
    if verdict != ACCEPTED {
        return Err(HandshakeError::Refused { ours });
    }
    Ok(talk.renewed(keyed))
}

/// Dials a link that `ticket` and `secret` belong to.
///
/// # Errors
/// See [`HandshakeError`].
pub fn dial_link(
    socket: Socket,
    ticket: &Ticket,
    secret: &Secret,
    timeout: Duration,
) -> Result<Keyed, HandshakeError> {
    let mut talk = Talk::new(socket, timeout);
    talk.preamble()?;
    let opening = talk.send_opening(Opening::Link { ticket: *ticket })?;
    let prologue = prologue(&opening);
    let mut noise = builder(LINK_PATTERN, &prologue)?
        .psk(0, secret)
        .and_then(Builder::build_initiator)
        .map_err(HandshakeError::Setup)?;
    talk.write_noise(&mut noise)?;
    talk.read_noise(&mut noise)?;
    let (send_key, receive_key) = talk.keyed_as_initiator(noise);
    Ok(Keyed {
        socket: talk.socket,
        send_key,
        receive_key,
    })
}

/// Reads the preamble and the opening of an accepted connection.
///
/// # Errors
/// See [`HandshakeError`].
pub fn accept(socket: Socket, timeout: Duration) -> Result<Incoming, HandshakeError> {
    let mut talk = Talk::new(socket, timeout);
    talk.preamble()?;
    let mut bytes = [0; OPENING_BYTES];
    talk.read(&mut bytes)?;
    let (purpose, ticket) = (bytes[0], &bytes[1..]);
    let opening = match purpose {
        PURPOSE_CONTROL if ticket == [0; 16] => Opening::Control,
        PURPOSE_SWITCH if ticket == [0; 16] => Opening::Switch,
        PURPOSE_LINK => Opening::Link {
            ticket: core::array::from_fn(|index| ticket[index]),
        },
        _ => return Err(HandshakeError::Malformed("unknown purpose")),
    };
    Ok(Incoming {
        talk,
        opening,
        prologue: prologue(&bytes),
    })
}

/// An accepted connection whose purpose is known and whose maker is not. Drop
/// it to refuse.
pub struct Incoming {
    talk: Talk,
    opening: Opening,
    prologue: Vec<u8>,
}

impl Incoming {
    /// What it is for.
    pub fn opening(&self) -> Opening {
        self.opening
    }

    /// Goes on as a control connection: proves to have `keys`, and asks
    /// `trusted` about the key that the other end proves to have.
    ///
    /// # Errors
    /// See [`HandshakeError`].
    pub fn control(
        self,
        keys: &StaticKeys,
        trusted: impl FnOnce(&PublicKey) -> bool,
    ) -> Result<(Channel, PublicKey), HandshakeError> {
        if self.opening != Opening::Control {
            return Err(HandshakeError::Malformed("not a control connection"));
        }
        let (keyed, found) = self.known(keys, trusted)?;
        Ok((keyed.into_channel()?, found))
    }

    /// Goes on as a connection between switches, with both keys as for
    /// [`Incoming::control`].
    ///
    /// # Errors
    /// See [`HandshakeError`].
    pub fn switch(
        self,
        keys: &StaticKeys,
        trusted: impl FnOnce(&PublicKey) -> bool,
    ) -> Result<(Keyed, PublicKey), HandshakeError> {
        if self.opening != Opening::Switch {
            return Err(HandshakeError::Malformed("not from a switch"));
        }
        self.known(keys, trusted)
    }

    /// A connection on which both sides prove their static keys.
    fn known(
        self,
        keys: &StaticKeys,
        trusted: impl FnOnce(&PublicKey) -> bool,
    ) -> Result<(Keyed, PublicKey), HandshakeError> {
        let mut talk = self.talk;
        let mut noise = builder(CONTROL_PATTERN, &self.prologue)?
            .local_private_key(keys.private())
            .and_then(Builder::build_responder)
            .map_err(HandshakeError::Setup)?;
        talk.read_noise(&mut noise)?;
        talk.write_noise(&mut noise)?;
        talk.read_noise(&mut noise)?;
        let found = remote_key(&noise)?;
        let accepted = trusted(&found);
        let keyed = talk.keyed_as_responder(noise);
        talk.write_verdict(&keyed.0, if accepted { ACCEPTED } else { 0 })?;
        if !accepted {
            return Err(HandshakeError::Untrusted { found });
        }
        Ok((talk.renewed(keyed), found))
    }

    /// Goes on as a link with the secret that the ticket names.
    ///
    /// # Errors
    /// See [`HandshakeError`].
    pub fn link(self, secret: &Secret) -> Result<Keyed, HandshakeError> {
        let mut talk = self.talk;
        if !matches!(self.opening, Opening::Link { .. }) {
            return Err(HandshakeError::Malformed("not a link"));
        }
        let mut noise = builder(LINK_PATTERN, &self.prologue)?
            .psk(0, secret)
            .and_then(Builder::build_responder)
            .map_err(HandshakeError::Setup)?;
        talk.read_noise(&mut noise)?;
        talk.write_noise(&mut noise)?;
        let (send_key, receive_key) = talk.keyed_as_responder(noise);
        Ok(Keyed {
            socket: talk.socket,
            send_key,
            receive_key,
        })
    }
}

fn prologue(opening: &[u8; OPENING_BYTES]) -> Vec<u8> {
    let version = PROTOCOL_VERSION.to_le_bytes();
    [PROTOCOL_NAME, &version, opening].concat()
}

fn builder<'a>(pattern: &str, prologue: &'a [u8]) -> Result<Builder<'a>, HandshakeError> {
    let parameters = pattern.parse().map_err(HandshakeError::Setup)?;
    Builder::new(parameters)
        .prologue(prologue)
        .map_err(HandshakeError::Setup)
}

fn remote_key(noise: &HandshakeState) -> Result<PublicKey, HandshakeError> {
    noise
        .get_remote_static()
        .and_then(|key| key.try_into().ok())
        .map(PublicKey)
        .ok_or(HandshakeError::Malformed("no static key"))
}

/// Send key and receive key.
type KeyPair = ([u8; KEY_BYTES], [u8; KEY_BYTES]);

/// One side of the conversation, with its deadline.
struct Talk {
    socket: Socket,
    timeout: Duration,
    end: Instant,
}

impl Talk {
    fn new(socket: Socket, timeout: Duration) -> Talk {
        let end = Instant::now() + timeout;
        Talk {
            socket,
            timeout,
            end,
        }
    }

    fn failed(&self, error: io::Error) -> HandshakeError {
        match error.kind() {
            ErrorKind::TimedOut | ErrorKind::WouldBlock => HandshakeError::Timeout(self.timeout),
            ErrorKind::UnexpectedEof
            | ErrorKind::ConnectionReset
            | ErrorKind::BrokenPipe
            | ErrorKind::ConnectionAborted
            | ErrorKind::NotConnected
            | ErrorKind::WriteZero => HandshakeError::Closed,
            _ => HandshakeError::Io(error),
        }
    }

    fn read(&mut self, bytes: &mut [u8]) -> Result<(), HandshakeError> {
        let read = self.socket.read_exact_by(bytes, self.end);
        read.map_err(|error| self.failed(error))
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), HandshakeError> {
        let written = self.socket.write_all_by(bytes, self.end);
        written.map_err(|error| self.failed(error))
    }

    fn preamble(&mut self) -> Result<(), HandshakeError> {
        let ours = PROTOCOL_VERSION;
        let mut bytes = [0; 8];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..].copy_from_slice(&ours.to_le_bytes());
        self.write(&bytes)?;
        // Four bytes first: something that is not Weft may send no more.
        self.read(&mut bytes[..4])?;
        if bytes[..4] != MAGIC {
            return Err(HandshakeError::NotWeft);
        }
        self.read(&mut bytes[4..])?;
        let theirs = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
        if theirs != ours {
            return Err(HandshakeError::Version { ours, theirs });
        }
        Ok(())
    }

    fn send_opening(&mut self, opening: Opening) -> Result<[u8; OPENING_BYTES], HandshakeError> {
        let mut bytes = [0; OPENING_BYTES];
        match opening {
            Opening::Control => bytes[0] = PURPOSE_CONTROL,
            Opening::Switch => bytes[0] = PURPOSE_SWITCH,
            Opening::Link { ticket } => {
                bytes[0] = PURPOSE_LINK;
                bytes[1..].copy_from_slice(&ticket);
            }
        }
        self.write(&bytes)?;
        Ok(bytes)
    }

    fn write_noise(&mut self, noise: &mut HandshakeState) -> Result<(), HandshakeError> {
        let mut bytes = [0; 2 + NOISE_MESSAGE_MAX];
        let length = noise
            .write_message(&[], &mut bytes[2..])
            .map_err(HandshakeError::Setup)?;
        bytes[..2].copy_from_slice(&(length as u16).to_be_bytes());
        self.write(&bytes[..2 + length])
    }

    fn read_noise(&mut self, noise: &mut HandshakeState) -> Result<(), HandshakeError> {
        let mut length = [0; 2];
        self.read(&mut length)?;
        let length = usize::from(u16::from_be_bytes(length));
        if length > NOISE_MESSAGE_MAX {
            return Err(HandshakeError::Malformed("too long"));
        }
        let mut bytes = [0; NOISE_MESSAGE_MAX];
        self.read(&mut bytes[..length])?;
        match noise.read_message(&bytes[..length], &mut [0; NOISE_MESSAGE_MAX]) {
            Ok(0) => Ok(()),
            Ok(_) => Err(HandshakeError::Malformed("unexpected payload")),
            Err(_) => Err(HandshakeError::NotAuthentic),
        }
    }

    /// Noise gives the key of the dialling side's direction first.
    fn keyed_as_initiator(&self, mut noise: HandshakeState) -> KeyPair {
        noise.dangerously_get_raw_split()
    }

    fn keyed_as_responder(&self, mut noise: HandshakeState) -> KeyPair {
        let (dialling, accepting) = noise.dangerously_get_raw_split();
        (accepting, dialling)
    }

    fn write_verdict(&mut self, key: &[u8; KEY_BYTES], verdict: u8) -> Result<(), HandshakeError> {
        let mut record = [0; LENGTH_BYTES + 1 + TAG_BYTES];
        record[LENGTH_BYTES] = verdict;
        Sealer::new(key)
            .seal(&mut record, 1)
            .map_err(|_| HandshakeError::NotAuthentic)?;
        self.write(&record)
    }

    fn read_verdict(&mut self, key: &[u8; KEY_BYTES]) -> Result<u8, HandshakeError> {
        let mut record = [0; LENGTH_BYTES + 1 + TAG_BYTES];
        self.read(&mut record)?;
        Opener::new(key)
            .open(&mut record[LENGTH_BYTES..])
            .map_err(|_| HandshakeError::NotAuthentic)?;
        Ok(record[LENGTH_BYTES])
    }

    /// The verdict used up the first nonce of one direction, so both keys move
    /// on.
    fn renewed(self, keyed: KeyPair) -> Keyed {
        Keyed {
            socket: self.socket,
            send_key: rekey(&keyed.0),
            receive_key: rekey(&keyed.1),
        }
    }
}
