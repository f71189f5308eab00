//! `weft vm slice`: a node of a machine whose launcher is on another host. A daemon
//! starts it (see [`weft_node::monitor`]), as a user of its own where it can.

use std::io;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use weft_aggregate::SliceLinks;
use weft_confine::{Mode, ThreadKind};
use weft_machine::{Configuration, End, Machine, OpenDisks, Outside};
use weft_node::monitor::{Control, SliceBoot, Word};
use weft_node::size::format_bytes;
use weft_platform::clock::measure_host_tsc;

use super::companions::{LinkOptions, open};
use super::error::EXIT_SETUP;
use super::hosts::SliceSettings;
use super::lent;

/// How long the thread waits for the machine's end at one time.
const WAIT: Duration = Duration::from_secs(3600);

/// Lives as the slice that the daemon says.
pub fn run() -> anyhow::Result<ExitCode> {
    weft_platform::clock::begin_tsc_measurement();
    let control = Control::inherited().context("cannot be a node of a machine")?;
    // SAFETY: a request about the calling thread, and a string with its end.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"weft-slice".as_ptr()) };
    let failed = |error: anyhow::Error, word: fn(String) -> Word| {
        control.say(&word(format!("{error:#}")));
        Ok(ExitCode::from(EXIT_SETUP))
    };
    let (configuration, disks, links) = match prepare(&control) {
        Ok(prepared) => prepared,
        Err(error) => return failed(error, Word::Failed),
    };
    // Before the machine is put together: slice 0, which is started next, is asked
    // for what its devices are.
    control.say(&Word::Ready);
    let machine = match build(&configuration, disks, links) {
        Ok(machine) => machine,
        Err(error) => return failed(error, Word::Said),
    };
    let handle = machine.handle();
    let end = loop {
        if let Some(end) = handle.wait(WAIT) {
            break end;
        }
    };
    if let End::Failed { reason } = end {
        control.say(&Word::Said(reason));
    }
    drop(machine);
    // SAFETY: ends the process; what is left of threads goes with it.
    unsafe { libc::_exit(0) }
}

/// All that can be refused before anything runs anywhere.
fn prepare(control: &Control) -> anyhow::Result<(Configuration, OpenDisks, SliceLinks)> {
    let (boot, sockets) = control
        .boot()
        .context("the daemon sent no description of the machine")?;
    let settings: SliceSettings = serde_json::from_str(&boot.settings).context(
        "the daemon's description of the machine \
        is invalid",
    )?;
    settings.configuration.validate()?;
    fits(&settings.configuration, &boot)?;
    if !settings.reference.is_here() {
        settings.reference.check(measure_host_tsc())?;
    }
    let disks = lent::open(&settings.configuration, boot.number as usize, &boot.lender)
        .with_context(|| format!("for user {}", nix::unistd::geteuid()))?;
    weft_confine::prepare(Mode::Enforce)?;
    let options = LinkOptions {
        lease: Duration::from_millis(boot.lease_ms.into()),
        delay_max: settings.link_delay_max,
        reference: Some(settings.reference),
    };
    let links = open(sockets, boot.number as usize, options)?.context("there are no links")?;
    Ok((settings.configuration, disks, links))
}

/// Whether a machine asks this host for no more than was reserved on it.
fn fits(configuration: &Configuration, boot: &SliceBoot) -> anyhow::Result<()> {
    let placement = configuration.placement();
    let slice = boot.number as usize;
    let share = placement.shares().get(slice);
    let share = share.with_context(|| format!("the machine has no node {slice}"))?;
    let memory_bytes = placement.budget_bytes(slice, configuration.spare_bytes);
    anyhow::ensure!(
        share.cpus <= boot.cpus && memory_bytes <= boot.memory_bytes,
        "the machine needs {} vCPUs and {} of memory here, but {} and {} were reserved",
        share.cpus,
        format_bytes(memory_bytes),
        boot.cpus,
        format_bytes(boot.memory_bytes)
    );
    Ok(())
}

fn build(
    configuration: &Configuration,
    disks: OpenDisks,
    links: SliceLinks,
) -> anyhow::Result<Machine> {
    let outside = Outside {
        serial: Box::new(io::sink()),
        console: None,
        disks,
    };
    let machine = Machine::of_slice(configuration, outside, links)?;
    weft_confine::enter(ThreadKind::Main)?;
    Ok(machine)
}
