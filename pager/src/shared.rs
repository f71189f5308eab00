//! userfaultfd over a mapping of shared memory whose bytes somebody else fills
//! through another mapping of the same file (kernel document
//! `admin-guide/mm/userfaultfd`, "Minor faults").
//!
//! A page of the watched mapping is *unmapped* (a touch is a fault, which sleeps
//! until the page is mapped), *protected* (a write is a fault) or *open*. Faults
//! are read from the descriptor. Unlike [`crate::uffd::Uffd`], which turns a fault
//! into a signal of the thread that touched the page, this one also sees faults
//! that the kernel takes on a thread's behalf, which is what KVM does all the time.

use linux_raw_sys::general::{
    UFFD_EVENT_PAGEFAULT, UFFD_FEATURE_MINOR_SHMEM, UFFD_FEATURE_MISSING_SHMEM,
    UFFD_FEATURE_PAGEFAULT_FLAG_WP, UFFD_FEATURE_WP_HUGETLBFS_SHMEM, UFFD_PAGEFAULT_FLAG_WP,
    UFFD_PAGEFAULT_FLAG_WRITE, uffd_msg, uffdio_api, uffdio_continue, uffdio_register,
    uffdio_writeprotect,
};
use linux_raw_sys::ioctl::{
    UFFDIO_API, UFFDIO_CONTINUE, UFFDIO_REGISTER, UFFDIO_UNREGISTER, UFFDIO_WAKE,
    UFFDIO_WRITEPROTECT,
};
use syscalls::Sysno;

use crate::PAGE_SIZE;
use crate::uffd::{UffdError, call, range};

const API: u64 = 0xaa;
/// `USERFAULTFD_IOC_NEW`: `_IO(0xaa, 0)`.
const NEW: usize = 0xaa00;
const USER_MODE_ONLY: usize = 1;
const CLOSE_ON_EXEC: usize = 0o2000000;
const NON_BLOCKING: usize = 0o4000;
const READ_WRITE: usize = 2;
const CURRENT_DIRECTORY: usize = -100_isize as usize;
const DEVICE: &core::ffi::CStr = c"/dev/userfaultfd";
const ALL_MODES: u64 = 7;
const CONTINUE_WRITE_PROTECT: u64 = 2;
const WRITE_PROTECT: u64 = 1;
const ADVICE_DONT_NEED: usize = 4;
const TRY_AGAIN: i32 = 11;
const PRESENT: i32 = 17;
const NO_PAGE: i32 = 14;
/// Attempts at a call that the kernel asks to repeat.
const ATTEMPTS: usize = 1000;
/// Faults taken with one read.
pub const FAULTS_MAX: usize = 16;

const _: () = {
    assert!(size_of::<uffdio_continue>() == 32 && UFFDIO_CONTINUE == 0xc020_aa07);
    assert!(UFFDIO_WAKE == 0x8010_aa02);
    assert!(size_of::<uffd_msg>() == 32);
};

/// What is needed of the kernel, by the names of its header, with the version that
/// brought it.
const FEATURES: [(u32, &str); 4] = [
    (
        UFFD_FEATURE_MISSING_SHMEM,
        "UFFD_FEATURE_MISSING_SHMEM (Linux 4.11)",
    ),
    (
        UFFD_FEATURE_MINOR_SHMEM,
        "UFFD_FEATURE_MINOR_SHMEM (Linux 5.14)",
    ),
    (
        UFFD_FEATURE_PAGEFAULT_FLAG_WP,
        "UFFD_FEATURE_PAGEFAULT_FLAG_WP (Linux 5.7)",
    ),
    (
        UFFD_FEATURE_WP_HUGETLBFS_SHMEM,
        "UFFD_FEATURE_WP_HUGETLBFS_SHMEM (Linux 5.19)",
    ),
];

/// Whose faults are seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// Only those of user mode: needs no privilege. A system call that touches an
    /// unmapped page fails with EFAULT.
    UserMode,
    /// The kernel's too: needs CAP_SYS_PTRACE, `vm.unprivileged_userfaultfd=1`, or
    /// the right to open /dev/userfaultfd.
    All,
}

