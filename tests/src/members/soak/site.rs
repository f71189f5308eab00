//! Hosts in network namespaces on one switch, with daemons, and the etcd of their cluster.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use super::etcd::{self, Etcd};
use super::started::{Started, Words};
use crate::cluster::Identity;
use crate::context::Context;
use crate::namespace::Star;
use crate::processes::{self, Process};
use crate::run::End;

/// No name is a part of another, or of a word of a message.
pub(super) const HOSTS: [&str; 9] = [
    "alder", "birch", "cedar", "douglas", "ebony", "fuchsia", "ginkgo", "hazel", "ivory",
];
/// The last one joins and leaves.
pub(super) const GUEST: usize = HOSTS.len() - 1;
const PORT: u16 = 7117;
/// What each lends; it offers about half of it.
const LENT: &str = "1100M";
/// The cluster answers within this where nothing is broken.
pub(super) const SOON: Duration = Duration::from_secs(60);
/// One call of `weft`.
const CALL: Duration = Duration::from_secs(40);

pub(super) struct Host {
    identity: Identity,
    pub(super) daemon: Option<Started>,
    /// SIGSTOP has stopped its daemon.
    pub(super) is_stopped: bool,
    pub(super) is_member: bool,
    /// So much of what its daemon said was read.
    read: usize,
}

pub(super) struct Site<'a> {
    pub(super) context: &'a Context,
    pub(super) directory: PathBuf,
    pub(super) hosts: Vec<Host>,
    pub(super) etcd: Etcd,
    pub(super) star: Star,
    /// Host by the number of its namespace.
    namespaces: BTreeMap<u64, usize>,
    /// The host whose daemon said last that it decides.
    pub(super) leader: Option<usize>,
    /// Moves that leaders said were carried out, and that were not.
    pub(super) moves: [usize; 2],
    calls: u64,
}

