//! How long a machine that moves between hosts leaves pings unanswered.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};
use weft_tests::boot::{Images, Monitor};
use weft_tests::cluster::{self, Identity, Wanted};
use weft_tests::context::Context;
use weft_tests::guest::{Ended, Guest};
use weft_tests::namespace::{self, Star};
use weft_tests::run::Running;

use crate::ping::Track;
use crate::program::Place;
use crate::results::{Goal, Table, digits, median};

/// Namespaces: the launcher's, which has the tap device, those of the daemons, and that of
/// the client.
pub(super) const LAUNCHER: usize = 0;
pub(super) const NAMES: [&str; 4] = ["home", "h1", "h2", "h3"];
pub(super) const CLIENT: usize = NAMES.len();
const PORT: u16 = 7117;
pub(super) const TAP: &str = "weft-tap";
/// The directory for disks, which machines of the hosts before may write to.
const DISKS: &str = "disks";
/// The directory for disks that all hosts have in common, which they may read.
const SHARED: &str = "shared";
/// As which user a machine's slices run.
const USER: u32 = 60100;
/// What each host lends.
const LENT: &str = "2G";
const INTERVAL_MS: u32 = 10;
/// Longest time that may be without an answer beside the pause, in ms.
pub(super) const EXCESS_MS_MAX: f64 = 20.0;

/// What the guest writes to meanwhile: megabytes, pages a second. More than this takes too
/// long on a few processors that four nodes share.
pub(super) const LOADS: [(&str, u32, u32); 2] =
    [("idle", 1, 100), ("64 MB, 2,000 pages/s", 64, 2_000)];
/// How long a round of it takes, at whose end every page is checked.
const ROUND_S: u32 = 3;

/// What happens to the machine. Without words: nothing, for a second.
const STEPS: [(&str, &[&str]); 4] = [
    ("nothing", &[]),
    ("migrate", &["migrate", "m", "h1"]),
    ("split", &["migrate", "m", "h2,h3", "--spread"]),
    ("consolidate", &["consolidate", "m"]),
];
/// Between two steps.
pub(super) const BETWEEN: Duration = Duration::from_secs(1);
pub(super) const BOUND: Duration = Duration::from_secs(120);

/// By load, step and figure.
type Samples = BTreeMap<String, Vec<f64>>;

fn key(load: usize, step: usize, figure: &str) -> String {
    format!("{} {} {figure}", LOADS[load].0, STEPS[step].0)
}

/// The table `vm-ping`.
pub fn ping(place: &Place, images: &Images, repeat: usize) -> Result<Table> {
    if let Some(why) = namespace::missing() {
        bail!("{why}");
    }
    let mut samples = Samples::new();
    for round in 0..repeat {
        for load in 0..LOADS.len() {
            let number = round * LOADS.len() + load;
            let site = Site::new(place, &format!("ping-{number}"), &[LAUNCHER])?;
            let (track, reports) = site.measure(images, load)?;
            for (number, (step, report)) in track.steps.iter().zip(&reports).enumerate() {
                let worst = track.worst(step.from_s, step.until_s);
                let mut add = |figure: &str, value: f64| {
                    let samples = samples.entry(key(load, number, figure)).or_default();
                    samples.push(value);
                };
                let pause_ms = report["pause_ns"].as_f64().unwrap_or(0.0) / 1e6;
                let of = |figure: &str| report[figure].as_f64().unwrap_or(0.0);
                add("total_s", of("total_s"));
                add("pages_mb", of("bytes") / 1e6);
                add("ahead_mb", of("ahead_bytes") / 1e6);
                add("pause_ms", pause_ms);
                add("gap_ms", worst.gap_s * 1e3);
                add("excess_ms", worst.gap_s * 1e3 - pause_ms);
                add("sent_gap_ms", worst.sent_gap_s * 1e3);
                add("lost", worst.lost as f64);
                add("sent", worst.sent as f64);
            }
        }
    }
    Ok(table(&samples))
}

/// The hosts, and the daemons of all but the launcher's.
pub(super) struct Site<'a> {
    pub place: &'a Place,
    pub directory: PathBuf,
    identities: Vec<Identity>,
    pub daemons: Vec<Running>,
    pub star: Star,
}

