//! What a node that joins a machine, and one that leaves it, cost the programs that run meanwhile.

use std::collections::BTreeMap;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};
use weft_tests::boot::{Boot, Images, Monitor};
use weft_tests::guest::Guest;
use weft_tests::namespace::{self, TapHost};

use super::aggregate::number_after;
use super::nginx::{Client, base, nginx_on};
use crate::program::Place;
use crate::raw::{self, Kind};
use crate::results::{Goal, Table, digits, median};

/// A text in the memory of the node that leaves, in MB.
const TEXT_MB: u32 = 120;
/// Two probes, one on each vCPU, measure for so long in each phase, in s.
const PROBED_S: u32 = 6;
/// The change begins this long after the probes.
const BEFORE: Duration = Duration::from_secs(2);
/// ApacheBench asks for documents of this size meanwhile.
const DOCUMENT_KIB: u32 = 16;
const BOUND: Duration = Duration::from_secs(120);

const READY: &str = "join: ready";
const OVER: &str = "join: over";

const NOTHING: &str = "nothing";
/// A raw stream beside the load.
const RAW: &str = "raw";
const JOIN: &str = "join";
const LEAVE: &str = "leave";
const PHASES: [&str; 4] = [NOTHING, RAW, JOIN, LEAVE];

/// What runs meanwhile: a name, and the guest's commands that start it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Load {
    Nginx,
    Npb,
}

const LOADS: [Load; 2] = [Load::Nginx, Load::Npb];

impl Load {
    fn name(self) -> &'static str {
        match self {
            Self::Nginx => "nginx",
            Self::Npb => "NPB's IS, a process on each vCPU",
        }
    }

    fn commands(self) -> String {
        match self {
            Self::Nginx => nginx_on(2, &[DOCUMENT_KIB]),
            Self::Npb => "while :; do npb -p 2 is T >/dev/null || echo WRONG; done &".to_owned(),
        }
    }
}

/// By load, phase and figure.
type Samples = BTreeMap<String, Vec<f64>>;

/// The table `vm-join`.
pub fn join(place: &Place, images: &Images, repeat: usize) -> Result<Table> {
    if let Some(why) = namespace::missing() {
        bail!("{why}");
    }
    let base = base(place, images)?;
    let mut samples = Samples::new();
    for _ in 0..repeat {
        for load in LOADS {
            for (key, value) in measure(place, &base, images, load).context(load.name())? {
                let key = format!("{load:?} {key}");
                samples.entry(key).or_default().push(value);
            }
        }
    }
    Ok(table(&samples))
}

type Figures = Vec<(String, f64)>;

/// A machine of two nodes whose node 1 leaves after a third has joined.
fn measure(place: &Place, base: &Boot, images: &Images, load: Load) -> Result<Figures> {
    let host = TapHost::new()?;
    let client = Client::new(images, &host)?;
    let probe = format!("dirty 1 1000 {PROBED_S}");
    let mut boot = base.running(&format!(
        "taskset 2 textfile {TEXT_MB} >/run/text; {} echo {READY}; \
         for phase in {}; do read line; (taskset 1 {probe} & taskset 2 {probe} & wait) \
         | sed \"s/^/$phase /\"; echo {OVER} $phase; done; read line",
        load.commands(),
        PHASES.join(" ")
    ));
    boot.prefix = host.prefix();
    let net = format!("tap={}", TapHost::DEVICE);
    let options = [
        "--nodes",
        "2",
        "--late-cpus",
        "no",
        "--name",
        "j",
        "--net",
        &net,
    ];
    boot.options = options.map(Into::into).to_vec();
    let mut command = boot.command(Monitor::Soft);
    let mut guest = Guest::start(command.env("XDG_RUNTIME_DIR", &place.work))?;
    let measured = phases(place, &client, &mut guest, load);
    // It may have ended, which is told below.
    let _ = guest.write("\n");
    let ended = guest.finish(BOUND)?;
    let mut figures =
        measured.with_context(|| format!("{}\n{}", ended.stderr.trim(), ended.tail(12)))?;
    ensure!(
        ended.line("WRONG").is_none(),
        "the program failed: {}",
        ended.tail(12)
    );
    for phase in PHASES {
        let right = format!("{phase} dirty: right");
        let lines = ended.lines.iter();
        let lines = lines.filter(|line| line.text.contains(&right));
        let gaps: Vec<f64> = lines
            .filter_map(|line| number_after(&line.text, "gap"))
            .collect();
        ensure!(gaps.len() == 2, "{phase}: {} probes were right", gaps.len());
        let longest = gaps.iter().copied().fold(0.0, f64::max);
        figures.push((format!("{phase} gap"), longest / 1e3));
    }
    Ok(figures)
}

