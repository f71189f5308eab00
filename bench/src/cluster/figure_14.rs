//! FragVisor's figure 14 with real machines: five decisions about a machine of four vCPUs, and what
//! a client of its web server sees beside them.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use nix::sched::{CloneFlags, setns};
use serde_json::{Value, json};
use weft_tests::boot::{AGGREGATE, Images};
use weft_tests::context::Context;
use weft_tests::fleet::{self, Fleet, SOON, Started, Wanted, words};
use weft_tests::run::End;

use crate::program::Place;
use crate::results::{Table, digits, median, quantile};

/// Names of the paper's nodes. The last two are full throughout.
const HOSTS: [&str; 4] = ["node0", "node1", "node2", "node3"];
/// CPUs of each node, as in the paper. They are vCPUs of machines that idle, so they may be more
/// than this host has.
const SETTINGS: &str = "cores = 12\nslices = 32\n";
const LENDS: &str = "4G";
/// What fills the nodes at first: node and vCPUs. The figure's lower graph shows when they end.
const FILLERS: [(usize, u32); 11] = [
    (0, 8),
    (0, 2),
    (0, 1),
    (0, 1),
    (1, 4),
    (1, 4),
    (1, 2),
    (1, 1),
    (1, 1),
    (2, 12),
    (3, 12),
];
const FILLER_MIB: u32 = 80;
const POLICY: &str = "fragbff-fewest-fragmentation";
/// The machine that the figure is about, on node0.
const WEB: &str = "web";
const WEB_MIB: u32 = 256;
const WEB_ADDRESS: [u8; 4] = [10, 119, 0, 200];
const TAP: &str = "weft-tap";
/// The one that waits for a whole node, node1.
const LARGE: &str = "large";
const LARGE_CPUS: u32 = 12;
/// A request has the SHA-256 of this number of zero bytes computed, on another vCPU than the server's.
const BLOCK_BYTES: u32 = 8 << 20;
/// The first characters of the answer.
const ANSWER: &str = "2daeb1f36095b44b318410b3f4e8b5d989dcc7bb023d1426c492dab0a3053e74";
/// How long the client asks in each stage. A machine is not moved within ten seconds of a move.
const STAGE: Duration = Duration::from_secs(25);
/// A little longer than the scheduler leaves alone what it placed or moved.
const HOLD: Duration = Duration::from_secs(13);
/// A decision, a move, or a boot beside all others takes less.
const BOUND: Duration = Duration::from_secs(120);
/// One answer.
const REQUEST_BOUND: Duration = Duration::from_secs(20);

/// The web server's vCPUs on node0 and node1.
type Spread = [u64; 2];

/// What happens at the times of the figure: the fillers that end, by node and vCPUs, and where the
/// machine's vCPUs are then.
struct Stage {
    second: u32,
    end: &'static [(usize, u32)],
    after: Spread,
    decision: &'static str,
}

impl Stage {
    /// Whether the machine's vCPUs are elsewhere after it.
    fn changes_from(&self, number: usize) -> bool {
        number == 0 || STAGES[number - 1].after != self.after
    }
}

const STAGES: [Stage; 5] = [
    Stage {
        second: 155,
        end: &[(0, 2), (1, 2)],
        after: [2, 2],
        decision: "starts on both",
    },
    Stage {
        second: 222,
        end: &[(1, 4)],
        after: [2, 2],
        decision: "stays: a block of 4 free CPUs would be broken",
    },
    Stage {
        second: 360,
        end: &[(1, 1), (1, 1)],
        after: [2, 2],
        decision: "stays: the block has 6",
    },
    Stage {
        second: 470,
        end: &[(0, 1)],
        after: [3, 1],
        decision: "one vCPU moves",
    },
    Stage {
        second: 623,
        end: &[(1, 4), (0, 1)],
        after: [4, 0],
        decision: "the last vCPU and the memory move; the machine of 12 vCPUs starts",
    },
];

/// Requests of one client, one after the other: when each ended, and how long it took.
#[derive(Default)]
struct Client {
    ends: AtomicBool,
    answers: Mutex<Vec<(Instant, Duration)>>,
    failed: Mutex<Option<String>>,
}

