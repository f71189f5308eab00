//! Networks of a machine over several nodes: whichever node has one, and whichever
//! way its frames take. Needs passt.

use std::net::TcpListener;

use anyhow::{Context as _, Result, ensure};

use super::{BOUND, Bench, Check, TWO};
use crate::cluster::free_port;
use crate::context::works;
use crate::guest::Guest;
use crate::web::{fetch, give};

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
pub(super) fn content() -> Vec<u8> {
    let mut content = Vec::with_capacity(BYTES);
    for number in 0.. {
        if content.len() >= BYTES {
            break;
        }
        content.extend(format!("{number}\n").into_bytes());
    }
    content
}

/// Why there can be no user networks, if so.
pub(super) fn missing() -> Option<&'static str> {
    let there = works("passt", &["--version"]);
    (!there).then_some("`passt` is not installed (`make setup`)")
}

/// One connection each way, at the same time, with the guest's programs on vCPU 1;
/// a pause in the middle of what the guest fetches.
fn both_ways(bench: &Bench<'_>, place: &str, options: &[&str]) -> Result<()> {
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
         taskset 2 wget -q -O /tmp/got http://10.0.2.2:{}/ & echo serving; \
         wait $!; cmp /tmp/got /tmp/web/file && echo same; echo compared; read word",
        outside.local_addr()?.port()
    );
    let mut guest = Guest::start(&mut bench.machine(&all, &script, "weft.net=dhcp")?)?;
    let told = guest.wait_for("serving", BOUND);
    ensure!(told.is_some(), "no server: {:?}", guest.lines().last());
    let got = std::thread::scope(|scope| {
        let got = scope.spawn(|| fetch(port, BOUND));
        give(&outside, &content, BOUND, || {
            bench.ask(&["vm", "pause", "n"])?;
            bench.ask(&["vm", "resume", "n"]).map(drop)
        })?;
        got.join().ok().context("the client panicked")?
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
