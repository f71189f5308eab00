//! The software vCPU against QEMU's TCG: the same kernel and images, one vCPU,
//! in alternation.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use serde_json::json;

use crate::results::{Goal, Table, digits, median};
use weft_tests::boot::{Boot, Images, Monitor, Run, marked};

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

/// Commands timed as a whole: name, what runs, goal.
const COMMANDS: [(&str, &str, Goal); 3] = [
    (
        "shell loop, 20,000 rounds",
        "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done",
        Goal::AtMost(2.0),
    ),
    (
        "sha256sum of 32 MB",
        "sha256sum /tmp/data >/dev/null",
        Goal::AtMost(2.0),
    ),
    (
        "gzip of 32 MB",
        "gzip -c /tmp/data >/dev/null",
        Goal::AtMost(2.0),
    ),
];

/// Half of it repeats, half does not, as files do.
const MAKE_DATA: &str = "dd if=/dev/urandom of=/tmp/half bs=1M count=8 2>/dev/null; \
    (cat /tmp/half; seq 1 2200000 | head -c 16777216; cat /tmp/half) >/tmp/data; ";

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
const PYTHON: &str = "python3: a benchmark";
/// Sieve, dictionary and string work: about two seconds under emulation.
const PYTHON_SCRIPT: &str = "python3 -c 's=0;d={};\nfor i in range(300000): d[i%997]=d.get(i%997,0)+i*i%7; s+=len(str(i))\nprint(s,sum(d.values()))'";

fn measure(boot: &Boot, monitor: Monitor, samples: &mut Samples) -> Result<Run> {
    let run = boot.run(monitor)?;
    for (name, seconds) in run.spans() {
        record(samples, &name, monitor, seconds);
    }
    for (name, (value, _)) in run.figures() {
        record(samples, &name, monitor, value);
    }
    Ok(run)
}

/// The table `vm-soft`.
pub fn soft(weft: &std::path::Path, images: &Images, repeat: usize) -> Result<Table> {
    let small = images.small(weft)?;
    let mut cloud = Boot::new(
        weft,
        &images.file("debian/vmlinuz")?,
        &images.file("debian/initrd.cpio.gz")?,
    );
    cloud.memory_mib = 512;
    let names: Vec<&str> = FIGURES.iter().map(|(name, ..)| *name).collect();
    let mut script = format!("bench {}; {MAKE_DATA}", names.join(" "));
    for (name, command, _) in COMMANDS {
        script += &marked(&name.replace(' ', "_"), command);
    }
    let busy = small.running(&script);
    let mut python = small.running("");
    let disk = images.file("debian/root.ext4").ok();
    if let Some(disk) = &disk {
        // A copy: the image stays as it was built.
        let copy = std::env::temp_dir().join(format!("weft-bench-{}.img", std::process::id()));
        std::fs::copy(disk, &copy).context("copying the root image")?;
        python.disks = vec![copy];
        python.memory_mib = 512;
        python.words = "root=/dev/vda rw".to_string();
        python.script = marked("python", PYTHON_SCRIPT);
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
        std::fs::remove_file(disk).context("removing the copied image")?;
    }
    Ok(table(&samples))
}

fn table(samples: &Samples) -> Table {
    let mut table = Table::new(
        "vm-soft",
        "A guest with one vCPU on the software vCPU, against the same kernel and images under QEMU's TCG, in alternation; boots and commands by the host's clock, the rest by the guest's.",
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
    for (what, _, goal) in COMMANDS {
        row(what, &what.replace(' ', "_"), "s", goal);
    }
    row(PYTHON, "python", "s", Goal::AtMost(2.0));
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
