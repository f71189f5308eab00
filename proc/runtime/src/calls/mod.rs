//! System calls of the program, one by one as dispatch brings them.
//!
//! While the aggregate is stretched the engine sees a call first. Otherwise, and
//! for what it leaves, a call runs here: some are the runtime's business
//! (memory, threads, signals, exec), the rest goes to the kernel with the
//! program's own pointers.
//!
//! A result is the kernel's word, or one of two that no kernel returns to user
//! space: [`RESTART`] and [`RESUME`].

mod clone;
mod exec;
mod files;
mod identity;
mod process;
mod threads;
pub mod trace;
mod waiting;

use syscalls::Sysno;

use crate::frame::{Frame, SignalInfo};
use crate::own_calls::{Errno, Result};
use crate::signal::{self, entry};
use crate::thread::Thread;
use crate::{control, engine, space};

/// The call was not made, or has to be made again: a signal comes first. The
/// kernel's ERESTARTSYS.
pub const RESTART: isize = -512;
/// The frame already says how the program continues.
pub const RESUME: isize = -513;

/// Length of the `syscall` instruction, bytes.
pub const INSTRUCTION_BYTES: usize = 2;
/// `AUDIT_ARCH_X86_64`.
const ARCHITECTURE: u64 = 0xc000_003e;

/// Handles an intercepted system call.
pub fn dispatch(thread: &Thread, frame: &mut Frame, info: &SignalInfo) {
    if let Some(shared) = control::shared() {
        weft_proc::stats::add(&shared.stats.system_calls, 1);
    }
    // A call through the 32-bit entry: not supported, as on a kernel without it.
    if info.words[1] >> 32 != ARCHITECTURE {
        frame.registers.rax = word(Err(Errno::ENOSYS)) as usize;
        return;
    }
    let registers = &frame.registers;
    let number = registers.rax;
    let arguments = [
        registers.rdi,
        registers.rsi,
        registers.rdx,
        registers.r10,
        registers.r8,
        registers.r9,
    ];
    let mut result = None;
    if engine::takes_calls() {
        result = engine::call(thread, frame, number, &arguments);
    }
    let result = result.unwrap_or_else(|| native(thread, frame, number, &arguments));
    complete(frame, result);
}

/// Lets the program continue with the result of a call.
fn complete(frame: &mut Frame, result: isize) {
    match result {
        RESUME => {}
        RESTART => frame.registers.rip -= INSTRUCTION_BYTES,
        value => frame.registers.rax = value as usize,
    }
}

/// The kernel's word for a result.
pub fn word(result: Result<usize>) -> isize {
    match result {
        Ok(value) => value as isize,
        Err(error) => -(error.into_raw() as isize),
    }
}

/// Makes a call for the program on this thread and waits for it. A signal that
/// arrives stays in the thread's inbox: the result is then EINTR, or
/// [`RESTART`] when the call must be made again afterwards.
pub fn run_for(thread: &Thread, number: usize, arguments: &[usize; 6]) -> isize {
    // SAFETY: this is what the program asked for; it may do to its own memory
    // what it likes, and the runtime's lies where it has no business.
    let result = unsafe { entry::call(thread, number, arguments) };
    // Neither the runtime's own signal nor one that the program blocks is a
    // reason for the program to see EINTR.
    let interrupted = result == word(Err(Errno::EINTR));
    if interrupted && thread.pending() != 0 && !signal::interrupts(thread) {
        return RESTART;
    }
    result
}

/// Makes a call that is neither about memory nor about threads, with the
/// pointers as given: the program's, or a buffer's of the engine.
pub fn plain(thread: &Thread, number: usize, arguments: &[usize; 6]) -> isize {
    Sysno::new(number)
        .and_then(|call| {
            waiting::call(thread, call, arguments)
                .or_else(|| files::call(thread, call, arguments))
                .or_else(|| trace::call(thread, call, arguments))
        })
        .unwrap_or_else(|| run_for(thread, number, arguments))
}

/// Runs a call without the engine.
pub fn native(thread: &Thread, frame: &mut Frame, number: usize, arguments: &[usize; 6]) -> isize {
    match Sysno::new(number) {
        Some(call) => memory_call(call, arguments)
            .or_else(|| signal_call(thread, frame, call, arguments))
            .or_else(|| thread_call(thread, frame, call, arguments))
            .or_else(|| files::call(thread, call, arguments))
            .or_else(|| trace::call(thread, call, arguments))
            .unwrap_or_else(|| run_for(thread, number, arguments)),
        None => run_for(thread, number, arguments),
    }
}

/// Calls that change the address space.
pub fn memory_call(call: Sysno, arguments: &[usize; 6]) -> Option<isize> {
    let [a, b, c, d, ..] = *arguments;
    let result = match call {
        Sysno::mmap => space::lock().map(arguments),
        Sysno::munmap => space::lock().unmap(a, b),
        Sysno::mprotect => space::lock().protect(a, b, c, None),
        Sysno::pkey_mprotect => space::lock().protect(a, b, c, Some(d)),
        Sysno::mremap => space::lock().remap(arguments),
        Sysno::brk => Ok(space::lock().set_break(a)),
        Sysno::madvise => space::lock().advise(a, b, c),
        Sysno::shmat => space::lock().attach_shared(a, b, c),
        Sysno::shmdt => space::lock().detach_shared(a),
        _ => return None,
    };
    Some(word(result))
}

/// Calls about signals.
fn signal_call(
    thread: &Thread,
    frame: &mut Frame,
    call: Sysno,
    arguments: &[usize; 6],
) -> Option<isize> {
    let result = match call {
        Sysno::rt_sigaction => word(signal::actions::rt_sigaction(thread, arguments)),
        Sysno::rt_sigprocmask => match signal::mask::rt_sigprocmask(thread, frame, arguments) {
            Ok(Some(value)) => value as isize,
            Ok(None) => RESTART,
            Err(error) => word(Err(error)),
        },
        Sysno::rt_sigpending => word(signal::mask::rt_sigpending(thread, arguments)),
        Sysno::rt_sigreturn => {
            signal::rt_sigreturn(thread, frame);
            RESUME
        }
        Sysno::sigaltstack => word(signal::sigaltstack(thread, frame, arguments)),
        _ => return waiting::call(thread, call, arguments),
    };
    Some(result)
}

/// Calls that make, end or change threads and processes.
fn thread_call(
    thread: &Thread,
    frame: &mut Frame,
    call: Sysno,
    arguments: &[usize; 6],
) -> Option<isize> {
    let result = match call {
        Sysno::clone | Sysno::clone3 | Sysno::fork | Sysno::vfork => {
            process::clone(thread, frame, call, arguments)
        }
        Sysno::execve | Sysno::execveat => exec::call(thread, frame, call, arguments),
        Sysno::exit => threads::exit(thread, arguments[0]),
        Sysno::exit_group => threads::exit_group(thread, arguments[0]),
        _ => return identity::call(thread, call, arguments),
    };
    Some(result)
}
