//! One Linux over several hosts, each a network namespace with a daemon of its own:
//! boots, the memory model, hosts that are lost, what is refused.
//!
//! Needs root, `ip` and `make guest`.

mod agents;
mod growth;
mod heirs;
mod home;
mod kills;
mod migration;
mod saves;
mod split;
mod switches;

use std::fs::{self, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use super::{BOUND, Bench, Runner, ended_with, wait_until};
use crate::aggregate::judge_litmus;
use crate::boot::{Images, SMALL};
use crate::cluster::{self, Identity, Wanted};
use crate::guest::{Ended, Guest};
use crate::namespace::{self, Star};
use crate::processes;
use crate::run::Running;

/// The port of all daemons.
const PORT: u16 = 7117;
/// What each host lends: enough for the slices of two small machines, and not for two of a large one.
const LENT: &str = "700M";
/// The tap device of each host that has one.
const TAP: &str = "weft-tap";
/// As which user slices of `home` run on other hosts, and those of host 1; the next hosts' follow.
const HOME_USER: u32 = 60100;
const PEER_USER: u32 = 60110;
/// The switch of each host that has one, where it has files of its own.
const SWITCH: &str = "switch";
/// What the tests ask for.
const LEASE: Duration = Duration::from_secs(2);
/// What a busy machine may add to the lease.
const MARGIN: Duration = Duration::from_secs(6);
/// So much of a process's memory is looked at at one time.
const MEMORY_PIECE_BYTES: usize = 1 << 20;
/// Longest test of the guest's own.
const LONG_BOUND: Duration = Duration::from_secs(120);

type HostCheck = fn(&Site<'_>) -> Result<String>;
/// The same, of daemons that are started anew.
type ChangingCheck = fn(&mut Site<'_>) -> Result<String>;

/// By name: hosts beside the launcher's, and the test.
const CHECKS: [(&str, usize, HostCheck); 12] = [
    ("Linux boots over two hosts", 1, two),
    ("two borrowers are two users", 1, borrowers),
    ("what a host does not allow stays shut", 1, consent),
    ("three hosts, one with a clock of its own", 2, three),
    ("a disk and a network of another host", 1, devices),
    ("a slow network changes nothing but time", 1, slow),
    ("a daemon is killed", 2, daemon_killed),
    ("a slice is killed", 1, slice_killed),
    ("a cable is pulled", 2, cable_pulled),
    ("the launcher is killed", 1, launcher_killed),
    ("a daemon ends", 1, daemon_ends),
    ("the guest restarts on what was reserved", 1, restarts),
];

/// Runs the tests, on the software vCPU.
pub(super) fn run(runner: &Runner<'_>) {
    let missing = runner.images.missing(&SMALL).or_else(namespace::missing);
    let attempt = |name: &str, hosts: usize, check: HostCheck| {
        let name = format!("vm, hosts: {name}");
        runner.run("soft", &name, missing.clone(), |bench| {
            check(&Site::new(bench, runner.images, hosts)?)
        });
    };
    for (name, hosts, check) in CHECKS {
        attempt(name, hosts, check);
    }
    attempt("refusals", 2, refusals);
    let change = |(name, hosts, check): (&str, usize, ChangingCheck)| {
        let name = format!("vm, hosts: {name}");
        runner.run("soft", &name, missing.clone(), |bench| {
            check(&mut Site::new(bench, runner.images, hosts)?)
        });
    };
    let changes = growth::CHECKS.into_iter().chain(migration::CHECKS);
    changes.chain(saves::CHECKS).for_each(change);
    agents::run(runner);
    // Most of the time they wait until the guest has used its memory for long enough.
    thread::scope(|scope| {
        for check in split::CHECKS {
            scope.spawn(move || change(check));
        }
    });
    let long = home::LONG_CHECKS.into_iter().chain(heirs::LONG_CHECKS);
    let long = long.filter(|_| runner.long);
    let leaving = home::CHECKS.into_iter().chain(heirs::CHECKS);
    let leaving = leaving.chain(saves::LEAVING_CHECKS).chain(long);
    for (name, hosts, check) in leaving {
        let name = format!("vm, hosts: {name}");
        runner.run("soft", &name, missing.clone(), |bench| {
            let mut site = Site::new(bench, runner.images, hosts)?;
            let outcome = check(&mut site);
            site.end_machines();
            outcome
        });
    }
}

/// Hosts with daemons, and the one that launches.
struct Site<'a> {
    bench: &'a Bench<'a>,
    images: &'a Images,
    // Before the namespaces, which hold nothing then.
    daemons: Vec<Running>,
    home: Identity,
    /// Those of the hosts.
    hosts: Vec<Identity>,
    /// Another borrower.
    neighbour: Identity,
    star: Star,
}

impl<'a> Site<'a> {
    /// So many hosts beside the launcher's: `h1`, `h2`. The last of two says that it
    /// is another machine. All lend to `home` and to `neighbour`; `home` may open what
    /// [`Site::consent`] says. Machines of all but `neighbour` may come for good.
    fn new(bench: &'a Bench<'a>, images: &'a Images, hosts: usize) -> Result<Site<'a>> {
        let star = Star::new(hosts + 1)?;
        let context = bench.context;
        let home = Identity::new(context, &bench.directory.join("home"))?;
        let neighbour = Identity::new(context, &bench.directory.join("neighbour"))?;
        let nodes = (1..=hosts)
            .map(|host| Identity::new(context, &bench.directory.join(format!("h{host}"))))
            .collect::<Result<Vec<_>>>()?;
        let names: Vec<(String, String)> = (1..=hosts)
            .map(|host| (format!("h{host}"), Star::address(host)))
            .collect();
        let mut peers: Vec<(&str, &str, Option<&str>)> = names
            .iter()
            .zip(&nodes)
            .map(|((name, address), node)| (name.as_str(), node.key.as_str(), Some(&**address)))
            .collect();
        // Trusted, and not there.
        let nobody = Star::address(100);
        let gone = home.key.clone();
        peers.push(("gone", &gone, Some(&nobody)));
        home.configure("127.0.0.1:1", "1G", &peers)?;
        neighbour.configure("127.0.0.1:1", "1G", &peers[..hosts])?;
        let mut site = Site {
            bench,
            images,
            daemons: Vec::new(),
            home,
            hosts: Vec::new(),
            neighbour,
            star,
        };
        fs::create_dir(site.allowed())?;
        fs::create_dir(site.own_disks(0))?;
        for (host, node) in (1..).zip(&nodes) {
            let listen = format!("0.0.0.0:{PORT}");
            let own = format!("h{host}");
            let mut peers = peers.clone();
            peers.retain(|(name, ..)| *name != own && *name != "gone");
            peers.push(("neighbour", &site.neighbour.key, None));
            peers.push(("home", &site.home.key, None));
            node.configure(&listen, LENT, &peers)?;
            node.take_machines_of("home", "")?;
            for (user, (name, _)) in (PEER_USER..).zip(&names) {
                let lines = format!(
                    "user = {user}\ndisks = [\"{}/,rw\"]\nnetworks = [\"tap={TAP}\"]\n",
                    site.allowed().display()
                );
                node.take_machines_of(name, &lines)?;
            }
            node.allow(&site.consent())?;
            site.hosts.push(node.clone());
            let daemon = site.start_daemon(host)?;
            site.daemons.push(daemon);
        }
        Ok(site)
    }

    /// The daemon of a host.
    fn start_daemon(&self, host: usize) -> Result<Running> {
        let boot_id = self.bench.directory.join("boot-id");
        fs::write(&boot_id, "01234567-89ab-cdef-0123-456789abcdef\n")?;
        let mut prefix = match host {
            2 => self.star.prefix_as(host, &boot_id),
            _ => self.star.prefix(host),
        };
        // Machines that come to the host are found there.
        let run_directory = self.run_directory(host);
        fs::create_dir_all(&run_directory)?;
        let variable = format!("XDG_RUNTIME_DIR={}", run_directory.display());
        prefix.extend(["env".into(), variable.into()]);
        prefix.extend(namespace::with_tun(&self.bench.directory.join("tun")));
        let own = self.own_disks(host);
        fs::create_dir_all(&own)?;
        prefix.extend(namespace::with_directory(&own, &self.own_disks(0)));
        let wanted = Wanted {
            host: Star::address(host),
            port: PORT,
            memory: LENT.into(),
            runtime: None,
            prefix,
        };
        let directory = self.bench.directory.join(format!("h{host}"));
        let node = &self.hosts[host - 1];
        cluster::start_daemon(self.bench.context, node, &directory, &wanted)
    }

    /// Where `home` may open all disks.
    fn allowed(&self) -> PathBuf {
        self.bench.directory.join("allowed")
    }

    /// A part of it where each host has files of its own: those of a host.
    fn own_disks(&self, host: usize) -> PathBuf {
        match host {
            0 => self.allowed().join("own"),
            _ => self.bench.directory.join(format!("h{host}/own")),
        }
    }

    /// A disk that `home` may read.
    fn readable(&self) -> PathBuf {
        self.bench.directory.join("readable.img")
    }

    /// What hosts let `home` have.
    fn consent(&self) -> String {
        let (allowed, readable) = (self.allowed(), self.readable());
        format!(
            "may = \"borrow\"\nuser = {HOME_USER}\ndisks = [\"{}/,rw\", \"{},ro\"]\n\
             networks = [\"user,loopback\", \"tap={TAP}\", \"switch={}\"]\n",
            allowed.display(),
            readable.display(),
            self.own_disks(0).join(SWITCH).display()
        )
    }

    /// `weft` on the launcher's host.
    fn weft(&self, words: &[&str]) -> Command {
        let prefix = self.star.prefix(0);
        let mut command = Command::new(&prefix[0]);
        let (name, value) = self.home.environment();
        command
            .args(&prefix[1..])
            .arg(&self.bench.context.weft)
            .args(words)
            .env(name, value)
            .env("XDG_RUNTIME_DIR", &self.bench.run_directory);
        processes::heed(&mut command);
        command
    }

    /// `weft vm run` over `hosts`, with a vCPU on each, of a guest that runs `script`.
    fn machine(&self, hosts: &str, script: &str, options: &[&str]) -> Result<Command> {
        let cpus = (hosts.split(',').count() + 1).to_string();
        let lease = LEASE.as_secs().to_string();
        let words = ["--on", hosts, "--cpus", &cpus, "--lease", &lease];
        self.machine_with(&[&words[..], options].concat(), script)
    }

    /// `weft vm run` with these options, of a guest that runs `script`.
    fn machine_with(&self, options: &[&str], script: &str) -> Result<Command> {
        let [kernel, initrd] = SMALL;
        let line = format!("console=ttyS0 quiet weft.run=\"{script}\"");
        let mut command = self.weft(&["vm", "run"]);
        command
            .args(["--cmdline", &line, "--kernel"])
            .arg(self.images.file(kernel)?)
            .arg("--initrd")
            .arg(self.images.file(initrd)?)
            .args(options);
        Ok(command)
    }

    /// A machine over `hosts` whose guest counts seconds.
    fn busy(&self, hosts: &str) -> Result<Guest> {
        let script = "while :; do echo tick; sleep 1; done";
        let mut guest = Guest::start(&mut self.machine(hosts, script, &[])?)?;
        if guest.wait_for("tick", BOUND).is_none() {
            let ended = guest.finish(Duration::ZERO)?;
            anyhow::bail!("the guest does not come up: {}", ended.stderr);
        }
        Ok(guest)
    }

    /// The slice that a host's daemon runs.
    fn slice_of(&self, host: usize) -> Result<i32> {
        let slices = self.slices_of(host);
        let slice = slices.first().copied();
        slice.with_context(|| format!("host {host} runs no slice"))
    }

    /// All slices that a host's daemon runs.
    fn slices_of(&self, host: usize) -> Vec<i32> {
        children(self.daemons[host - 1].pid())
    }

    /// What the daemons say of themselves.
    fn listed(&self) -> Result<Vec<Value>> {
        let mut command = self.weft(&["node", "list", "--json"]);
        for host in 1..=self.daemons.len() {
            command.arg(format!("h{host}"));
        }
        let output = command.output()?;
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    /// Fails unless every daemon that can be asked runs no slice and has all of its
    /// memory, within the lease.
    fn all_given_back(&self) -> Result<()> {
        wait_until("what was lent to be given back", || {
            Ok(self
                .listed()?
                .iter()
                .filter(|node| node["reachable"] == true)
                .all(|node| {
                    node["slices_used"] == 0
                        && node["machine_slices"] == 0
                        && node["memory_free_bytes"] == node["memory_bytes"]
                }))
        })
    }
}

/// Fails unless a machine ended for the loss of `node`, within the lease and a
/// margin of `since`.
fn ended_by_loss(guest: Guest, node: usize, since: Instant) -> Result<String> {
    let ended = guest.finish(BOUND)?;
    let took = since.elapsed();
    ended_with(&ended, 124, &[&format!("lost node {node} (vCPU {node},")])?;
    ensure!(took < LEASE + MARGIN, "it took {took:?}");
    Ok(format!("{} ms", took.as_millis()))
}

fn counter(ended: &Ended, name: &str) -> Result<u64> {
    let line = ended.stderr.lines().find(|line| line.contains(name));
    let number = line.and_then(|line| line.split_whitespace().last());
    let number = number.with_context(|| format!("no counter {name} in: {}", ended.stderr))?;
    Ok(number.parse()?)
}

/// The children of a process, whichever of its threads started them.
fn children(parent: i32) -> Vec<i32> {
    processes::all()
        .iter()
        .filter(|process| process.parent == parent)
        .map(|process| process.identity.pid)
        .collect()
}

/// Whether the private key of `identity` is in a process's own memory, as bytes or as
/// the digits of its file.
fn has_key(pid: i32, identity: &Identity) -> Result<bool> {
    let text = fs::read_to_string(identity.directory.join("node.key"))?;
    let digits = text.trim().rsplit('-').next().unwrap_or_default();
    let bytes = (0..digits.len() / 2)
        .map(|at| u8::from_str_radix(&digits[2 * at..2 * at + 2], 16))
        .collect::<Result<Vec<_>, _>>()?;
    ensure!(bytes.len() == 32, "a private key of {} bytes", bytes.len());
    let memory = fs::File::open(format!("/proc/{pid}/mem"))?;
    for line in fs::read_to_string(format!("/proc/{pid}/maps"))?.lines() {
        let mut words = line.split_whitespace();
        let (range, rights) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
        // What is shared is the guest's memory, which has no key from here.
        let Some((from, to)) = range.split_once('-').filter(|_| rights.starts_with("rw-p")) else {
            continue;
        };
        let from = u64::from_str_radix(from, 16)?;
        let length = u64::from_str_radix(to, 16)? - from;
        for at in (0..length).step_by(MEMORY_PIECE_BYTES) {
            // A key may lie across the border of two pieces.
            let wanted = (length - at).min((MEMORY_PIECE_BYTES + text.len()) as u64);
            let mut piece = vec![0; wanted as usize];
            // What has gone meanwhile, or is nobody's, cannot be read.
            let Ok(count) = memory.read_at(&mut piece, from + at) else {
                break;
            };
            let piece = &piece[..count];
            let has = |needle: &[u8]| piece.windows(needle.len()).any(|found| found == needle);
            if has(&bytes) || has(digits.as_bytes()) {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

fn two(site: &Site<'_>) -> Result<String> {
    let mut command = site.machine("h1", "nproc; read line", &["--stats", "text"])?;
    let mut guest = Guest::start(&mut command)?;
    ensure!(guest.wait_for("2", BOUND).is_some(), "no two processors");
    let listed = site.listed()?;
    ensure!(listed[0]["machine_slices"] == 1, "{:?}", listed[0]);
    let status = fs::read_to_string(format!("/proc/{}/status", site.slice_of(1)?))?;
    ensure!(
        status.contains("Uid:\t60100\t60100\t60100\t60100"),
        "the slice is another user's: {status}"
    );
    ensure!(status.contains("Seccomp:\t2"), "it has no filter");
    let machine = children(guest.pid() as i32);
    ensure!(
        machine.len() == 1,
        "processes on the launcher's host: {machine:?}"
    );
    for process in machine {
        ensure!(
            !has_key(process, &site.home)?,
            "the process that runs the guest has the launcher's private key"
        );
    }
    ensure!(
        !has_key(site.slice_of(1)?, &site.hosts[0])?,
        "the slice has its daemon's private key"
    );
    ensure!(
        has_key(site.daemons[0].pid(), &site.hosts[0])?,
        "no key is found at all"
    );
    guest.tell()?;
    let ended = guest.finish(BOUND)?;
    ended_with(&ended, 0, &["is on h1", "powered off by the guest"])?;
    ensure!(counter(&ended, "slice1.clock-error-ns")? == 0, "same host");
    site.all_given_back()?;
    Ok(format!("{} ms", ended.took.as_millis()))
}

fn three(site: &Site<'_>) -> Result<String> {
    let script = "nproc; litmus -d 100 -s 3; sleep 3; dmesg | grep -v ommand | grep -c -i -e unstable -e warp";
    let mut command = site.machine("h1,h2", script, &["--stats", "text"])?;
    let ended = Guest::start(&mut command)?.finish(LONG_BOUND)?;
    ended_with(&ended, 0, &["powered off by the guest"])?;
    let console = ended.console();
    ensure!(console.lines().any(|line| line.trim() == "3"), "{console}");
    judge_litmus(&ended)?;
    ensure!(console.lines().any(|line| line.trim() == "0"), "{console}");
    ensure!(counter(&ended, "slice1.clock-error-ns")? == 0, "same host");
    let error = counter(&ended, "slice2.clock-error-ns")?;
    ensure!((1..50_000_000).contains(&error), "clock error {error} ns");
    site.all_given_back()?;
    Ok(format!("clock error {} us", error / 1000))
}

fn slow(site: &Site<'_>) -> Result<String> {
    let options = [
        "--stats",
        "text",
        "--link-delay",
        "3000",
        "--late-cpus",
        "yes",
    ];
    let ended = Guest::start(&mut site.machine("h1", "nproc", &options)?)?.finish(LONG_BOUND)?;
    ended_with(&ended, 0, &["powered off by the guest"])?;
    let console = ended.console();
    ensure!(console.lines().any(|line| line.trim() == "2"), "{console}");
    Ok(format!("{} ms", ended.took.as_millis()))
}

/// A disk that user 60100 may open.
fn make_disk(path: &Path) -> Result<()> {
    fs::write(path, vec![0; 1 << 20])?;
    fs::set_permissions(path, Permissions::from_mode(0o666))?;
    Ok(())
}

/// What the guest writes is in the other host's file.
fn devices(site: &Site<'_>) -> Result<String> {
    let file = site.allowed().join("far.img");
    make_disk(&file)?;
    make_disk(&site.readable())?;
    fs::set_permissions(site.readable(), Permissions::from_mode(0o444))?;
    let disk = format!("{},node=1", file.display());
    let readable = format!("{},node=1,ro", site.readable().display());
    let script = format!(
        "ip link set eth0 up; udhcpc -q -n -f -i eth0 -s /etc/udhcpc; echo $((6*7))-far > \
         /tmp/word; dd if=/tmp/word of=/dev/vda bs=512 seek=3 conv=sync,fsync 2>&1; \
         dd if=/dev/vdb of=/dev/null 2>&1; \
         echo its daemon says $(timeout 2 nc 10.0.2.2 {PORT} </dev/null | head -c 4)"
    );
    let options = [
        "--disk",
        &disk,
        "--disk",
        &readable,
        "--net",
        "user,loopback,node=1",
    ];
    // Networking in user space asks for a way out.
    let prefix = site.star.prefix(1);
    let mut route = Command::new(&prefix[0]);
    route
        .args(&prefix[1..])
        .args(["ip", "route", "add", "default", "via"]);
    ensure!(route.arg(Star::address(0)).status()?.success(), "no route");

    let ended = Guest::start(&mut site.machine("h1", &script, &options)?)?.finish(BOUND)?;
    ended_with(&ended, 0, &["powered off by the guest"])?;
    let console = ended.console();
    ensure!(console.contains("its daemon says WEFT"), "{console}");
    ensure!(console.contains("2048+0 records in"), "{console}");
    let bytes = fs::read(&file)?;
    ensure!(bytes[3 * 512..].starts_with(b"42-far\n"), "{console}");
    site.all_given_back()?;
    Ok(String::new())
}

/// What the lender's configuration does not list is refused, with the line that would
/// allow it.
fn consent(site: &Site<'_>) -> Result<String> {
    let secret = site.bench.directory.join("secret.img");
    make_disk(&secret)?;
    make_disk(&site.readable())?;
    let inside = |name: &str| site.allowed().join(name);
    symlink(&secret, inside("link"))?;
    fs::hard_link(&secret, inside("hard"))?;
    make_disk(&inside("shut"))?;
    fs::set_permissions(inside("shut"), Permissions::from_mode(0o600))?;
    let on_one = |path: &Path| format!("{},node=1", path.display());
    let secret_line = format!("disks = [\"{},rw\"]", secret.display());
    let around = inside("../secret.img");
    let cases: [(&str, String, &[&str]); 9] = [
        (
            "--disk",
            on_one(&secret),
            &["does not allow this disk", &secret_line, "[[peer]] `home`"],
        ),
        ("--disk", on_one(&around), &["does not allow this disk"]),
        (
            "--disk",
            on_one(&site.readable()),
            &["for writing", "readable.img,rw"],
        ),
        ("--disk", on_one(&inside("link")), &["symbolic links"]),
        ("--disk", on_one(&inside("hard")), &["another hard link"]),
        (
            "--disk",
            on_one(&inside("shut")),
            &["for user 60100: cannot open disk", "Permission denied"],
        ),
        (
            "--disk",
            on_one(&inside("none")),
            &["for user 60100: cannot open disk", "No such file"],
        ),
        (
            "--net",
            "user,forward=2222:22,node=1".into(),
            &["networks = [\"user,forward=2222\"]"],
        ),
        (
            "--net",
            "tap=weft0,node=1".into(),
            &["does not allow this network", "networks = [\"tap=weft0\"]"],
        ),
    ];
    for (option, value, says) in cases {
        let mut command = site.machine("h1", "true", &[option, &value])?;
        let ended = Guest::start(&mut command)?.finish(BOUND)?;
        ended_with(&ended, 125, says).with_context(|| format!("{option} {value}"))?;
        site.all_given_back()?;
    }
    Ok(String::new())
}

/// What runs for one borrower and what runs for another cannot reach each other.
fn borrowers(site: &Site<'_>) -> Result<String> {
    let options = ["--memory", "128M"];
    let script = "while :; do echo tick; sleep 1; done";
    let mut first = Guest::start(&mut site.machine("h1", script, &options)?)?;
    let mut other = site.machine("h1", script, &options)?;
    let (name, value) = site.neighbour.environment();
    let mut second = Guest::start(other.env(name, value))?;
    for guest in [&mut first, &mut second] {
        ensure!(guest.wait_for("tick", BOUND).is_some(), "no guest");
    }
    let mut users = Vec::new();
    for slice in site.slices_of(1) {
        let status = fs::read_to_string(format!("/proc/{slice}/status"))?;
        let user = status.lines().find_map(|line| line.strip_prefix("Uid:\t"));
        users.push(user.context("no user")?.to_owned());
    }
    users.sort();
    let all = |user: u32| [user; 4].map(|user| user.to_string()).join("\t");
    ensure!(users == [all(60100), all(60101)], "{users:?}");
    for mut guest in [first, second] {
        guest.kill()?;
        guest.finish(BOUND)?;
    }
    site.all_given_back()?;
    Ok(String::new())
}

fn daemon_killed(site: &Site<'_>) -> Result<String> {
    let guest = site.busy("h1,h2")?;
    let slice = site.slice_of(1)?;
    let since = Instant::now();
    kill(Pid::from_raw(site.daemons[0].pid()), Signal::SIGKILL)?;
    let note = ended_by_loss(guest, 1, since)?;
    // Nobody may have looked at its end yet.
    let gone = || Ok(processes::read(slice).is_none_or(|process| process.state == 'Z'));
    wait_until("the slice to end", gone)?;
    site.all_given_back()?;
    Ok(note)
}

fn slice_killed(site: &Site<'_>) -> Result<String> {
    let guest = site.busy("h1")?;
    let since = Instant::now();
    kill(Pid::from_raw(site.slice_of(1)?), Signal::SIGKILL)?;
    let note = ended_by_loss(guest, 1, since)?;
    site.all_given_back()?;
    Ok(note)
}

fn cable_pulled(site: &Site<'_>) -> Result<String> {
    let guest = site.busy("h1,h2")?;
    let since = Instant::now();
    site.star.cut(2, true)?;
    let note = ended_by_loss(guest, 2, since)?;
    site.star.cut(2, false)?;
    site.all_given_back()?;
    Ok(note)
}

fn launcher_killed(site: &Site<'_>) -> Result<String> {
    let mut guest = site.busy("h1")?;
    let slice = site.slice_of(1)?;
    let since = Instant::now();
    guest.kill()?;
    let gone = || Ok(processes::read(slice).is_none());
    wait_until("the slice to end", gone)?;
    let took = since.elapsed();
    ensure!(took < LEASE + MARGIN, "it took {took:?}");
    site.all_given_back()?;
    Ok(format!("{} ms", took.as_millis()))
}

fn daemon_ends(site: &Site<'_>) -> Result<String> {
    let guest = site.busy("h1")?;
    kill(Pid::from_raw(site.daemons[0].pid()), Signal::SIGTERM)?;
    let ended = guest.finish(BOUND)?;
    let said = ["needs its memory back", "asking the guest to power off"];
    ended_with(&ended, 0, &said)?;
    Ok(String::new())
}

/// Twice what is lent would be needed if a life's reservation outlived it.
fn restarts(site: &Site<'_>) -> Result<String> {
    let mut command = site.machine("h1", "nproc\" weft.reboot \"", &[])?;
    command.stdin(Stdio::null());
    let mut guest = Guest::start(&mut command)?;
    let mut starts = 0;
    let deadline = Instant::now() + LONG_BOUND;
    while starts < 4 && Instant::now() < deadline {
        ensure!(guest.wait_for("weft-guest: hello", BOUND).is_some());
        starts = guest
            .lines()
            .iter()
            .filter(|line| line.text.contains("weft-guest: hello"))
            .count();
        let next = guest.wait_for(&format!("never {starts}"), Duration::from_millis(300));
        ensure!(next.is_none(), "a guest that says never");
    }
    guest.kill()?;
    let ended = guest.finish(BOUND)?;
    ensure!(starts >= 4, "{starts} starts; {}", ended.stderr);
    ensure!(!ended.stderr.contains("no room"), "{}", ended.stderr);
    site.all_given_back()?;
    Ok(format!("{starts} lives"))
}

fn refusals(site: &Site<'_>) -> Result<String> {
    let many = vec!["h1"; 16].join(",");
    let cases: [(&str, &[&str], &[&str]); 6] = [
        (
            "nobody",
            &[],
            &["node nobody", "no key is known", "weft node trust"],
        ),
        (
            "gone",
            &[],
            &["node gone cannot be reached", "10.119.0.101"],
        ),
        (&many, &[], &["makes 17", "2 to 16"]),
        (
            "h1",
            &["--memory", "1000M"],
            &["no room on node h1", "697.0 MiB requested"],
        ),
        ("h1,gone", &[], &["node gone cannot be reached"]),
        (
            "h1,h1",
            &["--memory", "360M"],
            &[
                "no room on node h1",
                "256.0 MiB requested",
                "201.6 MiB free",
            ],
        ),
    ];
    for (hosts, options, says) in cases {
        let mut command = site.machine(hosts, "true", options)?;
        let ended = Guest::start(&mut command)?.finish(BOUND)?;
        ended_with(&ended, 125, says).with_context(|| format!("--on {hosts}"))?;
        site.all_given_back()?;
    }
    // A daemon's host, whose key the other daemon does not know.
    let stranger = Identity::new(site.bench.context, &site.bench.directory.join("stranger"))?;
    let key = fs::read_to_string(site.home.directory.join("node.toml"))?;
    fs::write(stranger.directory.join("node.toml"), key)?;
    let (name, value) = stranger.environment();
    let mut command = site.machine("h1", "true", &[])?;
    let ended = Guest::start(command.env(name, value))?.finish(BOUND)?;
    ended_with(&ended, 125, &["the handshake with node h1 failed"])?;
    let monitor = site.bench.context.weft.with_file_name("weft-monitor");
    let by_hand = Command::new(monitor).stdin(Stdio::null()).output()?;
    let said = String::from_utf8_lossy(&by_hand.stderr).into_owned();
    ensure!(
        said.contains("neither `weft vm run` nor `weft node start` started it"),
        "{said}"
    );
    Ok(String::new())
}
