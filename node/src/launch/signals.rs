//! The signals of a launcher, taken over while its aggregate runs: what becomes of
//! each is said where it is asked for, in [`super::program`] and [`super::machine`].

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use crate::spawn::SignalState;

/// `si_code` of a signal from the kernel: from the terminal, to all processes of the
/// launcher's group.
const SI_KERNEL: i32 = 0x80;

/// See the module.
pub struct Signals {
    before: SignalState,
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
    /// Has `taken` and the ends of children wait to be read, and ignores `ignored`.
    ///
    /// # Errors
    /// The kernel's.
    pub fn take(taken: &[Signal], ignored: &[i32]) -> io::Result<Signals> {
        let before = SignalState::save(ignored);
        let mut set: SigSet = taken.iter().copied().collect();
        set.add(Signal::SIGCHLD);
        set.thread_block()?;
        for signal in ignored {
            // SAFETY: ignoring installs no handler.
            unsafe { libc::signal(*signal, libc::SIG_IGN) };
        }
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        Ok(Signals {
            before,
            descriptor: SignalFd::with_flags(&set, flags)?,
        })
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
