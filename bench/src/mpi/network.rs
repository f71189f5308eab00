//! The network of a cluster's machines: on one host, on two, and while they move (ELViC, tables 3
//! and 4, figures 2 and 3).

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use weft_tests::boot::Images;
use weft_tests::namespace::{Star, missing};

use super::cluster::{Cluster, Hosts, Said, number_after};
use crate::ping::{Ping, Step, Track, draw};
use crate::program::Place;
use crate::results::{Goal, Table, digits, median};

/// How long round trips, and a stream, are measured.
const TRIP_S: u32 = 20;
const STREAM_S: u32 = 10;
/// Two machines.
const MACHINES: &str = "--vms 2 --memory 128M --time 60 --margin 5";
/// A tap device of each host on a VXLAN, and what that carries.
const TAP: &str = "weft0";
const MTU: u32 = 1450;
/// In the environment: where a picture of the last row goes.
const PICTURE: &str = "WEFT_PICTURE";
/// The moves begin so long after the program, and after each other: both are measured alone.
const APART: Duration = Duration::from_secs(4);
/// What a program may see of a move, in milliseconds.
const GAP_MS: f64 = 50.0;

/// Round trips of one run.
struct Trips {
    median_us: f64,
    longest_ms: f64,
    /// Of each 100 ms: when it began, s, and the longest, ms.
    pieces: Vec<(f64, f64)>,
}

impl Trips {
    /// The pieces on one line, as `SECONDS:MILLISECONDS`.
    fn listed(&self) -> String {
        let pieces = self.pieces.iter();
        let words = pieces.map(|(at_s, longest_ms)| format!("{at_s:.3}:{longest_ms:.1}"));
        words.collect::<Vec<_>>().join(" ")
    }
}

/// The table `mpi-network`.
pub fn network(place: &Place, images: &Images, repeat: usize) -> Result<Table> {
    let about = format!(
        "Two machines with a rank each, on this host once or twice. A round trip is one byte to and \
         fro by Open MPI over TCP, for {TRIP_S} s; both ranks wait busily. With moves the first \
         machine goes to a third host after some seconds, and then the second one to another; \
         VXLAN: hosts are network namespaces, machines talk over the site's VXLAN (`--tap`). Rows \
         without moves show what this host's other work does to the longest trip."
    );
    let head = [
        "machines",
        "median trip, µs",
        "longest trip, ms",
        "goal",
        "met",
        "stream of 4 MiB, MB/s",
    ];
    let mut table = Table::new("mpi-network", &about, &head);
    let mut samples = Vec::new();
    for (name, hosts) in [("on one host", 1), ("on two hosts", 2)] {
        let (mut medians, mut longest, mut streams) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..repeat {
            let options = format!("{MACHINES} --hosts {hosts} --static --");
            let run = |what: String| {
                Cluster::start(
                    place,
                    images,
                    &Hosts::here(hosts),
                    &format!("{options} talk {what}"),
                )?
                .finish()
            };
            let trips = trips(&run(format!("trip {TRIP_S}"))?)?;
            medians.push(trips.median_us);
            longest.push(trips.longest_ms);
            samples.push(json!({ "hosts": hosts, "pieces": trips.listed() }));
            let stream = run(format!("stream {STREAM_S}"))?;
            streams.push(number_after(&stream.output, "messages, ").context("no stream")?);
        }
        let mut row = vec![
            name.to_owned(),
            digits(median(&medians)),
            digits(median(&longest)),
        ];
        row.extend(Goal::None.cells(None));
        row.push(digits(median(&streams)));
        table.rows.push(row);
    }
    let own = moves(place, images, repeat, &mut samples, "", || {
        Ok((Hosts::here(6), None))
    })?;
    let mut row = vec!["on two hosts, each moves once".to_owned()];
    row.extend(own);
    table.rows.push(row);
    match missing() {
        Some(why) => eprintln!("weft-bench: not measured, moves between hosts of a VXLAN: {why}"),
        None => {
            let tap = format!("--tap {TAP}");
            let site = moves(place, images, repeat, &mut samples, &tap, || {
                let star = Star::new(7)?;
                star.vxlan(&[1, 2, 3, 4, 5, 6], TAP, MTU)?;
                Ok((Hosts::of_star(&star, 6)?, Some(star)))
            })?;
            let mut row = vec!["the same, over a VXLAN".to_owned()];
            row.extend(site);
            table.rows.push(row);
        }
    }
    table.samples = json!(samples);
    Ok(table)
}

