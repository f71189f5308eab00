//! A running machine goes to other hosts as a whole, is split over several, and comes back,
//! while its guest runs the tests of the memory model or writes to its pages and checks each
//! of them at the end. What is cancelled or refused leaves all where it was.

use std::io::{BufRead as _, BufReader, Read as _};
use std::net::SocketAddr;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use super::growth::{EXIT_LOST, HERE, ONE};
use super::{BOUND, LEASE, LONG_BOUND, Site, TAP, wait_until};
use crate::aggregate::{Copies, judge_litmus};
use crate::cluster;
use crate::guest::{Ended, Guest, code, until_told};
use crate::namespace::Star;
use crate::random::Random;
use crate::web::fetch_from;

/// The option of a command, in turn: pages behind the vCPUs, or ahead of them.
pub(super) fn mode(round: usize) -> &'static str {
    ["--mode=post-copy", "--mode=hybrid", "--mode=pre-copy"][round % 3]
}

type Check = fn(&mut Site<'_>) -> Result<String>;

/// By name: hosts beside the launcher's, and the test.
pub(super) const CHECKS: [(&str, usize, Check); 10] = [
    ("migration, to a host and back, five times", 1, to_and_fro),
    ("migration, of one node, to a host and back", 1, from_one),
    ("migration, of a paused machine", 1, paused),
    ("migration, away from a disk", 1, from_disk),
    ("migration, split over two hosts and merged", 2, split),
    ("migration, of a guest that writes all the time", 1, busy),
    ("migration, of a server on a tap device", 2, serving),
    ("migration, as soon as there is room", 1, when_room),
    ("migration, cancelled at any moment", 1, cancelled),
    ("migration, a daemon is killed", 1, daemon_killed),
];

impl Site<'_> {
    /// What a command reports that moves the whole machine.
    pub(super) fn moved(&self, words: &[&str]) -> Result<Value> {
        let words = [&["vm"], words, &["--json"]].concat();
        let view = self.ask(&words)?;
        let moved = view["migrated"].clone();
        ensure!(moved.is_object(), "{view}");
        Ok(moved)
    }

    /// Fails unless all vCPUs are on this node.
    pub(super) fn is_on(&self, node: u64) -> Result<()> {
        let at = self.locations()?;
        ensure!(at.iter().all(|at| *at == node), "vCPUs are on {at:?}");
        Ok(())
    }

    /// A machine called `m` whose guest writes to `rate` pages a second.
    fn writing(&self, words: &[&str], rate: u32, seconds: u32) -> Result<Guest> {
        self.filled(words, &format!("dirty 60 {rate} {seconds}"))
    }

    /// The same, until it is told to end.
    fn writing_on(&self, words: &[&str], rate: u32) -> Result<Guest> {
        self.filled(words, &until_told(&[&format!("dirty 60 {rate} 3")]))
    }

    /// A machine called `m` whose program has filled its memory.
    fn filled(&self, words: &[&str], script: &str) -> Result<Guest> {
        let words = [&["--name", "m"], words].concat();
        let mut guest = Guest::start(&mut self.machine_with(&words, script)?)?;
        if guest.wait_for("dirty: at work", BOUND).is_none() {
            bail!("no boot: {}", guest.finish(Duration::ZERO)?.stderr);
        }
        Ok(guest)
    }
}

/// The line of `dirty`, which has checked every page.
pub(super) fn judge_writes(ended: &Ended) -> Result<String> {
    let line = ended.line("dirty: right").map(|line| line.text.clone());
    let kernel_says = |words: &str| ended.console().contains(words);
    ensure!(
        !kernel_says("BUG") && !kernel_says("Oops") && !kernel_says("stall"),
        "{}",
        ended.tail(20)
    );
    let is_wrong = kernel_says("dirty: wrong") || !ended.all_succeeded();
    ensure!(!is_wrong, "{}", ended.tail(20));
    line.with_context(|| format!("a page is wrong, or was not checked: {}", ended.tail(20)))
}

fn to_and_fro(site: &mut Site<'_>) -> Result<String> {
    let mut guest = site.litmus(&HERE)?;
    let bytes = there_and_back(site, 5)?;
    guest.tell()?;
    let ended = guest.finish(LONG_BOUND)?;
    Ok(format!("{}, {bytes} bytes went", judge_litmus(&ended)?))
}

