//! The links of the mesh as their makers hold them, and the packet that hands
//! them to a runtime.

use std::io;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};

use serde::{Deserialize, Serialize};
use weft_proc::boot::{
    Boot, LINK_RING, LINK_SEALED, LINK_STREAM, LinkSpec, MAGIC, MAX_NODES, ROLE_HOME, ROLE_SLICE,
    VERSION,
};
use weft_wire::channel::Channel;
use weft_wire::halves::SessionKeys;
use weft_wire::handshake::Keyed;
use weft_wire::{ring, socket};

use crate::options::Transport;
use crate::sys;

/// One end of a link between two nodes.
pub struct Link {
    kind: u32,
    socket: OwnedFd,
    ring: Option<OwnedFd>,
    ring_side: u32,
    send_key: [u8; 32],
    receive_key: [u8; 32],
}

/// One end for each node, indexed by the peer's number.
pub type Links = Vec<Option<Link>>;

impl Link {
    /// A connection that a handshake has keyed.
    pub fn sealed(socket: OwnedFd, send_key: [u8; 32], receive_key: [u8; 32]) -> Link {
        Link {
            kind: LINK_SEALED,
            socket,
            ring: None,
            ring_side: 0,
            send_key,
            receive_key,
        }
    }

    /// A connection that the wire's handshake has keyed, with the kernel told to
    /// give up on a silent peer after the lease.
    pub fn keyed(keyed: Keyed, lease_ms: u32) -> io::Result<Link> {
        sys::watch_peer(&keyed.socket, lease_ms)?;
        let (send, receive) = (keyed.send_key, keyed.receive_key);
        Ok(Link::sealed(keyed.socket.into(), send, receive))
    }

    /// A control channel over it, and another descriptor of its socket; an error for one that
    /// is not sealed.
    ///
    /// # Errors
    /// Out of descriptors, or the link is in the clear.
    pub fn into_channel(self) -> io::Result<(Channel, TcpStream)> {
        match self.into_socket() {
            Some((socket, Some(keys))) => {
                let socket = TcpStream::from(socket);
                let descriptor = socket.try_clone()?;
                let channel = Channel::sealed(socket.into(), keys.send, keys.receive)?;
                Ok((channel, descriptor))
            }
            _ => Err(io::Error::other("a control connection in the clear")),
        }
    }

    /// Whether its records are sealed.
    pub fn is_sealed(&self) -> bool {
        self.kind == LINK_SEALED
    }

    /// The socket, and the keys of both directions if it is sealed; `None` for a
    /// ring, which is no socket.
    pub fn into_socket(self) -> Option<(OwnedFd, Option<SessionKeys>)> {
        let keys = SessionKeys {
            send: self.send_key,
            receive: self.receive_key,
        };
        match self.kind {
            LINK_STREAM => Some((self.socket, None)),
            LINK_SEALED => Some((self.socket, Some(keys))),
            _ => None,
        }
    }

    fn clear(socket: OwnedFd) -> Link {
        Link {
            kind: LINK_STREAM,
            ..Link::sealed(socket, [0; 32], [0; 32])
        }
    }

    /// Both ends of a link between two nodes on this host.
    pub fn pair(transport: Transport) -> io::Result<(Link, Link)> {
        match transport {
            Transport::Unix => {
                let (left, right) = sys::stream_pair()?;
                Ok((Link::clear(left), Link::clear(right)))
            }
            Transport::Tcp => {
                let (left, right) = loopback_pair()?;
                Ok((Link::clear(left), Link::clear(right)))
            }
            Transport::TcpSealed => {
                let (left, right) = loopback_pair()?;
                let (one, other) = (secret()?, secret()?);
                let left = Link::sealed(left, one, other);
                Ok((left, Link::sealed(right, other, one)))
            }
            Transport::Ring => ring_pair(),
        }
    }
}

fn ring_pair() -> io::Result<(Link, Link)> {
    let (left, right) = sys::stream_pair()?;
    let bytes = ring::file_bytes(ring::CAPACITY_DEFAULT);
    let memory = sys::sealed_memfd(c"weft-ring", bytes as u64)?;
    let end = |socket, ring, ring_side| Link {
        kind: LINK_RING,
        ring: Some(ring),
        ring_side,
        ..Link::clear(socket)
    };
    let copy = memory.try_clone()?;
    Ok((end(left, memory, 0), end(right, copy, 1)))
}

fn secret() -> io::Result<[u8; 32]> {
    weft_wire::keys::secret().map_err(io::Error::other)
}

/// A TCP connection of this host with itself. Another process could connect to
/// the listener first, so the accepted end must be the one that dialled.
fn loopback_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    const STRANGERS_MAX: usize = 16;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let dialled = TcpStream::connect(listener.local_addr()?)?;
    for _ in 0..STRANGERS_MAX {
        let (accepted, from) = listener.accept()?;
        if from == dialled.local_addr()? {
            socket::tune(&accepted)?;
            socket::tune(&dialled)?;
            return Ok((dialled.into(), accepted.into()));
        }
    }
    Err(io::Error::other(
        "other processes keep connecting to a loopback port of ours",
    ))
}

