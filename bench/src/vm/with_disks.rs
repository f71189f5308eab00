//! How long a machine takes to leave its host for good with a copy of its disk.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::json;
use weft_tests::boot::{Images, Monitor};
use weft_tests::namespace;

use super::ping::{BETWEEN, BOUND, LAUNCHER, NAMES, Site};
use crate::program::Place;
use crate::results::{Goal, Table, digits, median};

/// Size of the disk in MiB. It has no block of zeroes.
const DISK_MIB: usize = 512;
const READY: &str = "disk: ready";
/// What the guest does with its disk meanwhile: what the rows are called, and the script.
const LOADS: [(&str, &str); 2] = [
    ("no writes", "sleep 1"),
    (
        "writes",
        "dd if=/dev/zero of=/dev/vda bs=64k count=1024 conv=fsync 2>/dev/null; usleep 100000",
    ),
];

type Samples = BTreeMap<String, Vec<f64>>;

/// The table `vm-with-disks`.
pub fn with_disks(place: &Place, images: &Images, repeat: usize) -> Result<Table> {
    if let Some(why) = namespace::missing() {
        bail!("{why}");
    }
    let mut samples = Samples::new();
    for round in 0..repeat {
        for (load, script) in LOADS {
            let name = format!("with-disks-{round}-{}", load.len());
            let site = Site::new(place, &name, &[LAUNCHER, LAUNCHER + 1])?;
            let image = site.disks(LAUNCHER).join("disk");
            fill(&image)?;
            let mut add = |figure: &str, value: f64| {
                let key = format!("{load} {figure}");
                samples.entry(key).or_default().push(value);
            };
            add("cp", copy(&image)?);
            let moved = leave(&site, images, &image, script)?;
            site.clear()?;
            for (figure, value) in moved {
                add(figure, value);
            }
        }
    }
    Ok(table(&samples))
}

fn fill(image: &Path) -> Result<()> {
    let mut random = vec![0; 1 << 20];
    File::open("/dev/urandom")?.read_exact(&mut random)?;
    let mut file = File::create(image)?;
    for number in 0..DISK_MIB {
        random[0] = number as u8;
        file.write_all(&random)?;
    }
    file.sync_all()?;
    Ok(fs::set_permissions(
        image,
        fs::Permissions::from_mode(0o666),
    )?)
}

/// Seconds of `dd` with its `fsync`, to a file beside it.
fn copy(image: &Path) -> Result<f64> {
    let other = image.with_extension("copy");
    let begun = Instant::now();
    let status = Command::new("dd")
        .arg(format!("if={}", image.display()))
        .arg(format!("of={}", other.display()))
        .args(["bs=1M", "conv=fsync", "status=none"])
        .status()?;
    let seconds = begun.elapsed().as_secs_f64();
    ensure!(status.success(), "dd: {status}");
    fs::remove_file(other)?;
    Ok(seconds)
}

/// A machine leaves the launcher's host with its disk: its figures.
fn leave(
    site: &Site<'_>,
    images: &Images,
    image: &Path,
    script: &str,
) -> Result<[(&'static str, f64); 4]> {
    let script = format!(
        "echo {READY}; (while [ ! -e /tmp/stop ]; do {script}; done) & \
         read line; touch /tmp/stop; wait; echo stopped"
    );
    let mut boot = images.small(&site.place.weft)?.running(&script);
    boot.prefix = site.star.prefix(LAUNCHER);
    boot.memory_mib = 256;
    let disk = image.display().to_string();
    let options = ["--name", "m", "--disk", &disk];
    boot.options.extend(options.map(Into::into));
    site.start(&boot.command(Monitor::Soft))?;
    let ready = site.console(LAUNCHER)?.wait_for(READY, BOUND);
    ensure!(ready.is_some(), "the guest does not come up");
    // It writes meanwhile.
    std::thread::sleep(BETWEEN);
    let to = NAMES[LAUNCHER + 1];
    let report = site.ask(LAUNCHER, &["migrate", "m", to, "--with-disks"])?;
    ensure!(report["home"]["host"] == to, "node 0 stays: {report}");
    let mut last = site.console(LAUNCHER + 1)?;
    last.write("end\n")?;
    let ended = last.finish(BOUND)?;
    ensure!(ended.line("stopped").is_some(), "{}", ended.tail(12));
    let copied = fs::metadata(site.disks(LAUNCHER + 1).join("disk"));
    ensure!(copied.context("no copy")?.len() == (DISK_MIB as u64) << 20);
    let of = |name: &str| report[name].as_f64().unwrap_or(0.0);
    let home = |name: &str| report["home"][name].as_f64().unwrap_or(0.0);
    Ok([
        ("total", of("total_s")),
        ("switch", of("pause_ns") / 1e6),
        ("home", home("stopped_ns") / 1e6),
        ("pause", home("paused_ns") / 1e6),
    ])
}

fn table(samples: &Samples) -> Table {
    let mut table = Table::new(
        "vm-with-disks",
        "A Linux of one vCPU (256 MiB, software vCPU) leaves its host for good with `weft vm migrate --with-disks`: its disk of 512 MiB without zeroes is copied to the other host while it runs. The hosts are network namespaces of this machine with a sealed link, and both files are on one disk. The baseline copies the file on that disk: `dd bs=1M conv=fsync`, in the same run. *Total*: the whole command, with the machine's memory. *Switch* and *home*: how long the guest stood, as in `vm-home`; *its pause*: the part of *home* until all vCPUs and devices stand, which waits for requests of the disk that are under way. *Writes*: the guest writes 64 MB to the disk again and again, with a flush after each. Medians.",
        &[
            "what",
            "moves",
            "total",
            "dd",
            "total ÷ dd",
            "switch",
            "home",
            "its pause",
            "goal",
            "met",
        ],
    );
    for (load, _) in LOADS {
        let all = |figure: &str| {
            let found = samples.get(&format!("{load} {figure}"));
            found.map_or(&[][..], Vec::as_slice)
        };
        let of = |figure: &str| median(all(figure));
        let ratio = of("total").zip(of("cp")).map(|(total, cp)| total / cp);
        let mut row = vec![
            load.into(),
            all("total").len().to_string(),
            format!("{} s", digits(of("total"))),
            format!("{} s", digits(of("cp"))),
            digits(ratio),
            format!("{} ms", digits(of("switch"))),
            format!("{} ms", digits(of("home"))),
            format!("{} ms", digits(of("pause"))),
        ];
        row.extend(Goal::None.cells(ratio));
        table.rows.push(row);
    }
    table.samples = json!(samples);
    table
}
