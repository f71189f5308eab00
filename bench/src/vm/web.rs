//! A web server on the vCPU of a node that does not have the network: FragVisor's
//! figure 6.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use nix::sched::{CloneFlags, setns};
use serde_json::json;
use weft_tests::boot::{Boot, Images, Monitor};
use weft_tests::namespace::{self, TapHost};

use crate::program::Place;
use crate::results::{Goal, Table, digits, median};

/// Bytes of what is asked for.
const SIZES: [usize; 5] = [1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10];
/// Requests of each size, and how many are under way: those of the paper.
const REQUESTS: usize = 1000;
const CONNECTIONS: usize = 10;
/// Longest time that one size may take: then fewer requests make the figure.
const SIZE_TIME: Duration = Duration::from_secs(6);
/// How long the guest may take until its server answers, and for one answer.
const START: Duration = Duration::from_secs(60);
const ANSWER: Duration = Duration::from_secs(20);
const PORT: u16 = 80;

/// Two nodes. Both vCPUs are up from the start, as a server's are: those that come later
/// get `nohz_full=`, which is good for computing only.
const TWO_NODES: &[&str] = &["--nodes", "2", "--late-cpus", "no"];

/// How the server's vCPU and the network are to each other.
const WAYS: [(&str, &[&str], &str); 3] = [
    ("one node", &[], ""),
    ("bypass", TWO_NODES, ",path=bypass"),
    ("shared memory", TWO_NODES, ",path=dsm"),
];

/// Requests a second by way and size.
type Samples = BTreeMap<String, Vec<f64>>;

/// The table `vm-nodes-net`.
pub fn web(place: &Place, images: &Images, repeat: usize) -> Result<Table> {
    if let Some(why) = namespace::missing() {
        bail!("{why}");
    }
    let mut samples = Samples::new();
    for _ in 0..repeat {
        for way in WAYS {
            let rates = measure(place, images, way).with_context(|| way.0.to_owned())?;
            for (size, rate) in SIZES.iter().zip(rates) {
                samples
                    .entry(format!("{} {size}", way.0))
                    .or_default()
                    .push(rate);
            }
        }
    }
    Ok(table(&samples))
}

/// Boots a machine whose server is on vCPU 1, and asks it.
fn measure(
    place: &Place,
    images: &Images,
    (_, options, path): (&str, &[&str], &str),
) -> Result<Vec<f64>> {
    let host = TapHost::new()?;
    let mut boot = images
        .small(&place.weft)?
        .running(&format!("taskset 2 serve {PORT}"));
    boot.cpus = 2;
    boot.prefix = host.prefix();
    boot.words = format!("weft.net={}/24", TapHost::GUEST);
    boot.options = options.iter().map(ToString::to_string).collect();
    let net = format!("tap={}{path}", TapHost::DEVICE);
    boot.options.extend(["--net".to_owned(), net]);
    boot.bound = START + SIZE_TIME * SIZES.len() as u32 * 2;
    let name = boot.prefix.last().context("a namespace")?.clone();
    thread::scope(|scope| {
        let guest = scope.spawn(|| run(&boot));
        let rates = scope.spawn(move || {
            let namespace = std::path::Path::new("/run/netns").join(name);
            let namespace = std::fs::File::open(namespace)?;
            // Of this thread, and of those that it starts.
            setns(namespace, CloneFlags::CLONE_NEWNET)?;
            ask_all()
        });
        let rates = rates.join().map_err(|_| anyhow!("the client panicked"))?;
        guest.join().map_err(|_| anyhow!("the guest panicked"))??;
        rates
    })
}

fn run(boot: &Boot) -> Result<()> {
    let run = boot.run(Monitor::Soft)?;
    ensure!(
        run.ended.line("serve: ready").is_some(),
        "no server: {}",
        run.ended.tail(8)
    );
    Ok(())
}

