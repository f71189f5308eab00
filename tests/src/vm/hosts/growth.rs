//! Nodes on other hosts that join a running machine and leave it, while its guest runs the
//! tests of the memory model: hosts get back what they lent at once, what is refused changes
//! nothing, and a daemon that dies in the middle takes the node along or the machine.

use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use super::{BOUND, LEASE, LONG_BOUND, Site};
use crate::aggregate::{judge_litmus, litmus_until_told};
use crate::cluster;
use crate::guest::{Guest, code};
use crate::random::Random;

type Check = fn(&mut Site<'_>) -> Result<String>;

/// By name: hosts beside the launcher's, and the test.
pub(super) const CHECKS: [(&str, usize, Check); 7] = [
    ("growth, a node of another host, ten times", 1, to_and_fro),
    ("growth, one node gets a node of another host", 1, from_one),
    ("growth, a machine over hosts grows on all", 2, on_all),
    ("growth, what is refused changes nothing", 1, refused),
    ("growth, no slice outgrows what was lent", 1, lent),
    ("growth, daemons that are killed", 1, daemons_killed),
    ("growth, cables that are pulled", 1, cables_pulled),
];

/// Nodes of the launcher's host.
pub(super) const HERE: [&str; 6] = ["--nodes", "2", "--cpus", "2", "--memory", "256M"];
/// One node of the launcher's host, to which others may come.
pub(super) const ONE: [&str; 6] = ["--growable", "yes", "--cpus", "2", "--memory", "256M"];
/// The exit code of a machine that a lost node ended.
pub(super) const EXIT_LOST: i32 = 124;

/// Of a machine that may end before it is told to.
const LITMUS: &str = "litmus -d 100 -s 4";

impl Site<'_> {
    pub(super) fn ask(&self, words: &[&str]) -> Result<Value> {
        let output = self.weft(words).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "weft {}: {said}", words.join(" "));
        serde_json::from_slice(&output.stdout).with_context(|| words.join(" "))
    }

    /// The number of the node that joined.
    pub(super) fn grow(&self, options: &[&str]) -> Result<u64> {
        let mut words = vec!["vm", "grow", "m", "--json"];
        words.extend(options);
        let view = self.ask(&words)?;
        let node = view["grown"]["node"].as_u64();
        node.with_context(|| format!("no node joined: {view}"))
    }

    /// Bytes of pages that left it.
    pub(super) fn release(&self, node: u64) -> Result<u64> {
        let view = self.ask(&["vm", "release", "m", &node.to_string(), "--json"])?;
        let bytes = view["released"]["bytes"].as_u64();
        bytes.with_context(|| format!("no node left: {view}"))
    }

    pub(super) fn move_vcpu(&self, vcpu: u64, to: u64) -> Result<()> {
        let (vcpu, to) = (vcpu.to_string(), to.to_string());
        let words = ["vm", "move", "m", "--vcpu", &vcpu, "--to", &to, "--json"];
        self.ask(&words).map(drop)
    }

    /// The node of each vCPU.
    pub(super) fn locations(&self) -> Result<Vec<u64>> {
        let views = self.ask(&["vm", "list", "--json"])?;
        let locations = views[0]["locations"].as_array().into_iter().flatten();
        let nodes = locations.map(|location| location["node"].as_u64());
        nodes.collect::<Option<_>>().context("no locations")
    }

    /// What the command says that is refused.
    pub(super) fn refusal(&self, words: &[&str]) -> Result<String> {
        let output = self.weft(words).output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(
            !output.status.success(),
            "{} was not refused: {said}",
            words.join(" ")
        );
        Ok(said)
    }

    /// A machine called `m` that runs litmus tests until it is told to end.
    pub(super) fn litmus(&self, words: &[&str]) -> Result<Guest> {
        self.at_work(words, &litmus_until_told())
    }

    /// A machine called `m` that has begun to run `script`.
    pub(super) fn at_work(&self, words: &[&str], script: &str) -> Result<Guest> {
        let words = [&["--name", "m"], words].concat();
        let script = format!("echo at work; {script}");
        let mut guest = Guest::start(&mut self.machine_with(&words, &script)?)?;
        if guest.wait_for("at work", BOUND).is_none() {
            bail!("no boot: {}", guest.finish(Duration::ZERO)?.stderr);
        }
        Ok(guest)
    }
}