/// Why there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// This user may not see the kernel's faults.
    #[error(
        "userfaultfd shows faults of the kernel only to the privileged (errno {0}): \
         allow opening /dev/userfaultfd, set the sysctl vm.unprivileged_userfaultfd to 1, or start as root"
    )]
    Permission(i32),
    /// The kernel was built without it.
    #[error("userfaultfd is not available here (errno {0}): the kernel needs CONFIG_USERFAULTFD")]
    Unavailable(i32),
    /// The kernel is too old, or not built for it.
    #[error("userfaultfd lacks {0} here")]
    Lacks(&'static str),
}

/// A fault that somebody sleeps on, until its page is mapped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fault {
    /// Where, in the watched mapping; anywhere in the page.
    pub address: usize,
    /// Whether it was to write.
    pub write: bool,
}

/// A range of a shared mapping that is watched: made by [`SharedUffd::register`], which
/// is promised that it stays one.
#[derive(Debug)]
pub struct Watched {
    start: usize,
    length: usize,
}

impl Watched {
    /// Address of the page at `offset` bytes into the range.
    pub fn address(&self, offset: usize) -> usize {
        self.start + offset
    }

    /// Its first byte.
    pub fn start(&self) -> usize {
        self.start
    }

    /// Its bytes.
    pub fn length(&self) -> usize {
        self.length
    }
}

/// An open userfaultfd over shared memory. Closed when dropped; then all who sleep
/// on it go on, and the memory is as any other.
#[derive(Debug)]
pub struct SharedUffd {
    fd: i32,
}

impl SharedUffd {
    /// Opens one. Reads of its descriptor do not wait.
    pub fn open(whose: Whose) -> Result<SharedUffd, OpenError> {
        let flags = CLOSE_ON_EXEC | NON_BLOCKING;
        let fd = match whose {
            Whose::UserMode => call(Sysno::userfaultfd, [flags | USER_MODE_ONLY, 0, 0])
                .map_err(OpenError::Unavailable)?,
            Whose::All => match call(Sysno::userfaultfd, [flags, 0, 0]) {
                Ok(fd) => fd,
                Err(1) => from_device(flags)?,
                Err(errno) => return Err(OpenError::Unavailable(errno)),
            },
        };
        // Closed on every way out from here on.
        let uffd = SharedUffd { fd: fd as i32 };
        let supported = features(flags | USER_MODE_ONLY)?;
        let mut wanted = 0;
        for (bit, name) in FEATURES {
            if supported & u64::from(bit) == 0 {
                return Err(OpenError::Lacks(name));
            }
            wanted |= u64::from(bit);
        }
        uffd.shake(wanted).map_err(OpenError::Unavailable)?;
        Ok(uffd)
    }

    /// Its descriptor, to wait for: readable when there are faults.
    pub fn fd(&self) -> i32 {
        self.fd
    }

    /// Agrees on the interface; what the kernel has.
    fn shake(&self, features: u64) -> Result<u64, i32> {
        let mut api = uffdio_api {
            api: API,
            features,
            ioctls: 0,
        };
        self.ioctl(UFFDIO_API, (&raw mut api) as usize)?;
        Ok(api.features)
    }

    fn ioctl(&self, request: u32, argument: usize) -> Result<usize, i32> {
        call(Sysno::ioctl, [self.fd as usize, request as usize, argument])
    }

    fn repeated(&self, request: u32, argument: usize) -> Result<usize, i32> {
        for _ in 0..ATTEMPTS {
            match self.ioctl(request, argument) {
                Err(TRY_AGAIN) => {}
                outcome => return outcome,
            }
        }
        Err(TRY_AGAIN)
    }

    /// Watches `length` bytes of a shared mapping, nothing of which is mapped then.
    ///
    /// # Safety
    /// The range is of a shared mapping of a file, and stays one as long as the result
    /// is used. From now on a touch of it sleeps until another thread maps the page:
    /// no thread that maps pages may touch it.
    pub unsafe fn register(&self, start: usize, length: usize) -> Result<Watched, UffdError> {
        let mut register = uffdio_register {
            range: range(start, length),
            mode: ALL_MODES,
            ioctls: 0,
        };
        self.ioctl(UFFDIO_REGISTER, (&raw mut register) as usize)
            .map_err(|errno| UffdError::class(errno, 0))?;
        let watched = Watched { start, length };
        self.unmap(&watched, 0, length)?;
        Ok(watched)
    }