impl Client {
    /// Asks on the host that has this network.
    fn run(&self, namespace: &File) {
        if let Err(error) = setns(namespace, CloneFlags::CLONE_NEWNET) {
            *self.failed.lock().expect("no panic") = Some(error.to_string());
            return;
        }
        // The server may still be coming up.
        let begun = Instant::now();
        while ask().is_err() && begun.elapsed() < BOUND && !self.ends.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(200));
        }
        while !self.ends.load(Ordering::Relaxed) {
            let begun = Instant::now();
            match ask() {
                Ok(()) => {
                    let answer = (Instant::now(), begun.elapsed());
                    self.answers.lock().expect("no panic").push(answer);
                }
                Err(error) => {
                    *self.failed.lock().expect("no panic") = Some(format!("{error:#}"));
                    return;
                }
            }
        }
    }

    fn first_answer(&self) -> Result<()> {
        let begun = Instant::now();
        while self.since(begun)?.is_empty() {
            ensure!(begun.elapsed() < BOUND, "the web server does not answer");
            thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// Milliseconds of the answers since then.
    fn since(&self, begun: Instant) -> Result<Vec<f64>> {
        if let Some(why) = &*self.failed.lock().expect("no panic") {
            bail!("a request failed: {why}");
        }
        let answers = self.answers.lock().expect("no panic");
        let since = answers.iter().filter(|(at, _)| *at >= begun);
        Ok(since.map(|(_, took)| took.as_secs_f64() * 1e3).collect())
    }
}

/// One request, and whether its answer is right.
fn ask() -> Result<()> {
    let server = SocketAddr::from((Ipv4Addr::from(WEB_ADDRESS), 80));
    let mut connection = TcpStream::connect_timeout(&server, REQUEST_BOUND)?;
    connection.set_read_timeout(Some(REQUEST_BOUND))?;
    connection.write_all(b"GET /cgi-bin/job HTTP/1.0\r\n\r\n")?;
    let mut answer = String::new();
    connection.read_to_string(&mut answer)?;
    ensure!(answer.contains(ANSWER), "a wrong answer: {answer:?}");
    Ok(())
}

/// The server is on vCPU 0, what it starts for each request on the others: nginx and PHP in the
/// paper.
fn server_script() -> String {
    format!(
        "mkdir -p /www/cgi-bin; cd /www/cgi-bin; head -c {BLOCK_BYTES} /dev/zero >/block; \
         echo '#!/bin/sh' >job; echo 'echo Content-type: text/plain; echo' >>job; \
         echo 'exec taskset e sha256sum /block' >>job; chmod 755 job; \
         exec taskset 1 httpd -f -p 80 -h /www"
    )
}

struct Site<'a> {
    fleet: Fleet<'a>,
    kernel: String,
    initrd: String,
    /// Names of the fillers that run, by node and vCPUs.
    fillers: BTreeMap<(usize, u32), Vec<String>>,
    /// The command that starts the large machine, and waits.
    large: Option<Started>,
    /// How long each decision took, in seconds.
    decided_s: Vec<f64>,
}

