//! The frame: a fixed header of 48 bytes, then `length` bytes of payload.
//!
//! | bytes | field | meaning |
//! | --- | --- | --- |
//! | 0 | `kind` | 1..=31 coherence, 32..=127 elastic process, 128..=191 Aggregate VM, others refused |
//! | 1 | `flags` | the kind's |
//! | 2..4 | `count` | the kind's |
//! | 4..8 | `length` | bytes of payload that follow, at most [`MAX_PAYLOAD`] |
//! | 8..48 | `words` | five words, the kind's |
//!
//! Little-endian throughout. Decoding is total: every 48 bytes give a header or
//! a named error, and nothing of a payload is read before its length is known
//! to be possible.

/// Bytes of a header on the wire.
pub const HEADER_BYTES: usize = 48;
/// Most bytes of payload: 64 pages of data and 16 KiB of description.
pub const MAX_PAYLOAD: usize = 64 * 4096 + 16 * 1024;
/// Most bytes of a whole frame.
pub const MAX_FRAME: usize = HEADER_BYTES + MAX_PAYLOAD;
/// Kinds of frames that belong to the coherence protocol.
pub const KINDS_DSM: core::ops::RangeInclusive<u8> = 1..=31;
/// Kinds of frames that belong to the elastic process.
pub const KINDS_PROC: core::ops::RangeInclusive<u8> = 32..=127;
/// Kinds of frames that belong to the Aggregate VM.
pub const KINDS_VM: core::ops::RangeInclusive<u8> = 128..=191;

/// The fixed part of every frame. 48 bytes, no padding.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Header {
    /// What the frame is.
    pub kind: u8,
    /// Bits that belong to the kind.
    pub flags: u8,
    /// A number that belongs to the kind.
    pub count: u16,
    /// Bytes of payload that follow. [`crate::Link::send`] fills it in.
    pub length: u32,
    /// Words that belong to the kind.
    pub words: [u64; 5],
}

const _: () = assert!(size_of::<Header>() == HEADER_BYTES);

/// Why 48 bytes are not a header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The kind is reserved.
    #[error("frame kind {0} is reserved")]
    Kind(u8),
    /// The payload would be longer than any peer sends.
    #[error("a frame announces a payload of {0} bytes, more than a frame may have")]
    TooLong(u32),
}

impl Header {
    /// A header without flags, count or words.
    pub const fn new(kind: u8) -> Header {
        Header {
            kind,
            flags: 0,
            count: 0,
            length: 0,
            words: [0; 5],
        }
    }

    /// Reads a header.
    ///
    /// # Errors
    /// A reserved kind, or a length above [`MAX_PAYLOAD`].
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Header, FrameError> {
        let kind = bytes[0];
        let known = [KINDS_DSM, KINDS_PROC, KINDS_VM];
        if !known.iter().any(|kinds| kinds.contains(&kind)) {
            return Err(FrameError::Kind(kind));
        }
        let length = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
        if length as usize > MAX_PAYLOAD {
            return Err(FrameError::TooLong(length));
        }
        let (words, _) = bytes[8..].as_chunks::<8>();
        Ok(Header {
            kind,
            flags: bytes[1],
            count: u16::from_le_bytes([bytes[2], bytes[3]]),
            length,
            words: core::array::from_fn(|index| u64::from_le_bytes(words[index])),
        })
    }

    /// The bytes that travel.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0] = self.kind;
        bytes[1] = self.flags;
        bytes[2..4].copy_from_slice(&self.count.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.length.to_le_bytes());
        for (index, word) in self.words.iter().enumerate() {
            bytes[8 + index * 8..16 + index * 8].copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }
}
