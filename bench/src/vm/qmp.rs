//! QEMU's monitor protocol (QEMU's `docs/interop/qmp-spec`): a JSON object a line.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};

/// Longest wait for a process to listen, and for an answer.
const WAIT: Duration = Duration::from_secs(20);
const LOOK: Duration = Duration::from_millis(10);

/// A connection to a process of QEMU.
pub struct Qmp {
    lines: BufReader<UnixStream>,
}

impl Qmp {
    /// Connects as soon as the process listens.
    pub fn connect(socket: &Path) -> Result<Qmp> {
        let until = Instant::now() + WAIT;
        let stream = loop {
            match UnixStream::connect(socket) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() > until => {
                    return Err(error).with_context(|| format!("QEMU's {}", socket.display()));
                }
                Err(_) => std::thread::sleep(LOOK),
            }
        };
        stream.set_read_timeout(Some(WAIT))?;
        let mut qmp = Qmp {
            lines: BufReader::new(stream),
        };
        ensure!(qmp.object()?.get("QMP").is_some(), "QEMU does not greet");
        qmp.execute("qmp_capabilities", &json!({}))?;
        Ok(qmp)
    }

    fn object(&mut self) -> Result<Value> {
        let mut line = String::new();
        let read = self.lines.read_line(&mut line)?;
        ensure!(read > 0, "QEMU has closed its monitor");
        Ok(serde_json::from_str(&line)?)
    }

    /// Executes a command and returns its result.
    pub fn execute(&mut self, command: &str, arguments: &Value) -> Result<Value> {
        let request = json!({ "execute": command, "arguments": arguments });
        writeln!(self.lines.get_mut(), "{request}")?;
        loop {
            // Events come between.
            let answer = self.object()?;
            if let Some(error) = answer.get("error") {
                bail!("QEMU: {command}: {error}");
            }
            if let Some(result) = answer.get("return") {
                return Ok(result.clone());
            }
        }
    }

    /// What QEMU says of a migration that has completed within `bound`.
    pub fn wait_until_migrated(&mut self, bound: Duration) -> Result<Value> {
        let until = Instant::now() + bound;
        loop {
            let report = self.execute("query-migrate", &json!({}))?;
            match report["status"].as_str() {
                Some("completed") => return Ok(report),
                Some("failed" | "cancelled") => bail!("QEMU: {report}"),
                _ if Instant::now() > until => bail!("QEMU does not complete: {report}"),
                _ => std::thread::sleep(LOOK),
            }
        }
    }
}
