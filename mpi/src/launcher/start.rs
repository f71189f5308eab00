//! How a launcher begins: with a new cluster, with one whose launcher is gone, or with one whose
//! machines are saved.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use nix::fcntl::Flock;
use nix::ifaddrs::getifaddrs;
use nix::sys::signal::{SigSet, Signal};
use weft_malleable::{Forecast, HostId, MachineId, Rules};
use weft_wire::keys;

use super::changes::Changes;
use super::door::{self, Guests};
use super::fleet::{Fleet, LiveHost, LiveMachine, Underway};
use super::folder::Folder;
use super::options::{Options, SiteOptions};
use super::program::{Shell, gateway_options, know_machines};
use super::record::{Phase, Record};
use super::site::{self, Ask};
use super::{Event, Launcher, archive, requests};
use crate::switch::Switch;

const KEY_FILE: &str = "launcher.key";
/// How long the switch of a launcher that was killed may take to end, on a busy host.
const SWITCH_ENDS_MAX: Duration = Duration::from_secs(5);
const SWITCH_LOOK: Duration = Duration::from_millis(20);
/// Bytes a second between hosts, until moves have shown it.
const LINK: f64 = 100e6;
/// Bytes a second to the folder for saved machines.
const SAVES: f64 = 50e6;

/// A new cluster. `program`: a file of this host that machines get.
///
/// # Errors
/// There is one of that name, something that it needs is not there, or it asks for what cannot be.
pub fn create(name: &str, options: Options, program: Option<PathBuf>) -> anyhow::Result<Launcher> {
    options.check()?;
    let folder = Folder::of(name)?;
    folder.make()?;
    let made = begin(&folder, options, program);
    if made.is_err() {
        // Nothing was started, so nothing is lost.
        let _ = folder.remove();
    }
    made
}

fn begin(folder: &Folder, options: Options, program: Option<PathBuf>) -> anyhow::Result<Launcher> {
    let lock = folder.lock()?;
    archive::make(&options.image, folder, program.as_deref(), &options.with)?;
    know_machines(folder, options.machines)?;
    keys::save(&keys::generate()?, &folder.file(KEY_FILE))?;
    let listener = listen(options.listens_at(), 0)?;
    let record = Record::new(options, listener.local_addr()?.port());
    open(folder, lock, record, listener)
}

/// Goes on with a cluster whose launcher is gone.
///
/// # Errors
/// No such cluster exists, its launcher lives, its hosts know another host as the launcher's, or its
/// machines are saved.
pub fn attach(name: &str) -> anyhow::Result<Launcher> {
    let folder = Folder::of(name)?;
    let lock = folder.lock()?;
    let record = Record::read(&folder)?;
    ensure!(
        record.phase != Phase::Saved || !record.reservations.is_empty(),
        "the machines of {name} are saved: `weft mpi resume {name}` goes on with them"
    );
    if let Some(host) = record.elsewhere() {
        bail!(
            "the launcher of {name} was on {host}, and its hosts look for it there: use `weft mpi \
             attach {name}` on {host}"
        );
    }
    let listener = listen(record.options.listens_at(), record.port).with_context(|| {
        format!("the hosts of {name} look for its launcher there, and another process has it")
    })?;
    open(&folder, lock, record, listener)
}

/// Goes on with a cluster whose machines are saved.
///
/// # Errors
/// No such cluster exists, its launcher lives, its machines are not saved, or the changes do not
/// fit it.
pub fn resume(name: &str, changes: Changes) -> anyhow::Result<Launcher> {
    let folder = Folder::of(name)?;
    let lock = folder.lock()?;
    let mut record = Record::read(&folder)?;
    ensure!(
        record.phase == Phase::Saved && record.reservations.is_empty(),
        "the machines of {name} are not saved: `weft mpi attach {name}` goes on with the cluster"
    );
    for (number, machine) in record.machines.iter().enumerate() {
        let saved = machine.saved.as_ref();
        ensure!(
            saved.is_some_and(|saved| saved.is_dir()),
            "vm-{number} is not where it was saved: {}",
            saved.map_or("nowhere".into(), |saved| saved.display().to_string())
        );
    }
    changes.apply(&mut record)?;
    record.phase = Phase::Gathering;
    // No host knows an earlier launcher's address any more.
    let listener = listen(record.options.listens_at(), 0)?;
    record.is_here(listener.local_addr()?.port());
    open(&folder, lock, record, listener)
}