/// Processes of the test are those in its namespaces, which nobody else has entered.
pub(super) fn processes_in(namespaces: &BTreeMap<u64, usize>) -> Vec<(usize, Process)> {
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

impl Drop for Site<'_> {
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

impl<'a> Site<'a> {
    /// A cluster of eight hosts with daemons, all of which live.
    pub(super) fn new(context: &'a Context) -> Result<Site<'a>> {
        let directory = context.directory("soak")?;
        let count = HOSTS.len();
        let star = Star::new(count + etcd::COUNT)?;
        let places = [count, count + 1, count + 2];
        let etcd = Etcd::start(&star, places, &directory.join("etcd"))?;
        let mut namespaces = BTreeMap::new();
        for host in 0..count + etcd::COUNT {
            namespaces.insert(star.number(host)?, host);
        }
        let mut hosts = Vec::new();
        for (number, name) in HOSTS.iter().enumerate() {
            let run = directory.join(format!("run-{name}"));
            fs::DirBuilder::new().mode(0o700).create(run)?;
            let identity = Identity::new(context, &directory.join(name))?;
            identity.configure(&format!("{}:{PORT}", Star::address(number)), LENT, &[])?;
            hosts.push(Host {
                identity,
                daemon: None,
                is_stopped: false,
                is_member: false,
                read: 0,
            });
        }
        let mut site = Site {
            context,
            directory,
            hosts,
            etcd,
            star,
            namespaces,
            leader: None,
            moves: [0; 2],
            calls: 0,
        };
        let begun = Instant::now();
        while let Err(error) = site.call(0, &site.init_words()) {
            ensure!(begun.elapsed() < SOON, "{error:#}");
            std::thread::sleep(Duration::from_millis(500));
        }
        site.hosts[0].is_member = true;
        site.start_daemon(0)?;
        for (host, name) in HOSTS[..GUEST].iter().enumerate().skip(1) {
            let (end, join) = site.join(host)?.finish(CALL);
            ensure!(end == End::Exit(0), "{name}: {}", join.said());
            site.hosts[host].is_member = true;
            site.start_daemon(host)?;
        }
        Ok(site)
    }

    pub(super) fn namespaces(&self) -> BTreeMap<u64, usize> {
        self.namespaces.clone()
    }

    pub(super) fn run_directory(&self, host: usize) -> PathBuf {
        self.directory.join(format!("run-{}", HOSTS[host]))
    }

    /// `weft` with these words on a host, in the background.
    pub(super) fn begin(&self, host: usize, name: &str, words: &[String]) -> Result<Started> {
        let weft = self.context.weft.clone().into_os_string();
        let words = words.iter().map(OsString::from);
        self.begin_any(host, name, [weft].into_iter().chain(words).collect())
    }

    fn begin_any(&self, host: usize, name: &str, command: Vec<OsString>) -> Result<Started> {
        Started::begin(Words {
            prefix: self.star.prefix(host),
            command,
            environment: vec![
                self.hosts[host].identity.environment(),
                ("XDG_RUNTIME_DIR".into(), self.run_directory(host).into()),
            ],
            directory: &self.directory.join("said"),
            name,
        })
    }

    /// The standard output of a call that must succeed.
    pub(super) fn call(&mut self, host: usize, words: &[String]) -> Result<String> {
        self.calls += 1;
        let name = format!("call-{}", self.calls);
        let (end, call) = self.begin(host, &name, words)?.finish(CALL);
        let (line, said) = (words.join(" "), call.said());
        ensure!(
            end == End::Exit(0),
            "{}: {line}: {end}: {said}",
            HOSTS[host]
        );
        let printed = call.printed();
        for file in [&call.output, &call.errors] {
            fs::remove_file(file)?;
        }
        Ok(printed)
    }

    pub(super) fn json(&mut self, host: usize, line: &str) -> Result<Value> {
        let text = self.call(host, &words(line))?;
        serde_json::from_str(&text).with_context(|| format!("{line}: {text}"))
    }

    pub(super) fn start_daemon(&mut self, host: usize) -> Result<()> {
        let name = format!("daemon-{}", HOSTS[host]);
        let daemon = self.begin(host, &name, &words("node start"))?;
        self.hosts[host].daemon = Some(daemon);
        self.hosts[host].is_stopped = false;
        Ok(())
    }

    pub(super) fn kill_daemon(&mut self, host: usize) {
        if let Some(mut daemon) = self.hosts[host].daemon.take() {
            daemon.signal(Signal::SIGKILL);
        }
    }

    /// Kills all that runs on a host.
    pub(super) fn kill_host(&mut self, host: usize) {
        self.hosts[host].daemon = None;
        let all = processes_in(&self.namespaces).into_iter();
        for (_, process) in all.filter(|(at, _)| *at == host) {
            let _ = kill(Pid::from_raw(process.identity.pid), Signal::SIGKILL);
        }
    }

    fn init_words(&self) -> Vec<String> {
        let at = format!("--name {} --address {}:{PORT}", HOSTS[0], Star::address(0));
        let mut all = words(&format!("cluster init soak {at}"));
        all.extend(self.etcd.options());
        all
    }

    /// Has the first host invite another one, which joins. It forgets that it was a member before.
    pub(super) fn join(&self, host: usize) -> Result<Started> {
        let inviter = self.hosts[0].identity.environment().1;
        let script = format!(
            "\"$0\" cluster leave 2>/dev/null; token=$(WEFT_CONFIG=\"$1\" \"$0\" cluster invite | grep -o 'weft-join-[0-9a-f]*') && \
             shift && exec \"$0\" cluster join \"$token\" --name {} --address {}:{PORT} \"$@\"",
            HOSTS[host],
            Star::address(host)
        );
        let mut command: Vec<OsString> = ["sh", "-c", &script].map(OsString::from).to_vec();
        command.push(self.context.weft.clone().into());
        command.push(inviter);
        command.extend(self.etcd.options().iter().map(OsString::from));
        self.begin_any(host, &format!("join-{}", HOSTS[host]), command)
    }

    /// Reads what daemons have said since the last time: who decides, and faults.
    pub(super) fn hear_daemons(&mut self) -> Vec<String> {
        let mut faults = Vec::new();
        for (number, name) in HOSTS.iter().enumerate() {
            let path = self.directory.join(format!("said/daemon-{name}.err"));
            let all = fs::read(path).unwrap_or_default();
            let host = &mut self.hosts[number];
            let news = all.get(host.read..).unwrap_or_default();
            // A line that is not whole yet is read the next time.
            let whole = news.iter().rposition(|byte| *byte == b'\n');
            let news = &news[..whole.map_or(0, |end| end + 1)];
            host.read += news.len();
            for line in String::from_utf8_lossy(news).lines() {
                if line.contains("this host decides") {
                    self.leader = Some(number);
                } else if line.contains(" has moved") {
                    self.moves[0] += 1;
                } else if line.contains(" did not move: ") {
                    self.moves[1] += 1;
                } else if line.contains("panicked") {
                    faults.push(format!("the daemon of {name}: {line}"));
                }
            }
            let end = host.daemon.as_mut().and_then(Started::end);
            if let Some(end) = end {
                host.daemon = None;
                faults.push(format!("the daemon of {name} has ended by itself: {end}"));
            }
        }
        faults.extend(self.etcd.failed());
        faults
    }
}

pub(super) fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_owned).collect()
}
