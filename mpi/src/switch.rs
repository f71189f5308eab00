//! The switch of a host, as a process: `weft switch`.

use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde::Deserialize;
use serde_json::{Value, json};
use weft_wire::keys::PublicKey;

use crate::wait;

/// How long it may take to end by itself.
const ENDS_MAX: Duration = Duration::from_secs(2);

/// The first report of a switch.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum First {
    Listening(Listening),
    Error(String),
}

/// Where a switch listens.
#[derive(Deserialize)]
pub struct Listening {
    pub address: String,
    /// Of its tap device, bytes.
    pub mtu: Option<u32>,
}

/// Ends when dropped.
pub struct Switch {
    process: Child,
    /// `None` once it was told to end.
    orders: Option<ChildStdin>,
    /// As it was told.
    peers: Vec<PeerSwitch>,
}

/// Another host's switch.
#[derive(Clone, PartialEq, Eq)]
pub struct PeerSwitch {
    pub key: PublicKey,
    /// Where it listens.
    pub address: String,
    /// It is on the same bridge, which carries most frames.
    pub detour: bool,
}

impl Switch {
    /// `machines`: its socket, by a name or a path; `tap`: a device on a bridge; `messages`: where
    /// it says what happens; `ended`: called when it has ended, for whatever reason.
    pub fn start(
        listen: &str,
        machines: &OsStr,
        key: &Path,
        tap: Option<&str>,
        messages: Stdio,
        ended: impl FnOnce() + Send + 'static,
    ) -> anyhow::Result<(Switch, Listening)> {
        let own = std::env::current_exe().context("cannot find this program")?;
        let mut process = Command::new(own)
            .args(["switch", "--listen", listen, "--machines"])
            .arg(machines)
            .arg("--key")
            .arg(key)
            .args(tap.iter().flat_map(|tap| ["--tap", tap]))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(messages)
            .spawn()
            .context("cannot start the switch")?;
        let (Some(orders), Some(reports)) = (process.stdin.take(), process.stdout.take()) else {
            bail!("the switch has no pipes");
        };
        let mut reports = BufReader::new(reports).lines();
        let first = reports.next().and_then(Result::ok);
        let first = first.and_then(|line| serde_json::from_str(&line).ok());
        let Some(First::Listening(listening)) = first else {
            let _ = process.kill();
            let _ = process.wait();
            match first {
                Some(First::Error(why)) => bail!("the switch did not start: {why}"),
                _ => bail!("the switch did not start"),
            }
        };
        // So that it can go on writing.
        let read = move || {
            while let Some(Ok(_)) = reports.next() {}
            ended();
        };
        thread::Builder::new().name("reports".into()).spawn(read)?;
        let switch = Switch {
            process,
            orders: Some(orders),
            peers: Vec::new(),
        };
        Ok((switch, listening))
    }

    /// These are the other switches.
    pub fn know(&mut self, peers: Vec<PeerSwitch>) -> anyhow::Result<()> {
        for PeerSwitch { key, .. } in std::mem::take(&mut self.peers) {
            if peers.iter().all(|other| other.key != key) {
                self.order(&json!({ "leave": key }))?;
            }
        }
        for peer in &peers {
            let PeerSwitch {
                key,
                address,
                detour,
            } = peer;
            self.order(&json!({ "peer": { "key": key, "address": address, "detour": detour } }))?;
        }
        self.peers = peers;
        Ok(())
    }

    fn order(&mut self, order: &Value) -> anyhow::Result<()> {
        let orders = self.orders.as_mut().context("the switch was told to end")?;
        writeln!(orders, "{order}").context("the switch has ended")
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        self.orders = None;
        // Nobody could do anything about a process that cannot be waited for.
        let _ = wait::ended_or_killed(&mut self.process, ENDS_MAX);
    }
}
