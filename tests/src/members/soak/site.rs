//! The hosts of the test, and what their daemons say.

use std::fs;

use anyhow::Result;

use crate::context::Context;
use crate::fleet::{Fleet, Started, Wanted};

/// No name is a part of another, or of a word of a message.
pub(super) const HOSTS: [&str; 9] = [
    "alder", "birch", "cedar", "douglas", "ebony", "fuchsia", "ginkgo", "hazel", "ivory",
];
/// The last one joins and leaves.
pub(super) const GUEST: usize = HOSTS.len() - 1;
/// What each lends; it offers about half of it.
const LENT: &str = "1100M";

pub(super) struct Site<'a> {
    pub(super) fleet: Fleet<'a>,
    /// The host whose daemon said last that it decides.
    pub(super) leader: Option<usize>,
    /// Moves that leaders said were carried out, and that were not.
    pub(super) moves: [usize; 2],
    /// So much of what each daemon said was read.
    read: [usize; HOSTS.len()],
}

impl<'a> Site<'a> {
    /// A cluster of eight hosts with daemons, all of which live.
    pub(super) fn new(context: &'a Context) -> Result<Site<'a>> {
        let wanted = HOSTS.map(|name| Wanted {
            name,
            memory: LENT,
            settings: "",
        });
        let mut fleet = Fleet::new(context, "soak", &wanted)?;
        fleet.form(GUEST)?;
        Ok(Site {
            fleet,
            leader: None,
            moves: [0; 2],
            read: [0; HOSTS.len()],
        })
    }

    /// Reads what daemons have said since the last time: who decides, and faults.
    pub(super) fn hear_daemons(&mut self) -> Vec<String> {
        let mut faults = Vec::new();
        for (number, name) in HOSTS.iter().enumerate() {
            let path = self.fleet.directory.join(format!("said/daemon-{name}.err"));
            let all = fs::read(path).unwrap_or_default();
            let news = all.get(self.read[number]..).unwrap_or_default();
            // A line that is not whole yet is read the next time.
            let whole = news.iter().rposition(|byte| *byte == b'\n');
            let news = &news[..whole.map_or(0, |end| end + 1)];
            self.read[number] += news.len();
            for line in String::from_utf8_lossy(news).lines() {
                if line.contains("this host decides") {
                    self.leader = Some(number);
                } else if line.contains(" has moved") {
                    self.moves[0] += 1;
                } else if line.contains(" did not move: ") {
                    self.moves[1] += 1;
                } else if line.contains("panicked") {
                    faults.push(format!("the daemon of {name}: {line}"));
                }
            }
            let host = &mut self.fleet.hosts[number];
            let end = host.daemon.as_mut().and_then(Started::end);
            if let Some(end) = end {
                host.daemon = None;
                faults.push(format!("the daemon of {name} has ended by itself: {end}"));
            }
        }
        faults.extend(self.fleet.etcd.failed());
        faults
    }
}
