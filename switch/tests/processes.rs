//! Switches as processes, over loopback: links that end and come back, peers that stop,
//! strangers that send anything. Needs loopback and a directory for sockets.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use weft_switch::shell::{Options, run};
use weft_wire::keys;

const VARIABLE: &str = "WEFT_SWITCH_TEST";
const PATIENCE: Duration = Duration::from_secs(15);

/// Not a test: the switch, in a process that another test has started.
#[test]
fn a_switch() {
    let Ok(directory) = std::env::var(VARIABLE) else {
        return;
    };
    let directory = PathBuf::from(directory);
    let listen = std::fs::read_to_string(directory.join("listen")).unwrap();
    let options = Options {
        listen: listen.parse().unwrap(),
        machines: directory.join("machines"),
        keys: keys::load(&directory.join("key")).unwrap(),
        tap: None,
    };
    let (input, output) = (std::io::stdin(), std::io::stdout());
    run(options, input.as_fd(), output.as_fd()).unwrap();
}

struct Switch {
    directory: PathBuf,
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<Value>,
    key: String,
    address: String,
}

impl Switch {
    fn new(name: &str) -> Switch {
        let directory = format!("weft-switch-{}-{name}", std::process::id());
        let directory = std::env::temp_dir().join(directory);
        // What an earlier test of that name has left.
        let _ = std::fs::remove_dir_all(&directory);
        std::fs::create_dir_all(&directory).unwrap();
        keys::save(&keys::generate().unwrap(), &directory.join("key")).unwrap();
        std::fs::write(directory.join("listen"), "127.0.0.1:0").unwrap();
        Switch::start(directory)
    }

    fn start(directory: PathBuf) -> Switch {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "a_switch", "--nocapture"])
            .env(VARIABLE, &directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (sender, lines) = channel();
        let output = BufReader::new(child.stdout.take().unwrap());
        thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                // The test's own words stand around ours.
                let json = line.find('{').map_or("", |begin| &line[begin..]);
                if let Ok(value) = serde_json::from_str(json)
                    && sender.send(value).is_err()
                {
                    return;
                }
            }
        });
        let mut switch = Switch {
            directory,
            input: child.stdin.take(),
            child,
            lines,
            key: String::new(),
            address: String::new(),
        };
        let listening = switch.wait_for("listening");
        switch.key = listening["key"].as_str().unwrap().into();
        switch.address = listening["address"].as_str().unwrap().into();
        std::fs::write(switch.directory.join("listen"), &switch.address).unwrap();
        switch
    }

    fn order(&mut self, order: &Value) {
        writeln!(self.input.as_mut().unwrap(), "{order}").unwrap();
    }

    fn wait_for(&self, what: &str) -> Value {
        let end = Instant::now() + PATIENCE;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let line = self
                .lines
                .recv_timeout(left)
                .unwrap_or_else(|_| panic!("no {what}"));
            if !line[what].is_null() {
                return line[what].clone();
            }
        }
    }

    fn counters(&mut self) -> Value {
        self.order(&json!({"counters": true}));
        self.wait_for("counters")
    }

    fn knows(&mut self, other: &Switch, address: &str) {
        self.order(&json!({"peer": {"key": other.key, "address": address}}));
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id() as i32), signal).unwrap();
    }

    /// Killed, and started again with the same key, address and socket.
    fn restart(&mut self) {
        self.signal(Signal::SIGKILL);
        self.child.wait().unwrap();
        let mut again = Switch::start(self.directory.clone());
        assert_eq!(again.address, self.address);
        std::mem::swap(self, &mut again);
        again.directory = PathBuf::new();
    }

    fn machine(&self, number: u8) -> Machine {
        let socket = UnixStream::connect(self.directory.join("machines")).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        socket.set_write_timeout(Some(PATIENCE)).unwrap();
        Machine { socket, number }
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if self.directory != PathBuf::new() {
            let _ = std::fs::remove_dir_all(&self.directory);
        }
    }
}

/// Two switches with a link.
fn linked(name: &str) -> (Switch, Switch) {
    let (mut a, mut b) = (
        Switch::new(&format!("{name}-a")),
        Switch::new(&format!("{name}-b")),
    );
    let addresses = [a.address.clone(), b.address.clone()];
    a.knows(&b, &addresses[1]);
    b.knows(&a, &addresses[0]);
    a.wait_for("up");
    b.wait_for("up");
    (a, b)
}

struct Machine {
    socket: UnixStream,
    number: u8,
}

