//! `weft vm`: virtual machines.
//!
//! | room | holds |
//! | --- | --- |
//! | [`args`], [`suboptions`] | the command line, read |
//! | [`plan`], [`nodes`], [`growable`] | the command line, judged |
//! | [`placed`] | the same with hosts that a cluster finds |
//! | [`registry`] | sockets by which machines are found |
//! | [`mod@run`] | one life of a machine after the other, as the launcher has them lived |
//! | [`start`] | the same without a terminal: the launcher outlives the command |
//! | [`take_home`] | the same for a machine that comes from another host |
//! | [`kept`] | the end of both with a reservation's agent |
//! | [`outcome`] | what came of it, and exit codes |
//! | [`mod@checks`] | what `weft doctor` says of virtual machines |
//! | [`running`] | machines that run: list, console, pause, resume, stop |
//! | [`save`], [`restore`] | a machine to files, and from them |
//! | [`top`] | what vCPUs and nodes do, every second |
//! | [`trace`] | faults by vCPU and by page |
//! | [`symbols`] | the kernel's names for addresses |

mod args;
mod checks;
mod choices;
mod error;
mod growable;
mod growth;
mod kept;
mod next_life;
mod nodes;
mod outcome;
mod placed;
mod plan;
mod registry;
mod restore;
mod room;
mod run;
mod running;
mod save;
mod start;
mod suboptions;
mod symbols;
mod take_home;
mod top;
mod trace;
mod updated;

use std::process::ExitCode;
use std::time::Instant;

use weft_machine::migration::{Choose, Migration};

pub use args::VmCommand;
pub use checks::checks;
pub use choices::CpuArg;

/// Does what the command says. `started`: when this process began.
pub fn run(command: VmCommand, started: Instant) -> anyhow::Result<ExitCode> {
    match command {
        VmCommand::Run(mut args) => run::run(&mut args, started),
        VmCommand::Start(mut args) => start::run(&mut args, started),
        VmCommand::TakeHome => take_home::run(started),
        VmCommand::List { json } => running::list(json),
        VmCommand::Console { machine } => running::console(&machine),
        VmCommand::Pause { machine } => running::pause(&machine),
        VmCommand::Resume { machine } => running::resume(&machine),
        VmCommand::Move {
            machine,
            vcpu,
            time: _,
            platform,
            to,
            json,
        } => match vcpu {
            Some(vcpu) => running::move_vcpu(&machine, vcpu, to, json),
            None if platform => running::move_platform(&machine, to, json),
            None => running::move_time(&machine, to, json),
        },
        VmCommand::Balloon {
            machine,
            size,
            json,
        } => running::balloon(&machine, size, json),
        VmCommand::Grow {
            machine,
            on,
            memory,
            by_hand,
            json,
        } => {
            let machine = growth::Machine::find(&machine, by_hand)?;
            growth::grow(&machine, growth::new_node(on, memory)?, json)
        }
        VmCommand::Release {
            machine,
            node,
            by_hand,
            json,
        } => growth::release(&growth::Machine::find(&machine, by_hand)?, node, json),
        VmCommand::Migrate {
            machine,
            to,
            spread,
            choose,
            with_disks,
            keep_home,
            how,
        } => {
            let migration = Migration {
                with_disks,
                keep_home,
                ..how.to(to, spread, choose.into())
            };
            let machine = growth::Machine::find(&machine, how.by_hand)?;
            growth::migrate(&machine, &migration, how.timeout, how.json)
        }
        VmCommand::Consolidate {
            machine,
            to,
            when_room,
            how,
        } => {
            let found = growth::Machine::find(&machine, how.by_hand)?;
            if let Some(patience) = when_room {
                room::wait(&machine, &to, patience)?;
            }
            let migration = how.to(vec![to], false, Choose::default());
            growth::migrate(&found, &migration, how.timeout, how.json)
        }
        VmCommand::Save(args) => save::run(&args),
        VmCommand::Stop { machine, timeout } => running::stop(&machine, timeout),
        VmCommand::Top(args) => top::run(&args),
        VmCommand::Trace(args) => trace::run(&args),
        VmCommand::Counters { machine, json } => running::counters(&machine, json),
    }
}
