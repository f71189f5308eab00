//! A machine that was started on one host goes to other hosts for good: what node 0 had goes
//! along, and nothing of the machine is left where it was.

use std::fs::{self, Permissions};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use super::growth::ONE;
use super::kills::{Kills, Victim};
use super::migration::mode;
use super::switches::from_switch_to_switch;
use super::{BOUND, LEASE, LONG_BOUND, Site, TAP, has_key, wait_until};
use crate::aggregate::Copies;
use crate::boot::SMALL;
use crate::cluster::Identity;
use crate::guest::Guest;
use crate::namespace::Star;
use crate::web::fetch_from;

pub(super) type Check = fn(&mut Site<'_>) -> Result<String>;

/// By name: hosts beside the launcher's, and the test.
pub(super) const CHECKS: [(&str, usize, Check); 6] = [
    ("home, from host to host", 2, from_host_to_host),
    ("home, with its disk and its network", 2, with_devices),
    ("home, from switch to switch", 2, from_switch_to_switch),
    ("home, with copies of its disks", 2, with_copies),
    ("home, it stays where it has to", 1, stays),
    ("home, whatever is killed", 1, killed),
];

/// Those for a night.
pub(super) const LONG_CHECKS: [(&str, usize, Check); 1] =
    [("home, a thousand times to and fro", 2, a_thousand_times)];

impl Site<'_> {
    /// Where machines of a host are found.
    pub(super) fn run_directory(&self, host: usize) -> PathBuf {
        match host {
            0 => self.bench.run_directory.clone(),
            _ => self.bench.directory.join(format!("h{host}/run")),
        }
    }

    fn weft_of(&self, identity: &Identity, host: usize, words: &[&str]) -> Command {
        let prefix = self.star.prefix(host);
        let mut command = Command::new(&prefix[0]);
        let (name, value) = identity.environment();
        command
            .args(&prefix[1..])
            .arg(&self.bench.context.weft)
            .args(words)
            .env(name, value)
            .env("XDG_RUNTIME_DIR", self.run_directory(host));
        command
    }

    /// `weft` on a host, as its daemon's user.
    pub(super) fn weft_at(&self, host: usize, words: &[&str]) -> Command {
        self.weft_of(self.identity(host), host, words)
    }

    pub(super) fn identity(&self, host: usize) -> &Identity {
        match host {
            0 => &self.home,
            _ => &self.hosts[host - 1],
        }
    }

    /// Has a machine called `m` started as `identity` on the launcher's host, whose guest runs
    /// `script`.
    pub(super) fn start_as(
        &self,
        identity: &Identity,
        options: &[&str],
        script: &str,
    ) -> Result<()> {
        self.start_shaped(identity, &[&ONE[..], options].concat(), script)
    }

    /// The same with all options.
    pub(super) fn start_shaped(
        &self,
        identity: &Identity,
        options: &[&str],
        script: &str,
    ) -> Result<()> {
        let [kernel, initrd] = SMALL;
        let line = format!("console=ttyS0 quiet weft.run=\"{script}\"");
        let lease = LEASE.as_secs().to_string();
        let words = ["vm", "start", "--name", "m", "--lease", &lease];
        let mut command = self.weft_of(identity, 0, &words);
        command.args(options);
        command.args(["--cmdline", &line, "--kernel"]);
        command.arg(self.images.file(kernel)?).arg("--initrd");
        command.arg(self.images.file(initrd)?);
        let output = command.output()?;
        ensure!(output.status.success(), "{output:?}");
        Ok(())
    }

    pub(super) fn ask_at(&self, host: usize, words: &[&str]) -> Result<Value> {
        let output = self.weft_at(host, words).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(
            output.status.success(),
            "host {host}: weft {}: {said}",
            words.join(" ")
        );
        serde_json::from_slice(&output.stdout).with_context(|| words.join(" "))
    }

    /// The machines of a host that run or are paused.
    pub(super) fn machines_at(&self, host: usize) -> Result<Vec<Value>> {
        let listed = self.ask_at(host, &["vm", "list", "--json"])?;
        let listed = listed.as_array().cloned().unwrap_or_default();
        let lives = |view: &Value| view["state"] == "running" || view["state"] == "paused";
        Ok(listed.into_iter().filter(lives).collect())
    }

    /// The console of the machine on a host.
    pub(super) fn console_at(&self, host: usize) -> Result<Guest> {
        let mut command = self.weft_at(host, &["vm", "console", "m"]);
        Guest::start(command.stdin(Stdio::piped()))
    }

    /// The machine goes from one host to another for good. What the command reports.
    pub(super) fn go(&self, from: usize, to: usize, option: &str) -> Result<Value> {
        let place = format!("h{to}=256M");
        let view = self.ask_at(from, &["vm", "migrate", "m", &place, option, "--json"])?;
        let moved = view["migrated"].clone();
        ensure!(moved["home"]["host"] == format!("h{to}"), "{view}");
        ensure!(moved["stays"] == serde_json::json!([]), "{view}");
        wait_until("the old host to be left", || {
            let used = self.listed()?;
            let used = used.get(from.wrapping_sub(1));
            let is_free = used.is_none_or(|node| node["machine_slices"] == 0);
            Ok(is_free && self.machines_at(from)?.is_empty())
        })?;
        let there = self.machines_at(to)?;
        ensure!(there.len() == 1 && there[0]["name"] == "m", "{there:?}");
        Ok(moved)
    }

    /// What a test that failed left: machines outlive their hosts' daemons.
    pub(super) fn end_machines(&self) {
        for host in 0..=self.hosts.len() {
            // Most hosts have no machine any more.
            let words = ["vm", "stop", "m", "--timeout", "0"];
            let _ = self.weft_at(host, &words).output();
        }
    }

    pub(super) fn stop_at(&self, host: usize) -> Result<()> {
        let words = ["vm", "stop", "m", "--timeout", "0"];
        let output = self.weft_at(host, &words).output()?;
        ensure!(output.status.success(), "{output:?}");
        wait_until("its end", || Ok(self.machines_at(host)?.is_empty()))
    }
}

