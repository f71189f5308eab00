//! A network in user space: a passt process of our own, at the other end of a
//! socket pair. It ends when we do, for the socket closes then.
//!
//! The guest finds what it finds under QEMU: 10.0.2.15/24 for itself (DHCP says
//! so), 10.0.2.2 the gateway, 10.0.2.3 a name server that asks the host's.

use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::options::User;
use super::{NetError, Stream};

/// Largest packet that passt takes: fewer, larger packets cost less.
pub const MTU: u16 = 65520;
const GUEST: &str = "10.0.2.15";
const NETMASK: &str = "255.255.255.0";
const GATEWAY: &str = "10.0.2.2";
const NAME_SERVER: &str = "10.0.2.3";
/// How long it may take to start.
const START_MAX: Duration = Duration::from_secs(10);
const LOOK_AGAIN: Duration = Duration::from_millis(2);
/// Bytes of its complaint that are passed on.
const COMPLAINT_MAX: u64 = 4096;

/// Starts it; back when its ports are open.
pub fn start(user: &User, mtu: u16) -> Result<Stream, NetError> {
    let (ours, theirs) = UnixStream::pair().map_err(NetError::Socket)?;
    for end in [&ours, &theirs] {
        grow(end);
    }
    let descriptor = theirs.as_raw_fd();
    let mut command = Command::new(&user.program);
    command
        .args(["--fd", &descriptor.to_string(), "--quiet"])
        .args(["--ipv4-only", "--address", GUEST, "--netmask", NETMASK])
        .args(["--gateway", GATEWAY, "--dns-forward", NAME_SERVER])
        .args(["--mtu", &mtu.to_string()])
        .args(["--udp-ports", "none"]);
    if !user.reaches_host {
        command.arg("--no-map-gw");
    }
    if user.forwards.is_empty() {
        command.args(["--tcp-ports", "none"]);
    }
    for forward in &user.forwards {
        let ports = format!("127.0.0.1/{}:{}", forward.host, forward.guest);
        command.args(["--tcp-ports", &ports]);
    }
    command.stdin(Stdio::null()).stdout(Stdio::null());
    command.stderr(Stdio::piped());
    let inherit = move || {
        // SAFETY: fcntl may be called between fork and exec; it only lets the
        // child keep a descriptor that it has a copy of.
        match unsafe { libc::fcntl(descriptor, libc::F_SETFD, 0) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    };
    // SAFETY: `inherit` makes one system call and touches no memory.
    unsafe { command.pre_exec(inherit) };
    let child = command.spawn().map_err(|source| NetError::NoProgram {
        program: user.program.display().to_string(),
        source,
    })?;
    wait_until_ready(child)?;
    Stream::new(ours).map_err(NetError::Socket)
}

/// Lets as much be under way on the socket as the host permits.
fn grow(socket: &UnixStream) {
    let size: libc::c_int = i32::MAX / 2;
    // SAFETY: the kernel reads one int, which outlives the call. When it
    // refuses, the size stays as it was, which only costs speed.
    unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_SNDBUF,
            (&raw const size).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
}

/// It goes into the background, as another process, when it is ready.
fn wait_until_ready(mut child: Child) -> Result<(), NetError> {
    let deadline = Instant::now() + START_MAX;
    loop {
        match child.try_wait().map_err(NetError::Socket)? {
            Some(status) if status.success() => return Ok(()),
            Some(_) => return Err(NetError::Program(complaint(&mut child))),
            None if Instant::now() >= deadline => {
                // It may just have ended.
                let _ = child.kill();
                let _ = child.wait();
                let late = format!("not ready after {} s", START_MAX.as_secs());
                return Err(NetError::Program(late));
            }
            None => std::thread::sleep(LOOK_AGAIN),
        }
    }
}

/// What it said, without what it always says.
fn complaint(child: &mut Child) -> String {
    let mut said = String::new();
    if let Some(stderr) = &mut child.stderr {
        // What cannot be read is left out.
        let _ = stderr.take(COMPLAINT_MAX).read_to_string(&mut said);
    }
    let noise = ["Failed to send", "Don't run as root"];
    let lines = said
        .lines()
        .filter(|line| !noise.iter().any(|noise| line.starts_with(noise)));
    lines.collect::<Vec<_>>().join("; ")
}
