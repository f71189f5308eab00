//! What a virtual machine costs before and beside its guest: the time from the
//! start of the monitor to the guest's first instruction, and the memory that the
//! monitor has resident beyond the guest's RAM while the guest's shell waits.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};
use weft_tests::boot::{Boot, Images, Monitor, USER_SPACE};
use weft_tests::guest::Guest;

use crate::results::{Goal, Table, digits, median};

/// Milliseconds.
const START_GOAL: Goal = Goal::AtMost(50.0);
/// Megabytes (10^6 bytes).
const RESIDENT_GOAL: Goal = Goal::AtMost(30.0);
/// Million instructions a second.
const INTERPRETED_GOAL: Goal = Goal::AtLeast(150.0);
/// Starts for each repetition: they are short, and vary with the host's load.
const STARTS: usize = 5;
/// Until the guest's first program runs.
const BOOT_BOUND: Duration = Duration::from_secs(60);
/// Until the shell answers, and how often it is asked.
const TRY: Duration = Duration::from_secs(1);
const TRIES: usize = 30;
/// Until what booting left behind has settled.
const SETTLE: Duration = Duration::from_secs(1);
/// Makes the software vCPU interpret everything.
const INTERPRET: &str = "WEFT_SOFT_INTERPRET";
/// What Weft's guest RAM is called among its mappings.
const GUEST_RAM: &str = "memfd:weft-guest-ram";

/// Samples by what was measured.
type Samples = BTreeMap<&'static str, Vec<f64>>;

const START_SMALL: &str = "start to the first instruction, small kernel";
const START_CLOUD: &str = "start to the first instruction, Debian's cloud kernel (bzImage, LZ4)";
const INTERPRETED: &str = "interpreter alone, boot of the small kernel";
const RESIDENT: &str = "resident beside guest RAM, generated code";
const RESIDENT_BOTH: &str = "the same with the process that looks after it";
const RESIDENT_INTERPRETED: &str = "resident beside guest RAM, interpreted only";

/// The table `vm-start`.
pub fn footprint(weft: &Path, images: &Images, work: &Path, repeat: usize) -> Result<Table> {
    let small = images.small(weft)?;
    let cloud = images.cloud(weft)?;
    let mut weft_samples = Samples::new();
    let mut qemu = Vec::new();
    for _ in 0..repeat {
        for (name, boot) in [(START_SMALL, &small), (START_CLOUD, &cloud)] {
            for _ in 0..STARTS {
                let start = start_ms(boot, work)?;
                weft_samples.entry(name).or_default().push(start);
            }
        }
        for _ in 0..STARTS {
            let speed = interpreted_mips(&small, work)?;
            weft_samples.entry(INTERPRETED).or_default().push(speed);
        }
        let generated = resident(&small, Monitor::Soft, false)?;
        let interpreted = resident(&small, Monitor::Soft, true)?;
        for (name, value) in [
            (RESIDENT, generated.machine_mb),
            (RESIDENT_BOTH, generated.machine_mb + generated.parent_mb),
            (RESIDENT_INTERPRETED, interpreted.machine_mb),
        ] {
            weft_samples.entry(name).or_default().push(value);
        }
        qemu.push(resident(&small, Monitor::Tcg, false)?.machine_mb);
    }
    Ok(table(&weft_samples, &qemu))
}

