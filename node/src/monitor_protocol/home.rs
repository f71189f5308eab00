//! The move of node 0's part to another host: its steps, and the process that takes it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use weft_proc::boot::MAX_NODES;
use weft_wire::keys::PublicKey;

use super::{
    Control, LISTEN_ROUND, LinkKind, Loan, MonitorMessage, PACKET_BYTES_MAX, READY_BOUND,
    WORD_BYTES_MAX, send_when_writable,
};
use crate::links::Link;
use crate::sys;

/// A step of the move of node 0's part to another host, or something about a file that a slice
/// needs there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HomeStep {
    /// Make an empty file of this size for a copy of a disk, and give it to the slice.
    Disk {
        number: u8,
        path: PathBuf,
        bytes: u64,
    },
    /// Make an empty file for the slice's pages of a checkpoint, and its directory if that is
    /// missing, and give it to the slice. It is removed unless `KeepNewFile` comes.
    NewFile { path: PathBuf },
    /// The new file stays, also when its machine is gone; or it goes at once.
    KeepNewFile { keep: bool },
    /// Give the slice a file of a checkpoint, by this number.
    SavedFile { number: u32, path: PathBuf },
    /// Lend the machine's home, which has come to this host, what was lent to the slice.
    Share,
    /// Start a process that can take it.
    Prepare,
    /// The next bytes of the files that the guest restarts from, as hexadecimal digits. The
    /// launcher sends them.
    File { part: String },
    /// That process will be needed, though not within its bound. No answer.
    Wait,
    /// The machine stands: frames for it come to that process's host from now on. No answer.
    Announce,
    /// A part of the machine's state, as text that only monitors read.
    State { part: String, is_last: bool },
    /// Let that process go on.
    LetGo,
    /// End it.
    GiveUp,
}

/// Longest part of a state in one message: escaped, it has room in a packet.
const PART_BYTES: usize = 10 << 10;
/// Longest part of files in one message.
const FILE_BYTES: usize = 14 << 10;
/// Most bytes of files that go along.
pub const FILES_BYTES_MAX: u64 = 256 << 20;

impl HomeStep {
    /// Passes a file on in parts.
    ///
    /// # Errors
    /// It cannot be read, has other than `bytes` bytes, or `send` fails.
    pub fn file_parts<E: From<io::Error>>(
        mut file: impl io::Read,
        bytes: u64,
        mut send: impl FnMut(HomeStep) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut piece = [0; FILE_BYTES];
        let mut left = bytes;
        while left > 0 {
            let length = left.min(FILE_BYTES as u64) as usize;
            file.read_exact(&mut piece[..length])?;
            left -= length as u64;
            send(HomeStep::File {
                part: hex(&piece[..length]),
            })?;
        }
        Ok(())
    }

    /// The bytes of a part of a file; `None` for another step and for what is no such part.
    pub fn file_bytes(&self) -> Option<Vec<u8>> {
        let HomeStep::File { part } = self else {
            return None;
        };
        let digit = |digit: &u8| char::from(*digit).to_digit(16);
        let pairs = part.as_bytes().chunks(2);
        let bytes = pairs.map(|pair| match pair {
            [high, low] => Some((digit(high)? * 16 + digit(low)?) as u8),
            _ => None,
        });
        bytes.collect()
    }

    /// A state in parts.
    pub fn parts(state: &str) -> Vec<HomeStep> {
        let mut parts = Vec::new();
        let mut rest = state;
        loop {
            let mut length = rest.len().min(PART_BYTES);
            while !rest.is_char_boundary(length) {
                length -= 1;
            }
            let (part, later) = rest.split_at(length);
            parts.push(HomeStep::State {
                part: part.to_owned(),
                is_last: later.is_empty(),
            });
            if later.is_empty() {
                return parts;
            }
            rest = later;
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    const DIGITS: [u8; 16] = *b"0123456789abcdef";
    let digits = bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]);
    digits
        .map(|digit| char::from(DIGITS[usize::from(digit)]))
        .collect()
}

/// What a process is told that is to take the home of a machine from another host: first on
/// its standard input, with the memory file of the node that has the machine's memory.
#[derive(Debug, Serialize, Deserialize)]
pub struct HomeOrder {
    /// What the machine is called.
    pub name: String,
    /// Its settings, for all nodes.
    pub settings: String,
    /// The sizes of the files that its guest restarts from; they follow.
    pub files: Vec<u64>,
    /// What the node was lent.
    pub loan: Loan,
    /// The user that the node runs as, where the daemon is root.
    pub user: Option<u32>,
    pub lease_ms: u32,
    /// Nodes that stay; the process becomes their node 0.
    pub nodes: Vec<OtherNode>,
    /// To each of these nodes, and then to the daemon of each. The sockets come in this order.
    pub links: Vec<LinkKind>,
}

/// What a daemon calls its own host, where a process of it is the home of nodes there.
pub const THIS_HOST: &str = "this host";

/// A node that stays while another process becomes node 0.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OtherNode {
    pub number: u32,
    /// What this host calls its host.
    pub host: String,
    /// Where its daemon listens.
    pub address: String,
    pub key: PublicKey,
}

/// Sends a step, when there is room for it.
///
/// # Errors
/// The receiver has gone, or does not receive.
pub fn send_step(socket: BorrowedFd<'_>, step: &HomeStep) -> io::Result<()> {
    send_when_writable(socket, &serde_json::to_vec(step)?)
}

