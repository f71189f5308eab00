//! A machine that is split over two hosts by access history: what its guest uses is on the
//! first, with its vCPUs, and every byte is right there, on the other, and after the merge. What
//! is on the other host nevertheless comes for pages that are not used.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};

use super::growth::{HERE, ONE};
use super::migration::judge_writes;
use super::{BOUND, LONG_BOUND, Site};
use crate::counters;
use crate::guest::Guest;

type Check = fn(&mut Site<'_>) -> Result<String>;

/// By name: hosts beside the launcher's, and the test.
pub(super) const CHECKS: [(&str, usize, Check); 3] = [
    ("split, by history, of one node", 2, of_one),
    ("split, by history, of two nodes", 2, of_two),
    ("split, pages exchanged", 2, exchanged),
];

/// Nearly all of the memory has a content, and 32 MB are used all the time, until it is told.
const PROGRAM: &str = "(dirty 172 20000 300 32) & read line; touch /tmp/told; wait";
/// The first host has room for a little more than half of the machine's memory.
const TO: &str = "h1=136M,h2=200M";
/// How long faults are counted.
const LOOK: Duration = Duration::from_secs(2);
/// How long after a split what is used must have come.
const EXCHANGED: Duration = Duration::from_secs(20);
/// Most faults in [`LOOK`] then; without exchanges there are thousands.
const FEW_FAULTS: u64 = 200;

impl Site<'_> {
    /// Faults of vCPUs that other nodes served, while the program writes.
    fn remote_faults(&self) -> Result<u64> {
        let count = || -> Result<u64> {
            counters::remote_faults(&self.ask(&["vm", "counters", "m", "--json"])?)
        };
        let before = count()?;
        std::thread::sleep(LOOK);
        Ok(count()? - before)
    }

    /// Splits the machine, brings it back, and returns the remote faults between.
    fn split_and_merged(&self, choose: &str) -> Result<u64> {
        let away = self.moved(&["migrate", "m", TO, "--choose", choose])?;
        let first = away["nodes"][0].as_u64().context("no node")?;
        self.is_on(first)?;
        // What it had used until then may still come.
        std::thread::sleep(Duration::from_secs(1));
        let faults = self.remote_faults()?;
        self.moved(&["consolidate", "m"])?;
        self.is_on(0)?;
        self.all_given_back()?;
        Ok(faults)
    }
}

/// Splits a machine while its guest writes, by page numbers and by history: the second must
/// have by far the fewer remote faults.
fn splits(site: &Site<'_>, words: &[&str]) -> Result<String> {
    let words = [&["--name", "m", "--exchange", "never"], words].concat();
    let mut guest = Guest::start(&mut site.machine_with(&words, PROGRAM)?)?;
    // Until the rest of its memory has not been used for two epochs of the history.
    let works = guest.wait_for("dirty: second 9:", BOUND);
    ensure!(works.is_some(), "the guest does not work");
    let both = ["order", "history"].map(|choose| site.split_and_merged(choose));
    let [Ok(by_order), Ok(by_history)] = both else {
        bail!("{both:?}: {}", guest.finish(Duration::ZERO)?.stderr);
    };
    guest.tell()?;
    let line = judge_writes(&guest.finish(LONG_BOUND)?)?;
    ensure!(
        by_history < by_order / 4,
        "{by_history} remote faults by history, and {by_order} by page numbers"
    );
    Ok(format!(
        "{by_history} remote faults by history, {by_order} by page numbers; {line}"
    ))
}

fn of_one(site: &mut Site<'_>) -> Result<String> {
    splits(site, &ONE)
}

/// The nodes of the machine have pages that the other manages.
fn of_two(site: &mut Site<'_>) -> Result<String> {
    splits(site, &HERE)
}

/// By page numbers, half of what the guest uses is on the other host. It comes to the first, for as
/// many other pages, in whichever state the machine is saved or moves on.
fn exchanged(site: &mut Site<'_>) -> Result<String> {
    let words = [&["--name", "m"], &ONE[..]].concat();
    let mut guest = Guest::start(&mut site.machine_with(&words, PROGRAM)?)?;
    let works = guest.wait_for("dirty: second 9:", BOUND);
    ensure!(works.is_some(), "the guest does not work");
    let come = site.exchanges_after_split();
    // Once more, and the machine is saved, and leaves the hosts, while pages come.
    let set = site.bench.directory.join("set");
    let cut_short = come.and_then(|come| {
        site.moved(&["migrate", "m", TO, "--choose", "order"])?;
        site.save(&set, &[])?;
        site.moved(&["consolidate", "m"])?;
        site.is_on(0)?;
        site.all_given_back()?;
        Ok(come)
    });
    let Ok(come) = cut_short else {
        bail!("{cut_short:?}: {}", guest.finish(Duration::ZERO)?.stderr);
    };
    guest.tell()?;
    let line = judge_writes(&guest.finish(LONG_BOUND)?)?;
    let mut command = site.weft(&["vm", "run", "--name", "c", "--restore"]);
    let mut saved = Guest::start(command.arg(&set))?;
    saved.tell()?;
    judge_writes(&saved.finish(LONG_BOUND)?).context("the machine that was saved")?;
    Ok(format!("{come}; {line}"))
}

impl Site<'_> {
    /// Splits the machine by page numbers, waits until its vCPU fetches few pages any more, and
    /// brings it back.
    fn exchanges_after_split(&self) -> Result<String> {
        let away = self.moved(&["migrate", "m", TO, "--choose", "order"])?;
        let first = away["nodes"][0].as_u64().context("no node")?;
        let second = away["nodes"][1].as_u64().context("no node")?;
        let begun = Instant::now();
        let faults = loop {
            let faults = self.remote_faults()?;
            if faults <= FEW_FAULTS {
                break faults;
            }
            let late = begun.elapsed() > EXCHANGED;
            ensure!(
                !late,
                "{faults} remote faults in {LOOK:?} after {EXCHANGED:?}"
            );
        };
        let view = self.ask(&["vm", "counters", "m", "--json"])?;
        let count = |node: u64, name: &str| {
            let count = view["counters"][format!("slice{node}.memory.{name}")].as_u64();
            count.with_context(|| format!("no counter {name} of node {node}"))
        };
        let came = count(first, "exchanged-in")?;
        let went = count(first, "exchanged-out")?;
        ensure!(came > 0, "nothing came to node {first}");
        ensure!(
            came.abs_diff(went) <= 64 && count(second, "exchanged-out")? == came,
            "{came} pages came, and {went} went"
        );
        for node in [first, second] {
            let (held, budget) = (count(node, "held-pages")?, count(node, "budget-pages")?);
            ensure!(
                held <= budget,
                "node {node} has {held} pages, and may have {budget}"
            );
        }
        self.moved(&["consolidate", "m"])?;
        self.is_on(0)?;
        self.all_given_back()?;
        Ok(format!(
            "{came} pages came for others, {faults} remote faults then"
        ))
    }
}
