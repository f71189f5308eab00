//! Calls that wait with a signal mask of their own.

use syscalls::Sysno;

use super::{run_for, word};
use crate::kernel::{Errno, Result};
use crate::memory;
use crate::signal::mask;
use crate::thread::{PENDING_SIGNAL, Thread};

/// Runs one of them; `None` when `call` is another.
pub fn call(thread: &mut Thread, call: Sysno, arguments: &[usize; 6]) -> Option<isize> {
    let result = match call {
        Sysno::rt_sigsuspend => with_mask(thread, call, arguments, 0, arguments[1]),
        Sysno::ppoll => with_mask(thread, call, arguments, 3, arguments[4]),
        Sysno::epoll_pwait | Sysno::epoll_pwait2 => {
            with_mask(thread, call, arguments, 4, arguments[5])
        }
        Sysno::pselect6 => pselect(thread, arguments),
        Sysno::rt_sigtimedwait => timed_wait(thread, arguments),
        _ => return None,
    };
    Some(result.unwrap_or_else(|error| word(Err(error))))
}

/// Replaces the mask at `position` by one that leaves the runtime's signals open.
fn with_mask(
    thread: &mut Thread,
    call: Sysno,
    arguments: &[usize; 6],
    position: usize,
    size: usize,
) -> Result<isize> {
    if arguments[position] == 0 && call != Sysno::rt_sigsuspend {
        return Ok(run_for(thread, call as usize, arguments));
    }
    let wanted = mask::read(arguments[position], size)?;
    let mut changed = *arguments;
    changed[position] = &raw const wanted as usize;
    let result = run_for(thread, call as usize, &changed);
    Ok(interrupted(thread, result, wanted))
}

/// `pselect6` takes the mask through one more pointer.
fn pselect(thread: &mut Thread, arguments: &[usize; 6]) -> Result<isize> {
    if arguments[5] == 0 {
        return Ok(run_for(thread, Sysno::pselect6 as usize, arguments));
    }
    let [address, size]: [usize; 2] = memory::read(arguments[5])?;
    if address == 0 {
        return Ok(run_for(thread, Sysno::pselect6 as usize, arguments));
    }
    let wanted = mask::read(address, size)?;
    let pair = [&raw const wanted as usize, size];
    let mut changed = *arguments;
    changed[5] = pair.as_ptr() as usize;
    let result = run_for(thread, Sysno::pselect6 as usize, &changed);
    Ok(interrupted(thread, result, wanted))
}

/// The handler of the signal that ended the wait runs with the wait's mask.
fn interrupted(thread: &mut Thread, result: isize, wanted: u64) -> isize {
    let interrupted = result == word(Err(Errno::EINTR));
    if interrupted && thread.pending() & PENDING_SIGNAL != 0 {
        thread.temporary_mask = Some(wanted);
    }
    result
}

/// `rt_sigtimedwait` must not take the runtime's own signal away.
fn timed_wait(thread: &mut Thread, arguments: &[usize; 6]) -> Result<isize> {
    let wanted = mask::read(arguments[0], arguments[3])?;
    let mut changed = *arguments;
    changed[0] = &raw const wanted as usize;
    Ok(run_for(thread, Sysno::rt_sigtimedwait as usize, &changed))
}
