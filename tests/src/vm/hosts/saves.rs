//! Machines over hosts are saved while they run, with nodes that came later, and continue on
//! other hosts. The guest writes to its pages and checks each of them at the end.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::home::at_work;
use super::migration::judge_writes;
use super::{BOUND, LONG_BOUND, Site, wait_until};
use crate::guest::Guest;

type Check = fn(&mut Site<'_>) -> Result<String>;

/// By name: hosts beside the launcher's, and the test.
pub(super) const CHECKS: [(&str, usize, Check); 1] = [(
    "live save, of nodes on hosts, continued on others",
    2,
    elsewhere,
)];

/// Those whose machine leaves the host that has the files.
pub(super) const LEAVING_CHECKS: [(&str, usize, Check); 1] =
    [("saved, continued, and gone from the files at once", 2, gone)];

impl Site<'_> {
    /// Saves the machine `m` while it runs; the report.
    fn save(&self, directory: &Path, options: &[&str]) -> Result<Value> {
        let path = directory.to_string_lossy();
        let words = ["vm", "save", "m", &path, "--live", "--json"];
        self.ask(&[&words[..], options].concat())
    }

    /// A machine that continues a checkpoint, until its guest has checked its pages.
    fn continued(&self, directory: &Path, options: &[&str]) -> Result<()> {
        let mut command = self.weft(&["vm", "run", "--name", "c", "--restore"]);
        let guest = Guest::start(command.arg(directory).args(options))?;
        judge_writes(&guest.finish(LONG_BOUND)?).with_context(|| format!("with {options:?}"))?;
        self.all_given_back()
    }
}

fn elsewhere(site: &mut Site<'_>) -> Result<String> {
    let words = [
        "--name", "m", "--on", "h1", "--cpus", "2", "--memory", "256M",
    ];
    let mut guest = Guest::start(&mut site.machine_with(&words, "dirty 40 10000 4")?)?;
    ensure!(
        guest.wait_for("dirty: at work", BOUND).is_some(),
        "no boot: {}",
        guest.finish(Duration::ZERO)?.stderr
    );
    let set = |name: &str| -> PathBuf { site.bench.directory.join(name) };
    let [first, second] = [set("first"), set("second")];
    let whole = site.save(&first, &[])?;
    ensure!(whole["nodes"] == 2, "{whole}");
    // A node that joined has a file, too; what moved to it is written again.
    site.ask(&["vm", "grow", "m", "--on", "h2=128M", "--json"])?;
    site.ask(&["vm", "move", "m", "--vcpu", "1", "--to", "2", "--json"])?;
    let base = first.to_string_lossy();
    let rest = site.save(&second, &["--since", &base])?;
    ensure!(rest["nodes"] == 3, "{rest}");
    let number = |report: &Value, name: &str| report[name].as_u64().unwrap_or(0);
    ensure!(
        number(&rest, "unchanged") > 0 && number(&rest, "bytes") < number(&whole, "bytes"),
        "{rest}"
    );
    judge_writes(&guest.finish(LONG_BOUND)?)?;
    site.all_given_back()?;
    site.continued(
        &first,
        &["--on", "h2", "--cpus", "1,1", "--memory", "64M,192M"],
    )?;
    let three = [
        "--on",
        "h1,h2",
        "--cpus",
        "1,1,0",
        "--memory",
        "96M,96M,64M",
    ];
    site.continued(&second, &three)?;
    site.continued(&second, &[])?;
    let pause = rest["pause_seconds"].as_f64().unwrap_or(0.0);
    Ok(format!("paused for {:.1} ms", 1e3 * pause))
}

/// The home of a machine that continues leaves for another host while a third still reads its
/// pages: they have all of them when it is gone, so the files may go, too.
fn gone(site: &mut Site<'_>) -> Result<String> {
    let shape = ["--on", "h1", "--cpus", "1,1", "--memory", "128M,128M"];
    site.start_shaped(&site.home, &shape, "dirty 60 3000 6; read word")?;
    at_work(site)?;
    let set = site.bench.directory.join("set");
    let path = set.to_string_lossy();
    site.ask(&["vm", "save", "m", &path, "--stop", "--json"])?;
    site.all_given_back()?;
    let mut left_ms = Vec::new();
    let halves = "128M,128M";
    // The last one keeps its second node, whose host has the home then.
    for (cpus, memory, to, home) in [
        ("1,1", "64M,192M", "h1=260M", 1),
        ("2,0", halves, "h1=260M", 1),
        ("1,1", "64M,192M", "1=140M,h1=140M", 2),
    ] {
        let words = ["vm", "start", "--name", "m", "--restore", &path];
        let shape = ["--on", "h2", "--cpus", cpus, "--memory", memory];
        let output = site.weft(&[&words[..], &shape].concat()).output()?;
        ensure!(output.status.success(), "{output:?}");
        let begun = Instant::now();
        let view = site.ask_at(0, &["vm", "migrate", "m", to, "--json"])?;
        let moved = &view["migrated"];
        ensure!(moved["home"]["host"] == format!("h{home}"), "{view}");
        wait_until("the old host to be left", || {
            Ok(site.machines_at(0)?.is_empty())
        })?;
        left_ms.push(begun.elapsed().as_millis());
        let mut console = site.console_at(home)?;
        let right = console.wait_for("dirty: right", LONG_BOUND);
        ensure!(right.is_some(), "the guest's pages are not right");
        site.stop_at(home)?;
        console.finish(BOUND)?;
        site.all_given_back()?;
    }
    Ok(format!("left after {left_ms:?} ms"))
}