/// A machine that started on one node, first with the tests of the memory model, then with
/// all of its pages written and checked.
fn from_one(site: &mut Site<'_>) -> Result<String> {
    let mut guest = site.litmus(&ONE)?;
    let mut bytes = there_and_back(site, 5)?;
    guest.tell()?;
    let tests = judge_litmus(&guest.finish(LONG_BOUND)?)?;
    let mut guest = site.writing_on(&ONE, 5000)?;
    bytes += there_and_back(site, 3)?;
    guest.tell()?;
    let line = judge_writes(&guest.finish(LONG_BOUND)?)?;
    Ok(format!("{tests}, {bytes} bytes went; {line}"))
}

/// To another host and back some times, while the guest works. Node 0 stays each time. The
/// bytes that went.
fn there_and_back(site: &Site<'_>, rounds: usize) -> Result<u64> {
    let mut bytes = 0;
    for round in 0..rounds {
        let mut once = || -> Result<()> {
            let away = site.moved(&["migrate", "m", "h1=256M", mode(round)])?;
            let node = away["nodes"][0].as_u64().context("no node")?;
            site.is_on(node)?;
            let stays = away["stays"][0]["node"].as_u64();
            ensure!(stays == Some(0), "{away}");
            bytes += away["bytes"].as_u64().unwrap_or(0);
            let back = site.moved(&["consolidate", "m", mode(round)])?;
            site.is_on(0)?;
            ensure!(back["left"][0].as_u64() == Some(node), "{back}");
            ensure!(
                back["stays"].as_array().is_some_and(Vec::is_empty),
                "{back}"
            );
            site.all_given_back()
        };
        once().with_context(|| format!("in round {round}"))?;
    }
    Ok(bytes)
}

/// Away or back while the guest stands, in turn.
fn paused(site: &mut Site<'_>) -> Result<String> {
    let mut guest = site.litmus(&ONE)?;
    let pause = || site.weft(&["vm", "pause", "m"]).status();
    let resume = || site.weft(&["vm", "resume", "m"]).status();
    for round in 0..6 {
        let once = || -> Result<()> {
            ensure!(pause()?.success(), "it does not pause");
            site.moved(&["migrate", "m", "h1=256M", mode(round / 3)])?;
            if round % 2 == 0 {
                ensure!(resume()?.success(), "it does not resume");
                std::thread::sleep(Duration::from_millis(150));
                ensure!(round % 4 == 0 || pause()?.success(), "it does not pause");
            }
            site.moved(&["consolidate", "m", mode(round / 3)])?;
            site.is_on(0)?;
            ensure!(
                round % 4 == 0 || resume()?.success(),
                "it does not resume at home"
            );
            site.all_given_back()
        };
        once().with_context(|| format!("in round {round}"))?;
        std::thread::sleep(Duration::from_millis(150));
    }
    guest.tell()?;
    judge_litmus(&guest.finish(LONG_BOUND)?)
}

/// Only the node with the disk stays: the other one's queue goes there, while both vCPUs copy.
fn from_disk(site: &mut Site<'_>) -> Result<String> {
    let copies = Copies::new(site.bench.directory.join("disk"), 2)?;
    let disk = copies.disk();
    let words = ["--name", "m", "--late-cpus", "no", "--disk", &disk];
    let script = format!(
        "{} echo at work; read line; touch /tmp/over; wait",
        copies.script()
    );
    let command = &mut site.machine_with(&[&words[..], &HERE].concat(), &script)?;
    let mut guest = Guest::start(command)?;
    if guest.wait_for("at work", BOUND).is_none() {
        bail!("no boot: {}", guest.finish(Duration::ZERO)?.stderr);
    }
    for round in 0..3 {
        let away = site.moved(&["migrate", "m", "h1=256M", mode(round)])?;
        let stays = away["stays"].as_array().context("no nodes that stay")?;
        ensure!(stays.len() == 1 && stays[0]["node"] == 0, "{away}");
        ensure!(
            round > 0 || away["left"] == serde_json::json!([1]),
            "{away}"
        );
        std::thread::sleep(Duration::from_millis(300));
        site.moved(&["consolidate", "m", mode(round)])?;
        site.is_on(0)?;
    }
    guest.write("over\n")?;
    let ended = guest.finish(LONG_BOUND)?;
    Ok(format!("{} copies", copies.judge(&ended)?))
}

