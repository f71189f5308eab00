//! The baselines: request and reply, and one stream, over the same kinds of
//! sockets, without anything of Weft. Client and server are two processes, as
//! home and slice are.
//!
//! Each comes in two ways. Round trips wait in the kernel, or busily: which is
//! faster depends on the machine's other work and on what waking a processor
//! costs there. Streams go from one warm buffer into another, which no program
//! that wants the data does, or from memory that was written a while ago into
//! memory that was not touched before, as pages do.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};

const REQUEST_BYTES: usize = 8;
const PAGE_BYTES: usize = 4096;
const ROUNDS: usize = 4000;
const WARM_UP: usize = 400;
const STREAM_BYTES: usize = 512 << 20;
const STREAM_PART_BYTES: usize = 256 << 10;
const STREAM_PARTS: usize = STREAM_BYTES / STREAM_PART_BYTES;
/// Nothing here may wait longer.
const BOUND: Duration = Duration::from_secs(20);

/// A kind of socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// TCP over loopback, without delay.
    Tcp,
    /// A UNIX stream.
    Unix,
}

impl Kind {
    /// Its name, as `--transport` has it.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Tcp => "tcp",
            Kind::Unix => "unix",
        }
    }

    /// The kind of that name.
    pub fn from_name(name: &str) -> Result<Kind> {
        match name {
            "tcp" => Ok(Kind::Tcp),
            "unix" => Ok(Kind::Unix),
            _ => bail!("no kind of socket is called `{name}`"),
        }
    }
}

trait Socket: Read + Write {
    fn never_blocks(&self, on: bool) -> std::io::Result<()>;
}

impl Socket for TcpStream {
    fn never_blocks(&self, on: bool) -> std::io::Result<()> {
        self.set_nonblocking(on)
    }
}

impl Socket for UnixStream {
    fn never_blocks(&self, on: bool) -> std::io::Result<()> {
        self.set_nonblocking(on)
    }
}

/// One end of a connection.
struct End {
    socket: Box<dyn Socket>,
    /// Tries again at once instead of waiting in the kernel.
    busy: bool,
}

impl End {
    fn wait(&mut self, busy: bool) -> Result<()> {
        self.socket.never_blocks(busy)?;
        self.busy = busy;
        Ok(())
    }

