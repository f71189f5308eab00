//! Six hosts, and what runs on them: three machines and two programs, each of which has a part
//! on a host that is not its home.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use weft_tests::boot::{Boot, Images, Monitor};
use weft_tests::fleet::{Fleet, Started, Wanted, words};
use weft_tests::guest::{Ended, Guest};
use weft_tests::run::End;

use super::standing::PERIOD_MS;
use crate::program::Place;

/// The host that is left, and the one with room for what leaves it.
pub(super) const LEFT: usize = 4;
pub(super) const SPARE: usize = 5;
/// What each lends. The first four are homes: what runs there does not fit, so each of these has
/// a part elsewhere. All have two cores, as this host has: a home has one for each.
const HOSTS: [(&str, &str); 6] = [
    ("alder", "1060M"),
    ("birch", "680M"),
    ("cedar", "600M"),
    ("douglas", "800M"),
    ("ebony", "3200M"),
    ("fuchsia", "3200M"),
];
/// Machines: their names, homes, vCPUs, and the vCPU on which the line is written that is timed.
/// The home of the third one lacks memory, and no vCPU.
const MACHINES: [(&str, usize, usize, u32); 3] =
    [("m1", 0, 2, 1), ("m2", 0, 2, 1), ("m3", 1, 1, 0)];
const MACHINE_MIB: u64 = 400;
/// What a guest writes to, and how many pages a second.
const WRITTEN_MIB: u32 = 48;
const PAGES_PER_S: u32 = 2000;
/// A guest stops when it is told to; this is for a benchmark that fails before.
const GUEST_S: u32 = 1200;
/// Programs: their names, homes, memory and words.
const PROGRAMS: [(&str, usize, &str, &str); 2] = [
    ("tides", 2, "400M", "110 7 45"),
    ("heap_sort", 3, "520M", "300 7"),
];
/// A call, a boot and an end come within this.
pub(super) const BOUND: Duration = Duration::from_secs(180);

pub(super) fn name(host: usize) -> &'static str {
    HOSTS[host].0
}

pub(super) struct Machine {
    pub(super) name: &'static str,
    pub(super) started: Instant,
    guest: Guest,
}

/// A program that runs, and its native output.
struct Program {
    name: &'static str,
    started: Started,
}

pub(super) struct Site<'a> {
    pub(super) fleet: Fleet<'a>,
    pub(super) machines: Vec<Machine>,
    programs: Vec<Program>,
}

