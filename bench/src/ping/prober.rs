//! The requests and the answers: a thread that sends by the clock, and one that receives.
//! A request is ICMP's echo, which the guest's kernel answers without a process.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use nix::sys::socket::sockopt::RcvBufForce;
use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, setsockopt, socket};

use super::Ping;

/// Until the first answer, which may need an address of the link first.
const FIRST_ANSWER: Duration = Duration::from_secs(30);
/// A request that is not answered this long after the last one was sent is lost.
const LAST_ANSWERS: Duration = Duration::from_secs(1);
/// How often the receiver looks whether it should end.
const LOOK: Duration = Duration::from_millis(50);
/// So many sequence numbers are there.
const PINGS_MAX: usize = 1 << 16;

/// Room for the answers that come at once after a gap of some seconds, so that none is lost
/// here: the kernel counts nearly 1 KiB for each.
const ANSWERS_BYTES: usize = 4 << 20;

const ECHO_REQUEST: u8 = 8;
const ECHO_REPLY: u8 = 0;
const HEADER_BYTES: usize = 8;
/// As `ping` has it: 56 bytes of data.
const REQUEST_BYTES: usize = HEADER_BYTES + 56;

/// What both threads and the owner know.
#[derive(Debug)]
struct Shared {
    socket: UdpSocket,
    /// Tells this prober's answers from others'.
    id: u16,
    start: Instant,
    /// By sequence number. The lock is held for a few instructions.
    pings: Mutex<Vec<Ping>>,
    has_stopped: AtomicBool,
    is_over: AtomicBool,
}

impl Shared {
    fn pings(&self) -> MutexGuard<'_, Vec<Ping>> {
        self.pings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now_s(&self) -> f64 {
        self.start.elapsed().as_secs_f64()
    }
}

/// Sends and receives until [`Prober::finish`].
#[derive(Debug)]
pub struct Prober {
    shared: Arc<Shared>,
    sender: JoinHandle<Result<()>>,
    receiver: JoinHandle<Result<()>>,
    /// Requests before the first one that was answered.
    skipped: usize,
}

impl Prober {
    /// Begins, and waits for the first answer.
    pub fn start(address: Ipv4Addr, interval: Duration) -> Result<Prober> {
        let shared = Arc::new(Shared {
            socket: open(address)?,
            id: std::process::id() as u16,
            start: Instant::now(),
            pings: Mutex::new(Vec::new()),
            has_stopped: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
        });
        let [ours, theirs] = [Arc::clone(&shared), Arc::clone(&shared)];
        let sender = thread::Builder::new().name("ping-send".into());
        let sender = sender.spawn(move || send(&ours, interval))?;
        let receiver = thread::Builder::new().name("ping-receive".into());
        let receiver = receiver.spawn(move || receive(&theirs))?;
        let mut prober = Prober {
            shared,
            sender,
            receiver,
            skipped: 0,
        };
        prober.skipped = prober.await_first(address)?;
        Ok(prober)
    }

    fn await_first(&self, address: Ipv4Addr) -> Result<usize> {
        let deadline = Instant::now() + FIRST_ANSWER;
        loop {
            let pings = self.shared.pings();
            if let Some(first) = pings.iter().position(|ping| ping.answered_s.is_some()) {
                return Ok(first);
            }
            drop(pings);
            let failed = self.sender.is_finished() || self.receiver.is_finished();
            ensure!(!failed, "cannot send to {address}, or receive");
            ensure!(Instant::now() < deadline, "{address} does not answer");
            thread::sleep(LOOK);
        }
    }

    /// Seconds since the start, which all times count from.
    pub fn now_s(&self) -> f64 {
        self.shared.now_s()
    }

    /// Ends, and returns all requests from the first answered one on.
    pub fn finish(self) -> Result<Vec<Ping>> {
        self.shared.has_stopped.store(true, Ordering::SeqCst);
        let sent = self.sender.join();
        thread::sleep(LAST_ANSWERS);
        self.shared.is_over.store(true, Ordering::SeqCst);
        let received = self.receiver.join();
        for outcome in [sent, received] {
            outcome.map_err(|_| anyhow!("a thread panicked"))??;
        }
        Ok(self.shared.pings().split_off(self.skipped))
    }
}

