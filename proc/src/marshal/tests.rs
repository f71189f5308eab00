//! Marshalling against the kernel: every scenario runs twice in this process,
//! once with native system calls and once with each call gathered, decoded,
//! relocated, executed in a separate buffer and scattered; what it observes must
//! be the same.

mod files;
mod hostile;
mod processes;
mod sockets;
mod transfers;

use super::*;
use std::io;

/// This process's memory, through the kernel, so that a bad address is a fault.
pub(super) struct OwnMemory;

impl OwnMemory {
    fn transfer(nr: i64, address: u64, local: *mut u8, length: usize) -> Result<(), Fault> {
        if length == 0 {
            return Ok(());
        }
        let own = libc::iovec {
            iov_base: local.cast(),
            iov_len: length,
        };
        let other = libc::iovec {
            iov_base: address as *mut libc::c_void,
            iov_len: length,
        };
        let pid = u64::from(std::process::id());
        let (own, other) = (at(&own), at(&other));
        // SAFETY: `local` is a slice of `length` bytes; the other side is checked
        // by the kernel.
        let moved = unsafe { libc::syscall(nr, pid, own, 1u64, other, 1u64, 0u64) };
        if moved == length as i64 {
            Ok(())
        } else {
            Err(Fault { address })
        }
    }
}

impl Memory for OwnMemory {
    fn read(&mut self, address: u64, into: &mut [u8]) -> Result<(), Fault> {
        let (pointer, length) = (into.as_mut_ptr(), into.len());
        OwnMemory::transfer(libc::SYS_process_vm_readv, address, pointer, length)
    }
    fn write(&mut self, address: u64, from: &[u8]) -> Result<(), Fault> {
        let (pointer, length) = (from.as_ptr().cast_mut(), from.len());
        OwnMemory::transfer(libc::SYS_process_vm_writev, address, pointer, length)
    }
}

/// One way of making a system call.
pub(super) type Call<'a> = dyn Fn(i64, &[u64]) -> i64 + 'a;

pub(super) fn native(nr: i64, args: &[u64]) -> i64 {
    let mut words = [0; 6];
    words[..args.len()].copy_from_slice(args);
    let [a, b, c, d, e, f] = words;
    // SAFETY: the scenarios pass pointers to memory that they own.
    let result = unsafe { libc::syscall(nr, a, b, c, d, e, f) };
    if result == -1 {
        -i64::from(io::Error::last_os_error().raw_os_error().unwrap())
    } else {
        result
    }
}

/// A buffer at a page boundary.
#[repr(C, align(4096))]
struct Aligned([u8; SPACE_MAX]);

fn buffer() -> Box<Aligned> {
    // SAFETY: bytes may be zero; allocated in place because a megabyte does not
    // fit a test thread's stack twice.
    unsafe { Box::<Aligned>::new_zeroed().assume_init() }
}

/// Carries a call, with pieces of at most `bulk_max` bytes.
pub(super) fn carried_in(bulk_max: usize, nr: i64, args: &[u64]) -> i64 {
    let mut words = [0; 6];
    words[..args.len()].copy_from_slice(args);
    let (mut sent, mut home, mut reply) = (buffer(), buffer(), buffer());
    let mut transfer = Transfer::new();
    loop {
        let memory = &mut OwnMemory;
        let request = match gather(
            nr as u64,
            &words,
            transfer.done(),
            bulk_max,
            memory,
            &mut sent.0,
        ) {
            Ok(request) => request,
            Err(Gather::Errno(errno)) => return -i64::from(errno),
            Err(other) => panic!("system call {nr} was not carried: {other}"),
        };
        // The caller's buffer and home's share nothing but what is sent.
        home.0.fill(0xee);
        home.0[..request.sent()].copy_from_slice(&sent.0[..request.sent()]);
        let arrived = DecodedCall::decode(&home.0[..request.sent()]).unwrap();
        assert_eq!(arrived.space(), request.space());
        let base = home.0.as_ptr() as u64;
        let (front, behind) = home.0.split_at_mut(request.space());
        let machine_words = arrived.relocate(front, base).unwrap();
        let result = native(arrived.nr().into(), &machine_words);
        assert!(
            behind.iter().all(|&byte| byte == 0xee),
            "system call {nr} wrote behind its buffer"
        );
        let length = arrived.reply(result, front, &mut reply.0).unwrap();
        let result = request.scatter(&reply.0[..length], memory).unwrap();
        let is_file = || is_regular_file(words[0]);
        match transfer.advance(&request, result, is_file) {
            Step::More => {}
            Step::Finished(result) => return result,
        }
    }
}

fn is_regular_file(descriptor: u64) -> bool {
    // SAFETY: all zeroes is a valid `stat`, and the pointer is to it.
    let mode = unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        libc::fstat(descriptor as i32, &mut stat);
        stat.st_mode
    };
    mode & libc::S_IFMT == libc::S_IFREG
}

pub(super) fn carried(nr: i64, args: &[u64]) -> i64 {
    carried_in(BULK_MAX, nr, args)
}

/// Runs a scenario both ways and compares what it saw.
pub(super) fn same<T: PartialEq + std::fmt::Debug>(scenario: impl Fn(&Call) -> T) {
    let expected = scenario(&native);
    let seen = scenario(&carried);
    assert_eq!(seen, expected);
}

/// The address of something, as an argument.
pub(super) fn at<T: ?Sized>(thing: &T) -> u64 {
    (thing as *const T).cast::<u8>() as u64
}

/// The address of something that the call will write.
pub(super) fn into<T: ?Sized>(thing: &mut T) -> u64 {
    (thing as *mut T).cast::<u8>() as u64
}

/// A plain C structure of zeroes.
pub(super) fn zeroed<T: Copy>() -> T {
    // SAFETY: used with structures of the kernel's interface only, in which any
    // bytes are valid.
    unsafe { std::mem::zeroed() }
}

/// The bytes of a plain C structure.
pub(super) fn bytes<T: Copy>(thing: &T) -> Vec<u8> {
    let length = size_of::<T>();
    // SAFETY: reads the bytes of a live value; the structures used have no
    // padding that the kernel leaves unwritten.
    unsafe { std::slice::from_raw_parts((thing as *const T).cast::<u8>(), length).to_vec() }
}

/// A file of its own for each run of a scenario.
pub(super) fn scratch_file(content: &[u8]) -> (std::path::PathBuf, std::ffi::CString) {
    use std::os::unix::ffi::OsStrExt;
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("weft-marshal-{}-{number}", std::process::id());
    let path = std::env::temp_dir().join(name);
    std::fs::write(&path, content).unwrap();
    let string = std::ffi::CString::new(path.as_os_str().as_bytes()).unwrap();
    (path, string)
}
