//! What a program gains when its machines move to hosts that come later (ELViC, tables 5 to 8).

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use weft_tests::boot::Images;

use super::cluster::{Cluster, Hosts};
use crate::program::Place;
use crate::results::{Goal, Table, digits, median};

/// Processors at first, and later.
const FEW: usize = 1;
const MANY: usize = 2;
/// Seconds after the launcher's start when more are wanted: some seconds into the program.
const GROWS_AFTER_S: u32 = 8;
/// Four machines of one vCPU, or one of four.
const MACHINES: &str = "--vms 4 --memory 192M --time 60 --margin 5";
const ONE_MACHINE: &str = "--one-machine --cpus 4 --memory 256M --time 60 --margin 5";

/// ScaLAPACK's timers have memory for no larger product, and for no more of them.
const PRODUCT: &str = "560";
const PRODUCTS: usize = 20;

struct Program {
    name: &'static str,
    machines: &'static str,
    words: &'static str,
    /// What its output has if it is right.
    right: &'static str,
    /// Of the possible gain, at least.
    goal: Option<f64>,
}

const PROGRAMS: [Program; 4] = [
    Program {
        name: "EP, 2^31 pairs",
        machines: MACHINES,
        words: "ep 31",
        right: ": right",
        goal: Some(79.0),
    },
    Program {
        name: "the same, on one machine",
        machines: ONE_MACHINE,
        words: "ep 31",
        right: ": right",
        goal: Some(79.0),
    },
    Program {
        name: "PDGEMM, 560 × 560, 20 times",
        machines: MACHINES,
        words: "pdgemm",
        right: "|  PDGEMM",
        goal: Some(57.0),
    },
    Program {
        name: "ring, 1,000 rounds",
        machines: MACHINES,
        words: "talk ring 1000",
        right: ": right",
        goal: None,
    },
];

/// ELViC's three columns.
const WAYS: [(&str, &str, usize); 3] = [
    ("few", "--hosts 1 --static", FEW),
    ("many", "--hosts 2 --static", MANY),
    ("grown", "--hosts 1", MANY),
];

/// The table `mpi-gain`.
pub fn gain(place: &Place, images: &Images, repeat: usize) -> Result<Table> {
    let mut samples: BTreeMap<(usize, usize), Vec<f64>> = BTreeMap::new();
    for _ in 0..repeat {
        for (number, program) in PROGRAMS.iter().enumerate() {
            for (way, (name, options, hosts)) in WAYS.iter().enumerate() {
                let hosts = Hosts::processors(*hosts)?;
                let grow = match *name {
                    "grown" => format!("--grow {MANY}@{GROWS_AFTER_S}"),
                    _ => String::new(),
                };
                let rest = words(program, place, images)?;
                let machines = program.machines;
                let options = format!("{machines} {options} {grow} {rest}");
                let said = Cluster::start(place, images, &hosts, &options)?.finish()?;
                ensure!(
                    said.output.contains(program.right),
                    "{}: {}{}",
                    program.name,
                    said.output,
                    said.messages
                );
                let moved = said.changes();
                ensure!((moved > 0) == (*name == "grown"), "{name}: {moved} moves");
                samples
                    .entry((number, way))
                    .or_default()
                    .push(said.program_s()?);
            }
        }
    }
    let mut made = table(&samples)?;
    let of =
        |(program, way): &(usize, usize)| format!("{}, {}", PROGRAMS[*program].name, WAYS[*way].0);
    let named = samples.iter().map(|(key, values)| (of(key), json!(values)));
    made.samples = serde_json::Value::Object(named.collect());
    Ok(made)
}

fn words(program: &Program, place: &Place, images: &Images) -> Result<String> {
    if program.words != "pdgemm" {
        return Ok(format!("-- {}", program.words));
    }
    let folder = std::fs::canonicalize(images.folder.join("mpi/scalapack"))
        .context("ScaLAPACK's timers are missing: `make guest-mpi`")?;
    let input = place.work.join("PDBLAS3TIM.dat");
    std::fs::write(&input, products(&folder)?)?;
    Ok(format!(
        "--with {} --with {} --no-copy -- dpb3tim",
        folder.display(),
        input.display()
    ))
}

/// The input of the timers for as many products as they take: each value once for each.
fn products(scalapack: &Path) -> Result<String> {
    let one = Command::new("sh")
        .arg(scalapack.join("bin/pblas3-input"))
        .args([PRODUCT, "2", "2"])
        .output()?;
    let (mut text, mut repeats) = (String::new(), false);
    for line in String::from_utf8(one.stdout)?.lines() {
        match line.split_once('\t') {
            Some((_, "tests")) => {
                repeats = true;
                text += &format!("{PRODUCTS}\ttests\n");
            }
            Some((value, name)) if repeats => {
                let values = vec![value; PRODUCTS].join(" ");
                text += &format!("{values}\t{name}\n");
            }
            _ => text += &format!("{line}\n"),
        }
    }
    Ok(text)
}

fn table(samples: &BTreeMap<(usize, usize), Vec<f64>>) -> Result<Table> {
    let about = format!(
        "An MPI program of 4 ranks on 4 machines of one vCPU, or on one of 4 (`--one-machine`): on {FEW} processor, on {MANY}, and \
         grown from {FEW} to {MANY} some seconds after its start. Hosts are processors of this \
         machine. The gain is what the grown run won of what {MANY} processors win (ELViC, tables 5 \
         to 8). A program that talks may not be slower than without moving by more than 5 %."
    );
    let head = [
        "program",
        "few, s",
        "many, s",
        "grown, s",
        "gain, %",
        "goal",
        "met",
        "grown / few",
        "goal",
        "met",
    ];
    let mut table = Table::new("mpi-gain", &about, &head);
    for (number, program) in PROGRAMS.iter().enumerate() {
        let of = |way| {
            let known = samples.get(&(number, way));
            known.and_then(|known| median(known)).context("no sample")
        };
        let (few, many, grown) = (of(0)?, of(1)?, of(2)?);
        let gain = 100.0 * (few - grown) / (few - many);
        let mut row = vec![program.name.to_owned()];
        row.extend([few, many, grown].map(|value| digits(Some(value))));
        row.push(digits(Some(gain)));
        match program.goal {
            Some(goal) => row.extend(Goal::AtLeast(goal).cells(Some(gain))),
            None => row.extend(["—".to_owned(), "—".to_owned()]),
        }
        row.push(digits(Some(grown / few)));
        row.extend(Goal::AtMost(1.05).cells(Some(grown / few)));
        table.rows.push(row);
    }
    Ok(table)
}
