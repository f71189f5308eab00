//! Pairs of links for the tests.
#![allow(dead_code, reason = "each test file uses some of it")]

use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use weft_wire::ring::{CAPACITY_DEFAULT, create};
use weft_wire::{Link, LinkConfig, LinkKind};

/// A link and the descriptors it uses.
pub struct End {
    pub link: Link,
    pub fd: OwnedFd,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Tcp,
    Unix,
    Sealed,
    Ring,
}

impl Kind {
    pub const ALL: [Kind; 4] = [Kind::Tcp, Kind::Unix, Kind::Sealed, Kind::Ring];
}

pub const SPIN_NS: u64 = 20_000;

pub fn tcp_pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (far, _) = listener.accept().unwrap();
    near.set_nodelay(true).unwrap();
    far.set_nodelay(true).unwrap();
    (near, far)
}

pub fn open(kind: LinkKind, fd: OwnedFd, spin_ns: u64, lease_ms: u32) -> End {
    let config = LinkConfig {
        kind,
        spin_ns,
        lease_ms,
    };
    // SAFETY: `fd` lives in the same value as the link and is used by it alone.
    let link = unsafe { Link::open(&config) }.unwrap();
    End { link, fd }
}

pub fn pair(kind: Kind) -> (End, End) {
    pair_with(kind, SPIN_NS, 5000)
}

pub fn pair_with(kind: Kind, spin_ns: u64, lease_ms: u32) -> (End, End) {
    match kind {
        Kind::Tcp | Kind::Sealed => {
            let (near, far) = tcp_pair();
            socket_ends(kind, near.into(), far.into(), spin_ns, lease_ms)
        }
        Kind::Unix => {
            let (near, far) = UnixStream::pair().unwrap();
            socket_ends(kind, near.into(), far.into(), spin_ns, lease_ms)
        }
        Kind::Ring => {
            let (near, far) = UnixStream::pair().unwrap();
            let memory = create(CAPACITY_DEFAULT).unwrap();
            let ring = |fd: OwnedFd, side| {
                let kind = LinkKind::Ring {
                    bell_fd: fd.as_raw_fd(),
                    memory_fd: memory.as_raw_fd(),
                    side,
                };
                open(kind, fd, spin_ns, lease_ms)
            };
            (ring(near.into(), 0), ring(far.into(), 1))
        }
    }
}

fn socket_ends(kind: Kind, near: OwnedFd, far: OwnedFd, spin_ns: u64, lease_ms: u32) -> (End, End) {
    let link_kind = |fd: &OwnedFd, keys: (u8, u8)| match kind {
        Kind::Sealed => LinkKind::Sealed {
            fd: fd.as_raw_fd(),
            send_key: [keys.0; 32],
            receive_key: [keys.1; 32],
        },
        _ => LinkKind::Stream { fd: fd.as_raw_fd() },
    };
    let (near_kind, far_kind) = (link_kind(&near, (1, 2)), link_kind(&far, (2, 1)));
    (
        open(near_kind, near, spin_ns, lease_ms),
        open(far_kind, far, spin_ns, lease_ms),
    )
}