pub(super) fn at_work(site: &Site<'_>) -> Result<()> {
    let mut console = site.console_at(0)?;
    let works = console.wait_for("at work", BOUND);
    ensure!(works.is_some(), "no boot: {:?}", console.lines().last());
    console.kill()
}

fn from_host_to_host(site: &mut Site<'_>) -> Result<String> {
    let script = "dirty 60 3000 12; read word; echo got $word; read word";
    site.start_as(&site.home, &[], script)?;
    at_work(site)?;
    let mut stopped_us = Vec::new();
    let mut at = 0;
    let mut old_console = Some(site.console_at(0)?);
    for (round, to) in [1, 2, 1, 2, 1, 2].into_iter().enumerate() {
        let mut once = || -> Result<u64> {
            let moved = site.go(at, to, mode(round))?;
            if let Some(console) = old_console.take() {
                is_confined(site)?;
                let ended = console.finish(BOUND)?;
                ensure!(ended.line("m is on h1 now").is_some(), "{}", ended.tail(5));
            }
            let stopped_ns = moved["home"]["stopped_ns"].as_u64();
            Ok(stopped_ns.context("no time")? / 1000)
        };
        stopped_us.push(once().with_context(|| format!("in round {round}"))?);
        at = to;
    }
    // It does not need the daemon that it came with, nor the host where it was before.
    for daemon in &site.daemons {
        kill(Pid::from_raw(daemon.pid()), Signal::SIGKILL)?;
    }
    let mut console = site.console_at(at)?;
    let first = console.wait_for("at work", BOUND);
    ensure!(
        first.is_some(),
        "the console's scrollback did not come along"
    );
    let right = console.wait_for("dirty: right", LONG_BOUND);
    let right = right.context("the guest's pages are not right")?.text;
    console.write("hello\n")?;
    let got = console.wait_for("got hello", BOUND);
    ensure!(got.is_some(), "the console types nothing");
    site.stop_at(at)?;
    Ok(format!("{right}; stood for {stopped_us:?} us"))
}

