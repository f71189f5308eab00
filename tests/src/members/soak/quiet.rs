//! What must hold when all harm is put right: the store has what runs, what fits is placed, and
//! in the end nothing stays behind.

use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::driver::Driver;
use super::site::{GUEST, HOSTS};
use super::work::{Aggregate, Kind};
use crate::fleet::{SOON, words};

/// What was begun has ended by then: an end that was asked for, a drain, a lease.
const SETTLED: Duration = Duration::from_secs(120);
/// A request waits no longer where there is room.
const PLACED: Duration = Duration::from_secs(60);
/// A guest that idles writes a line in this.
const PROGRESS: Duration = Duration::from_secs(40);
/// What is counted for a vCPU of a machine, in MiB.
const CPU_MIB: u64 = 58;

type Wrong = Option<String>;

fn is_of(aggregate: &Aggregate, name: &str) -> bool {
    name == aggregate.wanted.token || name.ends_with(&format!("-{}", aggregate.command.pid()))
}

fn list<'v>(plan: &'v Value, name: &str) -> &'v [Value] {
    plan[name].as_array().map_or(&[], Vec::as_slice)
}

fn text<'v>(value: &'v Value, field: &str) -> &'v str {
    value[field].as_str().unwrap_or_default()
}

fn number(value: &Value, field: &str) -> u64 {
    value[field].as_u64().unwrap_or_default()
}

