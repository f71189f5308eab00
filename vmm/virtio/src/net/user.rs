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

const GUEST: &str = "10.0.2.15";
const NETMASK: &str = "255.255.255.0";
const GATEWAY: &str = "10.0.2.2";
const NAME_SERVER: &str = "10.0.2.3";
/// How long it may take to start.
const START_MAX: Duration = Duration::from_secs(10);
const LOOK_AGAIN: Duration = Duration::from_millis(2);
/// What it says when a port is taken.
const TAKEN: &str = "Failed to bind";
/// How long a port may stay taken, from when it was first found so.
const TAKEN_MAX: Duration = Duration::from_secs(1);
const TRY_AGAIN: Duration = Duration::from_millis(20);
/// Bytes of its complaint that are passed on.
const COMPLAINT_MAX: u64 = 4096;

/// Starts it; back when its ports are open. One that is taken may be about to be
/// free: the network of a guest that restarts has just lost its other end.
pub fn start(user: &User, mtu: u16) -> Result<Stream, NetError> {
    start_within(user, mtu, TAKEN_MAX)
}

/// The same, where a port may stay taken for `taken_max`. It is tried twice at least:
/// on a busy host the first try alone may take longer.
fn start_within(user: &User, mtu: u16, taken_max: Duration) -> Result<Stream, NetError> {
    let mut deadline = None;
    loop {
        match start_once(user, mtu) {
            Err(NetError::Program(complaint)) if complaint.contains(TAKEN) => {
                let now = Instant::now();
                if now > *deadline.get_or_insert(now + taken_max) {
                    return Err(NetError::Program(complaint));
                }
                std::thread::sleep(TRY_AGAIN);
            }
            started => return started,
        }
    }
}

fn start_once(user: &User, mtu: u16) -> Result<Stream, NetError> {
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

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::path::PathBuf;

    use super::super::options::USER_MTU;
    use super::*;

    /// A program that complains so often, and notes how often it was started.
    struct Complainer {
        directory: PathBuf,
        user: User,
    }

    impl Complainer {
        fn new(name: &str, complaint: &str, times: u32) -> Complainer {
            let directory = format!("weft-user-{}-{name}", std::process::id());
            let directory = std::env::temp_dir().join(directory);
            fs::create_dir_all(&directory).unwrap();
            let (text, program) = (directory.join("text"), directory.join("program"));
            let script = format!(
                "#!/bin/sh\necho >> {0}\n[ $(wc -l < {0}) -gt {times} ] && exit 0\n\
                 echo '{complaint}' >&2\nexit 1\n",
                directory.join("count").display()
            );
            fs::write(&text, script).unwrap();
            fs::set_permissions(&text, fs::Permissions::from_mode(0o700)).unwrap();
            // Another process writes what is executed: a child that another thread makes
            // just now has a copy of what this one has open, and nobody may execute a
            // file that somebody may write to.
            let copied = Command::new("cp").args([&text, &program]).status().unwrap();
            assert!(copied.success());
            let user = User {
                program,
                ..User::default()
            };
            Complainer { directory, user }
        }

        fn starts(&self) -> usize {
            fs::read(self.directory.join("count")).unwrap().len()
        }
    }

    impl Drop for Complainer {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.directory);
        }
    }

    const TAKEN_PORT: &str = "Failed to bind any port for -t 1:2, exiting";

    #[test]
    fn a_port_that_is_about_to_be_free_is_waited_for() {
        let complainer = Complainer::new("soon", TAKEN_PORT, 3);
        let patience = Duration::from_secs(60);
        let started = start_within(&complainer.user, USER_MTU, patience);
        assert!(started.is_ok(), "{:?}", started.err());
        assert_eq!(complainer.starts(), 4);
    }

    #[test]
    fn a_port_that_stays_taken_is_tried_again_and_given_up() {
        let complainer = Complainer::new("never", TAKEN_PORT, 1_000_000);
        let started = start_within(&complainer.user, USER_MTU, Duration::ZERO);
        let error = started.err().unwrap();
        assert!(
            matches!(&error, NetError::Program(text) if text == TAKEN_PORT),
            "{error}"
        );
        assert!(complainer.starts() > 1);
    }

    #[test]
    fn another_complaint_is_passed_on_at_once() {
        let complainer = Complainer::new("other", "no route", 3);
        let error = start(&complainer.user, USER_MTU).err().unwrap();
        assert!(
            matches!(&error, NetError::Program(text) if text == "no route"),
            "{error}"
        );
        assert_eq!(complainer.starts(), 1);
    }
}
