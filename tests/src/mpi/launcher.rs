//! Launchers that are killed, and others that go on for them.
//!
//! Standard output of both together is what one launcher would have written.

use std::thread;
use std::time::Duration;

use anyhow::{Result, ensure};

use super::user::{Launcher, User};
use super::{BOOT_BOUND, Bench, END_BOUND, PROGRAM_BOUND, STEP_BOUND, ep};
use crate::random::Random;

/// On two processors some 9 s.
const LOG_PAIRS: u32 = 28;
const RANKS: u32 = 2;
const OPTIONS: [&str; 8] = ["--vms", "2", "--hosts", "2", "--time", "5", "--margin", "5"];

fn start(user: &User, more: &[&str]) -> Result<Launcher> {
    let (program, size) = (user.ep(), LOG_PAIRS.to_string());
    let mut words = OPTIONS.to_vec();
    words.extend(more);
    words.extend(["--", &program, &size]);
    user.run("c", &words)
}

fn sleep(random: &mut Random, below_ms: u64) -> u64 {
    let ms = random.below(below_ms);
    thread::sleep(Duration::from_millis(ms));
    ms
}

/// Kills the launcher, and another one goes on to the end.
fn goes_on(user: &User, mut first: Launcher) -> Result<()> {
    first.kill()?;
    let mut second = user.launch("c", &["attach", "c"])?;
    second.must_end(0, PROGRAM_BOUND)?;
    let output = first.output() + &second.output();
    ep::judge(&output, LOG_PAIRS, RANKS)?;
    user.nothing_left(false)
}

pub fn gathering(bench: &Bench<'_>) -> Result<String> {
    let user = bench.user()?;
    let first = start(&user, &[])?;
    let begun = user.state().join("c/cluster.json");
    while !begun.exists() {
        thread::sleep(Duration::from_millis(2));
    }
    let ms = sleep(&mut bench.random.clone(), 700);
    goes_on(&user, first)?;
    Ok(format!("{ms} ms after it began"))
}

pub fn booting(bench: &Bench<'_>) -> Result<String> {
    let user = bench.user()?;
    let mut first = start(&user, &[])?;
    user.until(&mut first, "it boots", BOOT_BOUND, |status| {
        status.phase() != "gathering"
    })?;
    let ms = sleep(&mut bench.random.clone(), 2500);
    goes_on(&user, first)?;
    Ok(format!("{ms} ms after it began"))
}

pub fn running(bench: &Bench<'_>) -> Result<String> {
    let user = bench.user()?;
    let mut first = start(&user, &[])?;
    user.until(&mut first, "it runs", BOOT_BOUND, |status| {
        status.is_running()
    })?;
    let ms = sleep(&mut bench.random.clone(), 8000);
    if first.code()?.is_some() {
        ep::judge(&first.output(), LOG_PAIRS, RANKS)?;
        return Ok("it had ended before".into());
    }
    goes_on(&user, first)?;
    Ok(format!("{ms} ms after it began"))
}

pub fn moving(bench: &Bench<'_>) -> Result<String> {
    let user = bench.user()?;
    let mut first = start(&user, &[])?;
    let status = user.until(&mut first, "it runs", BOOT_BOUND, |status| {
        status.is_running()
    })?;
    let host = status.hosts()[0].to_owned();
    user.must(&["release", &host])?;
    user.until(&mut first, "a move", STEP_BOUND, |status| {
        status.is_moving() || status.moves() > 0
    })?;
    let ms = sleep(&mut bench.random.clone(), 1500);
    goes_on(&user, first)?;
    Ok(format!("{ms} ms after it began"))
}

/// Does not depend on how fast its host is, so it ends after two or three saves.
pub(super) const COUNTS: &str = "n=0; while [ $n -lt 60 ]; do n=$((n+1)); echo $n; sleep 0.4; done";
pub(super) const COUNTED: u32 = 60;

/// The first launcher dies while machines are saved. Whoever goes on ends with all of them saved,
/// and from there the program ends.
pub fn saving(bench: &Bench<'_>) -> Result<String> {
    let user = bench.user()?;
    let list = user.folder.join("list");
    std::fs::write(&list, "one max=24\n")?;
    let (list, saves) = (list.to_string_lossy(), user.folder.join("saves"));
    let saves = saves.to_string_lossy();
    let words = [
        "--vms",
        "2",
        "-n",
        "1",
        "--list",
        &list,
        "--save-to",
        &saves,
        "--margin",
        "5",
        "--time",
        "5",
        "--address",
        "127.0.0.1",
        "--no-copy",
        "--",
        "sh",
        "-c",
        COUNTS,
    ];
    let mut first = user.run("c", &words)?;
    user.until(&mut first, "it is saved", BOOT_BOUND, |status| {
        status.log().contains(" is saved: ")
    })?;
    let ms = sleep(&mut bench.random.clone(), 2500);
    let mut output = String::new();
    if first.code()?.is_none() {
        first.kill()?;
        let mut second = user.launch("c", &["attach", "c"])?;
        let code = second.ends_within(END_BOUND + Duration::from_secs(30))?;
        output = second.output();
        // All may have been saved before: then there is nothing to attach to.
        let was_saved = code == 1 && second.errors().contains("weft mpi resume c");
        ensure!(
            code == 121 || was_saved,
            "attach: {code}: {}",
            second.errors()
        );
    }
    output.insert_str(0, &first.output());
    for _ in 0..15 {
        let mut next = user.launch("c", &["resume", "c"])?;
        let code = next.ends_within(PROGRAM_BOUND)?;
        output += &next.output();
        ensure!(
            [0, 121].contains(&code),
            "resume: {code}: {}",
            next.errors()
        );
        if code == 0 {
            let counted: String = (1..=COUNTED).map(|number| format!("{number}\n")).collect();
            ensure!(output == counted, "it counted {output:?}");
            user.nothing_left(false)?;
            return Ok(format!("{ms} ms after it began"));
        }
    }
    anyhow::bail!("it was saved again and again")
}

const KINDS: [super::Check; 5] = [gathering, booting, running, moving, saving];

/// One of them, as the seed says.
pub fn any(bench: &Bench<'_>) -> Result<String> {
    let kind = bench.random.clone().below(KINDS.len() as u64) as usize;
    KINDS[kind](bench).map_err(|error| error.context(format!("kind {kind}")))
}

/// All of them, as often as was asked for.
pub fn all(bench: &Bench<'_>) -> Result<String> {
    let mut random = bench.random.clone();
    for round in 0..bench.plan.moments {
        for (kind, check) in KINDS.iter().enumerate() {
            let bench = Bench {
                random: Random::new(random.next_number()),
                ..*bench
            };
            check(&bench).map_err(|error| error.context(format!("round {round}, kind {kind}")))?;
        }
    }
    Ok(format!("{} of each kind", bench.plan.moments))
}