fn split(site: &mut Site<'_>) -> Result<String> {
    let mut guest = site.writing_on(&HERE, 2000)?;
    for round in 0..2 {
        let there_and_back = || -> Result<()> {
            let to = "h1=192M,h2=192M";
            let away = site.moved(&["migrate", "m", to, "--spread", mode(round)])?;
            let nodes: Vec<u64> = (away["nodes"].as_array().into_iter().flatten())
                .filter_map(Value::as_u64)
                .collect();
            let at = site.locations()?;
            ensure!(at == nodes, "vCPUs are on {at:?}, not on {nodes:?}");
            let first = nodes.first().context("no node")?.to_string();
            site.moved(&["consolidate", "m", &first])
                .map(drop)
                .or_else(|error| {
                    // 192 MiB of a host that lends are less than the machine has.
                    let said = format!("{error:#}");
                    match said.contains("its host lent 192 MiB") {
                        true => Ok(()),
                        false => Err(error),
                    }
                })?;
            ensure!(
                site.locations()? == nodes,
                "a refused merge changed something"
            );
            site.moved(&["consolidate", "m", "0", mode(round)])?;
            site.is_on(0)?;
            site.all_given_back()
        };
        there_and_back().with_context(|| format!("in round {round}"))?;
    }
    guest.tell()?;
    judge_writes(&guest.finish(LONG_BOUND)?)
}

fn busy(site: &mut Site<'_>) -> Result<String> {
    let mut said = Vec::new();
    for (rate, mode) in [2000, 20_000]
        .into_iter()
        .flat_map(|r| [(r, mode(0)), (r, mode(1))])
    {
        let mut guest = site.writing_on(&HERE, rate)?;
        let away = site.moved(&["migrate", "m", "h1=256M", mode])?;
        let pause_us = away["pause_ns"].as_u64().unwrap_or(0) / 1000;
        let ahead = away["ahead_bytes"].as_u64();
        ensure!((ahead == Some(0)) == (mode == self::mode(0)), "{away}");
        site.moved(&["consolidate", "m", mode])?;
        guest.tell()?;
        let line = judge_writes(&guest.finish(LONG_BOUND)?)?;
        said.push(format!(
            "{rate}/s, {mode}: {line}, a pause of {pause_us} us"
        ));
        site.all_given_back()?;
    }
    Ok(said.join("; "))
}

