//! `weft vm take-home`: a machine comes from another host for good. A daemon starts this command
//! when a launcher elsewhere wants that, with a socket as its standard input; it becomes the
//! machine's launcher, as the child of `weft vm start` is one.

use std::io;
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use nix::unistd::{Gid, Uid};
use weft_confine::privilege::Identity;
use weft_machine::{BackEndChoice, Network, Share, check_host};
use weft_monitor::settings::{Confine, SliceSettings};
use weft_node::monitor_protocol::{HomeOrder, MonitorMessage, TakeoverSocket, receive_order};
use weft_node::options::Transport;
use weft_node::size::format_bytes;
use weft_platform::clock::begin_tsc_measurement;

use super::error::EXIT_SETUP;
use super::nodes::Nodes;
use super::plan::{Plan, check_plain};
use super::registry::{self, Registration};
use super::run::{self as launcher, Arrival};
use super::start::{detach, log_path};
use super::suboptions::ConsoleArg;

/// Is the machine's launcher, to its end.
pub fn run(started: Instant) -> anyhow::Result<ExitCode> {
    let tsc = begin_tsc_measurement();
    let input = io::stdin();
    let socket = input.as_fd().try_clone_to_owned()?;
    let (order, memory) = receive_order(socket.as_fd())
        .context("a daemon starts this command; `weft vm migrate` brings a machine here")?;
    let daemon = TakeoverSocket::new(socket.try_clone()?);
    let lender = order.loan.lender.clone();
    let prepared = plan(order).and_then(|plan| {
        let registry = Registration::claim(&plan)?;
        detach(&log_path(&registry::directory()?, &plan.name))?;
        Ok((plan, registry))
    });
    let (plan, registry) = match prepared {
        Ok(prepared) => prepared,
        Err(error) => {
            daemon.say(&MonitorMessage::Failed(format!("{error:#}")));
            return Ok(ExitCode::from(EXIT_SETUP));
        }
    };
    let arrival = Arrival {
        memory,
        socket,
        lender,
    };
    launcher::run_arrival(&plan, &registry, arrival, (started, tsc), &|why| {
        daemon.say(&MonitorMessage::Failed(why.to_owned()));
    })
}

/// The machine on one node of this host, if it can be there.
fn plan(order: HomeOrder) -> anyhow::Result<Plan> {
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
            matches!(network, Network::Tap { .. }),
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
    ensure!(
        share.cpus <= loan.cpus && share.memory_bytes <= loan.memory_bytes,
        "the machine needs {} vCPUs and {} of memory, and {} and {} were lent: migrate it with \
         HOST={}",
        share.cpus,
        format_bytes(share.memory_bytes),
        loan.cpus,
        format_bytes(loan.memory_bytes),
        share.memory_bytes,
    );
    configuration.slices = vec![share];
    configuration.spare_bytes = None;
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
            count: 1,
            hosts: Vec::new(),
            transport: Transport::Tcp,
            lease: Duration::from_millis(order.lease_ms.into()),
            link_delay_max: settings.link_delay_max,
            cpus: share.cpus,
            memory_bytes: share.memory_bytes,
            shares: vec![share],
        },
        configuration,
        console: ConsoleArg::Socket(None),
        api: None,
        // Its kernel is on the host where it started.
        reboot: false,
        ready: None,
        identity,
        confine: Confine::Enforce,
        restore: None,
    })
}
