//! Nodes that serve queues of a disk and a network of node 0 leave under load. What the guest
//! copies on the disk is there, and what it sends and fetches is right, byte for byte.

use std::fs;
use std::net::TcpListener;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use super::growth::{grow, interrupt, release};
use super::moves::{begin_with, finish, move_vcpu};
use super::networks::content;
use super::{BOUND, Bench, Check, Shape, TWO};
use crate::cluster::free_port;
use crate::guest::{Ended, Guest};
use crate::random::Random;
use crate::web::{fetch, give};

pub(super) const CHECKS: [(&str, Check); 2] = [
    ("queues, a node that serves a disk's leaves", leaves),
    ("queues, releases that are cancelled", cancelled),
];

/// Needs passt.
pub(super) const NETWORK_CHECKS: [(&str, Check); 1] = [(
    "queues, nodes that serve a disk's and a network's leave",
    with_network,
)];

/// Each node has a vCPU, and so queues.
const EACH: Shape = Shape {
    name: "3 nodes with a vCPU each",
    options: &[
        "--late-cpus",
        "no",
        "--cpus",
        "1,1,1",
        "--memory",
        "128M,128M,128M",
    ],
    nodes: 3,
    cpus: 3,
};

/// Bytes of a block, blocks of the disk, and those of a copy.
const BLOCK: usize = 64 << 10;
const BLOCKS: usize = 192;
const COPY: usize = 8;

/// A disk on which each vCPU copies blocks of its own again and again: from one of 8 places to
/// one of 4, so that a copy that is lost or comes late is seen at the end.
pub(crate) struct Copies {
    file: PathBuf,
    content: Vec<u8>,
    /// Of the vCPUs: 1, 2, 4.
    masks: Vec<usize>,
}

impl Copies {
    /// A new disk at this path, for `cpus` vCPUs.
    pub(crate) fn new(file: PathBuf, cpus: usize) -> Result<Self> {
        let bytes = (BLOCKS * BLOCK) as u32;
        let content: Vec<u8> = (0..bytes)
            .map(|byte| (byte.wrapping_mul(2_654_435_761) >> 13) as u8)
            .collect();
        fs::write(&file, &content)?;
        Ok(Self {
            file,
            content,
            masks: (0..cpus).map(|cpu| 1 << cpu).collect(),
        })
    }

    /// The value of `--disk`.
    pub(crate) fn disk(&self) -> String {
        self.file.display().to_string()
    }

    /// What the guest does in the background, at least four times, until there is a file
    /// /tmp/over.
    pub(crate) fn script(&self) -> String {
        let begin = self.masks.iter().map(|mask| format!("copy {mask} & "));
        format!(
            "copy() {{ i=0; while [ $i -lt 4 -o ! -e /tmp/over ]; do taskset $1 dd if=/dev/vda of=/dev/vda \
             bs=64k count=8 skip=$(($1*16-16+i%8)) seek=$(($1*32+32+i%4*8)) iflag=direct \
             conv=fsync 2>/dev/null || echo no copy; i=$((i+1)); done; echo copied $1 $i; }}; {}",
            begin.collect::<String>()
        )
    }

    /// The disk is at this path now.
    pub(crate) fn at(self, file: PathBuf) -> Self {
        Self { file, ..self }
    }

    /// The disk holds the last copies; how many were made.
    pub(crate) fn judge(mut self, ended: &Ended) -> Result<usize> {
        ensure!(ended.line("no copy").is_none(), "{}", ended.tail(20));
        let mut all = 0;
        for mask in &self.masks {
            let words = format!("copied {mask} ");
            let line = ended.line(&words).map(|line| line.text.trim().to_owned());
            let line = line.with_context(|| format!("no `{words}`: {}", ended.tail(20)))?;
            let count: usize = line[words.len()..].parse()?;
            ensure!(count > 0, "the vCPU of mask {mask} copied nothing");
            for copy in count.saturating_sub(4)..count {
                let from = BLOCK * (mask * 16 - 16 + copy % 8);
                let to = BLOCK * (mask * 32 + 32 + copy % 4 * COPY);
                self.content.copy_within(from..from + COPY * BLOCK, to);
            }
            all += count;
        }
        let found = fs::read(&self.file)?;
        ensure!(found.len() == self.content.len(), "{} bytes", found.len());
        let wrong = found.iter().zip(&self.content).position(|(a, b)| a != b);
        ensure!(wrong.is_none(), "the disk is wrong at {wrong:?}");
        Ok(all)
    }
}