    /// Stops watching: all who sleep go on, and find what the file holds.
    pub fn unregister(&self, watched: &Watched) -> Result<(), UffdError> {
        let mut range = range(watched.start, watched.length);
        self.ioctl(UFFDIO_UNREGISTER, (&raw mut range) as usize)
            .map_err(|errno| UffdError::class(errno, 0))?;
        Ok(())
    }

    /// Maps the page at `address` as it is in the file, and wakes who sleeps on it.
    /// One that is mapped already only gets the protection. `NoMemory`: the file has
    /// no page there; it comes with a touch of the other mapping.
    pub fn map(&self, address: usize, writable: bool) -> Result<(), UffdError> {
        let mode = if writable { 0 } else { CONTINUE_WRITE_PROTECT };
        let mut resume = uffdio_continue {
            range: range(address, PAGE_SIZE),
            mode,
            mapped: 0,
        };
        match self.repeated(UFFDIO_CONTINUE, (&raw mut resume) as usize) {
            Ok(_) => Ok(()),
            Err(PRESENT) => {
                self.protect(address, !writable)?;
                self.wake(address)
            }
            Err(NO_PAGE) => Err(UffdError::NoMemory),
            Err(errno) => Err(UffdError::class(errno, 0)),
        }
    }

    /// Makes writes to a page fault, or no longer. Wakes those who sleep on it in
    /// the latter case.
    pub fn protect(&self, address: usize, on: bool) -> Result<(), UffdError> {
        let mut protect = uffdio_writeprotect {
            range: range(address, PAGE_SIZE),
            mode: if on { WRITE_PROTECT } else { 0 },
        };
        self.repeated(UFFDIO_WRITEPROTECT, (&raw mut protect) as usize)
            .map_err(|errno| UffdError::class(errno, 0))?;
        Ok(())
    }

    /// Has those who sleep on a page look again.
    pub fn wake(&self, address: usize) -> Result<(), UffdError> {
        let mut range = range(address, PAGE_SIZE);
        self.ioctl(UFFDIO_WAKE, (&raw mut range) as usize)
            .map_err(|errno| UffdError::class(errno, 0))?;
        Ok(())
    }

    /// Takes pages out of the mapping: `length` bytes from `offset` on. The file keeps
    /// them. When this returns, no processor uses them through this mapping, and neither
    /// does KVM.
    ///
    /// # Panics
    /// The pages are not all within the range.
    pub fn unmap(&self, watched: &Watched, offset: usize, length: usize) -> Result<(), UffdError> {
        // Outside of it, memory without a file would lose its bytes.
        let end = offset.checked_add(length);
        assert!(end.is_some_and(|end| end <= watched.length));
        call(
            Sysno::madvise,
            [watched.address(offset), length, ADVICE_DONT_NEED],
        )
        .map(drop)
        .map_err(|errno| UffdError::class(errno, 0))
    }

    /// Takes faults that nobody has taken yet; how many, 0 when there are none.
    pub fn read(&self, faults: &mut [Fault; FAULTS_MAX]) -> usize {
        // SAFETY: integers, for which zero is a value, in a union of such.
        let mut messages: [uffd_msg; FAULTS_MAX] = unsafe { core::mem::zeroed() };
        let arguments = [
            self.fd as usize,
            messages.as_mut_ptr() as usize,
            size_of_val(&messages),
        ];
        // Nothing to read is an error here, as is a signal: both mean none.
        let read = call(Sysno::read, arguments).unwrap_or(0) / size_of::<uffd_msg>();
        let mut count = 0;
        for message in &messages[..read] {
            if u32::from(message.event) != UFFD_EVENT_PAGEFAULT {
                continue;
            }
            // SAFETY: the event says which member of the union it is.
            let fault = unsafe { message.arg.pagefault };
            let writes = UFFD_PAGEFAULT_FLAG_WRITE | UFFD_PAGEFAULT_FLAG_WP;
            faults[count] = Fault {
                address: fault.address as usize,
                write: fault.flags & u64::from(writes) != 0,
            };
            count += 1;
        }
        count
    }
}

impl Drop for SharedUffd {
    fn drop(&mut self) {
        let _ = call(Sysno::close, [self.fd as usize, 0, 0]);
    }
}

