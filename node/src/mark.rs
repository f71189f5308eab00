//! How a daemon finds out that the processes behind an aggregate are gone.
//!
//! The launcher of an aggregate that a cluster placed, and the agent beside it, each have a
//! socket in the abstract namespace. The kernel lists it for all users
//! (`/proc/net/unix`, proc_pid_net(5)) until the last process that has it is gone, whatever
//! ended it. So nobody has to open what another user owns, or to trust a process number.

use std::fs;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use weft_cluster::Mark;

const PREFIX: &str = "weft-work-";

/// A new mark of this host. No two are the same.
pub fn new() -> io::Result<Mark> {
    // A version 4 UUID: 122 random bits.
    let nonce = fs::read_to_string("/proc/sys/kernel/random/uuid")?;
    Ok(Mark {
        boot: boot()?,
        namespace: namespace()?,
        nonce: nonce.trim().into(),
    })
}

/// Shows that this process, and those that it forks, are there. `role` tells the processes of
/// one aggregate apart.
pub fn show(mark: &Mark, role: &str) -> io::Result<UnixDatagram> {
    let name = format!("{PREFIX}{}-{role}", mark.nonce);
    UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(name)?)
}

/// Whether nobody shows it any more. The kernel's list can lack a socket while others close:
/// ask twice. A mark of another network namespace cannot be judged here, and counts as shown.
pub fn is_gone(mark: &Mark) -> io::Result<bool> {
    if mark.boot != boot()? {
        return Ok(true);
    }
    if mark.namespace != namespace()? {
        return Ok(false);
    }
    let shown = format!("@{PREFIX}{}-", mark.nonce);
    // Names of others are any bytes.
    let sockets = fs::read("/proc/net/unix")?;
    let mut names = sockets.windows(shown.len());
    Ok(!names.any(|name| name == shown.as_bytes()))
}

fn boot() -> io::Result<String> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    Ok(boot.trim().into())
}

fn namespace() -> io::Result<String> {
    let link = fs::read_link("/proc/self/ns/net")?;
    Ok(link.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_shown_until_all_who_have_it_are_gone() {
        let mark = new().unwrap();
        assert!(is_gone(&mark).unwrap());
        let launcher = show(&mark, "launcher").unwrap();
        let agent = show(&mark, "agent").unwrap();
        assert!(show(&mark, "agent").is_err(), "each role once");
        let inherited = launcher.try_clone().unwrap();
        assert!(!is_gone(&mark).unwrap());
        drop(agent);
        drop(launcher);
        assert!(!is_gone(&mark).unwrap(), "a fork has it");
        drop(inherited);
        assert!(is_gone(&mark).unwrap());
    }

    #[test]
    fn a_mark_of_another_namespace_is_not_judged_and_one_of_another_boot_is_gone() {
        let mark = new().unwrap();
        let elsewhere = Mark {
            namespace: "net:[1]".into(),
            ..mark.clone()
        };
        assert!(!is_gone(&elsewhere).unwrap());
        let earlier = Mark {
            boot: "earlier".into(),
            ..elsewhere
        };
        assert!(is_gone(&earlier).unwrap());
    }
}
