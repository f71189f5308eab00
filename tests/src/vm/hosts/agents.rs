//! Two agents of a malleable cluster on one host: daemons with configurations and run directories
//! of their own, at ports of 127.0.0.1. A machine goes from the switch of one to that of the other,
//! which has the same name; and machines end with the process that their launchers were told of.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};

use super::migration::mode;
use super::switches::{answers, more};
use super::{BOUND, LENT, LONG_BOUND, children, wait_until};
use crate::boot::{Images, SMALL};
use crate::cluster::{self, Identity, Wanted, free_port};
use crate::guest::Guest;
use crate::processes::{self, Identity as ProcessIdentity};
use crate::random::Random;
use crate::run::Running;
use crate::vm::{Bench, Runner};

/// What both agents call their switch.
const SWITCH: &str = "mpi-0";
/// The address of the card of the machine that moves.
const MAC: &str = "02:00:00:00:00:01";
/// How long a machine may live without its keeper.
const END_BOUND: Duration = Duration::from_secs(2);
/// Within this of the start of a move its keeper ends.
const MOVE_MS: u64 = 700;

type Check = fn(&Bench<'_>, &Images) -> Result<String>;

const CHECKS: [(&str, Check); 4] = [
    ("agents of one host, from switch to switch", by_name),
    ("agents of one host, a card on a lent node", on_a_lent_node),
    ("agents of one host, a keeper is killed", keeper_killed),
    (
        "agents of one host, a keeper is killed in a move",
        killed_in_a_move,
    ),
];

pub(super) fn run(runner: &Runner<'_>) {
    let missing = runner.images.missing(&SMALL);
    for (name, check) in CHECKS {
        let name = format!("vm, hosts: {name}");
        runner.run("soft", &name, missing.clone(), |bench| {
            check(bench, runner.images)
        });
    }
}

/// One of the two: `a` or `b`.
struct Agent<'a> {
    bench: &'a Bench<'a>,
    images: &'a Images,
    name: &'static str,
    /// Which two of all of this process.
    round: u32,
    identity: Identity,
    port: u16,
    /// `WEFT_KEEPER` of its daemon and its machines.
    keeper: Option<String>,
    daemon: Option<Running>,
}

impl Drop for Agent<'_> {
    fn drop(&mut self) {
        // Most have no machine any more.
        let words = ["vm", "stop", "m", "--timeout", "0"];
        let _ = self.weft(&words).output();
        if let Some(daemon) = self.daemon.take() {
            let _ = cluster::stop(daemon);
        }
    }
}

/// Two that trust each other, with daemons.
fn agents<'a>(
    bench: &'a Bench<'a>,
    images: &'a Images,
    keeper: Option<&str>,
) -> Result<[Agent<'a>; 2]> {
    static ROUNDS: AtomicU32 = AtomicU32::new(0);
    let round = ROUNDS.fetch_add(1, Ordering::Relaxed);
    let agent = |name| -> Result<Agent<'a>> {
        Ok(Agent {
            bench,
            images,
            name,
            round,
            identity: Identity::new(bench.context, &bench.directory.join(name))?,
            port: free_port()?,
            keeper: keeper.map(Into::into),
            daemon: None,
        })
    };
    let mut both = [agent("a")?, agent("b")?];
    for [this, other] in [[0, 1], [1, 0]] {
        let (this, other) = (&both[this], &both[other]);
        let [listen, address] = [this, other].map(|agent| format!("127.0.0.1:{}", agent.port));
        let peer = (other.name, other.identity.key.as_str(), Some(&*address));
        this.identity.configure(&listen, LENT, &[peer])?;
        let networks = format!("networks = [\"switch={SWITCH}\"]\n");
        this.identity.take_machines_of(other.name, &networks)?;
    }
    for agent in &mut both {
        agent.start_daemon()?;
    }
    Ok(both)
}

