//! The software vCPU against QEMU's TCG: the same kernel and images, one vCPU,
//! in alternation.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use serde_json::json;

use crate::program::Place;
use crate::results::{Goal, Table, digits, median};
use weft_tests::boot::{Boot, Disk, Images, Monitor, Run};
use weft_tests::machines::copy_sparse;

/// Figures of the guest's `bench` that cost a time, with their goals.
const FIGURES: [(&str, &str, Goal); 11] = [
    ("getpid", "getpid", Goal::AtMost(1.2)),
    ("page_fault", "page fault", Goal::AtMost(1.2)),
    ("fork_exit_wait", "fork, exit, wait", Goal::AtMost(1.2)),
    ("fork_exec_wait", "fork, exec, wait", Goal::AtMost(1.2)),
    ("pipe_round_trip", "pipe, there and back", Goal::None),
    ("spin_100M", "spinning", Goal::None),
    ("sort_4096", "sorting numbers", Goal::None),
    (
        "mandelbrot_100k",
        "floating point: Mandelbrot",
        Goal::AtMost(2.0),
    ),
    ("nbody_10k", "floating point: n-body", Goal::AtMost(2.0)),
    ("pointer_chase", "chasing pointers", Goal::None),
    ("clock_gettime", "reading the clock", Goal::None),
];

/// Whole programs, by the names that the guest's `workloads` prints.
const PROGRAMS: [(&str, &str, Goal); 4] = [
    (
        "shell_loop_100k",
        "shell loop of 100,000 rounds",
        Goal::AtMost(2.0),
    ),
    ("sha256sum_32M", "sha256sum of 32 MB", Goal::AtMost(2.0)),
    ("gzip_32M", "gzip of 32 MB", Goal::AtMost(2.0)),
    ("shell_forks_200", "200 subshells", Goal::None),
];
/// What needs the Debian image.
const PYTHON: (&str, &str, Goal) = (
    "python_objects",
    "python3: objects and strings",
    Goal::AtMost(2.0),
);

/// Times by what was measured: samples of Weft, samples of the baseline.
type Samples = BTreeMap<String, (Vec<f64>, Vec<f64>)>;

fn record(samples: &mut Samples, name: &str, monitor: Monitor, value: f64) {
    let entry = samples.entry(name.to_string()).or_default();
    match monitor {
        Monitor::Tcg => entry.1.push(value),
        _ => entry.0.push(value),
    }
}

const BOOT: &str = "boot to user space";
const BOOT_CLOUD: &str = "boot of Debian's cloud kernel to user space";

fn measure(boot: &Boot, monitor: Monitor, samples: &mut Samples) -> Result<Run> {
    let run = boot.run(monitor)?;
    for (name, (value, _)) in run.figures() {
        record(samples, &name, monitor, value);
    }
    Ok(run)
}

/// The table `vm-soft`.
pub fn soft(place: &Place, images: &Images, repeat: usize) -> Result<Table> {
    let weft = &place.weft;
    let small = images.small(weft)?;
    let cloud = images.cloud(weft)?;
    let names: Vec<&str> = FIGURES.iter().map(|(name, ..)| *name).collect();
    let programs: Vec<&str> = PROGRAMS.iter().map(|(name, ..)| *name).collect();
    let busy = small.running(&format!(
        "bench {}; workloads {}",
        names.join(" "),
        programs.join(" ")
    ));
    let mut python = small.running("");
    let disk = images.file("debian/root.ext4").ok();
    if let Some(disk) = &disk {
        let copy = place.work.join("root.ext4");
        copy_sparse(disk, &copy)?;
        python.disks = vec![Disk::new(&copy)];
        python.memory_mib = 512;
        python.words = "root=/dev/vda rw".to_string();
        python.script = format!("workloads {}", PYTHON.0);
    }
    let mut samples = Samples::new();
    for _ in 0..repeat {
        for monitor in [Monitor::Soft, Monitor::Tcg] {
            let run = small.running("true").run(monitor)?;
            let at = run.user_space_s().context("no first line")?;
            record(&mut samples, BOOT, monitor, at);
            let run = cloud.running("true").run(monitor)?;
            let at = run.user_space_s().context("no first line")?;
            record(&mut samples, BOOT_CLOUD, monitor, at);
            measure(&busy, monitor, &mut samples)?;
            if disk.is_some() {
                measure(&python, monitor, &mut samples)?;
            }
        }
    }
    for disk in &python.disks {
        std::fs::remove_file(&disk.file).context("removing the copied image")?;
    }
    Ok(table(&samples))
}

fn table(samples: &Samples) -> Table {
    let mut table = Table::new(
        "vm-soft",
        "A guest with one vCPU on the software vCPU, against the same kernel and images under QEMU's TCG, in alternation; boots by the host's clock, from the start of the monitor, the rest by the guest's.",
        &["what", "weft, soft", "QEMU TCG", "ratio", "goal", "met"],
    );
    let mut row = |what: &str, key: &str, unit: &str, goal: Goal| {
        let (weft, baseline) = samples.get(key).cloned().unwrap_or_default();
        let (weft, baseline) = (median(&weft), median(&baseline));
        let ratio = weft.zip(baseline).map(|(weft, baseline)| weft / baseline);
        let [goal, met] = goal.cells(ratio);
        let with_unit = |value| format!("{} {unit}", digits(value));
        table.rows.push(vec![
            what.to_string(),
            with_unit(weft),
            with_unit(baseline),
            digits(ratio),
            goal,
            met,
        ]);
    };
    row(BOOT, BOOT, "s", Goal::AtMost(1.0));
    row(BOOT_CLOUD, BOOT_CLOUD, "s", Goal::None);
    for (key, what, goal) in FIGURES {
        row(what, key, unit_of(key), goal);
    }
    for (key, what, goal) in PROGRAMS.into_iter().chain([PYTHON]) {
        row(what, key, "s", goal);
    }
    table.samples = json!(samples);
    table
}

/// The unit in which the guest's `bench` prints a figure.
fn unit_of(key: &str) -> &'static str {
    match key {
        "spin_100M" => "s",
        "sort_4096" | "mandelbrot_100k" | "nbody_10k" => "ms",
        "pointer_chase" => "ns",
        _ => "µs",
    }
}
