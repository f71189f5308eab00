//! `weft switch`.

use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::ExitCode;

use weft_machine::SwitchSocket;
use weft_node::rundir::{self, RunDirError};
use weft_switch::shell::{self, Options};

use crate::args::SwitchArgs;

/// Runs until standard input ends.
pub fn run(args: SwitchArgs) -> anyhow::Result<ExitCode> {
    let machines = socket(args.machines.into())?;
    // Machines wait for it, beside vCPUs that want the processors, too.
    weft_confine::time_slice::shorten();
    let mut options = Options::with_key_file(args.listen, machines, &args.key)?;
    options.tap = args.tap;
    let (input, output) = (std::io::stdin(), std::io::stdout());
    shell::run(options, input.as_fd(), output.as_fd())?;
    Ok(ExitCode::SUCCESS)
}

/// Where machines connect.
fn socket(machines: SwitchSocket) -> Result<PathBuf, RunDirError> {
    match machines {
        SwitchSocket::At(path) => Ok(path),
        SwitchSocket::Named(name) => {
            let directory = rundir::switches_directory()?;
            rundir::switch_socket(&directory, &name)
        }
    }
}