fn table(weft: &Samples, qemu: &[f64]) -> Table {
    let mut table = Table::new(
        "vm-start",
        "One vCPU on the software back end, 256 MiB (Debian's kernel: 512 MiB). The start is from the monitor's process to just before the guest's first instruction, as `weft vm run` reports it; when QEMU's vCPU runs cannot be seen from outside. Resident is everything the process has mapped but the guest's RAM, files' pages included, memory mapped twice counted once, while the guest's shell waits; medians. The interpreter is alone where nothing is translated, and counts what it executes (`WEFT_SOFT_INTERPRET=1`, `--deterministic`): from the first instruction to the power-off, decoding included.",
        &[
            "what",
            "weft, soft",
            "QEMU TCG, q35",
            "ratio",
            "goal",
            "met",
        ],
    );
    let qemu_mb = median(qemu);
    for (name, unit, goal) in [
        (START_SMALL, "ms", START_GOAL),
        (START_CLOUD, "ms", Goal::None),
        (INTERPRETED, "M instructions/s", INTERPRETED_GOAL),
        (RESIDENT, "MB", RESIDENT_GOAL),
        (RESIDENT_BOTH, "MB", Goal::None),
        (RESIDENT_INTERPRETED, "MB", RESIDENT_GOAL),
    ] {
        let value = weft.get(name).and_then(|samples| median(samples));
        let baseline = qemu_mb.filter(|_| unit == "MB");
        let with_unit = |value: Option<f64>| match value {
            Some(_) => format!("{} {unit}", digits(value)),
            None => digits(None),
        };
        let ratio = value
            .zip(baseline)
            .map(|(value, baseline)| value / baseline);
        let [goal, met] = goal.cells(value);
        table.rows.push(vec![
            name.to_string(),
            with_unit(value),
            with_unit(baseline),
            digits(ratio),
            goal,
            met,
        ]);
    }
    table.samples = json!({ "weft": weft, "qemu resident, MB": qemu });
    table
}

/// Boots, ends at once; what the monitor says of that run.
fn report(mut boot: Boot, options: &[&str], work: &Path) -> Result<Value> {
    let file = work.join("run.json");
    boot.options = vec!["--stats".into(), format!("json={}", file.display())];
    boot.options
        .extend(options.iter().map(|word| word.to_string()));
    boot.run(Monitor::Soft)?;
    Ok(serde_json::from_slice(&fs::read(&file)?)?)
}

fn start_ms(boot: &Boot, work: &Path) -> Result<f64> {
    let report = report(boot.running("true"), &[], work)?;
    let seconds = report["start_time_s"].as_f64();
    Ok(seconds.context("no start_time_s")? * 1e3)
}

/// Millions of instructions a second from the first to the power-off, decoding and
/// the host's page faults included.
fn interpreted_mips(boot: &Boot, work: &Path) -> Result<f64> {
    let mut boot = boot.running("true");
    boot.prefix = vec!["env".into(), format!("{INTERPRET}=1").into()];
    let report = report(boot, &["--deterministic"], work)?;
    let executed = report["counters"]["vcpu0.instructions"].as_f64();
    let seconds = report["run_time_s"].as_f64();
    let (executed, seconds) = executed.zip(seconds).context("no count of instructions")?;
    Ok(executed / seconds / 1e6)
}

/// What is typed before the shell reads is lost, so it is typed again.
fn wait_for_shell(guest: &mut Guest) -> Result<()> {
    let up = guest.wait_for(USER_SPACE, BOOT_BOUND);
    ensure!(up.is_some(), "it does not come up");
    for _ in 0..TRIES {
        guest.write("echo idle-$((40 + 2))\n")?;
        if guest.wait_for("idle-42", TRY).is_some() {
            return Ok(());
        }
    }
    bail!("no shell answers");
}

struct Resident {
    /// Of the process that runs the guest.
    machine_mb: f64,
    /// Of the one that looks after it.
    parent_mb: f64,
}

