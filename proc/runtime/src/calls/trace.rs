//! `ptrace`: a forked child that is traced stops being intercepted.
//!
//! A tracer would see a SIGSYS for every system call of the child. A child is at
//! home, with memory of its own, and no part of the aggregate, so it needs the
//! runtime for nothing that a tracer could not do without: it is *released*. The
//! kernel is told everything that the runtime knows for the program (actions,
//! mask, alternate stack, the word to clear), and interception ends.
//!
//! The program's first process, the child of a `vfork`, and a child with several
//! threads cannot be released: tracing them is refused (EPERM).

use core::fmt::Write;
use core::ptr;
use core::sync::atomic::Ordering;

use syscalls::Sysno;

use super::{RESTART, word};
use crate::frame::{AlternateStack, Frame, SignalInfo};
use crate::log::Line;
use crate::own_calls::{self, Errno, Result, call};
use crate::signal::{KICK, RELEASE_CODE, actions, held, mask};
use crate::thread::{self, PENDING_RELEASE, Thread};
use crate::{control, descriptors, intercept};

const PTRACE_TRACEME: usize = 0;
const PTRACE_ATTACH: usize = 16;
const PTRACE_SEIZE: usize = 0x4206;
/// How long a child may take to be released, and how often it is looked at.
const RELEASE_NS: u64 = 2_000_000_000;
const LOOK_NS: u64 = 500_000;

/// `ptrace` as far as it makes a tracee; `None`: the kernel does it.
pub fn call(thread: &Thread, call: Sysno, arguments: &[usize; 6]) -> Option<isize> {
    if call != Sysno::ptrace {
        return None;
    }
    match arguments[0] {
        PTRACE_TRACEME if can_be_released(thread) => {
            ask_release(thread);
            Some(RESTART)
        }
        PTRACE_TRACEME => Some(word(Err(Errno::EPERM))),
        PTRACE_ATTACH | PTRACE_SEIZE => release_other(arguments[1] as u32)
            .err()
            .map(|error| word(Err(error))),
        _ => None,
    }
}

fn can_be_released(thread: &Thread) -> bool {
    !control::is_main_process() && !thread.borrowed.get() && thread::count() == 1
}

/// The thread is released on its way out, if it can be.
pub fn ask_release(thread: &Thread) {
    let pending = &thread.inbox().pending;
    pending.fetch_or(PENDING_RELEASE, Ordering::Release);
}

/// The way out of a thread that was asked to be released: `frame` becomes a state
/// that needs no runtime.
pub fn release(thread: &Thread, frame: &mut Frame) {
    if !can_be_released(thread) {
        return;
    }
    const SIG_SETMASK: usize = 2;
    let all = u64::MAX;
    let _ = call!(rt_sigprocmask, SIG_SETMASK, &raw const all, 0, 8);
    held::give_back(thread);
    intercept::disarm();
    actions::release(thread.table());
    let _ = call!(set_tid_address, thread.clear_child_tid.get());
    frame.mask = mask::get(thread, frame);
    frame.stack = thread.alternate_stack.get();
    // SAFETY: all signals are blocked, so nothing needs a stack here.
    unsafe { use_alternate_stack(&frame.stack, ptr::from_ref(thread) as usize) };
}

/// Tells the kernel about an alternate stack. It refuses that to a thread whose
/// stack pointer is on the one before, so the pointer is `elsewhere` for the call.
///
/// # Safety
/// No signal may come meanwhile.
unsafe fn use_alternate_stack(stack: &AlternateStack, elsewhere: usize) {
    // SAFETY: the caller vouches that nothing but this call uses the stack
    // pointer; the call reads `stack` only.
    unsafe {
        core::arch::asm!(
            "xchg rsp, {other}",
            "syscall",
            "xchg rsp, {other}",
            other = inout(reg) elsewhere => _,
            inlateout("rax") Sysno::sigaltstack as usize => _,
            in("rdi") ptr::from_ref(stack),
            in("rsi") 0,
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
}

/// Has another process released, if it is one of the program's children that run
/// in the runtime.
fn release_other(process: u32) -> Result<()> {
    if file_of(Some(process)) != file_of(None) || file_of(None).is_none() {
        return Ok(());
    }
    if !is_intercepted(process) {
        return Ok(());
    }
    if control::main_process() == process || !is_single(process) {
        return Err(Errno::EPERM);
    }
    let info = SignalInfo {
        signal: KICK,
        code: RELEASE_CODE,
        ..SignalInfo::EMPTY
    };
    let start_ns = own_calls::monotonic_ns();
    // Once: behind the release another one would be deadly.
    call!(rt_tgsigqueueinfo, process, process, KICK, &raw const info)?;
    while is_intercepted(process) {
        if own_calls::monotonic_ns() - start_ns > RELEASE_NS {
            return Err(Errno::EPERM);
        }
        let moment = [0, LOOK_NS];
        let _ = call!(nanosleep, moment.as_ptr(), 0);
    }
    Ok(())
}

/// What a process executes: device and inode.
fn file_of(process: Option<u32>) -> Option<[u64; 2]> {
    let mut path = Line::new();
    let _ = match process {
        Some(process) => write!(path, "/proc/{process}/exe\0"),
        None => path.write_str("/proc/self/exe\0"),
    };
    let mut status = [0u64; 18];
    call!(stat, path.as_str().as_ptr(), status.as_mut_ptr()).ok()?;
    Some([status[0], status[1]])
}

/// A line of a process's status.
fn status_line<T>(process: u32, name: &str, read: impl FnOnce(&str) -> Option<T>) -> Option<T> {
    let mut path = Line::new();
    let _ = write!(path, "/proc/{process}/status\0");
    let descriptor = descriptors::open(path.as_str().as_ptr(), 0).ok()?;
    let mut text = [0u8; 4096];
    let length = own_calls::read_at(descriptor, &mut text, 0);
    let _ = call!(close, descriptor);
    let text = core::str::from_utf8(&text[..length.ok()?]).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    read(line.trim())
}

fn is_single(process: u32) -> bool {
    status_line(process, "Threads:", |count| count.parse().ok()) == Some(1u32)
}

/// Whether a process that runs in the runtime still has its handlers.
fn is_intercepted(process: u32) -> bool {
    let caught = status_line(process, "SigCgt:", |bits| {
        u64::from_str_radix(bits, 16).ok()
    });
    caught.is_some_and(|caught| caught & mask::NEVER_BLOCKED == mask::NEVER_BLOCKED)
}
