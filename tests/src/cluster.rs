//! A node with a daemon, and a home that knows it: keys, configurations, and
//! the daemon as a process.

use std::ffi::OsString;
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};

use crate::context::Context;
use crate::run::{End, Invocation, Outcome, Running, run, start};

/// The variable that names a configuration directory.
const CONFIGURATION: &str = "WEFT_CONFIG";
/// A daemon that does not listen after this is broken.
const START_BOUND: Duration = Duration::from_secs(10);
/// Longer than any test that uses a daemon.
const DAEMON_BOUND: Duration = Duration::from_secs(3600);

/// An identity: a directory with a key and a configuration.
#[derive(Debug, Clone)]
pub struct Identity {
    /// Where `weft` finds it.
    pub directory: PathBuf,
    /// The public key, as `weft node init` prints it.
    pub key: String,
}

/// What a public key starts with, before its 64 hexadecimal digits.
const KEY_PREFIX: &str = "weft-key-";

fn public_key(text: &str) -> Option<String> {
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '-')
        .find(|word| {
            word.strip_prefix(KEY_PREFIX)
                .is_some_and(|digits| digits.len() == 64)
        })
        .map(str::to_string)
}

impl Identity {
    /// Runs `weft node init` in a fresh directory.
    pub fn new(context: &Context, directory: &Path) -> Result<Identity> {
        fs::create_dir_all(directory)?;
        let configuration = directory.join("config");
        let command: [OsString; 3] = [context.weft.clone().into(), "node".into(), "init".into()];
        let mut invocation = Invocation::new(&command, directory);
        invocation.environment = vec![(CONFIGURATION.into(), configuration.clone().into())];
        let outcome = run(&invocation)?;
        ensure!(
            outcome.end == End::Exit(0),
            "weft node init: {}: {}",
            outcome.end,
            outcome.stderr.trim()
        );
        let said = fs::read_to_string(&outcome.stdout)? + &outcome.stderr;
        let key = public_key(&said)
            .with_context(|| format!("`weft node init` printed no public key: {said}"))?;
        Ok(Identity {
            directory: configuration,
            key,
        })
    }

    /// The environment under which `weft` uses this identity.
    pub fn environment(&self) -> (OsString, OsString) {
        (CONFIGURATION.into(), self.directory.clone().into())
    }

    /// Writes the configuration: where to listen, what to lend, whom to trust.
    pub fn configure(
        &self,
        listen: &str,
        memory: &str,
        peers: &[(&str, &str, Option<&str>)],
    ) -> Result<()> {
        let mut text = format!("listen = \"{listen}\"\nmemory = \"{memory}\"\n");
        for (name, key, address) in peers {
            text += &format!("\n[[peer]]\nname = \"{name}\"\nkey = \"{key}\"\n");
            if let Some(address) = address {
                text += &format!("address = \"{address}\"\n");
            }
        }
        fs::write(self.directory.join("node.toml"), text)?;
        Ok(())
    }

    /// Lets machines of one of the peers come for good, and adds lines to what it may.
    pub fn take_machines_of(&self, peer: &str, lines: &str) -> Result<()> {
        let path = self.directory.join("node.toml");
        let named = format!("name = \"{peer}\"\n");
        let text = fs::read_to_string(&path)?;
        fs::write(
            path,
            text.replace(&named, &format!("{named}machines = true\n{lines}")),
        )?;
        Ok(())
    }

    /// Adds lines to what [`Identity::configure`] wrote: to the last of the peers, if it wrote any.
    pub fn allow(&self, lines: &str) -> Result<()> {
        let path = self.directory.join("node.toml");
        let text = fs::read_to_string(&path)?;
        fs::write(path, text + lines)?;
        Ok(())
    }
}

/// A port that was free a moment ago.
pub fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// One daemon, and an identity for home that trusts it and is trusted.
pub struct Cluster {
    pub home: Identity,
    /// What the daemon is.
    pub node: Identity,
    /// Where the daemon listens.
    pub address: String,
    daemon: Option<Running>,
}

/// What a cluster should be.
#[derive(Debug, Clone)]
pub struct Wanted {
    /// Where the daemon listens, without the port.
    pub host: String,
    pub port: u16,
    /// What it lends.
    pub memory: String,
    /// Words before the daemon's command, to run it in a namespace.
    pub prefix: Vec<OsString>,
    /// The runtime of its slices; the one beside `weft` when absent.
    pub runtime: Option<PathBuf>,
}

