//! Machines whose network between hosts is a VXLAN of the site.

use std::fs;
use std::path::Path;

use anyhow::{Result, bail, ensure};

use super::cut::TALK;
use super::user::{Launcher, text};
use super::{BOOT_BOUND, Bench, END_BOUND, Lacks, PROGRAM_BOUND, STEP_BOUND, ep};
use crate::namespace::{Star, missing};

const LOG_PAIRS: u32 = 30;
const TAP: &str = "weft0";
/// Of the cables, without what VXLAN adds.
const MTU: u32 = 1450;
/// Of a host that cannot be used.
const SMALL_MTU: u32 = 1400;
/// From the first machine to the second, in packets as large as they may be. The ssh compresses.
const SENDS: &str = "head -c 500000 /dev/urandom | ssh -y -y 10.77.0.2 wc -c";
const SENT: u64 = 500_000;
/// Of a host whose machine acknowledges that.
const LEAST_BYTES: u64 = 10_000;

pub fn vxlan(bench: &Bench<'_>) -> Result<String> {
    if let Some(why) = missing() {
        bail!(Lacks(why));
    }
    if !Path::new("/dev/net/tun").exists() {
        bail!(Lacks("/dev/net/tun".into()));
    }
    let star = Star::new(5)?;
    star.vxlan(&[1, 2, 3], TAP, MTU)?;
    star.vxlan(&[4], TAP, SMALL_MTU)?;
    let mut user = bench.user()?;
    user.prefix = star.prefix(0);
    let list = user.folder.join("list");
    let lines: Result<String> = (1..=4).map(|host| star.list_line(host)).collect();
    fs::write(&list, lines?)?;
    let (program, size, list) = (user.ep(), LOG_PAIRS.to_string(), list.to_string_lossy());
    let address = Star::address(0);
    let common = ["--vms", "2", "--list", &list, "--address", &address];
    let of = |tap, hosts| [&common[..], &["--tap", tap, "--hosts", hosts]].concat();

    let words = [&of("weft9", "1")[..], &["--", &program, &size]].concat();
    let mut launcher = user.run("none", &words)?;
    let refusal = "this host has no tap device of that name";
    user.until(&mut launcher, "a refusal", BOOT_BOUND, |status| {
        status.log().contains(refusal)
    })?;
    user.must(&["exit"])?;
    launcher.ends_within(END_BOUND)?;
    user.nothing_left(false)?;

    let words = [&of(TAP, "2")[..], &["--", &program, &size]].concat();
    let mut launcher = user.run("c", &words)?;
    user.until(&mut launcher, "it runs", BOOT_BOUND, |status| {
        status.is_running() && status.machines_on("h1") == 1 && status.machines_on("h2") == 1
    })?;
    let talk = |launcher: &Launcher| -> Result<()> {
        let talked = user.ask(&["ssh", "c", "0", "--", TALK])?;
        let said = text(&talked.stdout);
        let of = |name: &str| said.lines().filter(|line| *line == name).count();
        let both = of("vm-0") == 4 && of("vm-1") == 4;
        ensure!(both, "talk: {talked:?}; {}", launcher.errors());
        let counted = user.must(&["ssh", "c", "0", "--", SENDS])?;
        ensure!(counted.trim() == SENT.to_string(), "{counted} arrived");
        Ok(())
    };
    talk(&launcher)?;
    let mtu = user.must(&["ssh", "c", "1", "--", "cat /sys/class/net/eth0/mtu"])?;
    ensure!(mtu.trim() == MTU.to_string(), "the machines' MTU is {mtu}");
    user.must(&["release", "h1"])?;
    user.until(&mut launcher, "a move", STEP_BOUND, |status| {
        status.machines_on("h3") == 1 && status.hosts().len() == 2
    })?;
    talk(&launcher)?;
    // The first host comes again, and the last one cannot.
    user.must(&["hosts", "4"])?;
    let refusal = "its tap device carries packets of 1400 bytes, and machines send 1450";
    user.until(&mut launcher, "a refusal", STEP_BOUND, |status| {
        status.log().contains(refusal)
    })?;
    let mut all = 0;
    for host in [1, 2, 3] {
        let sent = star.sent(host, TAP)?;
        ensure!(
            sent > LEAST_BYTES,
            "h{host} sent {sent} bytes over the VXLAN"
        );
        all += sent;
    }
    ensure!(all > 2 * SENT, "{all} bytes over the VXLAN");
    launcher.must_end(0, PROGRAM_BOUND)?;
    ep::judge(&launcher.output(), LOG_PAIRS, 2)?;
    user.nothing_left(false)?;
    Ok(format!("{:.1} MB over the VXLAN", all as f64 / 1e6))
}

/// A host whose tap device goes is left.
pub fn lost(bench: &Bench<'_>) -> Result<String> {
    if let Some(why) = missing() {
        bail!(Lacks(why));
    }
    let star = Star::new(4)?;
    star.vxlan(&[1, 2, 3], TAP, MTU)?;
    let mut user = bench.user()?;
    user.prefix = star.prefix(0);
    let list = user.folder.join("list");
    let lines: Result<String> = (1..=3).map(|host| star.list_line(host)).collect();
    fs::write(&list, lines?)?;
    let (program, size, list) = (user.ep(), LOG_PAIRS.to_string(), list.to_string_lossy());
    let address = Star::address(0);
    let site = ["--list", &list, "--address", &address, "--tap", TAP];
    let words = ["--vms", "2", "--hosts", "2", "--", &program, &size];
    let mut launcher = user.run("c", &[&site[..], &words].concat())?;
    user.until(&mut launcher, "it runs", BOOT_BOUND, |status| {
        status.is_running() && status.machines_on("h1") == 1 && status.machines_on("h2") == 1
    })?;
    star.remove_tap(2, TAP)?;
    user.until(&mut launcher, "a move", STEP_BOUND, |status| {
        let log = status.log();
        log.contains("h2 has to be left: its switch has ended") && status.machines_on("h3") == 1
    })?;
    launcher.must_end(0, PROGRAM_BOUND)?;
    ep::judge(&launcher.output(), LOG_PAIRS, 2)?;
    user.nothing_left(false)?;
    Ok(String::new())
}
