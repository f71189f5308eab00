//! A real cluster for an hour: eight hosts with daemons, an etcd of three members, and random
//! starts, ends, drains, joins, kills, stops and cuts. Each host and each member is a network
//! namespace.
//!
//! What must hold, always: nothing runs twice; nothing is lost but what had a part on a host to
//! which something was done, and then a message names such a host; memory is as it was written. And
//! after each phase, when all is put right: the store has what runs, where it runs; what waits and
//! fits is placed; nothing stays behind. An observer judges by processes and by what they print.
//!
//! Needs root, `ip`, etcd, openssl and `make guest`.

mod driver;
mod events;
mod ledger;
mod observer;
mod quiet;
mod site;
mod work;

use std::time::{Duration, Instant};

use anyhow::Result;

use self::driver::Driver;
use self::site::Site;
use crate::boot::{Images, SMALL};
use crate::context::Context;
use crate::fleet;
use crate::report::{Report, Verdict};

const NAME: &str = "cluster: soak";
/// Between two events, in milliseconds.
const PAUSE_MS: u64 = 3_000;
/// A phase of events, in seconds.
const PHASE_S: (u64, u64) = (50, 120);
/// All is ended after each third phase.
const PHASES: usize = 3;

/// Whether, and for how long.
#[derive(Debug, Clone)]
pub struct Soak {
    pub images: Images,
    pub duration: Duration,
}

pub(super) fn run(context: &Context, soak: &Soak, names: &[String], report: &Report) {
    if !names.is_empty() && !names.iter().any(|name| NAME.contains(name.as_str())) {
        return;
    }
    let begun = Instant::now();
    let verdict = match lacks(context, &soak.images) {
        Some(why) => Verdict::Skipped(why),
        None => match rounds(context, soak) {
            Ok((_, failures)) if !failures.is_empty() => Verdict::Failed(failures),
            Ok((summary, _)) => Verdict::Passed(summary),
            Err(error) => Verdict::Failed(vec![format!("{error:#}")]),
        },
    };
    report.add(NAME, begun.elapsed(), verdict);
}

fn lacks(context: &Context, images: &Images) -> Option<String> {
    fleet::missing(context).or_else(|| images.missing(&SMALL))
}

fn rounds(context: &Context, soak: &Soak) -> Result<(String, Vec<String>)> {
    let file = |name: &str| -> Result<String> {
        // Commands run in folders of their own.
        let file = soak.images.file(name)?.canonicalize()?;
        Ok(file.to_string_lossy().into_owned())
    };
    let images = (file(SMALL[0])?, file(SMALL[1])?);
    let site = Site::new(context)?;
    println!(
        "soak: seed {}, {:?}; {}",
        context.seed,
        soak.duration,
        site.fleet.directory.display()
    );
    let mut driver = Driver::new(site, images, context.seed)?;
    let begun = Instant::now();
    for phase in 1.. {
        let left = soak.duration.saturating_sub(begun.elapsed());
        let length = PHASE_S.0 + driver.random.below(PHASE_S.1 - PHASE_S.0);
        let end = Instant::now() + Duration::from_secs(length).min(left);
        while Instant::now() < end {
            driver.event()?;
            let pause = Duration::from_millis(500 + driver.random.below(PAUSE_MS));
            let next = Instant::now() + pause;
            while Instant::now() < next {
                driver.tick()?;
            }
        }
        let is_over = begun.elapsed() >= soak.duration;
        driver.quiet(is_over || phase % PHASES == 0)?;
        println!(
            "soak: phase {phase}, {:.0} s: {} started, {} run or wait, {} failures",
            begun.elapsed().as_secs_f64(),
            driver.started,
            driver.aggregates.len(),
            driver.failures.len()
        );
        if is_over {
            break;
        }
    }
    let counts = driver.counts.iter();
    let counts: Vec<String> = counts
        .map(|(kind, count)| format!("{kind}: {count}"))
        .collect();
    let [moved, failed] = driver.site.moves;
    println!(
        "soak: {}, moves: {moved}, moves that failed: {failed}",
        counts.join(", ")
    );
    let summary = format!("seed {}, {} aggregates", context.seed, driver.started);
    Ok((summary, driver.failures))
}
