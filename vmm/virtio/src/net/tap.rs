//! A tap device (Documentation/networking/tuntap.rst), one descriptor per pair
//! of queues.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;

use weft_guest_memory::DeviceMemory;

use super::{HEADER, Link, NetError};
use crate::ring::Segment;
use crate::vectors::pieces;

/// include/uapi/linux/if_tun.h
const TUNSETIFF: u64 = 0x4004_54ca;
const TUNSETOFFLOAD: u64 = 0x4004_54d0;
const TUNSETVNETHDRSZ: u64 = 0x4004_54d8;
const TUNSETQUEUE: u64 = 0x4004_54d9;
/// Offloads of the guest's side by feature bit: checksum, TSO4, TSO6, ECN.
const OFFLOADS: [(u64, u64); 4] = [(1 << 1, 1), (1 << 7, 2), (1 << 8, 4), (1 << 9, 8)];

/// One queue of a tap device.
pub struct Tap {
    file: File,
    several: bool,
    attached: bool,
}

/// Opens the device with as many queues, or with one where it was made for
/// one, and brings it up if that is allowed.
pub fn open(name: &str, queues: u16) -> Result<Vec<Tap>, NetError> {
    let usable = (1..libc::IFNAMSIZ).contains(&name.len())
        && !name.bytes().any(|byte| byte == b'/' || byte <= b' ');
    if !usable {
        return Err(NetError::Name(name.into()));
    }
    let taps = match open_queues(name, queues) {
        // It was made for one, or for several.
        Err(NetError::Busy(_)) if queues > 1 => open_queues(name, 1)?,
        Err(NetError::Busy(_)) => vec![open_queue(name, true)?],
        opened => opened?,
    };
    // Without privilege it stays as its creator configured it.
    let _ = bring_up(name);
    Ok(taps)
}

fn open_queues(name: &str, queues: u16) -> Result<Vec<Tap>, NetError> {
    (0..queues).map(|_| open_queue(name, queues > 1)).collect()
}

fn open_queue(name: &str, several: bool) -> Result<Tap, NetError> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open("/dev/net/tun")
        .map_err(NetError::NoTun)?;
    let mut request = request(name);
    let mut flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    if several {
        flags |= libc::IFF_MULTI_QUEUE;
    }
    request.ifr_ifru.ifru_flags = flags as i16;
    // SAFETY: the request is a whole ifreq and outlives the call.
    let made = unsafe { libc::ioctl(file.as_raw_fd(), TUNSETIFF, &mut request) };
    if made < 0 {
        let source = io::Error::last_os_error();
        return Err(match source.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => NetError::Privilege(name.into()),
            Some(libc::EBUSY | libc::EINVAL) => NetError::Busy(name.into()),
            _ => NetError::Tap {
                name: name.into(),
                what: "TUNSETIFF",
                source,
            },
        });
    }
    let size = HEADER as libc::c_int;
    // SAFETY: the kernel reads one int, which outlives the call.
    if unsafe { libc::ioctl(file.as_raw_fd(), TUNSETVNETHDRSZ, &size) } < 0 {
        return Err(NetError::Tap {
            name: name.into(),
            what: "TUNSETVNETHDRSZ",
            source: io::Error::last_os_error(),
        });
    }
    Ok(Tap {
        file,
        several,
        attached: true,
    })
}

fn request(name: &str) -> libc::ifreq {
    // SAFETY: ifreq is plain numbers, for which zero is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    request
}

fn bring_up(name: &str) -> io::Result<()> {
    // SAFETY: no memory is involved.
    let socket = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if socket < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made for us alone.
    let socket = unsafe { <File as std::os::fd::FromRawFd>::from_raw_fd(socket) };
    let mut request = request(name);
    // SAFETY: the request is a whole ifreq and outlives the call, which fills it.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS, &mut request) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call above filled the flags.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    request.ifr_ifru.ifru_flags = flags | libc::IFF_UP as i16;
    // SAFETY: as above; the call reads it.
    match unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &request) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// What became of a frame.
fn outcome(error: Option<io::Error>) -> io::Result<()> {
    match error {
        None => Ok(()),
        // The frame is nonsense, or the device is down: lost, as on a cable.
        Some(error)
            if matches!(
                error.raw_os_error(),
                Some(libc::EINVAL | libc::EIO | libc::EBADFD | libc::ENOMEM | libc::ENOBUFS)
            ) =>
        {
            Ok(())
        }
        Some(error) => Err(error),
    }
}

impl Link for Tap {
    fn descriptor(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    fn receive(&mut self, frame: &mut [u8]) -> io::Result<Option<usize>> {
        loop {
            match self.file.read(frame) {
                Ok(length) => return Ok(Some(length)),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                // A queue that is detached, or a device that is down: later.
                Err(error) if matches!(error.raw_os_error(), Some(libc::EBADFD | libc::EIO)) => {
                    return Ok(None);
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn send(&mut self, memory: &DeviceMemory, frame: &[Segment]) -> io::Result<()> {
        let pieces = pieces(memory, frame, 0);
        let list = &pieces.list;
        let count = list.len().min(libc::UIO_MAXIOV as usize) as libc::c_int;
        // SAFETY: the vectors are guest RAM, mapped while `memory` is borrowed, or a
        // copy in `pieces`; they are only read.
        let sent = unsafe { libc::writev(self.file.as_raw_fd(), list.as_ptr().cast(), count) };
        outcome((sent < 0).then(io::Error::last_os_error))
    }

    fn send_bytes(&mut self, frame: &[u8]) -> io::Result<()> {
        outcome(self.file.write(frame).err())
    }

    fn set_features(&mut self, features: u64) -> io::Result<()> {
        let asked = OFFLOADS.iter().filter(|(bit, _)| features & bit != 0);
        let offloads: u64 = asked.map(|(_, offload)| offload).sum();
        // SAFETY: the argument is a number.
        match unsafe { libc::ioctl(self.file.as_raw_fd(), TUNSETOFFLOAD, offloads) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn set_attached(&mut self, attached: bool) {
        if !self.several || attached == self.attached {
            return;
        }
        let mut request = request("");
        let flag = if attached {
            libc::IFF_ATTACH_QUEUE
        } else {
            libc::IFF_DETACH_QUEUE
        };
        request.ifr_ifru.ifru_flags = flag as i16;
        // SAFETY: the request is a whole ifreq and outlives the call.
        if unsafe { libc::ioctl(self.file.as_raw_fd(), TUNSETQUEUE, &request) } == 0 {
            self.attached = attached;
        }
    }
}
