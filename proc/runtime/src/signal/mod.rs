//! Signals: the runtime's own, and the program's, which it stands in for.
//!
//! A signal finds its thread in one of two states:
//!
//! - *in the program*: it is delivered at once, by building the frame that Linux
//!   would build on the program's stack ([`deliver`]);
//! - *in the runtime*: it is left in the thread's [`Inbox`](crate::thread::Inbox)
//!   and delivered on the way out. All other program signals are blocked in the
//!   interrupted state until then, so the kernel keeps them, in its order and
//!   with their information, and one slot is enough.
//!
//! The four that the kernel never has blocked take a third way, in both states:
//! into a store, out of which they are delivered unless the program blocks them
//! ([`held`]).
//!
//! A signal that interrupts a system call made for the program ends that call
//! exactly as the kernel would: the kernel's entry has the program's
//! `SA_RESTART`, so the kernel itself tells calls to restart from calls to fail
//! with EINTR.

pub mod actions;
mod deliver;
pub mod entry;
pub mod held;
pub mod mask;
mod program;

use core::sync::atomic::Ordering;

use weft_proc::boot::EXIT_INTERNAL;

use crate::frame::{Frame, SignalInfo};
use crate::own_calls::call;
use crate::thread::{PENDING_KICK, PENDING_OPEN, PENDING_RELEASE, PENDING_SIGNAL, Thread};
use crate::{calls, context, control, engine, image, log, memory};
pub use program::{rt_sigreturn, sigaltstack};

/// Illegal bus access, and userfaultfd's missing pages.
pub const SIGBUS: i32 = 7;
/// Illegal instruction.
pub const SIGILL: i32 = 4;
/// Breakpoint.
pub const SIGTRAP: i32 = 5;
/// Arithmetic.
pub const SIGFPE: i32 = 8;
/// Kill.
pub const SIGKILL: i32 = 9;
/// Bad address.
pub const SIGSEGV: i32 = 11;
/// Child stopped or ended.
pub const SIGCHLD: i32 = 17;
/// Stop.
pub const SIGSTOP: i32 = 19;
/// Bad system call; here: an intercepted one.
pub const SIGSYS: i32 = 31;
/// The runtime's own signal.
pub const KICK: i32 = weft_proc::boot::KICK_SIGNAL;

/// `si_code` of the runtime's signal for a thread that shall look into the
/// process's store.
const LOOK_CODE: i32 = -0x5746;
/// `si_code` of the runtime's signal for a child that will be traced.
pub const RELEASE_CODE: i32 = -0x5747;
/// `si_code` of a timer's signal.
const SI_TIMER: i32 = -2;
/// `si_code` of `kill`.
const SI_USER: i32 = 0;
/// `si_code` of `tgkill`.
const SI_TKILL: i32 = -6;

/// Handles one signal. True when the interrupted state is the program's.
pub(crate) fn handle(info: &mut SignalInfo, frame: &mut Frame) -> bool {
    // SAFETY: handlers run on the alternate stack of their thread; whatever the
    // runtime was doing on it is suspended until this handler returns.
    let thread = unsafe { Thread::at(core::ptr::from_ref(frame) as usize) };
    let inside = image::contains(frame.registers.rip);
    match info.signal {
        SIGSYS if info.code == crate::intercept::SYS_USER_DISPATCH => {
            if inside {
                log::fatal(
                    EXIT_INTERNAL,
                    "a system call of the runtime was intercepted",
                );
            }
            calls::dispatch(thread, frame, info);
            true
        }
        SIGSEGV | SIGBUS if info.code > 0 => {
            handle_fault(thread, frame, info, inside);
            !inside
        }
        SIGFPE | SIGILL | SIGTRAP if info.code > 0 && engine::trap(thread, frame) => true,
        KICK if info.code == SI_TIMER && engine::beat() => !inside,
        KICK if is_own(thread, info) => handle_kick(thread, frame, info, inside),
        SIGSYS | SIGSEGV | SIGBUS | KICK => {
            held::arrive(thread, info);
            leave_later(frame, inside)
        }
        _ if inside => {
            catch(thread, frame, info);
            false
        }
        _ => {
            deliver::deliver(thread, frame, info);
            true
        }
    }
}