const ALL: u8 = 0xff;

impl Machine {
    fn send(&mut self, to: u8, text: &[u8]) {
        let card = |number| match number {
            ALL => [ALL; 6],
            number => [2, 0, 0, 0, 0, number],
        };
        let frame = [&card(to)[..], &card(self.number), &[8, 0], text].concat();
        let length = (frame.len() as u32).to_be_bytes();
        self.socket
            .write_all(&[&length[..], &frame].concat())
            .unwrap();
    }

    fn receive(&mut self) -> Vec<u8> {
        let mut length = [0; 4];
        self.socket.read_exact(&mut length).unwrap();
        let mut frame = vec![0; u32::from_be_bytes(length) as usize];
        self.socket.read_exact(&mut frame).unwrap();
        frame.split_off(14)
    }

    /// Sends until something arrives at `other`, and takes all of that away.
    fn reach(&mut self, other: &mut Machine) -> Duration {
        let begin = Instant::now();
        other
            .socket
            .set_read_timeout(Some(Duration::from_millis(50)))
            .unwrap();
        let mut byte = [0; 1 << 16];
        loop {
            assert!(
                begin.elapsed() < PATIENCE,
                "{} does not reach {}",
                self.number,
                other.number
            );
            self.send(other.number, b"hello");
            match other.socket.read(&mut byte) {
                Ok(count) => {
                    assert_ne!(count, 0, "the switch disconnected machine {}", other.number);
                    break;
                }
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
            }
        }
        let took = begin.elapsed();
        while other.socket.read(&mut byte).is_ok() {}
        other.socket.set_read_timeout(Some(PATIENCE)).unwrap();
        took
    }
}