impl<'a> Site<'a> {
    /// Those in `taps` have a tap device on the network of all, and take machines of the host
    /// before them for good.
    pub fn new(place: &'a Place, name: &str, taps: &[usize]) -> Result<Site<'a>> {
        let star = Star::new(CLIENT + 1)?;
        for host in taps {
            let user = if *host == LAUNCHER { 0 } else { USER };
            star.add_tap(*host, TAP, user)?;
        }
        let directory = place.work.join(name);
        fs::create_dir_all(directory.join(DISKS))?;
        fs::create_dir_all(directory.join(SHARED))?;
        let context = Context {
            weft: place.weft.clone(),
            programs: place.programs.clone(),
            sources: directory.clone(),
            inputs: directory.clone(),
            work: directory.clone(),
            seed: 0,
        };
        let identities = NAMES
            .iter()
            .map(|name| Identity::new(&context, &directory.join(name)))
            .collect::<Result<Vec<_>>>()?;
        let addresses: Vec<String> = (0..NAMES.len()).map(Star::address).collect();
        for (own, identity) in identities.iter().enumerate() {
            let others = (0..NAMES.len()).filter(|other| *other != own);
            let peers: Vec<_> = others
                .map(|other| {
                    let address = Some(addresses[other].as_str());
                    (NAMES[other], identities[other].key.as_str(), address)
                })
                .collect();
            identity.configure(&format!("0.0.0.0:{PORT}"), LENT, &peers)?;
            if own > LAUNCHER && taps.contains(&own) {
                let lines = format!(
                    "user = {USER}\nnetworks = [\"tap={TAP}\"]\ndisks = [\"{}/,rw\", \"{}/,ro\"]\n",
                    directory.join(DISKS).display(),
                    directory.join(SHARED).display()
                );
                identity.take_machines_of(NAMES[own - 1], &lines)?;
            }
        }
        let mut site = Site {
            place,
            directory,
            identities,
            daemons: Vec::new(),
            star,
        };
        for (host, name) in NAMES.iter().enumerate().skip(LAUNCHER + 1) {
            let mut prefix = site.star.prefix(host);
            let variable = format!("XDG_RUNTIME_DIR={}", site.run_directory(host)?.display());
            prefix.extend(["env".into(), variable.into()]);
            prefix.extend(namespace::with_tun(&site.directory.join("tun")));
            let (own, place) = (site.disks(host), site.disks(LAUNCHER));
            fs::create_dir_all(&own)?;
            prefix.extend(namespace::with_directory(&own, &place));
            let wanted = Wanted {
                host: Star::address(host),
                port: PORT,
                memory: LENT.into(),
                prefix,
                runtime: None,
            };
            let scratch = site.directory.join(name);
            let daemon =
                cluster::start_daemon(&context, &site.identities[host], &scratch, &wanted)?;
            site.daemons.push(daemon);
        }
        Ok(site)
    }

    /// A host's files at the path that the launcher's host has for disks.
    pub fn disks(&self, host: usize) -> PathBuf {
        match host {
            LAUNCHER => self.directory.join(DISKS),
            _ => self.directory.join(NAMES[host]).join(DISKS),
        }
    }

    /// Files that all hosts have.
    pub fn shared(&self) -> PathBuf {
        self.directory.join(SHARED)
    }

    /// Where machines of a host are found.
    fn run_directory(&self, host: usize) -> Result<PathBuf> {
        let path = self.directory.join(NAMES[host]).join("run");
        fs::create_dir_all(&path)?;
        Ok(path)
    }

    /// As a user of this host.
    pub fn at<'c>(&self, host: usize, command: &'c mut Command) -> Result<&'c mut Command> {
        let (name, value) = self.identities[host].environment();
        Ok(command
            .env(name, value)
            .env("XDG_RUNTIME_DIR", self.run_directory(host)?))
    }

    /// Words before a command that have a user of this host run it.
    pub fn prefix(&self, host: usize) -> Result<Vec<OsString>> {
        let (mut own, value) = self.identities[host].environment();
        own.push("=");
        own.push(value);
        let mut run = OsString::from("XDG_RUNTIME_DIR=");
        run.push(self.run_directory(host)?);
        let mut prefix = self.star.prefix(host);
        prefix.extend(["env".into(), own, run]);
        Ok(prefix)
    }

    /// What the daemons and the launchers of the machine said.
    pub fn said(&self) -> String {
        let log =
            |host| fs::read_to_string(self.run_directory(host).ok()?.join("weft/vm/m.log")).ok();
        let logs = (0..NAMES.len()).filter_map(log);
        let daemons = self.daemons.iter().map(Running::stderr);
        daemons.chain(logs).collect::<Vec<_>>().join("\n")
    }

    /// The daemons end, and files go.
    pub fn clear(mut self) -> Result<()> {
        for daemon in self.daemons.drain(..) {
            cluster::stop(daemon)?;
        }
        Ok(fs::remove_dir_all(&self.directory)?)
    }

    /// `weft vm run` of a machine called `m` on the launcher's host, whose program writes and
    /// checks until a line is typed.
    pub fn machine(&self, images: &Images, load: usize) -> Result<Command> {
        let (_, megabytes, rate) = LOADS[load];
        let round = format!("dirty {megabytes} {rate} {ROUND_S}");
        let script = format!(
            "(while [ ! -e /tmp/stop ]; do {round} || echo WRONG; done) & \
             read word; touch /tmp/stop; wait; echo stopped"
        );
        let mut boot = images.small(&self.place.weft)?.running(&script);
        boot.prefix = self.star.prefix(LAUNCHER);
        boot.cpus = 2;
        boot.memory_mib = 512;
        boot.words = format!("weft.net={}/24", Star::address(100));
        let net = format!("tap={TAP}");
        let options = ["--name", "m", "--net", &net];
        boot.options.extend(options.map(Into::into));
        Ok(boot.command(Monitor::Soft))
    }

    /// A machine, asked while it goes through all steps, and what each reported.
    fn measure(self, images: &Images, load: usize) -> Result<(Track, Vec<Value>)> {
        let (what, ..) = LOADS[load];
        let mut run = self.machine(images, load)?;
        let mut guest = Guest::start(self.at(LAUNCHER, &mut run)?)?;
        let works = guest.wait_for("dirty: at work", BOUND);
        ensure!(works.is_some(), "the guest does not come up");
        let measured = self.steps().with_context(|| what.to_owned());
        let told = guest.write("end\n");
        let ended = guest.finish(BOUND)?;
        let measured = measured.with_context(|| ended.stderr.trim().to_owned())?;
        told?;
        judge(&ended, what)?;
        self.clear()?;
        Ok(measured)
    }

    fn steps(&self) -> Result<(Track, Vec<Value>)> {
        let mut client = Client::start(self)?;
        let mut reports = Vec::new();
        for (name, words) in STEPS {
            std::thread::sleep(BETWEEN);
            client.say(&format!("step {name}"))?;
            reports.push(match words {
                [] => {
                    std::thread::sleep(BETWEEN);
                    Value::Null
                }
                words => self.ask(LAUNCHER, words)?,
            });
            client.say("done")?;
        }
        std::thread::sleep(BETWEEN);
        Ok((client.finish()?, reports))
    }

    /// `weft vm start` on the launcher's host with the options of `run`, a `weft vm run`.
    pub fn start(&self, run: &Command) -> Result<()> {
        let mut command = Command::new(run.get_program());
        for argument in run.get_args() {
            command.arg(match argument.to_str() {
                Some("run") => "start".as_ref(),
                _ => argument,
            });
        }
        let output = self.at(LAUNCHER, &mut command)?.output()?;
        ensure!(output.status.success(), "{output:?}");
        Ok(())
    }

    /// The console of the machine `m` on a host.
    pub fn console(&self, host: usize) -> Result<Guest> {
        let mut command = in_namespace(&self.star, host, &self.place.weft);
        let command = self.at(host, command.args(["vm", "console", "m"]))?;
        Guest::start(command.stdin(Stdio::piped()))
    }

    /// What `weft vm …` reports of a move.
    pub fn ask(&self, host: usize, words: &[&str]) -> Result<Value> {
        Ok(self.view(host, words)?["migrated"].clone())
    }

    /// What `weft vm … --json` prints.
    pub fn view(&self, host: usize, words: &[&str]) -> Result<Value> {
        let mut command = in_namespace(&self.star, host, &self.place.weft);
        let command = self.at(host, command.arg("vm").args(words).arg("--json"))?;
        let output = command.output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(
            output.status.success(),
            "weft vm {}: {said}",
            words.join(" ")
        );
        Ok(serde_json::from_slice(&output.stdout)?)
    }
}

