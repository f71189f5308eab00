//! What a lender risks with hosts that it does not know, or knows for one purpose:
//! daemons as processes of their own on loopback. Needs no privilege.

mod common;

use std::fs;
use std::io::{self, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use common::{Host, LENT_BYTES, Run, scratch};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, bind, connect, socket};
use weft_node::config::{self, May, Peer};
use weft_node::protocol::{DaemonReply, DaemonRequest};
use weft_node::remote::{Connection, Identity};
use weft_wire::keys::PublicKey;

const BOUND: Duration = Duration::from_secs(10);

/// A connection to a daemon from this address, which begins its handshake and never
/// goes on with it.
fn stranger(from: Ipv4Addr, port: u16) -> io::Result<TcpStream> {
    let flags = SockFlag::SOCK_CLOEXEC;
    let socket: OwnedFd = socket(AddressFamily::Inet, SockType::Stream, flags, None)?;
    let at = |address: Ipv4Addr, port| {
        let [a, b, c, d] = address.octets();
        SockaddrIn::new(a, b, c, d, port)
    };
    bind(socket.as_raw_fd(), &at(from, 0))?;
    connect(socket.as_raw_fd(), &at(Ipv4Addr::LOCALHOST, port))?;
    let mut stream = TcpStream::from(socket);
    stream.write_all(b"WEFT")?;
    Ok(stream)
}

fn port(host: &Host) -> u16 {
    let (_, port) = host.address.rsplit_once(':').unwrap();
    port.parse().unwrap()
}

/// How a launcher that may borrow names all of `hosts`.
fn borrower(hosts: &[&Host]) -> std::path::PathBuf {
    let directory = scratch("borrower");
    for file in [config::KEY_FILE, config::CONFIG_FILE] {
        fs::copy(common::launcher().join(file), directory.join(file)).unwrap();
    }
    hosts.iter().for_each(|host| host.trust_in(&directory));
    directory
}

/// Fails unless each of many requests is answered.
fn all_are_served(host: &Host, identity: &Identity) {
    for request in 0..50 {
        let connection = Connection::open(identity, &host.address);
        let status = connection.and_then(|mut connection| connection.status());
        assert!(status.is_ok(), "request {request}: {:?}", status.err());
    }
}

/// Connections from these addresses, which stay open.
fn crowd(host: &Host, addresses: impl Iterator<Item = Ipv4Addr>) -> Vec<TcpStream> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, soft.max(4096.min(hard)), hard).unwrap();
    let port = port(host);
    let mut crowd = Vec::new();
    for address in addresses {
        match stranger(address, port) {
            Ok(stream) => crowd.push(stream),
            // The daemon was quicker than the greeting.
            Err(error) if error.raw_os_error() != Some(libc::EMFILE) => {}
            Err(error) => panic!("{} connections: {error}", crowd.len()),
        }
    }
    crowd
}

#[test]
fn many_connections_of_one_stranger_keep_nobody_out() {
    let host = Host::start("crowded", LENT_BYTES);
    let identity = Identity::load(Some(&borrower(&[&host]))).unwrap();
    let stranger = Ipv4Addr::new(127, 0, 0, 2);
    let crowd = crowd(&host, std::iter::repeat_n(stranger, 1500));
    all_are_served(&host, &identity);
    drop(crowd);
}

#[test]
fn many_strangers_keep_nobody_out() {
    let host = Host::start("besieged", LENT_BYTES);
    let identity = Identity::load(Some(&borrower(&[&host]))).unwrap();
    let strangers = (0..1500).map(|n| Ipv4Addr::new(127, 1, (n / 250) as u8, (n % 250 + 2) as u8));
    let crowd = crowd(&host, strangers);
    all_are_served(&host, &identity);
    drop(crowd);
}

