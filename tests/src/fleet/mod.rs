//! Hosts in network namespaces on one switch, with daemons, and the etcd of their cluster.
//!
//! Needs root, `ip`, etcd and openssl.

mod etcd;
mod started;

pub use etcd::{COUNT as ETCD_MEMBERS, Etcd};
pub use started::{Started, Words};

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::cluster::Identity;
use crate::context::Context;
use crate::namespace::{self, Star};
use crate::processes::{self, Process};
use crate::run::End;

const PORT: u16 = 7117;
/// The cluster answers within this where nothing is broken.
pub const SOON: Duration = Duration::from_secs(60);
/// One call of `weft`.
const CALL: Duration = Duration::from_secs(40);

/// The settings of a host.
#[derive(Debug, Clone, Copy)]
pub struct Wanted<'a> {
    pub name: &'a str,
    /// What it lends, as `node.toml` has it.
    pub memory: &'a str,
    /// Further lines of its `node.toml`.
    pub settings: &'a str,
}

pub struct Host {
    pub name: String,
    identity: Identity,
    pub daemon: Option<Started>,
    /// SIGSTOP has stopped its daemon.
    pub is_stopped: bool,
    pub is_member: bool,
}

pub struct Fleet<'a> {
    pub context: &'a Context,
    pub directory: PathBuf,
    pub hosts: Vec<Host>,
    pub etcd: Etcd,
    pub star: Star,
    /// Host by the number of its namespace.
    namespaces: BTreeMap<u64, usize>,
    calls: u64,
}

/// Why there can be no fleet here, if so.
pub fn missing(context: &Context) -> Option<String> {
    let lacks = |tool: &&str| context.tool(tool).is_none();
    let tool = || ["etcd", "openssl"].into_iter().find(lacks);
    namespace::missing().or_else(|| tool().map(|tool| format!("needs {tool}")))
}

/// Processes of the test are those in its namespaces, which nobody else has entered.
pub fn processes_in(namespaces: &BTreeMap<u64, usize>) -> Vec<(usize, Process)> {
    let host = |process: &Process| {
        let link = fs::read_link(format!("/proc/{}/ns/net", process.identity.pid)).ok()?;
        let text = link.to_string_lossy().into_owned();
        let number = text.strip_prefix("net:[")?.strip_suffix(']')?;
        namespaces.get(&number.parse().ok()?).copied()
    };
    let all = processes::all().into_iter();
    all.filter_map(|process| Some((host(&process)?, process)))
        .collect()
}

