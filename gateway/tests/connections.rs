//! A gateway with a switch and machines, all on threads of the test: bytes, ends, refusals.
//! Needs loopback and a directory for sockets.

#[allow(dead_code, unused_imports, reason = "each program uses a part")]
mod support;

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use support::{COUNT, ECHO, RESET, SOURCE, Site, Switch, at, pattern};
use weft_gateway::{CONNECTIONS_MAX, ConnectError, Gateway, GatewayError, connect};

const PATIENCE: Duration = Duration::from_secs(20);
const MIB: u64 = 1 << 20;

fn open(site: &Site, number: u8, port: u16) -> UnixStream {
    let client = connect(&site.listen(), at(number, port), PATIENCE).unwrap();
    client
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    client
        .set_write_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    client
}

fn bytes(count: u64) -> Vec<u8> {
    (0..count).map(pattern).collect()
}

/// Sends the pattern to an echo on a thread, reads it back, and ends.
fn echo(client: UnixStream, count: u64) {
    let mut writes = client.try_clone().unwrap();
    let writer = thread::spawn(move || {
        writes.write_all(&bytes(count)).unwrap();
        writes.shutdown(Shutdown::Write).unwrap();
    });
    read_pattern(client, count);
    writer.join().unwrap();
}

/// Reads the pattern to its end.
fn read_pattern(mut client: UnixStream, count: u64) {
    let mut found = Vec::new();
    client.read_to_end(&mut found).unwrap();
    assert_eq!(found.len() as u64, count);
    assert!(found == bytes(count));
}

fn refusal(outcome: Result<UnixStream, ConnectError>) -> String {
    match outcome {
        Err(ConnectError::Refused { said, .. }) => said,
        other => panic!("no refusal: {other:?}"),
    }
}

/// What the gateway says to these bytes, up to its end.
fn asked(path: &Path, bytes: &[u8]) -> String {
    let mut client = UnixStream::connect(path).unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    client.write_all(bytes).unwrap();
    let mut said = Vec::new();
    match client.read_to_end(&mut said) {
        // The gateway had not read all when it closed.
        Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
        other => drop(other.unwrap()),
    }
    String::from_utf8(said).unwrap()
}

#[test]
fn bytes_go_both_ways_unchanged() {
    let site = Site::new("gateway-echo");
    let _machine = site.machine(1);
    let mode = site.listen().metadata().unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    echo(open(&site, 1, ECHO), 5 * MIB);
    // What follows the line at once is not lost.
    let line = format!("{} 10000\nhello", at(1, ECHO));
    let mut client = UnixStream::connect(site.listen()).unwrap();
    client.write_all(line.as_bytes()).unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let mut said = String::new();
    client.read_to_string(&mut said).unwrap();
    assert_eq!(said, "ok\nhello");
}

