//! What is refused before the guest starts.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::context::Context;
use crate::report::{Report, Verdict};
use crate::setup::Refusal;
use crate::user;

const EXIT_SETUP: i32 = 125;
/// A line that cannot be read at all.
const EXIT_USAGE: i32 = 2;

const TUN: &str = "/dev/net/tun";

/// More than the ELF headers of the guest, less than its code.
const CUT: usize = 110;

/// An ELF header for another machine, the rest of a kernel that works.
fn foreign(kernel: &[u8]) -> Vec<u8> {
    const MACHINE_OFFSET: usize = 18;
    const AARCH64: u16 = 183;
    let mut bytes = kernel.to_vec();
    bytes[MACHINE_OFFSET..MACHINE_OFFSET + 2].copy_from_slice(&AARCH64.to_le_bytes());
    bytes
}

/// What somebody else has while the refusals are tried.
struct Taken {
    _disk: File,
    _socket: UnixListener,
}

/// Every refusal.
fn refusals(context: &Context) -> Result<(Vec<Refusal<'static>>, Taken)> {
    let files = context.directory("vm-errors")?;
    let path = |name: &str| files.join(name).to_string_lossy().into_owned();
    let guest = context.fill("{programs}/typed-guest");
    let kernel = fs::read(&guest)?;
    fs::write(path("text"), "just some text\n")?;
    fs::write(path("empty"), "")?;
    fs::write(path("cut-off"), &kernel[..CUT])?;
    fs::write(path("foreign"), foreign(&kernel))?;
    fs::write(path("disk"), vec![0; 1 << 20])?;
    fs::write(path("taken-disk"), vec![0; 1 << 20])?;
    let lock = File::options()
        .read(true)
        .write(true)
        .open(path("taken-disk"))?;
    lock_whole(&lock)?;
    let listener = UnixListener::bind(path("taken-socket"))?;
    let run = |options: &str| format!("vm run --backend soft {options}");
    let with = |options: &str| run(&format!("--kernel {guest} --memory 16M {options}"));
    let kernel = |name: &str| run(&format!("--memory 16M --kernel {}", path(name)));
    let refuse = |name, line: String, says| Refusal::new(name, &line, EXIT_SETUP, says);
    let usage = |name, line: String, says| Refusal::new(name, &line, EXIT_USAGE, says);
    let refusals = vec![
        refuse(
            "no kernel",
            kernel("missing"),
            &["missing", "kernel"] as &[&str],
        ),
        refuse(
            "a kernel that is a directory",
            run("--kernel /usr"),
            &["/usr"],
        ),
        refuse(
            "a kernel that is text",
            kernel("text"),
            &["text", "not a kernel image"],
        ),
        refuse("an empty kernel", kernel("empty"), &["empty"]),
        refuse(
            "a kernel cut off",
            kernel("cut-off"),
            &["cut-off", "truncated"],
        ),
        refuse(
            "a kernel for another CPU",
            kernel("foreign"),
            &["foreign", "x86-64"],
        ),
        refuse(
            "no initrd",
            with(&format!("--initrd {}", path("missing"))),
            &["initrd", "missing"],
        ),
        refuse(
            "no disk",
            with(&format!("--disk {}", path("missing"))),
            &["disk", "missing"],
        ),
        refuse(
            "a disk that is a directory",
            with("--disk /usr,ro"),
            &["/usr"],
        ),
        refuse(
            "an empty disk",
            with(&format!("--disk {}", path("empty"))),
            &["empty", "sector"],
        ),
        refuse(
            "a description that is too long",
            with(&format!("--ready {}", "\"".repeat(60_000))),
            &["too long: use fewer devices"],
        ),
        refuse(
            "a disk in use",
            with(&format!("--disk {}", path("taken-disk"))),
            &["taken-disk", "in use"],
        ),
        refuse(
            "a disk twice",
            with(&format!("--disk {0} --disk {0}", path("disk"))),
            &["disk", "in use"],
        ),
        refuse(
            "more memory than there is",
            run(&format!("--kernel {guest} --memory 900T")),
            &["--memory", "this host"],
        ),
        refuse(
            "too little memory",
            run(&format!("--kernel {guest} --memory 1M")),
            &["--memory", "4M"],
        ),
        refuse(
            "a trace of one node",
            with("--trace /dev/null"),
            &["--trace", "one node"],
        ),
        refuse("no CPU", with("--cpus 0"), &["--cpus 0", "1 to 255"]),
        refuse(
            "too many CPUs",
            with("--cpus 256"),
            &["--cpus 256", "1 to 255"],
        ),
        refuse(
            "a socket's path that is taken",
            with(&format!("--api {}", path("taken-socket"))),
            &["--api", "taken-socket", "choose another"],
        ),
        refuse(
            "a socket's path that is a file",
            with(&format!("--console socket={}", path("disk"))),
            &["--console", "remove it"],
        ),
        refuse(
            "a socket in no directory",
            with("--api /no/such/directory/socket"),
            &["--api", "/no/such/directory"],
        ),
        refuse(
            "a socket's path that is too long",
            with(&format!("--api /tmp/{}", "x".repeat(120))),
            &["at most 107"],
        ),
        refuse("a name with a slash", with("--name a/b"), &["--name a/b"]),
        refuse(
            "no such user",
            with("--user no-such-user"),
            &["no-such-user", "--user"],
        ),
        refuse(
            "statistics that cannot be written",
            with("--stats json=/no/such/directory/x"),
            &["/no/such/directory/x"],
        ),
        refuse(
            "counting instructions on KVM",
            format!("vm run --kernel {guest} --deterministic --backend kvm"),
            &["--deterministic", "soft"],
        ),
        refuse(
            "a port forwarded twice",
            with("--net user,forward=9:1,forward=9:2"),
            &["port 9", "twice"],
        ),
        usage(
            "a misspelt option of a disk",
            with("--disk x,dirct"),
            &["dirct", "`direct`"],
        ),
        usage("a misspelt network", with("--net usr"), &["usr", "`user`"]),
        usage(
            "a misspelt back end",
            format!("vm run --kernel {guest} --backend svft"),
            &["svft", "soft"],
        ),
        usage(
            "a misspelt size",
            run(&format!("--kernel {guest} --memory 1Q")),
            &["1Q", "unit"],
        ),
    ];
    let taken = Taken {
        _disk: lock,
        _socket: listener,
    };
    Ok((refusals, taken))
}

