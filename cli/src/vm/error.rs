//! Why a machine did not start, and the exit codes of `weft vm run`.

use std::io;
use std::path::PathBuf;

use weft_confine::privilege::PrivilegeError;
use weft_node::error::LaunchError;
use weft_node::size::format_bytes;

/// The machine failed: a vCPU met what it cannot run, or the host refused it
/// something.
pub const EXIT_FAILED: u8 = 124;
/// It did not start.
pub const EXIT_SETUP: u8 = 125;
/// The guest reset itself, and `--no-reboot` was given.
pub const EXIT_RESET: u8 = 116;
/// It ended in triple faults.
pub const EXIT_TRIPLE_FAULT: u8 = 118;
/// It was stopped from outside before the guest powered it off.
pub const EXIT_STOPPED: u8 = 120;

/// What an option, or the host, does not permit.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// An option is out of its range, or does not go with another.
    #[error("{0}")]
    Option(String),
    /// More than the host has.
    #[error(
        "--memory {} is more than this host has for it ({}; the limits of this process's memory \
         cgroups count): reduce it",
        format_bytes(*asked_bytes), format_bytes(*host_bytes)
    )]
    MemoryTooLarge {
        asked_bytes: u64,
        /// What the host, and the memory cgroups of this process, have.
        host_bytes: u64,
    },
    /// A checkpoint that is damaged, incomplete, or of a later format.
    #[error(transparent)]
    Checkpoint(#[from] weft_checkpoint::CheckpointError),
    /// The run directory is unsafe or cannot be made.
    #[error(transparent)]
    RunDirectory(#[from] weft_node::rundir::RunDirError),
    /// Another machine has the name.
    #[error("a machine named `{0}` is running: choose another --name (`weft vm list` shows them)")]
    NameTaken(String),
    /// Something is at the socket's path.
    #[error("{option} {path}: {what}")]
    SocketTaken {
        option: &'static str,
        path: PathBuf,
        /// What is there, and what to do.
        what: String,
    },
    /// The socket cannot be made.
    #[error("{option} {path}: cannot create the socket")]
    Socket {
        option: &'static str,
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Root could not be given up.
    #[error(transparent)]
    Privilege(#[from] PrivilegeError),
    /// A host that the machine was to lie on.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// A call to this host's kernel failed.
    #[error("cannot {doing}")]
    System {
        /// What was being done.
        doing: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
}

impl VmError {
    /// The exit code of `weft vm run`.
    pub fn exit_code(&self) -> u8 {
        match self {
            VmError::Launch(error @ LaunchError::Interrupted { .. }) => error.exit_code() as u8,
            _ => EXIT_SETUP,
        }
    }

    /// For `map_err`: a call to the kernel failed while `doing`.
    pub fn system<E: Into<io::Error>>(doing: &'static str) -> impl FnOnce(E) -> VmError {
        move |source| VmError::System {
            doing,
            source: source.into(),
        }
    }
}
