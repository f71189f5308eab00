//! A machine goes to several hosts for good: another process becomes node 0 of the nodes there,
//! and nothing of the machine is left where it was.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::home::{Check, at_work, web_server};
use super::kills::{Kills, Victim};
use super::migration::mode;
use super::{HOME_USER, LEASE, LONG_BOUND, PEER_USER, Site, TAP, wait_until};
use crate::aggregate::Copies;
use crate::counters;

/// By name: hosts beside the launcher's, and the test.
pub(super) const CHECKS: [(&str, usize, Check); 5] = [
    ("home, to several hosts and on", 4, to_several_hosts),
    (
        "home, to several hosts, where its guest restarts",
        3,
        restarts,
    ),
    ("home, to several hosts, with its network", 3, with_network),
    ("home, to several hosts, with its disk", 3, with_disk),
    ("home, to several hosts, whatever is killed", 2, killed),
];

/// Those for a night.
pub(super) const LONG_CHECKS: [(&str, usize, Check); 1] = [(
    "home, to several hosts, whatever is killed, again and again",
    2,
    killed_often,
)];

impl Site<'_> {
    /// Migrates the machine from host `from` to the hosts `to`, so that the first has its home.
    /// Returns the report of the command.
    fn spread(&self, from: usize, to: &[usize], option: &str) -> Result<Value> {
        // Each needs some for pages of others.
        let bytes = 256 / to.len() + 4;
        let places: Vec<String> = to.iter().map(|host| format!("h{host}={bytes}M")).collect();
        let places = places.join(",");
        let words = ["vm", "migrate", "m", &places, option, "--json"];
        let view = self.ask_at(from, &words)?;
        let moved = view["migrated"].clone();
        ensure!(moved["home"]["host"] == format!("h{}", to[0]), "{view}");
        ensure!(moved["stays"] == json!([]), "{view}");
        wait_until("the old host to be left", || {
            let slices = self.slices()?.get(from.wrapping_sub(1)).copied();
            Ok(slices.is_none_or(|slices| slices == 0) && self.machines_at(from)?.is_empty())
        })?;
        let there = self.machines_at(to[0])?;
        ensure!(there.len() == 1 && there[0]["name"] == "m", "{there:?}");
        Ok(moved)
    }

    /// Waits until node 0 has what the node beside it had, and checks that it is lent as much.
    fn wait_until_united(&self, host: usize) -> Result<()> {
        wait_until("node 0 to be one with the node beside it", || {
            Ok(self.slices()?[host - 1] == 1)
        })?;
        let listed = &self.listed()?[host - 1];
        let bytes = |field: &str| listed[field].as_u64().context("no memory");
        let lent = bytes("memory_bytes")? - bytes("memory_free_bytes")?;
        // The home alone takes 144 MiB.
        ensure!(lent > 256 << 20, "{listed}");
        let view = self.ask_at(host, &["vm", "top", "m", "--once", "--json"])?;
        ensure!(view["vcpus"][0]["node"] == 0, "{view}");
        let of_others = |name: &str| name.ends_with(".devices.requests");
        let view = self.ask_at(host, &["vm", "counters", "m", "--json"])?;
        let served = counters::sum(&view, of_others)?;
        ensure!(
            served == 0,
            "other nodes than node 0 served {served} requests"
        );
        Ok(())
    }

    /// Slices of machines on each host that lends.
    fn slices(&self) -> Result<Vec<u64>> {
        let listed = self.listed()?.into_iter();
        Ok(listed
            .map(|node| node["machine_slices"].as_u64().unwrap_or(0))
            .collect())
    }
}

