//! Pieces of guest RAM as vectored system calls want them.

use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

use super::ring::{Segment, part};

/// A buffer of a vectored call.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct IoVector(libc::iovec);

// SAFETY: it is an address and a length; who uses it answers for the memory.
unsafe impl Send for IoVector {}

/// The vectors of `segments`, without the first `skip` bytes. They are good as
/// long as `memory` is mapped.
pub fn vectors(memory: &GuestMemoryMmap, segments: &[Segment], skip: u64) -> Vec<IoVector> {
    let vector = |segment: &Segment| {
        let length = segment.length as usize;
        // Checked when the chain was taken, so none is missing.
        let slice = memory
            .get_slice(GuestAddress(segment.address), length)
            .ok()?;
        Some(IoVector(libc::iovec {
            iov_base: slice.ptr_guard_mut().as_ptr().cast(),
            iov_len: length,
        }))
    };
    let parts = part(segments, skip, u64::MAX);
    parts.iter().filter_map(vector).collect()
}

impl IoVector {
    /// Bytes of our own that are only read. They must outlive the vector.
    pub fn of(bytes: &[u8]) -> Self {
        Self(libc::iovec {
            iov_base: bytes.as_ptr().cast_mut().cast(),
            iov_len: bytes.len(),
        })
    }
}
