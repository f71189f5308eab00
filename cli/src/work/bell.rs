//! What wakes an agent: its launcher's end, a change of its record, or time.

use std::io::{self, PipeReader, PipeWriter, Read as _, Write as _};
use std::os::fd::AsFd;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use weft_cluster::{ALIVE_LEASE, Cluster};

/// A watch lasts this long, and is made again. It ends sooner with the first change.
const WATCH: Duration = ALIVE_LEASE;
/// After a store that did not answer.
const PAUSE: Duration = Duration::from_secs(2);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Woken {
    /// The launcher has ended.
    Ended,
    /// The record has changed.
    Rung,
    Passed,
}

/// Rings when the record of what is placed changes. A thread waits for that, and ends with the
/// process: it may be in a call of the store.
pub struct Bell {
    /// Without it, where there can be no pipe or no thread, only time wakes the agent.
    rung: Option<PipeReader>,
}

impl Bell {
    /// `after`: the revision of the record that is known.
    pub fn new(cluster: Cluster, name: &str, after: u64) -> Bell {
        let name = name.to_owned();
        let start = || -> io::Result<PipeReader> {
            let (rung, mut ring) = io::pipe()?;
            std::thread::Builder::new()
                .name("weft-bell".into())
                .spawn(move || watch(&cluster, &name, after, &mut ring))?;
            Ok(rung)
        };
        Bell { rung: start().ok() }
    }

    /// Waits for the launcher's end, which closes standard input, or a change, for `wait` at most.
    pub fn wait(&self, wait: Duration) -> Woken {
        let input = io::stdin();
        let mut ready = vec![PollFd::new(input.as_fd(), PollFlags::POLLIN)];
        let rung = self.rung.iter();
        ready.extend(rung.map(|rung| PollFd::new(rung.as_fd(), PollFlags::POLLIN)));
        let wait = PollTimeout::try_from(wait).unwrap_or(PollTimeout::ZERO);
        match poll(&mut ready, wait) {
            Ok(0) | Err(nix::errno::Errno::EINTR) => return Woken::Passed,
            Ok(_) => {}
            Err(_) => return Woken::Ended,
        }
        let is_ready = |at: usize| ready.get(at).and_then(PollFd::any).unwrap_or(false);
        if is_ready(0) {
            return Woken::Ended;
        }
        if let Some(mut rung) = self.rung.as_ref().filter(|_| is_ready(1)) {
            // One look is enough for all that has changed.
            let _ = rung.read(&mut [0; 64]);
        }
        Woken::Rung
    }
}

fn watch(cluster: &Cluster, name: &str, mut after: u64, ring: &mut PipeWriter) {
    loop {
        match cluster.wait_for_placed(name, after, WATCH) {
            Ok(newest) if newest == after => {}
            Ok(newest) => {
                after = newest;
                if ring.write_all(b"!").is_err() {
                    return;
                }
            }
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}
