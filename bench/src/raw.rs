//! The baselines: request and reply, and one stream, over the same kinds of
//! sockets, with plain blocking calls (the fastest way on a machine with other
//! work, where busy waiting takes the other side's processor), without anything
//! of Weft. Client and server are two processes,
//! as home and slice are.

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

trait Socket: Read + Write {}
impl<T: Read + Write> Socket for T {}

/// Does `attempt` again when a signal came; a socket's timeout is an error.
fn wait<T>(
    socket: &mut dyn Socket,
    mut attempt: impl FnMut(&mut dyn Socket) -> std::io::Result<T>,
) -> Result<T> {
    loop {
        match attempt(socket) {
            Ok(done) => return Ok(done),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                bail!("the peer says nothing for {BOUND:?}")
            }
            Err(error) => return Err(error.into()),
        }
    }
}

fn receive(socket: &mut dyn Socket, buffer: &mut [u8]) -> Result<()> {
    let mut filled = 0;
    while filled < buffer.len() {
        let got = wait(socket, |s| s.read(&mut buffer[filled..]))?;
        ensure!(got > 0, "the peer closed the connection");
        filled += got;
    }
    Ok(())
}

fn send(socket: &mut dyn Socket, buffer: &[u8]) -> Result<()> {
    let mut sent = 0;
    while sent < buffer.len() {
        sent += wait(socket, |s| s.write(&buffer[sent..]))?;
    }
    Ok(())
}

fn tcp(stream: TcpStream) -> Result<Box<dyn Socket>> {
    stream.set_nodelay(true)?;
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(BOUND))?;
    stream.set_write_timeout(Some(BOUND))?;
    Ok(Box::new(stream))
}

fn unix(stream: UnixStream) -> Result<Box<dyn Socket>> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(BOUND))?;
    stream.set_write_timeout(Some(BOUND))?;
    Ok(Box::new(stream))
}

/// The server's side: `weft-bench raw-server KIND ADDRESS`, until its client
/// closes. A request's first byte says what is wanted: a page, or the stream.
pub fn serve(kind: Kind, address: &str) -> Result<()> {
    let mut socket = match kind {
        Kind::Tcp => tcp(TcpStream::connect(address)?)?,
        Kind::Unix => unix(UnixStream::connect(address)?)?,
    };
    let page = vec![7_u8; PAGE_BYTES];
    let part = vec![9_u8; STREAM_PART_BYTES];
    let mut request = [0; REQUEST_BYTES];
    loop {
        receive(&mut *socket, &mut request)?;
        match request[0] {
            b'p' => send(&mut *socket, &page)?,
            b's' => {
                for _ in 0..STREAM_BYTES / STREAM_PART_BYTES {
                    send(&mut *socket, &part)?;
                }
            }
            _ => return Ok(()),
        }
    }
}

/// What a kind of socket can do.
#[derive(Debug, Clone, Copy)]
pub struct Raw {
    /// Median of an 8-byte request and a 4 KiB reply, nanoseconds.
    pub round_trip_ns: f64,
    /// One stream, bytes per second.
    pub bytes_per_s: f64,
}

fn connect(kind: Kind, work: &Path) -> Result<(Box<dyn Socket>, Child)> {
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
    let (mut socket, mut server) = connect(kind, work)?;
    let mut page = vec![0; PAGE_BYTES];
    let mut samples_ns = Vec::with_capacity(ROUNDS);
    for round in 0..WARM_UP + ROUNDS {
        let started = Instant::now();
        send(&mut *socket, b"page....")?;
        receive(&mut *socket, &mut page)?;
        if round >= WARM_UP {
            samples_ns.push(started.elapsed().as_nanos() as f64);
        }
    }
    let mut part = vec![0; STREAM_PART_BYTES];
    let started = Instant::now();
    send(&mut *socket, b"stream..")?;
    for _ in 0..STREAM_BYTES / STREAM_PART_BYTES {
        receive(&mut *socket, &mut part)?;
    }
    let bytes_per_s = STREAM_BYTES as f64 / started.elapsed().as_secs_f64();
    send(&mut *socket, b"end.....")?;
    server.wait()?;
    let round_trip_ns = crate::results::median(&samples_ns).context("rounds were made")?;
    Ok(Raw {
        round_trip_ns,
        bytes_per_s,
    })
}
