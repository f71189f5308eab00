//! Hosts of a cluster on this host: identities, daemons, and a real etcd.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::cluster::{Identity, Wanted, free_port, start_daemon, stop};
use crate::context::Context;
use crate::run::{End, Invocation, Outcome, Running, run, start};

/// A command of `weft cluster`, a store that does not answer included.
pub(super) const BOUND: Duration = Duration::from_secs(20);
/// The etcd answers, or what one host did is known to all, within this.
pub(super) const SOON: Duration = Duration::from_secs(30);
/// What a program under test prints.
const NUMBERS: &str = "seq 1 2000 | sort -rn | tail -1";

pub(super) struct Host {
    pub(super) name: &'static str,
    pub(super) identity: Identity,
    pub(super) port: u16,
    pub(super) daemon: Option<Running>,
}

pub(super) struct Site<'a> {
    pub(super) context: &'a Context,
    pub(super) directory: PathBuf,
    pub(super) store: String,
    etcd: Option<Running>,
    pub(super) hosts: Vec<Host>,
    /// One that was used.
    pub(super) token: String,
}

impl Drop for Site<'_> {
    fn drop(&mut self) {
        // A check that failed may have left its machine.
        let _ = self.call("home", "vm stop --timeout 0 web");
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
    /// With an etcd, or without: a file that `weft cluster store` serves.
    pub(super) fn new(context: &'a Context, name: &str, has_etcd: bool) -> Result<Site<'a>> {
        let directory = context.directory(name)?;
        let (client, peer) = (free_port()?, free_port()?);
        let data = directory.join("etcd");
        fs::create_dir_all(&data)?;
        let weft = context.weft.display();
        let served = format!(
            "{weft} cluster store {} --listen 127.0.0.1:{client}",
            data.join("state").display()
        );
        let url = |port: u16| format!("http://127.0.0.1:{port}");
        let line = format!(
            "etcd --name e0 --data-dir {} --listen-client-urls {c} --advertise-client-urls {c} \
             --listen-peer-urls {p} --initial-advertise-peer-urls {p} --initial-cluster e0={p} \
             --logger zap --log-level error",
            data.display(),
            c = url(client),
            p = url(peer)
        );
        let line = if has_etcd { line } else { served };
        let words: Vec<&str> = line.split(' ').filter(|word| !word.is_empty()).collect();
        let etcd = start(&Invocation::new(&words, &directory).bounded(Duration::from_secs(3600)))?;
        let mut hosts = Vec::new();
        for name in ["home", "alpha", "beta"] {
            fs::DirBuilder::new()
                .mode(0o700)
                .create(directory.join(format!("run-{name}")))?;
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

    pub(super) fn host(&self, name: &str) -> &Host {
        self.hosts
            .iter()
            .find(|host| host.name == name)
            .expect("a host of the site")
    }

    /// `weft` with these words as that host.
    pub(super) fn call(&self, host: &str, words: &str) -> Result<Outcome> {
        let weft = self.context.weft.to_string_lossy().into_owned();
        let command: Vec<&str> = [&weft[..]].into_iter().chain(words.split(' ')).collect();
        self.invoke(host, &command)
    }

    pub(super) fn invoke(&self, host: &str, command: &[&str]) -> Result<Outcome> {
        let mut invocation = Invocation::new(command, &self.directory.join("call")).bounded(BOUND);
        fs::create_dir_all(&invocation.directory)?;
        invocation.environment = self.environment(host);
        run(&invocation)
    }

    /// The standard output of what must succeed.
    pub(super) fn succeeds(&self, host: &str, words: &str) -> Result<String> {
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
    pub(super) fn fails(&self, host: &str, words: &str) -> Result<String> {
        let outcome = self.call(host, words)?;
        ensure!(outcome.end != End::Exit(0), "{words} was not refused");
        ensure!(!outcome.stderr.contains("panicked"), "{}", outcome.stderr);
        Ok(outcome.stderr)
    }

    /// The names of all members, and of those that live.
    pub(super) fn members(&self, host: &str) -> Result<(Vec<String>, Vec<String>)> {
        let status: Value = serde_json::from_str(&self.succeeds(host, "cluster status --json")?)?;
        let hosts = status["hosts"].as_array().context("no hosts")?;
        let name = |host: &Value| host["name"].as_str().unwrap_or_default().to_owned();
        let alive = hosts.iter().filter(|host| host["alive"] == true);
        Ok((hosts.iter().map(name).collect(), alive.map(name).collect()))
    }

    pub(super) fn living(&self, names: &[&str]) -> Result<()> {
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
    pub(super) fn program(&self, lender: &str) -> Result<Outcome> {
        let weft = self.context.weft.to_string_lossy().into_owned();
        self.invoke(
            "home",
            &[&weft, "run", "--on", lender, "--", "sh", "-c", NUMBERS],
        )
    }

    pub(super) fn runs_on(&self, lender: &str) -> Result<()> {
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

    pub(super) fn signal_etcd(&self, signal: Signal) -> Result<()> {
        let pid = self.etcd.as_ref().context("the etcd runs")?.pid();
        Ok(kill(Pid::from_raw(pid), signal)?)
    }

    pub(super) fn environment(&self, host: &str) -> Vec<(OsString, OsString)> {
        let run = self.directory.join(format!("run-{host}"));
        vec![
            self.host(host).identity.environment(),
            ("XDG_RUNTIME_DIR".into(), run.into()),
        ]
    }

    pub(super) fn init_command(&self) -> String {
        let port = self.host("home").port;
        format!(
            "cluster init fragments --store {} --name home --address 127.0.0.1:{port}",
            self.store
        )
    }

    /// Makes the cluster, with home as its first member.
    pub(super) fn init(&self) -> Result<()> {
        // The etcd may still be coming up.
        let begun = Instant::now();
        while let Err(error) = self.succeeds("home", &self.init_command()) {
            ensure!(begun.elapsed() < SOON, "{error:#}");
            std::thread::sleep(Duration::from_millis(200));
        }
        Ok(())
    }

    pub(super) fn join(&mut self, host: &str) -> Result<()> {
        let invited = self.succeeds("home", "cluster invite")?;
        let token = invited
            .split_whitespace()
            .find(|word| word.starts_with("weft-join-"));
        self.token = token.context("no token was printed")?.to_owned();
        self.succeeds(host, &self.join_command(&self.token, host))?;
        Ok(())
    }

    /// Starts a host's daemon.
    pub(super) fn lend(&mut self, name: &str, memory: &str) -> Result<()> {
        let host = self.hosts.iter_mut().find(|host| host.name == name);
        let host = host.context("a host of the site")?;
        let address = format!("127.0.0.1:{}", host.port);
        host.identity.configure(&address, memory, &[])?;
        let wanted = Wanted {
            host: "127.0.0.1".into(),
            port: host.port,
            memory: String::new(),
            prefix: Vec::new(),
            runtime: None,
        };
        let directory = self.directory.join(name);
        fs::create_dir_all(directory.join("daemon"))?;
        let daemon = start_daemon(self.context, &host.identity, &directory, &wanted)?;
        host.daemon = Some(daemon);
        Ok(())
    }

    /// Ends a host's daemon by SIGKILL.
    pub(super) fn kill_daemon(&mut self, name: &str) -> Result<()> {
        let host = self.hosts.iter_mut().find(|host| host.name == name);
        let daemon = host.and_then(|host| host.daemon.take());
        stop(daemon.context("its daemon runs")?)?;
        Ok(())
    }

    pub(super) fn join_command(&self, token: &str, host: &str) -> String {
        let port = self.host(host).port;
        format!(
            "cluster join {token} --store {} --name {host} --address 127.0.0.1:{port}",
            self.store
        )
    }
}
