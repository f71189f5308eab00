//! Syscall User Dispatch: makes the kernel turn the program's system calls into
//! SIGSYS. Armed per thread, and cleared by `clone`, `fork` and `exec`.

use crate::image;
use crate::own_calls::{Result, call};

const PR_SET_SYSCALL_USER_DISPATCH: usize = 59;
const PR_SYS_DISPATCH_ON: usize = 1;

/// `si_code` of the SIGSYS that dispatch sends.
pub const SYS_USER_DISPATCH: i32 = 2;

/// From now on every system call of the calling thread made outside the
/// runtime's text raises SIGSYS. There is no selector byte: nothing in the
/// program's memory could switch interception off.
pub fn arm() -> Result<()> {
    let text = image::text();
    call!(
        prctl,
        PR_SET_SYSCALL_USER_DISPATCH,
        PR_SYS_DISPATCH_ON,
        text.start,
        text.len(),
        0
    )
    .map(|_| ())
}

/// System calls of the calling thread reach the kernel again.
pub fn disarm() {
    const PR_SYS_DISPATCH_OFF: usize = 0;
    let _ = call!(
        prctl,
        PR_SET_SYSCALL_USER_DISPATCH,
        PR_SYS_DISPATCH_OFF,
        0,
        0,
        0
    );
}