/// The machine's process on host 1 belongs to the user of its lender, is filtered, and has no
/// key.
fn is_confined(site: &Site<'_>) -> Result<()> {
    let there = site.machines_at(1)?;
    let pid = there[0]["machine_pid"].as_i64().context("no process")? as i32;
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    ensure!(
        status.contains("Uid:\t60100\t60100\t60100\t60100") && status.contains("Seccomp:\t2"),
        "{status}"
    );
    ensure!(!has_key(pid, &site.hosts[0])?, "it has its daemon's key");
    let listed = site.listed()?;
    ensure!(listed[0]["machine_slices"] == 1, "{:?}", listed[0]);
    ensure!(
        listed[0]["memory_free_bytes"] != listed[0]["memory_bytes"],
        "what it uses is lent to others: {:?}",
        listed[0]
    );
    Ok(())
}

/// Waits for two more files.
type Wait<'a> = &'a dyn Fn() -> Result<()>;

/// The last number in the file that a guest serves.
const LAST: usize = 9_999;

/// Has the guest serve a file of numbers on its network card.
pub(super) fn web_server() -> String {
    let address = Star::address(100);
    format!(
        "ip link set eth0 up; ip addr add {address}/24 dev eth0; mkdir /tmp/web; \
         seq 0 {LAST} >/tmp/web/file; httpd -p 80 -h /tmp/web;"
    )
}

