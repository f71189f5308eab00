//! `weft node …`.

use std::process::ExitCode;

use crate::args::NodeCommand;

/// Does what was asked.
pub fn run(command: NodeCommand) -> anyhow::Result<ExitCode> {
    match command {
        _ => todo!(),
    }
}
