//! `weft-monitor`: the process of a virtual machine's node. A launcher (`weft vm run`)
//! starts one for each node of its host, a daemon (`weft node start`) one for a node
//! that it lends; see [`weft_node::monitor`] for what they say to each other.
//!
//! | room | holds |
//! | --- | --- |
//! | [`home`], [`control`] | node 0: the machine with its console and API |
//! | [`attendance`] | node 0's wait for the machine's end |
//! | [`slice`] | another node |
//! | [`growth`] | nodes that join and leave while the machine runs |
//! | [`lent`] | what of its host the node of another host's machine may open |
//! | [`links`] | a node's links, opened |
//! | [`restore`] | the checkpoint that a machine is made from |
//! | [`switches`] | connections to switches that have a name |
//! | [`takeover`] | a machine that comes from another host for good |
//!
//! It opens what it needs, then confines itself, and runs guest instructions last. It
//! is executed, not forked from its launcher: nothing of the launcher's memory is in
//! it, the key that opened the way to other hosts least of all.

mod attendance;
mod control;
mod growth;
mod home;
mod lent;
mod links;
mod restore;
mod slice;
mod switches;
mod takeover;

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context;
use nix::unistd::Pid;
use weft_monitor::settings::{OwnSettings, SliceSettings};
use weft_node::monitor_protocol::{Control, MonitorMessage, ReceivedBoot, Terms};
use weft_platform::clock::{begin_tsc_measurement, continue_tsc_measurement};

/// The exit code of a process that could not become its node.
const EXIT_SETUP: u8 = 125;

fn main() -> ExitCode {
    let parent = nix::unistd::getppid();
    let control = match Control::inherited() {
        Ok(control) => Arc::new(control),
        Err(error) => {
            eprintln!("weft-monitor: cannot be a node of a machine: {error}");
            return ExitCode::from(EXIT_SETUP);
        }
    };
    // Executed by descriptor, it would have a number for a name.
    // SAFETY: a request about the calling thread, and a string with its end.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"weft-monitor".as_ptr()) };
    if let Err(error) = live(&control, parent) {
        control.say(&MonitorMessage::Failed(format!("{error:#}")));
        return ExitCode::from(EXIT_SETUP);
    }
    // SAFETY: ends the process; what is left of threads goes with it, and what buffers
    // hold was flushed by their owners.
    unsafe { libc::_exit(0) }
}

/// Is what the process's parent says, to the end of it.
fn live(control: &Arc<Control>, parent: Pid) -> anyhow::Result<()> {
    control.check_version()?;
    let ReceivedBoot {
        boot,
        links,
        sockets,
    } = control
        .boot()
        .context("its parent sent no description of the machine")?;
    let settings: SliceSettings = serde_json::from_str(&boot.settings)
        .context("the description of the machine is invalid")?;
    match &boot.terms {
        Terms::Lent(loan) => {
            begin_tsc_measurement();
            slice::lent(control, &boot, loan, settings, (links, sockets))
        }
        Terms::Own(own) => {
            let own: OwnSettings =
                serde_json::from_str(own).context("the description of the machine is invalid")?;
            continue_tsc_measurement(own.tsc);
            match boot.number {
                0 => home::live(control, own, &boot, settings, links, sockets, parent),
                _ => slice::own(control, own, &boot, settings, (links, sockets), parent),
            }
        }
    }
}

/// Has the kernel end this process when its parent ends, however that is.
fn die_with(parent: Pid) -> anyhow::Result<()> {
    nix::sys::prctl::set_pdeathsig(Some(nix::sys::signal::Signal::SIGKILL))
        .context("cannot tie this process to its parent")?;
    // It may have ended before.
    anyhow::ensure!(
        nix::unistd::getppid() == parent,
        "the parent process has gone"
    );
    Ok(())
}
