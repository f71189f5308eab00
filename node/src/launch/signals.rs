//! What the launcher does with its own signals while the program runs.
//!
//! | signal | the launcher |
//! | --- | --- |
//! | `INT`, `QUIT` | ignores it: the terminal sends it to the program as well |
//! | `TERM`, `HUP`, `USR1`, `USR2` | passes it on, unless the kernel sent it to the whole group |
//! | `TSTP`, `TTIN`, `TTOU`, `CONT` | default: stops and goes on with the program |
//! | `CHLD` | looks whether the program stopped itself |
//! | others | default |

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use crate::spawn::SignalState;

const FORWARDED: [Signal; 4] = [
    Signal::SIGTERM,
    Signal::SIGHUP,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
];

/// `si_code` of a signal from the kernel: a hang-up of the terminal, say, which
/// the program got as well.
const SI_KERNEL: i32 = 0x80;

/// The launcher's signals, taken over until given back.
pub struct Signals {
    before: SignalState,
    descriptor: SignalFd,
}

/// What a signal asks of the owner.
#[derive(Debug, PartialEq, Eq)]
pub enum Request {
    /// Pass this signal on to the program.
    Forward(i32),
    /// A child stopped, went on or ended.
    Child,
}

impl Signals {
    /// Blocks and ignores as the table above says.
    pub fn take() -> io::Result<Signals> {
        let before = SignalState::save(&[libc::SIGINT, libc::SIGQUIT]);
        let mut set = SigSet::empty();
        set.add(Signal::SIGCHLD);
        FORWARDED.iter().for_each(|signal| set.add(*signal));
        set.thread_block()?;
        // SAFETY: ignoring installs no handler.
        unsafe {
            libc::signal(libc::SIGINT, libc::SIG_IGN);
            libc::signal(libc::SIGQUIT, libc::SIG_IGN);
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

    /// Mask and dispositions for the program.
    pub fn before(&self) -> &SignalState {
        &self.before
    }

    /// Readable when a signal waits.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    /// The next request, if there is one.
    pub fn next(&self) -> Option<Request> {
        loop {
            let info = self.descriptor.read_signal().ok()??;
            match info.ssi_signo as i32 {
                libc::SIGCHLD => return Some(Request::Child),
                _ if info.ssi_code == SI_KERNEL => continue,
                signal => return Some(Request::Forward(signal)),
            }
        }
    }
}
