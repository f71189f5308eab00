//! A machine's console through the store, while somebody has it open.
//!
//! | key | has | until |
//! | --- | --- | --- |
//! | `weft/console/in/ID/open/LEASE` | nothing: somebody has it open | its lease ends (10 s) |
//! | `weft/console/in/ID/typed/LEASE` | bytes for the guest | the agent has taken them, or 10 s |
//! | `weft/console/out/ID/shown` | the last output ([`Shown`]) | the agent's lease ends |
//!
//! `ID` is the request's number. Typed bytes are taken in the order of their commits, each once.
//! Output is written while somebody has the console open, since an etcd keeps every version of a
//! record until it is compacted. A record has the last
//! [`CONSOLE_TAIL_MAX`] bytes and counts all that came before, so a page that is not too slow
//! misses nothing.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use weft_store::{Change, LeaseId, Revision};

use crate::work::WorkKind;
use crate::{Cluster, ClusterError};

const IN: &str = "weft/console/in/";
const OUT: &str = "weft/console/out/";
/// Of an open console, and of what was typed.
const OPEN_LEASE: Duration = Duration::from_secs(10);
/// An agent that has shown nothing after this does not answer.
const SILENCE: Duration = Duration::from_secs(10);
/// Bytes of output in a record.
pub const CONSOLE_TAIL_MAX: usize = 16 << 10;

/// What a machine's agent shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Shown {
    Output {
        /// Bytes of output since the agent has attached first, with those of `tail`.
        end: u64,
        /// The last of them.
        tail: Vec<u8>,
    },
    /// Nothing more comes, because of this.
    Closed(String),
}

impl Shown {
    fn to_bytes(&self) -> Vec<u8> {
        let (kind, end, text) = match self {
            Shown::Output { end, tail } => (b'o', *end, &tail[..]),
            Shown::Closed(why) => (b'c', 0, why.as_bytes()),
        };
        let mut bytes = vec![kind];
        bytes.extend(end.to_le_bytes());
        bytes.extend(text);
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Option<Shown> {
        let (kind, rest) = bytes.split_first()?;
        let (end, text) = rest.split_first_chunk()?;
        let end = u64::from_le_bytes(*end);
        match kind {
            b'o' if text.len() as u64 <= end => Some(Shown::Output {
                end,
                tail: text.to_vec(),
            }),
            b'c' => Some(Shown::Closed(String::from_utf8_lossy(text).into_owned())),
            _ => None,
        }
    }
}

/// What is asked of a machine's agent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConsoleCalls {
    /// The leases of those that have the console open.
    pub open: BTreeSet<LeaseId>,
    /// Bytes for the guest. They are not in the store any more.
    pub typed: Vec<u8>,
    pub revision: Revision,
}

/// A machine's console, open.
pub struct ConsoleView {
    cluster: Cluster,
    id: u64,
    lease: LeaseId,
    renewed: Instant,
    opened: Instant,
    answered: bool,
    /// Bytes of the output that were seen.
    seen: u64,
}

/// What is new on a console.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConsoleNews {
    Output(Vec<u8>),
    /// The last news: why nothing more comes.
    Closed(String),
}

fn calls_key(id: u64) -> String {
    format!("{IN}{id}/")
}

fn shown_key(id: u64) -> String {
    format!("{OUT}{id}/shown")
}

impl Cluster {
    /// Opens the console of a machine that runs.
    pub fn open_console(&self, name: &str) -> Result<ConsoleView, ClusterError> {
        let id = self.machine_id(name)?;
        let lease = self.store.grant(OPEN_LEASE)?;
        let key = format!("{}open/{}", calls_key(id), lease.0);
        self.store
            .commit(&[], &[Change::put_leased(key, "", lease)])?;
        let now = Instant::now();
        Ok(ConsoleView {
            cluster: self.clone(),
            id,
            lease,
            renewed: now,
            opened: now,
            answered: false,
            seen: 0,
        })
    }

    /// Types into the console of a machine. Without an agent that takes it within ten seconds it
    /// is lost.
    pub fn type_into_console(&self, name: &str, bytes: &[u8]) -> Result<(), ClusterError> {
        let id = self.machine_id(name)?;
        let lease = self.store.grant(OPEN_LEASE)?;
        let key = format!("{}typed/{}", calls_key(id), lease.0);
        self.store
            .commit(&[], &[Change::put_leased(key, bytes, lease)])?;
        Ok(())
    }

