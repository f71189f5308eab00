//! Copies to and from guest memory for callers that are not vCPUs, page by page.

use weft_dsm::PAGE_BYTES;
use weft_vcpu::{Access, Memory};

use super::shell::SharedMemory;
use weft_guest_memory::GuestBytes;

impl SharedMemory {
    /// Calls `copy` with the host address, the offset and the length of each page's part of a
    /// range, while the page is pinned. Whether the whole range is memory.
    fn by_pages(
        &self,
        address: u64,
        length: usize,
        access: Access,
        mut copy: impl FnMut(*mut u8, usize, usize),
    ) -> bool {
        let mut done = 0;
        while done < length {
            let Some(at) = address.checked_add(done as u64) else {
                return false;
            };
            let inside = at % PAGE_BYTES as u64;
            let piece = (length - done).min(PAGE_BYTES - inside as usize);
            let Ok(host) = self.acquire(at - inside, access) else {
                return false;
            };
            copy(host.wrapping_add(inside as usize), done, piece);
            self.unpin(at - inside);
            done += piece;
        }
        true
    }
}

impl GuestBytes for SharedMemory {
    fn read(&self, address: u64, bytes: &mut [u8]) -> bool {
        let from = bytes.as_mut_ptr();
        self.by_pages(
            address,
            bytes.len(),
            Access::Read,
            |host, offset, length| {
                // SAFETY: both are `length` bytes; the page is pinned while the copy is
                // made, or the machine is over, and RAM outlives it.
                unsafe { std::ptr::copy_nonoverlapping(host, from.add(offset), length) };
            },
        )
    }

    fn write(&self, address: u64, bytes: &[u8]) -> bool {
        self.by_pages(
            address,
            bytes.len(),
            Access::Write,
            |host, offset, length| {
                // SAFETY: both are `length` bytes; the page is pinned while the copy is
                // made, or the machine is over, and RAM outlives it.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr().add(offset), host, length) };
            },
        )
    }
}
