//! What it takes to leave a host, and what the machines that leave it see of that.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use weft_tests::boot::Images;
use weft_tests::context::Context;
use weft_tests::fleet::{self, Fleet};

use super::said::{Said, Saying};
use super::site::{BOUND, LEFT, SPARE, Site, name};
use super::standing::{PERIOD_MS, Ticks, Window};
use crate::program::Place;
use crate::results::{Goal, Table, digits, median, quantile};

/// `--wait` of the command that is too short.
const SHORT_S: u64 = 1;
/// How long nothing happens, to see what the host does to the figures.
const STILL: Duration = Duration::from_secs(3);
/// Between two single moves: the guests are at rest again.
const BETWEEN: Duration = Duration::from_millis(500);
/// The leader notes within this what it sees.
const NOTED: Duration = Duration::from_secs(10);
/// What a forecast may be off by, as a part of what it took.
const OFF_MAX: f64 = 0.2;
/// What a person takes for at once, in milliseconds.
const AT_ONCE_MS: f64 = 100.0;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Drain,
    Evacuate,
}

impl Way {
    const ALL: [Way; 2] = [Way::Drain, Way::Evacuate];

    fn name(self) -> &'static str {
        match self {
            Way::Drain => "drain",
            Way::Evacuate => "evacuate",
        }
    }

    fn words<'a>(self, host: &'a str, more: &[&'a str]) -> Vec<&'a str> {
        let own: &[&str] = match self {
            Way::Drain => &["node", "drain", host],
            Way::Evacuate => &["node", "evacuate", host, "--why", "its fan stands still"],
        };
        [own, more].concat()
    }
}

type Samples = BTreeMap<String, Vec<f64>>;

fn key(way: Way, figure: &str) -> String {
    format!("{} {figure}", way.name())
}

/// The table `cluster-drain`.
pub fn drain(place: &Place, images: &Images, repeat: usize) -> Result<Table> {
    let context = Context {
        weft: place.weft.clone(),
        programs: place.programs.clone(),
        sources: place.programs.clone(),
        inputs: place.work.clone(),
        work: place.work.clone(),
        seed: 0,
    };
    if let Some(why) = fleet::missing(&context) {
        anyhow::bail!("{why}");
    }
    let mut samples = Samples::new();
    for round in 0..repeat {
        for way in Way::ALL {
            let fleet = Fleet::new(
                &context,
                &format!("d{round}{}", way.name()),
                &Site::wanted(),
            )?;
            let site = Site::new(fleet, place, images)?;
            for (figure, value) in measure(site, place, way)? {
                samples.entry(key(way, figure)).or_default().push(value);
            }
        }
    }
    Ok(table(&samples))
}

