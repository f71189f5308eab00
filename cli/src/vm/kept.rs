//! A machine that ends with another process: see [`weft_node::keeper`].
//!
//! The launcher's thread that waits for the keeper removes the machine's files and ends the
//! process. The machine's other processes of this host die with the launcher
//! (`PR_SET_PDEATHSIG`), a network in user space when its socket closes.

use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::Context;
use weft_node::keeper::Keeper;

use super::error::EXIT_STOPPED;

/// Has the machine called `name` end with its keeper, if it has one. Of its files as many are
/// removed as can be.
///
/// # Errors
/// The kernel's: nobody watches.
pub fn end_with(keeper: Option<Keeper>, name: &str, files: Vec<PathBuf>) -> anyhow::Result<()> {
    let Some(keeper) = keeper else {
        return Ok(());
    };
    let (name, pid) = (name.to_owned(), keeper.pid());
    let end = move || {
        // A log on a full disk is no reason to go on.
        let _ = writeln!(
            io::stderr(),
            "weft: vm {name}: process {pid}, with which it ends, has ended: the machine ends now"
        );
        for file in files {
            let _ = std::fs::remove_file(file);
        }
        // SAFETY: ends all threads of the process; nothing of theirs is used afterwards.
        unsafe { libc::_exit(EXIT_STOPPED.into()) }
    };
    keeper
        .watch(end)
        .with_context(|| format!("cannot watch process {pid}, with which the machine ends"))
}