#[test]
fn a_peer_may_what_its_entry_says() {
    let lends = scratch("lends");
    let key = config::init(&lends).unwrap();
    let launcher = config::load_keys(common::launcher()).unwrap().public();
    let other = Peer::new("other", PublicKey([7; 32]), May::Borrow);
    config::trust(&lends, &other).unwrap();
    config::trust(&lends, &Peer::new("launcher", launcher, May::Lend)).unwrap();
    let host = Host::start_in(&lends, LENT_BYTES);
    assert_eq!(host.key, key);

    let run = Run::new("exit 0")
        .on(std::slice::from_ref(&host))
        .start()
        .wait();
    assert_eq!(run.code, Some(125), "{}", run.stderr);
    let line = format!("weft node trust --may borrow {launcher} NAME");
    assert!(run.stderr.contains(&line), "{}", run.stderr);

    let directory = scratch("does-not-ask");
    fs::copy(
        common::launcher().join(config::KEY_FILE),
        directory.join(config::KEY_FILE),
    )
    .unwrap();
    fs::write(directory.join(config::CONFIG_FILE), "").unwrap();
    let mut borrows_only = Peer::new("host", host.key, May::Borrow);
    borrows_only.address = Some(host.address.clone());
    config::trust(&directory, &borrows_only).unwrap();
    let run = Run::new("exit 0")
        .configuration(&directory)
        .on(std::slice::from_ref(&host))
        .start()
        .wait();
    assert_eq!(run.code, Some(125), "{}", run.stderr);
    assert!(run.stderr.contains("not lend to it"), "{}", run.stderr);
}

#[test]
fn hosts_that_do_not_know_each_other_make_no_aggregate() {
    let hosts = [
        Host::start("left", LENT_BYTES),
        Host::start("right", LENT_BYTES),
    ];
    let run = Run::new("exit 0").on(&hosts).start().wait();
    assert_eq!(run.code, Some(125), "{}", run.stderr);
    let [left, right] = &hosts;
    for part in [
        format!(
            "node {} cannot connect to node {}",
            left.address, right.address
        ),
        format!("weft node trust --may lend {} NAME", right.key),
    ] {
        assert!(run.stderr.contains(&part), "{part}: {}", run.stderr);
    }
}

#[test]
fn a_host_makes_links_to_itself() {
    let host = Host::start("twice", LENT_BYTES);
    let run = Run::new("sleep 100 exit 4")
        .configuration(&borrower(&[&host]))
        .twice_on(&host)
        .start()
        .wait();
    assert_eq!(run.code, Some(4), "{}", run.stderr);
}

#[test]
fn what_a_daemon_can_reach_is_not_told() {
    let known = PublicKey([8; 32]);
    let lends = scratch("asked");
    config::init(&lends).unwrap();
    let launcher = config::load_keys(common::launcher()).unwrap().public();
    config::trust(&lends, &Peer::new("launcher", launcher, May::Borrow)).unwrap();
    // Nothing listens there.
    common::trust(&lends, known, "127.0.0.1:1");
    let host = Host::start_in(&lends, LENT_BYTES);
    let identity = Identity::load(Some(&borrower(&[&host]))).unwrap();
    let mut connection = Connection::open(&identity, &host.address).unwrap();
    let open = DaemonRequest::Open {
        command: "test".into(),
        node: 1,
        budget_pages: Some(256),
        lease_ms: 5000,
    };
    let opened = connection.call(&open, BOUND).unwrap();
    assert!(matches!(opened, DaemonReply::Opened { .. }), "{opened:?}");
    let mut dial = |key| {
        let request = DaemonRequest::Dial {
            peer: 2,
            key,
            ticket: [1; 16],
            secret: [2; 32],
        };
        match connection.call(&request, BOUND).unwrap() {
            DaemonReply::Failed(why) => why,
            other => panic!("{other:?}"),
        }
    };
    let answers = [dial(known), dial(PublicKey([9; 32])), dial(launcher)];
    assert_eq!(answers, ["it cannot connect to node 2"; 3]);
}
