//! What happens when a filter refuses a call: the kernel sends SIGSYS to the
//! thread (`SECCOMP_RET_TRAP`), whose handler says who and what, and ends the
//! process. The call itself was not made.

use std::cell::Cell;
use std::sync::atomic::{AtomicPtr, Ordering};

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

use super::{ConfineError, ThreadKind};

/// The exit status after a refused call: what a shell shows for a process that
/// SIGSYS ended.
pub const EXIT_REFUSED: i32 = 128 + libc::SIGSYS;

thread_local! {
    static KIND: Cell<Option<ThreadKind>> = const { Cell::new(None) };
}

/// What to call before the process ends: restores the terminal.
static LAST_ACT: AtomicPtr<()> = AtomicPtr::new(std::ptr::null_mut());

/// Remembers what this thread is, for the handler.
pub(super) fn name_thread(kind: ThreadKind) {
    KIND.set(Some(kind));
}

/// Has `act` called before a refused call ends the process. It runs in a signal
/// handler, under the thread's filter: it may do what is async-signal-safe and
/// common to all threads.
pub fn at_violation(act: fn()) {
    LAST_ACT.store(act as *mut (), Ordering::Release);
}

/// Installs the handler.
pub(super) fn install() -> Result<(), ConfineError> {
    let action = SigAction::new(
        SigHandler::SigAction(refused),
        SaFlags::SA_SIGINFO | SaFlags::SA_ONSTACK,
        SigSet::all(),
    );
    // SAFETY: the handler calls only what is async-signal-safe: see there.
    unsafe { sigaction(Signal::SIGSYS, &action) }
        .map(drop)
        .map_err(|error| ConfineError::Prepare {
            what: "handle SIGSYS",
            source: error.into(),
        })
}

/// Says what was refused and ends the process. No allocation, no lock: `write`
/// and `exit_group` only.
extern "C" fn refused(_: libc::c_int, information: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // `si_syscall`: after three integers, padding and the address of the call
    // (`include/uapi/asm-generic/siginfo.h`, _sigsys).
    const SYSCALL_OFFSET: usize = 24;
    // SAFETY: the kernel passes a whole siginfo_t (128 bytes) to a handler with
    // SA_SIGINFO; the field is an aligned integer in it.
    let number = unsafe {
        information
            .cast::<u8>()
            .add(SYSCALL_OFFSET)
            .cast::<i32>()
            .read()
    };
    let thread = KIND.get().map_or("unnamed", ThreadKind::name);
    let name = usize::try_from(number)
        .ok()
        .and_then(syscalls::Sysno::new)
        .map_or("unknown", |call| call.name());
    let mut line = Line::default();
    line.push("weft: ended: the ");
    line.push(thread);
    line.push(" thread made the system call ");
    line.push(name);
    line.push(" (");
    line.push_number(number.unsigned_abs());
    line.push("), which its filter forbids; `--confine log` disables the filter\n");
    let act = LAST_ACT.load(Ordering::Acquire);
    if !act.is_null() {
        // SAFETY: only `at_violation` stores here, and it stores a `fn()`.
        let act: fn() = unsafe { std::mem::transmute(act) };
        act();
    }
    // SAFETY: the bytes live on this stack; exiting touches nothing of ours.
    unsafe {
        libc::write(libc::STDERR_FILENO, line.bytes.as_ptr().cast(), line.length);
        libc::_exit(EXIT_REFUSED);
    }
}

/// A line put together without the allocator.
struct Line {
    bytes: [u8; 256],
    length: usize,
}

impl Default for Line {
    fn default() -> Self {
        Line {
            bytes: [0; 256],
            length: 0,
        }
    }
}

impl Line {
    fn push(&mut self, text: &str) {
        for byte in text.bytes() {
            if let Some(place) = self.bytes.get_mut(self.length) {
                *place = byte;
                self.length += 1;
            }
        }
    }

    fn push_number(&mut self, number: u32) {
        let mut divisor = 1_000_000_000;
        let mut started = false;
        while divisor > 0 {
            let digit = number / divisor % 10;
            started |= digit != 0 || divisor == 1;
            if started && let Some(place) = self.bytes.get_mut(self.length) {
                *place = b'0' + digit as u8;
                self.length += 1;
            }
            divisor /= 10;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_without_zeros_in_front() {
        let mut line = Line::default();
        for number in [0, 7, 257, u32::MAX] {
            line.push_number(number);
            line.push(" ");
        }
        assert_eq!(&line.bytes[..line.length], b"0 7 257 4294967295 ");
        line.push(&"x".repeat(500));
        assert_eq!(line.length, 256);
    }
}