#[test]
fn frames_cross_and_nothing_outlives_its_starter() {
    let (mut a, b) = linked("cross");
    let door = a.directory.join("machines");
    assert_eq!(door.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    let (mut one, mut two) = (a.machine(1), b.machine(2));
    two.send(ALL, b"here");
    assert_eq!(one.receive(), b"here");
    for length in [0, 1, 50, 1500, 60_000, 65_535 + 4] {
        let text = vec![length as u8; length];
        one.send(2, &text);
        assert_eq!(two.receive(), text);
        two.send(1, &text);
        assert_eq!(one.receive(), text);
    }
    let counters = a.counters();
    assert_eq!(counters["machines"][0]["frames_in"], 6);
    assert_eq!(counters["peers"][0]["frames_in"], 7);
    assert_eq!(counters["machines"][0]["addresses"][0], "02:00:00:00:00:01");
    assert_eq!(counters["totals"]["flooded"], 1);
    // An order that makes no sense is answered, and the switch goes on.
    a.order(&json!({"peers": 3}));
    assert!(
        a.wait_for("error")
            .as_str()
            .unwrap()
            .contains("give {\"peer\"")
    );
    let key = b.key.clone();
    a.order(&json!({"leave": key}));
    a.order(&json!({"leave": key}));
    assert!(a.wait_for("error").as_str().unwrap().contains("no peer"));
    b.wait_for("down");
    a.input = None;
    assert!(a.child.wait().unwrap().success());
    assert!(!door.exists());
}

#[test]
fn a_switch_that_is_killed_and_started_again_is_found() {
    let (mut a, mut b) = linked("killed");
    let mut one = a.machine(1);
    let mut two = b.machine(2);
    one.reach(&mut two);
    for round in 0..4 {
        // Each side dials in one of two pairs; here both are killed in turn.
        let (killed, other) = if round % 2 == 0 {
            (&mut b, &mut a)
        } else {
            (&mut a, &mut b)
        };
        let begin = Instant::now();
        killed.restart();
        let address = other.address.clone();
        killed.knows(other, &address);
        other.wait_for("down");
        killed.wait_for("up");
        other.wait_for("up");
        eprintln!(
            "round {round}: a link again {:?} after the kill",
            begin.elapsed()
        );
        assert!(begin.elapsed() < Duration::from_secs(8));
        if round % 2 == 0 {
            two = b.machine(2)
        } else {
            one = a.machine(1)
        }
        let took = one.reach(&mut two).max(two.reach(&mut one));
        assert!(took < Duration::from_secs(2), "{took:?}");
    }
    let peers = &b.counters()["peers"];
    assert_eq!(peers[0]["up"], true);
    assert_eq!(peers[0]["links"], 2);
}

#[test]
fn a_switch_that_starts_calls_the_cards_that_wait() {
    let mut switch = Switch::new("calls");
    let beside = |name: &str| switch.directory.join(name);
    let waits = UnixListener::bind(beside("machines.0123456789abcdef")).unwrap();
    // Of a machine that was killed; of somebody else.
    drop(UnixListener::bind(beside("machines.00000000000000aa")).unwrap());
    let other = UnixListener::bind(beside("machines.socket")).unwrap();
    std::fs::write(beside("machines.00000000000000bb"), "a file").unwrap();
    switch.restart();
    waits.set_nonblocking(true).unwrap();
    let (socket, _) = waits.accept().unwrap();
    socket.set_nonblocking(false).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let (mut one, mut two) = (Machine { socket, number: 1 }, switch.machine(2));
    one.send(ALL, b"here");
    assert_eq!(two.receive(), b"here");
    two.send(1, b"there");
    assert_eq!(one.receive(), b"there");
    let beside = |name: &str| switch.directory.join(name);
    assert!(!beside("machines.00000000000000aa").exists());
    assert!(beside("machines.00000000000000bb").exists());
    other.set_nonblocking(true).unwrap();
    assert!(other.accept().is_err());
}

#[test]
fn a_peer_that_stands_is_noticed_within_five_seconds() {
    let (mut a, b) = linked("stands");
    let (mut one, mut two) = (a.machine(1), b.machine(2));
    one.reach(&mut two);
    b.signal(Signal::SIGSTOP);
    let begin = Instant::now();
    let why = a.wait_for("down")["why"].as_str().unwrap().to_owned();
    assert!(
        begin.elapsed() < Duration::from_secs(5),
        "{:?}",
        begin.elapsed()
    );
    assert!(why.contains("silent"), "{why}");
    // The other machines of this host do not notice.
    let mut three = a.machine(3);
    three.send(1, b"from here");
    assert_eq!(one.receive(), b"from here");
    for number in 0..200_u32 {
        one.send(2, &number.to_be_bytes());
    }
    b.signal(Signal::SIGCONT);
    a.wait_for("up");
    for number in 0..200_u32 {
        assert_eq!(two.receive(), number.to_be_bytes());
    }
    assert_eq!(a.counters()["peers"][0]["waiting"], 0);
}

/// Passes bytes between two addresses, until it is cut: then it keeps connections open and
/// passes nothing.
fn relay(to: String) -> (SocketAddr, Arc<AtomicBool>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, cut) = (
        listener.local_addr().unwrap(),
        Arc::new(AtomicBool::new(false)),
    );
    let is_cut = cut.clone();
    thread::spawn(move || {
        for near in listener.incoming().map_while(Result::ok) {
            let far = TcpStream::connect(&to).unwrap();
            for (mut from, mut to) in [
                (near.try_clone().unwrap(), far.try_clone().unwrap()),
                (far, near),
            ] {
                let is_cut = is_cut.clone();
                thread::spawn(move || {
                    let mut bytes = vec![0; 1 << 16];
                    while let Ok(count @ 1..) = from.read(&mut bytes) {
                        // What is cut off is lost, and so is this connection.
                        if is_cut.load(Ordering::Relaxed) {
                            thread::sleep(Duration::from_secs(60));
                            return;
                        }
                        if to.write_all(&bytes[..count]).is_err() {
                            return;
                        }
                    }
                    let _ = to.shutdown(std::net::Shutdown::Both);
                });
            }
        }
    });
    (address, cut)
}

#[test]
fn a_cut_of_twenty_seconds_is_survived() {
    let (mut a, mut b) = (Switch::new("cut-a"), Switch::new("cut-b"));
    let (to_a, cut_a) = relay(a.address.clone());
    let (to_b, cut_b) = relay(b.address.clone());
    a.knows(&b, &to_b.to_string());
    b.knows(&a, &to_a.to_string());
    a.wait_for("up");
    b.wait_for("up");
    let (mut one, mut two) = (a.machine(1), b.machine(2));
    one.reach(&mut two);
    let cut = |is| {
        cut_a.store(is, Ordering::Relaxed);
        cut_b.store(is, Ordering::Relaxed);
    };
    cut(true);
    a.wait_for("down");
    b.wait_for("down");
    for number in 0..500_u32 {
        one.send(2, &number.to_be_bytes());
    }
    thread::sleep(Duration::from_secs(16));
    assert_eq!(a.counters()["peers"][0]["waiting"], 500);
    cut(false);
    let begin = Instant::now();
    a.wait_for("up");
    // A dial into the cut may still wait for its end.
    eprintln!("a link again {:?} after the cut", begin.elapsed());
    assert!(begin.elapsed() < Duration::from_secs(8));
    for number in 0..500_u32 {
        assert_eq!(two.receive(), number.to_be_bytes());
    }
}