/// Fails unless the guest has checked all of its pages.
pub(super) fn judge(ended: &Ended, what: &str) -> Result<()> {
    let is_right = ended.line("WRONG").is_none() && ended.line("dirty: wrong").is_none();
    ensure!(
        is_right && ended.line("dirty: right").is_some() && ended.line("stopped").is_some(),
        "{what}: a page was not right, or not checked: {}",
        ended.tail(12)
    );
    Ok(())
}

pub(super) fn in_namespace(star: &Star, host: usize, program: &Path) -> Command {
    let prefix = star.prefix(host);
    let mut command = Command::new(&prefix[0]);
    command.args(&prefix[1..]).arg(program);
    command
}

/// `weft-bench ping` in a namespace of its own.
pub(super) struct Client {
    child: Child,
    input: ChildStdin,
    /// Open until the end, so that it can write.
    output: BufReader<ChildStdout>,
    file: PathBuf,
}

impl Client {
    /// Returns when the guest has answered.
    pub fn start(site: &Site<'_>) -> Result<Client> {
        let file = site.directory.join("pings.json");
        let mut command = in_namespace(&site.star, CLIENT, &std::env::current_exe()?);
        command.args(["ping", &Star::address(100)]);
        command.args(["--every-ms", &INTERVAL_MS.to_string(), "--json"]);
        let command = command.arg(&file).stdin(Stdio::piped());
        let mut child = command.stdout(Stdio::piped()).spawn()?;
        let input = child.stdin.take().context("standard input is a pipe")?;
        let output = child.stdout.take().context("standard output is a pipe")?;
        let output = BufReader::new(output);
        let mut client = Client {
            child,
            input,
            output,
            file,
        };
        let mut first = String::new();
        client.output.read_line(&mut first)?;
        if !first.contains("answers") {
            client.child.wait()?;
            bail!("the guest does not answer pings");
        }
        Ok(client)
    }

