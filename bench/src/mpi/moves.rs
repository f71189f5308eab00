//! How long moves take against their forecasts, and many at once.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use weft_tests::boot::Images;

use super::cluster::{Cluster, Hosts};
use crate::program::Place;
use crate::results::{Goal, Table, digits, median};

/// Moves whose forecasts are judged.
const MOVES: usize = 200;
/// Before a forecast has learned.
const FIRST: usize = 20;
/// What a forecast may be off by, as a part of what the move took.
const OFF_MAX: f64 = 0.25;
/// Machines that move at once.
const AT_ONCE: usize = 8;
/// Longer than all of it.
const BOUND: Duration = Duration::from_secs(1500);

/// The table `mpi-moves`.
pub fn moves(place: &Place, images: &Images, _repeat: usize) -> Result<Table> {
    let about = format!(
        "Moves of machines of 128 MiB between hosts that are this host, EP in all of them. One \
         after the other: {MOVES} moves by releasing a host again and again; the forecast before \
         each against what it took. At once: {AT_ONCE} machines, each alone on its host, leave \
         {AT_ONCE} hosts for {AT_ONCE} others."
    );
    let head = [
        "moves",
        "number",
        "failed",
        "median s",
        "longest s",
        "forecast within 25 %, % of moves",
        "goal",
        "met",
    ];
    let mut table = Table::new("mpi-moves", &about, &head);
    let one = one_by_one(place, images)?;
    let judged = &one[FIRST.min(one.len())..];
    let good = judged
        .iter()
        .filter(|(took, expected)| (expected - took).abs() <= OFF_MAX * took);
    let share = 100.0 * good.count() as f64 / judged.len().max(1) as f64;
    table.rows.push(row(
        "one after the other",
        &one,
        Some(share),
        Goal::AtLeast(90.0),
    ));
    let all = at_once(place, images)?;
    table.rows.push(row("at once", &all, None, Goal::None));
    table.samples = json!({ "one after the other": one, "at once": all });
    Ok(table)
}

fn row(name: &str, moves: &[(f64, f64)], share: Option<f64>, goal: Goal) -> Vec<String> {
    let took: Vec<f64> = moves.iter().map(|(took, _)| *took).collect();
    let longest = took.iter().copied().fold(0.0, f64::max);
    let mut row = vec![
        name.to_owned(),
        moves.len().to_string(),
        "0".to_owned(),
        digits(median(&took)),
        digits(Some(longest)),
        digits(share),
    ];
    row.extend(goal.cells(share));
    row
}

/// Two hosts with a machine each; one of them is released again and again.
fn one_by_one(place: &Place, images: &Images) -> Result<Vec<(f64, f64)>> {
    let options = "--vms 2 --memory 128M --time 120 --margin 5 --hosts 2 -- ep 36";
    let mut cluster = Cluster::start(place, images, &Hosts::here(8), options)?;
    let begun = Instant::now();
    loop {
        let status = cluster.until("all machines are at rest", |status| {
            let machines = status["machines"].as_array();
            let rests = |machine: &serde_json::Value| machine["moves_to"].is_null();
            status["phase"] == "running"
                && machines.is_some_and(|machines| machines.iter().all(rests))
        })?;
        if status["moves"].as_u64().unwrap_or(0) >= MOVES as u64 {
            break;
        }
        ensure!(begun.elapsed() < BOUND, "{MOVES} moves took too long");
        let host = Cluster::host(&status, 0);
        // It may just have been left.
        let _ = cluster.ask(&["release", &host]);
        cluster.until("the machine has moved", |status| {
            Cluster::host(status, 0) != host
        })?;
    }
    end(cluster)
}

/// Each host has one machine, and all are released together.
fn at_once(place: &Place, images: &Images) -> Result<Vec<(f64, f64)>> {
    let options =
        format!("--vms {AT_ONCE} --memory 128M --time 120 --margin 5 --hosts {AT_ONCE} -- ep 36");
    let mut cluster = Cluster::start(place, images, &Hosts::here(3 * AT_ONCE), &options)?;
    let status = cluster.until("the program runs", |status| status["phase"] == "running")?;
    let names = status["hosts"].as_array().context("no hosts")?;
    let names: Vec<String> = names
        .iter()
        .filter_map(|host| Some(host["name"].as_str()?.to_owned()))
        .collect();
    for name in &names {
        cluster.ask(&["release", name])?;
    }
    cluster.until("all machines have moved", |status| {
        (0..AT_ONCE).all(|machine| {
            let host = Cluster::host(status, machine);
            !host.is_empty() && !names.contains(&host)
        })
    })?;
    end(cluster)
}

fn end(cluster: Cluster) -> Result<Vec<(f64, f64)>> {
    cluster.ask(&["exit"])?;
    let said = cluster.finish()?;
    ensure!(
        !said.messages.contains("did not move"),
        "a move failed: {}",
        said.messages
    );
    Ok(said.moves())
}
