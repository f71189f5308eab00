//! Guest memory for who is no vCPU, piece by piece.

use weft_dsm::PAGE_BYTES;
use weft_guest_memory::GuestBytes;
use weft_vcpu::{Access, Memory};

use super::shell::{PAGE_SHIFT, SharedMemory};

impl SharedMemory {
    /// Calls `copy` with the host address, the offset and the length of each piece
    /// of a range, while the slice holds its page. Whether all of it is memory.
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
            if !self.with_page(at - inside, access, |host| {
                copy(host.wrapping_add(inside as usize), done, piece);
            }) {
                return false;
            }
            done += piece;
        }
        true
    }

    /// Calls `work` with a page that is held, which nobody takes meanwhile.
    fn with_page(&self, page: u64, access: Access, mut work: impl FnMut(*mut u8)) -> bool {
        loop {
            let Ok(host) = self.acquire(page, access) else {
                return false;
            };
            // Pages are given away under the lock only.
            let state = self.lock();
            let held = self.rights.allow(page >> PAGE_SHIFT, access) || self.is_over();
            if held {
                work(host);
            }
            drop(state);
            self.taken_up(page);
            if held {
                return true;
            }
        }
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
                // SAFETY: both are `length` bytes; the page stays while the copy is made.
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
                // SAFETY: both are `length` bytes; the page stays while the copy is made.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr().add(offset), host, length) };
            },
        )
    }
}