impl Agent<'_> {
    /// Short enough for the sockets of cards.
    fn run_directory(&self) -> PathBuf {
        let work = &self.bench.context.work;
        work.join(format!("{}{}", self.name, self.round))
    }

    fn start_daemon(&mut self) -> Result<()> {
        fs::create_dir_all(self.run_directory())?;
        let variable = format!("XDG_RUNTIME_DIR={}", self.run_directory().display());
        let mut prefix = vec!["env".into(), variable.into()];
        let keeper = self.keeper.iter();
        prefix.extend(keeper.map(|keeper| format!("WEFT_KEEPER={keeper}").into()));
        let wanted = Wanted {
            host: "127.0.0.1".into(),
            port: self.port,
            memory: LENT.into(),
            runtime: None,
            prefix,
        };
        let directory = self.bench.directory.join(self.name);
        let daemon =
            cluster::start_daemon(self.bench.context, &self.identity, &directory, &wanted)?;
        self.daemon = Some(daemon);
        Ok(())
    }

    fn weft(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.bench.context.weft);
        let (name, value) = self.identity.environment();
        command
            .args(words)
            .env(name, value)
            .env("XDG_RUNTIME_DIR", self.run_directory())
            .envs(self.keeper.iter().map(|keeper| ("WEFT_KEEPER", keeper)));
        processes::heed(&mut command);
        command
    }

    fn ask(&self, words: &[&str]) -> Result<Value> {
        let output = self.weft(words).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(
            output.status.success(),
            "{}: weft {}: {said}",
            self.name,
            words.join(" ")
        );
        serde_json::from_slice(&output.stdout).with_context(|| words.join(" "))
    }

    /// A machine whose guest runs `script`.
    fn machine(&self, words: &[&str], script: &str) -> Result<Command> {
        let [kernel, initrd] = SMALL;
        let mut command = self.weft(words);
        let line = format!("console=ttyS0 quiet weft.run=\"{script}\"");
        command.args(["--backend", "soft", "--memory", "128M", "--cmdline", &line]);
        command.arg("--kernel").arg(self.images.file(kernel)?);
        command.arg("--initrd").arg(self.images.file(initrd)?);
        Ok(command)
    }

    /// What `weft vm start` of one that can move says.
    fn start(&self, name: &str, options: &[&str], script: &str) -> Result<Output> {
        let words = ["vm", "start", "--name", name, "--growable", "yes"];
        let words = [&words[..], options].concat();
        Ok(self.machine(&words, script)?.output()?)
    }

    fn console(&self) -> Result<Guest> {
        Guest::start(&mut self.weft(&["vm", "console", "m"]))
    }

    fn at_work(&self) -> Result<()> {
        let mut console = self.console()?;
        let works = console.wait_for("at work", BOUND);
        ensure!(works.is_some(), "no boot: {:?}", console.lines().last());
        console.kill()
    }

    /// The processes of the machine here: its launcher's, and those that the launcher started.
    fn processes(&self, name: &str) -> Result<Vec<ProcessIdentity>> {
        let listed = self.ask(&["vm", "list", "--json"])?;
        let listed = listed.as_array().context("no list")?;
        let found = listed.iter().find(|view| view["name"] == name);
        let view = found.with_context(|| format!("{}: no machine {name}", self.name))?;
        let pid = view["pid"].as_i64().context("no pid")? as i32;
        let mut pids = vec![pid];
        pids.extend(children(pid));
        let identity = |pid| Some(processes::read(pid)?.identity);
        let found: Vec<_> = pids.into_iter().filter_map(identity).collect();
        ensure!(found.len() == 2, "{name}: {found:?}");
        Ok(found)
    }

    /// Nothing is left of a machine's sockets, or nobody listens there.
    fn is_silent(&self, name: &str) -> bool {
        let files = ["sock", "console"].map(|end| format!("weft/vm/{name}.{end}"));
        files.iter().all(|file| {
            let path = self.run_directory().join(file);
            std::os::unix::net::UnixStream::connect(path).is_err()
        })
    }

    /// The daemon runs nothing and lends all again.
    fn is_free(&self, other: &Agent<'_>) -> Result<bool> {
        let listed = other.ask(&["node", "list", "--json", self.name])?;
        let node = &listed[0];
        Ok(node["slices_used"] == 0
            && node["machine_slices"] == 0
            && node["memory_free_bytes"] == node["memory_bytes"])
    }
}

fn lives(process: &ProcessIdentity) -> bool {
    let found = processes::read(process.pid);
    found.is_some_and(|found| found.identity == *process && found.state != 'Z')
}

