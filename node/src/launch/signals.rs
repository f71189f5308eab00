//! The signals of a launcher, taken over while its aggregate runs: what becomes of
//! each is said where it is asked for, in [`super::program`] and [`super::machine`].

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use crate::error::LaunchError;
use crate::spawn::SignalState;

/// `si_code` of a signal from the kernel: from the terminal, to all processes of the
/// launcher's group.
const SI_KERNEL: i32 = 0x80;

/// See the module.
pub struct Signals {
    before: SignalState,
    /// Ignored from [`Signals::pass_on`] on.
    ignored: SigSet,
    descriptor: SignalFd,
}

/// What a signal asks of the owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SignalEvent {
    /// This signal came.
    Signal {
        /// As in signal(7).
        number: i32,
        /// The kernel sent it, to home as well.
        by_kernel: bool,
    },
    /// A child stopped, went on or ended.
    Child,
}

impl Signals {
    /// Has `taken` and the ends of children wait to be read; `ignored` as well, until
    /// [`Signals::pass_on`].
    ///
    /// # Errors
    /// The kernel's.
    pub fn take(taken: &[Signal], ignored: &[Signal]) -> io::Result<Signals> {
        let numbers: Vec<i32> = ignored.iter().map(|signal| *signal as i32).collect();
        let before = SignalState::save(&numbers);
        let ignored: SigSet = ignored.iter().copied().collect();
        let mut set: SigSet = taken.iter().copied().chain(&ignored).collect();
        set.add(Signal::SIGCHLD);
        set.thread_block()?;
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        Ok(Signals {
            before,
            ignored,
            descriptor: SignalFd::with_flags(&set, flags)?,
        })
    }

    /// Fails when a signal asked for the end: while there is no process to which it
    /// could be passed on, it ends the launch.
    ///
    /// # Errors
    /// The first such signal.
    pub fn check(&self) -> Result<(), LaunchError> {
        while let Some(request) = self.next() {
            if let SignalEvent::Signal { number, .. } = request
                && let Ok(signal) = Signal::try_from(number)
                && !is_ignored(signal)
            {
                return Err(LaunchError::Interrupted { signal });
            }
        }
        Ok(())
    }

    /// From now on home gets the signals of the terminal as well: those in `ignored` are
    /// home's alone.
    ///
    /// # Errors
    /// The kernel's.
    pub fn pass_on(&self) -> io::Result<()> {
        for signal in &self.ignored {
            // SAFETY: ignoring installs no handler.
            unsafe { libc::signal(signal as i32, libc::SIG_IGN) };
        }
        Ok(self.ignored.thread_unblock()?)
    }

    /// Puts back what was before.
    pub fn give_back(&self) {
        self.before.restore();
    }

    /// Mask and dispositions at the launcher's start.
    pub fn before(&self) -> &SignalState {
        &self.before
    }

    /// Readable when a signal waits.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    /// The next request, if there is one.
    pub fn next(&self) -> Option<SignalEvent> {
        let info = self.descriptor.read_signal().ok()??;
        Some(match info.ssi_signo as i32 {
            libc::SIGCHLD => SignalEvent::Child,
            number => SignalEvent::Signal {
                number,
                by_kernel: info.ssi_code == SI_KERNEL,
            },
        })
    }
}

/// Whether this process ignores a signal, which it may have inherited.
pub fn is_ignored(signal: Signal) -> bool {
    // SAFETY: plain data for which all zeros is valid; the call only writes to it, and
    // null means "change nothing".
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal as i32, std::ptr::null(), &mut action) == 0
            && action.sa_sigaction == libc::SIG_IGN
    }
}
