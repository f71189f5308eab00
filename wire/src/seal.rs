//! Sealed records: AES-256-GCM over a byte stream.
//!
//! A record on the wire is a little-endian `u32` (bytes of ciphertext and tag
//! that follow), the ciphertext, then a tag of 16 bytes. A record holds at most
//! [`RECORD_PLAIN_MAX`] bytes of plaintext. The nonce is Noise's for AESGCM:
//! four zero bytes, then the direction's record counter, big-endian. It is
//! never sent, so a record that is altered, dropped, repeated or moved does not
//! open.
//!
//! Invariants: a counter is used for exactly one record of its direction
//! (it grows before the record is handed out, and a [`Sealer`] is never
//! cloned); the first record that does not open is the last one looked at.

use crate::LinkError;
use aes_gcm::aead::AeadInOut;
use aes_gcm::{Aes256Gcm, KeyInit};

/// Bytes of a key.
pub const KEY_BYTES: usize = 32;
/// Bytes of a tag.
pub const TAG_BYTES: usize = 16;
/// Bytes of the length before each record.
pub const LENGTH_BYTES: usize = 4;
/// Most plaintext in one record.
pub const RECORD_PLAIN_MAX: usize = 60 * 1024;
/// Most bytes of one record on the wire.
pub const RECORD_MAX: usize = LENGTH_BYTES + RECORD_PLAIN_MAX + TAG_BYTES;
/// Records that one key may seal.
const RECORDS_MAX: u64 = 1 << 63;

/// Counts the nonces of one direction.
struct Nonces {
    next: u64,
}

impl Nonces {
    fn take(&mut self) -> Result<[u8; 12], LinkError> {
        if self.next >= RECORDS_MAX {
            return Err(LinkError::Exhausted);
        }
        let mut nonce = [0; 12];
        nonce[4..].copy_from_slice(&self.next.to_be_bytes());
        self.next += 1;
        Ok(nonce)
    }
}

/// Seals one direction.
pub struct Sealer {
    cipher: Aes256Gcm,
    nonces: Nonces,
}

impl Sealer {
    /// A sealer whose first record is number 0.
    pub fn new(key: &[u8; KEY_BYTES]) -> Sealer {
        Sealer {
            cipher: Aes256Gcm::new(key.into()),
            nonces: Nonces { next: 0 },
        }
    }

    /// Seals `record[4..4 + plain]` in place, writes the length before it and
    /// the tag behind it; gives the record's bytes.
    ///
    /// # Errors
    /// [`LinkError::Exhausted`].
    ///
    /// # Panics
    /// If `record` is shorter than the sealed record, or `plain` above
    /// [`RECORD_PLAIN_MAX`].
    pub fn seal(&mut self, record: &mut [u8], plain: usize) -> Result<usize, LinkError> {
        assert!(plain <= RECORD_PLAIN_MAX);
        let nonce = self.nonces.take()?;
        let (length, rest) = record.split_at_mut(LENGTH_BYTES);
        length.copy_from_slice(&((plain + TAG_BYTES) as u32).to_le_bytes());
        let (text, tag) = rest.split_at_mut(plain);
        let sealed = self
            .cipher
            .encrypt_inout_detached(&nonce.into(), &[], text.into())
            .map_err(|_| LinkError::Exhausted)?;
        tag[..TAG_BYTES].copy_from_slice(&sealed);
        Ok(LENGTH_BYTES + plain + TAG_BYTES)
    }
}

/// Opens one direction.
pub struct Opener {
    cipher: Aes256Gcm,
    nonces: Nonces,
}

impl Opener {
    /// An opener that expects record number 0.
    pub fn new(key: &[u8; KEY_BYTES]) -> Opener {
        Opener {
            cipher: Aes256Gcm::new(key.into()),
            nonces: Nonces { next: 0 },
        }
    }

    /// How many bytes of ciphertext and tag a record's length announces.
    ///
    /// # Errors
    /// [`LinkError::Forged`] for a length that no sealer writes.
    pub fn announced(length: [u8; LENGTH_BYTES]) -> Result<usize, LinkError> {
        let bytes = u32::from_le_bytes(length) as usize;
        if !(TAG_BYTES..=RECORD_PLAIN_MAX + TAG_BYTES).contains(&bytes) {
            return Err(LinkError::Forged);
        }
        Ok(bytes)
    }

    /// Opens ciphertext and tag in place; the plaintext is the returned number
    /// of bytes at the front.
    ///
    /// # Errors
    /// [`LinkError::Forged`]; the bytes are then meaningless.
    pub fn open(&mut self, sealed: &mut [u8]) -> Result<usize, LinkError> {
        let plain = sealed
            .len()
            .checked_sub(TAG_BYTES)
            .ok_or(LinkError::Forged)?;
        let nonce = self.nonces.take()?;
        let (text, tag) = sealed.split_at_mut(plain);
        let tag: &[u8; TAG_BYTES] = (&*tag).try_into().map_err(|_| LinkError::Forged)?;
        self.cipher
            .decrypt_inout_detached(&nonce.into(), &[], text.into(), tag.into())
            .map_err(|_| LinkError::Forged)?;
        Ok(plain)
    }
}

/// The key that Noise's REKEY derives: what sealing 32 zero bytes under the
/// reserved nonce 2^64 - 1 gives, without the tag. Record counters never get
/// there.
#[cfg(feature = "std")]
pub(crate) fn rekey(key: &[u8; KEY_BYTES]) -> [u8; KEY_BYTES] {
    let mut nonce = [0; 12];
    nonce[4..].copy_from_slice(&u64::MAX.to_be_bytes());
    let mut next = [0; KEY_BYTES];
    Aes256Gcm::new(key.into())
        .encrypt_inout_detached(&nonce.into(), &[], next.as_mut_slice().into())
        .expect("32 bytes are never too long to seal");
    next
}