fn to_and_fro(site: &mut Site<'_>) -> Result<String> {
    comes_and_goes(site, &HERE, 2)
}

/// As a machine of several nodes.
fn from_one(site: &mut Site<'_>) -> Result<String> {
    comes_and_goes(site, &ONE, 1)
}

/// Node `next` is one of another host, ten times.
fn comes_and_goes(site: &mut Site<'_>, options: &[&str], next: u64) -> Result<String> {
    let mut guest = site.litmus(options)?;
    let mut random = Random::new(site.bench.context.seed ^ 0x6709);
    let mut bytes = 0;
    for round in 0..10 {
        let mut change = || -> Result<u64> {
            let node = site.grow(&["--on", "h1=128M"])?;
            ensure!(node == next, "the free number is {node}");
            let slices = site.slices_of(1);
            ensure!(slices.len() == 1, "host 1 runs {slices:?}");
            site.move_vcpu(random.below(2), node)?;
            let bytes = site.release(node)?;
            let at = site.locations()?;
            ensure!(!at.contains(&node), "vCPUs are on {at:?}");
            site.all_given_back()?;
            Ok(bytes)
        };
        bytes += change().with_context(|| format!("in round {round}"))?;
    }
    guest.tell()?;
    let ended = guest.finish(LONG_BOUND)?;
    site.all_given_back()?;
    let said = cluster_said(site);
    ensure!(!said.contains("ended by"), "{said}");
    Ok(format!(
        "{}, {bytes} bytes went back",
        judge_litmus(&ended)?
    ))
}

/// What the first daemon said.
fn cluster_said(site: &Site<'_>) -> String {
    site.daemons[0].stderr()
}

fn on_all(site: &mut Site<'_>) -> Result<String> {
    let lease = LEASE.as_secs().to_string();
    let words = ["--on", "h1", "--cpus", "2", "--lease", &lease, "--memory"];
    let mut guest = site.litmus(&[&words[..], &["128M"]].concat())?;
    let mut bytes = 0;
    for round in 0..3 {
        let mut change = || -> Result<()> {
            // By turns on this host, on a third one, and once more on the one that is there.
            for options in [
                &["--memory", "64M"][..],
                &["--on", "h2=64M"],
                &["--on", "h1", "--memory", "64M"],
            ] {
                let node = site.grow(options)?;
                site.move_vcpu(1, node)?;
                site.move_vcpu(0, node)?;
                bytes += site.release(node)?;
            }
            // All at the same time: those that joined are linked with each other.
            let here = site.grow(&["--memory", "64M"])?;
            let there = site.grow(&["--on", "h2=64M"])?;
            let again = site.grow(&["--on", "h1=64M"])?;
            site.move_vcpu(0, there)?;
            site.move_vcpu(1, here)?;
            site.move_vcpu(1, again)?;
            for node in [here, there, again] {
                bytes += site.release(node)?;
            }
            Ok(())
        };
        change().with_context(|| format!("in round {round}"))?;
    }
    guest.tell()?;
    let ended = guest.finish(LONG_BOUND)?;
    site.all_given_back()?;
    Ok(format!(
        "{}, {bytes} bytes went back",
        judge_litmus(&ended)?
    ))
}

fn refused(site: &mut Site<'_>) -> Result<String> {
    let mut guest = site.litmus(&HERE)?;
    for (on, says) in [
        ("nobody", "no key is known"),
        ("gone", "node gone cannot be reached"),
        ("h1=1000M", "no room on node h1"),
    ] {
        let said = site.refusal(&["vm", "grow", "m", "--on", on])?;
        ensure!(said.contains(says), "--on {on}: {said}");
    }
    ensure!(site.locations()? == [0, 1], "something moved");
    site.all_given_back()?;
    // What was refused is in nobody's way.
    let node = site.grow(&["--on", "h1=64M"])?;
    ensure!(node == 2, "the free number is {node}");
    site.release(node)?;
    guest.tell()?;
    judge_litmus(&guest.finish(LONG_BOUND)?)
}