impl Drop for Fleet<'_> {
    fn drop(&mut self) {
        for _ in 0..3 {
            for (_, process) in processes_in(&self.namespaces) {
                // Gone in the meantime is fine: that was the purpose.
                let _ = kill(Pid::from_raw(process.identity.pid), Signal::SIGKILL);
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

impl<'a> Fleet<'a> {
    /// Hosts and etcd; no host is a member yet.
    pub fn new(context: &'a Context, name: &str, wanted: &[Wanted<'_>]) -> Result<Fleet<'a>> {
        let directory = context.directory(name)?;
        let count = wanted.len();
        let star = Star::new(count + ETCD_MEMBERS)?;
        let places = [count, count + 1, count + 2];
        let etcd = Etcd::start(&star, places, &directory.join("etcd"))?;
        let mut namespaces = BTreeMap::new();
        for host in 0..count + ETCD_MEMBERS {
            namespaces.insert(star.number(host)?, host);
        }
        let mut hosts = Vec::new();
        for (number, host) in wanted.iter().enumerate() {
            let run = directory.join(format!("run-{}", host.name));
            fs::DirBuilder::new().mode(0o700).create(run)?;
            let identity = Identity::new(context, &directory.join(host.name))?;
            let listen = format!("{}:{PORT}", Star::address(number));
            identity.configure(&listen, host.memory, &[])?;
            identity.allow(host.settings)?;
            hosts.push(Host {
                name: host.name.to_owned(),
                identity,
                daemon: None,
                is_stopped: false,
                is_member: false,
            });
        }
        Ok(Fleet {
            context,
            directory,
            hosts,
            etcd,
            star,
            namespaces,
            calls: 0,
        })
    }

    /// Makes a cluster of the first `count` hosts, all of which have daemons then.
    pub fn form(&mut self, count: usize) -> Result<()> {
        let begun = Instant::now();
        while let Err(error) = self.call(0, &self.init_words()) {
            ensure!(begun.elapsed() < SOON, "{error:#}");
            std::thread::sleep(Duration::from_millis(500));
        }
        self.hosts[0].is_member = true;
        self.start_daemon(0)?;
        for host in 1..count {
            let (end, join) = self.join(host)?.finish(CALL);
            let name = &self.hosts[host].name;
            ensure!(end == End::Exit(0), "{name}: {}", join.said());
            self.hosts[host].is_member = true;
            self.start_daemon(host)?;
        }
        Ok(())
    }

    pub fn namespaces(&self) -> BTreeMap<u64, usize> {
        self.namespaces.clone()
    }

    pub fn run_directory(&self, host: usize) -> PathBuf {
        self.directory
            .join(format!("run-{}", self.hosts[host].name))
    }

    /// `weft` with these words on a host, for a caller that reads what it says itself.
    pub fn command(&self, host: usize, words: &[String]) -> Command {
        let mut all = self.star.prefix(host).into_iter();
        // The prefix is not empty: without one it would run on the test's own host.
        let mut command = Command::new(all.next().unwrap_or_default());
        command
            .args(all)
            .arg(&self.context.weft)
            .args(words)
            .envs(self.environment(host));
        command
    }

    fn environment(&self, host: usize) -> [(OsString, OsString); 2] {
        [
            self.hosts[host].identity.environment(),
            ("XDG_RUNTIME_DIR".into(), self.run_directory(host).into()),
        ]
    }

    /// `weft` with these words on a host, in the background.
    pub fn begin(&self, host: usize, name: &str, words: &[String]) -> Result<Started> {
        let weft = self.context.weft.clone().into_os_string();
        let words = words.iter().map(OsString::from);
        self.begin_any(host, name, [weft].into_iter().chain(words).collect())
    }

    fn begin_any(&self, host: usize, name: &str, command: Vec<OsString>) -> Result<Started> {
        Started::begin(Words {
            prefix: self.star.prefix(host),
            command,
            environment: self.environment(host).to_vec(),
            directory: &self.directory.join("said"),
            name,
        })
    }

    /// The standard output of a call that must succeed.
    pub fn call(&mut self, host: usize, words: &[String]) -> Result<String> {
        self.calls += 1;
        let name = format!("call-{}", self.calls);
        let (end, call) = self.begin(host, &name, words)?.finish(CALL);
        let (line, said) = (words.join(" "), call.said());
        ensure!(
            end == End::Exit(0),
            "{}: {line}: {end}: {said}",
            self.hosts[host].name
        );
        let printed = call.printed();
        for file in [&call.output, &call.errors] {
            fs::remove_file(file)?;
        }
        Ok(printed)
    }

    pub fn json(&mut self, host: usize, line: &str) -> Result<Value> {
        let text = self.call(host, &words(line))?;
        serde_json::from_str(&text).with_context(|| format!("{line}: {text}"))
    }

    pub fn start_daemon(&mut self, host: usize) -> Result<()> {
        let name = format!("daemon-{}", self.hosts[host].name);
        let daemon = self.begin(host, &name, &words("node start"))?;
        self.hosts[host].daemon = Some(daemon);
        self.hosts[host].is_stopped = false;
        Ok(())
    }

    pub fn kill_daemon(&mut self, host: usize) {
        if let Some(mut daemon) = self.hosts[host].daemon.take() {
            daemon.signal(Signal::SIGKILL);
        }
    }

    /// Kills all that runs on a host.
    pub fn kill_host(&mut self, host: usize) {
        self.hosts[host].daemon = None;
        let all = processes_in(&self.namespaces).into_iter();
        for (_, process) in all.filter(|(at, _)| *at == host) {
            let _ = kill(Pid::from_raw(process.identity.pid), Signal::SIGKILL);
        }
    }

    fn init_words(&self) -> Vec<String> {
        let at = format!(
            "--name {} --address {}:{PORT}",
            self.hosts[0].name,
            Star::address(0)
        );
        let mut all = words(&format!("cluster init fleet {at}"));
        all.extend(self.etcd.options());
        all
    }

    /// Has the first host invite another one, which joins. It forgets that it was a member before.
    pub fn join(&self, host: usize) -> Result<Started> {
        let inviter = self.hosts[0].identity.environment().1;
        let script = format!(
            "\"$0\" cluster leave 2>/dev/null; token=$(WEFT_CONFIG=\"$1\" \"$0\" cluster invite | grep -o 'weft-join-[0-9a-f]*') && \
             shift && exec \"$0\" cluster join \"$token\" --name {} --address {}:{PORT} \"$@\"",
            self.hosts[host].name,
            Star::address(host)
        );
        let mut command: Vec<OsString> = ["sh", "-c", &script].map(OsString::from).to_vec();
        command.push(self.context.weft.clone().into());
        command.push(inviter);
        command.extend(self.etcd.options().iter().map(OsString::from));
        self.begin_any(host, &format!("join-{}", self.hosts[host].name), command)
    }
}

pub fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_owned).collect()
}
