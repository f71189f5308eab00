//! An attacker on the network between two hosts alters one record of one connection.
//! The run must end before a lease passes, and the borrower must read that a record is
//! not authentic; so must the lender, where its side found it.
//!
//! The records are those of `wire`: a length (`u32`, little-endian), then ciphertext and
//! tag. Before them come the preamble, the dialling side's opening, and the messages of
//! the Noise handshake, each behind its length (`u16`, big-endian).

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use crate::cluster::{Cluster, Wanted, free_port};
use crate::context::Context;
use crate::random::Random;
use crate::report::{Report, Verdict};
use crate::run::{End, Invocation, Outcome, run};

const EXIT_NODE_LOST: i32 = 122;
/// How long the daemon may take to write its log, once the run has ended.
const LOG_BOUND: Duration = Duration::from_secs(2);
const PREAMBLE_BYTES: usize = 8;
const OPENING_BYTES: usize = 17;
/// No record is longer.
const RECORD_MAX: usize = 64 << 10;

/// Which of the two connections between launcher and daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Purpose {
    Control = 1,
    Link = 2,
}

/// Where the record goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Towards {
    Home,
    Node,
}

/// What happens to it.
#[derive(Debug, Clone, Copy)]
enum Change {
    /// One bit of ciphertext or tag is another.
    Altered,
    /// It comes twice.
    Repeated,
    /// One that nobody sealed comes before it.
    Forged,
}

/// What the attacker does.
#[derive(Debug, Clone, Copy)]
struct Act {
    purpose: Purpose,
    towards: Towards,
    change: Change,
    /// How many records pass unchanged before it.
    after: u64,
    seed: u64,
}

impl Act {
    /// What a side that finds it says.
    fn cause(&self) -> &'static str {
        match self.purpose {
            Purpose::Link => "a sealed record is not authentic",
            Purpose::Control => "the control connection was tampered with",
        }
    }

    fn write(&self, record: &mut [u8], to: &mut TcpStream) -> io::Result<()> {
        let mut random = Random::new(self.seed);
        match self.change {
            Change::Altered => {
                let bit = random.below((record.len() as u64 - 4) * 8) as usize;
                record[4 + bit / 8] ^= 1 << (bit % 8);
            }
            Change::Repeated => to.write_all(record)?,
            Change::Forged => {
                let mut forged = record.to_vec();
                forged[4..].fill_with(|| random.below(256) as u8);
                to.write_all(&forged)?;
            }
        }
        to.write_all(record)
    }
}

/// The attacker: listens in front of a daemon and passes on what comes, but for the act.
struct Between {
    address: SocketAddr,
    acted: Arc<AtomicBool>,
}

impl Between {
    /// Its threads end with their connections; the one that accepts, with this process.
    fn start(daemon: SocketAddr, act: Act) -> Result<Between> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let acted = Arc::new(AtomicBool::new(false));
        let done = acted.clone();
        thread::spawn(move || {
            while let Ok((near, _)) = listener.accept() {
                let done = done.clone();
                // A connection that fails is closed, which the run's end shows.
                thread::spawn(move || connect(near, daemon, act, &done));
            }
        });
        Ok(Between { address, acted })
    }
}

fn connect(mut near: TcpStream, daemon: SocketAddr, act: Act, done: &Arc<AtomicBool>) {
    let mut forward = || -> io::Result<()> {
        let mut far = TcpStream::connect(daemon)?;
        near.set_nodelay(true)?;
        far.set_nodelay(true)?;
        let mut start = [0; PREAMBLE_BYTES + OPENING_BYTES];
        // Either side sends its preamble first, and waits for the other's.
        near.read_exact(&mut start[..PREAMBLE_BYTES])?;
        far.write_all(&start[..PREAMBLE_BYTES])?;
        let mut theirs = [0; PREAMBLE_BYTES];
        far.read_exact(&mut theirs)?;
        near.write_all(&theirs)?;
        near.read_exact(&mut start[PREAMBLE_BYTES..])?;
        far.write_all(&start[PREAMBLE_BYTES..])?;
        let link = start[PREAMBLE_BYTES] == Purpose::Link as u8;
        let at = |towards| {
            let fits = (act.purpose == Purpose::Link) == link && act.towards == towards;
            fits.then_some(act)
        };
        // The dialling side's messages: one of NNpsk0, two of XX.
        let messages = if link { 1 } else { 2 };
        let back = (far.try_clone()?, near.try_clone()?, at(Towards::Home));
        let told = done.clone();
        let answers = thread::spawn(move || pass(back.0, back.1, 1, back.2, &told));
        pass(near.try_clone()?, far, messages, at(Towards::Node), done);
        // It has ended, or does as its sockets are closed.
        let _ = answers.join();
        Ok(())
    };
    if forward().is_err() {
        // The other side may be gone already.
        let _ = near.shutdown(Shutdown::Both);
    }
}

