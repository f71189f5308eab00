//! System calls of the runtime itself, as thin typed wrappers.
//!
//! All of them execute inside the runtime's text, which Syscall User Dispatch
//! exempts, so none comes back as a SIGSYS. None touches thread-local storage:
//! the FS base belongs to the program at all times.

pub use syscalls::{Errno, Sysno};
use zerocopy::FromZeros;

/// Result of a system call.
pub type Result<T> = core::result::Result<T, Errno>;

/// Runs a system call with six arguments; the kernel's word comes back.
///
/// # Safety
/// The call must not break memory that Rust code relies on.
#[inline(always)]
pub unsafe fn invoke(number: usize, a: [usize; 6]) -> isize {
    let result: isize;
    // SAFETY: the System V system call convention: RCX and R11 are clobbered,
    // the stack is untouched; effects on memory are the caller's to vouch for.
    unsafe {
        core::arch::asm!("syscall",
            inlateout("rax") number as isize => result,
            in("rdi") a[0], in("rsi") a[1], in("rdx") a[2],
            in("r10") a[3], in("r8") a[4], in("r9") a[5],
            lateout("rcx") _, lateout("r11") _,
            options(nostack));
    }
    result
}

/// Runs a system call and sorts its word into value or errno.
///
/// # Safety
/// As for [`invoke`].
#[inline(always)]
pub unsafe fn checked(number: Sysno, a: [usize; 6]) -> Result<usize> {
    // SAFETY: passed on to the caller.
    Errno::from_ret(unsafe { invoke(number as usize, a) } as usize)
}

macro_rules! call {
    ($name:ident $(, $argument:expr)*) => {{
        let words = [$($argument as usize),*];
        let mut six = [0usize; 6];
        let mut index = 0;
        while index < words.len() {
            six[index] = words[index];
            index += 1;
        }
        // SAFETY: every use in this runtime passes memory that it owns, or an
        // address of the program for an operation that the program asked for.
        #[allow(unused_unsafe)]
        unsafe { $crate::own_calls::checked($crate::own_calls::Sysno::$name, six) }
    }};
}
pub(crate) use call;

/// Ends every thread of this process.
pub fn exit_group(code: i32) -> ! {
    loop {
        // SAFETY: does not return.
        let _ = unsafe { invoke(Sysno::exit_group as usize, [code as usize, 0, 0, 0, 0, 0]) };
    }
}

/// Ends the calling thread only.
pub fn exit_thread(code: i32) -> ! {
    loop {
        // SAFETY: does not return.
        let _ = unsafe { invoke(Sysno::exit as usize, [code as usize, 0, 0, 0, 0, 0]) };
    }
}

/// Random bits, for addresses.
pub fn random() -> u64 {
    let mut bits = 0u64;
    if call!(getrandom, &raw mut bits, 8, 0).is_err() {
        bits = monotonic_ns();
    }
    bits
}

/// Nanoseconds of `CLOCK_MONOTONIC`.
pub fn monotonic_ns() -> u64 {
    let mut time = [0u64; 2];
    let _ = call!(clock_gettime, 1, time.as_mut_ptr());
    time[0] * 1_000_000_000 + time[1]
}

/// The calling thread's number.
pub fn thread_id() -> u32 {
    call!(gettid).unwrap_or(0) as u32
}

/// The process's number.
pub fn process_id() -> u32 {
    call!(getpid).unwrap_or(0) as u32
}

/// Writes all of `bytes` or fails.
pub fn write_all(descriptor: i32, mut bytes: &[u8]) -> Result<()> {
    while !bytes.is_empty() {
        match call!(write, descriptor, bytes.as_ptr(), bytes.len()) {
            Ok(written) => bytes = &bytes[written.min(bytes.len())..],
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Reads at `offset` until `buffer` is full or the file ends.
pub fn read_at(descriptor: i32, buffer: &mut [u8], offset: u64) -> Result<usize> {
    let mut done = 0;
    while done < buffer.len() {
        let rest = &mut buffer[done..];
        match call!(
            pread64,
            descriptor,
            rest.as_mut_ptr(),
            rest.len(),
            offset as usize + done
        ) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

/// Fresh zeroed memory for the runtime, where the kernel likes: far above the
/// program's addresses.
pub fn allocate(length: usize) -> Result<*mut u8> {
    // PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE
    call!(mmap, 0, length, 3, 0x4022, -1isize, 0).map(|address| address as *mut u8)
}

/// The same for a large, sparse array. A core dump leaves it out, because a dump reads
/// every page.
pub fn reserve(length: usize) -> Result<*mut u8> {
    const MADV_DONTDUMP: usize = 16;
    let start = allocate(length)?;
    let _ = call!(madvise, start, length, MADV_DONTDUMP);
    Ok(start)
}

/// An array of `count` zeroes that takes memory as it is touched, by [`reserve`];
/// it is never released.
pub fn zeroes<T: FromZeros>(count: usize) -> Result<&'static mut [T]> {
    const { assert!(align_of::<T>() <= 4096) };
    let bytes = count.checked_mul(size_of::<T>()).ok_or(Errno::ENOMEM)?;
    let start = reserve(bytes)?.cast::<T>();
    // SAFETY: fresh and large enough, aligned to a page, never released. It is
    // zeroed, and `FromZeros` says that zeroes are valid.
    Ok(unsafe { core::slice::from_raw_parts_mut(start, count) })
}

/// A record of zeroes by [`allocate`]; it is never released. A confined slice may
/// make this call, other than that of [`reserve`].
pub fn zeroed<T: FromZeros>() -> Result<&'static mut T> {
    const { assert!(align_of::<T>() <= 4096) };
    let start = allocate(size_of::<T>())?.cast::<T>();
    // SAFETY: as in `zeroes`.
    Ok(unsafe { &mut *start })
}

/// Gives memory of [`allocate`] back.
///
/// # Safety
/// Nothing may refer to the range any more.
pub unsafe fn release(address: *mut u8, length: usize) {
    let _ = call!(munmap, address, length);
}

/// Waits until `word` is no longer `value`, or `timeout_ns` passed.
pub fn futex_wait(word: &core::sync::atomic::AtomicU32, value: u32, timeout_ns: u64) {
    let timeout = [timeout_ns / 1_000_000_000, timeout_ns % 1_000_000_000];
    // FUTEX_WAIT | FUTEX_PRIVATE_FLAG
    let _ = call!(futex, word.as_ptr(), 128, value, timeout.as_ptr());
}

/// Wakes up to `count` waiters of `word`.
pub fn futex_wake(word: &core::sync::atomic::AtomicU32, count: u32) {
    // FUTEX_WAKE | FUTEX_PRIVATE_FLAG
    let _ = call!(futex, word.as_ptr(), 129, count);
}
