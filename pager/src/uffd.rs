//! The userfaultfd interface, as thin as it can be.

use linux_raw_sys::general::{
    uffdio_api, uffdio_copy, uffdio_range, uffdio_register, uffdio_writeprotect,
};
use linux_raw_sys::ioctl::{
    UFFDIO_API, UFFDIO_COPY, UFFDIO_REGISTER, UFFDIO_UNREGISTER, UFFDIO_WRITEPROTECT,
};
use syscalls::Sysno;

const API: u64 = 0xaa;
const FEATURE_PAGEFAULT_FLAG_WP: u64 = 1;
const FEATURE_SIGBUS: u64 = 1 << 7;
const USER_MODE_ONLY: usize = 1;
const CLOSE_ON_EXEC: usize = 0o2000000;
const NON_BLOCKING: usize = 0o4000;
const REGISTER_MISSING: u64 = 1;
const REGISTER_WRITE_PROTECT: u64 = 2;
const COPY_WRITE_PROTECT: u64 = 2;
const WRITE_PROTECT: u64 = 1;

// The numbers encode the structure sizes: a mismatch with the kernel's header
// would show here and not at run time.
const _: () = {
    assert!(size_of::<uffdio_api>() == 24 && UFFDIO_API == 0xc018_aa3f);
    assert!(size_of::<uffdio_register>() == 32 && UFFDIO_REGISTER == 0xc020_aa00);
    assert!(size_of::<uffdio_range>() == 16 && UFFDIO_UNREGISTER == 0x8010_aa01);
    assert!(size_of::<uffdio_copy>() == 40 && UFFDIO_COPY == 0xc028_aa03);
    assert!(size_of::<uffdio_writeprotect>() == 24 && UFFDIO_WRITEPROTECT == 0xc018_aa06);
};

/// What went wrong, classed by what the caller can do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UffdError {
    /// The kernel has no userfaultfd, or not these features.
    #[error(
        "userfaultfd is not available here (errno {0}): the kernel needs CONFIG_USERFAULTFD and version 5.11 or newer"
    )]
    Unavailable(i32),
    /// The address space is changing; the same call may succeed later.
    #[error("the address space is changing")]
    Retry,
    /// A page is there already, after this many bytes were done.
    #[error("a page is already present")]
    Present(usize),
    /// The range is not one mapping registered with this userfaultfd.
    #[error("the range is not one registered mapping")]
    NotRegistered,
    /// No memory for the page.
    #[error("no memory for the page")]
    NoMemory,
    /// The arguments are wrong: a fault of ours.
    #[error("userfaultfd refused the call (errno {0})")]
    Bug(i32),
}

impl UffdError {
    pub(crate) fn class(errno: i32, done: usize) -> UffdError {
        match errno {
            11 => UffdError::Retry,
            17 => UffdError::Present(done),
            2 => UffdError::NotRegistered,
            12 => UffdError::NoMemory,
            other => UffdError::Bug(other),
        }
    }
}

pub(crate) fn call(number: Sysno, a: [usize; 3]) -> Result<usize, i32> {
    // SAFETY: callers pass a valid descriptor and, for ioctls, a pointer to a
    // live structure of the size encoded in the ioctl's number.
    let result = unsafe { syscalls::raw::syscall3(number as usize, a[0], a[1], a[2]) } as isize;
    if result < 0 {
        Err(-result as i32)
    } else {
        Ok(result as usize)
    }
}

/// An open userfaultfd with the features that the in-thread front end needs.
#[derive(Debug)]
pub struct Uffd {
    fd: i32,
}

impl Uffd {
    /// Opens one; needs no privilege.
    pub fn open() -> Result<Uffd, UffdError> {
        let flags = USER_MODE_ONLY | CLOSE_ON_EXEC | NON_BLOCKING;
        let fd = call(Sysno::userfaultfd, [flags, 0, 0]).map_err(UffdError::Unavailable)? as i32;
        let uffd = Uffd { fd };
        let mut api = uffdio_api {
            api: API,
            features: FEATURE_SIGBUS | FEATURE_PAGEFAULT_FLAG_WP,
            ioctls: 0,
        };
        uffd.ioctl(UFFDIO_API, (&raw mut api) as usize)
            .map_err(UffdError::Unavailable)?;
        Ok(uffd)
    }