/// From the device, which the administrator may allow to whom it pleases.
fn from_device(flags: usize) -> Result<usize, OpenError> {
    let path = DEVICE.as_ptr() as usize;
    // The path is a terminated string.
    let device = call(
        Sysno::openat,
        [CURRENT_DIRECTORY, path, READ_WRITE | CLOSE_ON_EXEC],
    )
    .map_err(OpenError::Permission)?;
    let opened = call(Sysno::ioctl, [device, NEW, flags]);
    let _ = call(Sysno::close, [device, 0, 0]);
    opened.map_err(OpenError::Permission)
}

/// What the kernel has: told by a descriptor of its own, since one agrees once.
fn features(flags: usize) -> Result<u64, OpenError> {
    let fd = call(Sysno::userfaultfd, [flags, 0, 0]).map_err(OpenError::Unavailable)?;
    SharedUffd { fd: fd as i32 }
        .shake(0)
        .map_err(OpenError::Unavailable)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two mappings of one file of this many pages.
    fn mappings(pages: usize) -> (usize, usize) {
        let name = c"test".as_ptr() as usize;
        let file = call(Sysno::memfd_create, [name, 0, 0]).unwrap();
        call(Sysno::ftruncate, [file, pages * PAGE_SIZE, 0]).unwrap();
        let map = || {
            // SAFETY: a new mapping where the kernel chooses.
            unsafe {
                syscalls::raw::syscall6(Sysno::mmap as usize, 0, pages * PAGE_SIZE, 3, 1, file, 0)
            }
        };
        (map(), map())
    }

    /// Waits for a fault, 10 s at most.
    fn next(uffd: &SharedUffd) -> Fault {
        let mut faults = [Fault::default(); FAULTS_MAX];
        for _ in 0..100_000 {
            if uffd.read(&mut faults) > 0 {
                return faults[0];
            }
            std::thread::sleep(std::time::Duration::from_micros(100));
        }
        panic!("no fault");
    }

    #[test]
    fn a_page_is_mapped_protected_and_taken() {
        let uffd = SharedUffd::open(Whose::UserMode).unwrap();
        let (watched, door) = mappings(4);
        let door = (door + PAGE_SIZE) as *mut u8;
        // SAFETY: only the threads below touch the range.
        let watched = unsafe { uffd.register(watched, 4 * PAGE_SIZE) }.unwrap();
        let page = watched.address(PAGE_SIZE);
        assert_eq!(uffd.map(page, false), Err(UffdError::NoMemory));
        // SAFETY: in the mapping, which nobody unmaps.
        unsafe { door.write_volatile(7) };
        // SAFETY: in the mapping, which nobody unmaps.
        let read = || std::thread::spawn(move || unsafe { (page as *const u8).read_volatile() });
        let write =
            // SAFETY: in the mapping, which nobody unmaps.
            |value| std::thread::spawn(move || unsafe { (page as *mut u8).write_volatile(value) });
        let reader = read();
        let fault = next(&uffd);
        assert_eq!(
            (fault.address / PAGE_SIZE, fault.write),
            (page / PAGE_SIZE, false)
        );
        uffd.map(page, false).unwrap();
        assert_eq!(reader.join().unwrap(), 7);
        let writer = write(9);
        assert!(next(&uffd).write);
        // SAFETY: in the mapping, which nobody unmaps.
        assert_eq!(unsafe { door.read_volatile() }, 7);
        uffd.map(page, true).unwrap();
        writer.join().unwrap();
        uffd.unmap(&watched, PAGE_SIZE, PAGE_SIZE).unwrap();
        // SAFETY: in the mapping, which nobody unmaps.
        assert_eq!(unsafe { door.read_volatile() }, 9);
        let reader = read();
        assert!(!next(&uffd).write);
        uffd.unregister(&watched).unwrap();
        assert_eq!(reader.join().unwrap(), 9);
    }

    #[test]
    fn only_watched_pages_are_unmapped() {
        let uffd = SharedUffd::open(Whose::UserMode).unwrap();
        let (start, _) = mappings(2);
        // SAFETY: nobody touches the range.
        let watched = unsafe { uffd.register(start, PAGE_SIZE) }.unwrap();
        uffd.unmap(&watched, 0, PAGE_SIZE).unwrap();
        for (offset, length) in [(PAGE_SIZE, PAGE_SIZE), (0, 2 * PAGE_SIZE), (usize::MAX, 1)] {
            let attempt = || uffd.unmap(&watched, offset, length);
            let refused = std::panic::catch_unwind(std::panic::AssertUnwindSafe(attempt));
            assert!(refused.is_err(), "{offset} {length}");
        }
    }
}
