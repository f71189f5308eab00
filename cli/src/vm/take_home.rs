//! `weft vm take-home`: a machine comes from another host for good. A daemon starts this command
//! when a launcher elsewhere wants that, with a socket as its standard input; it becomes the
//! machine's launcher, as the child of `weft vm start` is one.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use nix::unistd::{Gid, Uid};
use weft_confine::privilege::Identity;
use weft_machine::{BackEndChoice, Configuration, Network, Share, check_host};
use weft_monitor::settings::{Confine, SliceSettings};
use weft_node::keeper::Keeper;
use weft_node::launch::machine::Inheritance;
use weft_node::monitor_protocol::{
    FILES_BYTES_MAX, HomeOrder, ReceivedOrder, TakeoverSocket, receive_order,
};
use weft_node::options::Transport;
use weft_node::size::format_bytes;
use weft_platform::clock::begin_tsc_measurement;

use super::error::EXIT_SETUP;
use super::kept;
use super::nodes::Nodes;
use super::plan::{Plan, check_plain};
use super::registry::{self, Registration};
use super::run::{self as launcher, Arrival};
use super::start::{detach, log_path};
use super::suboptions::ConsoleArg;

/// Of the kernel and the initrd.
const EXTENSIONS: [&str; 2] = ["kernel", "initrd"];

/// Is the machine's launcher, to its end.
pub fn run(started: Instant) -> anyhow::Result<ExitCode> {
    let tsc = begin_tsc_measurement();
    let input = io::stdin();
    let socket = input.as_fd().try_clone_to_owned()?;
    let ReceivedOrder {
        order,
        memory,
        links,
        daemons,
    } = receive_order(socket.as_fd())
        .context("a daemon starts this command; `weft vm migrate` brings a machine here")?;
    let daemon = TakeoverSocket::new(socket.try_clone()?);
    let prepared = Keeper::of_environment().map_err(anyhow::Error::from);
    let prepared = prepared.and_then(|keeper| {
        let mut plan = plan(&order)?;
        let registry = Registration::claim(&plan)?;
        let directory = registry::directory()?;
        let files = BootFiles::receive(&daemon, &directory.join(&plan.name), &order.files)?;
        plan.reboot = files.replace(&mut plan.configuration);
        detach(&log_path(&directory, &plan.name), keeper.is_some())?;
        let made = registry.files().into_iter().chain(files.0.iter().cloned());
        kept::end_with(keeper, &plan.name, made.collect())?;
        Ok((plan, registry, files))
    });
    let (plan, registry, _files) = match prepared {
        Ok(prepared) => prepared,
        Err(error) => {
            daemon.fail(&format!("{error:#}"));
            return Ok(ExitCode::from(EXIT_SETUP));
        }
    };
    let nodes = order.nodes;
    let others = (!nodes.is_empty()).then_some(Inheritance {
        nodes,
        links,
        daemons,
    });
    let arrival = Arrival {
        memory,
        socket,
        others,
    };
    launcher::run_arrival(&plan, &registry, arrival, (started, tsc), &|why| {
        daemon.fail(why);
    })
}

