//! What a launcher writes down, so that another one can go on.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, ensure};
use serde::{Deserialize, Serialize};
use weft_batch::JobId;
use weft_node::host::host_name;
use weft_wire::keys::PublicKey;

use super::folder::Folder;
use super::options::Options;
use crate::control::Task;

/// Of the format.
const VERSION: u32 = 2;
const FILE: &str = "cluster.json";

#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    version: u32,
    pub options: Options,
    /// When its first launcher started, seconds since 1970.
    began_s: u64,
    pub wanted: usize,
    /// The launcher's host, as the kernel calls it. Agents know its addresses only.
    #[serde(default)]
    pub host: String,
    /// Where agents reach the launcher: another one listens there, too.
    pub port: u16,
    pub phase: Phase,
    /// The exit code, once everything is given back.
    pub code: Option<u8>,
    /// The number of the next reservation, and of the next order.
    pub next: u64,
    pub reservations: Vec<Reservation>,
    pub machines: Vec<MachineRecord>,
    /// Moves that were made.
    pub moves: u64,
    /// Of the machines' cards, if hosts have tap devices: bytes.
    #[serde(default)]
    pub mtu: Option<u32>,
    /// One machine began on several hosts: it has devices for that, and goes on from files on
    /// several only; otherwise on one.
    pub began_on_several: bool,
    /// Where machines were saved that went on from there: of no use once the cluster has ended.
    pub used_saves: Vec<PathBuf>,
}

/// How far a cluster has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Hosts come.
    Gathering,
    /// Machines start.
    Booting,
    /// The program runs, or a user does what they want.
    Running,
    /// All machines are in files.
    Saved,
    /// Everything is given back.
    Ending,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reservation {
    pub number: u32,
    /// `None`: it is being asked for.
    pub job: Option<JobId>,
    pub secret: String,
    /// Of the agent that showed the secret.
    pub key: Option<PublicKey>,
    pub leaves: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MachineRecord {
    /// The reservation where it is.
    pub host: Option<u32>,
    /// Of one machine over several hosts: its nodes, by their reservations.
    pub nodes: BTreeMap<u32, usize>,
    /// Where it was saved; then it is on no host.
    pub saved: Option<PathBuf>,
    /// Where it went on from: nothing is lost before the program runs again.
    #[serde(default)]
    pub went_on_from: Option<PathBuf>,
    /// What an agent does with it, as far as is known.
    pub order: Option<OrderRecord>,
}

/// An order whose result has not been heard: it is given again to the same agent, which knows it
/// by its number.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OrderRecord {
    pub number: u64,
    pub task: Task,
    /// The reservation to which the machine comes.
    pub to: Option<u32>,
    /// Further ones that it will be on.
    pub others: Vec<u32>,
}

fn this_host() -> String {
    host_name().trim().to_owned()
}

fn now_s() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

impl Record {
    /// Of a cluster before its first host.
    pub fn new(options: Options, port: u16) -> Record {
        let machine = MachineRecord {
            host: None,
            nodes: BTreeMap::new(),
            saved: None,
            went_on_from: None,
            order: None,
        };
        Record {
            version: VERSION,
            began_s: now_s(),
            wanted: options.hosts,
            host: this_host(),
            port,
            phase: Phase::Gathering,
            code: None,
            next: 1,
            reservations: Vec::new(),
            machines: vec![machine; options.machines as usize],
            moves: 0,
            mtu: None,
            began_on_several: false,
            used_saves: Vec::new(),
            options,
        }
    }

    /// The host of the launcher, if it is another one.
    pub fn elsewhere(&self) -> Option<&str> {
        let known = !self.host.is_empty() && self.host != this_host();
        known.then_some(self.host.as_str())
    }

    /// From now on the launcher is on this host, and listens there.
    pub fn is_here(&mut self, port: u16) {
        (self.host, self.port) = (this_host(), port);
    }

    /// Where its machines are saved, and were saved before.
    pub fn saved_files(&self) -> Vec<PathBuf> {
        let now = self.machines.iter();
        let now = now.filter_map(|machine| machine.saved.clone());
        now.chain(self.used_saves.clone()).collect()
    }

    /// Since its first launcher started.
    pub fn age(&self) -> Duration {
        Duration::from_secs(now_s().saturating_sub(self.began_s))
    }

    pub fn read(folder: &Folder) -> anyhow::Result<Record> {
        let path = folder.file(FILE);
        let bytes = fs::read(&path).with_context(|| {
            format!("there is no cluster {}: {}", folder.name(), path.display())
        })?;
        let damaged = || format!("{} is damaged", path.display());
        // The rest of another version may not be as it is here.
        let Versioned { version } = serde_json::from_slice(&bytes).with_context(damaged)?;
        ensure!(
            version == VERSION,
            "{} has version {version}, and this launcher reads {VERSION}: use the Weft that made it",
            path.display()
        );
        serde_json::from_slice(&bytes).with_context(damaged)
    }

    /// Whole or not at all.
    pub fn write(&self, folder: &Folder) -> anyhow::Result<()> {
        let path = folder.file(FILE);
        let new = folder.file("cluster.new");
        let write = || -> std::io::Result<()> {
            let mut options = fs::OpenOptions::new();
            let options = options.write(true).create(true).truncate(true).mode(0o600);
            let mut file = options.open(&new)?;
            file.write_all(&serde_json::to_vec_pretty(self)?)?;
            file.sync_data()?;
            fs::rename(&new, &path)
        };
        write().with_context(|| format!("cannot write {}", path.display()))
    }
}