    fn machine_id(&self, name: &str) -> Result<u64, ClusterError> {
        let placed = self.placed_under(name)?;
        let placed = placed.ok_or_else(|| ClusterError::NoSuchWork(name.into()))?;
        match placed.request.kind {
            WorkKind::Machine => Ok(placed.id),
            WorkKind::Program => Err(ClusterError::NoConsole(name.into())),
        }
    }

    /// For the agent: takes what was typed.
    pub fn take_console_calls(&self, id: u64) -> Result<ConsoleCalls, ClusterError> {
        let prefix = calls_key(id);
        let found = self.store.read(&prefix)?;
        let mut calls = ConsoleCalls {
            revision: found.revision,
            ..ConsoleCalls::default()
        };
        let mut typed = Vec::new();
        for entry in found.entries {
            match entry.key.strip_prefix(&prefix) {
                Some(key) if key.starts_with("typed/") => typed.push(entry),
                Some(_) => calls.open.extend(entry.lease),
                None => {}
            }
        }
        if !typed.is_empty() {
            typed.sort_by_key(|entry| entry.revision);
            let gone = typed.iter().map(|entry| Change::delete(&entry.key));
            self.store.commit(&[], &gone.collect::<Vec<_>>())?;
            calls.typed = typed.into_iter().flat_map(|entry| entry.value).collect();
        }
        Ok(calls)
    }

    /// For the agent: waits until something is asked after `after`, or `wait` is over. The
    /// revision to wait from next is the answer.
    pub fn wait_for_console_calls(
        &self,
        id: u64,
        after: Revision,
        wait: Duration,
    ) -> Result<Revision, ClusterError> {
        self.wait_below(&calls_key(id), after, wait)
    }

    /// For the agent: shows what the console has said.
    pub fn show_console(&self, id: u64, shown: &Shown, lease: LeaseId) -> Result<(), ClusterError> {
        let change = Change::put_leased(shown_key(id), shown.to_bytes(), lease);
        self.store.commit(&[], &[change])?;
        Ok(())
    }
}

impl ConsoleView {
    /// What is new, within `wait`. It must be called again within ten seconds.
    pub fn next(&mut self, wait: Duration) -> Result<Option<ConsoleNews>, ClusterError> {
        let begun = Instant::now();
        loop {
            self.renew()?;
            let found = self.cluster.store.read(&shown_key(self.id))?;
            let shown = found.entries.first();
            let shown = shown.and_then(|entry| Shown::from_bytes(&entry.value));
            if let Some(news) = self.news(shown) {
                return Ok(Some(news));
            }
            let left = wait.saturating_sub(begun.elapsed());
            if left.is_zero() {
                return Ok(None);
            }
            let key = shown_key(self.id);
            self.cluster.wait_below(&key, found.revision, left)?;
        }
    }

    fn news(&mut self, shown: Option<Shown>) -> Option<ConsoleNews> {
        match shown {
            Some(Shown::Output { end, tail }) => {
                self.answered = true;
                // A new agent counts anew.
                let new = end.checked_sub(self.seen).unwrap_or(end);
                let new = tail.len().min(new as usize);
                self.seen = end;
                let new = tail.get(tail.len() - new..)?;
                (!new.is_empty()).then(|| ConsoleNews::Output(new.to_vec()))
            }
            Some(Shown::Closed(why)) => Some(ConsoleNews::Closed(why)),
            None if self.answered => Some(ConsoleNews::Closed(
                "the machine has ended, or its agent".into(),
            )),
            None if self.opened.elapsed() > SILENCE => Some(ConsoleNews::Closed(
                "the machine's agent does not answer".into(),
            )),
            None => None,
        }
    }

    fn renew(&mut self) -> Result<(), ClusterError> {
        if self.renewed.elapsed() > OPEN_LEASE / 4 {
            self.cluster.renew(self.lease)?;
            self.renewed = Instant::now();
        }
        Ok(())
    }
}

