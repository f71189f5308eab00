//! What the process that runs guests may still do once a guest runs.
//!
//! A guest that breaks out of its vCPU or of a device finds itself in a thread
//! that may do little more than that thread's work:
//!
//! ```text
//! open files, sockets, /dev/kvm ──▶ drop user ──▶ prepare ──▶ threads, each: enter ──▶ guest
//!                                  (privilege)    (here)             (here)
//! ```
//!
//! - [`prepare`] is called once, by the first thread, before it makes others: no
//!   new privileges, no core file, every descriptor closed on exec, and a handler
//!   for what the filters refuse.
//! - [`enter`] is called by each thread when it has what it needs; from then on
//!   its filter (`rules`) holds for that thread, and cannot be taken off. A thread
//!   made afterwards starts with its maker's filter, so threads are made first.
//! - [`settle`] is called before the first guest instruction.
//! - Without [`prepare`] (unit tests, embedding), [`enter`] does nothing.
//!
//! A refused call ends the process with [`EXIT_REFUSED`] and a sentence that
//! names the thread and the call (one made with signals blocked ends it too, by
//! SIGSYS and without a sentence). With [`Mode::Log`] the call is let through and
//! the kernel's audit log names it instead.

mod join;
mod limits;
pub mod privilege;
mod rules;
mod starting;
pub mod time_slice;
mod violation;

use std::collections::BTreeMap;
use std::io;
use std::sync::OnceLock;
use std::thread::JoinHandle;

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
use thiserror::Error;

pub use join::join_until;
pub use violation::{EXIT_REFUSED, at_violation};

/// Locks; a panic of another holder changes nothing about the data here.
pub fn lock<T: ?Sized>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poison| poison.into_inner())
}

/// Whether calls outside a thread's work are refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// They end the process.
    #[default]
    Enforce,
    /// The kernel logs them (`type=1326` in the audit or kernel log) and lets them pass.
    Log,
    /// No filters.
    Off,
}

/// What a thread does, and so what it may ask of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ThreadKind {
    /// Put the machine together, and waits for its end.
    Main,
    /// Runs a guest CPU in software.
    SoftVcpu,
    /// Runs a guest CPU on `/dev/kvm`.
    KvmVcpu,
    /// Reads and writes disk images.
    Block,
    /// Moves packets between the guest and a tap device, or a network in user
    /// space (which is a process of its own).
    Network,
    /// Any other device, and timers: reads, writes and waits on what is open.
    Device,
    /// Reads or writes a link to another slice.
    Link,
    /// Serves the HTTP API.
    Api,
    /// Carries the guest's console to a terminal or a socket.
    Console,
    /// Takes links to slices that join, as open sockets.
    Admission,
}

impl ThreadKind {
    /// Whether vCPUs, here or on other hosts, or a machine that stands, wait for what it does.
    fn serves_others(self) -> bool {
        matches!(self, Self::Main | Self::Network | Self::Device | Self::Link)
    }

    /// Every kind.
    pub const ALL: [ThreadKind; 10] = [
        ThreadKind::Main,
        ThreadKind::SoftVcpu,
        ThreadKind::KvmVcpu,
        ThreadKind::Block,
        ThreadKind::Network,
        ThreadKind::Device,
        ThreadKind::Link,
        ThreadKind::Api,
        ThreadKind::Console,
        ThreadKind::Admission,
    ];

    /// For messages.
    pub fn name(self) -> &'static str {
        match self {
            ThreadKind::Main => "main",
            ThreadKind::SoftVcpu => "soft vCPU",
            ThreadKind::KvmVcpu => "KVM vCPU",
            ThreadKind::Block => "block device",
            ThreadKind::Network => "network device",
            ThreadKind::Device => "device",
            ThreadKind::Link => "link",
            ThreadKind::Api => "API",
            ThreadKind::Console => "console",
            ThreadKind::Admission => "admission",
        }
    }
}