/// Has `m` go from one to the other for good.
fn go(from: &Agent<'_>, to: &Agent<'_>, option: &str) -> Result<()> {
    let place = format!("{}=256M", to.name);
    let view = from.ask(&["vm", "migrate", "m", &place, option, "--json"])?;
    let moved = &view["migrated"];
    ensure!(
        moved["home"]["host"] == to.name && moved["stays"] == json!([]),
        "{view}"
    );
    Ok(())
}

/// `weft switch`, which ends when this is dropped.
struct Switch {
    child: Child,
    orders: ChildStdin,
    reports: BufReader<ChildStdout>,
    address: String,
}

impl Switch {
    fn start(agent: &Agent<'_>, listen: &str) -> Result<Switch> {
        let mut command = agent.weft(&["switch", "--listen", listen, "--machines", SWITCH]);
        command
            .arg("--key")
            .arg(agent.identity.directory.join("node.key"));
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let orders = child.stdin.take().context("no pipe")?;
        let reports = BufReader::new(child.stdout.take().context("no pipe")?);
        let mut switch = Switch {
            child,
            orders,
            reports,
            address: String::new(),
        };
        let listening = switch.report("listening")?;
        let address = listening["address"].as_str().context("no address")?;
        switch.address = address.to_owned();
        Ok(switch)
    }

    /// The next report of a kind.
    fn report(&mut self, kind: &str) -> Result<Value> {
        loop {
            let mut line = String::new();
            ensure!(self.reports.read_line(&mut line)? > 0, "the switch ended");
            let mut report: Value = serde_json::from_str(&line)?;
            if let Some(found) = report.get_mut(kind) {
                return Ok(found.take());
            }
        }
    }

    fn order(&mut self, order: &Value) -> Result<()> {
        Ok(writeln!(self.orders, "{order}")?)
    }

    fn knows(&mut self, agent: &Agent<'_>, address: &str) -> Result<()> {
        self.order(&json!({ "peer": { "key": agent.identity.key, "address": address } }))
    }

