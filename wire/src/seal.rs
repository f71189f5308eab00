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
//!
//! The cipher is `ring`'s: four times as fast as the next one that works
//! without the standard library (see `docs/wire.md`). It allocates nothing, but
//! its crate refers to `alloc`, so a freestanding binary names
//! [`NoAllocator`] as its `#[global_allocator]`.

use crate::LinkError;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};

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

/// An allocator that has nothing to give: for binaries that never allocate and
/// must say so to the linker.
pub struct NoAllocator;

// SAFETY: a null pointer is an allocator's word for "no memory"; as nothing is
// ever handed out, nothing can be freed wrongly.
unsafe impl core::alloc::GlobalAlloc for NoAllocator {
    unsafe fn alloc(&self, _: core::alloc::Layout) -> *mut u8 {
        core::ptr::null_mut()
    }
    unsafe fn dealloc(&self, _: *mut u8, _: core::alloc::Layout) {}
}

/// A key and the nonces of one direction.
struct Direction {
    key: LessSafeKey,
    next: u64,
}

impl Direction {
    fn new(key: &[u8; KEY_BYTES]) -> Direction {
        let key = UnboundKey::new(&AES_256_GCM, key).expect("a key of 32 bytes is a key");
        Direction {
            key: LessSafeKey::new(key),
            next: 0,
        }
    }

    fn take_nonce(&mut self) -> Result<Nonce, LinkError> {
        if self.next >= RECORDS_MAX {
            return Err(LinkError::Exhausted);
        }
        let nonce = nonce(self.next);
        self.next += 1;
        Ok(nonce)
    }
}

fn nonce(counter: u64) -> Nonce {
    let mut bytes = [0; 12];
    bytes[4..].copy_from_slice(&counter.to_be_bytes());
    Nonce::assume_unique_for_key(bytes)
}

/// Seals one direction.
pub struct Sealer(Direction);

impl Sealer {
    /// A sealer whose first record is number 0.
    pub fn new(key: &[u8; KEY_BYTES]) -> Sealer {
        Sealer(Direction::new(key))
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
        let nonce = self.0.take_nonce()?;
        let (length, rest) = record.split_at_mut(LENGTH_BYTES);
        length.copy_from_slice(&((plain + TAG_BYTES) as u32).to_le_bytes());
        let (text, tag) = rest.split_at_mut(plain);
        let sealed = self
            .0
            .key
            .seal_in_place_separate_tag(nonce, Aad::empty(), text)
            .expect("60 KiB are never too long to seal");
        tag[..TAG_BYTES].copy_from_slice(sealed.as_ref());
        Ok(LENGTH_BYTES + plain + TAG_BYTES)
    }
}

/// Opens one direction.
pub struct Opener(Direction);

impl Opener {
    /// An opener that expects record number 0.
    pub fn new(key: &[u8; KEY_BYTES]) -> Opener {
        Opener(Direction::new(key))
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
        let nonce = self.0.take_nonce()?;
        match self.0.key.open_in_place(nonce, Aad::empty(), sealed) {
            Ok(plain) => Ok(plain.len()),
            Err(_) => Err(LinkError::Forged),
        }
    }
}

/// The key that Noise's REKEY derives: what sealing 32 zero bytes under the
/// reserved nonce 2^64 - 1 gives, without the tag. Record counters never get
/// there.
#[cfg(feature = "std")]
pub(crate) fn rekey(key: &[u8; KEY_BYTES]) -> [u8; KEY_BYTES] {
    let mut next = [0; KEY_BYTES];
    let _tag = Direction::new(key)
        .key
        .seal_in_place_separate_tag(nonce(u64::MAX), Aad::empty(), &mut next)
        .expect("32 bytes are never too long to seal");
    next
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sealed(sealer: &mut Sealer, text: &[u8]) -> Vec<u8> {
        let mut record = vec![0; LENGTH_BYTES + text.len() + TAG_BYTES];
        record[LENGTH_BYTES..LENGTH_BYTES + text.len()].copy_from_slice(text);
        assert_eq!(sealer.seal(&mut record, text.len()), Ok(record.len()));
        record
    }

    #[test]
    fn records_open_once_and_in_order() {
        let (mut sealer, mut opener) = (Sealer::new(&[7; 32]), Opener::new(&[7; 32]));
        let mut first = sealed(&mut sealer, b"first");
        let mut second = sealed(&mut sealer, b"second");
        let mut replayed = first.clone();
        assert_eq!(opener.open(&mut first[LENGTH_BYTES..]), Ok(5));
        assert_eq!(&first[LENGTH_BYTES..LENGTH_BYTES + 5], b"first");
        assert_eq!(opener.open(&mut second[LENGTH_BYTES..]), Ok(6));
        assert_eq!(
            opener.open(&mut replayed[LENGTH_BYTES..]),
            Err(LinkError::Forged)
        );
    }

    #[test]
    fn any_changed_bit_is_noticed() {
        for bit in 0..(5 + TAG_BYTES) * 8 {
            let mut record = sealed(&mut Sealer::new(&[7; 32]), b"first");
            record[LENGTH_BYTES + bit / 8] ^= 1 << (bit % 8);
            let opened = Opener::new(&[7; 32]).open(&mut record[LENGTH_BYTES..]);
            assert_eq!(opened, Err(LinkError::Forged), "bit {bit}");
        }
        let mut record = sealed(&mut Sealer::new(&[7; 32]), b"first");
        let opened = Opener::new(&[8; 32]).open(&mut record[LENGTH_BYTES..]);
        assert_eq!(opened, Err(LinkError::Forged));
    }

    #[test]
    fn the_last_nonce_is_an_error_and_not_a_repetition() {
        let mut sealer = Sealer::new(&[7; 32]);
        sealer.0.next = RECORDS_MAX - 1;
        let mut record = [0; 32];
        assert!(sealer.seal(&mut record, 4).is_ok());
        assert_eq!(sealer.seal(&mut record, 4), Err(LinkError::Exhausted));
        assert_eq!(sealer.seal(&mut record, 4), Err(LinkError::Exhausted));
    }

    #[test]
    fn the_nonce_is_that_of_noise() {
        let mut theirs = {
            use snow::params::CipherChoice;
            use snow::resolvers::{CryptoResolver, DefaultResolver};
            DefaultResolver
                .resolve_cipher(&CipherChoice::AESGCM)
                .unwrap()
        };
        theirs.set(&[9; 32]);
        let mut sealer = Sealer::new(&[9; 32]);
        for counter in 0..3 {
            let ours = sealed(&mut sealer, b"text");
            let mut out = [0; 20];
            theirs.encrypt(counter, &[], b"text", &mut out);
            assert_eq!(ours[LENGTH_BYTES..], out);
        }
        theirs.rekey();
        let ours = sealed(&mut Sealer::new(&rekey(&[9; 32])), b"text");
        let mut out = [0; 20];
        theirs.encrypt(0, &[], b"text", &mut out);
        assert_eq!(ours[LENGTH_BYTES..], out);
    }
}