/// A guest that copies until a line is typed.
fn copying(bench: &Bench<'_>, shape: Shape) -> Result<(Guest, Copies)> {
    let copies = Copies::new(bench.run_directory.with_file_name("disk"), shape.cpus)?;
    let disk = copies.disk();
    let options = ["--late-cpus", "no", "--disk", &disk];
    let script = format!(
        "{} echo at work; read line; touch /tmp/over; wait",
        copies.script()
    );
    let guest = begin_with(bench, "soft", (shape, &options), (&script, "at work"))?;
    Ok((guest, copies))
}

fn end(bench: &Bench<'_>, mut guest: Guest, copies: Copies) -> Result<String> {
    guest.write("over\n")?;
    let ended = finish(bench, guest)?;
    Ok(format!("{} copies", copies.judge(&ended)?))
}

/// Node 1 leaves with its queue; nodes with its number come, have a vCPU and leave again.
fn leaves(bench: &Bench<'_>) -> Result<String> {
    let (guest, copies) = copying(bench, TWO)?;
    let mut stopped = 0;
    for round in 0..4 {
        std::thread::sleep(Duration::from_millis(300));
        let released = release(bench, 1)?;
        let queues = u64::from(round == 0);
        ensure!(released["queues"].as_u64() == Some(queues), "{released}");
        stopped += released["queues_stopped_ns"].as_u64().context("no stop")?;
        std::thread::sleep(Duration::from_millis(300));
        ensure!(grow(bench)? == 1, "number 1 is not free");
        move_vcpu(bench, 1, 1)?;
    }
    let copies = end(bench, guest, copies)?;
    Ok(format!(
        "{copies}, the guest stood for {} µs",
        stopped / 1000
    ))
}

/// The queue goes and comes back with each release that is cancelled.
fn cancelled(bench: &Bench<'_>) -> Result<String> {
    let (guest, copies) = copying(bench, TWO)?;
    let mut random = Random::new(bench.context.seed ^ 0x90e5);
    let mut undone = 0;
    for _ in 0..20 {
        let moment = Duration::from_micros(random.below(30_000));
        if interrupt(bench, &["vm", "release", "m", "1"], moment)? {
            break;
        }
        undone += 1;
    }
    let copies = end(bench, guest, copies)?;
    Ok(format!("{copies}, {undone} releases were undone"))
}

/// Both nodes without the devices leave, while the guest serves a file and fetches one, and
/// all vCPUs copy.
fn with_network(bench: &Bench<'_>) -> Result<String> {
    let copies = Copies::new(bench.run_directory.with_file_name("disk"), 3)?;
    let content = content();
    let last = content.iter().filter(|byte| **byte == b'\n').count() - 1;
    let outside = TcpListener::bind(("127.0.0.1", 0))?;
    let port = free_port()?;
    let net = format!("user,forward={port}:80,loopback");
    let disk = copies.disk();
    let options = [
        EACH.options,
        &["--name", "m", "--net", &net, "--disk", &disk],
    ]
    .concat();
    let script = format!(
        "mkdir /tmp/web; seq 0 {last} >/tmp/web/file; taskset 2 httpd -p 80 -h /tmp/web; {} \
         taskset 4 wget -q -O /tmp/got http://10.0.2.2:{}/ & fetch=$!; echo serving; wait $fetch; \
         cmp /tmp/got /tmp/web/file && echo same; echo compared; read word; touch /tmp/over; wait",
        copies.script(),
        outside.local_addr()?.port()
    );
    let mut guest = Guest::start(&mut bench.machine(&options, &script, "weft.net=dhcp")?)?;
    let told = guest.wait_for("serving", BOUND);
    ensure!(told.is_some(), "no server: {:?}", guest.lines().last());
    let mut queues = Vec::new();
    std::thread::scope(|scope| -> Result<()> {
        let fetched = scope.spawn(|| {
            (0..5)
                .map(|_| fetch(port, BOUND))
                .collect::<Result<Vec<_>>>()
        });
        give(&outside, &content, BOUND, || {
            for node in [1, 2] {
                std::thread::sleep(Duration::from_millis(500));
                let released = release(bench, node)?;
                queues.push(released["queues"].as_u64());
            }
            Ok(())
        })?;
        let fetched = fetched.join().ok().context("the client panicked")??;
        ensure!(
            fetched.iter().all(|got| *got == content),
            "other bytes came"
        );
        Ok(())
    })?;
    // A queue of the disk, and a pair of the network.
    ensure!(queues == [Some(2), Some(2)], "{queues:?}");
    ensure!(
        fetch(port, BOUND)? == content,
        "other bytes came at the end"
    );
    let compared = guest.wait_for("compared", BOUND);
    ensure!(compared.is_some(), "it waits: {:?}", guest.lines().last());
    bench.processes(&guest, 1)?;
    guest.write("end\n")?;
    let ended = bench.finish(guest)?;
    ensure!(ended.line("same").is_some(), "{}", ended.tail(20));
    Ok(format!("{} copies", copies.judge(&ended)?))
}
