//! What the leader did and saw, newest last: a ring of [`LOG_MAX`] records below `weft/log/`.
//!
//! Only the leader writes, and each record in the commit of what it is about: a decision that did
//! not happen is not in the log, and one that happened is. Times are those of the leader's clock,
//! for people; nothing depends on them.

use crate::{Cluster, ClusterError, json, seconds_now};
use serde::{Deserialize, Serialize};
use weft_store::{Change, Entry};

const LOG: &str = "weft/log/";

/// Records that are kept.
pub const LOG_MAX: u64 = 1000;

/// What a record is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogKind {
    /// An aggregate starts.
    Start,
    /// A request waits. Recorded once for each request.
    Wait,
    /// A request is refused.
    Refuse,
    /// A move begins.
    Move,
    /// A move has come about.
    Moved,
    /// A move has failed, or something cannot leave a host that it has to leave.
    Fail,
    /// An aggregate has ended.
    End,
    /// A host came, went, or is used in another way.
    Host,
}

impl LogKind {
    pub fn name(self) -> &'static str {
        match self {
            LogKind::Start => "start",
            LogKind::Wait => "wait",
            LogKind::Refuse => "refuse",
            LogKind::Move => "move",
            LogKind::Moved => "moved",
            LogKind::Fail => "fail",
            LogKind::End => "end",
            LogKind::Host => "host",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogRecord {
    /// Counted from 1, without gaps.
    pub number: u64,
    /// Seconds since 1970, by the leader's clock.
    pub at: u64,
    /// The host that decided then.
    pub leader: String,
    pub kind: LogKind,
    /// A sentence.
    pub what: String,
}

impl LogRecord {
    pub(crate) fn new(number: u64, leader: &str, kind: LogKind, what: String) -> LogRecord {
        LogRecord {
            number,
            at: seconds_now(),
            leader: leader.into(),
            kind,
            what,
        }
    }

    pub(crate) fn put(&self) -> Change {
        Change::put(key(self.number), json(self))
    }
}

fn key(number: u64) -> String {
    format!("{LOG}{:03}", number % LOG_MAX)
}

fn read(entry: &Entry) -> Option<LogRecord> {
    let record: LogRecord = serde_json::from_slice(&entry.value).ok()?;
    (entry.key == key(record.number)).then_some(record)
}

impl Cluster {
    /// What is kept of the log, oldest first.
    pub fn log(&self) -> Result<Vec<LogRecord>, ClusterError> {
        let entries = self.store.read(LOG)?.entries;
        let mut records: Vec<LogRecord> = entries.iter().filter_map(read).collect();
        records.sort_by_key(|record| record.number);
        Ok(records)
    }

    /// What was written after the record with the number `last` and is kept, oldest first. 0:
    /// all. It costs one read of one record where nothing is new.
    pub fn log_after(&self, last: u64) -> Result<Vec<LogRecord>, ClusterError> {
        if last == 0 {
            return self.log();
        }
        let mut records: Vec<LogRecord> = Vec::new();
        loop {
            let next = last + 1 + records.len() as u64;
            match self.store.get(&key(next))?.as_ref().and_then(read) {
                Some(record) if record.number == next => records.push(record),
                // The ring has gone round since.
                Some(record) if record.number > next => {
                    let mut all = self.log()?;
                    all.retain(|record| record.number > last);
                    return Ok(all);
                }
                _ => return Ok(records),
            }
        }
    }
}