fn to_several_hosts(site: &mut Site<'_>) -> Result<String> {
    let script = "dirty 60 3000 12; read word; echo got $word; read word";
    site.start_as(&site.home, &[], script)?;
    at_work(site)?;
    let mut stopped_us = Vec::new();
    let mut at = 0;
    let ways: [&[usize]; 6] = [&[1, 2], &[3, 4], &[1], &[3, 4], &[2], &[4, 1]];
    for (round, to) in ways.into_iter().enumerate() {
        let once = || -> Result<u64> {
            let moved = site.spread(at, to, mode(round))?;
            // While node 0 takes what the node beside it has.
            let set = site.bench.directory.join(format!("set-{round}"));
            let set = set.to_string_lossy().into_owned();
            match round {
                0 => drop(site.ask_at(to[0], &["vm", "save", "m", &set, "--json"])?),
                1 => drop(site.ask_at(to[0], &["vm", "save", "m", &set, "--live", "--json"])?),
                _ => {}
            }
            // What only node 0 can do is done where it is now.
            let nodes = moved["nodes"].as_array().context("no nodes")?;
            let last = nodes.last().and_then(Value::as_u64).context("no node")?;
            if to.len() > 1 {
                let last = last.to_string();
                let words = ["vm", "move", "m", "--vcpu", "0", "--to", &last, "--json"];
                site.ask_at(to[0], &words)?;
            }
            let stopped_ns = moved["home"]["stopped_ns"].as_u64();
            Ok(stopped_ns.context("no time")? / 1000)
        };
        stopped_us.push(once().with_context(|| format!("in round {round}, to {to:?}"))?);
        at = to[0];
    }
    // Node 0 on host 4, and a node on host 1.
    wait_until("the slices of hosts that were left to end", || {
        Ok(site.slices()? == [1, 0, 0, 1])
    })?;
    // The host where it was started is not needed any more.
    site.star.cut(0, true)?;
    std::thread::sleep(2 * LEASE);
    site.star.cut(0, false)?;
    let mut console = site.console_at(at)?;
    let right = console.wait_for("dirty: right", LONG_BOUND);
    let right = right.context("the guest's pages are not right")?.text;
    console.write("hello\n")?;
    let got = console.wait_for("got hello", LONG_BOUND);
    ensure!(got.is_some(), "the console types nothing");
    site.stop_at(at)?;
    site.all_given_back()?;
    Ok(format!("{right}; stood for {stopped_us:?} us"))
}

/// A machine that went to two hosts for good starts anew on both, as often as its guest restarts, and
/// goes on to another. Where the second host lends too little for that, it ends, and says why.
fn restarts(site: &mut Site<'_>) -> Result<String> {
    let script = "nproc; echo at work; read word; echo got $word\" weft.reboot \"";
    site.start_as(&site.home, &[], script)?;
    at_work(site)?;
    let again = |at: usize, count: usize| -> Result<()> {
        let mut console = site.console_at(at)?;
        console.write("again\n")?;
        let got = console.wait_for("got again", LONG_BOUND);
        ensure!(got.is_some(), "the console types nothing");
        wait_until("the guest to restart", || {
            let listed = site.machines_at(at)?;
            Ok(listed.len() == 1 && listed[0]["restarts"] == count)
        })?;
        // Its console has nothing of the life before.
        let works = site.console_at(at)?.wait_for("at work", LONG_BOUND);
        ensure!(works.is_some(), "the next life does not boot");
        Ok(())
    };
    let moved = site.spread(0, &[1, 2], mode(0))?;
    let other = moved["nodes"][1].to_string();
    // Apart in the second life, together in the third.
    for (count, to) in [(1, other.as_str()), (2, "0")] {
        site.ask_at(1, &["vm", "move", "m", "--vcpu", "1", "--to", to, "--json"])?;
        again(1, count).with_context(|| format!("restart {count}"))?;
        wait_until("a slice on each host", || Ok(site.slices()? == [1, 1, 0]))?;
    }
    site.spread(1, &[3, 2], mode(1))?;
    again(3, 1)?;
    wait_until("a slice on each host", || Ok(site.slices()? == [0, 1, 1]))?;
    // Less than its part: what it has is not taken away, and the command waits.
    let mut lend = site.weft_at(2, &["node", "lend", "--memory", "8M"]);
    let mut lend = lend.stderr(Stdio::null()).spawn()?;
    wait_until("the host to lend less", || {
        Ok(site.listed()?[1]["memory_bytes"] == 8 << 20)
    })?;
    let mut console = site.console_at(3)?;
    console.write("again\n")?;
    let log = site.run_directory(3).join("weft/vm/m.log");
    let said = || fs::read_to_string(&log).with_context(|| log.display().to_string());
    wait_until("the reason", || Ok(said()?.contains("no room on node h2")))
        .with_context(|| said().unwrap_or_default())?;
    lend.kill()?;
    lend.wait()?;
    ensure!(site.machines_at(3)?.is_empty(), "it runs");
    wait_until("all to be given back", || Ok(site.slices()? == [0, 0, 0]))?;
    Ok(String::new())
}

