//! What travels on the sockets of a switch: a length of four bytes, most significant first,
//! and as many bytes. To a machine each of them is a frame, as with passt and QEMU's
//! `-netdev stream`. Between switches there are five messages beside frames, all of them
//! shorter than a frame can be:
//!
//! | bytes | message |
//! | --- | --- |
//! | none | keepalive |
//! | 1, address, age in ms (`u32`, most significant first) | the address is at this switch for so long |
//! | 2, address | the address is not at this switch |
//! | 3 | the next frame is passed on: its sender is not at this switch |
//! | 4 | the next frame goes to all switches: its destination is not known |

use std::fmt;

/// The largest frame: 64 KiB of IP in an Ethernet frame with a VLAN tag.
pub const FRAME_MAX: usize = 65535 + 18;
/// The shortest frame: two addresses and a type.
pub const FRAME_MIN: usize = 14;
/// Bytes of the length before a message.
pub const LENGTH: usize = 4;

const HERE: u8 = 1;
const GONE: u8 = 2;
const PASSED_ON: u8 = 3;
const TO_ALL: u8 = 4;
const HERE_BYTES: usize = 11;
const GONE_BYTES: usize = 7;
const WAY_BYTES: usize = 1;

/// An Ethernet address.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address(pub [u8; 6]);

impl Address {
    /// Of several cards: broadcast or multicast.
    pub fn is_group(self) -> bool {
        self.0[0] & 1 != 0
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A stream that no switch and no machine sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum StreamError {
    /// Longer than any frame.
    #[error("a frame of {0} bytes; at most {FRAME_MAX} are allowed")]
    TooLong(usize),
    /// Shorter than any frame, and no message of a switch.
    #[error("a message of {0} bytes that no switch sends")]
    Unknown(usize),
}

/// The first message of a stream, without its length, if it is here whole.
///
/// # Errors
/// [`StreamError::TooLong`], as soon as the length is here.
pub fn first(stream: &[u8]) -> Result<Option<&[u8]>, StreamError> {
    let Some((length, rest)) = stream.split_first_chunk::<LENGTH>() else {
        return Ok(None);
    };
    let length = u32::from_be_bytes(*length) as usize;
    if length > FRAME_MAX {
        return Err(StreamError::TooLong(length));
    }
    Ok(rest.get(..length))
}

/// How a frame comes from another switch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Way {
    /// From a machine there, to where its destination was heard.
    #[default]
    Directed,
    /// The destination has moved, or the sender has: it is at neither.
    PassedOn,
    /// The destination is not known there: other switches have a copy.
    ToAll,
}

/// What one switch sends to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Message<'a> {
    /// This switch lives.
    KeepAlive,
    /// The address is here.
    Here {
        /// Whose place it is.
        address: Address,
        /// For how long, in milliseconds.
        age_ms: u32,
    },
    /// The address is not here.
    Gone(Address),
    /// How the next frame comes; without it, directed.
    Way(Way),
    /// A frame of a machine.
    Frame(&'a [u8]),
}

impl Message<'_> {
    /// Reads what [`first`] found.
    ///
    /// # Errors
    /// [`StreamError::Unknown`].
    pub fn parse(bytes: &[u8]) -> Result<Message<'_>, StreamError> {
        match *bytes {
            [] => Ok(Message::KeepAlive),
            [HERE, a, b, c, d, e, f, w, x, y, z] => Ok(Message::Here {
                address: Address([a, b, c, d, e, f]),
                age_ms: u32::from_be_bytes([w, x, y, z]),
            }),
            [GONE, a, b, c, d, e, f] => Ok(Message::Gone(Address([a, b, c, d, e, f]))),
            [PASSED_ON] => Ok(Message::Way(Way::PassedOn)),
            [TO_ALL] => Ok(Message::Way(Way::ToAll)),
            _ if bytes.len() >= FRAME_MIN => Ok(Message::Frame(bytes)),
            _ => Err(StreamError::Unknown(bytes.len())),
        }
    }

    /// Appends the message with its length.
    pub fn write(&self, out: &mut Vec<u8>) {
        let mut length = |bytes: usize| out.extend((bytes as u32).to_be_bytes());
        match self {
            Message::KeepAlive => length(0),
            Message::Here { address, age_ms } => {
                length(HERE_BYTES);
                out.push(HERE);
                out.extend(address.0);
                out.extend(age_ms.to_be_bytes());
            }
            Message::Gone(address) => {
                length(GONE_BYTES);
                out.push(GONE);
                out.extend(address.0);
            }
            Message::Way(Way::Directed) => {}
            Message::Way(way) => {
                length(WAY_BYTES);
                out.push(if *way == Way::ToAll {
                    TO_ALL
                } else {
                    PASSED_ON
                });
            }
            Message::Frame(frame) => {
                length(frame.len());
                out.extend_from_slice(frame);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_length_that_no_frame_has_is_refused_at_once() {
        let length = (FRAME_MAX as u32 + 1).to_be_bytes();
        assert_eq!(first(&length), Err(StreamError::TooLong(FRAME_MAX + 1)));
        assert_eq!(first(&length[..3]), Ok(None));
        assert_eq!(Message::parse(&[9; 13]), Err(StreamError::Unknown(13)));
        assert_eq!(Message::parse(&[2; 11]), Err(StreamError::Unknown(11)));
    }

    fn messages() -> impl Strategy<Value = Vec<(u8, [u8; 6], u32, Vec<u8>)>> {
        let frame = proptest::collection::vec(any::<u8>(), FRAME_MIN..200);
        proptest::collection::vec((0_u8..6, any::<[u8; 6]>(), any::<u32>(), frame), 0..20)
    }

    proptest! {
        #[test]
        fn messages_come_out_as_they_went_in(messages in messages()) {
            let messages: Vec<Message<'_>> = messages
                .iter()
                .map(|(kind, address, age_ms, frame)| match kind {
                    0 => Message::KeepAlive,
                    1 => Message::Here { address: Address(*address), age_ms: *age_ms },
                    2 => Message::Gone(Address(*address)),
                    3 => Message::Way(Way::PassedOn),
                    4 => Message::Way(Way::ToAll),
                    _ => Message::Frame(frame),
                })
                .collect();
            let mut stream = Vec::new();
            messages.iter().for_each(|message| message.write(&mut stream));
            let alone = |message: &Message<'_>| {
                let mut bytes = Vec::new();
                message.write(&mut bytes);
                bytes.len()
            };
            prop_assert_eq!(stream.len(), messages.iter().map(alone).sum::<usize>());
            let mut rest = &stream[..];
            let mut found = Vec::new();
            while let Some(bytes) = first(rest).unwrap() {
                found.push(Message::parse(bytes).unwrap());
                rest = &rest[LENGTH + bytes.len()..];
            }
            prop_assert!(rest.is_empty());
            prop_assert_eq!(found, messages);
        }

        #[test]
        fn any_bytes_are_a_message_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            if let Ok(Some(found)) = first(&bytes)
                && let Ok(message) = Message::parse(found)
            {
                let mut again = Vec::new();
                message.write(&mut again);
                prop_assert_eq!(&again[..], &bytes[..LENGTH + found.len()]);
            }
        }
    }
}
