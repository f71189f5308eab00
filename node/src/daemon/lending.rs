//! The thread that answers at the daemon's socket ([`crate::lending`]), and looks at the host's
//! free memory every second.
//!
//! A limit below what is lent has slices of programs leave
//! ([`super::budget`]); what machines have of it, the cluster moves.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::shared::Shared;
use crate::lending::{LendRequest, socket};
use crate::rundir::Entry;
use crate::size::format_bytes;
use crate::sys;

/// How often the host's free memory is looked at.
const TURN: Duration = Duration::from_secs(1);

/// Starts the thread. The daemon works without the socket.
pub(super) fn start(shared: &Arc<Shared>, directory: &Path) -> io::Result<()> {
    let path = socket(directory);
    let entry = match Entry::at(path.clone()) {
        Ok(entry) => Some(entry),
        Err(error) => {
            shared.say(&format!(
                "`weft node lend` cannot reach this daemon: cannot listen at {}: {error}",
                path.display()
            ));
            None
        }
    };
    let shared = shared.clone();
    std::thread::Builder::new()
        .name("weft-lending".into())
        .spawn(move || run(&shared, entry.as_ref()))?;
    Ok(())
}

fn run(shared: &Shared, entry: Option<&Entry>) {
    loop {
        shared.limit.apply(&shared.budget);
        let mut waited = vec![shared.ending()];
        waited.extend(entry.map(Entry::descriptor));
        match sys::wait_readable(&waited, TURN) {
            Ok(ready) if ready[0] => return,
            Ok(_) => {}
            Err(error) => {
                shared.say(&format!("cannot wait for `weft node lend`: {error}"));
                std::thread::sleep(TURN);
            }
        }
        while let Some((request, client)) = entry.and_then(Entry::accept::<LendRequest>) {
            if request != LendRequest::default() {
                shared.limit.change(&request);
                shared.limit.apply(&shared.budget);
            }
            let state = shared.limit.state(&shared.budget);
            if request != LendRequest::default() {
                shared.say(&format!(
                    "lends {} from now on ({} are lent), by its owner",
                    format_bytes(state.lends_bytes),
                    format_bytes(state.lent_bytes)
                ));
            }
            client.answer(&state);
        }
    }
}