#[test]
fn each_direction_ends_for_itself() {
    let site = Site::new("gateway-ends");
    let machine = site.machine(1);
    // The client's first: the machine still answers.
    let mut client = open(&site, 1, COUNT);
    client.write_all(&bytes(3 * MIB)).unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let mut said = String::new();
    client.read_to_string(&mut said).unwrap();
    assert_eq!(said, format!("{} true\n", 3 * MIB));
    // The machine's first: it still reads.
    machine.source(3 * MIB);
    let mut client = open(&site, 1, SOURCE);
    read_pattern(client.try_clone().unwrap(), 3 * MIB);
    for _ in 0..3 {
        client.write_all(&[1; 100_000]).unwrap();
        thread::sleep(Duration::from_millis(50));
    }
    drop(client);
    let end = Instant::now() + PATIENCE;
    while machine.read_after_end() < 300_000 && Instant::now() < end {
        thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(machine.read_after_end(), 300_000);
}

#[test]
fn a_reset_closes_the_socket() {
    let site = Site::new("gateway-reset");
    let _machine = site.machine(1);
    let mut client = open(&site, 1, RESET);
    client.write_all(b"x").unwrap();
    let begin = Instant::now();
    let read = client.read(&mut [0; 16]);
    assert!(matches!(read, Ok(0)) || read.is_err(), "{read:?}");
    assert!(begin.elapsed() < Duration::from_secs(5));
    let end = Instant::now() + PATIENCE;
    while client.write(b"x").is_ok() {
        assert!(Instant::now() < end);
    }
}

#[test]
fn what_cannot_be_reached_is_a_sentence() {
    let site = Site::new("gateway-refused");
    let machine = site.machine(1);
    let listen = site.listen();
    let said = refusal(connect(&listen, at(1, 22), PATIENCE));
    assert!(
        said.contains("10.77.0.1:22 refuses the connection"),
        "{said}"
    );
    // Nobody has the address.
    let begin = Instant::now();
    let patience = Duration::from_millis(300);
    let said = refusal(connect(&listen, at(99, 22), patience));
    assert!(
        said.contains("no machine has answered for 10.77.0.99:22 within 300 ms"),
        "{said}"
    );
    let took = begin.elapsed();
    assert!(
        took >= patience && took < patience + Duration::from_millis(500),
        "{took:?}"
    );
    for address in [
        "10.78.0.1:22",
        "10.77.0.0:22",
        "10.77.255.255:22",
        "10.77.0.200:22",
        "127.0.0.1:22",
    ] {
        let said = refusal(connect(&listen, address.parse().unwrap(), PATIENCE));
        assert!(
            said.contains("no machine's address in the network 10.77.0.0/16"),
            "{said}"
        );
    }
    let said = refusal(connect(&listen, at(1, 0), PATIENCE));
    assert!(said.contains("has no port"), "{said}");
    // A machine that stands now, and whose card is known.
    machine.silence(true);
    let said = refusal(connect(&listen, at(1, ECHO), patience));
    assert!(said.contains("within 300 ms"), "{said}");
    machine.silence(false);
    echo(open(&site, 1, ECHO), 1000);
}

#[test]
fn twenty_connections_at_once() {
    let site = Site::new("gateway-twenty");
    let _machines = [site.machine(1), site.machine(2)];
    let clients = (0..20).map(|index| {
        let client = open(&site, 1 + index % 2, ECHO);
        thread::spawn(move || echo(client, MIB))
    });
    let clients: Vec<_> = clients.collect();
    clients
        .into_iter()
        .for_each(|client| client.join().unwrap());
}

#[test]
fn many_connections_one_after_the_other() {
    let site = Site::new("gateway-many");
    let _machine = site.machine(1);
    for _ in 0..4 * CONNECTIONS_MAX {
        echo(open(&site, 1, ECHO), 1000);
    }
}

#[test]
fn more_connections_than_there_may_be_are_refused() {
    let site = Site::new("gateway-full");
    let _machine = site.machine(1);
    let mut others: Vec<UnixStream> = (1..CONNECTIONS_MAX)
        .map(|_| UnixStream::connect(site.listen()).unwrap())
        .collect();
    let mut last = open(&site, 1, ECHO);
    let said = refusal(connect(&site.listen(), at(1, ECHO), PATIENCE));
    assert!(said.contains("64 connections"), "{said}");
    last.write_all(b"still").unwrap();
    let mut answer = [0; 5];
    last.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"still");
    // One goes, another comes.
    drop(others.pop());
    let end = Instant::now() + PATIENCE;
    while connect(&site.listen(), at(1, ECHO), PATIENCE).is_err() {
        assert!(Instant::now() < end);
        thread::sleep(Duration::from_millis(10));
    }
    // Those that ask nothing are turned away.
    let mut said = String::new();
    others[0].set_read_timeout(Some(PATIENCE)).unwrap();
    others[0].read_to_string(&mut said).unwrap();
    assert!(said.contains("nothing was asked in time"), "{said}");
}

#[test]
fn a_client_that_does_not_read_holds_nobody_up() {
    let site = Site::new("gateway-slow");
    let machine = site.machine(1);
    machine.source(20 * MIB);
    let slow = open(&site, 1, SOURCE);
    let mut never = open(&site, 1, ECHO);
    never
        .set_write_timeout(Some(Duration::from_millis(300)))
        .unwrap();
    // Until all buffers on the way are full.
    assert!(never.write_all(&vec![1; 20 << 20]).is_err());
    let begin = Instant::now();
    echo(open(&site, 1, ECHO), MIB);
    assert!(
        begin.elapsed() < Duration::from_secs(5),
        "{:?}",
        begin.elapsed()
    );
    // It has lost nothing.
    read_pattern(slow, 20 * MIB);
}