/// Passes one direction on until it ends, and then ends both.
fn pass(
    mut from: TcpStream,
    mut to: TcpStream,
    messages: usize,
    act: Option<Act>,
    done: &AtomicBool,
) {
    let mut copy = || -> io::Result<()> {
        let mut bytes = vec![0; RECORD_MAX];
        for _ in 0..messages {
            from.read_exact(&mut bytes[..2])?;
            let length = usize::from(u16::from_be_bytes([bytes[0], bytes[1]]));
            from.read_exact(&mut bytes[2..2 + length])?;
            to.write_all(&bytes[..2 + length])?;
        }
        for number in 0.. {
            from.read_exact(&mut bytes[..4])?;
            let length = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize;
            let record = bytes.get_mut(..4 + length);
            let record = record.ok_or_else(|| io::Error::other("a record that is too long"))?;
            from.read_exact(&mut record[4..])?;
            match act.filter(|act| act.after == number) {
                None => to.write_all(record)?,
                Some(act) => {
                    done.store(true, Ordering::Release);
                    act.write(record, &mut to)?;
                }
            }
        }
        Ok(())
    };
    // How it ends is for the two sides to say.
    let _ = copy();
    for stream in [&from, &to] {
        let _ = stream.shutdown(Shutdown::Both);
    }
}

/// Longer than any test: what ends sooner does not end by it.
const LEASE_SECONDS: u64 = 30;
const BOUND: Duration = Duration::from_secs(20);

fn tried(context: &Context, act: Act) -> Result<Verdict> {
    let directory = context.directory("tamper")?;
    let port = free_port()?;
    let wanted = Wanted {
        host: "127.0.0.1".into(),
        port,
        memory: "1G".into(),
        prefix: Vec::new(),
        runtime: None,
    };
    let cluster = Cluster::start(context, &directory, &wanted)?;
    let between = Between::start(cluster.address.parse()?, act)?;
    let address = between.address.to_string();
    let peers = [("node", &*cluster.node.key, Some(&*address))];
    cluster.home.configure("127.0.0.1:1", "1G", &peers)?;
    // To and fro over the link until it ends; or away, so that all there is are
    // heartbeats.
    let program = match act.purpose {
        Purpose::Link => "--memory 8M,40M -- {programs}/coherence 24 4000",
        Purpose::Control => "--memory 2M,40M --jump 8 -- {programs}/elsewhere spin",
    };
    let line = context.fill(&format!("run --on node --lease {LEASE_SECONDS} {program}"));
    let mut command = vec![OsString::from(&context.weft)];
    command.extend(line.split(' ').map(Into::into));
    let mut invocation = Invocation::new(&command, &directory.join("run")).bounded(BOUND);
    invocation.environment = vec![cluster.home.environment()];
    let outcome = run(&invocation)?;
    let log = directory.join("daemon").join("stderr");
    // What home finds, only home can say.
    let words = match act.towards {
        Towards::Node => act.cause(),
        Towards::Home => "",
    };
    let log = log_with(&log, words).context("the daemon's log")?;
    let reasons = judge(act, &between, &outcome, &log);
    Ok(match reasons.is_empty() {
        true => Verdict::Passed(outcome.stderr.lines().next().unwrap_or("").to_string()),
        false => Verdict::Failed(reasons),
    })
}

/// The log, as soon as it has these words: the daemon answers first and logs afterwards.
fn log_with(path: &Path, words: &str) -> io::Result<String> {
    let deadline = Instant::now() + LOG_BOUND;
    loop {
        let log = std::fs::read_to_string(path)?;
        if log.contains(words) || Instant::now() > deadline {
            return Ok(log);
        }
        thread::sleep(Duration::from_millis(10));
    }
}

fn judge(act: Act, between: &Between, outcome: &Outcome, log: &str) -> Vec<String> {
    let mut reasons = outcome.leftovers.clone();
    if !between.acted.load(Ordering::Acquire) {
        reasons.push("nothing was changed: too few records".to_string());
    }
    if outcome.end != End::Exit(EXIT_NODE_LOST) {
        reasons.push(format!("{} instead of exit {EXIT_NODE_LOST}", outcome.end));
    }
    let cause = act.cause();
    if !outcome.stderr.contains(cause) {
        reasons.push(format!("the message does not say `{cause}`"));
    }
    // What home finds, only home can say.
    if act.towards == Towards::Node && !log.contains(cause) {
        reasons.push(format!("the daemon's log does not say `{cause}`: {log}"));
    }
    if !reasons.is_empty() {
        reasons.push(format!("stderr: {}", outcome.stderr.trim()));
    }
    reasons
}

/// Each change of each connection, in each direction, as far as it is wanted.
pub fn run_tampering(context: &Context, wanted: &dyn Fn(&str) -> bool, report: &Report) {
    for program in ["coherence", "elsewhere"] {
        if !context.programs.join(program).exists() {
            let why = format!("{program} was not built");
            return report.add("tamper", Duration::ZERO, Verdict::Skipped(why));
        }
    }
    let mut random = Random::new(context.seed);
    for purpose in [Purpose::Link, Purpose::Control] {
        // By then the program is on both nodes.
        let after = match purpose {
            Purpose::Link => 400 + random.below(400),
            Purpose::Control => 6 + random.below(3),
        };
        for towards in [Towards::Home, Towards::Node] {
            for change in [Change::Altered, Change::Repeated, Change::Forged] {
                let act = Act {
                    purpose,
                    towards,
                    change,
                    after,
                    seed: random.next_number(),
                };
                let name = format!("tamper: {purpose:?} towards {towards:?}, {change:?}");
                let name = name.to_lowercase();
                if !wanted(&name) {
                    continue;
                }
                let started = Instant::now();
                let verdict = tried(context, act)
                    .unwrap_or_else(|error| Verdict::Failed(vec![format!("{error:#}")]));
                report.add(&name, started.elapsed(), verdict);
            }
        }
    }
}
