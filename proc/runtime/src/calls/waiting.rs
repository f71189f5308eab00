//! Calls that take a signal mask: most of them wait with it.

use syscalls::Sysno;

use super::{RESTART, run_for, word};
use crate::frame::SignalInfo;
use crate::memory;
use crate::own_calls::{Errno, Result};
use crate::signal::mask::{self, NEVER_BLOCKED};
use crate::signal::{self, held};
use crate::thread::Thread;

/// Runs one of them; `None` when `call` is another.
pub fn call(thread: &Thread, call: Sysno, arguments: &[usize; 6]) -> Option<isize> {
    let result = match call {
        Sysno::rt_sigsuspend => with_mask(thread, call, arguments, 0, arguments[1]),
        Sysno::ppoll => with_mask(thread, call, arguments, 3, arguments[4]),
        Sysno::epoll_pwait | Sysno::epoll_pwait2 => {
            with_mask(thread, call, arguments, 4, arguments[5])
        }
        Sysno::pselect6 => pselect(thread, arguments),
        Sysno::rt_sigtimedwait => timed_wait(thread, arguments),
        Sysno::signalfd | Sysno::signalfd4 => descriptor(thread, call, arguments),
        _ => return None,
    };
    Some(result.unwrap_or_else(|error| word(Err(error))))
}

/// Waits with the mask at `position`.
fn with_mask(
    thread: &Thread,
    call: Sysno,
    arguments: &[usize; 6],
    position: usize,
    size: usize,
) -> Result<isize> {
    if arguments[position] == 0 && call != Sysno::rt_sigsuspend {
        return Ok(run_for(thread, call as usize, arguments));
    }
    let wanted = mask::read(arguments[position], size)?;
    let native = wanted & !NEVER_BLOCKED;
    let mut changed = *arguments;
    changed[position] = &raw const native as usize;
    Ok(wait(thread, call, &changed, wanted))
}

/// `pselect6` takes the mask through one more pointer.
fn pselect(thread: &Thread, arguments: &[usize; 6]) -> Result<isize> {
    if arguments[5] == 0 {
        return Ok(run_for(thread, Sysno::pselect6 as usize, arguments));
    }
    let [address, size]: [usize; 2] = memory::read(arguments[5])?;
    if address == 0 {
        return Ok(run_for(thread, Sysno::pselect6 as usize, arguments));
    }
    let wanted = mask::read(address, size)?;
    let native = wanted & !NEVER_BLOCKED;
    let pair = [&raw const native as usize, size];
    let mut changed = *arguments;
    changed[5] = pair.as_ptr() as usize;
    Ok(wait(thread, Sysno::pselect6, &changed, wanted))
}

/// Makes a call during which `wanted` is the program's mask. The handler of the
/// signal that ended the wait runs with it, too.
fn wait(thread: &Thread, call: Sysno, arguments: &[usize; 6], wanted: u64) -> isize {
    let interrupted = word(Err(Errno::EINTR));
    thread.temporary_mask.set(Some(wanted));
    let mut result = if held::is_deliverable(thread) {
        RESTART
    } else {
        run_for(thread, call as usize, arguments)
    };
    // Under the mask from before it might never be delivered.
    if result == RESTART && held::is_deliverable(thread) {
        held::announce(thread);
        result = interrupted;
    }
    if result != interrupted || !signal::interrupts(thread) {
        thread.temporary_mask.set(None);
    }
    result
}

/// `rt_sigtimedwait` also takes what is held, and must not take the runtime's
/// own signal away.
fn timed_wait(thread: &Thread, arguments: &[usize; 6]) -> Result<isize> {
    let wanted = mask::read(arguments[0], arguments[3])?;
    if let Some(info) = held::take(thread, wanted) {
        return found(arguments[1], &info);
    }
    let native = wanted & !NEVER_BLOCKED;
    let mut changed = *arguments;
    changed[0] = &raw const native as usize;
    let result = run_for(thread, Sysno::rt_sigtimedwait as usize, &changed);
    let ended = result == RESTART || result == word(Err(Errno::EINTR));
    match held::take(thread, if ended { wanted } else { 0 }) {
        Some(info) => found(arguments[1], &info),
        None => Ok(result),
    }
}

fn found(address: usize, info: &SignalInfo) -> Result<isize> {
    if address != 0 {
        memory::write(address, info)?;
    }
    Ok(info.signal as isize)
}

/// `signalfd` must not take the runtime's signals away either.
fn descriptor(thread: &Thread, call: Sysno, arguments: &[usize; 6]) -> Result<isize> {
    let native = mask::read(arguments[1], arguments[2])? & !NEVER_BLOCKED;
    let mut changed = *arguments;
    changed[1] = &raw const native as usize;
    Ok(run_for(thread, call as usize, &changed))
}
