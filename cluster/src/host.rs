//! Hosts as the cluster knows them.

use crate::bounds::CORES_MAX;
use crate::{ClusterError, HOSTS, HOSTS_MAX, KEYS, NUMBERS, json};
use serde::{Deserialize, Serialize};
use weft_store::{Change, Entry};

/// What a host is: said when it joins, but for its number, which it gets then.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostRecord {
    pub name: String,
    /// Its public key, as `weft node init` prints it.
    pub key: String,
    /// HOST:PORT of its daemon.
    pub address: String,
    pub cores: u32,
    pub memory_bytes: u64,
    /// Its CPU's features, by the names of `/proc/cpuinfo`.
    pub features: Vec<String>,
    pub version: String,
    /// No other member has it. The user id of the host's slices is derived from it.
    #[serde(default)]
    pub number: u32,
}

impl HostRecord {
    pub(crate) fn check(&self, cluster_version: &str) -> Result<(), ClusterError> {
        check_name(&self.name)?;
        if self.version != cluster_version {
            let (own, cluster) = (self.version.clone(), cluster_version.into());
            return Err(ClusterError::Version { own, cluster });
        }
        Ok(())
    }

    /// What the store has of a member.
    pub(crate) fn entries(&self) -> [Change; 3] {
        let [host, key, number] = self.keys();
        let name = self.name.as_bytes();
        [
            Change::put(host, json(self)),
            Change::put(key, name),
            Change::put(number, name),
        ]
    }

    /// The store's keys of the host, its public key and its number.
    pub(crate) fn keys(&self) -> [String; 3] {
        [
            format!("{HOSTS}{}", self.name),
            format!("{KEYS}{}", self.key),
            format!("{NUMBERS}{}", self.number),
        ]
    }
}

/// The record of an entry, if it is one: under its own name, with a possible number.
pub(crate) fn read(entry: &Entry) -> Option<HostRecord> {
    let record: HostRecord = serde_json::from_slice(&entry.value).ok()?;
    let fine = entry.key.strip_prefix(HOSTS) == Some(&record.name)
        && check_name(&record.name).is_ok()
        && record.number < HOSTS_MAX
        && record.cores <= CORES_MAX;
    fine.then_some(record)
}

/// How a living host is: said again and again.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostReport {
    /// What it lends, and what of that is in use.
    pub lends_bytes: u64,
    pub lent_bytes: u64,
    /// What its owner lets it lend: more than it lends while the host has too little free.
    #[serde(default)]
    pub may_lend_bytes: u64,
    /// What machines have of it and the host's owner wants back.
    #[serde(default)]
    pub wanted_back_bytes: u64,
    /// Why it is expected to fail, by the errors that its kernel counted: a phrase.
    #[serde(default)]
    pub trouble: Option<String>,
    /// The cores that its owner lends; without it, all that it has.
    #[serde(default)]
    pub cores: Option<u32>,
    pub slices: u32,
    pub free_bytes: u64,
    /// Processes that ran or wanted to, in the mean of the last minute.
    pub load: f64,
}

/// What an operator said of a host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cordon {
    /// Nothing new comes here.
    pub cordoned: bool,
    /// Everything leaves.
    pub draining: bool,
}

/// A host with what it said last, if it lives.
#[derive(Clone, Debug, PartialEq)]
pub struct Member {
    pub record: HostRecord,
    pub report: Option<HostReport>,
    pub cordon: Cordon,
    /// Why an operator expects it to fail: a phrase.
    pub said_to_fail: Option<String>,
    pub revision: u64,
}

impl Member {
    /// The cores that it lends.
    pub fn cores(&self) -> u32 {
        let report = self.report.as_ref();
        let lent = report.and_then(|report| report.cores);
        lent.unwrap_or(self.record.cores)
    }

    /// Why it is expected to fail, by an operator, else by itself.
    pub fn trouble(&self) -> Option<&str> {
        let report = self.report.as_ref();
        let own = report.and_then(|report| report.trouble.as_deref());
        self.said_to_fail.as_deref().or(own)
    }
}

impl HostReport {
    /// What others may show and count.
    pub(crate) fn shown(self) -> HostReport {
        let trouble = self.trouble.as_deref().map(shown_trouble);
        let cores = self.cores.map(|cores| cores.min(CORES_MAX));
        HostReport {
            trouble,
            cores,
            ..self
        }
    }
}

/// The reason in a record, which may hold anything.
pub(crate) fn shown_trouble(why: &str) -> String {
    check_trouble(why)
        .unwrap_or("for a reason that cannot be shown")
        .into()
}

/// Longest reason for an evacuation, in characters.
const TROUBLE_MAX: usize = 200;

/// Whether a character may be shown: it neither steers a terminal nor reorders or hides what is
/// beside it (Unicode's bidirectional controls, separators and characters without width).
pub fn is_shown(c: char) -> bool {
    let hides = matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
        | '\u{2060}'..='\u{2069}' | '\u{feff}' | '\u{61c}');
    !c.is_control() && !hides
}

/// A phrase for a log and a terminal.
pub(crate) fn check_trouble(why: &str) -> Result<&str, ClusterError> {
    let why = why.trim().trim_end_matches('.');
    let fine = !why.is_empty() && why.chars().count() <= TROUBLE_MAX && why.chars().all(is_shown);
    match fine {
        true => Ok(why),
        false => Err(ClusterError::Trouble(TROUBLE_MAX)),
    }
}

/// How a host takes part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum HostState {
    Lends,
    Cordoned,
    Drained,
    /// It is expected to fail, and everything leaves it.
    Failing,
    /// It is a member, and says nothing.
    NoDaemon,
    /// It has left, and something runs there still.
    Left,
}

impl HostState {
    pub(crate) fn of(member: Option<&Member>) -> HostState {
        match member {
            None => HostState::Left,
            Some(member) if member.report.is_none() => HostState::NoDaemon,
            Some(member) if member.trouble().is_some() => HostState::Failing,
            Some(member) if member.cordon.draining => HostState::Drained,
            Some(member) if member.cordon.cordoned => HostState::Cordoned,
            Some(_) => HostState::Lends,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            HostState::Lends => "lends",
            HostState::Cordoned => "cordoned",
            HostState::Drained => "drained",
            HostState::Failing => "failing",
            HostState::NoDaemon => "no daemon",
            HostState::Left => "has left",
        }
    }

    /// What it is now: a sentence. `trouble`: why it is expected to fail.
    pub(crate) fn describe(self, name: &str, trouble: Option<&str>) -> String {
        match self {
            HostState::Lends => format!("{name} takes work."),
            HostState::Cordoned => format!("{name} takes no new work."),
            HostState::Drained => format!("{name} is drained."),
            HostState::Failing => {
                let why = trouble.unwrap_or("nobody says why");
                format!("{name} is expected to fail: {why}.")
            }
            HostState::NoDaemon => format!("{name} is silent."),
            HostState::Left => format!("{name} is no member any more."),
        }
    }
}

const NAME_MAX: usize = 63;

/// The names of DNS labels: they are words of command lines, URLs and keys.
pub(crate) fn check_name(name: &str) -> Result<(), ClusterError> {
    let letter = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let fine = name.len() <= NAME_MAX
        && name.starts_with(letter)
        && name.chars().all(|c| letter(c) || c == '-');
    if fine {
        Ok(())
    } else {
        Err(ClusterError::Name { name: name.into() })
    }
}
