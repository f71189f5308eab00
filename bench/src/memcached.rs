//! A load for memcached, like memaslap's: random keys, nine of ten operations read. Every value
//! that comes back is checked. `weft-bench memcached` is this; the benchmark `vm-memcached` starts
//! it in the network of a machine that moves meanwhile.
//!
//! On standard output it says `filled` when all keys have a value. Lines on standard input say what
//! happens to the machine, as for [`crate::ping`]; the end of the input ends the load.

use std::fs;
use std::io::{BufRead, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use serde_json::json;

use crate::ping::{Step, note};

/// Operations are counted in spans of this length.
pub const BIN: Duration = Duration::from_millis(100);
/// Spans that are counted: ten minutes.
const BINS: usize = 6000;
/// How long the server may take to listen, and to answer.
const START: Duration = Duration::from_secs(60);
const ANSWER: Duration = Duration::from_secs(30);
/// One of this many operations writes.
const WRITES: u64 = 10;

/// What `weft-bench memcached` is told.
#[derive(Debug, Args)]
pub struct Options {
    /// Address and port of the server.
    address: SocketAddr,
    #[arg(long, default_value_t = 4)]
    connections: u64,
    #[arg(long, default_value_t = 1000)]
    keys: u64,
    #[arg(long, default_value_t = 1000)]
    value_bytes: usize,
    /// Where the counts go.
    #[arg(long)]
    json: PathBuf,
}

/// The keys of one connection, each with how often it was written.
struct Client {
    stream: BufReader<TcpStream>,
    number: u64,
    versions: Vec<u64>,
    value_bytes: usize,
    random: u64,
    line: String,
    value: Vec<u8>,
}

impl Client {
    fn connect(options: &Options, number: u64) -> Result<Client> {
        let until = Instant::now() + START;
        let stream = loop {
            match TcpStream::connect_timeout(&options.address, Duration::from_secs(1)) {
                Ok(stream) => break stream,
                Err(_) if Instant::now() < until => std::thread::sleep(BIN),
                Err(error) => return Err(error).context("memcached does not listen"),
            }
        };
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(ANSWER))?;
        let keys = options.keys / options.connections;
        Ok(Client {
            stream: BufReader::new(stream),
            number,
            versions: vec![0; keys as usize],
            value_bytes: options.value_bytes,
            random: 0x9e37_79b9_7f4a_7c15 ^ number,
            line: String::new(),
            value: Vec::new(),
        })
    }

    fn next_random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    /// What a key has after it was written `version` times.
    fn content(&self, key: usize, version: u64) -> Vec<u8> {
        let seed = (self.number << 32 | key as u64) * 1_000_003 + version;
        let words = (0..).map(|at: u64| format!("{:016x}", seed.wrapping_mul(2 * at + 1)));
        let bytes = words.flat_map(String::into_bytes);
        bytes.take(self.value_bytes).collect()
    }

    fn answer(&mut self) -> Result<&str> {
        self.line.clear();
        let length = self.stream.read_line(&mut self.line)?;
        ensure!(length > 0, "memcached closed the connection");
        Ok(self.line.trim_end())
    }

    fn set(&mut self, key: usize) -> Result<()> {
        let version = self.versions[key] + 1;
        let content = self.content(key, version);
        let head = format!("set {}-{key} 0 0 {}\r\n", self.number, content.len());
        let request = [head.as_bytes(), &content, b"\r\n"].concat();
        self.stream.get_mut().write_all(&request)?;
        let answer = self.answer()?;
        ensure!(answer == "STORED", "key {key} was not stored: {answer}");
        self.versions[key] = version;
        Ok(())
    }

    fn get(&mut self, key: usize) -> Result<()> {
        let number = self.number;
        write!(self.stream.get_mut(), "get {number}-{key}\r\n")?;
        let answer = self.answer()?;
        ensure!(answer.starts_with("VALUE "), "key {key} is gone: {answer}");
        let mut value = std::mem::take(&mut self.value);
        value.resize(self.value_bytes + 2, 0);
        self.stream.read_exact(&mut value)?;
        let wanted = self.content(key, self.versions[key]);
        let is_right = value.starts_with(&wanted) && value.ends_with(b"\r\n");
        self.value = value;
        ensure!(is_right, "key {key} has another value than was stored");
        let end = self.answer()?;
        ensure!(end == "END", "after key {key}: {end}");
        Ok(())
    }

    fn fill(&mut self) -> Result<()> {
        (0..self.versions.len()).try_for_each(|key| self.set(key))
    }

    /// Until `is_over`.
    fn work(&mut self, counts: &Counts) -> Result<()> {
        while !counts.is_over.load(Ordering::Relaxed) {
            let random = self.next_random();
            let key = (random >> 8) as usize % self.versions.len();
            match random % WRITES {
                0 => self.set(key)?,
                _ => self.get(key)?,
            }
            counts.add();
        }
        Ok(())
    }
}

/// Operations by span.
struct Counts {
    start: Instant,
    bins: Vec<AtomicU64>,
    is_over: AtomicBool,
}

impl Counts {
    fn add(&self) {
        let bin = self.start.elapsed().as_millis() / BIN.as_millis();
        if let Some(bin) = self.bins.get(bin as usize) {
            bin.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// What a connection's thread came to.
fn ended(thread: ScopedJoinHandle<'_, Result<()>>) -> Result<()> {
    match thread.join() {
        Ok(result) => result,
        Err(_) => bail!("the thread of a connection panicked"),
    }
}

/// Fills and asks until the input ends.
pub fn run(options: &Options) -> Result<()> {
    ensure!(
        options.connections > 0 && options.keys >= options.connections,
        "--keys {}: fewer than connections",
        options.keys
    );
    let clients = (0..options.connections).map(|number| Client::connect(options, number));
    let mut clients = clients.collect::<Result<Vec<_>>>()?;
    std::thread::scope(|scope| {
        let filled: Vec<_> = (clients.iter_mut())
            .map(|client| scope.spawn(|| client.fill()))
            .collect();
        filled.into_iter().try_for_each(ended)
    })?;
    println!("filled");
    let counts = Counts {
        start: Instant::now(),
        bins: (0..BINS).map(|_| AtomicU64::new(0)).collect(),
        is_over: AtomicBool::new(false),
    };
    let mut steps: Vec<Step> = Vec::new();
    std::thread::scope(|scope| -> Result<()> {
        let threads: Vec<_> = (clients.iter_mut())
            .map(|client| scope.spawn(|| client.work(&counts)))
            .collect();
        let noted = (|| {
            for line in BufReader::new(std::io::stdin()).lines() {
                note(
                    &mut steps,
                    line?.trim(),
                    counts.start.elapsed().as_secs_f64(),
                )?;
            }
            Ok(())
        })();
        counts.is_over.store(true, Ordering::Relaxed);
        threads.into_iter().try_for_each(ended)?;
        noted
    })?;
    let spans = (counts.start.elapsed().as_millis() / BIN.as_millis()) as usize;
    let bins: Vec<u64> = (counts.bins.iter().take(spans))
        .map(|bin| bin.load(Ordering::Relaxed))
        .collect();
    let steps: Vec<_> = (steps.iter())
        .map(|step| json!({ "name": step.name, "from_s": step.from_s, "until_s": step.until_s }))
        .collect();
    let text = json!({ "bins": bins, "steps": steps }).to_string();
    fs::write(&options.json, text).with_context(|| format!("{}", options.json.display()))
}
