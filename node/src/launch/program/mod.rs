//! Launching a program and staying with it until it ends.
//!
//! ```text
//! plan ──▶ slices ──▶ home ──▶ running ──▶ ended
//!                      ▲          │ execve of the main process
//!                      └──────────┘ (new slices, generation + 1)
//! ```
//!
//! - [`plan`]: everything is checked before anything starts
//! - [`home_budget`]: how home's budget follows the memory of its host
//! - [`owner`]: every change of the aggregate
//! - [`stop`]: stopping with the program
//!
//! | signal | the launcher |
//! | --- | --- |
//! | `INT`, `QUIT` | before home runs: ends the launch; afterwards: ignores it, because the terminal sends it to the program as well |
//! | `TERM`, `HUP`, `USR1`, `USR2` | before home runs: ends the launch; afterwards: passes it on, unless the kernel sent it to the whole group |
//! | `TSTP`, `TTIN`, `TTOU`, `CONT` | default: stops and goes on with the program |
//! | `CHLD` | looks whether the program stopped itself |
//! | others | default |

mod home_budget;
mod owner;
mod plan;
mod stop;

use std::sync::Arc;

use nix::sys::signal::Signal;

pub use plan::ProgramPlan;

use super::signals::Signals;
use crate::error::LaunchError;
use crate::options::RunOptions;
use crate::report::{LiveView, Report};
use crate::spawn::Ended;

/// Passed on to the program.
const FORWARDED: [Signal; 4] = [
    Signal::SIGTERM,
    Signal::SIGHUP,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
];
/// The terminal sends them to the program as well.
const IGNORED: [Signal; 2] = [Signal::SIGINT, Signal::SIGQUIT];

/// How a run ended.
#[derive(Debug)]
pub struct ProgramOutcome {
    /// How the program ended, or the exit code that Weft chose.
    pub ended: Ended,
    /// All counters at the end; none when it ended before the program started.
    pub report: Report,
}

/// Runs a program and returns when it has ended. `say` gets each sentence that
/// the user should read, without the `weft: ` before it.
///
/// Call it on the process's first thread: every runtime that it starts ends with
/// the calling thread.
pub fn launch(
    options: &RunOptions,
    live: &Arc<LiveView>,
    say: &mut dyn FnMut(&str),
) -> Result<ProgramOutcome, LaunchError> {
    let plan = ProgramPlan::check(options)?;
    let signals =
        Signals::take(&FORWARDED, &IGNORED).map_err(LaunchError::system("set up signals"))?;
    let result = owner::Owner::start(plan, &signals, live, say).and_then(owner::Owner::run);
    live.finish();
    signals.give_back();
    result
}

/// Ends this process as the program ended: with its exit code, or by the same
/// signal (without a core file: the program has left its own).
pub fn end_like(ended: Ended) -> ! {
    match ended {
        Ended::Exited(code) => std::process::exit(code),
        Ended::Signaled(signal) => {
            let none = libc::rlimit {
                rlim_cur: 0,
                rlim_max: 0,
            };
            // SAFETY: integers and structures that outlive the calls. The signal
            // gets its default action and is unblocked, then sent to this process.
            unsafe {
                libc::setrlimit(libc::RLIMIT_CORE, &none);
                libc::signal(signal, libc::SIG_DFL);
                let mut set: libc::sigset_t = std::mem::zeroed();
                libc::sigaddset(&mut set, signal);
                libc::pthread_sigmask(libc::SIG_UNBLOCK, &set, std::ptr::null_mut());
                libc::kill(libc::getpid(), signal);
            }
            // A signal whose default action does not end a process cannot have
            // ended the program; a shell would report it like this.
            std::process::exit(128 + signal)
        }
    }
}