    /// The addresses of its machines' cards.
    fn cards(&mut self) -> Result<Vec<String>> {
        self.order(&json!({ "counters": true }))?;
        let counters = self.report("counters")?;
        let machines = counters["machines"].as_array().context("no machines")?;
        let addresses = machines.iter().filter_map(|it| it["addresses"].as_array());
        let addresses = addresses.flatten().filter_map(Value::as_str);
        Ok(addresses.map(Into::into).collect())
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        // It is this test's own child, which has not been waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn by_name(bench: &Bench<'_>, images: &Images) -> Result<String> {
    let [a, b] = agents(bench, images, None)?;
    let network = format!("switch={SWITCH},mac={MAC}");
    // The card goes down before the guest does: Linux breaks the queues of virtio devices when it
    // shuts down, and `virtnet_poll` never ends if a frame comes between that and their reset.
    let script = "ip link set eth0 up; ip addr add 10.9.0.1/24 dev eth0; echo at work; \
                  read line; echo got $line; ip link set eth0 down";
    let early = a.start("m", &["--net", &network], script)?;
    let said = String::from_utf8_lossy(&early.stderr);
    let socket = a.run_directory().join("weft/switch").join(SWITCH);
    ensure!(
        !early.status.success() && said.contains(&*socket.to_string_lossy()),
        "without a switch: {early:?}"
    );
    let mut first = Switch::start(&a, "127.0.0.1:0")?;
    let started = a.start("m", &["--net", &network], script)?;
    ensure!(started.status.success(), "{started:?}");
    a.at_work()?;
    let asks = "ip link set eth0 up; ip addr add 10.9.0.2/24 dev eth0; n=0; while :; do \
                ping -c 1 -W 1 10.9.0.1 >/dev/null && n=$((n+1)) && echo got $n.; done";
    let words = ["vm", "run", "--name", "q", "--net"];
    let own = format!("switch={SWITCH}");
    let mut asking = Guest::start(&mut a.machine(&[&words[..], &[&own]].concat(), asks)?)?;
    let answered = asking.wait_for("got 10.", BOUND);
    ensure!(answered.is_some(), "no answer: {:?}", asking.lines().last());
    let stays = a.ask(&["vm", "migrate", "m", "b=256M", "--json"])?;
    let reason = stays["migrated"]["stays"][0]["reason"].as_str();
    let reason = reason.context("node 0 left for a host without a switch")?;
    let wanted = b.run_directory().join("weft/switch").join(SWITCH);
    ensure!(reason.contains(&*wanted.to_string_lossy()), "{reason}");
    a.ask(&["vm", "consolidate", "m", "--json"])?;
    let mut second = Switch::start(&b, "127.0.0.1:0")?;
    first.knows(&b, &second.address)?;
    second.knows(&a, &first.address)?;
    second.report("up")?;
    let before = answers(&mut asking);
    go(&a, &b, mode(1))?;
    more(&mut asking, 20)?;
    let (here, there) = (first.cards()?, second.cards()?);
    ensure!(
        there == [MAC] && here.len() == 1 && here[0] != MAC,
        "{here:?} at the first switch, {there:?} at the second"
    );
    // The card's own socket is beside that of the switch, so another one finds it.
    let address = second.address.clone();
    drop(second);
    let mut second = Switch::start(&b, &address)?;
    second.knows(&a, &first.address)?;
    let after = more(&mut asking, 20)?;
    ensure!(second.cards()? == [MAC], "{:?}", second.cards()?);
    let mut console = b.console()?;
    console.write("over\n")?;
    if console.wait_for("got over", BOUND).is_none() {
        let still = more(&mut asking, 1).is_ok();
        console.write("again\n")?;
        let second = console.wait_for("got ", BOUND);
        bail!("what was typed did not come; pings are answered: {still}; then {second:?}");
    }
    console.finish(LONG_BOUND)?;
    asking.kill()?;
    wait_until("all to be given back", || b.is_free(&a))?;
    Ok(format!("{before} answers before it went, {after} in all"))
}

/// The card is at the switch of the host that lends. The user that a daemon of root has slices run
/// as does not get there.
fn on_a_lent_node(bench: &Bench<'_>, images: &Images) -> Result<String> {
    let [a, b] = agents(bench, images, None)?;
    let mut first = Switch::start(&a, "127.0.0.1:0")?;
    let mut second = Switch::start(&b, "127.0.0.1:0")?;
    let network = format!("switch={SWITCH},mac={MAC},node=1");
    let script = "ip link set eth0 up; ip addr add 10.9.0.1/24 dev eth0; \
                  ping -c 1 -W 1 10.9.0.2; echo at work; read line";
    let words = ["vm", "run", "--on", "b", "--cpus", "2", "--net", &network];
    let mut guest = Guest::start(&mut a.machine(&words, script)?)?;
    let works = guest.wait_for("at work", BOUND).is_some();
    if nix::unistd::geteuid().is_root() {
        let ended = guest.finish(BOUND)?;
        let said = &ended.stderr;
        let wanted = b.run_directory().join("weft/switch").join(SWITCH);
        ensure!(
            !works && said.contains("for user 60100") && said.contains(&*wanted.to_string_lossy()),
            "{said}"
        );
        return Ok("refused, since its slice is another user's".into());
    }
    ensure!(works, "no boot: {}", guest.finish(Duration::ZERO)?.stderr);
    let (here, there) = (first.cards()?, second.cards()?);
    ensure!(here.is_empty() && there == [MAC], "{here:?}, {there:?}");
    guest.write("over\n")?;
    guest.finish(LONG_BOUND)?;
    wait_until("all to be given back", || b.is_free(&a))?;
    Ok("its frames come to the lender's switch".into())
}

/// The process with which machines end.
struct Keeper(Child);

impl Keeper {
    fn start() -> Result<(Keeper, String)> {
        let child = Command::new("sleep").arg("3600").spawn()?;
        let pid = child.id() as i32;
        let start = processes::read(pid).context("no keeper")?.identity.start;
        Ok((Keeper(child), format!("{pid}:{start}")))
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // It is this test's own child, which has not been waited for.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn gone_within(all: &[ProcessIdentity], since: Instant) -> Result<Duration> {
    loop {
        let left: Vec<_> = all.iter().filter(|process| lives(process)).collect();
        if left.is_empty() {
            return Ok(since.elapsed());
        }
        ensure!(since.elapsed() < END_BOUND, "still there: {left:?}");
        thread::sleep(Duration::from_millis(2));
    }
}

fn keeper_killed(bench: &Bench<'_>, images: &Images) -> Result<String> {
    let (mut keeper, variable) = Keeper::start()?;
    let [mut a, mut b] = agents(bench, images, Some(&variable))?;
    let script = "echo at work; while :; do :; done";
    for name in ["m", "n"] {
        let started = a.start(name, &[], script)?;
        ensure!(started.status.success(), "{started:?}");
    }
    a.at_work()?;
    go(&a, &b, mode(1))?;
    let mut all = a.processes("n")?;
    all.extend(b.processes("m")?);
    ensure!(all.iter().all(lives), "{all:?}");
    let since = Instant::now();
    keeper.0.kill()?;
    let took = gone_within(&all, since)?;
    ensure!(a.is_silent("n") && b.is_silent("m"), "a socket is left");
    let log = fs::read_to_string(b.run_directory().join("weft/vm/m.log"))?;
    ensure!(log.contains("with which it ends, has ended"), "{log}");
    wait_until(
        "the daemon to know",
        || Ok(b.is_free(&a)? && a.is_free(&b)?),
    )?;
    // Those that have not been started yet are not, before and after the keeper's number is free.
    for _ in 0..2 {
        let refused = a.start("m", &[], script)?;
        let said = String::from_utf8_lossy(&refused.stderr);
        ensure!(
            refused.status.code() == Some(125) && said.contains("has ended already"),
            "{refused:?}"
        );
        keeper.0.wait()?;
    }
    a.keeper = Some("7".into());
    let refused = a.start("m", &[], script)?;
    let said = String::from_utf8_lossy(&refused.stderr);
    ensure!(said.contains("PID:STARTTICKS"), "{refused:?}");
    // Nor does one come from a host where its launcher has none.
    a.keeper = None;
    let started = a.start("m", &[], script)?;
    ensure!(started.status.success(), "{started:?}");
    a.at_work()?;
    let stays = a.ask(&["vm", "migrate", "m", "b=256M", "--json"])?;
    let reason = stays["migrated"]["stays"][0]["reason"].as_str();
    let reason = reason.context("a machine came without its keeper")?;
    ensure!(reason.contains("has ended already"), "{reason}");
    // What the daemon lends for it ends with the daemon.
    let daemon = b.daemon.take().context("no daemon")?;
    let slices: Vec<_> = (children(daemon.pid()).into_iter())
        .filter_map(|pid| Some(processes::read(pid)?.identity))
        .collect();
    ensure!(slices.len() == 1, "{slices:?}");
    let since = Instant::now();
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(daemon.pid()),
        nix::sys::signal::Signal::SIGKILL,
    )?;
    gone_within(&slices, since)?;
    cluster::stop(daemon)?;
    Ok(format!("gone after {} ms", took.as_millis()))
}

fn killed_in_a_move(bench: &Bench<'_>, images: &Images) -> Result<String> {
    let (mut keeper, variable) = Keeper::start()?;
    let [a, b] = agents(bench, images, Some(&variable))?;
    let started = a.start("m", &[], "echo at work; while :; do :; done")?;
    ensure!(started.status.success(), "{started:?}");
    a.at_work()?;
    let all = a.processes("m")?;
    let daemon = b.daemon.as_ref().context("no daemon")?.pid();
    let mut random = Random::new(bench.context.seed ^ 0x6b65);
    let delay = Duration::from_millis(random.below(MOVE_MS));
    let words = ["vm", "migrate", "m", "b=256M", mode(1)];
    let mut moving = a.weft(&words).stderr(Stdio::null()).spawn()?;
    thread::sleep(delay);
    let came = match moving.try_wait()? {
        Some(status) if status.success() => "was there",
        Some(status) => bail!("the move: {status}"),
        None => "was on its way",
    };
    let since = Instant::now();
    keeper.0.kill()?;
    gone_within(&all, since)?;
    while !children(daemon).is_empty() {
        ensure!(
            since.elapsed() < END_BOUND,
            "the other host still has {:?}",
            children(daemon)
        );
        thread::sleep(Duration::from_millis(2));
    }
    moving.wait()?;
    ensure!(a.is_silent("m") && b.is_silent("m"), "a socket is left");
    wait_until("all to be given back", || b.is_free(&a))?;
    Ok(format!(
        "{} ms after its start it {came}",
        delay.as_millis()
    ))
}
