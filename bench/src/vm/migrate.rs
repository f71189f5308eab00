//! What a live migration costs the guest, against QEMU's, of the same guest.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use weft_tests::boot::{Boot, Images, Monitor};
use weft_tests::guest::{Ended, Guest};

use super::aggregate::number_after;
use super::qmp::Qmp;
use crate::program::Place;
use crate::results::{Goal, Table, digits, median};

/// What the guest writes to while it moves.
struct Load {
    what: &'static str,
    megabytes: u32,
    pages_per_s: u32,
}

const LOADS: [Load; 4] = [
    Load {
        what: "idle",
        megabytes: 1,
        pages_per_s: 100,
    },
    Load {
        what: "200 MB, 2,000 pages/s",
        megabytes: 200,
        pages_per_s: 2_000,
    },
    Load {
        what: "200 MB, 20,000 pages/s",
        megabytes: 200,
        pages_per_s: 20_000,
    },
    Load {
        what: "200 MB, 100,000 pages/s",
        megabytes: 200,
        pages_per_s: 100_000,
    },
];

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Mode {
    /// Weft's post-copy.
    Weft,
    /// Weft's default.
    Hybrid,
    /// Weft's `--mode pre-copy`.
    Ahead,
    PreCopy,
    PostCopy,
    /// Weft without a migration: what the machine and its other work do to the figure.
    Still,
}

const MODES: [Mode; 6] = [
    Mode::Weft,
    Mode::Hybrid,
    Mode::Ahead,
    Mode::PreCopy,
    Mode::PostCopy,
    Mode::Still,
];

impl Mode {
    /// The option of `weft vm consolidate`.
    fn option(self) -> Option<&'static str> {
        match self {
            Mode::Weft => Some("post-copy"),
            Mode::Hybrid => Some("hybrid"),
            Mode::Ahead => Some("pre-copy"),
            Mode::PreCopy | Mode::PostCopy | Mode::Still => None,
        }
    }
}

/// How long the guest writes.
const SECONDS: u32 = 5;
/// From the guest's first write to the start of the migration.
const BEFORE: Duration = Duration::from_secs(1);
/// From the start to QEMU's post-copy.
const POST_COPY_AFTER: Duration = Duration::from_millis(300);
/// The guest boots, writes and checks within this.
const BOUND: Duration = Duration::from_secs(120);
pub(super) const AT_WORK: &str = "dirty: at work";

/// Figures of a row: key, text, unit, and the most that it may be as a ratio to QEMU's
/// better mode.
const FIGURES: [(&str, &str, &str, Goal); 5] = [
    ("total", "total time", "s", Goal::AtMost(1.0)),
    ("gap", "longest gap of the program", "ms", Goal::AtMost(1.0)),
    ("pause", "pause of vCPUs", "ms", Goal::AtMost(1.0)),
    ("both", "gap and pause", "ms", Goal::AtMost(1.0)),
    ("carried", "pushed, or carried by QEMU", "MB", Goal::None),
];

type Samples = BTreeMap<String, Vec<f64>>;

fn key(load: usize, mode: Mode, figure: &str) -> String {
    format!("{load} {mode:?} {figure}")
}

/// The table `vm-migrate`.
pub fn migrate(place: &Place, images: &Images, repeat: usize) -> Result<Table> {
    let small = images.small(&place.weft)?;
    let mut samples = Samples::new();
    let mut failures = BTreeMap::new();
    for round in 0..repeat {
        for (number, load) in LOADS.iter().enumerate() {
            for mode in MODES {
                let mut boot = small.running(&format!(
                    "dirty {} {} {SECONDS}",
                    load.megabytes, load.pages_per_s
                ));
                boot.memory_mib = 512;
                let name = format!("m{round}-{number}-{mode:?}");
                let (figures, ended) = match mode {
                    Mode::Weft | Mode::Hybrid | Mode::Ahead | Mode::Still => {
                        weft(place, boot, &name, mode)?
                    }
                    Mode::PreCopy | Mode::PostCopy => qemu(place, &boot, &name, mode)?,
                };
                let gap = gap_us(&ended);
                if gap.is_err() && matches!(mode, Mode::PreCopy | Mode::PostCopy) {
                    eprintln!("{mode:?}, {}: the guest did not survive", load.what);
                    *failures.entry(mode).or_insert(0) += 1;
                    continue;
                }
                let mut add = |figure: &str, value| {
                    let samples = samples.entry(key(number, mode, figure)).or_default();
                    samples.push(value);
                };
                let gap = gap? / 1e3;
                add("gap", gap);
                for (figure, value) in figures {
                    add(figure, value);
                    if figure == "pause" {
                        add("both", gap + value);
                    }
                }
            }
        }
    }
    Ok(table(&samples, &failures))
}

