//! Starts the processes of an aggregate: runtimes of programs, monitors of machines.
//!
//! `fork` and `execve` by hand rather than `std::process::Command`, for three
//! reasons: the program must get its environment in the order it was given (the
//! standard library sorts it when one variable is added), signal dispositions
//! that the launcher changed must be put back, and a confined slice is executed
//! by descriptor, after the file system has gone.
//!
//! Between `fork` and `execve` only calls that are safe in a signal handler are
//! made, on memory prepared before: another thread may have held a lock.
//!
//! - [`executable`]: what is started, and where it is found
//! - [`child`]: from `fork` to `execve`
//! - [`process`]: what was started, until it has ended

mod child;
mod error;
mod executable;
mod process;

use std::ffi::{CString, OsString, c_char};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use nix::fcntl::{FcntlArg, OFlag, fcntl, open};
use nix::sys::stat::Mode;
use nix::unistd::{ForkResult, fork, pipe2};
use weft_proc::boot::CONTROL_VARIABLE;

pub use error::StartError;
pub use executable::{Executable, Missing, ProgramKind};
pub use process::{Ended, Process};

use crate::sys;

/// Where the control socket of a slice is; home keeps the number it has here.
const SLICE_CONTROL: RawFd = 3;
/// Descriptors a slice may have: its own are moved to 900 and up.
const SLICE_DESCRIPTORS_MAX: u64 = 2048;

/// What keeps a slice that runs somebody else's code away from this host.
#[derive(Debug, Clone)]
pub struct Confinement {
    /// User and group to become.
    pub user: u32,
    /// An empty directory, owned by root, that becomes its root directory.
    pub root: PathBuf,
}

/// What a process is, and so what it keeps of the launcher's or daemon's.
pub enum Role<'a> {
    /// The program's own process: inherits everything the launcher has.
    Home {
        /// The program's argument vector.
        arguments: &'a [OsString],
        /// Signals as they were before the launcher changed them.
        signals: &'a SignalState,
    },
    /// Memory and execution for another node: inherits standard error at most.
    Slice {
        /// For a process list.
        name: &'a str,
        /// How far to confine it, where this process may.
        confinement: Option<&'a Confinement>,
        /// Whether it keeps standard error. Not on a host that lends: what
        /// runs there could fill the daemon's log.
        keeps_errors: bool,
        /// Where to enter the memory cgroup that bounds it.
        group: Option<BorrowedFd<'a>>,
    },
    /// A node of a virtual machine on the launcher's own host: in its process group,
    /// with its user, directory, environment and signal mask. It confines itself once
    /// it has opened what it needs.
    Node {
        /// Its command line, its name first.
        arguments: &'a [&'a str],
        /// Whether it keeps standard input and output.
        console: bool,
    },
    /// A node of a virtual machine on a host that lends. It confines itself once it
    /// has opened what it needs.
    Lent {
        /// Its command line, its name first.
        arguments: &'a [&'a str],
        /// User and group to become, where this process may: what the slice opens,
        /// it opens as that user.
        user: Option<u32>,
        /// Where to enter the memory cgroup that bounds it.
        group: Option<BorrowedFd<'a>>,
    },
}

/// Signal mask and dispositions at the launcher's start.
pub struct SignalState {
    mask: libc::sigset_t,
    dispositions: Vec<(i32, libc::sigaction)>,
}

impl SignalState {
    /// Saves the mask of this thread and the dispositions of `signals`.
    pub fn save(signals: &[i32]) -> SignalState {
        // SAFETY: both structures are plain data for which all zeros is valid;
        // the calls only write to them, and null means "change nothing".
        unsafe {
            let mut mask: libc::sigset_t = std::mem::zeroed();
            libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &mut mask);
            let dispositions = signals
                .iter()
                .map(|&signal| {
                    let mut action: libc::sigaction = std::mem::zeroed();
                    libc::sigaction(signal, std::ptr::null(), &mut action);
                    (signal, action)
                })
                .collect();
            SignalState { mask, dispositions }
        }
    }

    /// Puts them back. Safe to call between `fork` and `execve`.
    pub fn restore(&self) {
        for (signal, action) in &self.dispositions {
            // SAFETY: `action` came from the same call for the same signal.
            unsafe { libc::sigaction(*signal, action, std::ptr::null_mut()) };
        }
        // SAFETY: a mask that `save` filled in.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.mask, std::ptr::null_mut()) };
    }
}

