//! The console's processes and what ends them: each in a process of its own, for
//! signals and terminals are the whole process's. Needs pseudo-terminals, no
//! privilege.
//!
//! Without arguments this program runs and judges every case; `console CASE` is
//! one.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::pty::openpty;
use nix::sys::signal::{SigHandler, Signal, kill};
use nix::sys::termios::{LocalFlags, tcgetattr};
use nix::unistd::Pid;
use weft_console::attach::attach;
use weft_console::terminal::Size;
use weft_console::{ConsoleEndpoint, ConsoleThread, Keys, Notice, Output};

/// How long anything here may take.
const PATIENCE: Duration = Duration::from_secs(20);
/// More than pipes and terminals hold.
const MUCH: usize = 200 << 10;

/// What ends a console.
const SIGNALS: [Signal; 4] = [
    Signal::SIGTERM,
    Signal::SIGINT,
    Signal::SIGHUP,
    Signal::SIGQUIT,
];

/// A guest that nobody types at.
struct Mute;

impl Keys for Mute {
    fn type_in(&self, bytes: &[u8]) -> usize {
        bytes.len()
    }
    fn resize(&self, _: Size) {}
}

fn main() {
    match std::env::args().nth(1).as_deref() {
        Some("run") => run_console(),
        Some("attach") => {
            let (stream, _other) = UnixStream::pair().unwrap();
            let left = attach(stream);
            panic!("{left:?}");
        }
        _ => {
            signals_are_heard_while_nobody_reads(false);
            signals_are_heard_while_nobody_reads(true);
            a_killed_console_restores_its_terminal();
            println!("test result: ok. 3 passed");
        }
    }
}

/// A console on standard input and output that ends when a signal is heard.
fn run_console() {
    ConsoleThread::signals().thread_block().unwrap();
    let output = Output::new(Duration::from_secs(1)).unwrap();
    let notify = |notice| match notice {
        Notice::Signal(signal) => std::process::exit(128 + signal),
        Notice::Quit => std::process::exit(1),
    };
    let console_thread = ConsoleThread::start(
        ConsoleEndpoint::Standard,
        output.clone(),
        Arc::new(Mute),
        Box::new(notify),
        &ConsoleThread::signals(),
    );
    let _console_thread = console_thread.unwrap();
    output.push(&vec![b'x'; MUCH]);
    std::thread::sleep(2 * PATIENCE);
}

fn start(case: &str, stdin: impl Into<Stdio>, stdout: impl Into<Stdio>) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.arg(case).stdin(stdin).stdout(stdout);
    // A shell that runs this in the background may ignore some of them, and what is
    // ignored stays so in the child.
    let hear = || {
        for signal in SIGNALS {
            // SAFETY: the default action is no handler.
            unsafe { nix::sys::signal::signal(signal, SigHandler::SigDfl)? };
        }
        Ok(())
    };
    // SAFETY: only calls that are allowed between fork and exec.
    unsafe { command.pre_exec(hear) };
    command.spawn().unwrap()
}

fn until(what: &str, mut met: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !met() {
        assert!(Instant::now() < deadline, "{what}: not in time");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn killed(mut child: Child, signal: Signal) -> ExitStatus {
    kill(Pid::from_raw(child.id() as i32), signal).unwrap();
    let mut status = None;
    until("the end", || {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    status.unwrap()
}

fn is_raw(terminal: &OwnedFd) -> bool {
    !tcgetattr(terminal)
        .unwrap()
        .local_flags
        .contains(LocalFlags::ICANON)
}

/// Bytes that wait to be read.
fn waiting(from: impl AsFd) -> i32 {
    let mut count = 0;
    let descriptor = std::os::fd::AsRawFd::as_raw_fd(&from.as_fd());
    // SAFETY: the kernel writes one int, which outlives the call.
    let asked = unsafe { libc::ioctl(descriptor, libc::FIONREAD, &mut count) };
    assert_eq!(asked, 0);
    count
}

fn signals_are_heard_while_nobody_reads(terminal: bool) {
    let (reader, writer): (OwnedFd, OwnedFd) = if terminal {
        let pair = openpty(None, None).unwrap();
        (pair.master, pair.slave)
    } else {
        let (reader, writer) = io::pipe().unwrap();
        (reader.into(), writer.into())
    };
    let child = start("run", File::open("/dev/null").unwrap(), writer);
    let (mut before, mut since) = (0, Instant::now());
    until("a full output", || {
        let now = waiting(&reader);
        if now != before {
            (before, since) = (now, Instant::now());
        }
        now > 0 && since.elapsed() > Duration::from_millis(200)
    });
    assert!((before as usize) < MUCH, "nothing waits");
    let status = killed(child, Signal::SIGTERM);
    assert_eq!(status.code(), Some(143), "terminal: {terminal}: {status}");
}

fn a_killed_console_restores_its_terminal() {
    for signal in SIGNALS {
        let pair = openpty(None, None).unwrap();
        assert!(!is_raw(&pair.slave));
        let child = start("attach", pair.slave.try_clone().unwrap(), Stdio::null());
        until("raw mode", || is_raw(&pair.slave));
        let status = killed(child, signal);
        assert_eq!(status.signal(), Some(signal as i32), "{status}");
        assert!(!is_raw(&pair.slave), "{signal}");
    }
}
