//! What a save costs a guest that writes all the time: one during which it goes on, one for
//! which it stands, and one of what changed since another.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use weft_tests::boot::{Boot, Images, Monitor};
use weft_tests::guest::Guest;

use super::migrate::{AT_WORK, gap_us};
use crate::program::Place;
use crate::results::{Goal, Table, digits, median};

/// What the guest writes to, in MB, and how many pages a second.
const MEGABYTES: u32 = 200;
const RATES: [u32; 3] = [2_000, 20_000, 100_000];
/// How long it writes.
const SECONDS: u32 = 4;
/// From its first write to the save, and from one save to the next.
const BEFORE: Duration = Duration::from_secs(1);
const BOUND: Duration = Duration::from_secs(120);

type Samples = BTreeMap<String, Vec<f64>>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// The machine goes on while its memory is written.
    Live,
    /// It stands until its memory is written.
    Standing,
    /// It is not saved: what the host and the guest's other work do to the figure.
    Without,
}

const MODES: [Mode; 3] = [Mode::Live, Mode::Standing, Mode::Without];

/// Figures of a row: key, text, unit, and the most that it may be as a ratio to the save for
/// which the machine stands.
const FIGURES: [(&str, &str, &str, Goal); 4] = [
    ("seconds", "total time", "s", Goal::None),
    ("pause", "pause of vCPUs", "ms", Goal::None),
    ("gap", "longest gap of the program", "ms", Goal::None),
    ("both", "gap and pause", "ms", Goal::AtMost(0.25)),
];

/// Of the table of what changed: key, text and unit.
const PARTS: [(&str, &str, &str); 3] = [
    ("megabytes", "written", "MB"),
    ("seconds", "total time", "s"),
    ("pause", "pause of vCPUs", "ms"),
];

/// A machine whose guest writes.
struct Machine<'a> {
    place: &'a Place,
    name: String,
    guest: Guest,
}

