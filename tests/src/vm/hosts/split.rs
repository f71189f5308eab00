//! A machine that is split over two hosts by access history: what its guest uses is on the
//! first, with its vCPUs, and every byte is right there, on the other, and after the merge.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};

use super::growth::{HERE, ONE};
use super::migration::judge_writes;
use super::{BOUND, LONG_BOUND, Site};
use crate::guest::Guest;

type Check = fn(&mut Site<'_>) -> Result<String>;

/// By name: hosts beside the launcher's, and the test.
pub(super) const CHECKS: [(&str, usize, Check); 2] = [
    ("split, by history, of one node", 2, of_one),
    ("split, by history, of two nodes", 2, of_two),
];

/// Nearly all of the memory has a content, and 32 MB are used all the time, until it is told.
const PROGRAM: &str = "(dirty 172 20000 300 32) & read line; touch /tmp/told; wait";
/// The first host has room for a little more than half of the machine's memory.
const TO: &str = "h1=136M,h2=200M";
/// How long faults are counted.
const LOOK: Duration = Duration::from_secs(2);

impl Site<'_> {
    /// Faults of vCPUs that other nodes served, while the program writes.
    fn remote_faults(&self) -> Result<u64> {
        let count = || -> Result<u64> {
            let view = self.ask(&["vm", "counters", "m", "--json"])?;
            let counters = view["counters"].as_object().context("no counters")?;
            let remote = counters.iter().filter(|(name, _)| {
                name.starts_with("vcpu") && name.contains(".from") && name.ends_with(".faults")
            });
            Ok(remote.filter_map(|(_, count)| count.as_u64()).sum())
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
    let words = [&["--name", "m"], words].concat();
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
