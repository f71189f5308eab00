//! Starts runtimes.
//!
//! `fork` and `execve` by hand rather than `std::process::Command`, for three
//! reasons: the program must get its environment in the order it was given (the
//! standard library sorts it when one variable is added), signal dispositions
//! that the launcher changed must be put back, and a confined slice is executed
//! by descriptor, after the file system has gone.
//!
//! Between `fork` and `execve` only calls that are safe in a signal handler are
//! made, on memory prepared before: another thread may have held a lock.

use std::ffi::{CString, OsString, c_char};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use nix::fcntl::{FcntlArg, OFlag, fcntl, open};
use nix::sys::stat::Mode;
use nix::unistd::{ForkResult, fork, pipe2};
use weft_proc::boot::CONTROL_VARIABLE;

use crate::{oom, sys};

/// Where the control socket of a slice is; home keeps the number it has here.
const SLICE_CONTROL: RawFd = 3;
/// Descriptors a slice may have: its own are moved to 900 and up.
const SLICE_DESCRIPTORS_MAX: u64 = 2048;

/// Finds the runtime binary: `$WEFT_RUNTIME`, beside this executable, or in
/// `../lib/weft`. The error lists where it was looked for.
pub fn find_runtime() -> Result<PathBuf, String> {
    if let Some(path) = std::env::var_os("WEFT_RUNTIME").filter(|path| !path.is_empty()) {
        let path = PathBuf::from(path);
        return if path.is_file() {
            Ok(path)
        } else {
            Err(format!("{} (from WEFT_RUNTIME)", path.display()))
        };
    }
    let executable = std::env::current_exe().map_err(|error| error.to_string())?;
    let directory = executable.parent().unwrap_or(Path::new("/"));
    let places = [
        directory.join("weft-runtime"),
        directory.join("../lib/weft/weft-runtime"),
    ];
    places
        .iter()
        .find(|path| path.is_file())
        .cloned()
        .ok_or_else(|| {
            let names: Vec<String> = places
                .iter()
                .map(|path| path.display().to_string())
                .collect();
            names.join(" and ")
        })
}

/// What keeps a slice that runs somebody else's code away from this host.
#[derive(Debug, Clone)]
pub struct Confinement {
    /// User and group to become.
    pub user: u32,
    /// An empty directory, owned by root, that becomes its root directory.
    pub root: PathBuf,
}

/// Which runtime to start.
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
    /// A slice of a virtual machine: the monitor, which confines itself once it
    /// has opened what it needs.
    Machine {
        /// Its command line, its name first.
        arguments: &'a [&'a str],
        /// User and group to become, where this process may: what the slice opens,
        /// it opens as that user.
        user: Option<u32>,
        /// Where to enter the memory cgroup that bounds it.
        group: Option<BorrowedFd<'a>>,
    },
}

/// A runtime that was started and not yet seen to end. Dropped while it runs,
/// it is killed and reaped.
#[derive(Debug)]
pub struct Runtime {
    pid: i32,
    pidfd: OwnedFd,
    /// This side's end of its control socket.
    pub control: OwnedFd,
    status: Option<Ended>,
    memory: oom::Watch,
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// With this exit code.
    Exited(i32),
    Signaled(i32),
}

impl std::fmt::Display for Ended {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Ended::Exited(code) => match crate::error::exit_code_meaning(*code) {
                Some(meaning) => write!(formatter, "exited with {code} ({meaning})"),
                None => write!(formatter, "exited with {code}"),
            },
            Ended::Signaled(signal) => match nix::sys::signal::Signal::try_from(*signal) {
                Ok(name) => write!(formatter, "was killed by {}", name.as_str()),
                Err(_) => write!(formatter, "was killed by signal {signal}"),
            },
        }
    }
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

