//! Runs fuzz targets on stable Rust, without coverage:
//!
//! `weft-fuzz PREFIX [--seconds N] [--seed N] [--corpus DIR]` runs every target
//! whose name starts with PREFIX, N seconds in all. Inputs are valid ones,
//! mutated a few times, and what DIR/TARGET holds. The input being run is in
//! `artifacts/TARGET.current`, so it is there after a crash of any kind.
//!
//! `weft-fuzz TARGET --replay FILE` runs one input again.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use weft_fuzz::random::Random;
use weft_fuzz::{TARGETS, Target};

struct Options {
    prefix: String,
    seconds: u64,
    seed: u64,
    corpus: PathBuf,
    replay: Option<PathBuf>,
}

fn options() -> Option<Options> {
    let mut arguments = std::env::args().skip(1);
    let mut options = Options {
        prefix: arguments.next()?,
        seconds: 60,
        seed: 1,
        corpus: PathBuf::from("corpus"),
        replay: None,
    };
    while let Some(argument) = arguments.next() {
        let value = arguments.next()?;
        match argument.as_str() {
            "--seconds" => options.seconds = value.parse().ok()?,
            "--seed" => options.seed = value.parse().ok()?,
            "--corpus" => options.corpus = value.into(),
            "--replay" => options.replay = Some(value.into()),
            _ => return None,
        }
    }
    Some(options)
}

fn main() -> ExitCode {
    let Some(options) = options() else {
        eprintln!(
            "usage: weft-fuzz PREFIX [--seconds N] [--seed N] [--corpus DIR] [--replay FILE]"
        );
        return ExitCode::from(2);
    };
    let chosen: Vec<&Target> = TARGETS
        .iter()
        .filter(|target| target.name.starts_with(&options.prefix))
        .collect();
    if chosen.is_empty() {
        let names: Vec<_> = TARGETS.iter().map(|target| target.name).collect();
        eprintln!(
            "no target starts with {}; there are {}",
            options.prefix,
            names.join(", ")
        );
        return ExitCode::from(2);
    }
    match run_all(&options, &chosen) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("weft-fuzz: {error}");
            ExitCode::from(2)
        }
    }
}

fn run_all(options: &Options, chosen: &[&Target]) -> std::io::Result<()> {
    if let Some(file) = &options.replay {
        let input = fs::read(file)?;
        chosen.iter().for_each(|target| (target.run)(&input));
        return Ok(());
    }
    fs::create_dir_all("artifacts")?;
    let share = Duration::from_secs(options.seconds) / chosen.len() as u32;
    for target in chosen {
        let runs = fuzz(target, share, options)?;
        println!(
            "{:<20} {runs:>10} runs in {:>5.1} s, seed {}",
            target.name,
            share.as_secs_f64(),
            options.seed
        );
    }
    Ok(())
}

fn corpus(folder: &Path) -> Vec<Vec<u8>> {
    let Ok(entries) = fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    paths
        .iter()
        .filter_map(|path| fs::read(path).ok())
        .collect()
}

fn fuzz(target: &Target, share: Duration, options: &Options) -> std::io::Result<u64> {
    let known = corpus(&options.corpus.join(target.name));
    let current = File::create(format!("artifacts/{}.current", target.name))?;
    let mut random = Random::new(options.seed);
    let end = Instant::now() + share;
    let mut runs = 0;
    while Instant::now() < end {
        let mut input = match known.len() {
            0 => (target.valid)(&mut random),
            count if random.below(4) > 0 => known[random.below(count)].clone(),
            _ => (target.valid)(&mut random),
        };
        let other = (target.valid)(&mut random);
        for _ in 0..random.below(6) {
            random.mutate(&mut input, &other);
        }
        current.set_len(input.len() as u64)?;
        current.write_all_at(&input, 0)?;
        (target.run)(&input);
        runs += 1;
    }
    Ok(runs)
}
