//! Calls about the calling thread itself: its bases, its numbers, its limits on
//! itself.

use syscalls::Sysno;

use super::word;
use crate::context;
use crate::memory;
use crate::own_calls::{Errno, Result, call};
use crate::thread::Thread;

const ARCH_SET_GS: usize = 0x1001;
const ARCH_SET_FS: usize = 0x1002;
const ARCH_GET_FS: usize = 0x1003;
const ARCH_GET_GS: usize = 0x1004;
const ARCH_SHSTK_ENABLE: usize = 0x5001;

const PR_SET_SECCOMP: usize = 22;
const PR_SET_SYSCALL_USER_DISPATCH: usize = 59;

const SECCOMP_GET_ACTION_AVAIL: usize = 2;
const SECCOMP_GET_NOTIF_SIZES: usize = 3;

const ROBUST_LIST_HEAD_BYTES: usize = 24;

/// Runs one of them; `None` when `call` is another, or the kernel's business.
pub fn call(thread: &Thread, call: Sysno, arguments: &[usize; 6]) -> Option<isize> {
    let [a, b, ..] = *arguments;
    let result = match call {
        Sysno::arch_prctl => base(a, b)?,
        Sysno::set_tid_address => {
            thread.clear_child_tid.set(a);
            Ok(thread.id() as usize)
        }
        Sysno::set_robust_list => set_robust_list(thread, a, b),
        // Registered areas would have to follow the thread from node to node;
        // programs fall back without them.
        Sysno::rseq => Err(Errno::ENOSYS),
        // A filter would judge the runtime's own calls as well.
        Sysno::prctl if a == PR_SET_SECCOMP || a == PR_SET_SYSCALL_USER_DISPATCH => {
            Err(Errno::EINVAL)
        }
        Sysno::seccomp if a != SECCOMP_GET_ACTION_AVAIL && a != SECCOMP_GET_NOTIF_SIZES => {
            Err(Errno::EINVAL)
        }
        _ => return None,
    };
    Some(word(result))
}

fn base(code: usize, value: usize) -> Option<Result<usize>> {
    let result = match code {
        ARCH_SET_FS | ARCH_SET_GS if value >= context::USER_END => Err(Errno::EPERM),
        ARCH_SET_FS => {
            context::set_fs_base(value);
            Ok(0)
        }
        ARCH_SET_GS => {
            context::set_gs_base(value);
            Ok(0)
        }
        ARCH_GET_FS => store(value, context::fs_base()),
        ARCH_GET_GS => store(value, context::gs_base()),
        // The frames that the runtime builds have no shadow-stack entry.
        ARCH_SHSTK_ENABLE => Err(Errno::EOPNOTSUPP),
        _ => return None,
    };
    Some(result)
}

fn store(address: usize, value: usize) -> Result<usize> {
    memory::write(address, &value)?;
    Ok(0)
}

/// The kernel is told as well, for the case that the process is killed.
fn set_robust_list(thread: &Thread, head: usize, length: usize) -> Result<usize> {
    if length != ROBUST_LIST_HEAD_BYTES {
        return Err(Errno::EINVAL);
    }
    call!(set_robust_list, head, length)?;
    thread.robust_list.set(head);
    Ok(0)
}