impl Site<'_> {
    fn start_line(&self, name: &str, cpus: u32, memory_mib: u32, options: &str) -> Vec<String> {
        let (kernel, initrd) = (&self.kernel, &self.initrd);
        words(&format!(
            "vm start --cluster --name {name} --backend soft --cpus {cpus} --memory {memory_mib}M \
             --kernel {kernel} --initrd {initrd} {options} --cmdline"
        ))
    }

    fn fill(&mut self) -> Result<()> {
        for (number, (host, cpus)) in FILLERS.into_iter().enumerate() {
            let name = format!("filler{number}");
            let mut line = self.start_line(&name, cpus, FILLER_MIB, "--hosts-max 1");
            line.push("console=ttyS0 quiet weft.run=\"sleep 100000\"".into());
            self.fleet.call(host, &line)?;
            self.fillers.entry((host, cpus)).or_default().push(name);
        }
        Ok(())
    }

    fn end_filler(&mut self, of: (usize, u32)) -> Result<()> {
        let name = self.fillers.get_mut(&of).and_then(Vec::pop);
        let name = name.with_context(|| format!("no filler of {of:?} is left"))?;
        let line = format!("vm stop --timeout 0 {name}");
        self.fleet.call(of.0, &words(&line))?;
        Ok(())
    }

    /// vCPUs of a machine on node0 and node1, if it runs and does not move.
    fn cores(&mut self, name: &str) -> Result<Option<Spread>> {
        let plan = self.fleet.json(2, "plan --json")?;
        let runs = plan["runs"].as_array().context("no list of what runs")?;
        let run = runs.iter().find(|run| run["name"] == name);
        let Some(run) = run.filter(|run| run["moving"].is_null()) else {
            return Ok(None);
        };
        let parts = run["parts"].as_array().context("no parts")?;
        let on = |host: &str| {
            let part = parts.iter().find(|part| part["host"] == host);
            part.and_then(|part| part["cores"].as_u64()).unwrap_or(0)
        };
        Ok(Some([on(HOSTS[0]), on(HOSTS[1])]))
    }

    /// Waits until the machine is spread like that; how long it took.
    fn until_spread(&mut self, name: &str, wanted: Spread) -> Result<Duration> {
        let begun = Instant::now();
        loop {
            let found = self.cores(name)?;
            if found == Some(wanted) {
                return Ok(begun.elapsed());
            }
            ensure!(
                begun.elapsed() < BOUND,
                "{name} has {found:?} vCPUs on node0 and node1 instead of {wanted:?}"
            );
            thread::sleep(Duration::from_millis(100));
        }
    }

    fn waits(&mut self, name: &str) -> Result<bool> {
        let plan = self.fleet.json(2, "plan --json")?;
        let waits = plan["waits"].as_array().context("no list of what waits")?;
        Ok(waits.iter().any(|wait| wait["name"] == name))
    }

    fn until_waits(&mut self, name: &str) -> Result<()> {
        let begun = Instant::now();
        while !self.waits(name)? {
            ensure!(begun.elapsed() < SOON, "{name} does not wait");
            thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// The machine asks, waits, and starts when the second host has two CPUs; then the large one
    /// waits. How long the start took.
    fn start_web(&mut self) -> Result<()> {
        let [first, second] = STAGES[0].end else {
            bail!("the first stage frees CPUs on both hosts");
        };
        self.end_filler(*first)?;
        let mut line = self.start_line(WEB, 4, WEB_MIB, &format!("--net tap={TAP}"));
        let address = Ipv4Addr::from(WEB_ADDRESS);
        line.push(format!(
            "console=ttyS0 quiet weft.net={address}/24 weft.run=\"{}\"",
            server_script()
        ));
        let web = self.fleet.begin(0, WEB, &line)?;
        self.until_waits(WEB)?;
        let begun = Instant::now();
        self.end_filler(*second)?;
        self.until_spread(WEB, STAGES[0].after)?;
        self.decided_s.push(begun.elapsed().as_secs_f64());
        let (end, web) = web.finish(BOUND);
        ensure!(end == End::Exit(0), "{WEB}: {end}: {}", web.said());
        let mut line = self.start_line(LARGE, LARGE_CPUS, FILLER_MIB, "");
        line.push("console=ttyS0 quiet weft.run=\"sleep 100000\"".into());
        self.large = Some(self.fleet.begin(1, LARGE, &line)?);
        self.until_waits(LARGE)
    }

    /// The stages from the start of the machine on.
    fn stages(&mut self, client: &Client) -> Result<Run> {
        let (mut latency_ms, mut longest_ms) = (Vec::new(), Vec::new());
        client.first_answer()?;
        for (number, stage) in STAGES.iter().enumerate() {
            let begun = Instant::now();
            if number > 0 {
                self.change(number, stage)?;
            }
            let settled = Instant::now();
            thread::sleep(STAGE);
            latency_ms.push(client.since(settled)?);
            longest_ms.push(client.since(begun)?.into_iter().fold(0.0, f64::max));
            let found = self.cores(WEB)?;
            ensure!(
                found == Some(stage.after),
                "at {} s the machine has {found:?} vCPUs on node0 and node1",
                stage.second
            );
        }
        let large = self
            .large
            .take()
            .context("the large machine was asked for")?;
        let (end, large) = large.finish(BOUND);
        ensure!(end == End::Exit(0), "{LARGE}: {end}: {}", large.said());
        self.until_spread(LARGE, [0, u64::from(LARGE_CPUS)])?;
        Ok(Run {
            decided_s: std::mem::take(&mut self.decided_s),
            latency_ms,
            longest_ms,
            said: self.decisions()?,
        })
    }

    fn change(&mut self, number: usize, stage: &Stage) -> Result<()> {
        ensure!(self.waits(LARGE)?, "{LARGE} has started too early");
        let (last, before) = stage.end.split_last().context("something ends")?;
        for of in before {
            self.end_filler(*of)?;
            // Nothing may follow from it.
            thread::sleep(HOLD);
            let found = self.cores(WEB)?;
            let expected = STAGES[number - 1].after;
            ensure!(found == Some(expected), "{WEB} moved early: {found:?}");
        }
        let begun = Instant::now();
        self.end_filler(*last)?;
        if stage.changes_from(number) {
            self.until_spread(WEB, stage.after)?;
        }
        self.decided_s.push(begun.elapsed().as_secs_f64());
        Ok(())
    }

    /// What the leader said of the machine since it started, without times.
    fn decisions(&mut self) -> Result<Vec<String>> {
        let log = self.fleet.call(2, &words("cluster log --json"))?;
        let records = log.lines().map(serde_json::from_str::<Value>);
        let texts = records.map(|record| {
            let text = record?["what"].as_str().map(str::to_owned);
            text.context("a record without text")
        });
        let all = texts.collect::<Result<Vec<String>>>()?;
        let of_web = |text: &String| text.starts_with(WEB) || text.starts_with(LARGE);
        Ok(all.into_iter().filter(of_web).collect())
    }
}

/// One run: for each stage how long its decision took, and the client's milliseconds.
struct Run {
    decided_s: Vec<f64>,
    latency_ms: Vec<Vec<f64>>,
    /// The longest answer from the end of a filler until the machine is where it stays.
    longest_ms: Vec<f64>,
    said: Vec<String>,
}

/// The table `cluster-figure-14`.
pub fn figure_14(place: &Place, images: &Images, repeat: usize) -> Result<Table> {
    let context = Context {
        weft: place.weft.clone(),
        programs: place.programs.clone(),
        sources: place.work.clone(),
        inputs: place.work.clone(),
        work: place.work.clone(),
        seed: 0,
    };
    if let Some(why) = fleet::missing(&context) {
        bail!("{why}");
    }
    let runs = (0..repeat).map(|_| run(&context, images));
    let runs = runs.collect::<Result<Vec<Run>>>()?;
    Ok(table(&runs))
}

fn run(context: &Context, images: &Images) -> Result<Run> {
    let file = |name: &str| -> Result<String> {
        let file = images.file(name)?.canonicalize()?;
        Ok(file.to_string_lossy().into_owned())
    };
    let wanted = HOSTS.map(|name| Wanted {
        name,
        memory: LENDS,
        settings: SETTINGS,
    });
    let mut fleet = Fleet::new(context, "figure-14", &wanted)?;
    fleet.star.add_tap(0, TAP, 0)?;
    fleet.form(HOSTS.len())?;
    let mut site = Site {
        fleet,
        kernel: file(AGGREGATE[0])?,
        initrd: file(AGGREGATE[1])?,
        fillers: BTreeMap::new(),
        large: None,
        decided_s: Vec::new(),
    };
    site.fleet
        .call(0, &words(&format!("cluster policy {POLICY}")))?;
    site.fill()?;
    let client = Client::default();
    let namespace = site.fleet.star.namespace(0)?;
    thread::scope(|scope| {
        let started = site.start_web().and_then(|()| {
            scope.spawn(|| client.run(&namespace));
            site.stages(&client)
        });
        client.ends.store(true, Ordering::Relaxed);
        started
    })
}

/// A stage in all runs.
fn row(number: usize, stage: &Stage, runs: &[Run]) -> Vec<String> {
    let all = |of: &dyn Fn(&Run) -> f64| runs.iter().map(of).collect::<Vec<f64>>();
    let [here, there] = stage.after;
    let decided = match stage.changes_from(number) {
        true => format!("{} s", digits(median(&all(&|run| run.decided_s[number])))),
        false => "—".into(),
    };
    let latency = |of: fn(&[f64]) -> Option<f64>| {
        let each = all(&|run| of(&run.latency_ms[number]).unwrap_or(f64::NAN));
        median(&each)
    };
    let whole = all(&|run| median(&run.latency_ms[STAGES.len() - 1]).unwrap_or(f64::NAN));
    let middle = latency(median);
    vec![
        stage.second.to_string(),
        format!("{here} + {there}"),
        stage.decision.to_owned(),
        decided,
        digits(middle),
        digits(latency(|samples| quantile(samples, 0.95))),
        digits(median(&all(&|run| run.longest_ms[number]))),
        digits(middle.zip(median(&whole)).map(|(now, whole)| now / whole)),
    ]
}

fn table(runs: &[Run]) -> Table {
    let mut table = Table::new(
        "cluster-figure-14",
        "FragVisor's figure 14 with machines: four hosts in network namespaces that lend 12 cores each, filled by idle machines; a machine of 4 vCPUs starts on the fragments of two hosts, and one of 12 vCPUs waits for a whole host. The policy is FragBFF for the least fragmentation. Where the figure has CPUs become free, machines end. A client asks the machine's web server (vCPU 0), which has the SHA-256 of 8 MiB computed by a program on one of the other vCPUs; one request at a time, each answer is checked. All 60 vCPUs share the processors of this host. *Decided*: from the end of the machine that makes room until the vCPUs have moved (agents look every two seconds). *Longest*: the longest answer in the stage, moves included. In the paper the mean is 299 ms on two hosts and 215 ms on one: 1.39.",
        &[
            "second of the figure",
            "vCPUs on node0 + node1",
            "decision",
            "decided",
            "median answer, ms",
            "95 %",
            "longest",
            "median / whole",
        ],
    );
    let rows = STAGES.iter().enumerate();
    table.rows = rows
        .map(|(number, stage)| row(number, stage, runs))
        .collect();
    let samples = runs.iter().map(|run| {
        json!({
            "decided_s": run.decided_s,
            "latency_ms": run.latency_ms,
            "longest_ms": run.longest_ms,
            "said": run.said,
        })
    });
    table.samples = samples.collect();
    table
}