/// Everything the child needs, made before `fork`.
struct Image {
    executable: OwnedFd,
    arguments: Vec<*const c_char>,
    environment: Vec<*const c_char>,
    null: OwnedFd,
    root: Option<CString>,
    user: u32,
    parent: i32,
    // What the pointers point into.
    _strings: Vec<CString>,
}

/// Starts `executable` in `role`. The calling thread must outlive the process, which
/// is killed when that thread ends (`PR_SET_PDEATHSIG`).
pub fn start(executable: &Executable, role: &Role<'_>) -> io::Result<Process> {
    let (control, theirs) = sys::packet_pair()?;
    let image = prepare(executable, role, theirs.as_fd())?;
    let (report, report_child) = pipe2(OFlag::O_CLOEXEC)?;
    let report_child = clear_of_control(report_child)?;
    // SAFETY: the child only makes calls that are safe in a signal handler, on
    // memory prepared above, and ends in `execve` or `_exit`.
    match unsafe { fork() }? {
        ForkResult::Child => {
            child::live(&image, role, theirs.as_raw_fd(), report_child.as_raw_fd())
        }
        ForkResult::Parent { child } => {
            let process = Process::new(child.as_raw(), control)?;
            drop(report_child);
            let mut errno = Vec::new();
            // Nothing to read means that `execve` closed the pipe.
            File::from(report).read_to_end(&mut errno)?;
            match <[u8; 4]>::try_from(errno) {
                Ok(errno) => Err(io::Error::from_raw_os_error(i32::from_ne_bytes(errno))),
                Err(_) => Ok(process),
            }
        }
    }
}

/// The same file at a number that the child's control socket will not take: a process
/// with few open files gives low ones away.
fn clear_of_control(file: OwnedFd) -> io::Result<OwnedFd> {
    if file.as_raw_fd() > SLICE_CONTROL {
        return Ok(file);
    }
    let number = fcntl(&file, FcntlArg::F_DUPFD_CLOEXEC(SLICE_CONTROL + 1))?;
    // SAFETY: the kernel has just made it, and nobody else knows of it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// The launcher's environment, in its order, without what is a runtime's.
fn environment() -> io::Result<Vec<CString>> {
    let mut strings = Vec::new();
    for (name, value) in std::env::vars_os() {
        if name != CONTROL_VARIABLE {
            let mut entry = name;
            entry.push("=");
            entry.push(value);
            strings.push(c_string(entry)?);
        }
    }
    Ok(strings)
}

fn c_string(text: OsString) -> io::Result<CString> {
    CString::new(text.into_vec())
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "an argument contains a NUL"))
}

