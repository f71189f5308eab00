//! The switch of a host, as a process: `weft switch`.

use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde_json::{Value, json};
use weft_wire::keys::PublicKey;

use crate::wait;

/// How long it may take to end by itself.
const ENDS_MAX: Duration = Duration::from_secs(2);

/// Ends when dropped.
pub struct Switch {
    process: Child,
    /// `None` once it was told to end.
    orders: Option<ChildStdin>,
    /// As it was told.
    peers: Vec<(PublicKey, String)>,
}

impl Switch {
    /// With the address at which it listens. `machines`: its socket, by a name or a path;
    /// `messages`: where it says what happens.
    pub fn start(
        listen: &str,
        machines: &OsStr,
        key: &Path,
        messages: Stdio,
    ) -> anyhow::Result<(Switch, String)> {
        let own = std::env::current_exe().context("cannot find this program")?;
        let mut process = Command::new(own)
            .args(["switch", "--listen", listen, "--machines"])
            .arg(machines)
            .arg("--key")
            .arg(key)
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
        let address = first.as_deref().and_then(listening);
        let Some(address) = address else {
            let _ = process.kill();
            let _ = process.wait();
            bail!("the switch did not start");
        };
        // So that it can go on writing.
        let read = move || while let Some(Ok(_)) = reports.next() {};
        thread::Builder::new().name("reports".into()).spawn(read)?;
        let switch = Switch {
            process,
            orders: Some(orders),
            peers: Vec::new(),
        };
        Ok((switch, address))
    }

    /// These are the other switches, and where they listen.
    pub fn know(&mut self, peers: Vec<(PublicKey, String)>) -> anyhow::Result<()> {
        for (key, _) in std::mem::take(&mut self.peers) {
            if peers.iter().all(|(other, _)| *other != key) {
                self.order(&json!({ "leave": key }))?;
            }
        }
        for (key, address) in &peers {
            self.order(&json!({ "peer": { "key": key, "address": address } }))?;
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

/// The address in the first report of a switch.
fn listening(line: &str) -> Option<String> {
    let report: Value = serde_json::from_str(line).ok()?;
    Some(report["listening"]["address"].as_str()?.to_owned())
}