/// Node 1 leaves, and its 128 MiB are divided between node 0 and a node of another host.
fn lent(site: &mut Site<'_>) -> Result<String> {
    let mut guest = site.litmus(&HERE)?;
    let pages = || -> Result<u64> {
        let view = site.ask(&["vm", "counters", "m", "--json"])?;
        let pages = view["counters"]["slice2.memory.budget-pages"].as_u64();
        pages.context("no budget")
    };
    let small = site.grow(&["--on", "h1=64M"])?;
    let at_first = pages()?;
    site.move_vcpu(1, small)?;
    let said = site.refusal(&["vm", "release", "m", "1"])?;
    ensure!(said.contains("its host lent 64 MiB, and 6"), "{said}");
    ensure!(
        pages()? == at_first,
        "{} pages, at first {at_first}",
        pages()?
    );
    site.release(small)?;
    let large = site.grow(&["--on", "h1=80M"])?;
    let at_first = pages()?;
    site.move_vcpu(1, large)?;
    site.release(1)?;
    ensure!(
        pages()? == at_first,
        "{} pages, at first {at_first}",
        pages()?
    );
    guest.tell()?;
    judge_litmus(&guest.finish(LONG_BOUND)?)
}

/// Something happens to host 1 at a random moment while a node of it joins, and is mended.
/// The machine goes on without it, or ends and names it. Rounds, and those of the long run.
fn disturbed(
    site: &mut Site<'_>,
    [rounds, long]: [usize; 2],
    disturb: impl Fn(&mut Site<'_>) -> Result<()>,
    mend: impl Fn(&mut Site<'_>) -> Result<()>,
) -> Result<String> {
    let mut random = Random::new(site.bench.context.seed ^ 0x6dea);
    let (mut went_on, mut ended) = (0, 0);
    let rounds = if site.bench.long { long } else { rounds };
    for round in 0..rounds {
        let lease = LEASE.as_secs().to_string();
        let options = [&HERE[..], &["--lease", &lease]].concat();
        let guest = site.at_work(&options, LITMUS)?;
        let mut grow = site.weft(&["vm", "grow", "m", "--on", "h1=64M"]);
        let grow = (grow.stdout(Stdio::null()).stderr(Stdio::piped())).spawn()?;
        std::thread::sleep(Duration::from_micros(random.below(120_000)));
        disturb(site)?;
        let grow = grow.wait_with_output()?;
        let said = String::from_utf8_lossy(&grow.stderr).into_owned();
        let end = guest.finish(LONG_BOUND)?;
        match code(&end)? {
            0 => {
                ensure!(!grow.status.success(), "it joined in round {round}: {said}");
                judge_litmus(&end)?;
                went_on += 1;
            }
            EXIT_LOST if end.stderr.contains("lost node 2 (") => ended += 1,
            other => bail!("exit code {other} in round {round}: {said}\n{}", end.stderr),
        }
        mend(site)?;
        site.all_given_back()?;
    }
    Ok(format!("{went_on} machines went on, {ended} ended"))
}

fn daemons_killed(site: &mut Site<'_>) -> Result<String> {
    disturbed(
        site,
        [6, 10],
        |site| Ok(kill(Pid::from_raw(site.daemons[0].pid()), Signal::SIGKILL)?),
        |site| {
            cluster::stop(site.daemons.remove(0))?;
            let daemon = site.start_daemon(1)?;
            site.daemons.insert(0, daemon);
            Ok(())
        },
    )
}

fn cables_pulled(site: &mut Site<'_>) -> Result<String> {
    let cut = |is_cut| move |site: &mut Site<'_>| site.star.cut(1, is_cut);
    disturbed(site, [4, 10], cut(true), cut(false))
}
