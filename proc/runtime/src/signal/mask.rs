//! Signal masks of the program.
//!
//! Four signals are never blocked in the kernel: a blocked SIGSYS, SIGSEGV or
//! SIGBUS that is raised by an instruction kills the process, and a blocked kick
//! would be lost. What the program believes about them is kept in
//! [`Thread::hidden_mask`]; the two together are the mask the program sees.

use crate::frame::Frame;
use crate::memory;
use crate::own_calls::{Errno, Result, call};
use crate::signal::{KICK, SIGBUS, SIGKILL, SIGSEGV, SIGSTOP, SIGSYS, held};
use crate::thread::Thread;

/// The bit of a signal.
pub const fn bit(signal: i32) -> u64 {
    1 << (signal - 1)
}

/// Signals that the kernel never has blocked.
pub const NEVER_BLOCKED: u64 = bit(SIGSYS) | bit(SIGSEGV) | bit(SIGBUS) | bit(KICK);
/// Signals that nobody can block.
const UNBLOCKABLE: u64 = bit(SIGKILL) | bit(SIGSTOP);

/// What the kernel is told of a mask of the program's.
pub const fn native(mask: u64) -> u64 {
    mask & !NEVER_BLOCKED & !UNBLOCKABLE
}

/// The mask as the program knows it.
pub fn get(thread: &Thread, frame: &Frame) -> u64 {
    (frame.mask & !NEVER_BLOCKED) | thread.hidden_mask()
}

/// Which of the signals that the kernel never has blocked are blocked for the
/// program: while a wait lasts, and for the handler that ends it, by its mask.
pub fn hidden(thread: &Thread) -> u64 {
    thread.temporary_mask.get().unwrap_or(thread.hidden_mask()) & NEVER_BLOCKED
}

/// Sets the mask that the program continues with.
pub fn set(thread: &Thread, frame: &mut Frame, mask: u64) {
    frame.mask = native(mask);
    thread.set_hidden_mask(mask & NEVER_BLOCKED);
    if held::is_deliverable(thread) {
        held::announce(thread);
    }
}

/// Reads a mask from the program.
pub fn read(address: usize, size: usize) -> Result<u64> {
    if size != 8 {
        return Err(Errno::EINVAL);
    }
    Ok(memory::read(address)?)
}

/// `rt_sigpending` of the program.
pub fn rt_sigpending(thread: &Thread, arguments: &[usize; 6]) -> Result<usize> {
    let [address, size, ..] = *arguments;
    if size > 8 {
        return Err(Errno::EINVAL);
    }
    let mut pending = 0u64;
    call!(rt_sigpending, &raw mut pending, 8)?;
    pending |= held::signals(thread);
    memory::copy_out(address, &pending.to_le_bytes()[..size])?;
    Ok(0)
}

const SIG_BLOCK: usize = 0;
const SIG_UNBLOCK: usize = 1;
const SIG_SETMASK: usize = 2;

/// `rt_sigprocmask` of the program. `None`: a signal came first; it is delivered
/// and the call is made again.
pub fn rt_sigprocmask(
    thread: &Thread,
    frame: &mut Frame,
    arguments: &[usize; 6],
) -> Result<Option<usize>> {
    let [how, new, old, size, ..] = *arguments;
    if size != 8 {
        return Err(Errno::EINVAL);
    }
    let before = get(thread, frame);
    if new != 0 {
        let operand: u64 = memory::read(new)?;
        let after = match how {
            SIG_BLOCK => before | operand,
            SIG_UNBLOCK => before & !operand,
            SIG_SETMASK => operand,
            _ => return Err(Errno::EINVAL),
        };
        if after & !before & !NEVER_BLOCKED != 0 && !block_now(thread, after) {
            return Ok(None);
        }
        set(thread, frame, after);
    }
    if old != 0 {
        memory::write(old, &before)?;
    }
    Ok(Some(0))
}

/// Blocks in the kernel at once, so that no signal can be caught by the runtime
/// between this call and the program's next instruction and then be delivered
/// although blocked. False when one was already caught.
fn block_now(thread: &Thread, after: u64) -> bool {
    let native = after & !NEVER_BLOCKED;
    let _ = call!(rt_sigprocmask, SIG_BLOCK, &raw const native, 0, 8);
    thread.pending() & crate::thread::PENDING_SIGNAL == 0
}