/// What only an ordinary user is refused: tried as one, also when root runs the tests.
fn refusals_of_a_user(context: &Context) -> Vec<Refusal<'static>> {
    let guest = context.fill("{programs}/typed-guest");
    let refuse = |name, options: &str, says| {
        let line = format!("vm run --backend soft --kernel {guest} --memory 16M {options}");
        let refusal = Refusal::new(name, &line, EXIT_SETUP, says);
        match context.is_root() {
            true => refusal.by_user(context),
            false => refusal,
        }
    };
    // Most hosts let everybody open it, and judge what is done with it.
    let tun = match context.is_root() {
        true => fs::metadata(TUN).is_ok_and(|tun| tun.mode() & 0o006 == 0o006),
        false => File::options().read(true).write(true).open(TUN).is_ok(),
    };
    let tap: &[&str] = if tun { &["tap", "t0"] } else { &[TUN] };
    vec![
        refuse("a tap without privilege", "--net tap=t0", tap),
        refuse("another user", "--user root", &["--user", "root"]),
        refuse("an unreadable disk", "--disk /etc/shadow,ro", &["shadow"]),
    ]
}

/// Takes the lock that a machine would.
fn lock_whole(file: &File) -> Result<()> {
    use nix::fcntl::{FcntlArg, fcntl};
    use nix::libc;
    let lock = libc::flock {
        l_type: libc::F_WRLCK as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    fcntl(file, FcntlArg::F_OFD_SETLK(&lock))?;
    Ok(())
}

/// Tries each.
pub(super) fn run(context: &Context, wanted: &dyn Fn(&str) -> bool, report: &Report) -> Result<()> {
    let (refusals, _taken) = refusals(context)?;
    try_each(context, &refusals, None, wanted, report);
    let (open, skip) = match context.is_root() {
        false => (context.clone(), None),
        true => (user::open_context(context)?, user::cannot_change()),
    };
    try_each(&open, &refusals_of_a_user(&open), skip, wanted, report);
    Ok(())
}

/// `skip` says why none can be tried.
fn try_each(
    context: &Context,
    refusals: &[Refusal],
    skip: Option<String>,
    wanted: &dyn Fn(&str) -> bool,
    report: &Report,
) {
    for refusal in refusals {
        let name = format!("vm: {}", refusal.name);
        if !wanted(&name) {
            continue;
        }
        if let Some(why) = &skip {
            report.add(&name, Duration::ZERO, Verdict::Skipped(why.clone()));
            continue;
        }
        let started = Instant::now();
        let verdict = refusal
            .check(context)
            .unwrap_or_else(|error| Verdict::Failed(vec![format!("{error:#}")]));
        report.add(&name, started.elapsed(), verdict);
    }
}
