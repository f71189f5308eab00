//! Disks and networks of a guest on the software vCPU: against the same guest
//! under QEMU's TCG, and against the host without a guest, in alternation.
//!
//! Disks bypass the page caches: `direct=1` in the guest, `--disk …,direct` and
//! `cache=none,aio=io_uring` below it. The tap device is in a network namespace
//! of the benchmark's own, where QEMU uses the same one.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::json;

use crate::program::Place;
use crate::results::{Table, digits, median};
use weft_tests::boot::{Boot, Disk, Images, Monitor, Net, figure};
use weft_tests::context::works;
use weft_tests::namespace::{self, TapHost};

/// More rounds than this take more than some minutes.
const ROUNDS_MAX: usize = 3;
/// Of the disk that is measured.
const DISK_BYTES: usize = 256 << 20;
const GATEWAY: &str = "10.0.2.2";
const IPERF_PORT: u16 = 15201;
const ECHO_PORT: u16 = 15202;
/// Requests that are sent one after the other.
const REQUESTS: usize = 400;
/// How long a server on the host may take to start.
const SERVER_START: Duration = Duration::from_secs(10);

/// fio's jobs: name, `rw`, block size, what the table calls it.
const JOBS: [(&str, &str, &str, &str); 4] = [
    ("disk-read", "read", "128k", "disk, reading in sequence"),
    ("disk-write", "write", "128k", "disk, writing in sequence"),
    ("disk-randread", "randread", "4k", "disk, random reads"),
    ("disk-randwrite", "randwrite", "4k", "disk, random writes"),
];

/// One client after the other; every byte comes back.
const ECHO: &str = "
import socket, sys
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print('ready', flush=True)
while True:
    client = server.accept()[0]
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while data := client.recv(64):
        client.send(data)
";

/// What was measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Side {
    Weft,
    Tcg,
    Host,
}

type Samples = BTreeMap<(String, Side), Vec<f64>>;

/// The table `vm-devices`.
pub fn devices(place: &Place, images: &Images, repeat: usize) -> Result<Table> {
    for (program, option) in [
        ("fio", "--version"),
        ("iperf3", "--version"),
        ("passt", "--version"),
        ("python3", "--version"),
        ("qemu-system-x86_64", "--version"),
    ] {
        ensure!(
            works(program, &[option]),
            "`{program}` is not installed (`make setup`)"
        );
    }
    if let Some(why) = namespace::missing() {
        bail!("{why}");
    }
    let mut base = images.small(&place.weft)?;
    base.memory_mib = 512;
    base.disks = vec![
        Disk::new(&images.file("debian/root.ext4")?)
            .read_only()
            .direct(),
    ];
    base.words = "root=/dev/vda ro".to_string();
    let disk = place.work.join("disk.img");
    // Not sparse: what a host does with holes is another question.
    std::fs::write(&disk, vec![0x5a; DISK_BYTES]).context("the disk to measure")?;
    let mut samples = Samples::new();
    for _ in 0..repeat.min(ROUNDS_MAX) {
        measure_disk(&base, &disk, &mut samples)?;
        measure_user(&base, &mut samples)?;
        measure_tap(&base, &mut samples)?;
    }
    Ok(table(&samples))
}

fn sides() -> [(Side, Monitor); 2] {
    [(Side::Weft, Monitor::Soft), (Side::Tcg, Monitor::Tcg)]
}

fn record(samples: &mut Samples, name: &str, side: Side, value: f64) {
    let key = (name.to_string(), side);
    samples.entry(key).or_default().push(value);
}

fn fio_words(file: &str) -> Vec<String> {
    let common = format!(
        "--filename={file} --direct=1 --ioengine=libaio --iodepth=8 --size={DISK_BYTES} \
         --runtime=1 --time_based --stonewall --minimal"
    );
    let mut words: Vec<String> = common.split(' ').map(str::to_string).collect();
    for (name, rw, block, _) in JOBS {
        words.extend([
            format!("--name={name}"),
            format!("--rw={rw}"),
            format!("--bs={block}"),
        ]);
    }
    words
}

/// Megabytes a second of a job, or thousands of operations a second of a random
/// one, out of a line of fio's terse output (version 3).
fn parse_fio(line: &str) -> Option<(&'static str, f64)> {
    let fields: Vec<&str> = line.split(';').collect();
    let (name, rw, ..) = JOBS
        .iter()
        .find(|(name, ..)| fields.get(2).is_some_and(|field| field == name))?;
    let first = if rw.ends_with("read") { 6 } else { 47 };
    let number = |index: usize| fields.get(index)?.parse::<f64>().ok();
    let value = if rw.starts_with("rand") {
        number(first + 1)? / 1e3
    } else {
        number(first)? * 1024.0 / 1e6
    };
    Some((name, value))
}