/// A machine goes to two hosts and on to one, while another host fetches files from it. On the first
/// of two hosts, node 0 takes what the node beside it has: vCPU, memory, and the network's queues.
fn with_network(site: &mut Site<'_>) -> Result<String> {
    site.star.add_tap(0, TAP, 0)?;
    site.star.add_tap(1, TAP, HOME_USER)?;
    site.star.add_tap(2, TAP, PEER_USER)?;
    let script = format!(
        "{} (dirty 60 3000 10) & echo at work; read line",
        web_server()
    );
    let network = format!("tap={TAP}");
    let options = ["--cpus", "1", "--memory", "256M", "--net", &network];
    site.start_shaped(&site.home, &options, &script)?;
    at_work(site)?;
    let ways: [(usize, &[usize]); 2] = [(0, &[1, 3]), (1, &[2])];
    let mut fetched = 0;
    for (round, (at, to)) in ways.into_iter().enumerate() {
        let (count, _) = site.fetched_while(3, &|two_more| {
            two_more()?;
            site.spread(at, to, mode(round))?;
            site.wait_until_united(to[0])?;
            two_more()
        })?;
        fetched += count;
    }
    let mut console = site.console_at(2)?;
    let right = console.wait_for("dirty: right", LONG_BOUND);
    let right = right.context("the guest's pages are not right")?.text;
    site.stop_at(2)?;
    site.all_given_back()?;
    Ok(format!("{fetched} files; {right}"))
}

/// A machine of two nodes goes to one of them and a further host, while both nodes serve queues of
/// node 0's disk. Each host has files of its own at the path of the disk, and the machine takes a
/// copy along, while its vCPUs copy blocks of it.
fn with_disk(site: &mut Site<'_>) -> Result<String> {
    let disks = [0, 1, 2, 3].map(|host| site.own_disks(host).join("disk"));
    let copies = Copies::new(disks[0].clone(), 2)?;
    fs::set_permissions(&disks[0], Permissions::from_mode(0o666))?;
    let script = format!(
        "{} echo at work; read line; touch /tmp/over; wait",
        copies.script()
    );
    let disk = format!("{},path=bypass", copies.disk());
    let shape = ["--on", "h1", "--cpus", "1,1", "--memory", "128M,128M"];
    let options = [&shape[..], &["--late-cpus", "no", "--disk", &disk]].concat();
    site.start_shaped(&site.home, &options, &script)?;
    at_work(site)?;
    let mut stood = Vec::new();
    for (from, to, first) in [(0, "1=140M,h2=140M", 1), (1, "h3=260M", 3)] {
        let words = ["vm", "migrate", "m", to, "--with-disks", "--json"];
        let view = site.ask_at(from, &words)?;
        let home = &view["migrated"]["home"];
        ensure!(home["host"] == format!("h{first}"), "{view}");
        stood.push(home["stopped_ns"].as_u64().unwrap_or(0) / 1000);
        wait_until("the old host to be left", || {
            Ok(site.machines_at(from)?.is_empty())
        })?;
    }
    let mut console = site.console_at(3)?;
    console.write("over\n")?;
    let ended = console.finish(LONG_BOUND)?;
    let copied = copies.at(disks[3].clone()).judge(&ended)?;
    site.all_given_back()?;
    Ok(format!("{copied} copies; stood for {stood:?} us"))
}

const KILLS: Kills<'_> = Kills {
    to: "h1=132M,h2=132M",
    victims: &[
        Victim::Launcher,
        Victim::Daemon(1),
        Victim::Daemon(2),
        Victim::Taker,
    ],
    rounds: 4,
    late: 8,
    within_us: 25_000,
};

/// While node 0 takes what the node beside it has, and after.
const KILLS_LATER: Kills<'_> = Kills {
    victims: &[Victim::Daemon(1), Victim::Taker, Victim::Daemon(2)],
    rounds: 3,
    late: 9,
    within_us: 900_000,
    ..KILLS
};

/// Whatever is killed at whatever moment: the machine has one node 0 at most, and where it runs,
/// all of its pages are right.
fn killed(site: &mut Site<'_>) -> Result<String> {
    Ok([KILLS.carry_out(site)?, KILLS_LATER.carry_out(site)?].join(", "))
}

fn killed_often(site: &mut Site<'_>) -> Result<String> {
    for kills in [KILLS, KILLS_LATER] {
        let often = Kills {
            rounds: 80,
            ..kills
        };
        often.carry_out(site)?;
    }
    Ok(String::new())
}
