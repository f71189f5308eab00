//! `weft completions` and `weft man`.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use clap::CommandFactory;

use crate::args::Cli;

/// Prints a completion script.
pub fn completions(shell: clap_complete::Shell) -> anyhow::Result<ExitCode> {
    clap_complete::generate(shell, &mut Cli::command(), "weft", &mut std::io::stdout());
    Ok(ExitCode::SUCCESS)
}

/// Prints `weft(1)`, or writes a page for each command into `directory`.
pub fn pages(directory: Option<&Path>) -> anyhow::Result<ExitCode> {
    match directory {
        None => clap_mangen::Man::new(Cli::command())
            .render(&mut std::io::stdout())
            .context("cannot print the man page")?,
        Some(directory) => {
            std::fs::create_dir_all(directory)
                .and_then(|()| clap_mangen::generate_to(Cli::command(), directory))
                .with_context(|| format!("cannot write man pages to {}", directory.display()))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