impl Cluster {
    /// Makes keys, configures, starts the daemon and waits until it listens.
    pub fn start(context: &Context, directory: &Path, wanted: &Wanted) -> Result<Cluster> {
        let home = Identity::new(context, &directory.join("home"))?;
        let node = Identity::new(context, &directory.join("node"))?;
        let address = format!("{}:{}", wanted.host, wanted.port);
        home.configure("127.0.0.1:1", "1G", &[("node", &node.key, Some(&address))])?;
        node.configure(&address, &wanted.memory, &[("home", &home.key, None)])?;
        let mut cluster = Cluster {
            home,
            node,
            address,
            daemon: None,
        };
        cluster.daemon = Some(start_daemon(context, &cluster.node, directory, wanted)?);
        Ok(cluster)
    }

    /// The daemon's process number, while it runs.
    pub fn daemon_pid(&self) -> Option<i32> {
        self.daemon.as_ref().map(Running::pid)
    }

    /// Processes of the daemon, itself included.
    pub fn daemon_members(&mut self) -> Vec<crate::processes::Process> {
        self.daemon
            .as_mut()
            .map(Running::members)
            .unwrap_or_default()
    }

    /// Kills the daemon with SIGKILL and returns what it left behind.
    pub fn kill_daemon(&mut self) -> Result<Option<Outcome>> {
        let Some(daemon) = self.daemon.take() else {
            return Ok(None);
        };
        stop(daemon).map(Some)
    }
}

/// Starts the daemon of `node` and waits until it listens.
pub fn start_daemon(
    context: &Context,
    node: &Identity,
    directory: &Path,
    wanted: &Wanted,
) -> Result<Running> {
    let mut command = wanted.prefix.clone();
    command.extend([context.weft.clone().into(), "node".into(), "start".into()]);
    let mut invocation = Invocation::new(&command, &directory.join("daemon")).bounded(DAEMON_BOUND);
    invocation.environment = vec![node.environment()];
    let runtime = wanted.runtime.as_ref();
    let variable = runtime.map(|path| ("WEFT_RUNTIME".into(), path.into()));
    invocation.environment.extend(variable);
    let daemon = start(&invocation)?;
    let deadline = Instant::now() + START_BOUND;
    while !listens(daemon.pid(), wanted.port) {
        if Instant::now() > deadline
            || crate::processes::read(daemon.pid()).is_none_or(|p| p.state == 'Z')
        {
            let said = daemon.stderr();
            stop(daemon)?;
            bail!(
                "the daemon does not listen on {}:{}: {}",
                wanted.host,
                wanted.port,
                said.trim()
            );
        }
        thread::sleep(Duration::from_millis(20));
    }
    Ok(daemon)
}

/// Kills a daemon with SIGKILL; what it left behind.
pub fn stop(daemon: Running) -> Result<Outcome> {
    let pid = nix::unistd::Pid::from_raw(daemon.pid());
    // It may have ended by itself.
    let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
    daemon.finish()
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if let Err(error) = self.kill_daemon() {
            eprintln!("stopping the daemon: {error:#}");
        }
    }
}

/// Whether a socket listens on `port` in the network namespace of `pid`.
fn listens(pid: i32, port: u16) -> bool {
    const LISTEN: &str = "0A";
    let wanted = format!(":{port:04X}");
    ["tcp", "tcp6"].iter().any(|table| {
        fs::read_to_string(format!("/proc/{pid}/net/{table}")).is_ok_and(|text| {
            text.lines().any(|line| {
                let fields: Vec<&str> = line.split_whitespace().collect();
                fields.get(1).is_some_and(|local| local.ends_with(&wanted))
                    && fields.get(3) == Some(&LISTEN)
            })
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_found_in_a_sentence() {
        let key = format!("{KEY_PREFIX}{}", "0123456789abcdef".repeat(4));
        assert_eq!(public_key(&format!("public key: {key}.")), Some(key));
        assert_eq!(public_key("no key here"), None);
    }

    #[test]
    fn a_listening_socket_is_seen() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
        let port = listener.local_addr().expect("bound").port();
        assert!(listens(std::process::id() as i32, port));
        drop(listener);
        // Another test's child, between its fork and its exec, holds a copy of
        // the descriptor for a moment.
        let gone = (0..200).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            !listens(std::process::id() as i32, port)
        });
        assert!(gone, "still listening after two seconds");
    }
}
