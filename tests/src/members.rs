//! `weft cluster`: hosts join by a token each, lend to one another without an entry for a
//! peer, and leave; with a real etcd, which also stops answering. Needs `etcd`.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::cluster::{Identity, Wanted, free_port, start_daemon, stop};
use crate::context::Context;
use crate::report::{Report, Verdict};
use crate::run::{End, Invocation, Outcome, Running, run, start};

/// A command of `weft cluster`, a store that does not answer included.
const BOUND: Duration = Duration::from_secs(20);
/// The etcd answers, or what one host did is known to all, within this.
const SOON: Duration = Duration::from_secs(30);
/// What a program under test prints.
const NUMBERS: &str = "seq 1 2000 | sort -rn | tail -1";

/// Runs the suite.
pub fn run_members(context: &Context, names: &[String], report: &Report) {
    const NAME: &str = "cluster: hosts";
    let wanted = names.is_empty() || names.iter().any(|name| NAME.contains(name.as_str()));
    if !wanted {
        return;
    }
    if context.tool("etcd").is_none() {
        let why = "needs etcd (Debian package etcd-server)".to_owned();
        report.add(NAME, Duration::ZERO, Verdict::Skipped(why));
        return;
    }
    let mut site = match Site::new(context) {
        Ok(site) => site,
        Err(error) => {
            let reasons = vec![format!("{error:#}")];
            report.add(NAME, Duration::ZERO, Verdict::Failed(reasons));
            return;
        }
    };
    for (name, check) in CHECKS {
        let begun = Instant::now();
        let verdict = match check(&mut site) {
            Ok(()) => Verdict::Passed(String::new()),
            Err(error) => Verdict::Failed(vec![format!("{error:#}")]),
        };
        report.add(&format!("{NAME} {name}"), begun.elapsed(), verdict);
    }
}

type Check = fn(&mut Site<'_>) -> Result<()>;

/// In this order: each goes on where the one before ended.
const CHECKS: [(&str, Check); 6] = [
    ("join, each by a token of its own", join),
    ("lend to one another without a peer's entry", lend),
    ("cannot join by a token that was used", used_token),
    ("go on without the store", without_store),
    ("that leave are refused", leave),
    ("whose daemon ends are seen at once", ended_daemon),
];

struct Host {
    name: &'static str,
    identity: Identity,
    port: u16,
    daemon: Option<Running>,
}

struct Site<'a> {
    context: &'a Context,
    directory: PathBuf,
    store: String,
    etcd: Option<Running>,
    hosts: Vec<Host>,
    /// One that was used.
    token: String,
}

impl Drop for Site<'_> {
    fn drop(&mut self) {
        let daemons = self.hosts.iter_mut().filter_map(|host| host.daemon.take());
        for process in daemons.chain(self.etcd.take()) {
            let pid = Pid::from_raw(process.pid());
            let _ = kill(pid, Signal::SIGCONT);
            if let Err(error) = stop(process) {
                eprintln!("ending a process of the cluster: {error:#}");
            }
        }
    }
}

