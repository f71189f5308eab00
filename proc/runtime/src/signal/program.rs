//! The program's other calls about signals: returning from a handler, and its
//! alternate stack.

use crate::frame::{AlternateStack, Frame, SS_AUTODISARM, SS_DISABLE, SS_ONSTACK, UC_FP_XSTATE};
use crate::memory::{self, Fault};
use crate::own_calls::{Errno, Result};
use crate::signal::{deliver, mask};
use crate::thread::Thread;
use crate::xstate::Area;

/// Smallest alternate stack that Linux accepts, bytes.
const MINSIGSTKSZ: usize = 2048;

/// `rt_sigreturn`: the program continues with the frame at its stack pointer. A
/// bad frame raises SIGSEGV.
pub fn rt_sigreturn(thread: &Thread, frame: &mut Frame) {
    if restore(thread, frame).is_err() {
        deliver::deliver_bad_frame(thread, frame);
    }
}

fn restore(thread: &Thread, frame: &mut Frame) -> core::result::Result<(), Fault> {
    let saved: Frame = memory::read(frame.registers.rsp)?;
    // SAFETY: `frame` is the kernel's frame of this handler.
    let area = unsafe { Area::new(frame.extended) };
    if saved.extended == 0 {
        area.reset();
    } else {
        area.load_from_program(saved.extended)?;
    }
    frame.registers = frame.registers.with(&saved.registers);
    frame.flags |= UC_FP_XSTATE;
    mask::set(thread, frame, saved.mask);
    // As in Linux, an alternate stack that is not acceptable is left alone.
    let _ = change_stack(thread, &saved.stack, saved.registers.rsp);
    Ok(())
}

pub fn sigaltstack(thread: &Thread, frame: &Frame, arguments: &[usize; 6]) -> Result<usize> {
    let [new, old, ..] = *arguments;
    let stack_pointer = frame.registers.rsp;
    let mut before = thread.alternate_stack.get();
    if before.holds(stack_pointer) && before.flags & SS_AUTODISARM == 0 {
        before.flags |= SS_ONSTACK;
    }
    if new != 0 {
        let wanted: AlternateStack = memory::read(new)?;
        change_stack(thread, &wanted, stack_pointer)?;
    }
    if old != 0 {
        memory::write(old, &before)?;
    }
    Ok(0)
}

fn change_stack(thread: &Thread, new: &AlternateStack, stack_pointer: usize) -> Result<()> {
    let current = thread.alternate_stack.get();
    if current.holds(stack_pointer) && current.flags & SS_AUTODISARM == 0 {
        return Err(Errno::EPERM);
    }
    let mode = new.flags & !SS_AUTODISARM;
    if mode != 0 && mode != SS_ONSTACK && mode != SS_DISABLE {
        return Err(Errno::EINVAL);
    }
    if mode == SS_DISABLE {
        thread.alternate_stack.set(AlternateStack::NONE);
        return Ok(());
    }
    if new.length < MINSIGSTKSZ {
        return Err(Errno::ENOMEM);
    }
    thread.alternate_stack.set(AlternateStack {
        flags: new.flags & SS_AUTODISARM,
        padding: 0,
        ..*new
    });
    Ok(())
}
