//! Echo requests at a steady rate to a machine that moves meanwhile, what came back, and a
//! picture of it. `weft-bench ping` is this; the benchmark `vm-ping` and `make demo` use it.
//!
//! Whoever moves the machine says on standard input when: `step NAME`, and `done NOTE` at the
//! step's end. The end of the input ends the requests.

mod picture;
mod prober;
mod track;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Args;

pub use picture::draw;
use prober::Prober;
pub use track::{Ping, Step, Track, Worst};

/// What `weft-bench ping` is told.
#[derive(Debug, Args)]
pub struct Options {
    /// Who is asked.
    address: Ipv4Addr,
    /// Milliseconds from one request to the next.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=1000))]
    every_ms: u64,
    /// Where a picture goes.
    #[arg(long)]
    svg: Option<PathBuf>,
    /// Where the times of all requests and answers go.
    #[arg(long)]
    json: Option<PathBuf>,
}

/// Asks until the input ends, and reports. Needs the right to open raw sockets.
pub fn run(options: &Options) -> Result<()> {
    let prober = Prober::start(options.address, Duration::from_millis(options.every_ms))?;
    println!("{} answers", options.address);
    let mut steps = Vec::new();
    for line in BufReader::new(std::io::stdin()).lines() {
        let line = line.context("the steps on standard input")?;
        note(&mut steps, line.trim(), prober.now_s())?;
    }
    let track = Track {
        pings: prober.finish()?,
        steps,
    };
    if let Some(file) = &options.svg {
        let picture = picture::svg(&track);
        fs::write(file, picture).with_context(|| format!("{}", file.display()))?;
    }
    if let Some(file) = &options.json {
        let text = track.to_json().to_string();
        fs::write(file, text).with_context(|| format!("{}", file.display()))?;
    }
    let mut out = std::io::stdout();
    write!(out, "{}{}", picture::text(&track), track.report())?;
    Ok(())
}

/// Adds what a line of the input says.
pub(crate) fn note(steps: &mut Vec<Step>, line: &str, now_s: f64) -> Result<()> {
    let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
    match word {
        "step" => steps.push(Step {
            name: rest.to_owned(),
            note: String::new(),
            from_s: now_s,
            until_s: now_s,
        }),
        "done" => {
            let step = steps.last_mut().context("`done` without a `step`")?;
            step.until_s = now_s;
            rest.clone_into(&mut step.note);
        }
        _ => anyhow::bail!("`{line}` is neither `step NAME` nor `done NOTE`"),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_come_by_lines() {
        let mut steps = Vec::new();
        note(&mut steps, "step to alpha", 1.0).expect("a step");
        note(&mut steps, "done pause 2 ms", 3.0).expect("its end");
        let [step] = steps.as_slice() else {
            panic!("{steps:?}");
        };
        assert_eq!((step.name.as_str(), step.from_s), ("to alpha", 1.0));
        assert_eq!((step.note.as_str(), step.until_s), ("pause 2 ms", 3.0));
        assert!(note(&mut steps, "go", 4.0).is_err());
        assert!(note(&mut Vec::new(), "done", 4.0).is_err());
    }
}
