//! A tap device of the host, which its administrator attached to a bridge: the way to the machines
//! of other hosts that have one, too (kernel document `networking/tuntap`).
//!
//! To the core all switches on the bridge are one peer, which says nothing but frames.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use nix::errno::Errno;
use nix::libc;

use super::ShellError;
use super::machine::{BATCH, is_wait};
use crate::core::{Outgoing, PortId, Switch};
use crate::frames::{FRAME_MAX, Way};

/// `linux/if_tun.h`: TUNSETIFF, `_IOW('T', 202, int)`.
const TUNSETIFF: libc::Ioctl = 0x4004_54ca;
/// The interface's name, then its flags, in the room of `struct ifreq`.
const REQUEST: usize = 40;
const NAME_MAX: usize = 15;

/// Open, and up when it was opened.
pub struct Tap {
    pub name: String,
    pub port: PortId,
    file: File,
    input: Box<[u8]>,
    /// The largest frame without its header, bytes.
    pub mtu: u32,
}

impl Tap {
    /// # Errors
    /// There is no such device, it is down, another process has it, or this user may not.
    pub fn open(name: &str, core: &mut Switch) -> Result<Tap, ShellError> {
        let failed = |why: String| ShellError::Tap {
            name: name.to_owned(),
            why,
        };
        // The kernel would make a new one, which is attached to nothing.
        let device = Path::new("/sys/class/net").join(name);
        let is_name = (1..=NAME_MAX).contains(&name.len()) && !name.contains(['/', '.']);
        if !is_name || !device.join("tun_flags").exists() {
            return Err(failed(String::from(
                "this host has no tap device of that name",
            )));
        }
        let is_up = read(&device.join("flags"))
            .and_then(|flags| u32::from_str_radix(flags.strip_prefix("0x")?, 16).ok())
            .is_some_and(|flags| flags & libc::IFF_UP as u32 != 0);
        if !is_up {
            return Err(failed(format!("it is down: `ip link set {name} up`")));
        }
        let mtu = read(&device.join("mtu")).and_then(|mtu| mtu.parse().ok());
        let mtu = mtu.ok_or_else(|| failed(String::from("it has no MTU")))?;
        let file = attach(name).map_err(|error| failed(refusal(name, error)))?;
        let port = core.add_bridge().map_err(|full| failed(full.to_string()))?;
        Ok(Tap {
            name: name.to_owned(),
            port,
            file,
            input: vec![0; FRAME_MAX].into(),
            mtu,
        })
    }

    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Passes up to [`BATCH`] frames on; whether there may be more.
    ///
    /// # Errors
    /// The device is no more.
    pub fn pass_on(&mut self, core: &mut Switch, now: u64) -> io::Result<bool> {
        for _ in 0..BATCH {
            match self.file.read(&mut self.input) {
                Ok(count) => core.receive(self.port, &self.input[..count], Way::Directed, now),
                Err(error) if is_wait(&error) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Writes what waits. A frame that the device refuses is lost, as on a cable.
    ///
    /// # Errors
    /// The device is no more.
    pub fn flush(&mut self, core: &mut Switch, now: u64) -> io::Result<()> {
        while let Some(outgoing) = core.next(self.port, now) {
            let Outgoing::Frame(frame, _) = outgoing else {
                continue;
            };
            if let Err(error) = self.file.write(&frame)
                && error.raw_os_error() == Some(libc::EBADFD)
            {
                return Err(error);
            }
        }
        Ok(())
    }
}

fn read(path: &Path) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

/// Plain frames, without the kernel's header and without offloads.
fn attach(name: &str) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let options = options.read(true).write(true);
    let options = options.custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC);
    let file = options.open("/dev/net/tun")?;
    let mut request = [0_u8; REQUEST];
    request[..name.len()].copy_from_slice(name.as_bytes());
    let flags = (libc::IFF_TAP | libc::IFF_NO_PI) as i16;
    request[NAME_MAX + 1..][..2].copy_from_slice(&flags.to_ne_bytes());
    // SAFETY: the kernel reads and writes a `struct ifreq` of 40 bytes, and the request has as
    // many and outlives the call.
    let made = unsafe { libc::ioctl(file.as_raw_fd(), TUNSETIFF, request.as_mut_ptr()) };
    Errno::result(made)?;
    Ok(file)
}

fn refusal(name: &str, error: io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::EBUSY) => String::from("another process has it"),
        Some(libc::EPERM | libc::EACCES) => format!(
            "this user may not use it: `ip tuntap add {name} mode tap user NAME` makes one for a \
             user, and /dev/net/tun must be writable: {error}"
        ),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_tap_device_is_refused_and_no_device_is_made() {
        let mut core = Switch::default();
        for name in [
            "",
            "lo",
            "no-such-device",
            "../net/lo",
            "a-name-of-many-letters",
        ] {
            let error = Tap::open(name, &mut core)
                .err()
                .map(|error| error.to_string());
            let expected = format!(
                "cannot use the tap device `{name}`: this host has no tap device of that name"
            );
            assert_eq!(error, Some(expected));
        }
        assert_eq!(core.ports().count(), 0);
        assert!(!Path::new("/sys/class/net/no-such-device").exists());
    }
}
