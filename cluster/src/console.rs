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
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shown {
    /// Bytes of output since the agent attached, with those of `tail`.
    pub end: u64,
    /// The last bytes of the output.
    pub tail: Vec<u8>,
    /// Why nothing more comes.
    pub closed: Option<String>,
}

impl Shown {
    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = self.end.to_le_bytes().to_vec();
        bytes.extend((self.tail.len() as u32).to_le_bytes());
        bytes.extend(&self.tail);
        bytes.extend(self.closed.iter().flat_map(|why| why.bytes()));
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Option<Shown> {
        let (end, rest) = bytes.split_first_chunk()?;
        let (length, rest) = rest.split_first_chunk()?;
        let (tail, closed) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        let end = u64::from_le_bytes(*end);
        let closed = (!closed.is_empty()).then(|| String::from_utf8_lossy(closed).into_owned());
        (tail.len() as u64 <= end).then(|| Shown {
            end,
            tail: tail.to_vec(),
            closed,
        })
    }
}

/// What is asked of a machine's agent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConsoleCalls {
    /// Pages that have the console open.
    pub open: usize,
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
                Some(_) => calls.open += 1,
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
        let closed = |why: &str| Some(ConsoleNews::Closed(why.to_owned()));
        let Some(shown) = shown else {
            return match self.answered {
                true => closed("the machine has ended, or its agent"),
                false if self.opened.elapsed() > SILENCE => {
                    closed("the machine's agent does not answer")
                }
                false => None,
            };
        };
        self.answered = true;
        // A new agent counts anew.
        let new = shown.end.checked_sub(self.seen).unwrap_or(shown.end);
        let seen = shown.tail.len().saturating_sub(new as usize);
        self.seen = shown.end;
        match shown.tail.get(seen..).unwrap_or_default() {
            [] => shown.closed.map(ConsoleNews::Closed),
            new => Some(ConsoleNews::Output(new.to_vec())),
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
            anywhere: false,
            caller: None,
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
        let show = |end, tail: &[u8], closed: Option<&str>| {
            let (tail, closed) = (tail.to_vec(), closed.map(str::to_owned));
            let shown = Shown { end, tail, closed };
            cluster.show_console(id, &shown, agent).unwrap();
        };
        assert!(cluster.take_console_calls(id).unwrap().open == 0);
        let mut view = cluster.open_console("web").unwrap();
        assert_eq!(cluster.take_console_calls(id).unwrap().open, 1);
        assert_eq!(view.next(SOON).unwrap(), None);
        let output = |text: &[u8]| Some(ConsoleNews::Output(text.to_vec()));
        show(5, b"login", None);
        assert_eq!(view.next(SOON).unwrap(), output(b"login"));
        assert_eq!(view.next(SOON).unwrap(), None);
        show(8, b"login: r", None);
        assert_eq!(view.next(SOON).unwrap(), output(b": r"));
        // More than a record has was said at once; then a new agent begins.
        show(100, b"last", None);
        assert_eq!(view.next(SOON).unwrap(), output(b"last"));
        show(3, b"new", None);
        assert_eq!(view.next(SOON).unwrap(), output(b"new"));
        // The last words come before the reason.
        let closed = |why: &str| Some(ConsoleNews::Closed(why.to_owned()));
        show(7, b"new bye", Some("it was closed"));
        assert_eq!(view.next(SOON).unwrap(), output(b" bye"));
        assert_eq!(view.next(SOON).unwrap(), closed("it was closed"));
        cluster.end_lease(agent).unwrap();
        assert!(matches!(
            view.next(SOON).unwrap(),
            Some(ConsoleNews::Closed(_))
        ));
        drop(view);
        assert!(cluster.take_console_calls(id).unwrap().open == 0);
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
        let shown = |closed: Option<&str>| Shown {
            end: 9,
            tail: b"tail".to_vec(),
            closed: closed.map(str::to_owned),
        };
        for shown in [shown(None), shown(Some("a reason")), Shown::default()] {
            assert_eq!(Shown::from_bytes(&shown.to_bytes()), Some(shown));
        }
        let whole = shown(None).to_bytes();
        for length in 0..whole.len() {
            assert_eq!(Shown::from_bytes(&whole[..length]), None, "{length}");
        }
        let mut short = whole;
        short[0] = 3;
        assert_eq!(Shown::from_bytes(&short), None, "more than there was");
    }
}