impl Drop for ConsoleView {
    fn drop(&mut self) {
        // Else it ends by itself.
        let _ = self.cluster.end_lease(self.lease);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HostRecord;
    use crate::work::{Mark, WorkPart, WorkRequest};
    use std::sync::Arc;
    use weft_store::Embedded;

    const SOON: Duration = Duration::from_millis(10);

    fn cluster(kind: WorkKind) -> (Cluster, u64) {
        let host = HostRecord {
            name: "alpha".into(),
            key: "k".into(),
            address: "alpha:1".into(),
            cores: 4,
            memory_bytes: 0,
            features: Vec::new(),
            version: "1".into(),
            number: 0,
        };
        let store = Arc::new(Embedded::in_memory().unwrap());
        let cluster = Cluster::init(store, "c", &host).unwrap();
        let request = WorkRequest {
            name: "web".into(),
            kind,
            home: "alpha".into(),
            user: "u".into(),
            cores: 1,
            memory_mib: 64,
            hosts_max: 1,
            priority: 0,
            mark: Mark {
                boot: String::new(),
                namespace: String::new(),
                nonce: String::new(),
            },
        };
        let lease = cluster.lease().unwrap();
        let id = cluster.ask(&request, lease).unwrap();
        let term = cluster.campaign("alpha", lease).unwrap().unwrap();
        let asked = cluster.work().unwrap().asked.remove(0);
        let part = WorkPart {
            host: "alpha".into(),
            cores: 1,
            memory_mib: 64,
            reserved_mib: 64,
        };
        assert!(term.place(&asked, vec![part], "why".into()).unwrap());
        (cluster, id)
    }

    #[test]
    fn what_a_console_says_is_seen_once() {
        let (cluster, id) = cluster(WorkKind::Machine);
        let agent = cluster.lease().unwrap();
        let show = |end, tail: &[u8]| {
            let tail = tail.to_vec();
            cluster
                .show_console(id, &Shown::Output { end, tail }, agent)
                .unwrap();
        };
        assert!(cluster.take_console_calls(id).unwrap().open.is_empty());
        let mut view = cluster.open_console("web").unwrap();
        assert_eq!(cluster.take_console_calls(id).unwrap().open.len(), 1);
        assert_eq!(view.next(SOON).unwrap(), None);
        let output = |text: &[u8]| Some(ConsoleNews::Output(text.to_vec()));
        show(5, b"login");
        assert_eq!(view.next(SOON).unwrap(), output(b"login"));
        assert_eq!(view.next(SOON).unwrap(), None);
        show(8, b"login: r");
        assert_eq!(view.next(SOON).unwrap(), output(b": r"));
        // More than a record has was said at once; then a new agent begins.
        show(100, b"last");
        assert_eq!(view.next(SOON).unwrap(), output(b"last"));
        show(3, b"new");
        assert_eq!(view.next(SOON).unwrap(), output(b"new"));
        cluster.end_lease(agent).unwrap();
        assert!(matches!(
            view.next(SOON).unwrap(),
            Some(ConsoleNews::Closed(_))
        ));
        drop(view);
        assert!(cluster.take_console_calls(id).unwrap().open.is_empty());
    }

    #[test]
    fn what_is_typed_is_taken_once_and_in_order() {
        let (cluster, id) = cluster(WorkKind::Machine);
        for text in ["one ", "two ", "three"] {
            cluster.type_into_console("web", text.as_bytes()).unwrap();
        }
        let calls = cluster.take_console_calls(id).unwrap();
        assert_eq!(calls.typed, b"one two three");
        assert_eq!(cluster.take_console_calls(id).unwrap().typed, b"");
        let after = calls.revision;
        assert!(cluster.wait_for_console_calls(id, after, SOON).unwrap() > after);
    }

    #[test]
    fn only_machines_that_run_have_one() {
        let (programs, _) = cluster(WorkKind::Program);
        let refused = programs.open_console("web").err().unwrap();
        assert!(matches!(refused, ClusterError::NoConsole(_)));
        let refused = programs.type_into_console("db", b"x").err().unwrap();
        assert!(matches!(refused, ClusterError::NoSuchWork(_)));
    }

    #[test]
    fn damaged_records_are_none() {
        for bytes in [
            &b""[..],
            b"o",
            b"o1234567",
            b"x12345678text",
            b"o\x01\0\0\0\0\0\0\0long",
        ] {
            assert_eq!(Shown::from_bytes(bytes), None, "{bytes:?}");
        }
        let closed = Shown::Closed("a reason".into());
        assert_eq!(Shown::from_bytes(&closed.to_bytes()), Some(closed));
    }
}