fn prepare(executable: &Executable, role: &Role<'_>, control: BorrowedFd<'_>) -> io::Result<Image> {
    let mut strings = Vec::new();
    match role {
        Role::Home { arguments, .. } => {
            for argument in *arguments {
                strings.push(c_string(argument.clone())?);
            }
        }
        Role::Slice { name, .. } => strings.push(c_string(name.into())?),
        Role::Node { arguments, .. } | Role::Lent { arguments, .. } => {
            for argument in *arguments {
                strings.push(c_string(argument.into())?);
            }
        }
    }
    let mut environment_strings = match role {
        Role::Home { .. } | Role::Node { .. } => environment()?,
        Role::Slice { .. } | Role::Lent { .. } => Vec::new(),
    };
    let number = match role {
        Role::Home { .. } | Role::Node { .. } => control.as_raw_fd(),
        Role::Slice { .. } | Role::Lent { .. } => SLICE_CONTROL,
    };
    let variable = format!("{CONTROL_VARIABLE}={number}");
    environment_strings.push(c_string(variable.into())?);
    let confinement = match role {
        Role::Slice { confinement, .. } => *confinement,
        _ => None,
    };
    let user = match role {
        Role::Lent { user, .. } => *user,
        _ => confinement.map(|confinement| confinement.user),
    };
    let pointers = |strings: &[CString]| -> Vec<*const c_char> {
        let ends = std::iter::once(std::ptr::null());
        strings
            .iter()
            .map(|text| text.as_ptr())
            .chain(ends)
            .collect()
    };
    let arguments = pointers(&strings);
    let environment = pointers(&environment_strings);
    strings.append(&mut environment_strings);
    Ok(Image {
        executable: executable.descriptor(SLICE_CONTROL + 1)?,
        arguments,
        environment,
        null: open("/dev/null", OFlag::O_RDWR | OFlag::O_CLOEXEC, Mode::empty())?,
        root: match confinement {
            Some(confinement) => Some(c_string(confinement.root.clone().into_os_string())?),
            None => None,
        },
        user: user.unwrap_or(u32::MAX),
        parent: std::process::id() as i32,
        _strings: strings,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use std::time::Duration;

    fn executable(path: &str) -> Executable {
        Executable::open(Path::new(path)).unwrap()
    }

    #[test]
    fn a_slice_starts_empty_handed() {
        let role = Role::Slice {
            name: "true",
            confinement: None,
            keeps_errors: true,
            group: None,
        };
        let mut runtime = start(&executable("/bin/true"), &role).unwrap();
        assert_eq!(
            runtime.end_within(Duration::from_secs(5)).unwrap(),
            Ended::Exited(0)
        );
    }

    #[test]
    fn descriptors_are_moved_out_of_the_way() {
        let low = open("/dev/null", OFlag::O_RDWR | OFlag::O_CLOEXEC, Mode::empty()).unwrap();
        let number = low.as_raw_fd();
        let moved = clear_of_control(low).unwrap();
        assert!(moved.as_raw_fd() > SLICE_CONTROL);
        assert!(number <= SLICE_CONTROL || moved.as_raw_fd() == number);
    }

    #[test]
    fn a_missing_runtime_is_an_error() {
        let role = Role::Slice {
            name: "none",
            confinement: None,
            keeps_errors: true,
            group: None,
        };
        assert!(Executable::open(Path::new("/nonexistent")).is_err());
        assert!(start(&executable("/dev/null"), &role).is_err());
    }

    #[test]
    fn what_is_halted_executes_nothing_and_can_be_killed() {
        let signals = SignalState::save(&[]);
        let arguments = ["sh".into(), "-c".into(), "while :; do :; done".into()];
        let role = Role::Home {
            arguments: &arguments,
            signals: &signals,
        };
        let mut busy = start(&executable("/bin/sh"), &role).unwrap();
        // Fields 14 and 15 of /proc/PID/stat: its processor time.
        let time = || {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", busy.pid())).unwrap();
            let fields = stat.rsplit_once(')').unwrap().1;
            let fields: Vec<&str> = fields.split_whitespace().collect();
            (
                fields[0].to_owned(),
                fields[11].to_owned(),
                fields[12].to_owned(),
            )
        };
        assert!(busy.halt(Duration::from_secs(5)));
        let before = time();
        assert_eq!(before.0, "T");
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(time(), before);
        assert_eq!(busy.kill().unwrap(), Ended::Signaled(libc::SIGKILL));
        // It has ended.
        assert!(!busy.halt(Duration::from_millis(1)));
    }

    #[test]
    fn a_runtime_that_does_not_end_is_killed() {
        let signals = SignalState::save(&[]);
        let arguments = ["sleep".into(), "60".into()];
        let role = Role::Home {
            arguments: &arguments,
            signals: &signals,
        };
        let mut runtime = start(&executable("/bin/sleep"), &role).unwrap();
        let ended = runtime.end_within(Duration::from_millis(20)).unwrap();
        assert_eq!(ended, Ended::Signaled(libc::SIGKILL));
        assert_eq!(ended.to_string(), "was killed by SIGKILL");
    }
}