/// Why a thread could not be confined.
#[derive(Debug, Error)]
pub enum ConfineError {
    /// The kernel has no seccomp filters, or refused this one.
    #[error("cannot install the system call filter of the {kind} thread (CONFIG_SECCOMP_FILTER)")]
    Install {
        /// Whose.
        kind: &'static str,
        /// The kernel's answer.
        source: seccompiler::Error,
    },
    /// A filter does not compile: a mistake in `rules`.
    #[error("the system call filter of the {kind} thread does not compile")]
    Compile {
        /// Whose.
        kind: &'static str,
        /// What is wrong with it.
        source: seccompiler::BackendError,
    },
    /// A call of the preparation failed.
    #[error("cannot {what}")]
    Prepare {
        /// What was tried.
        what: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
}

/// The compiled filters of this process; absent until [`prepare`], and with
/// [`Mode::Off`].
static FILTERS: OnceLock<Filters> = OnceLock::new();

/// Starts a thread that is confined before it runs `body`. Whether it could be,
/// [`settle`] says: threads start side by side.
pub fn spawn(
    name: &str,
    kind: ThreadKind,
    body: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    starting::add();
    let thread = std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(move || {
            if kind.serves_others() {
                time_slice::shorten();
            }
            let result = enter(kind);
            let go = result.is_ok();
            starting::remove(result);
            if go {
                body();
            }
        });
    if thread.is_err() {
        starting::remove(Ok(()));
    }
    thread
}

/// Waits until every thread of [`spawn`] is confined; an error when one is not.
/// No guest instruction may be executed before.
pub fn settle() -> io::Result<()> {
    starting::wait().map_err(io::Error::other)
}

type Filters = BTreeMap<ThreadKind, BpfProgram>;

/// Prepares this process; see the module's description. A second call changes
/// nothing.
pub fn prepare(mode: Mode) -> Result<(), ConfineError> {
    limits::close_on_exec()?;
    if mode == Mode::Off {
        return Ok(());
    }
    limits::no_new_privileges()?;
    limits::no_core_file()?;
    limits::no_file_for_the_allocator()?;
    violation::install()?;
    let filters = compile_all(mode)?;
    // Somebody else's filters, if they were first, are as good.
    let _ = FILTERS.set(filters);
    Ok(())
}

/// Whether [`prepare`] was called: threads are confined, or will be.
pub fn is_prepared() -> bool {
    FILTERS.get().is_some()
}

/// Confines the calling thread for the rest of its life.
pub fn enter(kind: ThreadKind) -> Result<(), ConfineError> {
    let Some(filter) = FILTERS.get().and_then(|filters| filters.get(&kind)) else {
        return Ok(());
    };
    violation::name_thread(kind);
    seccompiler::apply_filter(filter).map_err(|source| ConfineError::Install {
        kind: kind.name(),
        source,
    })
}

/// An error with what led to it.
fn sentence(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

fn compile_all(mode: Mode) -> Result<Filters, ConfineError> {
    let otherwise = match mode {
        Mode::Log => SeccompAction::Log,
        Mode::Enforce | Mode::Off => SeccompAction::Trap,
    };
    let compiled = ThreadKind::ALL.into_iter().map(|kind| {
        let program = rules::rules(kind).and_then(|rules| compile(rules, otherwise.clone()));
        program
            .map(|program| (kind, program))
            .map_err(|source| ConfineError::Compile {
                kind: kind.name(),
                source,
            })
    });
    compiled.collect()
}

fn compile(
    rules: rules::Rules,
    otherwise: SeccompAction,
) -> Result<BpfProgram, seccompiler::BackendError> {
    let target = seccompiler::TargetArch::x86_64;
    SeccompFilter::new(rules, otherwise, SeccompAction::Allow, target)?.try_into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_filter_compiles_and_fits() {
        // The kernel takes at most 4096 instructions (BPF_MAXINSNS).
        for (kind, program) in compile_all(Mode::Enforce).unwrap() {
            assert!(program.len() < 1024, "{}: {}", kind.name(), program.len());
        }
    }

    #[test]
    fn without_preparation_nothing_is_confined() {
        enter(ThreadKind::SoftVcpu).unwrap();
        std::fs::metadata("/").unwrap();
    }
}
