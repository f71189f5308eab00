//! Looks at processes, and never asks Weft: which aggregate has a part where, by the sockets that
//! its processes share.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::time::{Duration, Instant};

use crate::fleet::processes_in;
use crate::processes::{Identity, Process};

/// A slice without a home is one that starts, or whose home has just gone. One that was cut off
/// needs its lease to know.
pub(super) const ORPHAN: Duration = Duration::from_secs(60);

/// The first part of an aggregate, and where the others are.
#[derive(Debug, Clone)]
pub(super) struct Home {
    pub(super) host: usize,
    pub(super) identity: Identity,
    pub(super) others: BTreeSet<usize>,
}

/// What runs at one moment.
#[derive(Debug, Clone, Default)]
pub(super) struct Sight {
    /// By token. More than one: it runs twice.
    pub(super) homes: BTreeMap<String, Vec<Home>>,
    /// Launchers by token, and where they are.
    pub(super) launchers: BTreeMap<String, Vec<(usize, i32)>>,
    /// Slices that no home has.
    pub(super) orphans: Vec<(usize, Process)>,
    /// Slices by host.
    pub(super) slices: Vec<(usize, i32)>,
    pub(super) agents: usize,
}

#[derive(Debug, Default)]
pub(super) struct Observer {
    /// Since when.
    orphans: HashMap<Identity, Instant>,
    /// The process that each token has, or had, on a host.
    known: HashMap<(String, usize), Identity>,
}

impl Sight {
    pub(super) fn home(&self, token: &str, host: usize) -> Option<&Home> {
        let mut homes = self.homes.get(token)?.iter();
        homes.find(|home| home.host == host)
    }
}

fn arguments(pid: i32) -> Vec<String> {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words = bytes.split(|byte| *byte == 0);
    words
        .map(|word| String::from_utf8_lossy(word).into_owned())
        .collect()
}

fn executes(pid: i32, name: &str) -> bool {
    let link = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
    link.file_name().is_some_and(|file| file == name)
}

/// The token of a launcher, by its arguments.
fn token(arguments: &[String]) -> Option<String> {
    if !arguments.iter().any(|word| word == "--cluster") {
        return None;
    }
    let after = |word: &str| {
        let at = arguments.iter().position(|other| other == word)?;
        arguments.get(at + 1..)
    };
    let program = || after("--")?.get(1);
    after("--name")
        .and_then(|rest| rest.first())
        .or_else(program)
        .cloned()
}

/// Local and remote end of each TCP connection, by its socket's number.
fn connections(pid: i32) -> HashMap<u64, (String, String)> {
    let table = fs::read_to_string(format!("/proc/{pid}/net/tcp")).unwrap_or_default();
    let line = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let ends = (fields.get(1)?.to_string(), fields.get(2)?.to_string());
        Some((fields.get(9)?.parse().ok()?, ends))
    };
    table.lines().skip(1).filter_map(line).collect()
}

fn sockets(pid: i32) -> Vec<u64> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd"))
        .into_iter()
        .flatten();
    let number = |entry: std::io::Result<fs::DirEntry>| {
        let link = fs::read_link(entry.ok()?.path()).ok()?;
        let text = link.to_string_lossy().into_owned();
        text.strip_prefix("socket:[")?
            .strip_suffix(']')?
            .parse()
            .ok()
    };
    entries.filter_map(number).collect()
}

/// Looks once.
pub(super) fn look(namespaces: &BTreeMap<u64, usize>) -> Sight {
    let mut sight = Sight::default();
    let all = processes_in(namespaces);
    // Commands that start a machine fork its launcher: the child has the monitor.
    let mut launchers = HashMap::new();
    for (host, process) in &all {
        let pid = process.identity.pid;
        if !executes(pid, "weft") {
            continue;
        }
        let words = arguments(pid);
        if words.get(1).is_some_and(|word| word == "cluster") {
            sight.agents += usize::from(words.get(2).is_some_and(|word| word == "agent"));
        } else if let Some(token) = token(&words) {
            sight
                .launchers
                .entry(token.clone())
                .or_default()
                .push((*host, pid));
            launchers.insert(pid, token);
        }
    }
    let mut tables: HashMap<usize, HashMap<u64, (String, String)>> = HashMap::new();
    let (mut homes, mut slices) = (Vec::new(), Vec::new());
    // Which of them has the end of a connection.
    let mut ends: HashMap<(String, String), usize> = HashMap::new();
    let mut parts: Vec<(usize, Process)> = Vec::new();
    for (host, process) in all {
        let pid = process.identity.pid;
        let is_runtime = executes(pid, "weft-runtime");
        if !is_runtime && !executes(pid, "weft-monitor") {
            continue;
        }
        let table = tables.entry(host).or_insert_with(|| connections(pid));
        let held = sockets(pid)
            .into_iter()
            .filter_map(|socket| table.get(&socket));
        let number = parts.len();
        ends.extend(held.map(|end| (end.clone(), number)));
        let launcher = launchers.get(&process.parent);
        match launcher.filter(|_| !is_runtime || is_program(pid)) {
            Some(token) => homes.push((number, token.clone())),
            None => slices.push(number),
        }
        parts.push((host, process));
    }
    let mut linked: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
    for ((local, remote), number) in &ends {
        let peer = ends.get(&(remote.clone(), local.clone()));
        linked.entry(*number).or_default().extend(peer);
    }
    let mut owned: BTreeSet<usize> = BTreeSet::new();
    for (number, token) in homes {
        let mut reached = BTreeSet::from([number]);
        let mut next = vec![number];
        while let Some(at) = next.pop() {
            let peers = linked.get(&at).into_iter().flatten();
            next.extend(peers.filter(|peer| reached.insert(**peer)));
        }
        let (host, process) = &parts[number];
        owned.extend(&reached);
        reached.remove(&number);
        sight.homes.entry(token).or_default().push(Home {
            host: *host,
            identity: process.identity,
            others: reached.iter().map(|part| parts[*part].0).collect(),
        });
    }
    for number in slices {
        let (host, process) = &parts[number];
        sight.slices.push((*host, process.identity.pid));
        if !owned.contains(&number) {
            sight.orphans.push((*host, process.clone()));
        }
    }
    sight
}

/// Whether a runtime runs a program, and is no slice: it has taken its arguments.
fn is_program(pid: i32) -> bool {
    arguments(pid).iter().any(|word| word.ends_with("keeper"))
}

impl Observer {
    /// What must never be so.
    pub(super) fn faults(&mut self, sight: &Sight) -> Vec<String> {
        let mut faults = Vec::new();
        for (token, homes) in &sight.homes {
            let again = homes.iter().any(|home| {
                let key = (token.clone(), home.host);
                let known = self.known.insert(key, home.identity);
                known.is_some_and(|known| known != home.identity)
            });
            if homes.len() > 1 || again {
                faults.push(format!("{token} runs twice: {homes:?}"));
            }
        }
        let now = Instant::now();
        let there: Vec<Identity> = sight
            .orphans
            .iter()
            .map(|(_, part)| part.identity)
            .collect();
        self.orphans.retain(|identity, _| there.contains(identity));
        for (host, process) in &sight.orphans {
            let since = self.orphans.entry(process.identity).or_insert(now);
            if since.elapsed() > ORPHAN {
                // Once.
                *since = now + Duration::from_secs(3600);
                let name = super::site::HOSTS[*host];
                let what = crate::processes::describe(process);
                faults.push(format!("on {name} a slice outlives its aggregate: {what}"));
            }
        }
        faults
    }
}
