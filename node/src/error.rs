//! Why an aggregate did not start, or ended early; each with its exit code.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use nix::sys::signal::Signal;
use weft_proc::boot::{EXIT_NO_ROOM, EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND, EXIT_SETUP, MAX_NODES};

use crate::host::UserfaultfdError;
use crate::options::MEMORY_BYTES_MIN;
use crate::size::{format_bytes, format_pages};
use crate::spawn::{ProgramKind, StartError};

/// Why an aggregate did not start.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// No such file, in `PATH` or where the path says.
    #[error("`{0}` was not found: check the name, or give a path to it")]
    NotFound(String),
    /// A directory, or a file without permission to execute.
    #[error("{path} cannot be executed: {why}")]
    NotExecutable {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// A file that this user may execute, but not read.
    #[error("{path} cannot be read, and Weft must read a program to map it")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// An option is out of its range.
    #[error("{0}")]
    Option(String),
    /// A budget below one workable set.
    #[error(
        "--memory {} is too small for {node}: a node needs at least {} (256 pages, one workable set)",
        format_bytes(*bytes), format_bytes(MEMORY_BYTES_MIN)
    )]
    MemoryTooSmall {
        node: String,
        /// What was asked for.
        bytes: u64,
    },
    /// The number of budgets is neither one nor that of the nodes.
    #[error(
        "--memory has {given} budgets for {nodes} nodes: give one for all nodes, or one for \
        each, home first"
    )]
    MemoryCount {
        /// Budgets given.
        given: usize,
        /// Nodes in the aggregate.
        nodes: usize,
    },
    /// Too few or too many nodes.
    #[error("{0} nodes requested: an aggregate spans 1 to {MAX_NODES}")]
    NodeCount(usize),
    /// A program of Weft's is missing.
    #[error(transparent)]
    Missing(#[from] crate::spawn::Missing),
    /// The kernel lacks Syscall User Dispatch.
    #[error(
        "this kernel has no Syscall User Dispatch ({0}): Linux 5.11 or later built with CONFIG_GENERIC_ENTRY is needed"
    )]
    NoDispatch(io::Error),
    /// userfaultfd is missing, or lacks a feature.
    #[error("userfaultfd is unavailable: {0}; `weft doctor` says what fixes it")]
    NoUserfaultfd(UserfaultfdError),
    /// The private directory for running aggregates is unsafe or cannot be made.
    #[error(transparent)]
    RunDirectory(#[from] crate::rundir::RunDirError),
    /// Keys or the list of trusted nodes.
    #[error(transparent)]
    Configuration(#[from] crate::config::ConfigError),
    /// The cluster that this host is in.
    #[error(transparent)]
    Member(#[from] crate::member::MemberError),
    /// A host did not answer, or refused the connection.
    #[error("node {host} cannot be reached: {why}")]
    Unreachable {
        /// As the user named it.
        host: String,
        /// What failed.
        why: String,
    },
    /// The handshake was refused (key, version or CPU) or not finished.
    #[error("the handshake with node {host} failed: {why}")]
    Handshake {
        /// As the user named it.
        host: String,
        /// What did not match, and what to do.
        why: String,
    },
    /// A host has not as much memory, or no slice, to lend.
    #[error(
        "no room on node {host}: {} requested, {} free ({why}); reduce --memory, or free \
        memory there",
        format_pages(*asked_pages), format_pages(*free_pages)
    )]
    NoRoom {
        /// As the user named it.
        host: String,
        asked_pages: u64,
        /// Most pages that it could lend to a slice.
        free_pages: u64,
        /// What ran out there.
        why: String,
    },
    /// A node answered with a failure.
    #[error("node {host} could not start its slice: {why}")]
    Remote {
        /// As the user named it.
        host: String,
        /// What it said.
        why: String,
    },
    /// A host made no link to another one.
    #[error(
        "node {from} cannot connect to node {to}: if {from} does not know that host, run `weft \
        node trust --may lend {key} NAME --address HOST:PORT` on {from} and restart its \
        daemon; otherwise its log has the reason"
    )]
    NoWay {
        /// The one that dials, as the user named it.
        from: String,
        /// The one to be dialled.
        to: String,
        /// The key of that one.
        key: weft_wire::keys::PublicKey,
    },
    /// A process did not get ready.
    #[error("the {} of node {node} {why}", program.noun())]
    Process {
        /// What the process executes.
        program: ProgramKind,
        node: String,
        /// What it did instead.
        why: StartError,
    },
    /// A signal asked for the end before anything ran.
    #[error("ended by {signal} before the start")]
    Interrupted { signal: Signal },
    /// Something did not answer in time.
    #[error("{what} did not answer within {} s", bound.as_secs_f32())]
    Timeout {
        what: String,
        /// How long it had.
        bound: Duration,
    },
    /// A call to this host's kernel failed.
    #[error("cannot {doing}")]
    System {
        /// What was being done.
        doing: String,
        /// What the kernel said.
        source: io::Error,
    },
}

impl LaunchError {
    /// The exit code that `weft run` ends with.
    pub fn exit_code(&self) -> i32 {
        match self {
            LaunchError::NotFound(_) => EXIT_NOT_FOUND,
            LaunchError::NotExecutable { .. } | LaunchError::Unreadable { .. } => {
                EXIT_NOT_EXECUTABLE
            }
            LaunchError::NoRoom { .. } => EXIT_NO_ROOM,
            // As a shell says it.
            LaunchError::Interrupted { signal } => 128 + *signal as i32,
            _ => EXIT_SETUP,
        }
    }

    /// For `map_err`: a call to the kernel failed while `doing`.
    pub fn system(doing: impl Into<String>) -> impl FnOnce(io::Error) -> LaunchError {
        let doing = doing.into();
        move |source| LaunchError::System { doing, source }
    }
}

/// An error's text followed by the text of each of its causes: `Display` of an error
/// does not include its source.
pub fn sentence(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ConfigError;
    use crate::daemon::DaemonError;
    use std::error::Error;

    #[test]
    fn no_error_says_its_cause_itself() {
        let kernel = || io::Error::from_raw_os_error(98);
        let path = PathBuf::from("/x");
        let file = || ConfigError::File {
            doing: "read",
            path: path.clone(),
            source: kernel(),
        };
        let key = weft_wire::keys::load(&path).map(|_| ()).unwrap_err();
        let errors: [Box<dyn Error>; 8] = [
            Box::new(file()),
            Box::new(ConfigError::Private(kernel())),
            Box::new(ConfigError::Key(key)),
            Box::new(LaunchError::system("wait")(kernel())),
            Box::new(LaunchError::Unreadable {
                path: path.clone(),
                source: kernel(),
            }),
            Box::new(DaemonError::Config(file())),
            Box::new(DaemonError::Listen {
                address: "a:1".into(),
                source: kernel(),
            }),
            Box::new(DaemonError::System {
                doing: "wait",
                source: kernel(),
            }),
        ];
        for error in errors {
            let cause = error.source().expect("it has a cause").to_string();
            let text = sentence(&*error);
            assert_eq!(text.matches(&cause).count(), 1, "{text}");
        }
    }
}
