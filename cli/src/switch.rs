//! `weft switch`.

use std::os::fd::AsFd;
use std::process::ExitCode;

use weft_switch::shell::{self, Options};

use crate::args::SwitchArgs;

/// Runs until standard input ends.
pub fn run(args: SwitchArgs) -> anyhow::Result<ExitCode> {
    let options = Options::with_key_file(args.listen, args.machines, &args.key)?;
    let (input, output) = (std::io::stdin(), std::io::stdout());
    shell::run(options, input.as_fd(), output.as_fd())?;
    Ok(ExitCode::SUCCESS)
}
