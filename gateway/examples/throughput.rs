//! How fast bytes go between a client and a machine, through the gateway and one switch:
//! round trips of 64 bytes, and a stream each way.
//!
//! `cargo run --release -p weft-gateway --example throughput [SECONDS]`. The machine's MTU is
//! that of each line; the gateway takes what the machine offers. The base is a bare UNIX
//! socket between two threads of the same run. The machine is a thread with smoltcp, which
//! costs as much as the gateway's: a guest's kernel is another cost.

#[allow(dead_code, unused_imports, reason = "each program uses a part")]
#[path = "../tests/support/mod.rs"]
mod support;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use support::{COUNT, ECHO, Machine, SOURCE, Site, at};
use weft_gateway::connect;

const MTUS: [usize; 5] = [1500, 9000, 16_384, 32_768, 65_520];
const TRIP: usize = 64;

/// Microseconds of a round trip to something that sends all back.
fn round_trip(client: &mut UnixStream, time: Duration) -> f64 {
    let (mut bytes, begin, mut trips) = ([7; TRIP], Instant::now(), 0);
    while begin.elapsed() < time {
        client.write_all(&bytes).expect("it reads");
        client.read_exact(&mut bytes).expect("it answers");
        trips += 1;
    }
    begin.elapsed().as_secs_f64() * 1e6 / f64::from(trips)
}

/// Megabytes each second that a client writes.
fn written(client: &mut UnixStream, time: Duration) -> f64 {
    let (piece, begin, mut bytes) = (vec![7; 1 << 16], Instant::now(), 0);
    while begin.elapsed() < time {
        client.write_all(&piece).expect("it reads");
        bytes += piece.len();
    }
    bytes as f64 / begin.elapsed().as_secs_f64() / 1e6
}

/// Megabytes each second that a client reads.
fn read(client: &mut UnixStream, time: Duration) -> f64 {
    let (mut piece, begin, mut bytes) = (vec![7; 1 << 16], Instant::now(), 0);
    while begin.elapsed() < time {
        bytes += client.read(&mut piece).expect("it writes");
    }
    bytes as f64 / begin.elapsed().as_secs_f64() / 1e6
}

fn bare(time: Duration) -> (f64, f64) {
    let (mut near, mut far) = UnixStream::pair().expect("descriptors");
    let echo = thread::spawn(move || {
        let mut bytes = [0; TRIP];
        while far.read_exact(&mut bytes).is_ok() && far.write_all(&bytes).is_ok() {}
    });
    let trip = round_trip(&mut near, time);
    drop(near);
    echo.join().expect("it ends");
    let (mut near, mut far) = UnixStream::pair().expect("descriptors");
    let sink = thread::spawn(move || {
        let mut bytes = vec![0; 1 << 16];
        while far.read(&mut bytes).is_ok_and(|count| count > 0) {}
    });
    let rate = written(&mut near, time);
    drop(near);
    sink.join().expect("it ends");
    (trip, rate)
}

fn main() {
    let seconds = std::env::args().nth(1).and_then(|text| text.parse().ok());
    let time = Duration::from_secs_f64(seconds.unwrap_or(2.0));
    let (trip, rate) = bare(time);
    println!("MTU      round trip, µs   × bare   to machine, MB/s   from machine, MB/s");
    println!(
        "bare     {trip:>14.1} {:>8.1} {rate:>18.0} {rate:>20.0}",
        1.0
    );
    for mtu in MTUS {
        let site = Site::new("gateway-bench");
        let machine = Machine::start(site.door(), 1, mtu);
        machine.source(u64::MAX);
        let open = |port| {
            let patience = Duration::from_secs(10);
            connect(&site.listen(), at(1, port), patience).expect("the machine runs")
        };
        let over = round_trip(&mut open(ECHO), time);
        let to = written(&mut open(COUNT), time);
        let from = read(&mut open(SOURCE), time);
        println!(
            "{mtu:<8} {over:>14.1} {:>8.1} {to:>18.0} {from:>20.0}",
            over / trip
        );
    }
}
