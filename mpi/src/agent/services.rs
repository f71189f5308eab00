//! What serves machines on an agent's host: a daemon, so that they can come from other hosts, and
//! a switch, which is their network.
//!
//! Both listen at the address by which the host reaches the launcher, known with the first
//! connection.

use std::fs;
use std::io::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::mpsc::Sender;
use std::sync::{Mutex, PoisonError};
use std::thread;

use anyhow::{Context as _, bail};
use weft_node::config::{self, CONFIG_FILE, KEY_FILE, May, Peer, SLICES_MAX, USER_FIRST};
use weft_node::consent::Consent;
use weft_node::daemon::{Daemon, DaemonOptions, KnownPeers};
use weft_node::host;
use weft_wire::keys::{PublicKey, StaticKeys};

use super::place::Place;
use super::{Event, say};
use crate::control::{Offer, PeerHost, SWITCH};
use crate::switch::{PeerSwitch, Switch};
use crate::token::Token;

/// Of the host's free memory, what machines may have: in parts of 16.
const MEMORY_PARTS: u64 = 14;

pub struct Services {
    config: PathBuf,
    keys: StaticKeys,
    launcher: PublicKey,
    memory: u64,
    /// On a bridge.
    tap: Option<String>,
    events: Sender<Event>,
    running: Mutex<Option<Running>>,
}

struct Running {
    offer: Offer,
    /// The address at which the launcher was reached first.
    launcher: IpAddr,
    daemon: KnownPeers,
    switch: Switch,
}

impl Services {
    /// Not started yet.
    pub fn new(place: &Place, token: &Token, events: Sender<Event>) -> anyhow::Result<Services> {
        let config = place.config();
        config::init(&config).context("cannot make the keys of this host")?;
        let services = Services {
            keys: config::load_keys(&config)?,
            config,
            launcher: token.key,
            tap: token.tap.clone(),
            events,
            memory: host::available_memory_bytes() / 16 * MEMORY_PARTS,
            running: Mutex::new(None),
        };
        services.write(&[])?;
        Ok(services)
    }

    pub fn keys(&self) -> &StaticKeys {
        &self.keys
    }

    /// What this host has. Starts daemon and switch if they do not run.
    pub fn offer(&self, own: IpAddr, launcher: IpAddr) -> anyhow::Result<Offer> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(running) = &*running {
            return Ok(running.offer.clone());
        }
        let started = self.start(own, launcher)?;
        Ok(running.insert(started).offer.clone())
    }

    fn start(&self, own: IpAddr, launcher: IpAddr) -> anyhow::Result<Running> {
        let any_port = SocketAddr::new(own, 0).to_string();
        let options = DaemonOptions {
            configuration: Some(self.config.clone()),
            listen: Some(any_port.clone()),
            memory_bytes: Some(self.memory),
            slices: Some(SLICES_MAX),
            ..DaemonOptions::default()
        };
        let daemon = Daemon::listen(&options, |line| crate::print(&format!("weft node: {line}")))?;
        let node = daemon.address()?.to_string();
        let known = daemon.known_peers();
        let accept = move || {
            // Nothing ends it but the end of the process.
            let never = std::io::pipe()?;
            daemon.accept_until(std::os::fd::AsFd::as_fd(&never.0))
        };
        let accept = move || {
            if let Err(error) = accept() {
                say(&format!("no machine can come here any more: {error}"));
            }
        };
        thread::Builder::new().name("daemon".into()).spawn(accept)?;
        let key = self.config.join(KEY_FILE);
        let (tap, machines) = (self.tap.as_deref(), SWITCH.as_ref());
        let events = self.events.clone();
        let ended = move || drop(events.send(Event::SwitchEnded));
        let messages = Stdio::inherit();
        let (switch, listening) = Switch::start(&any_port, machines, &key, tap, messages, ended)?;
        let offer = Offer {
            node,
            switch: listening.address,
            mtu: listening.mtu,
            memory: self.memory,
            cores: thread::available_parallelism().map_or(1, |cores| cores.get() as u32),
        };
        Ok(Running {
            offer,
            launcher,
            daemon: known,
            switch,
        })
    }

    /// These are the other hosts.
    pub fn know(&self, hosts: &[PeerHost]) -> anyhow::Result<()> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(running) = &mut *running else {
            bail!("no daemon runs yet");
        };
        let own = self.keys.public();
        let others: Vec<&PeerHost> = hosts.iter().filter(|host| host.key != own).collect();
        let mut peers = Vec::new();
        for (number, host) in others.iter().enumerate() {
            let Some(node) = &host.node else { continue };
            let network = format!("switch={SWITCH}");
            let consent = Consent::parse(&[], &[network])
                .map_err(|(field, why)| anyhow::anyhow!("{field}: {why}"))?;
            peers.push(Peer {
                address: Some(node.clone()),
                user: USER_FIRST + number as u32,
                consent,
                takes_machines: true,
                ..Peer::new(host.name.clone(), host.key, May::Both)
            });
        }
        self.write(&peers)?;
        running.daemon.set(peers);
        let switches = others.iter().map(|host| PeerSwitch {
            key: host.key,
            address: match host.switch.strip_prefix(':') {
                Some(port) => format!("{}:{port}", in_address(running.launcher)),
                None => host.switch.clone(),
            },
            // A whole link beside the tap devices would make a loop. The launcher has none.
            detour: self.tap.is_some() && host.node.is_some(),
        });
        running.switch.know(switches.collect())
    }

    /// Writes `node.toml`, which `weft vm migrate` reads.
    fn write(&self, peers: &[Peer]) -> anyhow::Result<()> {
        let mut text = format!(
            "[[peer]]\nname = \"launcher\"\nkey = \"{}\"\nmay = \"borrow\"\n",
            self.launcher
        );
        for peer in peers {
            text += &format!(
                "\n[[peer]]\nname = {:?}\nkey = \"{}\"\naddress = {:?}\nmay = \"both\"\nuser = {}\n\
                 networks = [\"switch={SWITCH}\"]\nmachines = true\n",
                peer.name,
                peer.key,
                peer.address(),
                peer.user
            );
        }
        let path = self.config.join(CONFIG_FILE);
        let new = path.with_extension("new");
        let write = || -> std::io::Result<()> {
            let mut options = fs::OpenOptions::new();
            let options = options.write(true).create(true).truncate(true).mode(0o600);
            options.open(&new)?.write_all(text.as_bytes())?;
            fs::rename(&new, &path)
        };
        write().with_context(|| format!("cannot write {}", path.display()))
    }

    /// Ends the switch. The daemon ends with the process.
    pub fn end(&self) {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        *running = None;
    }
}

/// As it stands before a port.
fn in_address(address: IpAddr) -> String {
    match address {
        IpAddr::V4(address) => address.to_string(),
        IpAddr::V6(address) => format!("[{address}]"),
    }
}
