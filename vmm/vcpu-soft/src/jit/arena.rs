//! Memory for generated code, never writable and executable at one address.
//!
//! One memory file is mapped twice: writable at one address, executable at
//! another. Code is written through the first and run through the second.
//!
//! Invariants: `used <= size`; every address handed out lies in the executable
//! mapping; bytes below `used` change only through [`Arena::patch_jump`].
//!
//! Intel's manual (volume 3, 9.1.3) asks for a serialising instruction between
//! a store to code through another linear address and its execution by the same
//! thread: [`serialize`].

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;

use thiserror::Error;

/// Every piece of code starts at a multiple of this many bytes.
const ALIGNMENT: usize = 16;

/// The arena has no room for a piece of code: flush it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("no room in the arena of generated code")]
pub struct ArenaFull;

/// A piece of memory for code, filled from its start to its end.
#[derive(Debug)]
pub struct Arena {
    writable: NonNull<u8>,
    executable: NonNull<u8>,
    size: usize,
    used: usize,
}

// SAFETY: the mappings belong to this value alone and are not tied to a thread.
unsafe impl Send for Arena {}

impl Arena {
    /// Maps `size` bytes (rounded up to pages). They take memory only once
    /// written.
    pub fn new(size: usize) -> io::Result<Self> {
        let size = size.next_multiple_of(4096);
        // SAFETY: the name is a terminated string; nothing else is passed.
        let file = unsafe { libc::memfd_create(c"weft-code".as_ptr(), libc::MFD_CLOEXEC) };
        if file < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new and nobody else's.
        let file = unsafe { OwnedFd::from_raw_fd(file) };
        let length = libc::off_t::try_from(size).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: a plain call on a descriptor that is ours.
        if unsafe { libc::ftruncate(file.as_raw_fd(), length) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let writable = map(&file, size, libc::PROT_READ | libc::PROT_WRITE)?;
        let executable = match map(&file, size, libc::PROT_READ | libc::PROT_EXEC) {
            Ok(address) => address,
            Err(error) => {
                unmap(writable, size);
                return Err(error);
            }
        };
        Ok(Self {
            writable,
            executable,
            size,
            used: 0,
        })
    }

    /// Where the next piece will run.
    pub fn next(&self) -> u64 {
        self.executable.as_ptr() as u64 + self.used as u64
    }

    /// Bytes handed out so far.
    pub fn used(&self) -> usize {
        self.used
    }

    /// Bytes left.
    pub fn remaining(&self) -> usize {
        self.size - self.used
    }

    /// Whether `address` lies in code that was handed out.
    pub fn contains(&self, address: u64) -> bool {
        address.wrapping_sub(self.executable.as_ptr() as u64) < self.used as u64
    }

    /// Copies `code`, assembled to run at [`Arena::next`], and returns that
    /// address.
    pub fn push(&mut self, code: &[u8]) -> Result<u64, ArenaFull> {
        let taken = code.len().next_multiple_of(ALIGNMENT);
        if taken > self.remaining() {
            return Err(ArenaFull);
        }
        let address = self.next();
        // SAFETY: `used + code.len() <= size`, so the target lies within the
        // writable mapping; `code` cannot overlap it, since no reference into
        // the mapping is ever handed out.
        unsafe {
            std::ptr::copy_nonoverlapping(
                code.as_ptr(),
                self.writable.as_ptr().add(self.used),
                code.len(),
            );
        }
        self.used += taken;
        Ok(address)
    }

    /// Sets the displacement of the jump that ends at `end` (an address in the
    /// executable mapping) so that it goes to `target`.
    ///
    /// # Panics
    ///
    /// When either address is not in code that was handed out.
    pub fn patch_jump(&mut self, end: u64, target: u64) {
        assert!(self.contains(end - 1) && self.contains(end - 4) && self.contains(target));
        let displacement = target.wrapping_sub(end) as i32;
        let offset = (end - 4 - self.executable.as_ptr() as u64) as usize;
        // SAFETY: `contains` above shows that the four bytes lie within the
        // mapping; the vCPU's own thread is the only one to run this code, and
        // it is here.
        unsafe {
            self.writable
                .as_ptr()
                .add(offset)
                .cast::<i32>()
                .write_unaligned(displacement);
        }
    }

    /// Forgets all code from `keep` bytes on. The caller makes sure that nothing
    /// leads there any more.
    pub fn reset(&mut self, keep: usize) {
        assert!(keep <= self.used);
        self.used = keep.next_multiple_of(ALIGNMENT);
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        unmap(self.writable, self.size);
        unmap(self.executable, self.size);
    }
}

fn map(file: &OwnedFd, size: usize, protection: i32) -> io::Result<NonNull<u8>> {
    // SAFETY: a new mapping at an address of the kernel's choice replaces none.
    let address = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            size,
            protection,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        )
    };
    if address == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(address.cast()).ok_or_else(|| io::ErrorKind::AddrNotAvailable.into())
}

fn unmap(address: NonNull<u8>, size: usize) {
    // SAFETY: the range is a whole mapping of this arena, and its owner is going.
    unsafe { libc::munmap(address.as_ptr().cast(), size) };
}

/// Executes a serialising instruction: what this thread stored to code is what
/// it runs afterwards. IRETQ, since CPUID traps under most hypervisors.
pub fn serialize() {
    // SAFETY: IRETQ pops what was just pushed: the next instruction's address,
    // and the code segment, flags, stack pointer and stack segment as they are.
    // The red zone is stepped over.
    unsafe {
        std::arch::asm!(
            "mov {stack}, rsp",
            "mov {segment:e}, ss",
            "sub rsp, 128",
            "push {segment}",
            "push {stack}",
            "pushfq",
            "mov {segment:e}, cs",
            "push {segment}",
            "lea {segment}, [rip + 2f]",
            "push {segment}",
            "iretq",
            "2:",
            stack = out(reg) _,
            segment = out(reg) _,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_runs_at_one_address_and_is_written_at_another() {
        let mut arena = Arena::new(1).unwrap();
        // mov eax, 41; ret, then jmp to it.
        let first = arena.push(&[0xb8, 41, 0, 0, 0, 0xc3]).unwrap();
        let second = arena.push(&[0xe9, 0, 0, 0, 0, 0xcc]).unwrap();
        arena.patch_jump(second + 5, first);
        serialize();
        // SAFETY: the code was written above and follows the C convention.
        let function: extern "C" fn() -> u32 = unsafe { std::mem::transmute(second) };
        assert_eq!(function(), 41);
        assert_eq!(arena.push(&[0; 4096]), Err(ArenaFull));
        arena.reset(0);
        assert_eq!(arena.push(&[0; 4096]), Ok(first));
    }

    #[test]
    fn no_mapping_is_writable_and_executable() {
        let mut arena = Arena::new(1 << 16).unwrap();
        arena.push(&[0xc3]).unwrap();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let ours: Vec<&str> = maps.lines().filter(|l| l.contains("weft-code")).collect();
        assert!(ours.iter().any(|line| line.contains(" r-xs ")));
        assert!(ours.iter().any(|line| line.contains(" rw-s ")));
        for line in maps.lines() {
            let rights = line.split_whitespace().nth(1).unwrap();
            assert!(!(rights.contains('w') && rights.contains('x')), "{line}");
        }
    }
}