fn record_fio<'a>(
    samples: &mut Samples,
    side: Side,
    lines: impl Iterator<Item = &'a str>,
) -> Result<()> {
    let found: Vec<_> = lines.filter_map(parse_fio).collect();
    ensure!(found.len() == JOBS.len(), "fio reports {found:?}");
    for (name, value) in found {
        record(samples, name, side, value);
    }
    Ok(())
}

fn measure_disk(base: &Boot, disk: &Path, samples: &mut Samples) -> Result<()> {
    let mut boot = base.running(&format!("fio {}", fio_words("/dev/vdb").join(" ")));
    boot.disks.push(Disk::new(disk).direct());
    for (side, monitor) in sides() {
        let run = boot.run(monitor)?;
        let lines = run.ended.lines.iter().map(|line| line.text.as_str());
        record_fio(samples, side, lines).with_context(|| run.ended.tail(8))?;
    }
    let output = Command::new("fio")
        .args(fio_words(&disk.to_string_lossy()))
        .output()?;
    ensure!(
        output.status.success(),
        "fio: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let text = String::from_utf8(output.stdout)?;
    record_fio(samples, Side::Host, text.lines())
}

/// A program of the host that serves guests; it ends with this value.
struct Server(Child);

impl Server {
    /// Starts `words`, after `prefix`; back when it has written a line.
    fn start(prefix: &[OsString], words: &[&str]) -> Result<Server> {
        let mut all = prefix.to_vec();
        all.extend(words.iter().map(OsString::from));
        let (program, arguments) = all.split_first().context("no program")?;
        let child = Command::new(program)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()?;
        let mut server = Server(child);
        let output = server.0.stdout.take().context("a pipe")?;
        let (send, first) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut output = BufReader::new(output);
            let mut line = String::new();
            if matches!(output.read_line(&mut line), Ok(1..)) {
                // Nobody waits any more when it came too late.
                let _ = send.send(());
            }
            // To the end, so that the server is never held up.
            let _ = std::io::copy(&mut output, &mut std::io::sink());
        });
        first
            .recv_timeout(SERVER_START)
            .with_context(|| format!("{} does not start", words[0]))?;
        Ok(server)
    }

    /// Both servers that the guests need, at `address`.
    fn pair(prefix: &[OsString], address: &str) -> Result<[Server; 2]> {
        let (iperf, echo) = (IPERF_PORT.to_string(), ECHO_PORT.to_string());
        Ok([
            Server::start(
                prefix,
                &["iperf3", "--forceflush", "-s", "-B", address, "-p", &iperf],
            )?,
            Server::start(prefix, &["python3", "-c", ECHO, address, &echo])?,
        ])
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Shell commands that print `PREFIX-out`, `PREFIX-in` (MB/s) and `PREFIX-trip`
/// (µs), measured against the servers at `address`.
fn network_script(prefix: &str, address: &str) -> String {
    let stream = |name: &str, option: &str| {
        format!(
            "iperf3 -c {address} -p {IPERF_PORT} -t 1 -f M {option} | \
             awk '/receiver/ {{ print \"{prefix}-{name}\", $(NF-2), \"MiB/s\" }}'"
        )
    };
    format!(
        "{}; {}; python3 -c 'import socket,time;\
         s=socket.create_connection((\"{address}\",{ECHO_PORT}));\
         s.setsockopt(6,1,1);t=time.time();\
         [(s.send(b\"x\"),s.recv(1)) for i in range({REQUESTS})];\
         print(\"{prefix}-trip\",(time.time()-t)*1e6/{REQUESTS},\"us\")'",
        stream("out", ""),
        stream("in", "-R"),
    )
}

fn record_network(
    samples: &mut Samples,
    prefix: &str,
    side: Side,
    figures: &BTreeMap<String, (f64, String)>,
) -> Result<()> {
    for (name, factor) in [("out", 1.048_576), ("in", 1.048_576), ("trip", 1.0)] {
        let name = format!("{prefix}-{name}");
        let (value, _) = figures
            .get(&name)
            .with_context(|| format!("no figure {name} among {figures:?}"))?;
        record(samples, &name, side, value * factor);
    }
    Ok(())
}

fn measure_user(base: &Boot, samples: &mut Samples) -> Result<()> {
    let _servers = Server::pair(&[], "127.0.0.1")?;
    let mut boot = base.running(&network_script("user", GATEWAY));
    boot.nets.push(Net::User {
        forwards: Vec::new(),
    });
    boot.words += " weft.net=dhcp";
    for (side, monitor) in sides() {
        let run = boot.run(monitor)?;
        record_network(samples, "user", side, &run.figures()).with_context(|| run.ended.tail(8))?;
    }
    measure_loopback(samples)
}

/// What the host's own loopback does: the mark for both networks.
fn measure_loopback(samples: &mut Samples) -> Result<()> {
    let output = Command::new("sh")
        .args(["-c", &network_script("host", "127.0.0.1")])
        .output()?;
    let text = String::from_utf8(output.stdout)?;
    let figures = text.lines().filter_map(figure).collect();
    record_network(samples, "host", Side::Host, &figures)
}

fn measure_tap(base: &Boot, samples: &mut Samples) -> Result<()> {
    let host = TapHost::new()?;
    let _servers = Server::pair(&host.prefix(), TapHost::ADDRESS)?;
    let mut boot = base.running(&network_script("tap", TapHost::ADDRESS));
    boot.prefix = host.prefix();
    boot.nets.push(Net::Tap(TapHost::DEVICE.to_string()));
    boot.words += &format!(" weft.net={}/24", TapHost::GUEST);
    for (side, monitor) in sides() {
        let run = boot.run(monitor)?;
        record_network(samples, "tap", side, &run.figures()).with_context(|| run.ended.tail(8))?;
    }
    Ok(())
}

fn table(samples: &Samples) -> Table {
    let mut table = Table::new(
        "vm-devices",
        "Virtio disks and networks of a guest with one software vCPU, against the same kernel and images under QEMU's TCG, and against the host without a guest; in alternation. Disks: fio, libaio, 8 requests at once, blocks of 128 KiB in sequence and of 4 KiB at random, direct in the guest and below it (`--disk …,direct`; QEMU `cache=none,aio=io_uring`; the host on the same file). Networks: iperf3, one TCP stream, and requests of one byte, one after the other, between guest and host: in user space (passt; QEMU's own) and by a tap device; the host by its loopback. Ratios are speeds: more than 1 is faster.",
        &["what", "weft, soft", "QEMU TCG", "ratio", "host", "ratio"],
    );
    for (name, rw, _, what) in JOBS {
        let unit = if rw.starts_with("rand") {
            "k/s"
        } else {
            "MB/s"
        };
        table.rows.push(row(samples, what, name, name, unit));
    }
    for (net, label) in [("user", "network in user space"), ("tap", "tap device")] {
        for (name, what, unit) in [
            ("out", "guest to host", "MB/s"),
            ("in", "host to guest", "MB/s"),
            ("trip", "there and back", "µs"),
        ] {
            let what = format!("{label}, {what}");
            let (key, host) = (format!("{net}-{name}"), format!("host-{name}"));
            table.rows.push(row(samples, &what, &key, &host, unit));
        }
    }
    let named: BTreeMap<String, &Vec<f64>> = samples
        .iter()
        .map(|((name, side), values)| (format!("{name}, {side:?}").to_lowercase(), values))
        .collect();
    table.samples = json!(named);
    table
}

/// A row; `key` of the guests, `host_key` of the host.
fn row(samples: &Samples, what: &str, key: &str, host_key: &str, unit: &str) -> Vec<String> {
    let value = |key: &str, side| {
        let values = samples.get(&(key.to_string(), side))?;
        median(values)
    };
    let weft = value(key, Side::Weft);
    let tcg = value(key, Side::Tcg);
    let host = value(host_key, Side::Host);
    let speed = |other: Option<f64>| {
        let ratio = weft? / other?;
        Some(if unit == "µs" { 1.0 / ratio } else { ratio })
    };
    let cell = |value| format!("{} {unit}", digits(value));
    vec![
        what.to_string(),
        cell(weft),
        cell(tcg),
        digits(speed(tcg)),
        cell(host),
        digits(speed(host)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fio_prints_is_read() {
        let line = |name: &str| {
            let mut fields = vec!["0".to_string(); 130];
            fields[2] = name.to_string();
            for (index, value) in [(6, "1000"), (7, "2000"), (47, "3000"), (48, "4000")] {
                fields[index] = value.to_string();
            }
            fields.join(";")
        };
        assert_eq!(parse_fio(&line("disk-read")), Some(("disk-read", 1.024)));
        assert_eq!(parse_fio(&line("disk-write")), Some(("disk-write", 3.072)));
        let random = [("disk-randread", 2.0), ("disk-randwrite", 4.0)];
        for (name, value) in random {
            assert_eq!(parse_fio(&line(name)), Some((name, value)));
        }
        assert_eq!(parse_fio("weft-guest: hello"), None);
    }
}