/// Leaves a signal for the way out.
fn catch(thread: &Thread, frame: &mut Frame, info: &SignalInfo) {
    let inbox = thread.inbox();
    if inbox.pending.load(Ordering::Relaxed) & PENDING_SIGNAL == 0 {
        // SAFETY: only handlers on this thread write the slot, they do not
        // nest (each blocks the others), and the bit says that it is free.
        unsafe { *inbox.info.get() = *info };
        inbox.pending.fetch_or(PENDING_SIGNAL, Ordering::Release);
    }
    frame.mask = !mask::NEVER_BLOCKED;
    entry::redirect(frame);
}

/// What was just noted is looked at on the way out. True when the interrupted
/// state is the program's.
fn leave_later(frame: &mut Frame, inside: bool) -> bool {
    if inside {
        entry::redirect(frame);
    }
    !inside
}

/// Whether a signal with the runtime's number is the runtime's: from itself, or
/// from the launcher. Programs may use the number, too.
fn is_own(thread: &Thread, info: &SignalInfo) -> bool {
    match info.code {
        // Should the program's own `tgkill` come between, the two change
        // places; they say the same.
        SI_TKILL => thread.entering.get(),
        LOOK_CODE | RELEASE_CODE => true,
        SI_USER => control::is_launcher(info.words[0] as u32),
        _ => false,
    }
}

/// The runtime's signal: the first one starts the thread, later ones are kicks.
fn handle_kick(thread: &Thread, frame: &mut Frame, info: &SignalInfo, inside: bool) -> bool {
    if thread.entering.get() && info.code == SI_TKILL {
        thread.entering.set(false);
        context::load(&thread.start.lock(), frame);
        return true;
    }
    if info.code == LOOK_CODE {
        held::announce(thread);
        return leave_later(frame, inside);
    }
    if info.code == RELEASE_CODE {
        calls::trace::ask_release(thread);
        return leave_later(frame, inside);
    }
    if inside {
        let inbox = thread.inbox();
        inbox.pending.fetch_or(PENDING_KICK, Ordering::Release);
        entry::redirect(frame);
        return false;
    }
    engine::kick(thread, frame);
    true
}

/// A bad or absent page was touched.
fn handle_fault(thread: &Thread, frame: &mut Frame, info: &SignalInfo, inside: bool) {
    if engine::fault(thread, frame, info) {
        return;
    }
    if !inside {
        deliver::deliver_fault(thread, frame, info);
    } else if !memory::fix_up(frame) {
        log::fail(
            EXIT_INTERNAL,
            format_args!(
                "the runtime touched {:#x} at {:#x} (signal {}, code {})",
                info.words[0], frame.registers.rip, info.signal, info.code
            ),
        );
    }
}

/// Hands what waits in the inbox to the program, or to the engine.
fn deliver_pending(thread: &Thread, frame: &mut Frame) {
    let inbox = thread.inbox();
    let pending = inbox.pending.swap(0, Ordering::Acquire);
    if pending & PENDING_SIGNAL != 0 {
        // SAFETY: the bit says that the slot is filled; program signals stay
        // blocked until this thread leaves the runtime, so nobody writes it.
        let info = unsafe { *inbox.info.get() };
        deliver::deliver(thread, frame, &info);
    }
    if pending & PENDING_OPEN != 0 {
        deliver_open(thread, frame);
    }
    if pending & PENDING_KICK != 0 {
        engine::kick(thread, frame);
    }
    if pending & PENDING_RELEASE != 0 {
        calls::trace::release(thread, frame);
    }
}

/// Delivers what the stores have and the program does not block.
fn deliver_open(thread: &Thread, frame: &mut Frame) {
    while let Some(info) = held::take(thread, !mask::hidden(thread)) {
        deliver::deliver(thread, frame, &info);
    }
    // Another thread may have taken what ended a wait.
    thread.temporary_mask.set(None);
    held::wake_another(thread);
}

/// Whether the way out will run a handler of the program, or end it.
pub fn interrupts(thread: &Thread) -> bool {
    let pending = thread.pending();
    pending & PENDING_SIGNAL != 0 || pending & PENDING_OPEN != 0 && held::is_deliverable(thread)
}

/// Starts the calling thread in the program with [`Thread::start`]: a signal to
/// itself makes the frame that every later step relies on.
pub fn enter(thread: &Thread) -> ! {
    thread.entering.set(true);
    let _ = call!(tgkill, thread.process(), thread.id(), KICK);
    log::fatal(
        EXIT_INTERNAL,
        "the runtime's own signal did not start the thread",
    )
}