#[test]
fn a_switch_that_ends_and_comes_back_in_a_transfer() {
    let mut site = Site::new("gateway-switch");
    let machine = site.machine(1);
    machine.source(30 * MIB);
    let down = open(&site, 1, SOURCE);
    let down = thread::spawn(move || read_pattern(down, 30 * MIB));
    let both = open(&site, 1, ECHO);
    let both = thread::spawn(move || echo(both, 10 * MIB));
    for pause in [0, 300, 1500] {
        thread::sleep(Duration::from_millis(15));
        site.switch = None;
        thread::sleep(Duration::from_millis(pause));
        if pause > 1000 {
            let said = refusal(connect(&site.listen(), at(1, ECHO), PATIENCE));
            assert!(said.contains("does not run"), "{said}");
        }
        site.switch = Some(Switch::start(&site.door()));
    }
    let begin = Instant::now();
    down.join().unwrap();
    both.join().unwrap();
    eprintln!("done {:?} after the last start", begin.elapsed());
    assert!(
        begin.elapsed() < Duration::from_secs(30),
        "{:?}",
        begin.elapsed()
    );
}

#[test]
fn a_machine_that_is_silent_for_five_seconds_in_a_transfer() {
    let site = Site::new("gateway-silent");
    let machine = site.machine(1);
    machine.source(30 * MIB);
    let down = open(&site, 1, SOURCE);
    let down = thread::spawn(move || read_pattern(down, 30 * MIB));
    let both = open(&site, 1, ECHO);
    let both = thread::spawn(move || echo(both, 10 * MIB));
    thread::sleep(Duration::from_millis(20));
    machine.silence(true);
    thread::sleep(Duration::from_secs(5));
    machine.silence(false);
    let begin = Instant::now();
    down.join().unwrap();
    both.join().unwrap();
    eprintln!("done {:?} after the silence", begin.elapsed());
    assert!(
        begin.elapsed() < Duration::from_secs(20),
        "{:?}",
        begin.elapsed()
    );
}

#[test]
fn garbage_is_answered_and_disturbs_nobody() {
    let site = Site::new("gateway-garbage");
    let _machine = site.machine(1);
    let good = open(&site, 1, ECHO);
    let good = thread::spawn(move || echo(good, 5 * MIB));
    let mut random = weft_test_support::Random::new(weft_test_support::seed());
    for _ in 0..100 {
        let count = 1 + random.index(300);
        let mut line: Vec<u8> = (0..count).map(|_| random.next() as u8).collect();
        line.push(b'\n');
        let said = asked(&site.listen(), &line);
        assert!(said.is_empty() || said.starts_with("error "), "{said}");
    }
    let said = asked(&site.listen(), &[b'1'; 64]);
    assert!(said.contains("longer than 64 bytes"), "{said}");
    let said = asked(&site.listen(), b"10.77.0.1:22 soon\n");
    assert!(said.contains("not understood"), "{said}");
    // Frames that no machine sends, from another card.
    let mut stranger = UnixStream::connect(site.door()).unwrap();
    for _ in 0..300 {
        let count = 60 + random.index(200);
        let mut frame: Vec<u8> = (0..count).map(|_| random.next() as u8).collect();
        frame[..12].copy_from_slice(&[2, 0, 0, 0, 0, 200, 2, 0, 0, 0, 0, 66]);
        match random.index(3) {
            0 => frame[12..16].copy_from_slice(&[8, 6, 0, 1]),
            1 => frame[12..16].copy_from_slice(&[8, 0, 0x45, 0]),
            _ => {}
        }
        let length = (count as u32).to_be_bytes();
        stranger.write_all(&[&length[..], &frame].concat()).unwrap();
    }
    good.join().unwrap();
    assert!(site.gateway.as_ref().unwrap().is_running());
}

#[test]
fn a_gateway_starts_where_none_runs_and_ends_with_its_owner() {
    let mut site = Site::new("gateway-life");
    let _machine = site.machine(1);
    let mut client = open(&site, 1, ECHO);
    let taken = Gateway::start(site.options());
    assert!(matches!(taken, Err(GatewayError::Taken(_))), "{taken:?}");
    site.gateway = None;
    assert!(!site.listen().exists());
    assert!(matches!(client.read(&mut [0]), Ok(0) | Err(_)));
    let gone = connect(&site.listen(), at(1, ECHO), PATIENCE);
    assert!(
        matches!(gone, Err(ConnectError::NoGateway { .. })),
        "{gone:?}"
    );
    // The file of one that was killed.
    drop(std::os::unix::net::UnixListener::bind(site.listen()).unwrap());
    site.gateway = Some(Gateway::start(site.options()).unwrap());
    echo(open(&site, 1, ECHO), 1000);
    site.gateway = None;
    site.switch = None;
    let none = Gateway::start(site.options());
    assert!(
        matches!(none, Err(GatewayError::NoSwitch { .. })),
        "{none:?}"
    );
}
