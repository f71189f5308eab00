//! A node other than the first.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use nix::unistd::Pid;
use weft_aggregate::SliceLinks;
use weft_confine::{Mode, ThreadKind, privilege};
use weft_machine::{
    CheckpointIo, Configuration, End, Machine, MachineIo, MemoryFile, OpenDisks, OpenSwitches,
};
use weft_monitor::settings::{OwnSettings, SliceSettings};
use weft_node::monitor_protocol::{Control, Loan, MonitorMessage, SliceBoot, Sockets};
use weft_node::size::format_bytes;
use weft_platform::clock::measure_host_tsc;

use crate::{die_with, growth, lent, links, restore, switches};

/// How long the thread waits for the machine's end at one time.
const WAIT: Duration = Duration::from_secs(3600);

/// On the launcher's own host.
pub fn own(
    control: &Arc<Control>,
    own: OwnSettings,
    boot: &SliceBoot,
    settings: SliceSettings,
    (sockets, channels): (Sockets, Vec<OwnedFd>),
    parent: Pid,
) -> anyhow::Result<()> {
    weft_confine::prepare(own.confine.into())?;
    let links = links::open(sockets, boot, &settings)?.context("there are no links")?;
    // A node that joins finds the machine's memory where it is now.
    let restore = own.restore.as_deref().filter(|_| boot.joins.is_none());
    let restore = restore.map(|set| restore::open(set, &[])).transpose()?;
    let checkpoint = CheckpointIo {
        channels: channels.into_iter().map(Some).collect(),
        restore: restore.map(|(restore, _)| restore),
    };
    let switches = switches::connect(&settings.configuration, boot.number as usize, &own.switches)?;
    let devices = (OpenDisks::default(), switches);
    let files = (devices, checkpoint, MemoryFile::New);
    let machine = build(&settings.configuration, files, links)?;
    growth::listen(control, &machine, boot, None)?;
    if let Some(user) = own.user {
        privilege::become_user(&user.into())?;
        // A change of user undoes it.
        die_with(parent)?;
    }
    weft_confine::enter(ThreadKind::Main)?;
    if boot.joins.is_some() {
        control.say(&MonitorMessage::Ready);
    }
    // Why it ended is node 0's to say.
    wait(machine);
    Ok(())
}

/// On a host that lends: all that can be refused is, before anything runs anywhere.
pub fn lent(
    control: &Arc<Control>,
    boot: &SliceBoot,
    loan: &Loan,
    settings: SliceSettings,
    (sockets, files): (Sockets, Vec<OwnedFd>),
) -> anyhow::Result<()> {
    let memory = files.into_iter().next();
    let memory = memory.context("its daemon sent no file for guest memory")?;
    let configuration = &settings.configuration;
    let number = boot.number as usize;
    configuration.validate()?;
    fits(configuration, boot, loan)?;
    let reference = settings.reference.as_ref().context("no clock to follow")?;
    if !reference.is_here() {
        reference.check(measure_host_tsc())?;
    }
    let disks = lent::open(configuration, number, &loan.lender, OpenDisks::default())
        .with_context(|| format!("for user {}", nix::unistd::geteuid()))?;
    let switches = switches::connect(configuration, number, &loan.switches)
        .with_context(|| format!("for user {}", nix::unistd::geteuid()))?;
    weft_confine::prepare(Mode::Enforce)?;
    let links = links::open(sockets, boot, &settings)?.context("there are no links")?;
    // Before the machine is put together: slice 0, which is started next, is asked
    // for what its devices are.
    control.say(&MonitorMessage::Ready);
    let checkpoint = CheckpointIo::default();
    let memory = MemoryFile::Empty(memory.into());
    let machine = build(
        configuration,
        ((disks, switches), checkpoint, memory),
        links,
    )?;
    growth::listen(control, &machine, boot, None)?;
    weft_confine::enter(ThreadKind::Main)?;
    if let End::Failed { reason } = wait(machine) {
        control.say(&MonitorMessage::Said(reason));
    }
    Ok(())
}

/// Whether a machine asks this host for no more than was reserved on it.
fn fits(configuration: &Configuration, boot: &SliceBoot, loan: &Loan) -> anyhow::Result<()> {
    let (slice, placement) = (boot.number as usize, configuration.placement());
    let (cpus, memory_bytes) = match boot.joins {
        // It has no vCPU at first, and any may move here.
        Some(bytes) => (configuration.cpus, bytes),
        None => {
            let share = placement.shares().get(slice);
            let share = share.with_context(|| format!("the machine has no node {slice}"))?;
            let memory_bytes = placement.budget_bytes(slice, configuration.spare_bytes);
            (share.cpus, memory_bytes)
        }
    };
    anyhow::ensure!(
        cpus <= loan.cpus && memory_bytes <= loan.memory_bytes,
        "the machine needs {} vCPUs and {} of memory here, but {} and {} were reserved",
        cpus,
        format_bytes(memory_bytes),
        loan.cpus,
        format_bytes(loan.memory_bytes)
    );
    Ok(())
}

fn build(
    configuration: &Configuration,
    ((disks, switches), checkpoint, memory): ((OpenDisks, OpenSwitches), CheckpointIo, MemoryFile),
    links: SliceLinks,
) -> anyhow::Result<Machine> {
    let io = MachineIo {
        serial: Box::new(io::sink()),
        console: None,
        disks,
        switches,
        checkpoint,
        memory,
    };
    Ok(Machine::of_slice(configuration, io, links)?)
}

fn wait(machine: Machine) -> End {
    let handle = machine.handle();
    loop {
        if let Some(end) = handle.wait(WAIT) {
            handle.wait_for_stop();
            return end;
        }
    }
}