/// Sends an order.
///
/// # Errors
/// Too much of it, or the process has gone.
pub fn send_order(
    socket: BorrowedFd<'_>,
    mut order: HomeOrder,
    memory: BorrowedFd<'_>,
    links: Vec<Link>,
) -> io::Result<()> {
    let mut ends = Vec::new();
    for link in links {
        let (end, kind) = LinkKind::of(link)?;
        ends.push(end);
        order.links.push(kind);
    }
    let packet = serde_json::to_vec(&order)?;
    if packet.len() > PACKET_BYTES_MAX {
        return Err(io::Error::other("the machine's settings are too long"));
    }
    let ends = ends.iter().map(AsRawFd::as_raw_fd);
    let descriptors: Vec<RawFd> = [memory.as_raw_fd()].into_iter().chain(ends).collect();
    sys::send_with_descriptors(socket, &packet, &descriptors)
}

/// An order with the memory file and the links that come with it.
pub struct ReceivedOrder {
    pub order: HomeOrder,
    pub memory: OwnedFd,
    /// To each of the nodes that stay.
    pub links: Vec<Link>,
    /// To the daemon of each.
    pub daemons: Vec<Link>,
}

/// Waits for an order.
///
/// # Errors
/// Nothing came in time, or something else.
pub fn receive_order(socket: BorrowedFd<'_>) -> io::Result<ReceivedOrder> {
    if !sys::wait_readable(&[socket], READY_BOUND)?[0] {
        return Err(io::ErrorKind::TimedOut.into());
    }
    let mut packet = vec![0; PACKET_BYTES_MAX];
    let most = 1 + 2 * MAX_NODES;
    let (length, descriptors) = sys::receive_with_descriptors(socket, &mut packet, most)?;
    let order: HomeOrder = serde_json::from_slice(&packet[..length])?;
    let mut descriptors = descriptors.into_iter();
    let memory = descriptors.next();
    let memory = memory.ok_or_else(|| io::Error::other("there is no memory with the order"))?;
    let kinds = order.links.iter();
    let links = kinds.map(|kind| {
        let link = descriptors.next().and_then(|socket| kind.link(socket));
        link.ok_or_else(|| io::Error::other("a link of the order is not sealed"))
    });
    let mut links = links.collect::<io::Result<Vec<_>>>()?;
    if links.len() != 2 * order.nodes.len() {
        return Err(io::Error::other("there are not two links for each node"));
    }
    let daemons = links.split_off(order.nodes.len());
    Ok(ReceivedOrder {
        order,
        memory,
        links,
        daemons,
    })
}

/// The socket between the daemon of a host and the process there that takes a machine's home.
pub struct TakeoverSocket(Control);

impl TakeoverSocket {
    pub fn new(socket: OwnedFd) -> TakeoverSocket {
        TakeoverSocket(Control(socket))
    }

    /// Tells the daemon.
    pub fn say(&self, word: &MonitorMessage) {
        self.0.say(word);
    }

    /// Tells the daemon why the machine does not go on here. Reads what the daemon still sends,
    /// since a socket that is closed unread loses the reason. The daemon ends this process once
    /// it has the reason; a daemon that has ended closes the socket.
    pub fn fail(&self, reason: &str) {
        self.say(&MonitorMessage::Failed(reason.to_owned()));
        while let Ok(Some(_)) = self.next() {}
    }

    /// Waits for the next step; `None` once the daemon says nothing more. Calls `ppoll` and
    /// `recvmsg` only.
    ///
    /// # Errors
    /// Nothing that can be understood.
    pub fn next(&self) -> io::Result<Option<HomeStep>> {
        let socket = self.0.0.as_fd();
        while !sys::wait_readable(&[socket], LISTEN_ROUND)?[0] {}
        let mut packet = vec![0; WORD_BYTES_MAX];
        let (length, _) = sys::receive_with_descriptors(socket, &mut packet, 0)?;
        match length {
            0 => Ok(None),
            _ => Ok(Some(serde_json::from_slice(&packet[..length])?)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_go_in_parts_that_fit_a_packet() {
        let content: Vec<u8> = (0..3 * FILE_BYTES + 7).map(|at| (at * 7) as u8).collect();
        let mut received = Vec::new();
        let bytes = content.len() as u64;
        HomeStep::file_parts(&content[..], bytes, |step| -> io::Result<()> {
            assert!(serde_json::to_vec(&step)?.len() <= WORD_BYTES_MAX);
            received.extend(step.file_bytes().unwrap());
            Ok(())
        })
        .unwrap();
        assert_eq!(received, content);
        let short = HomeStep::file_parts(&content[..], bytes + 1, |_| io::Result::Ok(()));
        assert!(short.is_err());
        for part in ["0", "0g", "é"] {
            let part = part.to_owned();
            assert_eq!(HomeStep::File { part }.file_bytes(), None);
        }
        assert_eq!(HomeStep::Prepare.file_bytes(), None);
    }

    #[test]
    fn a_state_goes_in_parts_that_fit_a_packet() {
        for state in [
            String::new(),
            "\"\\".repeat(3 * PART_BYTES),
            "\u{1}ü€".repeat(PART_BYTES),
        ] {
            let steps = HomeStep::parts(&state);
            let mut joined = String::new();
            for (at, step) in steps.iter().enumerate() {
                let message = MonitorMessage::Home {
                    request: u64::MAX,
                    number: 15,
                    step: step.clone(),
                };
                assert!(serde_json::to_vec(&message).unwrap().len() <= WORD_BYTES_MAX);
                let HomeStep::State { part, is_last } = step else {
                    panic!("{step:?}");
                };
                assert_eq!(*is_last, at + 1 == steps.len());
                joined += part;
            }
            assert_eq!(joined, state);
        }
    }
}