    /// Does `attempt` again when a signal came, or when waiting busily; a
    /// socket's timeout is an error.
    fn attempt(
        &mut self,
        mut attempt: impl FnMut(&mut dyn Socket) -> std::io::Result<usize>,
    ) -> Result<usize> {
        let mut started = None;
        loop {
            match attempt(&mut *self.socket) {
                Ok(done) => return Ok(done),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    let waited = started.get_or_insert_with(Instant::now).elapsed();
                    ensure!(
                        self.busy && waited < BOUND,
                        "the peer says nothing for {BOUND:?}"
                    );
                    std::hint::spin_loop();
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn receive(&mut self, buffer: &mut [u8]) -> Result<()> {
        let mut filled = 0;
        while filled < buffer.len() {
            let got = self.attempt(|socket| socket.read(&mut buffer[filled..]))?;
            ensure!(got > 0, "the peer closed the connection");
            filled += got;
        }
        Ok(())
    }

    fn send(&mut self, buffer: &[u8]) -> Result<()> {
        let mut sent = 0;
        while sent < buffer.len() {
            sent += self.attempt(|socket| socket.write(&buffer[sent..]))?;
        }
        Ok(())
    }
}

fn tcp(stream: TcpStream) -> Result<End> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(BOUND))?;
    stream.set_write_timeout(Some(BOUND))?;
    end(Box::new(stream))
}

fn unix(stream: UnixStream) -> Result<End> {
    stream.set_read_timeout(Some(BOUND))?;
    stream.set_write_timeout(Some(BOUND))?;
    end(Box::new(stream))
}

fn end(socket: Box<dyn Socket>) -> Result<End> {
    let mut end = End {
        socket,
        busy: false,
    };
    end.wait(false)?;
    Ok(end)
}

/// The server's side: `weft-bench raw-server KIND ADDRESS`, until its client
/// closes. A request's first byte says what is wanted: a page, a stream, or
/// another way to wait.
pub fn serve(kind: Kind, address: &str) -> Result<()> {
    let mut end = match kind {
        Kind::Tcp => tcp(TcpStream::connect(address)?)?,
        Kind::Unix => unix(UnixStream::connect(address)?)?,
    };
    let page = vec![7_u8; PAGE_BYTES];
    let part = vec![9_u8; STREAM_PART_BYTES];
    let mut request = [0; REQUEST_BYTES];
    loop {
        end.receive(&mut request)?;
        match request[0] {
            b'p' => end.send(&page)?,
            b'b' => end.wait(true)?,
            b'k' => end.wait(false)?,
            b'w' => {
                for _ in 0..STREAM_PARTS {
                    end.send(&part)?;
                }
            }
            b'c' => {
                let cold = vec![9_u8; STREAM_BYTES];
                end.send(b"r")?;
                end.receive(&mut request)?;
                for part in cold.chunks(STREAM_PART_BYTES) {
                    end.send(part)?;
                }
            }
            _ => return Ok(()),
        }
    }
}

/// What a kind of socket can do.
#[derive(Debug, Clone, Copy)]
pub struct Raw {
    /// Median of an 8-byte request and a 4 KiB reply, nanoseconds, waiting in
    /// the kernel.
    pub blocking_ns: f64,
    /// The same, waiting busily.
    pub busy_ns: f64,
    /// One stream between two warm buffers, bytes per second.
    pub warm_bytes_per_s: f64,
    /// One stream from memory to memory, bytes per second.
    pub cold_bytes_per_s: f64,
}

fn connect(kind: Kind, work: &Path) -> Result<(End, Child)> {
    let start = |address: &str| {
        Command::new(std::env::current_exe()?)
            .args(["raw-server", kind.name(), address])
            .stdin(Stdio::null())
            .spawn()
            .context("starting the raw server")
    };
    match kind {
        Kind::Tcp => {
            let listener = TcpListener::bind("127.0.0.1:0")?;
            let server = start(&listener.local_addr()?.to_string())?;
            Ok((tcp(listener.accept()?.0)?, server))
        }
        Kind::Unix => {
            let path = work.join("raw.socket");
            if path.exists() {
                std::fs::remove_file(&path)?;
            }
            let listener = UnixListener::bind(&path)?;
            let server = start(&path.to_string_lossy())?;
            Ok((unix(listener.accept()?.0)?, server))
        }
    }
}

/// Measures one kind of socket.
pub fn measure(kind: Kind, work: &Path) -> Result<Raw> {
    let (mut end, mut server) = connect(kind, work)?;
    let blocking_ns = round_trip_ns(&mut end)?;
    end.send(b"busily..")?;
    end.wait(true)?;
    let busy_ns = round_trip_ns(&mut end)?;
    end.send(b"kernel..")?;
    end.wait(false)?;
    let warm_bytes_per_s = warm_stream(&mut end)?;
    let cold_bytes_per_s = cold_stream(&mut end)?;
    end.send(b"end.....")?;
    server.wait()?;
    Ok(Raw {
        blocking_ns,
        busy_ns,
        warm_bytes_per_s,
        cold_bytes_per_s,
    })
}

fn round_trip_ns(end: &mut End) -> Result<f64> {
    let mut page = vec![0; PAGE_BYTES];
    let mut samples_ns = Vec::with_capacity(ROUNDS);
    for round in 0..WARM_UP + ROUNDS {
        let started = Instant::now();
        end.send(b"page....")?;
        end.receive(&mut page)?;
        if round >= WARM_UP {
            samples_ns.push(started.elapsed().as_nanos() as f64);
        }
    }
    crate::results::median(&samples_ns).context("rounds were made")
}

fn warm_stream(end: &mut End) -> Result<f64> {
    let mut part = vec![0; STREAM_PART_BYTES];
    let started = Instant::now();
    end.send(b"warm....")?;
    for _ in 0..STREAM_PARTS {
        end.receive(&mut part)?;
    }
    Ok(STREAM_BYTES as f64 / started.elapsed().as_secs_f64())
}

fn cold_stream(end: &mut End) -> Result<f64> {
    end.send(b"cold....")?;
    end.receive(&mut [0])?;
    // Zeroed memory is not touched before it is written.
    let mut fresh = vec![0; STREAM_BYTES];
    let started = Instant::now();
    end.send(b"go......")?;
    for part in fresh.chunks_mut(STREAM_PART_BYTES) {
        end.receive(part)?;
    }
    let bytes_per_s = STREAM_BYTES as f64 / started.elapsed().as_secs_f64();
    std::hint::black_box(&fresh);
    Ok(bytes_per_s)
}