/// The longest gap that the program saw, all of whose pages were right.
pub(super) fn gap_us(ended: &Ended) -> Result<f64> {
    let line = ended
        .line("dirty: right")
        .with_context(|| format!("the pages were not right: {}", ended.tail(12)))?;
    number_after(&line.text, "gap").context("no gap")
}

type Figures = Vec<(&'static str, f64)>;

/// One node moves to another that has joined before, as QEMU's other process has started.
fn weft(place: &Place, mut boot: Boot, name: &str, mode: Mode) -> Result<(Figures, Ended)> {
    let options = ["--growable", "yes", "--name", name];
    boot.options.extend(options.map(Into::into));
    let mut command = boot.command(Monitor::Soft);
    let mut guest = Guest::start(command.env("XDG_RUNTIME_DIR", &place.work))?;
    let mut figures = Figures::new();
    let works = guest.wait_for(AT_WORK, BOUND);
    ensure!(works.is_some(), "the guest does not come up");
    if let Some(option) = mode.option() {
        place.ask_machine(&["grow", name, "--memory", "512M"])?;
        std::thread::sleep(BEFORE);
        let job = place.ask_machine(&["consolidate", name, "1", "--mode", option])?;
        let of = |figure: &str| {
            let value = job["migrated"][figure].as_f64();
            value.with_context(|| format!("no {figure} in {job}"))
        };
        figures = vec![
            ("total", of("total_s")?),
            ("pause", of("pause_ns")? / 1e6),
            ("carried", (of("bytes")? + of("ahead_bytes")?) / 1e6),
        ];
        for part in ["paused", "copied", "rested", "relocated", "stopped"] {
            if let Some(ns) = job["migrated"]["switch"][format!("{part}_ns")].as_f64() {
                figures.push((part, ns / 1e6));
            }
        }
    }
    Ok((figures, guest.finish(BOUND)?))
}

/// One process moves to another by TCP, with no limit of bandwidth.
fn qemu(place: &Place, boot: &Boot, name: &str, mode: Mode) -> Result<(Figures, Ended)> {
    let socket = |side: &str| place.work.join(format!("{name}-{side}"));
    let start = |socket: &PathBuf, more: &[&str]| -> Result<Guest> {
        let mut command = boot.command(Monitor::Tcg);
        let server = format!("unix:{},server=on,wait=off", socket.display());
        Guest::start(command.args(["-qmp", &server]).args(more))
    };
    let (old_socket, new_socket) = (socket("old"), socket("new"));
    let mut old = start(&old_socket, &[])?;
    let new = start(&new_socket, &["-incoming", "defer"])?;
    let (mut from, mut to) = (Qmp::connect(&old_socket)?, Qmp::connect(&new_socket)?);
    if mode == Mode::PostCopy {
        let postcopy = json!({
            "capabilities": [{ "capability": "postcopy-ram", "state": true }]
        });
        for side in [&mut from, &mut to] {
            side.execute("migrate-set-capabilities", &postcopy)?;
        }
    }
    let limits = json!({ "max-bandwidth": 100_000_000_000_u64, "downtime-limit": 100 });
    from.execute("migrate-set-parameters", &limits)?;
    let address = format!("tcp:127.0.0.1:{}", free_port()?);
    to.execute("migrate-incoming", &json!({ "uri": address }))?;
    let works = old.wait_for(AT_WORK, BOUND);
    ensure!(works.is_some(), "the guest does not come up under QEMU");
    std::thread::sleep(BEFORE);
    from.execute("migrate", &json!({ "uri": address }))?;
    if mode == Mode::PostCopy {
        std::thread::sleep(POST_COPY_AFTER);
        // Refused when it has completed already.
        let _ = from.execute("migrate-start-postcopy", &json!({}));
    }
    let report = from.wait_until_migrated(BOUND)?;
    let ended = new.finish(BOUND)?;
    old.kill()?;
    let of = |value: &Value, figure: &str| {
        let value = value.as_f64();
        value.with_context(|| format!("no {figure} in {report}"))
    };
    let total_ms = of(&report["total-time"], "total time")?;
    let mut figures = vec![
        ("total", total_ms / 1e3),
        ("carried", of(&report["ram"]["transferred"], "bytes")? / 1e6),
    ];
    // QEMU 7.2 reports hours now and then after a post-copy.
    let downtime_ms = of(&report["downtime"], "downtime")?;
    if downtime_ms <= total_ms {
        figures.push(("pause", downtime_ms));
    }
    for socket in [old_socket, new_socket] {
        // The other process has removed it, or has not.
        let _ = std::fs::remove_file(socket);
    }
    Ok((figures, ended))
}

fn free_port() -> Result<u16> {
    Ok(std::net::TcpListener::bind(("127.0.0.1", 0))?
        .local_addr()?
        .port())
}

fn table(samples: &Samples, failures: &BTreeMap<Mode, u32>) -> Table {
    let failed = |mode| failures.get(&mode).copied().unwrap_or(0);
    let about = format!(
        "A Linux of one vCPU (512 MiB) moves while it runs from one process to another of this host, which was started before: a node of Weft (software vCPU, links over TCP without encryption) and QEMU's TCG (TCP, no limit of bandwidth, a downtime limit of 100 ms), in alternation; medians. Its program writes to randomly chosen pages at the given rate, measures the longest gap between two rounds of 1 ms, and checks every page at the end. The guest's clock stands while the machine does, under QEMU too, so the program's gap does not contain the pause; *gap and pause* is their sum, which is the longest that anybody outside can have waited. QEMU's post-copy begins after 0.3 s. *Pushed*: sent ahead and drained, without the pages that the guest's faults and prefetches asked for, which Weft's report does not count. *Without*: Weft, no migration. The ratios are to QEMU's better mode; goals are for the hybrid mode. Guests of QEMU that did not survive, and have no figures: {} of pre-copy, {} of post-copy.",
        failed(Mode::PreCopy),
        failed(Mode::PostCopy)
    );
    let mut table = Table::new(
        "vm-migrate",
        &about,
        &[
            "what",
            "weft post-copy",
            "ratio",
            "weft hybrid",
            "ratio",
            "goal",
            "met",
            "weft pre-copy",
            "ratio",
            "QEMU pre-copy",
            "QEMU post-copy",
            "without",
        ],
    );
    for (number, load) in LOADS.iter().enumerate() {
        for (figure, what, unit, goal) in FIGURES {
            let of = |mode| {
                let found = samples.get(&key(number, mode, figure));
                median(found.map_or(&[][..], Vec::as_slice))
            };
            let values = MODES.map(of);
            let [weft, hybrid, ahead, pre_copy, post_copy, _] = values;
            let better = [pre_copy, post_copy]
                .into_iter()
                .flatten()
                .min_by(f64::total_cmp);
            let to_better = |value: Option<f64>| value.zip(better).map(|(v, better)| v / better);
            let [ratio, hybrid_ratio, ahead_ratio] = [weft, hybrid, ahead].map(to_better);
            let [weft, hybrid, ahead, pre_copy, post_copy, still] = values
                .map(|value| value.map_or("—".into(), |v| format!("{} {unit}", digits(Some(v)))));
            let mut row = vec![format!("{}: {what}", load.what)];
            row.extend([weft, digits(ratio), hybrid, digits(hybrid_ratio)]);
            row.extend(goal.cells(hybrid_ratio));
            row.extend([ahead, digits(ahead_ratio), pre_copy, post_copy, still]);
            table.rows.push(row);
        }
    }
    let gap_at = |mode| {
        let found = samples.get(&key(2, mode, "gap"));
        median(found.map_or(&[][..], Vec::as_slice))
    };
    let hybrid_gap = gap_at(Mode::Hybrid);
    let mut row = vec![format!("{}: longest gap, in ms", LOADS[2].what)];
    row.extend([digits(gap_at(Mode::Weft)), "—".into()]);
    row.extend([digits(hybrid_gap), "—".into()]);
    row.extend(Goal::AtMost(20.0).cells(hybrid_gap));
    row.extend([digits(gap_at(Mode::Ahead)), "—".into()]);
    row.extend(["—", "—", "—"].map(Into::into));
    table.rows.push(row);
    table.samples = json!(samples);
    table
}
