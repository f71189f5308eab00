//! One run of a benchmark program, natively or under `weft`.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, ensure};
use serde_json::Value;
use weft_tests::run::{End, Invocation, run};
use weft_tests::stats::Counters;

/// A benchmark run that takes longer has failed.
pub const BOUND: Duration = Duration::from_secs(600);

/// Where things are.
#[derive(Debug, Clone)]
pub struct Place {
    /// The `weft` that is measured.
    pub weft: PathBuf,
    /// The built programs.
    pub programs: PathBuf,
    /// Scratch.
    pub work: PathBuf,
}

/// How `weft run` is called, beside the program.
#[derive(Debug, Clone, Default)]
pub struct Call {
    /// Words before `weft`: a namespace.
    pub prefix: Vec<OsString>,
    /// Options of `weft run`.
    pub options: Vec<String>,
    pub environment: Vec<(OsString, OsString)>,
}

impl Call {
    /// A call with these options, split at spaces.
    pub fn new(options: &str) -> Call {
        Call {
            options: options.split_whitespace().map(str::to_string).collect(),
            ..Call::default()
        }
    }

    /// The same with more options.
    pub fn with(&self, options: &str) -> Call {
        let mut call = self.clone();
        call.options
            .extend(options.split_whitespace().map(str::to_string));
        call
    }

    /// The same, ending after the set-up.
    pub fn setup_only(&self) -> Call {
        let mut call = self.clone();
        call.environment.push(("SETUP_ONLY".into(), "1".into()));
        call
    }
}

/// What came of it.
#[derive(Debug, Clone, Default)]
pub struct Measured {
    /// Seconds from start to end of the process.
    pub wall_s: f64,
    /// Seconds of the measured phase, as the program says.
    pub measured_s: Option<f64>,
    /// What the program printed on standard error.
    pub stderr: String,
    /// What it printed on standard output: its checksum.
    pub stdout: String,
    /// The counters; empty for a native run.
    pub counters: Counters,
}

impl Measured {
    /// Bytes over all links, each counted once.
    pub fn bytes(&self) -> u64 {
        self.counters.total(|node| node.bytes_sent)
    }

    /// The number before a phrase on standard error: `12.3` in "12.3 ns per call".
    pub fn number_before(&self, phrase: &str) -> Result<f64> {
        let line = self
            .stderr
            .lines()
            .rev()
            .find(|line| line.contains(phrase))
            .ok_or_else(|| anyhow!("no `{phrase}` in: {}", self.stderr.trim()))?;
        let before = line.split(phrase).next().unwrap_or("").trim_end();
        let word = before.rsplit(' ').next().unwrap_or("");
        word.parse()
            .with_context(|| format!("no number before `{phrase}` in `{line}`"))
    }

    /// The number after a phrase on standard error.
    pub fn number_after(&self, phrase: &str) -> Result<f64> {
        let (_, after) = self
            .stderr
            .rsplit_once(phrase)
            .ok_or_else(|| anyhow!("no `{phrase}` in: {}", self.stderr.trim()))?;
        let word = after.split_whitespace().next().unwrap_or("");
        word.parse()
            .with_context(|| format!("no number after `{phrase}`: `{word}`"))
    }
}

/// Runs it and reads what it left; `None` when it was ended at its bound.
fn finish(invocation: &Invocation, statistics: Option<&Path>) -> Result<Option<Measured>> {
    let outcome = run(invocation)?;
    if outcome.end == End::Hang {
        return Ok(None);
    }
    ensure!(
        outcome.end == End::Exit(0),
        "{}: {}: {}",
        invocation.to_line(),
        outcome.end,
        outcome.stderr.trim()
    );
    let mut measured = Measured {
        wall_s: outcome.wall.as_secs_f64(),
        stderr: outcome.stderr,
        stdout: fs::read_to_string(&outcome.stdout)?,
        counters: statistics
            .map(Counters::read)
            .transpose()?
            .unwrap_or_default(),
        ..Measured::default()
    };
    // Absent after a run that ended with the set-up.
    measured.measured_s = measured.number_after("measured ").ok();
    Ok(Some(measured))
}

impl Place {
    /// What `weft vm …` says of a machine that runs in the scratch folder.
    pub fn ask_machine(&self, words: &[&str]) -> Result<Value> {
        let output = Command::new(&self.weft)
            .arg("vm")
            .args(words)
            .arg("--json")
            .env("XDG_RUNTIME_DIR", &self.work)
            .output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(
            output.status.success(),
            "weft vm {}: {said}",
            words.join(" ")
        );
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    fn program(&self, words: &str) -> Vec<OsString> {
        let mut words = words.split_whitespace();
        let name = words.next().unwrap_or_default();
        let mut command = vec![self.programs.join(name).into_os_string()];
        command.extend(words.map(OsString::from));
        command
    }

    /// Runs `program arguments` natively.
    pub fn native(&self, words: &str) -> Result<Measured> {
        let invocation = Invocation::new(&self.program(words), &self.work.join("native"));
        finish(&invocation.bounded(BOUND), None)?.with_context(|| format!("{words} takes forever"))
    }

    /// Runs it under `weft`.
    pub fn weft(&self, call: &Call, words: &str) -> Result<Measured> {
        self.weft_within(call, words, BOUND)?
            .with_context(|| format!("{words} takes forever under weft"))
    }

    /// Runs it under `weft`; `None` when it takes longer than `bound`.
    pub fn weft_within(
        &self,
        call: &Call,
        words: &str,
        bound: Duration,
    ) -> Result<Option<Measured>> {
        let directory = self.work.join("weft");
        fs::create_dir_all(&directory)?;
        let statistics = directory.join("stats.json");
        if statistics.exists() {
            fs::remove_file(&statistics)?;
        }
        let mut command = call.prefix.clone();
        command.extend([self.weft.clone().into_os_string(), "run".into()]);
        command.extend(call.options.iter().map(OsString::from));
        let mut option = OsString::from("json=");
        option.push(&statistics);
        command.extend(["--stats".into(), option, "--".into()]);
        command.extend(self.program(words));
        let mut invocation = Invocation::new(&command, &directory).bounded(bound);
        invocation.environment = call.environment.clone();
        finish(&invocation, Some(&statistics))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_found_in_sentences() {
        let measured = Measured {
            stderr: "round 0: 12.5 ns per page\nset-up 0.1 s, measured 0.25 s\n".to_string(),
            ..Measured::default()
        };
        assert_eq!(measured.number_before(" ns per page").ok(), Some(12.5));
        assert_eq!(measured.number_after("measured ").ok(), Some(0.25));
        assert!(measured.number_after("missing ").is_err());
    }
}
