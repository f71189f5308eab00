//! Round trips and bandwidth of links, beside the same over bare sockets.
//!
//! `weft-wire-bench [--rounds N] [--spin-us N] [--buffers BYTES] [--json]`.
//! `--buffers` sets the kernel's socket buffers instead of what links use. Each case has a
//! server thread that answers a request of 8 bytes (a bare word, or a frame's
//! header) with as many bytes as it asks for. Cases are measured interleaved,
//! so that what disturbs one disturbs all; the figures are medians.

use rustix::net::RecvFlags;
use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use weft_wire::frame::MAX_PAYLOAD;
use weft_wire::halves::{self, BACKLOG_MAX, HalvesConfig, Receiver, Sender, SessionKeys};
use weft_wire::{Header, Link, LinkConfig, LinkError, LinkKind, ring, socket};

const PATIENCE_NS: u64 = 10_000_000_000;
/// Bytes of one write of a bare stream, and of one frame's payload.
const CHUNK_BYTES: usize = 64 * 4096;
const STREAM_BYTES: u64 = 256 << 20;
const ROUND_TRIPS: usize = 400;

/// One end of a connection.
trait End: Send {
    /// Asks for `bytes` bytes and takes them all.
    fn ask(&mut self, bytes: u64) -> io::Result<()>;
    /// Answers one request; `false` when the other end is gone.
    fn answer(&mut self, source: &[u8]) -> io::Result<bool>;
}

struct Bare {
    fd: OwnedFd,
    spin: Duration,
    buffer: Vec<u8>,
}

impl Bare {
    /// Reads some bytes: spins for a bounded time, then blocks.
    fn read(&mut self, room: usize) -> io::Result<usize> {
        let room = room.min(self.buffer.len());
        let buffer = &mut self.buffer[..room];
        if !self.spin.is_zero() {
            let end = Instant::now() + self.spin;
            while Instant::now() < end {
                match rustix::net::recv(&self.fd, &mut *buffer, RecvFlags::DONTWAIT) {
                    Ok((count, _)) => return Ok(count),
                    Err(rustix::io::Errno::AGAIN) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(rustix::io::read(&self.fd, buffer)?)
    }

    fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let count = rustix::io::write(&self.fd, bytes)?;
            bytes = &bytes[count..];
        }
        Ok(())
    }
}

impl End for Bare {
    fn ask(&mut self, bytes: u64) -> io::Result<()> {
        self.write_all(&bytes.to_le_bytes())?;
        let mut left = bytes as usize;
        while left > 0 {
            match self.read(left)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => left -= count,
            }
        }
        Ok(())
    }

    fn answer(&mut self, source: &[u8]) -> io::Result<bool> {
        // A request of 8 bytes is never cut on these sockets.
        if self.read(8)? != 8 {
            return Ok(false);
        }
        let request: [u8; 8] = core::array::from_fn(|at| self.buffer[at]);
        let mut left = u64::from_le_bytes(request) as usize;
        while left > 0 {
            let count = left.min(source.len());
            self.write_all(&source[..count])?;
            left -= count;
        }
        Ok(true)
    }
}

struct Framed {
    link: Link,
    /// Keeps the link's descriptor open.
    _fd: OwnedFd,
}

impl End for Framed {
    fn ask(&mut self, bytes: u64) -> io::Result<()> {
        let mut header = Header::new(1);
        header.words[0] = bytes;
        self.link.send(&header, &[]).map_err(io::Error::other)?;
        let mut left = bytes;
        while left > 0 {
            match self.link.receive(PATIENCE_NS).map_err(io::Error::other)? {
                Some(frame) => left -= frame.payload.len() as u64,
                None => return Err(io::ErrorKind::TimedOut.into()),
            }
        }
        Ok(())
    }

    fn answer(&mut self, source: &[u8]) -> io::Result<bool> {
        let mut left = match self.link.receive(PATIENCE_NS) {
            Ok(Some(frame)) => frame.header.words[0] as usize,
            Ok(None) => return Ok(true),
            Err(LinkError::Closed) => return Ok(false),
            Err(error) => return Err(io::Error::other(error)),
        };
        while left > 0 {
            let count = left.min(source.len());
            let sent = self.link.send(&Header::new(2), &[&source[..count]]);
            sent.map_err(io::Error::other)?;
            left -= count;
        }
        Ok(true)
    }
}

/// Both halves of a link, used by one thread.
struct Halved {
    sender: Sender,
    receiver: Receiver,
    /// How long one receive waits: decides whether it blocks or polls.
    wait: Duration,
}

impl Halved {
    fn next(&mut self) -> Result<(u64, u64), LinkError> {
        loop {
            if let Some(frame) = self.receiver.receive(self.wait)? {
                return Ok((frame.header.words[0], frame.payload.len() as u64));
            }
        }
    }
}

impl End for Halved {
    fn ask(&mut self, bytes: u64) -> io::Result<()> {
        let mut header = Header::new(1);
        header.words[0] = bytes;
        self.sender.send(&header, &[]).map_err(io::Error::other)?;
        let mut left = bytes;
        while left > 0 {
            left -= self.next().map_err(io::Error::other)?.1;
        }
        Ok(())
    }