impl Driver<'_> {
    /// Ticks until nothing is wrong any more, or reports it.
    fn until(
        &mut self,
        what: &str,
        bound: Duration,
        mut wrong: impl FnMut(&mut Self) -> Result<Wrong>,
    ) -> Result<bool> {
        let begun = Instant::now();
        loop {
            self.tick()?;
            let left = match wrong(self) {
                Ok(None) => {
                    self.note(&format!("{what}: {:.1} s", begun.elapsed().as_secs_f64()));
                    return Ok(true);
                }
                Ok(Some(left)) => left,
                // The store may have no leader yet.
                Err(error) => format!("{error:#}"),
            };
            if begun.elapsed() > bound {
                self.fail(format!("{what}: not within {bound:?}: {left}"));
                return Ok(false);
            }
            // The calls take processors from what they wait for.
            for _ in 0..4 {
                self.tick()?;
            }
        }
    }

    fn plan(&mut self) -> Result<Value> {
        let host = self.pick(GUEST);
        self.site.fleet.json(host, "plan --json")
    }

    /// Puts everything right, and checks the cluster. `is_last`: also ends everything.
    pub(super) fn quiet(&mut self, is_last: bool) -> Result<()> {
        self.note("quiet");
        self.heal_all()?;
        let settled = self.until("all that was begun has ended", SETTLED, |driver| {
            driver.heal_all()?;
            let task = driver.tasks.first().map(|task| task.what.clone());
            let told = driver.aggregates.iter().find(|of| of.told.is_some());
            Ok(task.or(told.map(|told| told.wanted.token.clone())))
        })?;
        for host in 0..HOSTS.len() {
            let host_of = &self.site.fleet.hosts[host];
            if host_of.daemon.is_none() && host_of.is_member && settled {
                self.site.fleet.start_daemon(host)?;
            }
        }
        self.until("nothing is cordoned", SOON, |driver| {
            while let Some(host) = driver.cordoned.last().copied() {
                let line = format!("node uncordon {}", HOSTS[host]);
                driver.site.fleet.call(host, &words(&line))?;
                driver.cordoned.pop();
            }
            Ok(None)
        })?;
        self.later
            .retain(|(_, what)| !matches!(what, super::driver::Later::Uncordon(_)));
        self.until("all hosts live, and one decides", SOON, |driver| {
            let plan = driver.plan()?;
            let hosts = list(&plan, "hosts");
            let dead = hosts.iter().find(|host| host["alive"] != true);
            let dead = dead.map(|host| text(host, "name").to_owned());
            let none = plan["leader"].is_null().then(|| "no leader".to_owned());
            let many = (hosts.len() < GUEST).then(|| format!("{} hosts", hosts.len()));
            Ok(dead.or(none).or(many))
        })?;
        self.until("the store has what runs", SETTLED, Driver::compare)?;
        self.until("what fits is placed", PLACED, |driver| {
            let plan = driver.plan()?;
            Ok(fitting(&plan))
        })?;
        self.progress()?;
        if is_last {
            self.end_all()?;
        }
        Ok(())
    }

    /// What differs between the store and the processes.
    fn compare(&mut self) -> Result<Wrong> {
        let plan = self.plan()?;
        self.look();
        let (runs, waits) = (list(&plan, "runs"), list(&plan, "waits"));
        if list(&plan, "damaged") != [] as [Value; 0] {
            return Ok(Some(format!("damaged: {}", plan["damaged"])));
        }
        for entry in runs.iter().chain(waits) {
            let name = text(entry, "name");
            if !self.aggregates.iter().any(|of| is_of(of, name)) {
                let home = HOSTS.iter().position(|host| *host == text(entry, "home"));
                let left = home.is_some_and(|home| !self.site.fleet.hosts[home].is_member);
                if left && entry["agent"] == false {
                    // No daemon of its home can tell the cluster that it has ended.
                    let line = format!("cluster forget {name}");
                    self.note(&line);
                    self.site.fleet.call(0, &words(&line))?;
                }
                return Ok(Some(format!(
                    "{name} is in the store, and nothing of it runs"
                )));
            }
        }
        for aggregate in &self.aggregates {
            let token = &aggregate.wanted.token;
            let home = self.sight.home(token, aggregate.wanted.home);
            let Some(home) = home else {
                let waits = waits
                    .iter()
                    .any(|entry| is_of(aggregate, text(entry, "name")));
                if waits || aggregate.wanted.rival {
                    continue;
                }
                return Ok(Some(format!("{token} neither runs nor waits")));
            };
            let entry = runs
                .iter()
                .find(|entry| is_of(aggregate, text(entry, "name")));
            let Some(entry) = entry else {
                return Ok(Some(format!("{token} runs, and is not in the store")));
            };
            let parts = list(entry, "parts").iter().map(|part| text(part, "host"));
            let parts: BTreeSet<&str> = parts.collect();
            let seen = home.others.iter().chain([&home.host]);
            let seen: BTreeSet<&str> = seen.map(|host| HOSTS[*host]).collect();
            // A program goes on without a node that had nothing of it, and keeps the room.
            let is_program = aggregate.wanted.kind == Kind::Program;
            if parts != seen && !(is_program && seen.is_subset(&parts)) {
                let moving = &entry["moving"];
                return Ok(Some(format!(
                    "{token} is on {seen:?}, and the store has {parts:?}, moving: {moving}"
                )));
            }
            if entry["agent"] != true {
                return Ok(Some(format!("{token} has no agent")));
            }
        }
        let orphan = self.sight.orphans.first();
        Ok(orphan.map(|(host, _)| format!("a slice without a home on {}", HOSTS[*host])))
    }

    /// Whatever runs writes on.
    fn progress(&mut self) -> Result<()> {
        let running = |driver: &Self| -> Vec<(String, u64)> {
            let all = driver.aggregates.iter();
            let seen = all.filter(|of| of.ran.is_some() && of.wanted.kind != Kind::Detached);
            let length = |of: &Aggregate| of.command.output.metadata().map_or(0, |file| file.len());
            seen.map(|of| (of.wanted.token.clone(), length(of)))
                .collect()
        };
        let before = running(self);
        self.until("what runs goes on", PROGRESS, |driver| {
            let now = running(driver);
            let stands = |(token, length): &&(String, u64)| {
                now.iter()
                    .any(|(other, now)| other == token && now == length)
            };
            let standing = before.iter().find(stands);
            Ok(standing.map(|(token, _)| token.clone()))
        })?;
        Ok(())
    }

    /// Ends all that runs until nothing waits any more, and looks for what stays.
    fn end_all(&mut self) -> Result<()> {
        let mut changed = Instant::now();
        while !self.aggregates.is_empty() {
            let running = self.aggregates.iter().any(|of| of.ran.is_some());
            let all = self.aggregates.iter();
            let ready = |of: &Aggregate| of.ran.is_some() && of.told.is_none();
            let numbers: Vec<usize> = all
                .enumerate()
                .filter(|of| ready(of.1))
                .map(|of| of.0)
                .collect();
            if !numbers.is_empty() {
                changed = Instant::now();
                let number = numbers[self.pick(numbers.len())];
                self.stop(number)?;
            }
            if running {
                changed = Instant::now();
            } else if changed.elapsed() > PLACED {
                let all = self.aggregates.iter();
                let waiting: Vec<String> = all.map(|of| of.wanted.token.clone()).collect();
                let plan = self.plan()?;
                self.fail(format!("{waiting:?} wait although nothing runs: {plan}"));
                for number in 0..self.aggregates.len() {
                    self.kill_launcher(number);
                }
                changed = Instant::now();
            }
            for _ in 0..5 {
                self.tick()?;
            }
        }
        self.until("nothing stays behind", SETTLED, Driver::remains)?;
        Ok(())
    }

    fn remains(&mut self) -> Result<Wrong> {
        let plan = self.plan()?;
        self.look();
        for name in ["runs", "waits"] {
            if let Some(entry) = list(&plan, name).first() {
                return Ok(Some(format!("in the store: {entry}")));
            }
        }
        let taken = list(&plan, "hosts").iter().find(|host| {
            let lent = host["report"]["lent_bytes"].as_u64();
            host["cores"] != host["cores_free"]
                || host["memory_mib"] != host["memory_free_mib"]
                || lent != Some(0)
        });
        if let Some(host) = taken {
            return Ok(Some(format!("room is taken: {host}")));
        }
        let sight = &self.sight;
        if let Some((host, pid)) = sight.slices.first() {
            return Ok(Some(format!("slice {pid} on {}", HOSTS[*host])));
        }
        if sight.agents > 0 || !sight.homes.is_empty() || !sight.launchers.is_empty() {
            return Ok(Some(format!(
                "{} agents, {:?}",
                sight.agents, sight.launchers
            )));
        }
        for (host, name) in HOSTS.iter().enumerate() {
            // It removes what launchers that were killed have left.
            self.site.fleet.call(host, &words("vm list"))?;
            let folder = self.site.fleet.run_directory(host).join("weft/vm");
            // Nothing ran there, and there is no folder.
            for entry in fs::read_dir(folder).into_iter().flatten() {
                let file = entry.context("a run directory")?.file_name();
                let file = file.to_string_lossy().into_owned();
                if !file.ends_with(".log") {
                    return Ok(Some(format!("on {name}: {file}")));
                }
            }
        }
        Ok(None)
    }
}