/// Requests a second of each size; ends the server.
fn ask_all() -> Result<Vec<f64>> {
    let server = SocketAddr::from((TapHost::GUEST.parse::<std::net::Ipv4Addr>()?, PORT));
    let deadline = Instant::now() + START;
    while let Err(error) = ask(server, 1) {
        ensure!(Instant::now() < deadline, "no answer: {error:#}");
        thread::sleep(Duration::from_millis(100));
    }
    let rates = SIZES.iter().map(|size| rate(server, *size)).collect();
    // It ends before it answers.
    let _ = exchange(server, "end");
    rates
}

/// Asks again and again over as many connections as there are.
fn rate(server: SocketAddr, size: usize) -> Result<f64> {
    let (begun, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let started = Instant::now();
    let one = || -> Result<()> {
        while begun.fetch_add(1, Ordering::Relaxed) < REQUESTS && started.elapsed() < SIZE_TIME {
            ask(server, size)?;
            done.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    };
    thread::scope(|scope| {
        let clients: Vec<_> = (0..CONNECTIONS).map(|_| scope.spawn(one)).collect();
        clients.into_iter().try_for_each(|client| {
            let asked = client.join();
            asked.map_err(|_| anyhow!("a client panicked"))?
        })
    })?;
    Ok(done.into_inner() as f64 / started.elapsed().as_secs_f64())
}

/// Requests that many bytes and receives them.
fn ask(server: SocketAddr, size: usize) -> Result<()> {
    let answer = exchange(server, &size.to_string())?;
    ensure!(
        answer.starts_with(b"HTTP/1.0 200 ") && answer.len() > size,
        "{} bytes of an answer to {size}",
        answer.len()
    );
    Ok(())
}

/// One connection: a request and all of its answer.
fn exchange(server: SocketAddr, path: &str) -> Result<Vec<u8>> {
    let mut connection = TcpStream::connect_timeout(&server, ANSWER)?;
    connection.set_read_timeout(Some(ANSWER))?;
    connection.write_all(format!("GET /{path} HTTP/1.0\r\n\r\n").as_bytes())?;
    let mut answer = Vec::with_capacity(300 << 10);
    match connection.read_to_end(&mut answer) {
        Err(error) if error.kind() == ErrorKind::WouldBlock => bail!("no answer in time"),
        outcome => drop(outcome?),
    }
    Ok(answer)
}

fn table(samples: &Samples) -> Table {
    let mut table = Table::new(
        "vm-nodes-net",
        "A web server of one thread on vCPU 1 of a small Linux guest on the software vCPU; 10 clients on the host ask over a tap device, 1000 requests of each size, or as many as 6 s allow, a connection each (FragVisor's figure 6). The machine is on one node, or on two of this host (TCP) of which node 0 has the network and node 1 the server's vCPU: frames past the shared memory, or queues in it. In alternation; requests a second.",
        &[
            "size",
            "one node",
            "bypass",
            "shared memory",
            "bypass / one node",
            "goal",
            "met",
            "bypass / shared memory",
            "goal",
            "met",
        ],
    );
    for size in SIZES {
        let of = |way: &str| median(samples.get(&format!("{way} {size}"))?);
        let [one, bypass, shared] = WAYS.map(|(way, ..)| of(way));
        let over = |other: Option<f64>| bypass.zip(other).map(|(bypass, other)| bypass / other);
        let of_one = match size {
            65_536.. => Goal::AtLeast(0.9),
            _ => Goal::None,
        };
        let of_shared = match size {
            ..=4096 => Goal::AtLeast(5.0),
            _ => Goal::None,
        };
        let [one_goal, one_met] = of_one.cells(over(one));
        let [shared_goal, shared_met] = of_shared.cells(over(shared));
        table.rows.push(vec![
            format!("{} KB", size >> 10),
            digits(one),
            digits(bypass),
            digits(shared),
            digits(over(one)),
            one_goal,
            one_met,
            digits(over(shared)),
            shared_goal,
            shared_met,
        ]);
    }
    table.samples = json!(samples);
    table
}
