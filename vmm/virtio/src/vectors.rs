//! Pieces of guest RAM as vectored system calls want them.

use vm_memory::{GuestAddress, GuestMemoryBackend};
use weft_guest_memory::DeviceMemory;

use super::ring::{Segment, copy_out, part, total};

/// A buffer of a vectored call.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct IoVector(libc::iovec);

// SAFETY: it is an address and a length; who uses it answers for the memory.
unsafe impl Send for IoVector {}

/// The vectors of `segments`, without the first `skip` bytes. They are good as
/// long as `memory` is mapped; none where other hosts share it, for what a system
/// call may use has to stay here meanwhile.
pub fn vectors(memory: &DeviceMemory, segments: &[Segment], skip: u64) -> Vec<IoVector> {
    let Some(memory) = memory.mapped() else {
        return Vec::new();
    };
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

/// Pieces of guest RAM that a system call reads, or a copy of them where hosts
/// share the RAM.
pub struct Pieces {
    pub list: Vec<IoVector>,
    /// What the vectors name, if it is a copy.
    _copy: Vec<u8>,
}

/// The bytes of `segments`, without the first `skip`.
pub fn pieces(memory: &DeviceMemory, segments: &[Segment], skip: u64) -> Pieces {
    if !memory.is_shared() {
        return Pieces {
            list: vectors(memory, segments, skip),
            _copy: Vec::new(),
        };
    }
    let mut copy = vec![0; total(segments).saturating_sub(skip) as usize];
    copy_out(memory, segments, skip, &mut copy);
    Pieces {
        list: vec![IoVector::of(&copy)],
        _copy: copy,
    }
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