impl<'a> Site<'a> {
    /// A cluster in which the machines run.
    pub(super) fn new(fleet: Fleet<'a>, place: &Place, images: &Images) -> Result<Site<'a>> {
        let mut site = Site {
            fleet,
            machines: Vec::new(),
            programs: Vec::new(),
        };
        site.fleet.form(HOSTS.len())?;
        for host in (0..HOSTS.len()).filter(|host| *host != LEFT) {
            site.call(&format!("node cordon {}", name(host)))?;
        }
        let small = images.small(&place.weft)?;
        let mut small = small.with_program(&place.programs.join("tick"), &place.work)?;
        // Commands run in other folders.
        small.kernel = small.kernel.canonicalize()?;
        for (name, home, cpus, timed) in MACHINES {
            let machine = site.with_home(home, |site| {
                site.start_machine(&small, name, home, cpus, timed)
            })?;
            site.machines.push(machine);
        }
        for machine in &mut site.machines {
            let works = machine.guest.wait_for("dirty: at work", BOUND);
            works.with_context(|| format!("{} does not come up", machine.name))?;
        }
        site.call(&format!("node uncordon {}", name(SPARE)))?;
        Ok(site)
    }

    pub(super) fn wanted() -> [Wanted<'static>; HOSTS.len()] {
        HOSTS.map(|(name, memory)| Wanted {
            name,
            memory,
            settings: "",
        })
    }

    /// `weft` on a host that nothing leaves.
    pub(super) fn command(&self, words: &[&str]) -> Command {
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        self.fleet.command(SPARE, &words)
    }

    pub(super) fn call(&mut self, line: &str) -> Result<String> {
        self.fleet.call(SPARE, &words(line))
    }

    /// Does something while nothing but this home and [`LEFT`] takes what is new.
    fn with_home<T>(
        &mut self,
        home: usize,
        what: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<T> {
        self.call(&format!("node uncordon {}", name(home)))?;
        let outcome = what(self)?;
        self.call(&format!("node cordon {}", name(home)))?;
        Ok(outcome)
    }

    /// Where the parts of all that runs are: names and hosts.
    pub(super) fn parts(&mut self) -> Result<Vec<(String, Vec<String>)>> {
        let plan = self.fleet.json(SPARE, "plan --json")?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let runs = plan["runs"].as_array().context("no runs")?.iter();
        let hosts = |run: &Value| {
            let parts = run["parts"].as_array().into_iter().flatten();
            parts.map(|part| text(&part["host"])).collect()
        };
        Ok(runs.map(|run| (text(&run["name"]), hosts(run))).collect())
    }

    /// Waits until an aggregate has a part on the host that is left, beside its home.
    fn until_there(&mut self, wanted: &str) -> Result<()> {
        let begun = Instant::now();
        loop {
            let parts = self.parts()?;
            let here = |(found, hosts): &(String, Vec<String>)| {
                found.starts_with(wanted) && hosts.len() == 2 && hosts[1] == name(LEFT)
            };
            if parts.iter().any(here) {
                return Ok(());
            }
            ensure!(
                begun.elapsed() < Duration::from_secs(30),
                "{wanted} is not on {}: {parts:?}",
                name(LEFT)
            );
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn start_machine(
        &mut self,
        small: &Boot,
        name: &'static str,
        home: usize,
        cpus: usize,
        timed: u32,
    ) -> Result<Machine> {
        let mut boot = small.running(&format!(
            "dirty {WRITTEN_MIB} {PAGES_PER_S} {GUEST_S} {WRITTEN_MIB} & \
             taskset {} /tick {PERIOD_MS} & read line; touch /tmp/told; wait",
            1 << timed
        ));
        boot.cpus = cpus;
        boot.memory_mib = MACHINE_MIB;
        boot.options = words(&format!("--cluster --name {name}"));
        let boot = boot.command(Monitor::Soft);
        let words: Vec<String> = boot
            .get_args()
            .map(|word| word.to_string_lossy().into_owned())
            .collect();
        let started = Instant::now();
        let guest = Guest::start(&mut self.fleet.command(home, &words))?;
        let machine = Machine {
            name,
            started,
            guest,
        };
        self.until_there(name)?;
        Ok(machine)
    }

    /// Starts the programs, and waits until each has pages on the host that is left.
    pub(super) fn start_programs(&mut self, programs: &Path) -> Result<()> {
        self.call(&format!("node cordon {}", name(SPARE)))?;
        for (name, home, memory, arguments) in PROGRAMS {
            let program = programs.join(name);
            let line = format!(
                "run --cluster --memory {memory} --stretch now -- {} {arguments}",
                program.display()
            );
            let started = self.with_home(home, |site| {
                let started = site.fleet.begin(home, name, &words(&line))?;
                // The cluster's names have no underscore.
                site.until_there(&name.replace('_', "-"))?;
                Ok(started)
            })?;
            self.programs.push(Program { name, started });
        }
        let begun = Instant::now();
        while !self.programs[0].started.printed().contains("100 rounds") {
            let said = || self.programs[0].started.said();
            ensure!(
                begun.elapsed() < BOUND,
                "tides does not come up: {}",
                said()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
        self.call(&format!("node uncordon {}", name(SPARE)))?;
        Ok(())
    }

    /// All that runs has not ended.
    pub(super) fn all_run(&mut self) -> Result<()> {
        for program in &mut self.programs {
            if let Some(end) = program.started.end() {
                anyhow::bail!(
                    "{} has ended: {end}: {}",
                    program.name,
                    program.started.said()
                );
            }
        }
        for machine in &mut self.machines {
            ensure!(machine.guest.is_running()?, "{} has ended", machine.name);
        }
        Ok(())
    }

    /// Ends all, and judges it. The consoles, by machine.
    pub(super) fn finish(self, programs: &Path) -> Result<Vec<(Instant, Ended)>> {
        for program in self.programs {
            let (end, ended) = program.started.finish(BOUND);
            let name = program.name;
            ensure!(end == End::Exit(0), "{name}: {end}: {}", ended.said());
            let (_, _, _, arguments) = PROGRAMS
                .into_iter()
                .find(|of| of.0 == name)
                .context("one of these")?;
            let native = Command::new(programs.join(name))
                .args(arguments.split(' '))
                .output()?;
            let native = String::from_utf8_lossy(&native.stdout).into_owned();
            ensure!(
                ended.printed() == native,
                "{name} printed {}, not {native}",
                ended.printed()
            );
        }
        let mut all = Vec::new();
        for mut machine in self.machines {
            machine.guest.tell()?;
            let ended = machine.guest.finish(BOUND)?;
            let name = machine.name;
            ensure!(
                ended.ended_well() && ended.line("dirty: right").is_some(),
                "{name}: {}\n{}",
                ended.stderr,
                ended.tail(12)
            );
            all.push((machine.started, ended));
        }
        Ok(all)
    }
}
