//! Machines over hosts are saved while they run, with nodes that came later, and continue on
//! other hosts. The guest writes to its pages and checks each of them at the end.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::home::at_work;
use super::migration::judge_writes;
use super::{BOUND, LONG_BOUND, Site, wait_until};
use crate::guest::Guest;

type Check = fn(&mut Site<'_>) -> Result<String>;

/// By name: hosts beside the launcher's, and the test.
pub(super) const CHECKS: [(&str, usize, Check); 4] = [
    (
        "live save, of nodes on hosts, continued on others",
        2,
        elsewhere,
    ),
    ("saved to a disk of each host", 2, own_disks),
    ("saved to a directory that hosts share", 1, shared),
    ("a save to each host that fails leaves no file", 1, given_up),
];

/// Those whose machine leaves the host that has the files.
pub(super) const LEAVING_CHECKS: [(&str, usize, Check); 2] = [
    ("saved, continued, and gone from the files at once", 2, gone),
    ("saved to a disk of each host by a home that came", 2, moved),
];

impl Site<'_> {
    /// Saves the machine `m` while it runs; the report.
    pub(super) fn save(&self, directory: &Path, options: &[&str]) -> Result<Value> {
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

/// Three nodes, each with a file on its own host: the machine continues where hosts have them, in
/// any order of nodes, and after a copy of the files without the hosts.
fn own_disks(site: &mut Site<'_>) -> Result<String> {
    let words = [
        "--name",
        "m",
        "--on",
        "h1,h2",
        "--cpus",
        "1,1,1",
        "--memory",
        "96M,64M,96M",
    ];
    let mut guest = Guest::start(&mut site.machine_with(&words, "dirty 40 10000 4")?)?;
    ensure!(
        guest.wait_for("dirty: at work", BOUND).is_some(),
        "no boot: {}",
        guest.finish(Duration::ZERO)?.stderr
    );
    let [first, second] = ["first", "second"].map(|name| site.own_disks(0).join(name));
    let whole = site.save(&first, &["--each-host"])?;
    ensure!(whole["hosts"] == json!(["h1", "h2"]), "{whole}");
    let base = first.to_string_lossy();
    let rest = site.save(&second, &["--each-host", "--since", &base])?;
    ensure!(rest["unchanged"].as_u64() > Some(0), "{rest}");
    judge_writes(&guest.finish(LONG_BOUND)?)?;
    site.all_given_back()?;
    for set in ["first", "second"] {
        let here = files(&site.own_disks(0).join(set))?;
        let wanted = ["machine", "manifest", "pages.0", "tables.1", "tables.2"];
        ensure!(here == wanted, "{here:?}");
        for host in [1, 2] {
            let there = files(&site.own_disks(host).join(set))?;
            ensure!(there == [format!("pages.{host}")], "h{host}: {there:?}");
        }
    }
    let three = |hosts, cpus, memory| ["--on", hosts, "--cpus", cpus, "--memory", memory];
    site.continued(&first, &three("h1,h2", "1,1,1", "96M,64M,96M"))?;
    site.continued(&second, &three("h2,h1", "1,2,0", "160M,64M,32M"))?;
    let mut alone = site.weft(&["vm", "run", "--name", "c", "--on", "h1", "--restore"]);
    let refused = alone.arg(&second).output()?;
    let said = String::from_utf8_lossy(&refused.stderr);
    ensure!(
        !refused.status.success() && said.contains("pages.2 is on h2: give the machine a node"),
        "{said}"
    );
    // A host leaves as soon as no other reads what it has.
    let path = second.to_string_lossy();
    let words = ["vm", "start", "--name", "m", "--restore", &path];
    let shape = three("h1,h2", "1,0,2", "96M,64M,96M");
    let output = site.weft(&[&words[..], &shape].concat()).output()?;
    ensure!(output.status.success(), "{output:?}");
    site.ask(&["vm", "release", "m", "1", "--json"])?;
    let mut console = site.console_at(0)?;
    let right = console.wait_for("dirty: right", LONG_BOUND);
    ensure!(right.is_some(), "the guest's pages are not right");
    site.stop_at(0)?;
    console.finish(BOUND)?;
    site.all_given_back()?;
    for set in ["first", "second"] {
        for host in [1, 2] {
            let name = format!("{set}/pages.{host}");
            fs::copy(
                site.own_disks(host).join(&name),
                site.own_disks(0).join(&name),
            )?;
        }
    }
    site.continued(&second, &["--verify"])?;
    let pause = whole["pause_seconds"].as_f64().unwrap_or(0.0);
    Ok(format!("paused for {:.1} ms", 1e3 * pause))
}

/// The daemon of the other host writes into the directory of the set.
fn shared(site: &mut Site<'_>) -> Result<String> {
    let words = [
        "--name",
        "m",
        "--on",
        "h1",
        "--cpus",
        "1,1",
        "--memory",
        "128M,128M",
    ];
    let mut guest = Guest::start(&mut site.machine_with(&words, "dirty 20 10000 4")?)?;
    ensure!(
        guest.wait_for("dirty: at work", BOUND).is_some(),
        "no boot: {}",
        guest.finish(Duration::ZERO)?.stderr
    );
    let set = site.allowed().join("set");
    let path = set.to_string_lossy();
    let report = site.ask(&["vm", "save", "m", &path, "--each-host", "--json"])?;
    ensure!(report["hosts"] == json!([]), "{report}");
    judge_writes(&guest.finish(LONG_BOUND)?)?;
    site.all_given_back()?;
    let here = files(&set)?;
    ensure!(
        here == ["machine", "manifest", "pages.0", "pages.1"],
        "{here:?}"
    );
    site.continued(&set, &[])?;
    Ok(String::new())
}

/// A directory that a host does not allow, a command that ends before its live save does, and a
/// file that is there already.
fn given_up(site: &mut Site<'_>) -> Result<String> {
    let shape = ["--on", "h1", "--cpus", "1,1", "--memory", "128M,128M"];
    site.start_shaped(&site.home, &shape, "dirty 12 10000 4")?;
    at_work(site)?;
    let forbidden = site.bench.directory.join("forbidden");
    let path = forbidden.to_string_lossy();
    let refused = site
        .weft(&["vm", "save", "m", &path, "--each-host"])
        .output()?;
    let said = String::from_utf8_lossy(&refused.stderr);
    ensure!(
        !refused.status.success() && said.contains("h1: the lender does not allow this disk"),
        "{said}"
    );
    ensure!(!forbidden.exists(), "the directory is left");
    let other = site.own_disks(1).join("other");
    fs::create_dir(&other)?;
    fs::write(other.join("pages.1"), "mine")?;
    let path = site.own_disks(0).join("other");
    let path = path.to_string_lossy();
    let refused = site
        .weft(&["vm", "save", "m", &path, "--each-host"])
        .output()?;
    let said = String::from_utf8_lossy(&refused.stderr);
    ensure!(
        !refused.status.success() && said.contains("pages.1 for a checkpoint: File exists"),
        "{said}"
    );
    let mine = fs::read(other.join("pages.1"))?;
    ensure!(mine == b"mine", "the file was replaced");
    // At any moment, also when all is written and not yet kept.
    for (number, wait_ms) in [0, 20, 40, 80, 120, 180, 250, 400].into_iter().enumerate() {
        let set = site.own_disks(0).join(format!("killed-{number}"));
        let path = set.to_string_lossy();
        let words = ["vm", "save", "m", &path, "--each-host", "--live"];
        let mut save = site.weft(&words).spawn()?;
        std::thread::sleep(Duration::from_millis(wait_ms));
        save.kill()?;
        let _ = save.wait()?;
        // Complete, or one rename before that.
        let is_kept = |name| set.join(name).exists();
        let there = site.own_disks(1).join(format!("killed-{number}"));
        if ["manifest", "manifest.new"].into_iter().any(is_kept) && there.exists() {
            fs::remove_dir_all(&there)?;
        }
    }
    let set = site.own_disks(0).join("set");
    let path = set.to_string_lossy();
    // The last one that was killed may not be over.
    let words = ["vm", "save", "m", &path, "--each-host", "--stop", "--json"];
    wait_until("a save that succeeds", || {
        Ok(site.weft(&words).output()?.status.success())
    })?;
    site.all_given_back()?;
    let left = files(&site.own_disks(1))?;
    ensure!(left == ["other", "set"], "{left:?}");
    site.continued(
        &set,
        &["--on", "h1", "--cpus", "1,1", "--memory", "128M,128M"],
    )?;
    Ok(String::new())
}

/// The machine's home has left its first host: the new one has its node's file made.
fn moved(site: &mut Site<'_>) -> Result<String> {
    let shape = ["--on", "h2", "--cpus", "1,1", "--memory", "128M,128M"];
    site.start_shaped(&site.home, &shape, "dirty 12 3000 4")?;
    at_work(site)?;
    let view = site.ask_at(0, &["vm", "migrate", "m", "1=140M,h1=140M", "--json"])?;
    ensure!(view["migrated"]["home"]["host"] == "h2", "{view}");
    wait_until("the old host to be left", || {
        Ok(site.machines_at(0)?.is_empty())
    })?;
    let set = site.own_disks(0).join("set");
    let path = set.to_string_lossy();
    let words = ["vm", "save", "m", &path, "--each-host", "--stop", "--json"];
    let report = site.ask_at(2, &words)?;
    ensure!(report["hosts"] == json!(["h1"]), "{report}");
    site.all_given_back()?;
    let other = site.own_disks(1).join("set");
    let (here, there) = (files(&set)?, files(&other)?);
    let is_tables = |name: &&String| name.starts_with("tables.");
    ensure!(
        here.iter().filter(is_tables).count() == 1 && there.len() == 1,
        "{here:?}, {there:?}"
    );
    fs::copy(other.join(&there[0]), set.join(&there[0]))?;
    site.continued(&set, &["--verify"])?;
    Ok(String::new())
}

/// The names in a directory, in order.
fn files(directory: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(directory).with_context(|| format!("{}", directory.display()))? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
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
