//! Calls on descriptors and paths where the runtime shows through: its own
//! descriptors are hidden, and `/proc/self/exe` names the program.

use syscalls::Sysno;
use weft_proc::path::{ProcPath, classify};

use super::{run_for, word};
use crate::own_calls::{Errno, Result};
use crate::thread::Thread;
use crate::{descriptors, memory, program};

/// Longest path that can name the program's `exe` link.
const EXE_PATH_BYTES_MAX: usize = 64;

/// Runs one of them; `None` when `call` is another, or nothing has to be hidden.
pub fn call(thread: &Thread, call: Sysno, arguments: &[usize; 6]) -> Option<isize> {
    let [a, b, c, ..] = *arguments;
    let hidden = Some(word(Err(Errno::EBADF)));
    match call {
        Sysno::close | Sysno::dup | Sysno::fcntl if descriptors::is_kept(a) => hidden,
        Sysno::dup2 | Sysno::dup3 if descriptors::is_kept(a) || descriptors::is_kept(b) => hidden,
        Sysno::close_range => Some(word(descriptors::close_range(a, b, c))),
        Sysno::open | Sysno::stat | Sysno::access => redirect(thread, call, arguments, 0),
        Sysno::openat | Sysno::openat2 | Sysno::newfstatat | Sysno::statx => {
            redirect(thread, call, arguments, 1)
        }
        Sysno::faccessat | Sysno::faccessat2 => redirect(thread, call, arguments, 1),
        Sysno::readlink if names_program(a) => Some(word(link_text(b, c))),
        Sysno::readlinkat if names_program(b) => Some(word(link_text(c, arguments[3]))),
        _ => None,
    }
}

/// Runs a call on the program's file when the path at `position` is its link.
fn redirect(
    thread: &Thread,
    call: Sysno,
    arguments: &[usize; 6],
    position: usize,
) -> Option<isize> {
    if !names_program(arguments[position]) {
        return None;
    }
    if about_link(call, arguments) {
        return None;
    }
    let mut changed = *arguments;
    changed[position] = program::path().as_ptr() as usize;
    Some(run_for(thread, call as usize, &changed))
}

/// Whether the call is about the link itself, or must not follow it: the kernel
/// knows about the runtime's what it would say about the program's.
fn about_link(call: Sysno, arguments: &[usize; 6]) -> bool {
    const O_CREAT: usize = 0o100;
    const O_EXCL: usize = 0o200;
    const O_NOFOLLOW: usize = 0o400_000;
    const AT_SYMLINK_NOFOLLOW: usize = 0x100;
    let [_, b, c, d, ..] = *arguments;
    let opens_link =
        |flags: usize| flags & O_NOFOLLOW != 0 || flags & (O_CREAT | O_EXCL) == O_CREAT | O_EXCL;
    match call {
        Sysno::open => opens_link(b),
        Sysno::openat => opens_link(c),
        // `struct open_how`: flags, mode, and how to resolve: from 1 to 0x10
        // without other file systems, such links, links at all, or a way out.
        Sysno::openat2 => memory::read(c)
            .is_ok_and(|how: [u64; 3]| opens_link(how[0] as usize) || how[2] & 0x1f != 0),
        Sysno::statx => c & AT_SYMLINK_NOFOLLOW != 0,
        Sysno::newfstatat | Sysno::faccessat2 => d & AT_SYMLINK_NOFOLLOW != 0,
        _ => false,
    }
}

/// `readlink` of the link.
fn link_text(buffer: usize, size: usize) -> Result<usize> {
    if (size as i32) <= 0 {
        return Err(Errno::EINVAL);
    }
    let path = program::path().to_bytes();
    let length = path.len().min(size);
    memory::copy_out(buffer, &path[..length])?;
    Ok(length)
}

/// Whether the path at `address` is `/proc/self/exe` or another name of it.
pub fn names_program(address: usize) -> bool {
    let mut buffer = [0u8; EXE_PATH_BYTES_MAX];
    // Most paths differ in the first bytes; an unreadable one is the kernel's.
    if memory::copy_in(address, &mut buffer[..1]).is_err() || buffer[0] != b'/' {
        return false;
    }
    match memory::read_string(address, &mut buffer) {
        Ok(path) => {
            let own = crate::own_calls::process_id();
            let is_own_thread = crate::thread::is_own;
            classify(path, own, is_own_thread) == ProcPath::OwnProgram
        }
        Err(_) => false,
    }
}