impl<'a> Site<'a> {
    fn new(context: &'a Context) -> Result<Site<'a>> {
        let directory = context.directory("members")?;
        let (client, peer) = (free_port()?, free_port()?);
        let data = directory.join("etcd");
        fs::create_dir_all(&data)?;
        let url = |port: u16| format!("http://127.0.0.1:{port}");
        let line = format!(
            "etcd --name e0 --data-dir {} --listen-client-urls {c} --advertise-client-urls {c} \
             --listen-peer-urls {p} --initial-advertise-peer-urls {p} --initial-cluster e0={p} \
             --logger zap --log-level error",
            data.display(),
            c = url(client),
            p = url(peer)
        );
        let words: Vec<&str> = line.split(' ').filter(|word| !word.is_empty()).collect();
        let etcd = start(&Invocation::new(&words, &directory).bounded(Duration::from_secs(3600)))?;
        let mut hosts = Vec::new();
        for name in ["home", "alpha", "beta"] {
            let identity = Identity::new(context, &directory.join(name))?;
            let port = free_port()?;
            hosts.push(Host {
                name,
                identity,
                port,
                daemon: None,
            });
        }
        let store = format!("etcd://127.0.0.1:{client}");
        Ok(Site {
            context,
            directory,
            store,
            etcd: Some(etcd),
            hosts,
            token: String::new(),
        })
    }

    fn host(&self, name: &str) -> &Host {
        self.hosts
            .iter()
            .find(|host| host.name == name)
            .expect("a host of the site")
    }

    /// `weft` with these words as that host.
    fn call(&self, host: &str, words: &str) -> Result<Outcome> {
        let weft = self.context.weft.to_string_lossy().into_owned();
        let command: Vec<&str> = [&weft[..]].into_iter().chain(words.split(' ')).collect();
        self.invoke(host, &command)
    }

    fn invoke(&self, host: &str, command: &[&str]) -> Result<Outcome> {
        let mut invocation = Invocation::new(command, &self.directory.join("call")).bounded(BOUND);
        fs::create_dir_all(&invocation.directory)?;
        invocation.environment = vec![self.host(host).identity.environment()];
        run(&invocation)
    }

    /// The standard output of what must succeed.
    fn succeeds(&self, host: &str, words: &str) -> Result<String> {
        let outcome = self.call(host, words)?;
        let said = outcome.stderr.trim();
        ensure!(
            outcome.end == End::Exit(0),
            "{words}: {}: {said}",
            outcome.end
        );
        Ok(fs::read_to_string(&outcome.stdout)?)
    }

    /// The standard error of what must fail.
    fn fails(&self, host: &str, words: &str) -> Result<String> {
        let outcome = self.call(host, words)?;
        ensure!(outcome.end != End::Exit(0), "{words} was not refused");
        ensure!(!outcome.stderr.contains("panicked"), "{}", outcome.stderr);
        Ok(outcome.stderr)
    }

    /// The names of all members, and of those that live.
    fn members(&self, host: &str) -> Result<(Vec<String>, Vec<String>)> {
        let status: Value = serde_json::from_str(&self.succeeds(host, "cluster status --json")?)?;
        let hosts = status["hosts"].as_array().context("no hosts")?;
        let name = |host: &Value| host["name"].as_str().unwrap_or_default().to_owned();
        let alive = hosts.iter().filter(|host| host["alive"] == true);
        Ok((hosts.iter().map(name).collect(), alive.map(name).collect()))
    }

    fn living(&self, names: &[&str]) -> Result<()> {
        let begun = Instant::now();
        loop {
            let (_, alive) = self.members("home")?;
            if alive == names {
                return Ok(());
            }
            ensure!(
                begun.elapsed() < SOON,
                "{alive:?} live instead of {names:?}"
            );
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Runs a program of home on `lender`, too.
    fn program(&self, lender: &str) -> Result<Outcome> {
        let weft = self.context.weft.to_string_lossy().into_owned();
        self.invoke(
            "home",
            &[&weft, "run", "--on", lender, "--", "sh", "-c", NUMBERS],
        )
    }

    fn runs_on(&self, lender: &str) -> Result<()> {
        let outcome = self.program(lender)?;
        let said = outcome.stderr.trim();
        ensure!(
            outcome.end == End::Exit(0),
            "on {lender}: {}: {said}",
            outcome.end
        );
        let printed = fs::read_to_string(&outcome.stdout)?;
        ensure!(printed == "1\n", "it printed {printed:?}");
        Ok(())
    }

    fn signal_etcd(&self, signal: Signal) -> Result<()> {
        let pid = self.etcd.as_ref().context("the etcd runs")?.pid();
        Ok(kill(Pid::from_raw(pid), signal)?)
    }

    fn join_command(&self, token: &str, host: &str) -> String {
        let port = self.host(host).port;
        format!(
            "cluster join {token} --store {} --name {host} --address 127.0.0.1:{port}",
            self.store
        )
    }
}

fn join(site: &mut Site<'_>) -> Result<()> {
    let says = site.fails("home", "cluster status")?;
    ensure!(says.contains("no member of a cluster"), "{says}");
    let port = site.host("home").port;
    let init = format!(
        "cluster init fragments --store {} --name home --address 127.0.0.1:{port}",
        site.store
    );
    // The etcd may still be coming up.
    let begun = Instant::now();
    while let Err(error) = site.succeeds("home", &init) {
        ensure!(begun.elapsed() < SOON, "{error:#}");
        std::thread::sleep(Duration::from_millis(200));
    }
    let says = site.fails("alpha", &init.replace("name home", "name alpha"))?;
    ensure!(says.contains("has the cluster fragments already"), "{says}");
    for host in ["alpha", "beta"] {
        let invited = site.succeeds("home", "cluster invite")?;
        let token = invited
            .split_whitespace()
            .find(|word| word.starts_with("weft-join-"));
        site.token = token.context("no token was printed")?.to_owned();
        site.succeeds(host, &site.join_command(&site.token, host))?;
    }
    let (members, alive) = site.members("beta")?;
    ensure!(
        members == ["alpha", "beta", "home"] && alive.is_empty(),
        "{members:?} {alive:?}"
    );
    Ok(())
}

fn lend(site: &mut Site<'_>) -> Result<()> {
    let context = site.context;
    for host in site.hosts.iter_mut().filter(|host| host.name != "home") {
        let address = format!("127.0.0.1:{}", host.port);
        host.identity.configure(&address, "600M", &[])?;
        let wanted = Wanted {
            host: "127.0.0.1".into(),
            port: host.port,
            memory: String::new(),
            prefix: Vec::new(),
            runtime: None,
        };
        let directory = site.directory.join(host.name);
        fs::create_dir_all(directory.join("daemon"))?;
        host.daemon = Some(start_daemon(context, &host.identity, &directory, &wanted)?);
    }
    site.living(&["alpha", "beta"])?;
    site.runs_on("alpha")?;
    site.runs_on("beta")?;
    site.runs_on("alpha,beta")
}

fn used_token(site: &mut Site<'_>) -> Result<()> {
    let thief = Identity::new(site.context, &site.directory.join("thief"))?;
    let port = free_port()?;
    site.hosts.push(Host {
        name: "thief",
        identity: thief,
        port,
        daemon: None,
    });
    let says = site.fails("thief", &site.join_command(&site.token, "thief"))?;
    ensure!(says.contains("was used"), "{says}");
    let stranger = format!("weft-join-{}", "0".repeat(64));
    let says = site.fails("thief", &site.join_command(&stranger, "thief"))?;
    ensure!(says.contains("the token is unknown"), "{says}");
    let says = site.fails("thief", "cluster status")?;
    ensure!(says.contains("no member"), "{says}");
    let (members, _) = site.members("home")?;
    ensure!(members.len() == 3, "{members:?}");
    Ok(())
}

fn without_store(site: &mut Site<'_>) -> Result<()> {
    site.signal_etcd(Signal::SIGSTOP)?;
    let outcome = site.runs_on("alpha").and_then(|()| site.runs_on("beta"));
    let begun = Instant::now();
    let says = site.fails("home", "cluster status");
    let took = begun.elapsed();
    site.signal_etcd(Signal::SIGCONT)?;
    outcome?;
    let says = says?;
    ensure!(says.contains("the store cannot be reached"), "{says}");
    ensure!(took < BOUND, "it took {took:?}");
    site.living(&["alpha", "beta"])?;
    site.runs_on("alpha")
}

fn leave(site: &mut Site<'_>) -> Result<()> {
    site.succeeds("alpha", "cluster leave home")?;
    let begun = Instant::now();
    // The lenders learn it from the store.
    loop {
        let outcome = site.program("beta")?;
        if outcome.end != End::Exit(0) {
            ensure!(
                outcome.stderr.contains("does not let the key"),
                "{}",
                outcome.stderr
            );
            break;
        }
        ensure!(begun.elapsed() < SOON, "a host that has left still borrows");
        std::thread::sleep(Duration::from_millis(200));
    }
    // It forgets a cluster that has forgotten it.
    site.succeeds("home", "cluster leave")?;
    let invited = site.succeeds("alpha", "cluster invite --minutes 5")?;
    let token = invited
        .split_whitespace()
        .find(|word| word.starts_with("weft-join-"));
    site.succeeds(
        "home",
        &site.join_command(token.context("no token")?, "home"),
    )?;
    let begun = Instant::now();
    while let Err(error) = site.runs_on("beta") {
        ensure!(begun.elapsed() < SOON, "{error:#}");
        std::thread::sleep(Duration::from_millis(200));
    }
    Ok(())
}

fn ended_daemon(site: &mut Site<'_>) -> Result<()> {
    let host = site
        .hosts
        .iter_mut()
        .find(|host| host.name == "beta")
        .context("beta")?;
    let daemon = host.daemon.take().context("it runs")?;
    kill(Pid::from_raw(daemon.pid()), Signal::SIGTERM)?;
    let outcome = daemon.finish()?;
    ensure!(
        outcome.end == End::Exit(0),
        "{}: {}",
        outcome.end,
        outcome.stderr
    );
    let (_, alive) = site.members("home")?;
    ensure!(
        alive == ["alpha"],
        "{alive:?} live after beta's daemon has ended"
    );
    Ok(())
}