/// The machine with what is on this host from now on, if it can be there.
fn plan(order: &HomeOrder) -> anyhow::Result<Plan> {
    let settings: SliceSettings = serde_json::from_str(&order.settings)
        .context("the description of the machine is invalid")?;
    let mut configuration = settings.configuration;
    for (number, disk) in configuration.disks.iter().enumerate() {
        let node = disk.slice;
        ensure!(node == 0, "disk {number} is on node {node}, not on node 0");
    }
    for (number, network) in configuration.networks.iter().enumerate() {
        let node = network.slice();
        ensure!(
            node == 0,
            "network {number} is on node {node}, not on node 0"
        );
        ensure!(
            matches!(network, Network::Tap { .. } | Network::Switch { .. }),
            "the connections of network {number}, of kind `user`, are on the old host"
        );
    }
    ensure!(
        configuration.back_end != BackEndChoice::Kvm,
        "the lender does not lend KVM: use --backend soft"
    );
    let share = Share {
        cpus: configuration.cpus,
        memory_bytes: configuration.memory_bytes,
    };
    let loan = &order.loan;
    if order.nodes.is_empty() {
        ensure!(
            share.cpus <= loan.cpus && share.memory_bytes <= loan.memory_bytes,
            "the machine needs {} vCPUs and {} of memory, and {} and {} were lent: migrate it \
             with HOST={}",
            share.cpus,
            format_bytes(share.memory_bytes),
            loan.cpus,
            format_bytes(loan.memory_bytes),
            share.memory_bytes,
        );
        configuration.slices = vec![share];
        configuration.spare_bytes = None;
    }
    configuration.trace = false;
    configuration.back_end = BackEndChoice::Soft;
    configuration.validate()?;
    check_host(configuration.cpu_model.unwrap_or_default())?;
    let identity = order.user.map(|user| Identity {
        name: format!("user {user}"),
        user: Uid::from_raw(user),
        group: Gid::from_raw(user),
    });
    Ok(Plan {
        name: check_plain(&order.name)?,
        nodes: Nodes {
            count: configuration.slices.len(),
            hosts: order.nodes.iter().map(|node| node.host.clone()).collect(),
            transport: Transport::Tcp,
            lease: Duration::from_millis(order.lease_ms.into()),
            link_delay_max: settings.link_delay_max,
            cpus: share.cpus,
            memory_bytes: share.memory_bytes,
            shares: configuration.slices.clone(),
        },
        configuration,
        console: ConsoleArg::Socket(None),
        api: None,
        reboot: false,
        stays_on_hosts: !order.nodes.is_empty(),
        ready: None,
        identity,
        confine: Confine::Enforce,
        restore: None,
        lender: Some(loan.lender.clone()),
    })
}

/// Copies of what the guest restarts from; removed when dropped.
struct BootFiles(Vec<PathBuf>);

impl BootFiles {
    /// Files whose names begin with `name`.
    fn receive(daemon: &TakeoverSocket, name: &Path, sizes: &[u64]) -> anyhow::Result<BootFiles> {
        ensure!(
            sizes.len() <= EXTENSIONS.len()
                && sizes
                    .iter()
                    .try_fold(0_u64, |sum, size| sum.checked_add(*size))
                    <= Some(FILES_BYTES_MAX),
            "the files that its guest restarts from are too large"
        );
        let mut files = BootFiles(Vec::new());
        for (extension, bytes) in EXTENSIONS.iter().zip(sizes) {
            let path = PathBuf::from(format!("{}.{extension}", name.display()));
            // What a machine of that name left that was killed.
            let _ = fs::remove_file(&path);
            files.0.push(path.clone());
            receive(daemon, &path, *bytes)
                .with_context(|| format!("cannot copy a file to {}", path.display()))?;
        }
        Ok(files)
    }

    /// Sets the guest to restart from these files. False without a kernel.
    fn replace(&self, configuration: &mut Configuration) -> bool {
        let mut paths = self.0.iter().cloned();
        let Some(kernel) = paths.next() else {
            return false;
        };
        configuration.kernel = kernel;
        configuration.initrd = paths.next();
        true
    }
}

impl Drop for BootFiles {
    fn drop(&mut self) {
        for path in &self.0 {
            let _ = fs::remove_file(path);
        }
    }
}

fn receive(daemon: &TakeoverSocket, path: &Path, bytes: u64) -> anyhow::Result<()> {
    let mut options = OpenOptions::new();
    // The user that the machine runs as reads it.
    let mut file = options
        .write(true)
        .create_new(true)
        .mode(0o644)
        .open(path)?;
    let mut left = bytes;
    while left > 0 {
        let step = daemon.next()?.context("the daemon has ended")?;
        let part = step.file_bytes().context("it is not a part of a file")?;
        let rest = left.checked_sub(part.len() as u64);
        left = rest.context("it is longer than announced")?;
        file.write_all(&part)?;
    }
    Ok(())
}