impl<'a> Machine<'a> {
    /// The guest has written for [`BEFORE`].
    fn start(place: &'a Place, small: &Boot, name: String, rate: u32) -> Result<Machine<'a>> {
        let mut boot = small.running(&format!("dirty {MEGABYTES} {rate} {SECONDS}"));
        boot.memory_mib = 512;
        let options = ["--growable", "yes", "--name", &name];
        boot.options.extend(options.map(Into::into));
        let mut command = boot.command(Monitor::Soft);
        let mut guest = Guest::start(command.env("XDG_RUNTIME_DIR", &place.work))?;
        let works = guest.wait_for(AT_WORK, BOUND);
        ensure!(works.is_some(), "the guest does not come up");
        std::thread::sleep(BEFORE);
        Ok(Machine { place, name, guest })
    }

    fn directory(&self, set: &str) -> PathBuf {
        self.place.work.join(format!("{}-{set}", self.name))
    }

    /// What the command reports.
    fn save(&self, directory: &Path, options: &[&str]) -> Result<Value> {
        let path = directory.to_str().context("a path that is no text")?;
        let words = [&["save", &self.name, path], options].concat();
        self.place.ask_machine(&words)
    }

    /// The longest gap that the program saw, in ms; all of its pages were right.
    fn finish(self) -> Result<f64> {
        Ok(gap_us(&self.guest.finish(BOUND)?)? / 1e3)
    }
}

fn number(report: &Value, field: &str) -> Result<f64> {
    let number = report[field].as_f64();
    number.with_context(|| format!("no {field} in {report}"))
}

fn of(samples: &Samples, key: &str) -> Option<f64> {
    median(samples.get(key).map_or(&[][..], Vec::as_slice))
}

fn with_unit(value: Option<f64>, unit: &str) -> String {
    value.map_or("—".into(), |value| {
        format!("{} {unit}", digits(Some(value)))
    })
}

fn load(rate: u32) -> String {
    format!("{MEGABYTES} MB, {rate} pages/s")
}

/// The table `vm-save-live`.
pub fn save_live(place: &Place, images: &Images, repeat: usize) -> Result<Table> {
    let small = images.small(&place.weft)?;
    let mut samples = Samples::new();
    for round in 0..repeat {
        for rate in RATES {
            for mode in MODES {
                let name = format!("live{round}-{rate}-{mode:?}");
                let machine = Machine::start(place, &small, name, rate)?;
                let directory = machine.directory("set");
                let report = match mode {
                    Mode::Live => Some(machine.save(&directory, &["--live"])?),
                    Mode::Standing => Some(machine.save(&directory, &[])?),
                    Mode::Without => None,
                };
                let mut add = |figure: &str, value: f64| {
                    let key = format!("{rate} {mode:?} {figure}");
                    samples.entry(key).or_default().push(value);
                };
                let gap = machine.finish()?;
                add("gap", gap);
                if let Some(report) = report {
                    let pause = 1e3 * number(&report, "pause_seconds")?;
                    add("pause", pause);
                    add("both", gap + pause);
                    add("seconds", number(&report, "seconds")?);
                    std::fs::remove_dir_all(&directory)?;
                }
            }
        }
    }
    Ok(live_table(&samples))
}

fn live_table(samples: &Samples) -> Table {
    let mut table = Table::new(
        "vm-save-live",
        "A Linux of one vCPU (one node that can grow, software vCPU, 512 MiB) is saved while its program writes to randomly chosen pages at the given rate: with `--live`, without it, and not at all, in alternation; medians. *Total time*: `weft vm save`, from its start to the complete set. The program measures the longest gap between two rounds of 1 ms, and checks every page at the end. The guest's clock stands while the machine does, so the program's gap does not contain the pause; *gap and pause* is their sum, which is the longest that anybody outside can have waited.",
        &[
            "what",
            "live",
            "standing",
            "ratio",
            "goal",
            "met",
            "not saved",
        ],
    );
    for rate in RATES {
        for (figure, what, unit, goal) in FIGURES {
            let values = MODES.map(|mode| of(samples, &format!("{rate} {mode:?} {figure}")));
            let [live, standing, without] = values;
            let ratio = live.zip(standing).map(|(live, standing)| live / standing);
            let mut row = vec![format!("{}: {what}", load(rate))];
            row.extend([
                with_unit(live, unit),
                with_unit(standing, unit),
                digits(ratio),
            ]);
            row.extend(goal.cells(ratio));
            row.push(with_unit(without, unit));
            table.rows.push(row);
        }
    }
    table.samples = json!(samples);
    table
}

/// The table `vm-save-since`.
pub fn save_since(place: &Place, images: &Images, repeat: usize) -> Result<Table> {
    let small = images.small(&place.weft)?;
    let mut samples = Samples::new();
    for round in 0..repeat {
        for rate in RATES {
            let name = format!("since{round}-{rate}");
            let machine = Machine::start(place, &small, name, rate)?;
            let [full, next] = ["full", "next"].map(|set| machine.directory(set));
            let base = full.to_str().context("a path that is no text")?;
            let mut save = |what: &str, directory: &Path, options: &[&str]| -> Result<()> {
                let report = machine.save(directory, options)?;
                for (figure, value) in [
                    ("megabytes", number(&report, "bytes")? / 1e6),
                    ("seconds", number(&report, "seconds")?),
                    ("pause", 1e3 * number(&report, "pause_seconds")?),
                ] {
                    let key = format!("{rate} {what} {figure}");
                    samples.entry(key).or_default().push(value);
                }
                Ok(())
            };
            save("full", &full, &["--live"])?;
            std::thread::sleep(BEFORE);
            save("since", &next, &["--live", "--since", base])?;
            machine.finish()?;
            for directory in [&full, &next] {
                std::fs::remove_dir_all(directory)?;
            }
        }
    }
    Ok(since_table(&samples))
}

fn since_table(samples: &Samples) -> Table {
    let mut table = Table::new(
        "vm-save-since",
        "The same machine is saved with `--live`, and a second after that with `--live --since`, so that only what changed is written; medians. The program writes to randomly chosen pages, some of them several times.",
        &["what", "full", "since the full one", "ratio"],
    );
    for rate in RATES {
        for (figure, what, unit) in PARTS {
            let parts = ["full", "since"];
            let [full, since] = parts.map(|part| of(samples, &format!("{rate} {part} {figure}")));
            let ratio = since.zip(full).map(|(since, full)| since / full);
            table.rows.push(vec![
                format!("{}: {what}", load(rate)),
                with_unit(full, unit),
                with_unit(since, unit),
                digits(ratio),
            ]);
        }
    }
    table.samples = json!(samples);
    table
}