/// A raw socket that receives from this address only. The standard library's calls of a UDP
/// socket are those that it needs.
fn open(address: Ipv4Addr) -> Result<UdpSocket> {
    let socket: OwnedFd = socket(
        AddressFamily::Inet,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::Icmp,
    )
    .context("no raw socket: that needs root")?;
    setsockopt(&socket, RcvBufForce, &ANSWERS_BYTES).context("no room for answers")?;
    let socket = UdpSocket::from(socket);
    socket.connect((address, 0))?;
    socket.set_read_timeout(Some(LOOK))?;
    Ok(socket)
}

fn send(shared: &Shared, interval: Duration) -> Result<()> {
    let mut due = Instant::now();
    for sequence in 0..PINGS_MAX {
        if shared.has_stopped.load(Ordering::SeqCst) {
            return Ok(());
        }
        thread::sleep(due.saturating_duration_since(Instant::now()));
        due += interval;
        shared.pings().push(Ping {
            sent_s: shared.now_s(),
            answered_s: None,
        });
        let sent = shared.socket.send(&request(shared.id, sequence as u16));
        // A link that is down, or full: the request is lost, and counted.
        if let Err(error) = sent {
            let kind = error.kind();
            let passes = [ErrorKind::HostUnreachable, ErrorKind::NetworkUnreachable];
            ensure!(
                passes.contains(&kind) || error.raw_os_error() == Some(nix::libc::ENOBUFS),
                "cannot send: {error}"
            );
        }
    }
    Err(anyhow!("more than {PINGS_MAX} requests"))
}

fn receive(shared: &Shared) -> Result<()> {
    let mut packet = [0; 2048];
    while !shared.is_over.load(Ordering::SeqCst) {
        let length = match shared.socket.recv(&mut packet) {
            Ok(length) => length,
            Err(error) if is_passing(&error) => continue,
            Err(error) => return Err(error).context("cannot receive"),
        };
        let now_s = shared.now_s();
        let Some(sequence) = answered(&packet[..length], shared.id) else {
            continue;
        };
        if let Some(ping) = shared.pings().get_mut(usize::from(sequence)) {
            ping.answered_s.get_or_insert(now_s);
        }
    }
    Ok(())
}

/// The time to look, a signal, or what a router says of an earlier request.
fn is_passing(error: &std::io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::WouldBlock
            | ErrorKind::TimedOut
            | ErrorKind::Interrupted
            | ErrorKind::HostUnreachable
            | ErrorKind::NetworkUnreachable
    )
}

/// An echo request (RFC 792).
fn request(id: u16, sequence: u16) -> [u8; REQUEST_BYTES] {
    let mut packet = [0; REQUEST_BYTES];
    packet[0] = ECHO_REQUEST;
    packet[4..6].copy_from_slice(&id.to_be_bytes());
    packet[6..8].copy_from_slice(&sequence.to_be_bytes());
    let checksum = checksum(&packet);
    packet[2..4].copy_from_slice(&checksum.to_be_bytes());
    packet
}

/// The Internet's checksum (RFC 1071) of a packet of an even length.
fn checksum(packet: &[u8]) -> u16 {
    let words = packet.chunks_exact(2);
    let mut sum: u32 = words
        .map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])))
        .sum();
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// The request that a packet, with its IPv4 header, answers.
fn answered(packet: &[u8], id: u16) -> Option<u16> {
    let header_bytes = usize::from(packet.first()? & 0xf) * 4;
    let message = packet.get(header_bytes..)?.get(..HEADER_BYTES)?;
    let word = |at: usize| u16::from_be_bytes([message[at], message[at + 1]]);
    (message[0] == ECHO_REPLY && word(4) == id).then(|| word(6))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packet_with_its_checksum_adds_up() {
        let packet = request(0x1234, 0xfffe);
        assert_eq!(checksum(&packet), 0);
        assert_ne!(packet[2..4], [0, 0]);
    }

    #[test]
    fn only_its_own_answers_count() {
        let mut packet = vec![0x45];
        packet.resize(20, 0);
        packet.extend(request(7, 300));
        assert_eq!(answered(&packet, 7), None, "a request");
        packet[20] = ECHO_REPLY;
        assert_eq!(answered(&packet, 7), Some(300));
        assert_eq!(answered(&packet, 8), None, "another's");
        assert_eq!(answered(&packet[..27], 7), None, "cut off");
        assert_eq!(answered(&[], 7), None);
    }
}
