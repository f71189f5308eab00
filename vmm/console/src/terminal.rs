//! Raw mode of the terminal, in which every key reaches the guest.
//!
//! Invariant: after the process has ended by return, panic or a forbidden system call, the
//! terminal has its former mode. The caller handles signals: `weft vm run` reads them, and
//! `weft vm console` calls [`restore_when_killed`]. After SIGKILL the parent, `weft vm run`,
//! restores the terminal.

use std::io::{self, IsTerminal};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Once, OnceLock};

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use nix::sys::termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};

/// The mode before the first change, and the terminal's descriptor.
static BEFORE: OnceLock<(RawFd, libc::termios)> = OnceLock::new();
/// Whether the terminal is in raw mode.
static CHANGED: AtomicBool = AtomicBool::new(false);

/// The size of a terminal, in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    pub columns: u16,
    pub rows: u16,
}

/// Raw mode of standard input, until dropped.
#[derive(Debug)]
pub struct Raw(());

impl Raw {
    /// Enters raw mode; `None` when standard input is no terminal.
    pub fn enter() -> io::Result<Option<Raw>> {
        let input = io::stdin();
        if !input.is_terminal() {
            return Ok(None);
        }
        let before = tcgetattr(input.as_fd())?;
        let mut raw: Termios = before.clone();
        cfmakeraw(&mut raw);
        BEFORE.get_or_init(|| (input.as_raw_fd(), before.into()));
        restore_when_panicking();
        weft_confine::at_violation(restore);
        CHANGED.store(true, Ordering::Release);
        tcsetattr(input.as_fd(), SetArg::TCSANOW, &raw)?;
        Ok(Some(Raw(())))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        restore();
    }
}

/// Restores the mode before [`Raw::enter`]. Async-signal-safe; does nothing if the mode was not
/// changed.
pub fn restore() {
    if !CHANGED.swap(false, Ordering::AcqRel) {
        return;
    }
    if let Some((descriptor, mode)) = BEFORE.get() {
        // SAFETY: the mode is a whole termios structure that tcgetattr filled in.
        unsafe { libc::tcsetattr(*descriptor, libc::TCSANOW, mode) };
    }
}

/// Makes the signals that end programs restore the terminal first, for a process that does not
/// handle them otherwise. Ignored signals stay ignored.
pub fn restore_when_killed() -> io::Result<()> {
    for signal in [
        Signal::SIGHUP,
        Signal::SIGINT,
        Signal::SIGQUIT,
        Signal::SIGTERM,
    ] {
        let action = SigAction::new(
            SigHandler::Handler(restore_and_end),
            // Its second arrival, raised in the handler, has the default effect.
            SaFlags::SA_RESETHAND,
            SigSet::empty(),
        );
        // SAFETY: the handler makes async-signal-safe calls only.
        let before = unsafe { sigaction(signal, &action) }?;
        if matches!(before.handler(), SigHandler::SigIgn) {
            // SAFETY: the action is the one that was there.
            unsafe { sigaction(signal, &before) }?;
        }
    }
    Ok(())
}

extern "C" fn restore_and_end(signal: libc::c_int) {
    restore();
    // SAFETY: a call with a number; the signal waits for the handler's end.
    unsafe { libc::raise(signal) };
}

fn restore_when_panicking() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            restore();
            before(panic);
        }));
    });
}

/// The size of the terminal at `descriptor`, if it is one.
pub fn size(descriptor: impl AsFd) -> Option<Size> {
    let mut size = MaybeUninit::<libc::winsize>::zeroed();
    let descriptor = descriptor.as_fd().as_raw_fd();
    // SAFETY: the request writes one winsize structure; all zero is one as well.
    let size = unsafe {
        if libc::ioctl(descriptor, libc::TIOCGWINSZ, size.as_mut_ptr()) != 0 {
            return None;
        }
        size.assume_init()
    };
    (size.ws_col > 0 && size.ws_row > 0).then_some(Size {
        columns: size.ws_col,
        rows: size.ws_row,
    })
}