/// Removes what is left of a cluster that has ended; with `saved` also machines that are saved.
///
/// # Errors
/// No such cluster exists, its launcher lives, hosts may be left, or machines are saved.
pub fn forget(name: &str, saved: bool) -> anyhow::Result<()> {
    let folder = Folder::of(name)?;
    let _lock = folder.lock()?;
    // One that cannot be read had nothing, or is of another version.
    if let Ok(record) = Record::read(&folder) {
        ensure!(
            record.reservations.is_empty(),
            "the batch system has hosts for {name} still: `weft mpi attach {name}` and \
             `weft mpi exit {name}` give them back"
        );
        let files = record.saved_files();
        ensure!(
            saved || record.phase != Phase::Saved,
            "the machines of {name} are saved in {}: `weft mpi resume {name}` goes on with them, \
             `weft mpi forget --saved {name}` removes them",
            files
                .first()
                .map_or("", |file| file.to_str().unwrap_or_default())
        );
        if record.phase == Phase::Saved {
            for file in files {
                remove(&file)?;
            }
        }
    }
    folder.remove()
}

/// The files of a machine, if they are there.
fn remove(saved: &Path) -> anyhow::Result<()> {
    match std::fs::remove_dir_all(saved) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", saved.display()))
        }
        _ => Ok(()),
    }
}

/// Where the launcher of a cluster answers.
///
/// # Errors
/// There is no such cluster, or its launcher is on another host.
pub fn requests_socket(name: &str) -> anyhow::Result<PathBuf> {
    let folder = Folder::of(name)?;
    let record = Record::read(&folder)?;
    if let Some(host) = record.elsewhere().filter(|_| record.phase != Phase::Saved) {
        bail!("the launcher of {name} is on {host}: use `weft mpi` there");
    }
    Ok(folder.requests())
}

/// A command on a machine of a cluster that runs: ssh, with the caller's standard streams.
///
/// # Errors
/// There is no such cluster.
pub fn shell(name: &str, machine: u32, script: &str) -> anyhow::Result<Command> {
    let folder = Folder::of(name)?;
    let record = Record::read(&folder)?;
    let count = record.options.machines;
    ensure!(machine < count, "{name} has machines 0 to {}", count - 1);
    Shell::new(&record.options.image, &folder).command(machine, script)
}

/// For the agents. Port 0: a free one.
fn listen(address: Option<IpAddr>, port: u16) -> anyhow::Result<TcpListener> {
    let any = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
    let address = SocketAddr::new(address.unwrap_or(any), port);
    TcpListener::bind(address).with_context(|| match port {
        0 => format!(
            "cannot listen on {} for the agents: --address names another address of this host",
            address.ip()
        ),
        _ => format!("cannot listen on {address} for the agents"),
    })
}

/// Where agents may reach this host, the most probable first.
fn addresses(options: &Options, port: u16) -> anyhow::Result<Vec<String>> {
    if let Some(address) = options.listens_at() {
        return Ok(vec![SocketAddr::new(address, port).to_string()]);
    }
    let interfaces = getifaddrs().context("cannot list the addresses of this host")?;
    let of_interface =
        |interface: nix::ifaddrs::InterfaceAddress| Some(interface.address?.as_sockaddr_in()?.ip());
    let mut found: Vec<Ipv4Addr> = interfaces.filter_map(of_interface).collect();
    found.sort_by_key(|address| (address.is_loopback(), address.is_link_local()));
    found.dedup();
    Ok(found
        .iter()
        .map(|address| format!("{address}:{port}"))
        .collect())
}

fn open(
    folder: &Folder,
    lock: Flock<File>,
    record: Record,
    listener: TcpListener,
) -> anyhow::Result<Launcher> {
    let options = &record.options;
    let (sender, events) = channel();
    watch_signals(sender.clone())?;
    let key_file = folder.file(KEY_FILE);
    let keys = keys::load(&key_file)?;
    let key = keys.public();
    let addresses = addresses(options, record.port)?;
    let any_port = SocketAddr::new(listener.local_addr()?.ip(), 0).to_string();
    let (switch, switch_address) = start_switch(&any_port, folder, &key_file, sender.clone())?;
    let switch_port = switch_address
        .rsplit(':')
        .next()
        .and_then(|port| port.parse().ok());
    let gateway = weft_gateway::Gateway::start(gateway_options(folder))?;
    let shell = Shell::new(&options.image, folder);
    let guests = Arc::new(Guests::default());
    let fleet = fleet(&record, folder, &guests);
    let features = options.cpu_features.clone();
    door::open(listener, keys, features, guests.clone(), sender.clone())?;
    let site = site::start(site::system(&options.site, folder)?, sender.clone())?;
    let jobs = fleet.hosts.values().filter_map(|host| host.job.clone());
    site.send(Ask::Watch(jobs.collect()))?;
    requests::serve(&folder.requests(), sender.clone())?;
    let rules = Rules {
        margin: options.margin,
        saves: options.save_to.as_ref().map(|_| SAVES),
        adaptive: options.adaptive,
        ask_ahead: ask_ahead(options),
        ..Rules::default()
    };
    let now = Instant::now();
    Ok(Launcher {
        folder: folder.clone(),
        _lock: lock,
        written: None,
        fleet,
        guests,
        key,
        addresses,
        switch,
        switch_port: switch_port.context("the switch said no port")?,
        shell,
        _gateway: gateway,
        site,
        sender,
        events,
        forecast: Forecast::new(LINK),
        rules,
        epoch: now,
        peers: Vec::new(),
        settles_at: now,
        asks_at: now,
        seeks_at: Some(now),
        misses: 0,
        trouble: None,
        log: VecDeque::new(),
        gathering_since: now,
        follows: false,
        interrupts: 0,
        ending: None,
        program_failed: None,
        unshown: None,
        record,
    })
}

