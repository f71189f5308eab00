//! The `weft` command: parses the line, calls `weft-node`, shows the outcome.
//!
//! Standard output belongs to the program that is run, and to what was asked
//! for (`list`, `doctor`, JSON). Everything else goes to standard error, each
//! sentence after `weft: `.

mod age;
mod args;
mod cluster;
mod doctor;
mod lend;
mod machines;
mod manual;
mod mpi;
mod node;
mod run;
mod running;
mod summary;
mod switch;
mod table;
mod top;
mod values;
mod vm;
mod watch;
mod work;

use std::process::ExitCode;

use clap::Parser;

use args::{Cli, Command};

fn main() -> ExitCode {
    let started = age::process_started();
    let outcome = match Cli::parse().command {
        Command::Run(args) => run::run(&args),
        Command::Plan { json } => work::show(json),
        Command::Top => top::run(),
        Command::Node { command } => node::run(command),
        Command::Cluster { command } => cluster::run(command),
        Command::Vm { command } => vm::run(command, started),
        Command::Mpi { command } => mpi::run(command),
        Command::Switch(args) => switch::run(args),
        Command::List { json } => running::list(json),
        Command::Stretch { pid } => running::stretch(pid),
        Command::Shrink { pid, node } => running::shrink(pid, node),
        Command::Doctor { json } => doctor::run(json),
        Command::Completions { shell } => manual::completions(shell),
        Command::Man { directory } => manual::pages(directory.as_deref()),
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("weft: {error:#}");
        ExitCode::FAILURE
    })
}