#[test]
fn a_machine_that_reads_nothing_costs_its_own_queue_only() {
    let (mut a, b) = linked("slow");
    let (mut one, mut two) = (a.machine(1), b.machine(2));
    one.reach(&mut two);
    two.send(1, b"from here");
    assert_eq!(one.receive(), b"from here");
    let mut three = a.machine(3);
    three.send(1, b"from here");
    assert_eq!(one.receive(), b"from here");
    let count = 20_000_u32;
    for number in 0..count {
        one.send(3, &[&number.to_be_bytes()[..], &[0; 1000]].concat());
        if number % 1000 == 0 {
            one.send(2, b"still");
            assert_eq!(two.receive(), b"still");
        }
    }
    let machines = a.counters()["machines"].clone();
    let slow = machines
        .as_array()
        .unwrap()
        .iter()
        .find(|machine| machine["waiting"] == 1000);
    assert!(
        slow.is_some_and(|slow| slow["overflowed"].as_u64() > Some(15_000)),
        "{machines}"
    );
    // What it reads is in order, and ends with the newest.
    let mut last = None;
    while last != Some(count - 1) {
        let number = u32::from_be_bytes(three.receive()[..4].try_into().unwrap());
        assert!(last < Some(number));
        last = Some(number);
    }
}

/// SplitMix64.
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[test]
fn garbage_at_both_sockets_disturbs_nobody() {
    let (mut a, mut b) = linked("garbage");
    let (mut one, mut two) = (a.machine(1), b.machine(2));
    one.reach(&mut two);
    let ended = Arc::new(AtomicBool::new(false));
    let (address, door) = (a.address.clone(), a.directory.join("machines"));
    let silent: Arc<Mutex<Vec<TcpStream>>> = Arc::default();
    let mut attackers = Vec::new();
    for seed in 0..3_u64 {
        let (ended, address, door) = (ended.clone(), address.clone(), door.clone());
        let silent = silent.clone();
        attackers.push(thread::spawn(move || {
            let mut state = seed;
            while !ended.load(Ordering::Relaxed) {
                let count = 1 + random(&mut state) as usize % 3000;
                let mut bytes: Vec<u8> = (0..count).map(|_| random(&mut state) as u8).collect();
                match random(&mut state) % 4 {
                    0 => bytes.splice(..0, *b"WEFT\x02\0\0\0\x03").for_each(drop),
                    // A length that may be: what follows is a frame.
                    1 => bytes.splice(..0, [0, 0, 0, 80]).for_each(drop),
                    _ => {}
                }
                if let Ok(mut socket) = UnixStream::connect(&door) {
                    socket
                        .set_write_timeout(Some(Duration::from_secs(1)))
                        .unwrap();
                    let _ = socket.write_all(&bytes);
                }
                if let Ok(mut socket) = TcpStream::connect(&address) {
                    let _ = socket.write_all(&bytes);
                    let mut silent = silent.lock().unwrap();
                    silent.push(socket);
                    if silent.len() > 200 {
                        silent.drain(..50);
                    }
                }
                thread::sleep(Duration::from_millis(5));
            }
        }));
    }
    let end = Instant::now() + Duration::from_secs(4);
    let mut number = 0_u32;
    while Instant::now() < end {
        number += 1;
        // Broadcasts of the attackers may come between; ours come in order.
        one.send(2, &[b"ours", &number.to_be_bytes()[..]].concat());
        while two.receive() != [b"ours", &number.to_be_bytes()[..]].concat() {}
    }
    // A peer gets in although strangers hold connections.
    b.restart();
    b.knows(&a, &address);
    let begin = Instant::now();
    a.wait_for("up");
    eprintln!(
        "{number} frames; a link again {:?} under attack",
        begin.elapsed()
    );
    let mut two = b.machine(2);
    one.reach(&mut two);
    ended.store(true, Ordering::Relaxed);
    attackers
        .into_iter()
        .for_each(|attacker| attacker.join().unwrap());
    let counters = a.counters();
    assert!(counters["strangers"].as_u64() > Some(20), "{counters}");
    assert!(a.child.try_wait().unwrap().is_none());
}