    fn answer(&mut self, source: &[u8]) -> io::Result<bool> {
        let mut left = match self.next() {
            Ok((asked, _)) => asked as usize,
            Err(LinkError::Closed) => return Ok(false),
            Err(error) => return Err(io::Error::other(error)),
        };
        while left > 0 {
            // A send never waits, so this does: half of what may wait.
            if self.sender.waiting() > BACKLOG_MAX / 2 {
                std::thread::sleep(Duration::from_micros(100));
                continue;
            }
            let count = left.min(source.len());
            let sent = self.sender.send(&Header::new(2), &[&source[..count]]);
            sent.map_err(io::Error::other)?;
            left -= count;
        }
        Ok(true)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    BareTcp,
    LinkTcp,
    SealedTcp,
    HalvesTcp,
    PolledHalvesTcp,
    SealedHalvesTcp,
    BareUnix,
    LinkUnix,
    HalvesUnix,
    Ring,
}

const KINDS: [(Kind, &str, Kind); 10] = [
    (Kind::BareTcp, "tcp, bare", Kind::BareTcp),
    (Kind::LinkTcp, "tcp, link", Kind::BareTcp),
    (Kind::SealedTcp, "tcp, sealed link", Kind::BareTcp),
    (Kind::HalvesTcp, "tcp, halves", Kind::BareTcp),
    (Kind::PolledHalvesTcp, "tcp, halves, poll", Kind::BareTcp),
    (Kind::SealedHalvesTcp, "tcp, sealed halves", Kind::BareTcp),
    (Kind::BareUnix, "unix, bare", Kind::BareUnix),
    (Kind::LinkUnix, "unix, link", Kind::BareUnix),
    (Kind::HalvesUnix, "unix, halves", Kind::BareUnix),
    (Kind::Ring, "ring", Kind::BareUnix),
];

fn sockets(kind: Kind, buffers: Option<usize>) -> io::Result<[OwnedFd; 2]> {
    if matches!(
        kind,
        Kind::BareUnix | Kind::LinkUnix | Kind::HalvesUnix | Kind::Ring
    ) {
        let (near, far) = UnixStream::pair()?;
        let bytes = buffers.unwrap_or(socket::BUFFER_BYTES);
        socket::set_buffers(&near, bytes)?;
        socket::set_buffers(&far, bytes)?;
        return Ok([near.into(), far.into()]);
    }
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let near = TcpStream::connect(listener.local_addr()?)?;
    let (far, _) = listener.accept()?;
    socket::tune(&near)?;
    socket::tune(&far)?;
    if let Some(bytes) = buffers {
        socket::set_buffers(&near, bytes)?;
        socket::set_buffers(&far, bytes)?;
    }
    Ok([near.into(), far.into()])
}

fn framed(fd: OwnedFd, kind: LinkKind, spin: Duration) -> io::Result<Box<dyn End>> {
    let config = LinkConfig {
        kind,
        spin_ns: spin.as_nanos() as u64,
        lease_ms: 5000,
    };
    // SAFETY: the descriptor lives beside the link, which alone uses it.
    let link = unsafe { Link::open(&config) }.map_err(io::Error::other)?;
    Ok(Box::new(Framed { link, _fd: fd }))
}

fn halved(fd: OwnedFd, kind: Kind, side: u8, spin: Duration) -> io::Result<Box<dyn End>> {
    let keys = (kind == Kind::SealedHalvesTcp).then_some(SessionKeys {
        send: [side; 32],
        receive: [1 - side; 32],
    });
    let config = HalvesConfig {
        socket: fd,
        keys,
        lease: Duration::from_secs(5),
        spin,
        name: "bench".into(),
    };
    let (sender, receiver) = halves::open(config).map_err(io::Error::other)?;
    let flushing = sender.clone();
    std::thread::Builder::new()
        .name("flush".into())
        .spawn(move || flushing.flush_forever())?;
    let wait_ms = if kind == Kind::PolledHalvesTcp {
        50
    } else {
        1000
    };
    Ok(Box::new(Halved {
        sender,
        receiver,
        wait: Duration::from_millis(wait_ms),
    }))
}

fn ends(kind: Kind, spin: Duration, buffers: Option<usize>) -> io::Result<[Box<dyn End>; 2]> {
    let [near, far] = sockets(kind, buffers)?;
    let memory = ring::create(ring::CAPACITY_DEFAULT)?;
    let end = |fd: OwnedFd, side: u32| {
        let raw = fd.as_raw_fd();
        let kind = match kind {
            Kind::BareTcp | Kind::BareUnix => {
                let buffer = vec![0; CHUNK_BYTES];
                return Ok(Box::new(Bare { fd, spin, buffer }) as Box<dyn End>);
            }
            Kind::HalvesTcp | Kind::PolledHalvesTcp | Kind::SealedHalvesTcp | Kind::HalvesUnix => {
                return halved(fd, kind, side as u8, spin);
            }
            Kind::LinkTcp | Kind::LinkUnix => LinkKind::Stream { fd: raw },
            Kind::SealedTcp => LinkKind::Sealed {
                fd: raw,
                send_key: [side as u8; 32],
                receive_key: [1 - side as u8; 32],
            },
            Kind::Ring => LinkKind::Ring {
                bell_fd: raw,
                memory_fd: memory.as_fd().as_raw_fd(),
                side,
            },
        };
        framed(fd, kind, spin)
    };
    Ok([end(near, 0)?, end(far, 1)?])
}

struct Case {
    name: &'static str,
    kind: Kind,
    base: Kind,
    spin: Duration,
    client: Box<dyn End>,
    /// Samples: round trips of 8 B and 4 KiB in µs, bandwidth in MB/s.
    samples: [Vec<f64>; 3],
}

fn case(
    kind: (Kind, &'static str, Kind),
    spin: Duration,
    buffers: Option<usize>,
) -> io::Result<Case> {
    let [client, mut server] = ends(kind.0, spin, buffers)?;
    std::thread::Builder::new()
        .name(format!("answer {}", kind.1))
        .spawn(move || {
            let source = vec![0x5a; CHUNK_BYTES.min(MAX_PAYLOAD)];
            while server.answer(&source).expect("the client is there") {}
        })?;
    Ok(Case {
        name: kind.1,
        kind: kind.0,
        base: kind.2,
        spin,
        client,
        samples: Default::default(),
    })
}

impl Case {
    fn round_trip_us(&mut self, bytes: u64) -> io::Result<f64> {
        let mut times = Vec::with_capacity(ROUND_TRIPS);
        for _ in 0..ROUND_TRIPS {
            let start = Instant::now();
            self.client.ask(bytes)?;
            times.push(start.elapsed().as_nanos() as f64 / 1000.0);
        }
        Ok(median(&times))
    }

    fn measure(&mut self) -> io::Result<()> {
        for (index, bytes) in [(0, 8), (1, 4096)] {
            let time_us = self.round_trip_us(bytes)?;
            self.samples[index].push(time_us);
        }
        let start = Instant::now();
        self.client.ask(STREAM_BYTES)?;
        let megabytes = STREAM_BYTES as f64 / 1e6;
        self.samples[2].push(megabytes / start.elapsed().as_secs_f64());
        Ok(())
    }

    fn medians(&self) -> [f64; 3] {
        self.samples.each_ref().map(|samples| median(samples))
    }
}

fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

fn print_table(cases: &[Case]) {
    println!("(x: times the bare socket of the same kind and spin)");
    println!(
        "{:<18} {:>8} {:>9} {:>6} {:>10} {:>6} {:>11} {:>6}",
        "", "spin us", "8 B us", "x", "4 KiB us", "x", "MB/s", "x"
    );
    for case in cases {
        let ours = case.medians();
        let base = base_of(case, cases).medians();
        println!(
            "{:<18} {:>8} {:>9.2} {:>6.2} {:>10.2} {:>6.2} {:>11.0} {:>6.2}",
            case.name,
            case.spin.as_micros(),
            ours[0],
            ours[0] / base[0],
            ours[1],
            ours[1] / base[1],
            ours[2],
            ours[2] / base[2],
        );
    }
}

fn base_of<'a>(case: &Case, cases: &'a [Case]) -> &'a Case {
    cases
        .iter()
        .find(|other| other.kind == case.base && other.spin == case.spin)
        .expect("every base is a case")
}