/// The tap device stays on the launcher's host, whose client asks the guest's server again
/// and again: each file is whole, and one comes after each step.
fn serving(site: &mut Site<'_>) -> Result<String> {
    const LAST: usize = 39_999;
    site.star.add_tap(0, TAP, 0)?;
    let address = Star::address(100);
    let script = format!(
        "ip link set eth0 up; ip addr add {address}/24 dev eth0; mkdir /tmp/web; \
         seq 0 {LAST} >/tmp/web/file; httpd -p 80 -h /tmp/web; \
         (while [ ! -e /tmp/stop ]; do dirty 40 2000 3 || echo WRONG; done) & \
         read word; touch /tmp/stop; wait"
    );
    let net = format!("tap={TAP}");
    let words = [&ONE[..], &["--name", "m", "--net", &net]].concat();
    let mut guest = Guest::start(&mut site.machine_with(&words, &script)?)?;
    let works = guest.wait_for("dirty: at work", BOUND);
    ensure!(works.is_some(), "no server: {:?}", guest.lines().last());
    let content: String = (0..=LAST).map(|number| format!("{number}\n")).collect();
    let server = SocketAddr::new(address.parse()?, 80);
    let (fetched, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
    let ask = || -> Result<()> {
        while !is_over.load(Ordering::SeqCst) {
            let got = fetch_from(server, BOUND)?;
            ensure!(got == content.as_bytes(), "{} bytes, or others", got.len());
            fetched.fetch_add(1, Ordering::SeqCst);
        }
        Ok(())
    };
    let go = || -> Result<()> {
        for words in [
            &["migrate", "m", "h1=256M"][..],
            &["consolidate", "m"],
            &["migrate", "m", "h1=192M,h2=192M", "--spread"],
            &["consolidate", "m"],
        ] {
            site.moved(words)?;
            let before = fetched.load(Ordering::SeqCst);
            // One that was under way, and one that began after the step.
            wait_until("two files", || {
                Ok(fetched.load(Ordering::SeqCst) >= before + 2)
            })?;
        }
        Ok(())
    };
    let (went, asked) = std::thread::scope(|scope| {
        let asked = scope.spawn(|| site.star.within(0, ask));
        let went = go();
        is_over.store(true, Ordering::SeqCst);
        (went, asked.join())
    });
    let asked = asked.map_err(|_| anyhow!("the client panicked"))?;
    let count = fetched.into_inner();
    went.with_context(|| format!("{count} files came, {asked:?}"))?;
    asked.with_context(|| format!("after {count} files"))?;
    site.all_given_back()?;
    guest.write("end\n")?;
    let ended = guest.finish(LONG_BOUND)?;
    ensure!(ended.line("WRONG").is_none(), "{}", ended.tail(20));
    let line = judge_writes(&ended)?;
    Ok(format!("{count} files; {line}"))
}

/// A host that has lent too much to take the machine gets some of it back, and then takes it.
fn when_room(site: &mut Site<'_>) -> Result<String> {
    let mut guest = site.writing_on(&ONE, 2000)?;
    let node = site.grow(&["--on", "h1=256M"])?;
    let wait = |seconds| {
        [
            "vm",
            "consolidate",
            "m",
            "h1",
            "--when-room",
            seconds,
            "--json",
        ]
    };
    let late = site.refusal(&wait("0.5"))?;
    ensure!(late.contains("no room on h1 within 0.5 s"), "{late}");
    let lent = node.to_string();
    let fixed = site.refusal(&["vm", "consolidate", "m", &lent, "--when-room", "5"])?;
    ensure!(fixed.contains("gets no more"), "{fixed}");
    site.is_on(0)?;
    let mut command = site.weft(&wait("60"));
    let mut waiting = command
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    // It has looked, and found no room.
    let mut first = String::new();
    let mut lines = BufReader::new(waiting.stderr.take().context("no stderr")?);
    lines.read_line(&mut first)?;
    ensure!(first.contains("waits for room on h1: "), "{first}");
    site.release(node)?;
    let mut said = String::new();
    lines.read_to_string(&mut said)?;
    ensure!(waiting.wait()?.success(), "{said}");
    // What node 0's host needs room for.
    let view = site.ask(&["vm", "counters", "m", "--json"])?;
    let held = view["counters"]["slice1.memory.held-pages"].as_u64();
    ensure!(held > Some(0), "node 1 holds {held:?} pages");
    site.moved(&["consolidate", "m", "--when-room", "60"])?;
    site.is_on(0)?;
    site.all_given_back()?;
    guest.tell()?;
    judge_writes(&guest.finish(LONG_BOUND)?)
}

fn cancelled(site: &mut Site<'_>) -> Result<String> {
    let mut guest = site.writing_on(&HERE, 5000)?;
    let mut random = Random::new(site.bench.context.seed ^ 0xca2c);
    let (mut undone, mut went) = (0, 0);
    for round in 0..8 {
        let mut once = || -> Result<()> {
            let before = site.locations()?;
            let mut command = site.weft(&["vm", "migrate", "m", "h1=256M", mode(round)]);
            let command = command.stdout(Stdio::null()).stderr(Stdio::piped());
            let command = command.spawn()?;
            std::thread::sleep(Duration::from_millis(30 + random.below(300)));
            // It may have ended.
            let _ = kill(Pid::from_raw(command.id() as i32), Signal::SIGINT);
            let output = command.wait_with_output()?;
            let said = String::from_utf8_lossy(&output.stderr);
            if output.status.success() {
                went += 1;
                site.moved(&["consolidate", "m"])?;
                return site.all_given_back();
            }
            ensure!(said.contains("cancelled"), "{said}");
            undone += 1;
            ensure!(
                site.locations()? == before,
                "{:?}: {said}",
                site.locations()
            );
            site.all_given_back()
        };
        once().with_context(|| format!("in round {round}"))?;
    }
    guest.tell()?;
    let line = judge_writes(&guest.finish(LONG_BOUND)?)?;
    Ok(format!("{undone} cancelled, {went} too late; {line}"))
}

/// Before the switch the machine goes on; afterwards it ends and names the node.
fn daemon_killed(site: &mut Site<'_>) -> Result<String> {
    let mut random = Random::new(site.bench.context.seed ^ 0x6a11);
    let (mut went_on, mut ended_by_it) = (0, 0);
    for round in 0..6 {
        let lease = LEASE.as_secs().to_string();
        let guest = site.writing(&[&HERE[..], &["--lease", &lease]].concat(), 5000, 4)?;
        let mut command = site.weft(&["vm", "migrate", "m", "h1=256M", mode(round)]);
        let command = (command.stdout(Stdio::null()).stderr(Stdio::piped())).spawn()?;
        std::thread::sleep(Duration::from_micros(random.below(400_000)));
        kill(Pid::from_raw(site.daemons[0].pid()), Signal::SIGKILL)?;
        let output = command.wait_with_output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let end = guest.finish(LONG_BOUND)?;
        match code(&end)? {
            0 => {
                ensure!(!output.status.success(), "it went in round {round}: {said}");
                judge_writes(&end)?;
                went_on += 1;
            }
            EXIT_LOST if end.stderr.contains("lost node ") => ended_by_it += 1,
            other => bail!("exit code {other} in round {round}: {said}\n{}", end.stderr),
        }
        cluster::stop(site.daemons.remove(0))?;
        let daemon = site.start_daemon(1)?;
        site.daemons.insert(0, daemon);
        site.all_given_back()?;
    }
    Ok(format!("{went_on} machines went on, {ended_by_it} ended"))
}
