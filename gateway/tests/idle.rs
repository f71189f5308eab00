//! A gateway with nothing to do sleeps. Needs loopback, a directory for sockets, and `/proc`.
//! One test, since it looks for the gateway's thread by its name.

#[allow(dead_code, unused_imports, reason = "each program uses a part")]
mod support;

use std::io::{Read, Write};
use std::thread;
use std::time::Duration;

use support::{ECHO, Site, Switch, at};
use weft_gateway::connect;

const WATCH: Duration = Duration::from_secs(3);

/// How often the gateway's thread has waited up to now.
fn waits() -> u64 {
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        let task = task.unwrap().path();
        // Another thread may end meanwhile.
        let read = |name: &str| std::fs::read_to_string(task.join(name)).unwrap_or_default();
        if read("comm").trim() == "weft-gateway" {
            let status = read("status");
            let mut lines = status.lines();
            let line = lines.find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
            return line.unwrap().trim().parse().unwrap();
        }
    }
    panic!("no thread of the gateway");
}

fn watched() -> u64 {
    // What has just happened is over.
    thread::sleep(Duration::from_millis(300));
    let before = waits();
    thread::sleep(WATCH);
    waits() - before
}

#[test]
fn a_gateway_with_nothing_to_do_sleeps() {
    let mut site = Site::new("gateway-idle");
    let machine = site.machine(1);
    let open = |site: &Site| connect(&site.listen(), at(1, ECHO), Duration::from_secs(20)).unwrap();
    let mut clients = [open(&site), open(&site), open(&site)];
    for client in &mut clients {
        client.write_all(b"x").unwrap();
        client.read_exact(&mut [0]).unwrap();
    }
    let open = watched();

    // The client has gone, and its last bytes are still in its socket.
    machine.silence(true);
    let [mut gone, _stays, _too] = clients;
    gone.set_nonblocking(true).unwrap();
    let piece = vec![1; 1 << 16];
    for _ in 0..100 {
        // Until it takes no more.
        let _ = gone.write(&piece);
        thread::sleep(Duration::from_millis(2));
    }
    drop(gone);
    let gone = watched();

    site.switch = None;
    let down = watched();
    site.switch = Some(Switch::start(&site.door()));
    eprintln!(
        "waits in 3 s: {open} with open connections, {gone} with a client that has gone, {down} without a switch"
    );
    assert!(open <= 3, "{open}");
    assert!(gone <= 10, "{gone}");
    assert!(down <= 10, "{down}");
}