/// Boots to a shell that waits for input, and looks at the monitor's memory.
fn resident(boot: &Boot, monitor: Monitor, interpret: bool) -> Result<Resident> {
    let mut command = boot.command(monitor);
    if interpret {
        command.env(INTERPRET, "1");
    }
    let mut guest = Guest::start(&mut command)?;
    wait_for_shell(&mut guest).with_context(|| monitor.name())?;
    std::thread::sleep(SETTLE);
    let parent = guest.pid();
    let ram_kib = boot.memory_mib << 10;
    let beside = |pid: u32| -> Result<f64> {
        let path = PathBuf::from(format!("/proc/{pid}/smaps"));
        let maps = fs::read_to_string(&path)
            .with_context(|| format!("{}: run this as root", path.display()))?;
        Ok(beside_ram_kib(&maps, ram_kib) as f64 * 1024.0 / 1e6)
    };
    let resident = match (monitor, child(parent)?) {
        (Monitor::Tcg, _) => Resident {
            machine_mb: beside(parent)?,
            parent_mb: 0.0,
        },
        (_, Some(machine)) => Resident {
            machine_mb: beside(machine)?,
            parent_mb: beside(parent)?,
        },
        (_, None) => bail!("{}: no process runs the guest", monitor.name()),
    };
    guest.kill()?;
    Ok(resident)
}

/// The one child of a process.
fn child(pid: u32) -> Result<Option<u32>> {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
    Ok(children
        .split_whitespace()
        .next()
        .and_then(|child| child.parse().ok()))
}

/// A mapping in `/proc/PID/smaps`.
#[derive(Default)]
struct Mapping {
    shared: bool,
    inode: String,
    name: String,
    size_kib: u64,
    resident_kib: u64,
}

/// Resident KiB of everything but the guest's RAM, which is Weft's memory file of
/// that name, or the mapping of exactly its size. Of a file that is mapped shared
/// more than once (generated code: to be written, to be executed) the largest part
/// that one mapping has resident.
fn beside_ram_kib(maps: &str, ram_kib: u64) -> u64 {
    let mut shared: BTreeMap<&str, u64> = BTreeMap::new();
    let mut total = 0;
    let mappings = mappings(maps);
    for mapping in &mappings {
        if mapping.name.contains(GUEST_RAM) || mapping.size_kib == ram_kib {
            continue;
        }
        if mapping.shared && mapping.inode != "0" {
            let most = shared.entry(&mapping.inode).or_default();
            *most = mapping.resident_kib.max(*most);
        } else {
            total += mapping.resident_kib;
        }
    }
    total + shared.values().sum::<u64>()
}

fn mappings(maps: &str) -> Vec<Mapping> {
    let mut mappings: Vec<Mapping> = Vec::new();
    for line in maps.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match (words.as_slice(), mappings.last_mut()) {
            (["Size:", size, ..], Some(last)) => last.size_kib = size.parse().unwrap_or(0),
            (["Rss:", size, ..], Some(last)) => last.resident_kib = size.parse().unwrap_or(0),
            ([range, rights, _, _, inode, name @ ..], _) if !range.ends_with(':') => {
                mappings.push(Mapping {
                    shared: rights.ends_with('s'),
                    inode: (*inode).to_string(),
                    name: name.join(" "),
                    ..Mapping::default()
                });
            }
            _ => {}
        }
    }
    mappings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_ram_is_left_out_and_code_counted_once() {
        let maps = "\
7f00-7f10 rw-s 00000000 00:01 10  /memfd:weft-guest-ram (deleted)
Size:  262144 kB
Rss:    50000 kB
7f20-7f30 rw-s 00000000 00:01 11  /memfd:weft-code (deleted)
Size:   65536 kB
Rss:     4000 kB
VmFlags: rd wr sh
7f30-7f40 r-xs 00000000 00:01 11  /memfd:weft-code (deleted)
Size:   65536 kB
Rss:     3900 kB
7f50-7f60 r-xp 00001000 fe:00 77  /usr/bin/weft
Size:    4096 kB
Rss:      300 kB
7f70-7f80 rw-p 00000000 00:00 0
Size:    1024 kB
Rss:       20 kB
";
        assert_eq!(beside_ram_kib(maps, 1 << 18), 4320);
        let qemu = maps.replace("1024 kB", "262144 kB");
        assert_eq!(beside_ram_kib(&qemu, 1 << 18), 4300);
    }
}
