//! Executable files that a test makes.
//!
//! Another process writes them. A child that some thread forks meanwhile holds a copy of each
//! descriptor of this process until its `execve`, and Linux executes no file that is open for
//! writing (`ETXTBSY`).

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};

/// A copy of `from` at `to`, which everybody may read and execute.
pub(crate) fn copy(from: &Path, to: &Path) -> Result<()> {
    let outcome = install(from, to).output()?;
    ensure!(
        outcome.status.success(),
        "cannot copy {}: {}",
        from.display(),
        String::from_utf8_lossy(&outcome.stderr)
    );
    Ok(())
}

/// A file at `to` with these bytes, which everybody may read and execute.
pub(crate) fn write(to: &Path, bytes: &[u8]) -> Result<()> {
    let mut writer = install(Path::new("/dev/stdin"), to)
        .stdin(Stdio::piped())
        .spawn()?;
    let mut input = writer.stdin.take().context("its input is a pipe")?;
    let written = input.write_all(bytes);
    drop(input);
    let ended = writer.wait()?;
    ensure!(ended.success(), "cannot write {}: {ended}", to.display());
    Ok(written?)
}

fn install(from: &Path, to: &Path) -> Command {
    let mut command = Command::new("install");
    command.args(["--mode", "755", "--"]).arg(from).arg(to);
    command
}