fn start_switch(
    listen: &str,
    folder: &Folder,
    key_file: &Path,
    events: Sender<Event>,
) -> anyhow::Result<(Switch, String)> {
    let (machines, log) = (folder.switch(), folder.file("switch.log"));
    await_end_of_switch(&machines);
    let messages = File::create(&log)?;
    Switch::start(
        listen,
        machines.as_os_str(),
        key_file,
        None,
        messages.into(),
        move || drop(events.send(Event::SwitchEnded)),
    )
    .map(|(switch, listening)| (switch, listening.address))
    .with_context(|| format!("its messages are in {}", log.display()))
}

/// The switch of a launcher that was killed just now ends when it notices that. One that does not
/// end has the next one say so.
fn await_end_of_switch(machines: &Path) {
    let begun = Instant::now();
    while UnixStream::connect(machines).is_ok() && begun.elapsed() < SWITCH_ENDS_MAX {
        thread::sleep(SWITCH_LOOK);
    }
}

/// As the record has it; agents will say the rest.
fn fleet(record: &Record, folder: &Folder, guests: &Guests) -> Fleet {
    let mut hosts = BTreeMap::new();
    for reservation in &record.reservations {
        let is_stray = reservation.job.is_none();
        if is_stray {
            // An agent that has not read it yet ends without it, and its job with it.
            let _ = std::fs::remove_file(folder.file(&format!("token-{}", reservation.number)));
        }
        guests.expect(
            reservation.secret.clone(),
            reservation.number,
            reservation.key,
        );
        let host = LiveHost {
            job: reservation.job.clone(),
            key: reservation.key,
            leaves: reservation.leaves,
            // One that leaves and has had no agent has nothing.
            closing: (is_stray || reservation.leaves && reservation.key.is_none())
                .then(Instant::now),
            is_stray,
            ..LiveHost::new(reservation.secret.clone())
        };
        hosts.insert(HostId(reservation.number), host);
    }
    let machine = |machine: &super::record::MachineRecord| LiveMachine {
        // Else the program would not run.
        ready: record.phase == Phase::Running,
        at: machine.host.map(HostId),
        nodes: (machine.nodes.iter())
            .map(|(host, node)| (HostId(*host), *node))
            .collect(),
        saved: machine.saved.clone(),
        went_on_from: machine.went_on_from.clone(),
        task: machine.order.as_ref().map(|order| Underway {
            order: order.number,
            task: order.task.clone(),
            since: Instant::now(),
            to: order.to.map(HostId),
            others: order.others.iter().copied().map(HostId).collect(),
            before: None,
        }),
        unseen_since: machine.host.map(|_| Instant::now()),
        ..LiveMachine::default()
    };
    let machines = record.machines.iter().map(machine);
    let machines = machines.enumerate();
    Fleet {
        hosts,
        machines: machines
            .map(|(number, machine)| (MachineId(number as u32), machine))
            .collect(),
    }
}

/// A host of a list comes at once. A job may wait, as Slurm looks at jobs every 30 s, and the
/// warning of a batch system, which has a host be left, may come two minutes before the end.
fn ask_ahead(options: &Options) -> Duration {
    let ahead = match options.site {
        SiteOptions::Local(_) => Duration::from_secs(20),
        SiteOptions::Slurm { .. } | SiteOptions::GridEngine { .. } => Duration::from_secs(210),
    };
    ahead.min(options.time / 4)
}

/// Before any other thread is made: they all leave the signals to this one.
fn watch_signals(events: Sender<Event>) -> anyhow::Result<()> {
    let mut set = SigSet::empty();
    set.add(Signal::SIGINT);
    set.add(Signal::SIGTERM);
    set.thread_block().context("cannot block signals")?;
    let wait = move || {
        while set.wait().is_ok() {
            if events.send(Event::Signal).is_err() {
                return;
            }
        }
    };
    let thread = thread::Builder::new().name("signals".into());
    thread.spawn(wait).context("cannot start a thread")?;
    Ok(())
}