impl Site<'_> {
    /// A host fetches the file of [`web_server`] again and again while `go` runs, which may wait
    /// for two more of them; how many it got, and how long one took at most.
    pub(super) fn fetched_while(
        &self,
        host: usize,
        go: &dyn Fn(Wait<'_>) -> Result<()>,
    ) -> Result<(usize, Duration)> {
        let content: String = (0..=LAST).map(|number| format!("{number}\n")).collect();
        let server = SocketAddr::new(Star::address(100).parse()?, 80);
        let star = &self.star;
        let (fetched, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
        let fetch = || -> Result<Duration> {
            let mut longest = Duration::ZERO;
            while !is_over.load(Ordering::SeqCst) {
                let begun = Instant::now();
                let got = fetch_from(server, BOUND)?;
                ensure!(got == content.as_bytes(), "{} bytes, or others", got.len());
                longest = longest.max(begun.elapsed());
                fetched.fetch_add(1, Ordering::SeqCst);
            }
            Ok(longest)
        };
        let two_more = || {
            let before = fetched.load(Ordering::SeqCst);
            wait_until("two files", || {
                Ok(fetched.load(Ordering::SeqCst) >= before + 2)
            })
        };
        let (went, longest) = std::thread::scope(|scope| {
            let fetching = scope.spawn(|| star.within(host, fetch));
            let went = go(&two_more);
            is_over.store(true, Ordering::SeqCst);
            (went, fetching.join())
        });
        let longest = longest.map_err(|_| anyhow!("the client panicked"))?;
        went.with_context(|| format!("the client: {longest:?}"))?;
        let count = fetched.into_inner();
        Ok((
            count,
            longest.with_context(|| format!("after {count} files"))?,
        ))
    }
}

/// The disks are at the same paths on both hosts, and each has a tap device on one network. While
/// the machine goes, its vCPUs copy blocks of one disk and read the other, which is read-only, and
/// a third host fetches files.
fn with_devices(site: &mut Site<'_>) -> Result<String> {
    site.star.add_tap(0, TAP, 0)?;
    site.star.add_tap(1, TAP, 60100)?;
    let image = site.allowed().join("disk");
    let copies = Copies::new(image.clone(), 2)?;
    fs::set_permissions(&image, Permissions::from_mode(0o666))?;
    let disk = copies.disk();
    let fixed = site.allowed().join("fixed");
    fs::write(
        &fixed,
        (0..1 << 20).map(|at| (at % 251) as u8).collect::<Vec<u8>>(),
    )?;
    let fixed = format!("{},ro", fixed.display());
    let network = format!("tap={TAP}");
    let script = format!(
        "{} \
         (until [ -e /tmp/read -a -e /tmp/over ]; do echo 3 >/proc/sys/vm/drop_caches; \
         md5sum /dev/vdb; touch /tmp/read; usleep 100000; done | sort -u | wc -l | sed 's/^/contents: /') & {} \
         echo at work; read line; touch /tmp/over; wait; [ $line = over ] || reboot -f",
        web_server(),
        copies.script()
    );
    let options = [
        "--late-cpus",
        "no",
        "--disk",
        &disk,
        "--disk",
        &fixed,
        "--net",
        &network,
    ];
    site.start_as(&site.home, &options, &script)?;
    at_work(site)?;
    let (count, longest) = site.fetched_while(2, &|two_more| {
        two_more()?;
        site.go(0, 1, mode(1))?;
        two_more()
    })?;
    let mut console = site.console_at(1)?;
    console.write("again\n")?;
    let contents = console.wait_for("contents: ", BOUND).context("no count")?;
    ensure!(contents.text.contains("contents: 1"), "{}", contents.text);
    wait_until("its guest to restart", || {
        Ok(site
            .machines_at(1)?
            .iter()
            .any(|view| view["restarts"] == 1))
    })?;
    console.kill()?;
    let mut console = site.console_at(1)?;
    ensure!(console.wait_for("at work", BOUND).is_some(), "no restart");
    console.write("over\n")?;
    let ended = console.finish(LONG_BOUND)?;
    let copied = copies.judge(&ended)?;
    let contents = ended.line("contents: 1");
    ensure!(contents.is_some(), "the read-only disk: {}", ended.tail(12));
    site.all_given_back()?;
    Ok(format!(
        "{copied} copies; {count} files, the longest took {} ms",
        longest.as_millis()
    ))
}

/// Each host has files of its own at the path of the disk. The machine takes a copy along, while
/// its vCPUs copy blocks of it, to one host and to another.
fn with_copies(site: &mut Site<'_>) -> Result<String> {
    let disks = [0, 1, 2].map(|host| site.own_disks(host).join("disk"));
    let copies = Copies::new(disks[0].clone(), 2)?;
    fs::set_permissions(&disks[0], Permissions::from_mode(0o666))?;
    let script = format!(
        "{} echo at work; read line; touch /tmp/over; wait",
        copies.script()
    );
    let disk = copies.disk();
    site.start_as(&site.home, &["--late-cpus", "no", "--disk", &disk], &script)?;
    at_work(site)?;
    let stays = |option: &[&str]| -> Result<String> {
        let words = [&["vm", "migrate", "m", "h1=256M", "--json"], option].concat();
        let away = site.ask_at(0, &words)?;
        let reason = away["migrated"]["stays"][0]["reason"].as_str();
        let reason = reason.with_context(|| format!("node 0 does not stay: {away}"))?;
        site.ask_at(0, &["vm", "consolidate", "m", "--json"])?;
        site.all_given_back()?;
        Ok(reason.to_owned())
    };
    let missing = stays(&[])?;
    ensure!(missing.contains("No such file"), "{missing}");
    fs::write(&disks[1], "another")?;
    let taken = stays(&["--with-disks"])?;
    ensure!(taken.contains("File exists"), "{taken}");
    ensure!(fs::read(&disks[1])? == b"another", "it was written over");
    fs::remove_file(&disks[1])?;
    let mut stood = Vec::new();
    for (from, to) in [(0, 1), (1, 2)] {
        let moved = site.go(from, to, "--with-disks")?;
        stood.push(moved["home"]["stopped_ns"].as_u64().unwrap_or(0) / 1000);
        ensure!(disks[from].exists(), "the old disk was removed");
    }
    let mut console = site.console_at(2)?;
    console.write("over\n")?;
    let ended = console.finish(LONG_BOUND)?;
    let copied = copies.at(disks[2].clone()).judge(&ended)?;
    site.all_given_back()?;
    Ok(format!("{copied} copies; stood for {stood:?} us"))
}

/// Whatever keeps node 0 where it is, the rest goes, and comes back.
fn stays(site: &mut Site<'_>) -> Result<String> {
    let disk = site.bench.directory.join("disk");
    fs::write(&disk, [0; 1 << 20])?;
    let disk = disk.to_string_lossy().into_owned();
    let home = site.home.clone();
    let neighbour = site.neighbour.clone();
    let mut said = Vec::new();
    for (identity, options, taken, why) in [
        (
            &home,
            &["--disk", &disk][..],
            false,
            "does not allow this disk",
        ),
        (&neighbour, &[][..], false, "machines = true"),
        (&home, &[][..], true, "`m` is running"),
    ] {
        site.start_as(identity, options, "echo at work; read word")?;
        at_work(site)?;
        let other = site.weft_at(1, &["vm", "start", "--name", "m", "--kernel"]);
        if taken {
            let mut other = other;
            other.arg(site.images.file(SMALL[0])?);
            ensure!(other.output()?.status.success());
        }
        let ask = |words: &[&str]| -> Result<Value> {
            let output = site.weft_of(identity, 0, words).output()?;
            ensure!(output.status.success(), "{why}: {output:?}");
            Ok(serde_json::from_slice(&output.stdout)?)
        };
        let away = ask(&["vm", "migrate", "m", "h1=256M", "--json"])?;
        let reason = away["migrated"]["stays"][0]["reason"].as_str();
        let reason = reason.with_context(|| format!("node 0 does not stay: {away}"))?;
        ensure!(reason.contains(why), "{reason}");
        said.push(reason.to_owned());
        ask(&["vm", "consolidate", "m", "--json"])?;
        site.stop_at(0)?;
        if taken {
            site.stop_at(1)?;
        }
        site.all_given_back()?;
    }
    Ok(said.join("; "))
}

/// Whatever is killed at whatever moment: the machine runs on one host at most, and where it
/// runs, all of its pages are right.
fn killed(site: &mut Site<'_>) -> Result<String> {
    let kills = Kills {
        to: "h1=256M",
        victims: &[Victim::Launcher, Victim::Daemon(1), Victim::Taker],
        rounds: 9,
        late: 6,
        within_us: 40_000,
    };
    kills.carry_out(site)
}

/// As many times to and fro while the guest runs the tests of the memory model, and writes to
/// pages and checks them.
fn a_thousand_times(site: &mut Site<'_>) -> Result<String> {
    const TIMES: usize = 1000;
    let script = "(while [ ! -e /tmp/stop ]; do litmus -d 100 -s 20 >/dev/null || \
                  echo forbidden >>/tmp/bad; done) & (while [ ! -e /tmp/stop ]; do \
                  dirty 40 5000 10 >/dev/null || echo wrong >>/tmp/bad; done) & \
                  dmesg >/tmp/before; echo at work; read word; touch /tmp/stop; wait; \
                  dmesg | tail -n +$(($(wc -l </tmp/before)+1)); cat /tmp/bad; echo all over";
    site.start_as(&site.home, &[], script)?;
    at_work(site)?;
    let mut stopped_us: Vec<u64> = Vec::new();
    let mut at = 0;
    for round in 0..TIMES {
        let to = 1 + round % 2;
        let moved = site.go(at, to, mode(round));
        let moved = moved.with_context(|| format!("in round {round}"))?;
        stopped_us.extend(moved["home"]["stopped_ns"].as_u64().map(|ns| ns / 1000));
        at = to;
    }
    let mut console = site.console_at(at)?;
    console.write("end\n")?;
    let ended = console.finish(LONG_BOUND)?;
    ensure!(ended.line("all over").is_some(), "{}", ended.tail(20));
    let said = ["forbidden", "wrong", "BUG", "stall", "lockup", "hung"];
    let bad = said.iter().find_map(|word| ended.line(word));
    ensure!(bad.is_none(), "{}", ended.tail(40));
    stopped_us.sort_unstable();
    let part = |percent: usize| stopped_us[(TIMES - 1) * percent / 100];
    Ok(format!(
        "stood for {} us in the median, {} us in 99 of 100 moves, {} us at most",
        part(50),
        part(99),
        part(100)
    ))
}
