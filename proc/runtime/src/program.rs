//! What the runtime remembers about the program it runs.

use core::cell::UnsafeCell;
use core::ffi::CStr;

use crate::own_calls::{Result, call};

/// Longest path, its NUL included.
pub const PATH_BYTES_MAX: usize = 4096;

struct Path {
    bytes: UnsafeCell<[u8; PATH_BYTES_MAX]>,
}

// SAFETY: written by `remember`, before the program's first instruction.
unsafe impl Sync for Path {}

static PATH: Path = Path {
    bytes: UnsafeCell::new([0; PATH_BYTES_MAX]),
};

/// Absolute path of the program's file, as `/proc/self/exe` would say.
pub fn path() -> &'static CStr {
    // SAFETY: not written after `remember`; the last byte is always NUL.
    let bytes = unsafe { &*PATH.bytes.get() };
    CStr::from_bytes_until_nul(bytes).unwrap_or(c"")
}

/// Learns the path from the open file of the program.
pub fn remember(descriptor: i32) -> Result<()> {
    let mut link = crate::log::Line::new();
    let _ = core::fmt::Write::write_fmt(&mut link, format_args!("/proc/self/fd/{descriptor}\0"));
    // SAFETY: the program does not run yet, so nobody reads.
    let bytes = unsafe { &mut *PATH.bytes.get() };
    let length = call!(
        readlink,
        link.as_str().as_ptr(),
        bytes.as_mut_ptr(),
        PATH_BYTES_MAX - 1
    )?;
    bytes[length] = 0;
    Ok(())
}

/// Names the process after the program, as exec does: by the path it was
/// executed with, even when that is a script.
pub fn name_process(path: &[u8]) {
    const PR_SET_NAME: usize = 15;
    const NAME_BYTES: usize = 16;
    let start = path.iter().rposition(|&b| b == b'/').map_or(0, |at| at + 1);
    let base = &path[start..];
    let mut name = [0u8; NAME_BYTES];
    let length = base.len().min(NAME_BYTES - 1);
    name[..length].copy_from_slice(&base[..length]);
    let _ = call!(prctl, PR_SET_NAME, name.as_ptr());
}