fn phases(place: &Place, client: &Client, guest: &mut Guest, load: Load) -> Result<Figures> {
    let ready = guest.wait_for(READY, BOUND);
    ensure!(ready.is_some(), "the guest does not come up");
    if load == Load::Nginx {
        client.wait(DOCUMENT_KIB, guest)?;
    }
    let mut figures = Figures::new();
    for phase in PHASES {
        guest.write("go\n")?;
        let (report, rate) = thread::scope(|scope| -> Result<(Value, Option<f64>)> {
            let asked = scope.spawn(|| match load {
                Load::Nginx => client.ask(DOCUMENT_KIB, 1_000_000, PROBED_S).map(Some),
                Load::Npb => Ok(None),
            });
            thread::sleep(BEFORE);
            let report = match phase {
                RAW => raw::measure(Kind::Tcp, &place.work)
                    .map(|raw| json!({ "raw": { "stream": raw.cold_bytes_per_s } })),
                JOIN => place.ask_machine(&["grow", "j", "--memory", "300M"]),
                LEAVE => place.ask_machine(&["release", "j", "1"]),
                _ => Ok(Value::Null),
            };
            let rate = asked.join().ok().context("the client panicked")??;
            Ok((report?, rate))
        })?;
        let over = guest.wait_for(&format!("{OVER} {phase}"), BOUND);
        ensure!(over.is_some(), "{phase}: the probes do not end");
        figures.extend(rate.map(|rate| (format!("{phase} rate"), rate)));
        let of = |change: &str, figure: &str| {
            let value = report[change][figure].as_f64();
            value.with_context(|| format!("no {figure} in {report}"))
        };
        match phase {
            RAW => figures.push(("stream".into(), of("raw", "stream")?)),
            JOIN => {
                figures.push(("join total".into(), of("grown", "total_s")?));
                figures.push(("join member".into(), of("grown", "join_s")?));
            }
            LEAVE => {
                let (bytes, pages_s) = (of("released", "bytes")?, of("released", "pages_s")?);
                figures.push(("leave total".into(), of("released", "total_s")?));
                figures.push(("leave mb".into(), bytes / 1e6));
                figures.push(("leave rate of pages".into(), bytes / pages_s));
                figures.push(("leave pause".into(), of("released", "pause_ns")? / 1e6));
            }
            _ => {}
        }
    }
    Ok(figures)
}

fn table(samples: &Samples) -> Table {
    let about = format!(
        "A Linux of two vCPUs (Debian's user land, the aggregate kernel, 512 MiB, software vCPUs) on two nodes of this host (TCP, not encrypted). A third node joins; then node 1 leaves, with vCPU 1 and {TEXT_MB} MB of text that nobody uses in its memory. Meanwhile nginx answers ApacheBench (documents of {DOCUMENT_KIB} KiB, 10 at a time), or NPB's IS runs in two processes. A probe on each vCPU works each 1 ms for {PROBED_S} s; *gap* is the longest time between two rounds of either, in a phase without a change and in those with one, with all waits for pages and for a processor: the goal is 10 ms more than without. Three nodes, the guest and the client share the processors of this host. *Pages*: the bytes that left in the time in which pages moved, against one raw stream from memory to memory beside the same programs. *vCPU stood*: that which moved; no other is stopped. Medians."
    );
    let columns = [
        "what",
        "total",
        "pages",
        "pages / raw",
        "goal",
        "met",
        "vCPU stood",
        "goal",
        "met",
        "gap",
        "gap without",
        "more",
        "goal",
        "met",
        "requests a second",
        "without",
    ];
    let mut table = Table::new("vm-join", &about, &columns);
    let all = |key: &str| samples.get(key).map_or(&[][..], Vec::as_slice);
    for load in LOADS {
        let of = |key: &str| median(all(&format!("{load:?} {key}")));
        let cell = |value: Option<f64>, unit: &str| match value {
            Some(_) => format!("{} {unit}", digits(value)),
            None => "—".to_owned(),
        };
        let (without, raw) = (of("nothing gap"), of("stream"));
        for phase in [JOIN, LEAVE] {
            let rate = of(&format!("{phase} rate of pages"));
            let ratio = rate.zip(raw).map(|(rate, raw)| rate / raw);
            let gap = of(&format!("{phase} gap"));
            let more = gap.zip(without).map(|(gap, without)| gap - without);
            let mut row = vec![format!("{}: {phase}", load.name())];
            row.push(cell(of(&format!("{phase} total")), "s"));
            row.push(cell(of(&format!("{phase} mb")), "MB"));
            row.push(cell(ratio, ""));
            row.extend(match ratio {
                Some(_) => Goal::AtLeast(0.7).cells(ratio),
                None => Goal::None.cells(None),
            });
            let stood = of(&format!("{phase} pause"));
            row.push(cell(stood, "ms"));
            row.extend(match stood {
                Some(_) => Goal::AtMost(10.0).cells(stood),
                None => Goal::None.cells(None),
            });
            row.push(cell(gap, "ms"));
            row.push(cell(without, "ms"));
            row.push(cell(more, "ms"));
            row.extend(Goal::AtMost(10.0).cells(more));
            row.push(cell(of(&format!("{phase} rate")), ""));
            row.push(cell(of("nothing rate"), ""));
            table.rows.push(row);
        }
    }
    table.samples = json!(samples);
    table
}
