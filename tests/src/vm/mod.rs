//! The command `weft vm`, with a guest of a few instructions that does what is
//! typed (`tests/programs/typed-guest.S`): what is refused before the start, how
//! machines end, the console, the API and confinement.
//!
//! Needs no privilege; as root it also shows how root is given up. What shows a
//! machine over several nodes needs Linux (`make guest`); one over several hosts
//! needs root, for network namespaces.

mod checkpoints;
mod errors;
mod hosts;
mod life;
mod memory;
mod outside;
mod saves;
mod seeing;
mod terminal;

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};

use crate::boot::Images;
use crate::context::{Context, kvm_missing};
use crate::guest::{Guest, code, ended_with, leftovers};
use crate::report::{Report, Verdict};

/// The bound of everything that a machine does.
const BOUND: Duration = Duration::from_secs(30);

/// A test; an error is its failure, the text a note.
type Check = fn(&Bench) -> Result<String>;

/// What a test has.
struct Bench<'a> {
    context: &'a Context,
    /// Back end under test.
    back_end: &'static str,
    /// Where machines are found, apart from all others'.
    run_directory: PathBuf,
    /// Files of this test.
    directory: PathBuf,
    /// More of what is done at random moments.
    long: bool,
}

/// What all tests of this folder are run with.
struct Runner<'a> {
    context: &'a Context,
    images: &'a Images,
    names: &'a [String],
    /// The long tests as well.
    long: bool,
    report: &'a Report,
}

impl Runner<'_> {
    /// Runs one test in a folder of its own, if it is wanted. `missing`: why it cannot run
    /// here.
    fn run(
        &self,
        back_end: &'static str,
        name: &str,
        missing: Option<String>,
        test: impl FnOnce(&Bench<'_>) -> Result<String>,
    ) {
        if !self.wants(name) {
            return;
        }
        if let Some(why) = missing {
            self.report.add(name, Duration::ZERO, Verdict::Skipped(why));
            return;
        }
        let started = Instant::now();
        let bench = Bench::new(self, back_end, name);
        let outcome = bench.and_then(|bench| test(&bench));
        let verdict = match outcome {
            Ok(note) => Verdict::Passed(note),
            Err(error) => Verdict::Failed(vec![format!("{error:#}")]),
        };
        self.report.add(name, started.elapsed(), verdict);
    }

    /// Whether the test was named, or none was.
    fn wants(&self, name: &str) -> bool {
        self.names.is_empty() || self.names.iter().any(|part| name.contains(part))
    }
}

/// Runs all tests, or those named.
pub fn run_vm(
    context: &Context,
    images: &Images,
    (names, long): (&[String], bool),
    report: &Report,
) -> Result<()> {
    let runner = Runner {
        context,
        images,
        names,
        long,
        report,
    };
    errors::run(context, &|name| runner.wants(name), report)?;
    seeing::run(&runner);
    checkpoints::run(&runner);
    saves::run(&runner);
    memory::run(&runner);
    hosts::run(&runner);
    for (back_end, missing) in [("soft", None), ("kvm", kvm_missing())] {
        for (name, check) in life::CHECKS
            .iter()
            .chain(&outside::CHECKS)
            .chain(&terminal::CHECKS)
        {
            let name = format!("vm, {back_end}: {name}");
            runner.run(back_end, &name, missing.clone(), check);
        }
    }
    Ok(())
}

impl<'a> Bench<'a> {
    fn new(runner: &Runner<'a>, back_end: &'static str, name: &str) -> Result<Bench<'a>> {
        let context = runner.context;
        let directory = context.directory(&name.replace(':', ""))?;
        let run_directory = directory.join("run");
        std::fs::create_dir_all(&run_directory)?;
        Ok(Bench {
            context,
            back_end,
            run_directory,
            directory,
            long: runner.long,
        })
    }

    /// `weft`, with machines of this test only.
    fn weft(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.context.weft);
        command
            .args(words)
            .env("XDG_RUNTIME_DIR", &self.run_directory);
        crate::processes::heed(&mut command);
        command
    }

    /// `weft vm run` of the guest, with more options.
    fn run(&self, options: &[&str]) -> Command {
        let mut command = self.weft(&["vm", "run", "--memory", "16M", "--debug-exit"]);
        command.args(["--backend", self.back_end, "--kernel"]);
        command.arg(self.context.programs.join("typed-guest"));
        command.args(options);
        command
    }

    /// The same, until the guest is there.
    fn start(&self, options: &[&str]) -> Result<Guest> {
        let mut guest = Guest::start(&mut self.run(options))?;
        if guest.wait_for("ready", BOUND).is_none() {
            let ended = guest.finish(Duration::ZERO)?;
            bail!("the guest is not ready; stderr: {}", ended.stderr);
        }
        Ok(guest)
    }

    /// What `weft` says on standard output; an error with what it says on
    /// standard error when it fails.
    fn ask(&self, words: &[&str]) -> Result<String> {
        let output = self.weft(words).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(
            output.status.success(),
            "weft {}: {}",
            words.join(" "),
            said.trim()
        );
        Ok(String::from_utf8(output.stdout)?)
    }
}

/// Waits until something is so.
fn wait_until(what: &str, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + BOUND;
    while !is_so()? {
        ensure!(Instant::now() < deadline, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}
