//! Delivery: the frame that Linux would push, built on the program's stack.
//!
//! From the interrupted stack pointer down: the red zone (128 bytes), the
//! extended state (aligned to 64), then restorer, context and signal information
//! (so that the handler starts with RSP = 8 modulo 16). With `SA_ONSTACK` it all
//! starts at the top of the program's alternate stack instead.

use crate::frame::{
    AlternateStack, Frame, PushedFrame, SS_AUTODISARM, SS_DISABLE, SS_ONSTACK, SignalInfo,
    UC_FP_XSTATE, UC_SIGCONTEXT_SS, UC_STRICT_RESTORE_SS,
};
use crate::memory::{self, Fault};
use crate::signal::actions::{self, Action, SA_NODEFER, SA_ONSTACK, SIG_IGN};
use crate::signal::{SIGSEGV, mask};
use crate::thread::Thread;
use crate::xstate::Area;

/// Bytes below the stack pointer that a leaf function may use.
const RED_ZONE_BYTES: usize = 128;
/// Alignment of the extended state.
const EXTENDED_ALIGNMENT: usize = 64;
/// RFLAGS that the kernel clears for a handler: TF, DF and RF.
const CLEARED_FLAGS: usize = 1 << 8 | 1 << 10 | 1 << 16;

/// Delivers a signal to the program's handler, or does what its action says.
pub fn deliver(thread: &Thread, frame: &mut Frame, info: &SignalInfo) {
    let action = thread.table().take(info.signal);
    if action.is_handler() {
        push_or_die(thread, frame, info, &action);
        return;
    }
    // No handler runs after an interrupted `sigsuspend`: its mask ends here.
    thread.temporary_mask.set(None);
    if action.handler == SIG_IGN {
        return;
    }
    // The action became the default one after the kernel chose the runtime's
    // entry, or the signal is one of those that always come here.
    if mask::NEVER_BLOCKED & mask::bit(info.signal) != 0 {
        actions::make_default(info.signal);
    }
    actions::requeue(thread, info);
}

/// Delivers a fault that an instruction of the program raised. Blocked, ignored
/// or without a handler it is fatal: the default action is set, and the
/// instruction runs again.
pub fn deliver_fault(thread: &Thread, frame: &mut Frame, info: &SignalInfo) {
    let action = thread.table().take(info.signal);
    if action.is_handler() && thread.hidden_mask() & mask::bit(info.signal) == 0 {
        push_or_die(thread, frame, info, &action);
    } else {
        actions::make_default(info.signal);
    }
}

/// As the kernel: a handler whose frame cannot be pushed is replaced by SIGSEGV,
/// and SIGSEGV's by death.
fn push_or_die(thread: &Thread, frame: &mut Frame, info: &SignalInfo, action: &Action) {
    if push(thread, frame, info, action).is_ok() {
        return;
    }
    if info.signal == SIGSEGV {
        actions::die_of(SIGSEGV);
    }
    deliver_bad_frame(thread, frame);
}

/// The program's stack pointer or its signal frame is bad.
pub fn deliver_bad_frame(thread: &Thread, frame: &mut Frame) {
    let action = thread.table().take(SIGSEGV);
    let info = SignalInfo::from_kernel(SIGSEGV);
    let blocked = thread.hidden_mask() & mask::bit(SIGSEGV) != 0;
    if blocked || !action.is_handler() || push(thread, frame, &info, &action).is_err() {
        actions::die_of(SIGSEGV);
    }
}

/// Pushes the frame and makes the thread continue in the handler.
fn push(
    thread: &Thread,
    frame: &mut Frame,
    info: &SignalInfo,
    action: &Action,
) -> Result<(), Fault> {
    // SAFETY: `frame` is the kernel's frame of this handler.
    let area = unsafe { Area::new(frame.extended) };
    let on_stack = thread.alternate_stack.get().holds(frame.registers.rsp)
        && thread.alternate_stack.get().flags & SS_AUTODISARM == 0;
    let switching = action.flags & SA_ONSTACK != 0
        && !on_stack
        && thread.alternate_stack.get().flags & SS_DISABLE == 0;
    let top = if switching {
        thread.alternate_stack.get().start + thread.alternate_stack.get().length
    } else {
        frame.registers.rsp.wrapping_sub(RED_ZONE_BYTES)
    };
    let extended = top.wrapping_sub(area.pushed_length()) & !(EXTENDED_ALIGNMENT - 1);
    let pushed = (extended.wrapping_sub(size_of::<PushedFrame>()) & !15).wrapping_sub(8);
    if (switching || on_stack) && !thread.alternate_stack.get().holds(pushed) {
        return Err(Fault);
    }
    memory::copy_out(extended, area.pushed_bytes())?;
    let before = mask::get(thread, frame);
    let image = PushedFrame {
        restorer: action.restorer,
        frame: Frame {
            flags: UC_FP_XSTATE | UC_SIGCONTEXT_SS | UC_STRICT_RESTORE_SS,
            link: 0,
            stack: reported_stack(thread, frame.registers.rsp),
            extended,
            mask: before,
            ..*frame
        },
        info: *info,
    };
    memory::write(pushed, &image)?;
    if thread.alternate_stack.get().flags & SS_AUTODISARM != 0 {
        thread.alternate_stack.set(AlternateStack::NONE);
    }
    let in_force = thread.temporary_mask.take().unwrap_or(before);
    let deferred = if action.flags & SA_NODEFER == 0 {
        mask::bit(info.signal)
    } else {
        0
    };
    mask::set(thread, frame, in_force | action.mask | deferred);
    start_handler(frame, area, info.signal, action.handler, pushed);
    Ok(())
}

/// `uc_stack`: the program's alternate stack, and whether it is in use.
fn reported_stack(thread: &Thread, stack_pointer: usize) -> AlternateStack {
    let mut stack = thread.alternate_stack.get();
    if stack.holds(stack_pointer) && stack.flags & SS_AUTODISARM == 0 {
        stack.flags |= SS_ONSTACK;
    }
    stack
}

/// Registers at the first instruction of a handler.
fn start_handler(frame: &mut Frame, area: Area, signal: i32, handler: usize, pushed: usize) {
    let registers = &mut frame.registers;
    registers.rdi = signal as usize;
    registers.rsi = pushed + core::mem::offset_of!(PushedFrame, info);
    registers.rdx = pushed + core::mem::offset_of!(PushedFrame, frame);
    registers.rax = 0;
    registers.rsp = pushed;
    registers.rip = handler;
    registers.eflags &= !CLEARED_FLAGS;
    area.reset();
}