/// Starts `runtime` in `role`. The calling thread must outlive it: the runtime
/// is killed when that thread ends (`PR_SET_PDEATHSIG`).
pub fn start(runtime: &Path, role: &Role<'_>) -> io::Result<Runtime> {
    let (control, theirs) = sys::packet_pair()?;
    let image = prepare(runtime, role, theirs.as_fd())?;
    let (report, report_child) = pipe2(OFlag::O_CLOEXEC)?;
    let report_child = clear_of_control(report_child)?;
    // SAFETY: the child only makes calls that are safe in a signal handler, on
    // memory prepared above, and ends in `execve` or `_exit`.
    match unsafe { fork() }? {
        ForkResult::Child => child(&image, role, theirs.as_raw_fd(), report_child.as_raw_fd()),
        ForkResult::Parent { child } => {
            drop(report_child);
            let pid = child.as_raw();
            let runtime = Runtime {
                pid,
                pidfd: sys::pidfd_open(pid)?,
                control,
                status: None,
                memory: oom::Watch::on(pid as u32),
            };
            let mut errno = [0; 4];
            // An empty read means that `execve` closed the pipe.
            match nix::unistd::read(&report, &mut errno) {
                Ok(4) => Err(io::Error::from_raw_os_error(i32::from_ne_bytes(errno))),
                _ => Ok(runtime),
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

fn c_string(text: OsString) -> io::Result<CString> {
    CString::new(text.into_vec())
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "an argument contains a NUL"))
}

fn prepare(runtime: &Path, role: &Role<'_>, control: BorrowedFd<'_>) -> io::Result<Image> {
    let mut strings = Vec::new();
    let mut environment_strings = Vec::new();
    let confinement = match role {
        Role::Home { arguments, .. } => {
            for argument in *arguments {
                strings.push(c_string(argument.clone())?);
            }
            for (name, value) in std::env::vars_os() {
                if name != CONTROL_VARIABLE {
                    let mut entry = name;
                    entry.push("=");
                    entry.push(value);
                    environment_strings.push(c_string(entry)?);
                }
            }
            let variable = format!("{CONTROL_VARIABLE}={}", control.as_raw_fd());
            environment_strings.push(c_string(variable.into())?);
            None
        }
        Role::Slice {
            name, confinement, ..
        } => {
            strings.push(c_string(name.into())?);
            let variable = format!("{CONTROL_VARIABLE}={SLICE_CONTROL}");
            environment_strings.push(c_string(variable.into())?);
            *confinement
        }
        Role::Machine { arguments, .. } => {
            for argument in *arguments {
                strings.push(c_string(argument.into())?);
            }
            let variable = format!("{CONTROL_VARIABLE}={SLICE_CONTROL}");
            environment_strings.push(c_string(variable.into())?);
            None
        }
    };
    let user = match role {
        Role::Machine { user, .. } => *user,
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
        executable: clear_of_control(open(
            runtime,
            OFlag::O_PATH | OFlag::O_CLOEXEC,
            Mode::empty(),
        )?)?,
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

/// The child's half. Never returns.
fn child(image: &Image, role: &Role<'_>, control: RawFd, report: RawFd) -> ! {
    let prepared = match role {
        Role::Home { signals, .. } => {
            signals.restore();
            // Rust ignores it in this process; the program expects the default.
            // SAFETY: no handler is involved.
            unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
            // SAFETY: clears close-on-exec of a descriptor that is open.
            checked(unsafe { libc::fcntl(control, libc::F_SETFD, 0) })
        }
        Role::Slice {
            keeps_errors,
            group,
            ..
        } => enter_group(*group)
            .and_then(|()| become_slice(image, control, *keeps_errors))
            .and_then(|()| limit_runtime(image.user != u32::MAX)),
        // It has threads, and files of its own: disks.
        Role::Machine { group, .. } => {
            enter_group(*group).and_then(|()| become_slice(image, control, false))
        }
    };
    let result = prepared
        .and_then(|()| die_with_parent(image.parent))
        .and_then(|()| {
            // SAFETY: the vectors end in null and point to strings owned by `image`.
            checked(unsafe {
                libc::execveat(
                    image.executable.as_raw_fd(),
                    c"".as_ptr(),
                    image.arguments.as_ptr().cast(),
                    image.environment.as_ptr().cast(),
                    libc::AT_EMPTY_PATH,
                )
            })
        });
    let errno = result.err().unwrap_or(libc::EIO).to_ne_bytes();
    // SAFETY: four bytes of this frame to a descriptor of ours; then the end.
    unsafe {
        libc::write(report, errno.as_ptr().cast(), errno.len());
        libc::_exit(weft_proc::boot::EXIT_SETUP)
    }
}

/// Result of a C call: the errno when it returned -1.
fn checked(result: libc::c_int) -> Result<(), i32> {
    if result == -1 {
        // SAFETY: errno of this thread is always readable.
        Err(unsafe { *libc::__errno_location() })
    } else {
        Ok(())
    }
}

/// Before the file system and the user go, with which it could not.
fn enter_group(group: Option<BorrowedFd<'_>>) -> Result<(), i32> {
    const MYSELF: &[u8] = b"0";
    let Some(group) = group else {
        return Ok(());
    };
    // SAFETY: bytes of the program itself, to a descriptor that is open.
    let written = unsafe { libc::write(group.as_raw_fd(), MYSELF.as_ptr().cast(), MYSELF.len()) };
    checked(written as libc::c_int)
}

fn die_with_parent(parent: i32) -> Result<(), i32> {
    // SAFETY: integers only. After the user was changed, which clears it.
    unsafe {
        checked(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL))?;
        // The parent may have ended before the call above.
        if libc::getppid() != parent {
            libc::_exit(weft_proc::boot::EXIT_SETUP);
        }
    }
    Ok(())
}

/// Leaves everything of the launcher behind: session, directory, descriptors,
/// signals, and where possible the file system and the user.
fn become_slice(image: &Image, control: RawFd, keeps_errors: bool) -> Result<(), i32> {
    // SAFETY: integers and pointers to memory owned by `image` or this frame;
    // every call is async-signal-safe.
    unsafe {
        libc::setsid();
        let mut empty: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut empty);
        for signal in 1..32 {
            libc::signal(signal, libc::SIG_DFL);
        }
        checked(libc::pthread_sigmask(
            libc::SIG_SETMASK,
            &empty,
            std::ptr::null_mut(),
        ))?;
        checked(libc::dup2(image.null.as_raw_fd(), 0))?;
        checked(libc::dup2(image.null.as_raw_fd(), 1))?;
        if !keeps_errors {
            checked(libc::dup2(image.null.as_raw_fd(), 2))?;
        }
        move_control(control)?;
        checked(libc::close_range(
            SLICE_CONTROL as u32 + 1,
            u32::MAX,
            libc::CLOSE_RANGE_CLOEXEC as i32,
        ))?;
        if let Some(root) = &image.root {
            checked(libc::chroot(root.as_ptr()))?;
        }
        checked(libc::chdir(c"/".as_ptr()))?;
        if image.user != u32::MAX {
            checked(libc::setgroups(0, std::ptr::null()))?;
            checked(libc::setresgid(image.user, image.user, image.user))?;
            checked(libc::setresuid(image.user, image.user, image.user))?;
        }
        limit_slice()?;
        checked(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    }
}

/// Puts the control socket at [`SLICE_CONTROL`], open across `execve`.
fn move_control(control: RawFd) -> Result<(), i32> {
    // SAFETY: integers only. `dup2` onto the same number would keep the
    // close-on-exec flag, so that case clears it.
    unsafe {
        if control == SLICE_CONTROL {
            checked(libc::fcntl(control, libc::F_SETFD, 0))
        } else {
            checked(libc::dup2(control, SLICE_CONTROL))
        }
    }
}

fn limit(resource: libc::__rlimit_resource_t, value: u64) -> Result<(), i32> {
    let limit = libc::rlimit {
        rlim_cur: value,
        rlim_max: value,
    };
    // SAFETY: a valid rlimit that outlives the call.
    checked(unsafe { libc::setrlimit(resource, &limit) })
}

fn limit_slice() -> Result<(), i32> {
    limit(libc::RLIMIT_CORE, 0)?;
    // May exceed the hard limit of an unprivileged launcher, which then stays.
    let _ = limit(libc::RLIMIT_NOFILE, SLICE_DESCRIPTORS_MAX);
    Ok(())
}

/// What a runtime never needs.
fn limit_runtime(own_user: bool) -> Result<(), i32> {
    if own_user {
        // Only where the user is the slice's own: the limit counts a user's
        // processes. After the user was changed, or `execve` would fail.
        limit(libc::RLIMIT_NPROC, 0)?;
        limit(libc::RLIMIT_FSIZE, 0)?;
    }
    Ok(())
}

impl Runtime {
    /// Its process id.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Readable once it has ended.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Sends it a signal. An error means that it has ended.
    pub fn signal(&self, signal: i32) -> io::Result<()> {
        sys::pidfd_signal(&self.pidfd, signal)
    }

    /// How it ended, if it has.
    pub fn try_wait(&mut self) -> io::Result<Option<Ended>> {
        if self.status.is_some() {
            return Ok(self.status);
        }
        // By pid, not by `Signal`: real-time signals kill too, and `nix` knows
        // no names for them.
        let mut status = 0;
        // SAFETY: a pid that is ours until it is reaped here; `status` is valid.
        let result = unsafe { libc::waitpid(self.pid, &mut status, libc::WNOHANG) };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        if result == self.pid {
            self.status = Some(if libc::WIFSIGNALED(status) {
                Ended::Signaled(libc::WTERMSIG(status))
            } else {
                Ended::Exited(libc::WEXITSTATUS(status))
            });
        }
        Ok(self.status)
    }

    /// Why the kernel killed it, where the kernel says so.
    pub fn killed_for_memory(&self) -> Option<String> {
        match self.status {
            Some(Ended::Signaled(libc::SIGKILL)) => self.memory.verdict(),
            _ => None,
        }
    }

    /// How it ended, as a slice, for a sentence about its node.
    pub fn slice_ended(&self, ended: Ended) -> String {
        match (ended, self.killed_for_memory()) {
            (ended, Some(why)) => format!("its slice {ended}: {why}"),
            // Only its filter's verdict ends a slice by this signal.
            (Ended::Signaled(libc::SIGSYS), _) => {
                "its slice was killed by SIGSYS: it made a system call that slices may not make"
                    .into()
            }
            (ended, None) => format!("its slice {ended}"),
        }
    }

    /// Waits for its end, at most `bound`; then kills it.
    pub fn end_within(&mut self, bound: std::time::Duration) -> io::Result<Ended> {
        sys::wait_readable(&[self.pidfd.as_fd()], bound)?;
        if let Some(ended) = self.try_wait()? {
            return Ok(ended);
        }
        self.kill()
    }

    /// Kills and reaps it.
    pub fn kill(&mut self) -> io::Result<Ended> {
        loop {
            if let Some(ended) = self.try_wait()? {
                return Ok(ended);
            }
            let _ = self.signal(libc::SIGKILL);
            // SIGKILL cannot be held off for long, save by a device that hangs.
            sys::wait_readable(&[self.pidfd.as_fd()], std::time::Duration::from_secs(1))?;
        }
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_slice_starts_empty_handed() {
        let role = Role::Slice {
            name: "true",
            confinement: None,
            keeps_errors: true,
            group: None,
        };
        let mut runtime = start(Path::new("/bin/true"), &role).unwrap();
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
        assert!(start(Path::new("/nonexistent"), &role).is_err());
        assert!(start(Path::new("/dev/null"), &role).is_err());
    }

    #[test]
    fn a_runtime_that_does_not_end_is_killed() {
        let signals = SignalState::save(&[]);
        let arguments = ["sleep".into(), "60".into()];
        let role = Role::Home {
            arguments: &arguments,
            signals: &signals,
        };
        let mut runtime = start(Path::new("/bin/sleep"), &role).unwrap();
        let ended = runtime.end_within(Duration::from_millis(20)).unwrap();
        assert_eq!(ended, Ended::Signaled(libc::SIGKILL));
        assert_eq!(ended.to_string(), "was killed by SIGKILL");
    }
}
