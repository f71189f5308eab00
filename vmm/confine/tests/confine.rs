//! Confined threads, each in a process of its own: the filters cannot be taken
//! off again. Needs a kernel with seccomp filters, no privilege.
//!
//! Without arguments this program runs every case as `confine CASE KIND MODE`
//! and judges how that ended.

use std::fs::File;
use std::process::{Command, ExitCode, Output};

use weft_confine::{EXIT_REFUSED, Mode, ThreadKind};

/// What a confined thread tries.
struct Case {
    name: &'static str,
    attempt: fn(),
    /// The call that the message must name; none when all threads may do it.
    refused: Option<&'static str>,
}

const CASES: [Case; 14] = [
    Case {
        name: "work",
        attempt: work,
        refused: None,
    },
    Case {
        name: "open",
        attempt: || drop(File::open("/etc/hostname")),
        refused: Some("openat"),
    },
    Case {
        name: "exec",
        attempt: execute,
        refused: Some("execve"),
    },
    Case {
        name: "fork",
        attempt: fork,
        refused: Some("fork"),
    },
    Case {
        name: "thread",
        attempt: thread,
        refused: Some("clone3"),
    },
    Case {
        name: "trace",
        attempt: trace,
        refused: Some("ptrace"),
    },
    Case {
        name: "executable",
        attempt: map_executable,
        refused: Some("mmap"),
    },
    Case {
        name: "kill",
        attempt: kill,
        refused: Some("tgkill"),
    },
    Case {
        name: "signals of a descriptor to another process",
        attempt: || fcntl(libc::F_SETOWN, 1),
        refused: Some("fcntl"),
    },
    Case {
        name: "another signal of a descriptor",
        attempt: || fcntl(F_SETSIG, libc::SIGKILL),
        refused: Some("fcntl"),
    },
    Case {
        name: "signals of a descriptor",
        attempt: || fcntl(libc::F_SETFL, libc::O_ASYNC),
        refused: Some("fcntl"),
    },
    Case {
        name: "signals of a descriptor by an ioctl",
        attempt: || ioctl(libc::FIOASYNC),
        refused: Some("ioctl"),
    },
    Case {
        name: "typing at the terminal",
        attempt: || ioctl(libc::TIOCSTI),
        refused: Some("ioctl"),
    },
    Case {
        name: "a tracer",
        attempt: set_tracer,
        refused: Some("prctl"),
    },
];

/// `fcntl.h`; not every version of the `libc` crate has it.
const F_SETSIG: i32 = 10;

/// How a child ends whose attempt came back.
const CAME_BACK: u8 = 7;

fn work() {
    let memory = vec![1_u8; 8 << 20];
    std::thread::sleep(std::time::Duration::from_millis(1));
    // SAFETY: a signal to this thread that has no effect.
    unsafe { libc::raise(libc::SIGWINCH) };
    eprintln!("worked on {} bytes", memory.len());
}

fn execute() {
    let arguments = [c"true".as_ptr(), std::ptr::null()];
    // SAFETY: terminated strings in a terminated list; the call is refused.
    unsafe { libc::execv(c"/bin/true".as_ptr(), arguments.as_ptr()) };
}

fn fork() {
    // SAFETY: the call takes nothing, and is refused.
    unsafe { libc::syscall(libc::SYS_fork) };
}

fn thread() {
    // SAFETY: no arguments at all: the kernel refuses them, the filter before it.
    unsafe { libc::syscall(libc::SYS_clone3, 0, 0) };
}

fn trace() {
    // SAFETY: the call takes integers, and is refused.
    unsafe { libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) };
}

fn kill() {
    // SAFETY: the call takes integers, and is refused; the signal is 0.
    unsafe { libc::syscall(libc::SYS_tgkill, 1, 1, 0) };
}

fn fcntl(command: i32, argument: i32) {
    // SAFETY: the call takes integers, and is refused.
    unsafe { libc::fcntl(libc::STDERR_FILENO, command, argument) };
}

fn ioctl(request: u64) {
    // SAFETY: a null pointer, which the kernel would not read from; the call is refused.
    unsafe { libc::ioctl(libc::STDERR_FILENO, request, std::ptr::null::<u8>()) };
}

fn set_tracer() {
    // SAFETY: the call takes integers, and is refused.
    unsafe { libc::prctl(libc::PR_SET_PTRACER, 1, 0, 0, 0) };
}

fn map_executable() {
    let protection = libc::PROT_READ | libc::PROT_EXEC;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a fresh anonymous mapping at an address of the kernel's choice.
    unsafe { libc::mmap(std::ptr::null_mut(), 4096, protection, flags, -1, 0) };
}

fn child(case: &Case, kind: ThreadKind, mode: Mode) -> ExitCode {
    weft_confine::prepare(mode).unwrap();
    let attempt = case.attempt;
    let thread = std::thread::spawn(move || {
        weft_confine::enter(kind).unwrap();
        attempt();
    });
    thread.join().unwrap();
    ExitCode::from(CAME_BACK)
}

fn judge(what: &str, output: &Output, refused: Option<&str>, kind: &str) -> bool {
    let said = String::from_utf8_lossy(&output.stderr);
    let good = match refused {
        None => output.status.code() == Some(CAME_BACK.into()) && said.contains("worked on"),
        Some(call) => {
            output.status.code() == Some(EXIT_REFUSED)
                && said.contains(&format!("the {kind} thread made the system call {call} ("))
        }
    };
    if !good {
        eprintln!("FAILED {what}: {}: {said}", output.status);
    }
    good
}

fn run(arguments: &[&str]) -> Output {
    let program = std::env::current_exe().expect("this program has a path");
    let mut command = Command::new(program);
    command.args(arguments).env("RUST_BACKTRACE", "0");
    command.output().expect("this program runs again")
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    if let ["--case", case, kind, mode] = words[..] {
        let case = CASES.iter().find(|known| known.name == case);
        let kind = ThreadKind::ALL
            .into_iter()
            .find(|known| known.name() == kind);
        let mode = match mode {
            "log" => Mode::Log,
            _ => Mode::Enforce,
        };
        return child(case.expect("a case"), kind.expect("a kind"), mode);
    }
    let mut bad = 0;
    for kind in ThreadKind::ALL.map(ThreadKind::name) {
        for case in &CASES {
            let output = run(&["--case", case.name, kind, "enforce"]);
            let what = format!("{} in a {kind} thread", case.name);
            bad += u32::from(!judge(&what, &output, case.refused, kind));
        }
    }
    let logged = run(&["--case", "open", ThreadKind::Device.name(), "log"]);
    if logged.status.code() != Some(CAME_BACK.into()) {
        eprintln!("FAILED open with --confine log: {}", logged.status);
        bad += 1;
    }
    let cases = CASES.len() * ThreadKind::ALL.len() + 1;
    println!("confine: {cases} cases, {bad} failed");
    ExitCode::from(u8::from(bad > 0))
}