    pub fn say(&mut self, line: &str) -> Result<()> {
        Ok(writeln!(self.input, "{line}")?)
    }

    pub fn finish(mut self) -> Result<Track> {
        drop(self.input);
        let status = self.child.wait()?;
        ensure!(status.success(), "the pings ended with {status}");
        Track::from_json(&serde_json::from_slice(&fs::read(&self.file)?)?)
    }
}

fn table(samples: &Samples) -> Table {
    let mut table = Table::new(
        "vm-ping",
        "A Linux of two vCPUs (512 MiB, software vCPU) is pinged each 10 ms through a bridge and a tap device while it migrates to another host, is split over two more, and is brought together again on the first. Each host is a network namespace with a daemon; all are on this machine, with sealed links. Its program writes to randomly chosen pages at the given rate and checks every page at the end. *Pages*: those that changed their place, without those that faults and prefetches fetched; *sent ahead*: bytes that went before, again if they were written. *Gap*: the longest time between two answers; that without a move is 10 ms and what the other work of this machine adds. *Requests*: the longest time between two pings that were sent, which is part of the gap and not the machine's. Medians, and the worst of all runs; lost pings of all runs. The goal, no gap longer than the pause and 20 ms, is for the worst run.",
        &[
            "what",
            "total time",
            "pages",
            "sent ahead",
            "pause",
            "gap",
            "worst gap",
            "requests, worst",
            "lost",
            "worst of gap − pause",
            "goal",
            "met",
        ],
    );
    for (load, (what, ..)) in LOADS.iter().enumerate() {
        for (step, (name, words)) in STEPS.iter().enumerate() {
            let found = |figure: &str| samples.get(&key(load, step, figure)).map(Vec::as_slice);
            let middle = |figure: &str| median(found(figure).unwrap_or_default());
            let worst = |figure: &str| found(figure)?.iter().copied().reduce(f64::max);
            let sum = |figure: &str| found(figure).unwrap_or_default().iter().sum::<f64>();
            let cell = |value: Option<f64>, unit: &str| format!("{} {unit}", digits(value));
            let moves = !words.is_empty();
            let of_a_move = |figure: &str, unit: &str| match moves {
                true => cell(middle(figure), unit),
                false => "—".to_owned(),
            };
            let excess = worst("excess_ms");
            let goal = match moves {
                true => Goal::AtMost(EXCESS_MS_MAX),
                false => Goal::None,
            };
            let mut row = vec![
                format!("{what}: {name}"),
                of_a_move("total_s", "s"),
                of_a_move("pages_mb", "MB"),
                of_a_move("ahead_mb", "MB"),
                of_a_move("pause_ms", "ms"),
                cell(middle("gap_ms"), "ms"),
                cell(worst("gap_ms"), "ms"),
                cell(worst("sent_gap_ms"), "ms"),
                format!("{} of {}", sum("lost"), sum("sent")),
                cell(excess, "ms"),
            ];
            row.extend(goal.cells(excess));
            table.rows.push(row);
        }
    }
    table.samples = json!(samples);
    table
}
