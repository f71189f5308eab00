//! What needs no coverage, on any build:
//!
//! `weft-fuzz list` names the targets.
//!
//! `weft-fuzz seeds TARGET COUNT FOLDER` writes valid inputs.
//!
//! `weft-fuzz replay [TARGET] PATH...` runs inputs: PATH is a file, or a folder of
//! files; without TARGET, a folder with a folder for each target.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use weft_fuzz::random::Random;
use weft_fuzz::{TARGETS, Target, target};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match words[..] {
        ["list"] => {
            TARGETS
                .iter()
                .for_each(|target| println!("{}", target.name));
            Ok(())
        }
        ["seeds", name, count, folder] => seeds(name, count, Path::new(folder)),
        ["replay", folder] => replay_all(Path::new(folder)),
        ["replay", name, ref paths @ ..] if !paths.is_empty() => replay_some(name, paths),
        _ => Err(
            "usage: weft-fuzz list | seeds TARGET COUNT FOLDER | replay [TARGET] PATH..."
                .to_string(),
        ),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("weft-fuzz: {error}");
            ExitCode::from(2)
        }
    }
}

fn named(name: &str) -> Result<&'static Target, String> {
    target(name).ok_or_else(|| format!("there is no target {name}: see `weft-fuzz list`"))
}

fn seeds(name: &str, count: &str, folder: &Path) -> Result<(), String> {
    let target = named(name)?;
    let count = count.parse().map_err(|error| format!("COUNT: {error}"))?;
    fs::create_dir_all(folder).map_err(|error| at(folder, &error))?;
    for seed in 0..count {
        let path = folder.join(seed.to_string());
        let input = (target.valid)(&mut Random::new(seed));
        fs::write(&path, input).map_err(|error| at(&path, &error))?;
    }
    Ok(())
}

/// Every target must have inputs, and every folder a target: a renamed target must not
/// lose its regression inputs silently.
fn replay_all(corpus: &Path) -> Result<(), String> {
    for folder in sorted(corpus)? {
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        named(&name).map_err(|error| format!("{}: {error}", folder.display()))?;
    }
    for target in TARGETS {
        let inputs = sorted(&corpus.join(target.name))?;
        if inputs.is_empty() {
            return Err(format!("{}: the corpus has no input", target.name));
        }
        replay(target, &inputs)?;
    }
    Ok(())
}

fn replay_some(name: &str, paths: &[&str]) -> Result<(), String> {
    let mut inputs = Vec::new();
    for path in paths.iter().map(Path::new) {
        match path.is_dir() {
            true => inputs.extend(sorted(path)?),
            false => inputs.push(path.to_owned()),
        }
    }
    replay(named(name)?, &inputs)
}

fn replay(target: &Target, inputs: &[PathBuf]) -> Result<(), String> {
    for path in inputs {
        let input = fs::read(path).map_err(|error| at(path, &error))?;
        let told = Told(path);
        (target.run)(&input);
        std::mem::forget(told);
    }
    println!("{:<24} {:>5} inputs", target.name, inputs.len());
    Ok(())
}

/// Names the input whose run panics.
struct Told<'a>(&'a Path);

impl Drop for Told<'_> {
    fn drop(&mut self) {
        eprintln!("weft-fuzz: the input is {}", self.0.display());
    }
}

fn sorted(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let entries = fs::read_dir(folder).map_err(|error| at(folder, &error))?;
    let mut paths = entries
        .map(|entry| Ok(entry?.path()))
        .collect::<io::Result<Vec<_>>>()
        .map_err(|error| at(folder, &error))?;
    paths.sort();
    Ok(paths)
}

fn at(path: &Path, error: &io::Error) -> String {
    format!("{}: {error}", path.display())
}