fn print_json(cases: &[Case]) {
    let rows: Vec<_> = cases
        .iter()
        .map(|case| {
            let [small_us, page_us, rate_mb_s] = case.medians();
            serde_json::json!({
                "case": case.name,
                "spin_us": case.spin.as_micros() as u64,
                "round_trip_8_us": small_us,
                "round_trip_4096_us": page_us,
                "stream_mb_s": rate_mb_s,
            })
        })
        .collect();
    println!("{}", serde_json::Value::from(rows));
}

fn main() -> io::Result<()> {
    let (mut rounds, mut spin_us, mut buffers, mut json) = (9, 50, None, false);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut number = || arguments.next().and_then(|text| text.parse().ok());
        match argument.as_str() {
            "--json" => json = true,
            "--rounds" => rounds = number().unwrap_or(rounds),
            "--buffers" => buffers = number().map(|bytes| bytes as usize),
            "--spin-us" => spin_us = number().unwrap_or(spin_us),
            _ => {
                eprintln!(
                    "usage: weft-wire-bench [--rounds N] [--spin-us N] [--buffers BYTES] [--json]"
                );
                std::process::exit(2);
            }
        }
    }
    let mut cases = Vec::new();
    for spin_us in [0, spin_us] {
        for kind in KINDS {
            cases.push(case(kind, Duration::from_micros(spin_us), buffers)?);
        }
    }
    for _ in 0..rounds {
        for case in &mut cases {
            case.measure()?;
        }
    }
    if json {
        print_json(&cases);
    } else {
        print_table(&cases);
    }
    Ok(())
}