    /// The descriptor, to move or close it.
    pub fn fd(&self) -> i32 {
        self.fd
    }

    /// The same userfaultfd after its descriptor was duplicated to `fd`.
    pub fn moved_to(self, fd: i32) -> Uffd {
        Uffd { fd }
    }

    fn ioctl(&self, request: u32, argument: usize) -> Result<usize, i32> {
        call(Sysno::ioctl, [self.fd as usize, request as usize, argument])
    }

    /// Registers `[start, start + length)` for missing and write-protect faults.
    ///
    /// # Safety
    /// From now on a touch of a missing page in the range raises SIGBUS: the
    /// caller's handler must resolve it for every thread of the process.
    pub unsafe fn register(&self, start: usize, length: usize) -> Result<(), UffdError> {
        let mut register = uffdio_register {
            range: range(start, length),
            mode: REGISTER_MISSING | REGISTER_WRITE_PROTECT,
            ioctls: 0,
        };
        self.ioctl(UFFDIO_REGISTER, (&raw mut register) as usize)
            .map_err(|errno| UffdError::class(errno, 0))?;
        Ok(())
    }

    /// Takes a range back: missing pages read as zero again.
    pub fn unregister(&self, start: usize, length: usize) -> Result<(), UffdError> {
        let mut range = range(start, length);
        self.ioctl(UFFDIO_UNREGISTER, (&raw mut range) as usize)
            .map_err(|errno| UffdError::class(errno, 0))?;
        Ok(())
    }

    /// Fills missing pages at `to` with `length` bytes from `from`.
    ///
    /// # Safety
    /// `from` must be readable for `length` bytes.
    pub unsafe fn copy(
        &self,
        to: usize,
        from: *const u8,
        length: usize,
        protect: bool,
    ) -> Result<(), UffdError> {
        let mut copy = uffdio_copy {
            dst: to as u64,
            src: from as u64,
            len: length as u64,
            mode: if protect { COPY_WRITE_PROTECT } else { 0 },
            copy: 0,
        };
        let result = self.ioctl(UFFDIO_COPY, (&raw mut copy) as usize);
        finish(result, copy.copy, length)
    }

    /// Write-protects present pages, or takes the protection back.
    pub fn write_protect(&self, start: usize, length: usize, on: bool) -> Result<(), UffdError> {
        let mut protect = uffdio_writeprotect {
            range: range(start, length),
            mode: if on { WRITE_PROTECT } else { 0 },
        };
        self.ioctl(UFFDIO_WRITEPROTECT, (&raw mut protect) as usize)
            .map_err(|errno| UffdError::class(errno, 0))?;
        Ok(())
    }
}

pub(crate) fn range(start: usize, length: usize) -> uffdio_range {
    uffdio_range {
        start: start as u64,
        len: length as u64,
    }
}

/// The kernel reports a partial fill through the structure: bytes done, or a
/// negative errno when nothing was done.
fn finish(result: Result<usize, i32>, done: i64, length: usize) -> Result<(), UffdError> {
    match result {
        Ok(_) if done == length as i64 => Ok(()),
        Ok(_) => Err(UffdError::Retry),
        // EAGAIN with progress: the next page failed for a reason of its own.
        Err(11) if done > 0 => Err(UffdError::Present(done as usize)),
        Err(errno) => Err(UffdError::class(errno, done.max(0) as usize)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errnos_are_classed() {
        assert_eq!(UffdError::class(11, 0), UffdError::Retry);
        assert_eq!(UffdError::class(17, 4096), UffdError::Present(4096));
        assert_eq!(UffdError::class(2, 0), UffdError::NotRegistered);
        assert_eq!(UffdError::class(22, 0), UffdError::Bug(22));
    }

    #[test]
    fn a_partial_fill_is_no_success() {
        assert_eq!(finish(Ok(0), 8192, 8192), Ok(()));
        assert_eq!(finish(Err(11), 4096, 8192), Err(UffdError::Present(4096)));
        assert_eq!(finish(Err(11), -11, 8192), Err(UffdError::Retry));
    }
}