/// The full mesh of `nodes` nodes on this host: `mesh[a][b]` is a's end of the
/// link to b.
pub fn mesh(nodes: usize, transport: Transport) -> io::Result<Vec<Links>> {
    let mut mesh: Vec<Links> = (0..nodes)
        .map(|_| (0..nodes).map(|_| None).collect())
        .collect();
    let pairs = (0..nodes).flat_map(|left| (left + 1..nodes).map(move |right| (left, right)));
    for (left, right) in pairs {
        let (near, far) = Link::pair(transport)?;
        mesh[left][right] = Some(near);
        mesh[right][left] = Some(far);
    }
    Ok(mesh)
}

/// What every runtime of one aggregate is told alike.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct ProgramSettings {
    /// Nodes in the aggregate.
    pub nodes: u32,
    pub jump: u32,
    /// Remote faults before a jump.
    pub jump_threshold: u32,
    pub lease_ms: u32,
    /// Longest busy wait.
    pub spin_ns: u32,
    /// Most pages read ahead.
    pub read_ahead_pages: u32,
    /// Stretch at start.
    pub stretch_now: bool,
    /// Every node's budget.
    pub budget_pages: [u64; MAX_NODES],
}

/// Hands a runtime its [`Boot`]: settings, links, shared memory and, at home,
/// the program. The descriptors are copied; the caller drops its own.
pub fn send_boot(
    control: &OwnedFd,
    node: u32,
    settings: &ProgramSettings,
    links: &Links,
    shared: std::os::fd::BorrowedFd<'_>,
    program: &[u8],
) -> io::Result<()> {
    let mut boot = Boot {
        magic: MAGIC,
        version: VERSION,
        role: if node == 0 { ROLE_HOME } else { ROLE_SLICE },
        node,
        nodes: settings.nodes,
        jump: settings.jump,
        jump_threshold: settings.jump_threshold,
        lease_ms: settings.lease_ms,
        spin_ns: settings.spin_ns,
        read_ahead_pages: settings.read_ahead_pages,
        stretch_now: settings.stretch_now.into(),
        // The process that starts a slice has already changed its user.
        uid: u32::MAX,
        gid: u32::MAX,
        budget_pages: settings.budget_pages,
        links: [LinkSpec::NONE; MAX_NODES],
        shared_fd: 0,
        program: [0; 4096],
    };
    if program.len() >= boot.program.len() {
        return Err(io::Error::from_raw_os_error(libc::ENAMETOOLONG));
    }
    boot.program[..program.len()].copy_from_slice(program);
    let mut descriptors: Vec<RawFd> = vec![shared.as_raw_fd()];
    let mut index = |fd: &OwnedFd| {
        descriptors.push(fd.as_raw_fd());
        descriptors.len() as i32 - 1
    };
    for (spec, link) in boot.links.iter_mut().zip(links) {
        if let Some(link) = link {
            *spec = LinkSpec {
                kind: link.kind,
                fd: index(&link.socket),
                ring_fd: link.ring.as_ref().map_or(-1, &mut index),
                ring_side: link.ring_side,
                send_key: link.send_key,
                receive_key: link.receive_key,
            };
        }
    }
    sys::send_with_descriptors(control.as_fd(), boot.as_bytes(), &descriptors)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mesh_joins_every_pair_once() {
        let transports = [
            Transport::Ring,
            Transport::Unix,
            Transport::Tcp,
            Transport::TcpSealed,
        ];
        for transport in transports {
            let mesh = mesh(3, transport).unwrap();
            for (node, links) in mesh.iter().enumerate() {
                for (peer, link) in links.iter().enumerate() {
                    assert_eq!(link.is_some(), node != peer);
                }
            }
            let (left, right) = (mesh[0][2].as_ref().unwrap(), mesh[2][0].as_ref().unwrap());
            assert_eq!(left.send_key, right.receive_key);
            assert_eq!(left.receive_key, right.send_key);
            assert_eq!(left.ring.is_some(), transport == Transport::Ring);
            assert_eq!(left.ring_side, 0);
        }
    }

    #[test]
    fn a_boot_packet_is_one_packet() {
        let (ours, theirs) = sys::packet_pair().unwrap();
        let shared = crate::shared::SharedMemory::new().unwrap();
        let settings = ProgramSettings {
            nodes: 2,
            jump: 0,
            jump_threshold: 0,
            lease_ms: 5000,
            spin_ns: 0,
            read_ahead_pages: 0,
            stretch_now: false,
            budget_pages: [256; MAX_NODES],
        };
        let links = mesh(2, Transport::Ring).unwrap().remove(0);
        send_boot(
            &ours,
            0,
            &settings,
            &links,
            shared.descriptor(),
            b"/bin/true",
        )
        .unwrap();
        let mut packet = vec![0; size_of::<Boot>() + 1];
        let length = sys::receive_packet(theirs.as_fd(), &mut packet).unwrap();
        assert_eq!(length, Some(size_of::<Boot>()));
        let long = vec![b'x'; 4096];
        assert!(send_boot(&ours, 0, &settings, &links, shared.descriptor(), &long).is_err());
    }
}
