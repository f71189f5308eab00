//! Networks of a machine over several nodes: whichever node has one, and whichever
//! way its frames take. Needs passt.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use super::{BOUND, Bench, Check, TWO};
use crate::context::works;
use crate::guest::Guest;

pub(super) const CHECKS: [(&str, Check); 3] = [
    ("networks on either node, either way", |bench| {
        for node in ["node=0", "node=1"] {
            for path in ["path=bypass", "path=dsm"] {
                both_ways(bench, &format!("{node},{path}"), &[])
                    .with_context(|| format!("{node},{path}"))?;
            }
        }
        Ok(String::new())
    }),
    ("a network past sealed links", |bench| {
        both_ways(bench, "node=1", &["--transport", "tcp-sealed"])?;
        Ok(String::new())
    }),
    ("a network past links slow by up to 0.2 ms", |bench| {
        both_ways(bench, "node=0", &["--link-delay", "200"])?;
        Ok(String::new())
    }),
];

/// Bytes that go each way.
const BYTES: usize = 2 << 20;

/// Bytes that nobody else sends, in lines, so that the guest can make them, too.
fn content() -> Vec<u8> {
    let mut content = Vec::with_capacity(BYTES);
    for number in 0.. {
        if content.len() >= BYTES {
            break;
        }
        content.extend(format!("{number}\n").into_bytes());
    }
    content
}

/// One connection each way, at the same time, with the guest's programs on vCPU 1;
/// a pause in the middle.
fn both_ways(bench: &Bench<'_>, place: &str, options: &[&str]) -> Result<()> {
    ensure!(
        works("passt", &["--version"]),
        "`passt` is not installed (`make setup`)"
    );
    let content = content();
    let last = content.iter().filter(|byte| **byte == b'\n').count() - 1;
    let outside = TcpListener::bind(("127.0.0.1", 0))?;
    let port = free_port()?;
    let net = format!("user,forward={port}:80,loopback,{place}");
    let mut all = TWO.options.to_vec();
    // Both pairs of queues from the start.
    all.extend(["--name", "n", "--late-cpus", "no", "--net", &net]);
    all.extend(options);
    let script = format!(
        "echo queues $(ls -d /sys/class/net/eth0/queues/rx-* | wc -l); \
         mkdir /tmp/web; seq 0 {last} >/tmp/web/file; taskset 2 httpd -p 80 -h /tmp/web; \
         (sleep 1; taskset 2 wget -q -O /tmp/got http://10.0.2.2:{}/) & echo serving; \
         wait $!; cmp /tmp/got /tmp/web/file && echo same; echo compared; read word",
        outside.local_addr()?.port()
    );
    let mut guest = Guest::start(&mut bench.machine(&all, &script, "weft.net=dhcp")?)?;
    let told = guest.wait_for("serving", BOUND);
    ensure!(told.is_some(), "no server: {:?}", guest.lines().last());
    let got = std::thread::scope(|scope| {
        let sent = scope.spawn(|| give(&outside, &content));
        let got = scope.spawn(|| fetch(port));
        std::thread::sleep(Duration::from_millis(1050));
        let paused = bench.ask(&["vm", "pause", "n"]);
        let resumed = bench.ask(&["vm", "resume", "n"]);
        sent.join().ok().context("the server panicked")??;
        let got = got.join().ok().context("the client panicked")??;
        paused.and(resumed).map(|_| got)
    })?;
    ensure!(got == content, "{} bytes came, or others", got.len());
    ensure!(
        guest.wait_for("compared", BOUND).is_some(),
        "the guest waits: {:?}",
        guest.lines().last()
    );
    guest.write("end\n")?;
    let ended = bench.finish(guest)?;
    ensure!(
        ended.line("same").is_some(),
        "the guest got something else:\n{}",
        ended.tail(20)
    );
    let queues = if place.contains("dsm") { 1 } else { 2 };
    ensure!(
        ended.line(&format!("queues {queues}")).is_some(),
        "not {queues} pairs of queues:\n{}",
        ended.tail(20)
    );
    Ok(())
}

fn free_port() -> Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

/// Gives one client these bytes.
fn give(listener: &TcpListener, content: &[u8]) -> Result<()> {
    listener.set_nonblocking(true)?;
    let deadline = Instant::now() + BOUND;
    let (mut client, _) = loop {
        match listener.accept() {
            Ok(client) => break client,
            Err(error) => ensure!(
                Instant::now() < deadline,
                "the guest does not come: {error}"
            ),
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    client.set_nonblocking(false)?;
    client.set_write_timeout(Some(BOUND))?;
    client.set_read_timeout(Some(BOUND))?;
    let mut request = Vec::new();
    let mut byte = [0];
    while !request.ends_with(b"\r\n\r\n") {
        client.read_exact(&mut byte)?;
        request.extend(byte);
    }
    let length = content.len();
    client.write_all(format!("HTTP/1.0 200 OK\r\nContent-Length: {length}\r\n\r\n").as_bytes())?;
    client.write_all(content)?;
    Ok(())
}

/// The file that the guest serves.
fn fetch(port: u16) -> Result<Vec<u8>> {
    let mut connection = TcpStream::connect(("127.0.0.1", port))?;
    connection.set_read_timeout(Some(BOUND))?;
    connection.write_all(b"GET /file HTTP/1.0\r\n\r\n")?;
    let mut answer = Vec::new();
    connection.read_to_end(&mut answer)?;
    let end = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n");
    Ok(answer.split_off(end.context("no answer from the guest")? + 4))
}