/// A request that waits although it fits, if there is one: by arithmetic, not by a policy.
fn fitting(plan: &Value) -> Wrong {
    let hosts = list(plan, "hosts");
    let mut waits: Vec<&Value> = list(plan, "waits").iter().collect();
    waits.sort_by_key(|wait| std::cmp::Reverse(number(wait, "priority")));
    let usable = |host: &&Value| host["alive"] == true && host["cordoned"] != true;
    let free = |host: &Value| (number(host, "cores_free"), number(host, "memory_free_mib"));
    for (place, wait) in waits.iter().enumerate() {
        let home = hosts
            .iter()
            .filter(usable)
            .find(|host| text(host, "name") == text(wait, "home"));
        let Some(home) = home else {
            continue;
        };
        let cores = number(wait, "cores");
        let is_machine = text(wait, "kind") == "machine";
        let memory = number(wait, "memory_mib") + if is_machine { CPU_MIB * cores } else { 0 };
        let (home_cores, home_memory) = free(home);
        let fits_home = home_cores >= cores && home_memory >= memory;
        let all = hosts.iter().filter(usable).map(free);
        let all = all.filter(|(cores, _)| *cores > 0 || !is_machine);
        let (all_cores, all_memory) = all.fold((0, 0), |sum, of| (sum.0 + of.0, sum.1 + of.1));
        let fits_all = home_cores > 0
            && home_memory * cores >= memory
            && all_cores >= cores
            && all_memory * 9 / 10 >= memory;
        // Others wait for their own hosts, which this one does not need.
        let none_before = waits[..place].iter().all(|other| {
            let own = hosts
                .iter()
                .find(|host| text(host, "name") == text(other, "home"));
            let own_free = own.map_or(0, |own| number(own, "cores_free"));
            text(other, "home") != text(wait, "home") && own_free == 0
        });
        if (place == 0 && (fits_home || fits_all)) || (none_before && fits_home) {
            let name = text(wait, "name");
            return Some(format!("{name} waits, and would fit: {wait}, {hosts:?}"));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn plan(free: [(u64, u64); 2], waits: &[(&str, u64, u64)]) -> Value {
        let host = |name: &str, (cores, memory): (u64, u64)| {
            json!({ "name": name, "alive": true, "cordoned": false, "cores_free": cores,
                "memory_free_mib": memory })
        };
        let waits = waits.iter().map(|(home, cores, memory)| {
            json!({ "name": "w", "home": home, "kind": "machine", "cores": cores,
                "memory_mib": memory, "priority": 0 })
        });
        json!({ "hosts": [host("a", free[0]), host("b", free[1])],
            "waits": waits.collect::<Vec<_>>() })
    }

    #[test]
    fn what_fits_may_not_wait() {
        assert!(fitting(&plan([(2, 300), (2, 300)], &[("a", 2, 100)])).is_some());
        assert!(fitting(&plan([(2, 300), (2, 300)], &[("a", 3, 200)])).is_some());
        assert!(fitting(&plan([(0, 300), (2, 300)], &[("a", 1, 100)])).is_none());
        let second = [("a", 2, 100), ("b", 1, 100)];
        assert!(fitting(&plan([(0, 300), (2, 300)], &second)).is_some());
        assert!(fitting(&plan([(1, 300), (2, 300)], &second[1..])).is_some());
        let same = [("a", 3, 400), ("a", 1, 10)];
        assert!(fitting(&plan([(1, 100), (1, 100)], &same)).is_none());
    }
}
