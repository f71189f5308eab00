//! Launching an aggregate and staying with it until it ends.
//!
//! One thread, the *owner*, does everything that changes the aggregate: a loop
//! over `poll` in [`aggregate`]. Whoever wants something (a signal, a `weft
//! stretch`, a daemon, a runtime) is a descriptor in that loop. Nobody else
//! touches a runtime, so there are no locks.
//!
//! ```text
//! plan ──▶ slices ──▶ home ──▶ running ──▶ ended
//!                      ▲          │ execve of the main process
//!                      └──────────┘ (new slices, generation + 1)
//! ```
//!
//! - [`plan`]: everything is checked before anything starts
//! - [`nodes`]: the slices of one generation, here or on other hosts
//! - [`cause`]: why one of them ended
//! - [`pulse`]: whether it runs
//! - [`stop`]: stopping with the program
//! - [`signals`]: what the launcher does with its own signals

mod aggregate;
mod cause;
mod nodes;
mod plan;
mod pulse;
mod signals;
mod stop;

use std::sync::Arc;

pub(crate) use nodes::{Body, Node};
pub(crate) use plan::Plan;

use crate::error::LaunchError;
use crate::options::RunOptions;
use crate::report::{Monitor, Report};
use crate::spawn::Ended;

/// How a run ended.
#[derive(Debug)]
pub struct Outcome {
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
    monitor: &Arc<Monitor>,
    say: &mut dyn FnMut(&str),
) -> Result<Outcome, LaunchError> {
    let plan = Plan::check(options)?;
    let signals = signals::Signals::take().map_err(LaunchError::system("set up signals"))?;
    let result = aggregate::Aggregate::start(plan, &signals, monitor, say)
        .and_then(|aggregate| aggregate.run());
    monitor.finish();
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