/// The cells of a row with moves, but its name. `hosts`: as many as are needed, and what they
/// last as long as.
fn moves(
    place: &Place,
    images: &Images,
    repeat: usize,
    samples: &mut Vec<Value>,
    options: &str,
    hosts: impl Fn() -> Result<(Hosts, Option<Star>)>,
) -> Result<Vec<String>> {
    let (mut medians, mut longest) = (Vec::new(), Vec::new());
    for _ in 0..repeat {
        let (hosts, _star) = hosts()?;
        let (trips, moves) = moved(place, images, &hosts, options)?;
        medians.push(trips.median_us);
        longest.push(trips.longest_ms);
        let steps: Vec<(f64, f64)> = moves.iter().map(|it| (it.from_s, it.until_s)).collect();
        samples.push(
            json!({ "hosts": 2, "options": options, "pieces": trips.listed(), "moves": steps }),
        );
        if options.is_empty()
            && let Some(file) = std::env::var_os(PICTURE)
        {
            std::fs::write(file, picture(&trips, moves))?;
        }
    }
    let longest = median(&longest);
    let mut cells = vec![digits(median(&medians)), digits(longest)];
    cells.extend(Goal::AtMost(GAP_MS).cells(longest));
    cells.push("—".to_owned());
    Ok(cells)
}

fn trips(said: &Said) -> Result<Trips> {
    let last = said.output.lines().find(|line| line.starts_with("trips: "));
    let last = last.with_context(|| format!("no trips: {}{}", said.output, said.messages))?;
    let pieces = said.output.lines().filter_map(|line| {
        let at = number_after(line, "at ")?;
        let longest = number_after(line, "trips, longest ")?;
        Some((at, longest / 1e3))
    });
    Ok(Trips {
        median_us: number_after(last, "median ").context("no median")?,
        longest_ms: number_after(last, "longest ").context("no longest")? / 1e3,
        pieces: pieces.collect(),
    })
}

/// A dot for the longest trip of each 100 ms, and a band for each move.
fn picture(trips: &Trips, steps: Vec<Step>) -> String {
    let ping = |&(at_s, longest_ms): &(f64, f64)| Ping {
        sent_s: at_s,
        answered_s: Some(at_s + longest_ms / 1e3),
    };
    let track = Track {
        pings: trips.pieces.iter().map(ping).collect(),
        steps,
    };
    let worst = |step: &Step| {
        let near = (step.from_s - 0.2)..(step.until_s + 0.5);
        let trips = trips.pieces.iter().filter(|(at, _)| near.contains(at));
        let longest = trips.map(|(_, longest)| *longest).fold(0.0, f64::max);
        format!("longest {longest:.1} ms")
    };
    let title = "the longest round trip between two MPI ranks, of each 100 ms";
    draw(&track, title, &worst)
}

/// The machines' hosts are released one after the other. The moves, in seconds since the program
/// began.
fn moved(
    place: &Place,
    images: &Images,
    hosts: &Hosts,
    options: &str,
) -> Result<(Trips, Vec<Step>)> {
    // The third host has none of them, so each moves once.
    let options = format!("{MACHINES} {options} --hosts 3 -- talk trip {TRIP_S}");
    let mut cluster = Cluster::start(place, images, hosts, &options)?;
    let mut steps = Vec::new();
    let mut begun = None;
    for machine in 0..2 {
        let status = cluster.until("the program runs", |status| status["phase"] == "running")?;
        let begun = begun.get_or_insert_with(Instant::now);
        std::thread::sleep(APART);
        let host = Cluster::host(&status, machine);
        let from_s = begun.elapsed().as_secs_f64();
        cluster.ask(&["release", &host])?;
        cluster.until("the machine has moved", |status| {
            Cluster::host(status, machine) != host
        })?;
        steps.push(Step {
            name: format!("machine {} moves", machine + 1),
            note: String::new(),
            from_s,
            until_s: begun.elapsed().as_secs_f64(),
        });
    }
    let said = cluster.finish()?;
    // MPI takes its time to start, and the program's clock begins behind that.
    let behind_s = (said.program_s()? - f64::from(TRIP_S)).max(0.0);
    for step in &mut steps {
        step.from_s -= behind_s;
        step.until_s -= behind_s;
    }
    Ok((trips(&said)?, steps))
}
