//! A process of an aggregate, from its start to its end.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use weft_proc::boot::{
    EXIT_INTERNAL, EXIT_NO_ROOM, EXIT_NODE_LOST, EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND, EXIT_SETUP,
};

use crate::{oom, sys};

/// Between two looks at whether it has stopped.
const LOOK: Duration = Duration::from_micros(100);

/// A process that was started and not yet seen to end. Dropped while it runs,
/// it is killed and reaped.
#[derive(Debug)]
pub struct Process {
    pid: i32,
    pidfd: OwnedFd,
    /// This side's end of its control socket.
    pub control: OwnedFd,
    status: Option<Ended>,
    /// The most memory that it had resident, once it has ended.
    resident_bytes_max: u64,
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
            Ended::Exited(code) => match exit_code_meaning(*code) {
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

/// Names an exit code that Weft, not the program, may have chosen.
pub(crate) fn exit_code_meaning(code: i32) -> Option<&'static str> {
    match code {
        EXIT_NODE_LOST => Some("a node was lost"),
        EXIT_NO_ROOM => Some("every node's budget is full"),
        EXIT_INTERNAL => Some("the runtime found its own state inconsistent"),
        EXIT_SETUP => Some("the aggregate failed before the program started"),
        EXIT_NOT_EXECUTABLE => Some("the program cannot be executed"),
        EXIT_NOT_FOUND => Some("the program was not found"),
        _ => None,
    }
}

impl Process {
    /// The child `pid`, which was just made; `control` is this side's end of its
    /// control socket. A child that cannot be watched is killed and reaped.
    pub(super) fn new(pid: i32, control: OwnedFd) -> io::Result<Process> {
        let pidfd = sys::pidfd_open(pid).inspect_err(|_| {
            // SAFETY: integers and a null pointer. The child was not reaped, so the
            // number is still its own; it cannot hold SIGKILL off.
            unsafe {
                libc::kill(pid, libc::SIGKILL);
                while libc::waitpid(pid, std::ptr::null_mut(), 0) < 0
                    && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
                {
                }
            }
        })?;
        Ok(Process {
            pid,
            pidfd,
            control,
            status: None,
            resident_bytes_max: 0,
            memory: oom::Watch::on(pid as u32),
        })
    }

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
        // SAFETY: a structure of integers, for which zero is a value.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: a pid that is ours until it is reaped here; both structures are
        // valid, and the call fills them.
        let result = unsafe { libc::wait4(self.pid, &mut status, libc::WNOHANG, &mut usage) };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        if result == self.pid {
            self.resident_bytes_max = usage.ru_maxrss as u64 * 1024;
            self.status = Some(if libc::WIFSIGNALED(status) {
                Ended::Signaled(libc::WTERMSIG(status))
            } else {
                Ended::Exited(libc::WEXITSTATUS(status))
            });
        }
        Ok(self.status)
    }

    /// The most memory that it had resident, in bytes; zero while it runs.
    pub fn resident_bytes_max(&self) -> u64 {
        self.resident_bytes_max
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
    pub fn end_within(&mut self, bound: Duration) -> io::Result<Ended> {
        sys::wait_readable(&[self.pidfd.as_fd()], bound)?;
        if let Some(ended) = self.try_wait()? {
            return Ok(ended);
        }
        self.kill()
    }

    /// Stops all of its threads; false if they do not stand within `bound`. It executes nothing
    /// more, unless it gets SIGCONT, and SIGKILL ends it.
    pub fn halt(&self, bound: Duration) -> bool {
        let deadline = Instant::now() + bound;
        if self.signal(libc::SIGSTOP).is_err() {
            return false;
        }
        loop {
            match self.stopped_or_ended() {
                Some(libc::CLD_STOPPED) => return true,
                None if Instant::now() <= deadline => std::thread::sleep(LOOK),
                _ => return false,
            }
        }
    }

    /// How the last of its threads has stopped or ended, as `si_code` says it (sigaction(2)).
    fn stopped_or_ended(&self) -> Option<i32> {
        // SAFETY: a structure of integers, for which zero is a value.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        let flags = libc::WSTOPPED | libc::WEXITED | libc::WNOWAIT | libc::WNOHANG;
        // SAFETY: a pid that is ours until it is reaped, and a structure that the call fills.
        let asked =
            unsafe { libc::waitid(libc::P_PID, self.pid as libc::id_t, &raw mut info, flags) };
        // SAFETY: the call has filled it, or it is zero.
        let is_news = asked == 0 && unsafe { info.si_pid() } == self.pid;
        is_news.then_some(info.si_code)
    }

    /// Kills and reaps it.
    pub fn kill(&mut self) -> io::Result<Ended> {
        loop {
            if let Some(ended) = self.try_wait()? {
                return Ok(ended);
            }
            let _ = self.signal(libc::SIGKILL);
            // SIGKILL cannot be held off for long, save by a device that hangs.
            sys::wait_readable(&[self.pidfd.as_fd()], Duration::from_secs(1))?;
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}
