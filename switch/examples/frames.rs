//! How fast frames go between two machines on one switch, and across two switches over
//! loopback: round trips with one frame under way, and frames each second with 64 (2 of the largest).
//!
//! `cargo run --release -p weft-switch --example frames [SECONDS]`. The base of each ratio is
//! a bare UNIX socket pair between the same two threads in the same run.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use weft_switch::shell::{Options, run};
use weft_wire::keys;

const WINDOW: usize = 64;
/// Of the whole frame.
const SIZES: [usize; 3] = [64, 1514, 65_534];

/// A switch on a thread, and the other ends of its standard input and output.
struct Switch {
    input: UnixStream,
    lines: BufReader<UnixStream>,
    door: PathBuf,
    listening: serde_json::Value,
}

impl Switch {
    fn new(directory: &Path, name: &str) -> Switch {
        let (input, its_input) = UnixStream::pair().expect("descriptors");
        let (output, its_output) = UnixStream::pair().expect("descriptors");
        let door = directory.join(name);
        let options = Options {
            listen: ([127, 0, 0, 1], 0).into(),
            machines: door.clone(),
            keys: keys::generate().expect("random bytes"),
            tap: None,
        };
        thread::spawn(move || run(options, its_input.as_fd(), its_output.as_fd()));
        let mut switch = Switch {
            input,
            lines: BufReader::new(output),
            door,
            listening: serde_json::Value::Null,
        };
        switch.listening = switch.line("listening");
        switch
    }

    fn line(&mut self, what: &str) -> serde_json::Value {
        loop {
            let mut line = String::new();
            self.lines.read_line(&mut line).expect("the switch runs");
            let value: serde_json::Value = serde_json::from_str(&line).expect("it says JSON");
            if !value[what].is_null() {
                return value[what].clone();
            }
        }
    }

    fn knows(&mut self, other: &Switch) {
        let order = serde_json::json!({ "peer": other.listening });
        writeln!(self.input, "{order}").expect("the switch runs");
    }

    fn machine(&self) -> UnixStream {
        UnixStream::connect(&self.door).expect("the switch runs")
    }
}

fn frame(to: u8, from: u8, bytes: usize) -> Vec<u8> {
    let mut frame = (bytes as u32).to_be_bytes().to_vec();
    frame.extend([2, 0, 0, 0, 0, to, 2, 0, 0, 0, 0, from, 8, 0]);
    frame.resize(4 + bytes, 7);
    frame
}

/// Sends each frame back to where it came from.
fn echo(mut socket: UnixStream, (to, from): (u8, u8), bytes: usize) {
    let (mut all, answer) = (vec![0; 4 + bytes], frame(to, from, bytes));
    while socket.read_exact(&mut all).is_ok() && socket.write_all(&answer).is_ok() {}
}

/// Microseconds of a round trip, and frames each second one way with a window.
fn measure(
    (mut near, far): (UnixStream, UnixStream),
    (one, other): (u8, u8),
    bytes: usize,
    time: Duration,
) -> (f64, f64) {
    let stop = far.try_clone().expect("descriptors");
    let there = thread::spawn(move || echo(far, (one, other), bytes));
    let (request, mut answer) = (frame(other, one, bytes), vec![0; 4 + bytes]);
    let mut trip = |near: &mut UnixStream| {
        near.write_all(&request).expect("it reads");
        near.read_exact(&mut answer).expect("it answers");
    };
    // Both are known from then on.
    (0..100).for_each(|_| trip(&mut near));
    let (begin, mut trips) = (Instant::now(), 0);
    while begin.elapsed() < time {
        trip(&mut near);
        trips += 1;
    }
    let round = begin.elapsed().as_secs_f64() * 1e6 / f64::from(trips);

    // The window goes out in one write, each answer lets another frame out.
    let mut answer = vec![0; 4 + bytes];
    // Both ways together fit into the buffers of a bare socket pair.
    let window = if bytes > 10_000 { 2 } else { WINDOW };
    near.write_all(&request.repeat(window)).expect("it reads");
    let (begin, mut frames) = (Instant::now(), 0_u32);
    let half = window / 2;
    let mut half_answer = vec![0; half * answer.len()];
    while begin.elapsed() < time {
        near.read_exact(&mut half_answer).expect("it answers");
        near.write_all(&request.repeat(half)).expect("it reads");
        frames += half as u32;
    }
    // Each frame went there and back.
    let rate = 2.0 * f64::from(frames) / begin.elapsed().as_secs_f64();
    for _ in 0..window {
        near.read_exact(&mut answer).expect("it answers");
    }
    // The echo may have ended by itself.
    let _ = stop.shutdown(std::net::Shutdown::Both);
    there.join().expect("the echo ends");
    (round, rate)
}

fn main() {
    let seconds = std::env::args().nth(1).and_then(|text| text.parse().ok());
    let time = Duration::from_secs_f64(seconds.unwrap_or(2.0));
    let directory = std::env::temp_dir().join(format!("weft-frames-{}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("a directory for sockets");
    let (mut a, mut b) = (Switch::new(&directory, "a"), Switch::new(&directory, "b"));
    a.knows(&b);
    b.knows(&a);
    a.line("up");
    b.line("up");
    println!("bytes  way           round trip, µs    frames/s   Gbit/s   × round trip");
    let mut cards = (1..).step_by(2).map(|number| (number, number + 1));
    for bytes in SIZES {
        let mut bare = 0.0;
        for way in ["socket pair", "one switch", "two switches"] {
            let sockets = match way {
                "socket pair" => UnixStream::pair().expect("descriptors"),
                "one switch" => (a.machine(), a.machine()),
                _ => (a.machine(), b.machine()),
            };
            // Addresses of their own: those of machines that have left are kept for a while.
            let cards = cards.next().expect("few are needed");
            let (round, rate) = measure(sockets, cards, bytes, time);
            if way == "socket pair" {
                bare = round;
            }
            let gigabits = rate * bytes as f64 * 8.0 / 1e9;
            let ratio = round / bare;
            println!(
                "{bytes:<6} {way:<14} {round:>12.1} {rate:>12.0} {gigabits:>9.2} {ratio:>9.1}"
            );
            // Let the switch see that they are gone.
            thread::sleep(Duration::from_millis(50));
        }
    }
    // The sockets go with the process.
    let _ = std::fs::remove_dir_all(&directory);
}
