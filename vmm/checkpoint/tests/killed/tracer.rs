//! This program as a child that stops at every system call, and is killed at one of them.
//!
//! ```text
//! exec ──▶ SIGSTOP, which the child sends itself ──▶ before call 0 ──▶ behind it ──▶ … ──▶ end
//! ```

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::sys::ptrace::{self, Options};
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;
use syscalls::Sysno;

/// `fcntl.h`.
const O_CREAT: u64 = 0o100;

/// When the child is killed, by the number of its calls since its save began.
#[derive(Clone, Copy, Debug)]
pub enum Moment {
    Before(usize),
    /// Behind a write of the first half of its bytes.
    Halfway(usize),
}

/// This host does not permit `ptrace`.
pub struct NotTraced(pub io::Error);

/// How the child ended.
#[derive(Debug)]
pub enum End {
    Killed {
        /// The call writes two bytes or more: it can also be killed behind the first half.
        can_be_halved: bool,
    },
    /// By itself, without an error.
    Ended,
}

/// What the child did.
pub struct Outcome {
    pub end: End,
    /// The call at which it was killed.
    pub last: Option<Call>,
    /// How many files have got another name.
    pub renames: usize,
    /// Files that were written, and directories in which a name changed, since they were flushed.
    pub unflushed: BTreeSet<PathBuf>,
    /// The same when the first file got another name.
    pub unflushed_at_rename: BTreeSet<PathBuf>,
}

/// A system call that begins.
#[derive(Clone)]
pub struct Call {
    call: Sysno,
    arguments: [u64; 4],
}

impl fmt::Debug for Call {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}{:x?}", self.call, self.arguments)
    }
}

/// Runs this program with these arguments and the directory, which is where it saves.
pub fn run(arguments: &[&str], directory: &Path, moment: Moment) -> Result<Outcome, NotTraced> {
    let program = std::env::current_exe().expect("this program has a path");
    let mut command = Command::new(program);
    command.args(arguments).arg(directory);
    // SAFETY: a system call that takes integers, between fork and exec; it allocates nothing.
    unsafe { command.pre_exec(|| ptrace::traceme().map_err(io::Error::from)) };
    let mut child = command.spawn().map_err(NotTraced)?;
    let tracee = Tracee(Pid::from_raw(child.id() as i32));
    let mut outcome = Outcome {
        end: End::Ended,
        last: None,
        renames: 0,
        unflushed: BTreeSet::new(),
        unflushed_at_rename: BTreeSet::new(),
    };
    tracee.begin();
    let mut number = 0;
    while let Some(call) = tracee.enter() {
        let (kills, halves) = match moment {
            Moment::Before(at) => (at == number, false),
            Moment::Halfway(at) => (at == number, at == number),
        };
        if halves {
            tracee.halve_write();
        }
        if kills && !halves {
            outcome.end = End::Killed {
                can_be_halved: call.is_write() && call.arguments[2] > 1,
            };
            outcome.last = Some(call);
            break;
        }
        if !outcome.pass(&tracee, &call, directory) {
            break;
        }
        if kills {
            outcome.end = End::Killed {
                can_be_halved: false,
            };
            outcome.last = Some(call);
            break;
        }
        number += 1;
    }
    if let End::Killed { .. } = outcome.end {
        child.kill().expect("the child is there");
        child.wait().expect("the child is there");
    }
    Ok(outcome)
}

impl Outcome {
    /// The child executes a call; false if that ends it.
    fn pass(&mut self, tracee: &Tracee, call: &Call, directory: &Path) -> bool {
        let file = tracee.file(call.arguments[0]);
        let Some(result) = tracee.leave() else {
            return false;
        };
        if result < 0 {
            return true;
        }
        let changed = match call.call {
            _ if call.is_write() => file,
            Sysno::openat if call.arguments[2] & O_CREAT != 0 => {
                let created = tracee.file(result as u64);
                created.and_then(|path| path.parent().map(Path::to_owned))
            }
            Sysno::mkdir => Some(directory.to_owned()),
            Sysno::rename => {
                if self.renames == 0 {
                    self.unflushed_at_rename.clone_from(&self.unflushed);
                }
                self.renames += 1;
                Some(directory.join(super::NEW))
            }
            Sysno::fsync | Sysno::fdatasync => {
                self.unflushed.retain(|path| Some(path) != file.as_ref());
                None
            }
            _ => None,
        };
        self.unflushed
            .extend(changed.filter(|path| path.starts_with(directory)));
        true
    }
}

impl Call {
    fn is_write(&self) -> bool {
        matches!(self.call, Sysno::write | Sysno::pwrite64)
    }
}

/// A child that this thread traces.
struct Tracee(Pid);

impl Tracee {
    /// Lets it run until its save begins.
    fn begin(&self) {
        assert_eq!(self.wait(), WaitStatus::Stopped(self.0, Signal::SIGTRAP));
        let options = Options::PTRACE_O_TRACESYSGOOD | Options::PTRACE_O_EXITKILL;
        ptrace::setoptions(self.0, options).unwrap();
        ptrace::cont(self.0, None).unwrap();
        assert_eq!(self.wait(), WaitStatus::Stopped(self.0, Signal::SIGSTOP));
    }

    fn wait(&self) -> WaitStatus {
        waitpid(self.0, None).unwrap()
    }

    /// Lets it run to the next entry or exit of a call; false if it ended instead.
    fn step(&self) -> bool {
        ptrace::syscall(self.0, None).unwrap();
        match self.wait() {
            WaitStatus::PtraceSyscall(_) => true,
            WaitStatus::Exited(_, 0) => false,
            other => panic!("the save failed: {other:?}"),
        }
    }

    /// The next call, before it is executed; `None` if the process ended.
    fn enter(&self) -> Option<Call> {
        if !self.step() {
            return None;
        }
        let registers = ptrace::getregs(self.0).unwrap();
        let number = registers.orig_rax as usize;
        Some(Call {
            call: Sysno::new(number).expect("a call of this kernel"),
            arguments: [registers.rdi, registers.rsi, registers.rdx, registers.r10],
        })
    }

    /// Executes the call: its result, or `None` if the process ended.
    fn leave(&self) -> Option<i64> {
        let is_there = self.step();
        is_there.then(|| ptrace::getregs(self.0).unwrap().rax as i64)
    }

    /// Makes a write that begins write its first half only.
    fn halve_write(&self) {
        let mut registers = ptrace::getregs(self.0).unwrap();
        registers.rdx /= 2;
        ptrace::setregs(self.0, registers).unwrap();
    }

    /// What a descriptor stands for, if it is one.
    fn file(&self, descriptor: u64) -> Option<PathBuf> {
        let descriptor = u32::try_from(descriptor).ok()?;
        fs::read_link(format!("/proc/{}/fd/{descriptor}", self.0)).ok()
    }
}