type Figures = Vec<(&'static str, f64)>;

/// Moves each machine to and fro by itself, and then has all leave at once.
fn measure(mut site: Site<'_>, place: &Place, way: Way) -> Result<Figures> {
    // They run from now on: single moves and the drain have the same company.
    site.start_programs(&place.programs)?;
    let still = during(|| {
        std::thread::sleep(STILL);
        Ok(())
    })?;
    let mut figures = Figures::new();
    let mut singles = Vec::new();
    for machine in 0..site.machines.len() {
        for (from, to) in [(LEFT, SPARE), (SPARE, LEFT)] {
            std::thread::sleep(BETWEEN);
            let of = site.machines[machine].name;
            let line = format!("cluster move {of} {} --from {}", name(to), name(from));
            let window = during(|| site.call(&line).map(drop))?;
            figures.push(("single move", seconds(window)));
            singles.push((machine, window));
        }
    }
    let logged = noted(&mut site, singles.len())?.len();
    let mut said = None;
    let all = during(|| {
        // A command that waits too short a time begins it; another one waits for the rest.
        let wait = SHORT_S.to_string();
        let short = way.words(name(LEFT), &["--wait", &wait]);
        let mut short = Saying::start(&mut site.command(&short))?;
        short.wait_for("leaves within about", BOUND)?;
        let whole = Saying::start(&mut site.command(&way.words(name(LEFT), &[])))?;
        said = Some((short.finish(BOUND)?, whole.finish(BOUND)?));
        Ok(())
    })?;
    let (short, whole) = said.context("both were waited for")?;
    figures.extend(of_short(&short)?);
    figures.extend(of_both(&short, &whole)?);
    let parts = site.parts()?;
    let stays = parts
        .iter()
        .any(|(_, hosts)| hosts.iter().any(|host| host == name(LEFT)));
    ensure!(!stays && parts.len() == 5, "{parts:?}");
    let all_moves = logged + site.machines.len();
    let stands = noted(&mut site, all_moves)?;
    std::thread::sleep(BETWEEN);
    site.all_run()?;
    let machines: Vec<&str> = site.machines.iter().map(|machine| machine.name).collect();
    let consoles = site.finish(&place.programs)?;
    let ticks: Vec<Ticks> = consoles
        .iter()
        .map(|(started, ended)| Ticks::of(&ended.lines, *started))
        .collect();
    let stood = |machine: usize, window| {
        let longest = ticks[machine].longest(window);
        longest.map_or(0.0, |longest| longest.as_secs_f64() * 1e3)
    };
    for machine in 0..ticks.len() {
        let own = singles.iter().filter(|(of, _)| *of == machine);
        let alone: Vec<f64> = own.map(|(_, window)| stood(machine, *window)).collect();
        let together = stood(machine, all);
        figures.extend(alone.iter().map(|alone| ("alone", *alone)));
        figures.push(("together", together));
        figures.push(("still", stood(machine, still)));
        if let Some(alone) = quantile(&alone, 1.0) {
            figures.push(("together to alone", together / alone));
        }
    }
    figures.extend(paused(&stands, logged, &machines)?);
    Ok(figures)
}

fn during(what: impl FnOnce() -> Result<()>) -> Result<Window> {
    let from = Instant::now();
    what()?;
    Ok(Window {
        from,
        until: Instant::now(),
    })
}

fn seconds(window: Window) -> f64 {
    (window.until - window.from).as_secs_f64()
}

/// A command that waits too short a time must say so at once, and fail when the time is over.
fn of_short(said: &Said) -> Result<Figures> {
    ensure!(
        said.status.code() == Some(1),
        "{}: {}",
        said.status,
        said.text()
    );
    let told = said.when("longer than this command waits");
    let told = told.ok_or_else(|| anyhow::anyhow!("no word of the time: {}", said.text()))?;
    Ok(vec![
        ("told", told.as_secs_f64() * 1e3),
        ("gave up", said.took.as_secs_f64()),
    ])
}

/// What the time that is left was said to be, against what it was.
fn of_both(short: &Said, whole: &Said) -> Result<Figures> {
    let text = whole.text();
    ensure!(whole.status.success(), "{}: {text}", whole.status);
    let later = whole.begun - short.begun;
    let total = (later + whole.took).as_secs_f64();
    let mut figures = vec![("total", total)];
    let first = short.forecasts().into_iter().take(1);
    // The second command says the same again at first.
    let rest = whole.forecasts().into_iter().skip(1);
    let rest = rest.map(|(at, left)| (later + at, left));
    for (number, (at, left)) in first.chain(rest).enumerate() {
        let figure = match number {
            0 => "first forecast",
            _ => "later forecast",
        };
        figures.push((figure, (at.as_secs_f64() + left) / total));
    }
    for (at, line) in &whole.lines {
        eprintln!("{:7.2} {line}", (later + *at).as_secs_f64());
    }
    Ok(figures)
}

/// What the log has of the moves, once the leader has noted this number of them.
fn noted(site: &mut Site<'_>, count: usize) -> Result<Vec<(String, f64)>> {
    let begun = Instant::now();
    loop {
        let log = site.call("cluster log")?;
        let stands = stands(&log);
        if stands.len() >= count {
            return Ok(stands);
        }
        ensure!(
            begun.elapsed() < NOTED,
            "{count} moves are not in the log: {log}"
        );
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// How long the vCPUs stood in each move of a cluster's log, in milliseconds, by machine.
fn stands(log: &str) -> Vec<(String, f64)> {
    let stand = |line: &str| {
        let (before, after) = line.split_once(" has moved")?;
        let (_, stood) = after.split_once("no vCPU stood for more than ")?;
        let ms = stood.split(' ').next()?.parse().ok()?;
        Some((before.split(' ').next_back()?.to_owned(), ms))
    };
    log.lines().filter_map(stand).collect()
}

/// The same of those that were alone, the first ones of the log, and of the others.
fn paused(stands: &[(String, f64)], alone: usize, machines: &[&str]) -> Result<Figures> {
    let mut figures = Figures::new();
    let (alone, together) = stands.split_at(alone);
    for machine in machines {
        let of = |all: &[(String, f64)]| -> Vec<f64> {
            let own = all.iter().filter(|(name, _)| name == machine);
            own.map(|(_, ms)| *ms).collect()
        };
        let (alone, together) = (of(alone), of(together));
        figures.extend(alone.iter().map(|ms| ("paused alone", *ms)));
        figures.extend(together.iter().map(|ms| ("paused together", *ms)));
        let longest = |all: &[f64]| quantile(all, 1.0).context("no move is in the log");
        let ratio = longest(&together)? / longest(&alone)?;
        figures.push(("paused together to alone", ratio));
    }
    Ok(figures)
}

fn table(samples: &Samples) -> Table {
    let about = format!(
        "Six hosts share the processors of this machine, each a network namespace with a daemon, with links over encrypted TCP and an etcd of three members with TLS. One host has parts of three machines (400 MiB, software vCPUs; two have a vCPU there, one has memory only) and of two programs, all of which have their homes elsewhere: each guest writes 2,000 pages a second to 48 MB, one program works on 110 MiB of memory that was pushed to that host, one sorts 300 MiB. It is left by `weft node drain` and, in another cluster, by `weft node evacuate`. All go on: each guest's pages are right at the end, each program prints what it prints natively, or nothing is measured. *Pause of vCPUs*: how long no vCPU of a machine stood longer in its move, as the cluster's log has it, against the longer one of two moves of the same machine alone (`weft cluster move`), before that in the same run; the ratio is the median of all machines, with the worst in brackets. *Longest time without a line*: each guest writes a line each {PERIOD_MS} ms from a vCPU of the part that moves, and this is the longest time between two of its lines, while all leave, against the same two moves; *without a move*: within {} s in which nothing moves. *Forecast*: what the command says at first of the time that all takes, and whenever something has left, against what it took; the ratio is by how much it was off, as a part of what it took. *Too short a time*: from the start of the process of the command, with `--wait {SHORT_S}`, until it has said that all takes longer than it waits; another one without that option waits for the rest.",
        STILL.as_secs()
    );
    let columns = [
        "what",
        "measured",
        "against",
        "baseline",
        "ratio or value",
        "goal",
        "met",
    ];
    let mut table = Table::new("cluster-drain", &about, &columns);
    for way in Way::ALL {
        let found = |figure: &str| samples.get(&key(way, figure)).map_or(&[][..], |v| v);
        let cell = |figure: &str, unit: &str| format!("{} {unit}", digits(median(found(figure))));
        let mut row = |what: &str, cells: [String; 4], goal: Goal, value: Option<f64>| {
            let mut row = vec![format!("{}: {what}", way.name())];
            row.extend(cells);
            row.extend(goal.cells(value));
            table.rows.push(row);
        };
        let none = || "—".to_owned();
        let moves = "a single move".to_owned();
        let ratio = median(found("total")).zip(median(found("single move")));
        let cells = [
            cell("total", "s"),
            moves.clone(),
            cell("single move", "s"),
            digits(ratio.map(|(all, one)| all / one)),
        ];
        row("until nothing is there", cells, Goal::None, None);
        for (what, figure) in [
            ("the first forecast", "first forecast"),
            ("forecasts as parts leave", "later forecast"),
        ] {
            let off: Vec<f64> = found(figure).iter().map(|of| (of - 1.0).abs()).collect();
            let (middle, worst) = (median(&off), quantile(&off, 1.0));
            let cells = [
                format!("{} of what it took", digits(median(found(figure)))),
                none(),
                none(),
                format!("off by {} ({})", digits(middle), digits(worst)),
            ];
            row(what, cells, Goal::AtMost(OFF_MAX), middle);
        }
        for (what, together, alone) in [
            ("pause of vCPUs", "paused together", "paused alone"),
            ("longest time without a line", "together", "alone"),
        ] {
            let ratios = found(&format!("{together} to alone"));
            let middle = median(ratios);
            let cells = [
                cell(together, "ms"),
                moves.clone(),
                cell(alone, "ms"),
                format!("{} ({})", digits(middle), digits(quantile(ratios, 1.0))),
            ];
            row(what, cells, Goal::AtMost(1.0), middle);
        }
        let cells = [cell("still", "ms"), none(), none(), none()];
        row(
            "longest time without a line, without a move",
            cells,
            Goal::None,
            None,
        );
        let told = median(found("told"));
        let cells = [cell("told", "ms"), none(), none(), cell("told", "ms")];
        row(
            "too short a time is said after",
            cells,
            Goal::AtMost(AT_ONCE_MS),
            told,
        );
    }
    table.samples = json!(samples);
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stood_is_read_from_the_log() {
        let log = "2026-11-27 08:29:43  moved   m1 has moved within 0.6 s; no vCPU stood for more than 14.2 ms.\n\
             2026-11-27 08:29:45  moved   m1 has moved.\n\
             2026-11-27 08:29:46  moved   tides is on cedar now.\n\
             2026-11-27 08:29:47  moved   m2 has moved within 0.7 s; no vCPU stood for more than 7.1 ms.\n\
             2026-11-27 08:29:48  moved   m1 has moved within 0.9 s; no vCPU stood for more than 7.1 ms.\n";
        let all = stands(log);
        assert_eq!(all.len(), 3);
        assert_eq!(all[1], ("m2".to_owned(), 7.1));
        let figures = paused(&all, 1, &["m1"]).unwrap();
        assert_eq!(figures[2], ("paused together to alone", 0.5));
    }
}
