//! What the leader did and saw, newest last: a ring of [`LOG_MAX`] records below `weft/log/`.
//!
//! Only the leader writes. A decision is recorded in the commit that makes it: one that did not
//! happen is not in the log. What the leader only sees it notes afterwards. Times are those of the leader's clock,
//! for people; nothing depends on them.

use crate::{Cluster, ClusterError, json, seconds_now};
use serde::{Deserialize, Serialize};
use weft_store::{Change, Entry, Revision};

const LOG: &str = "weft/log/";

/// A larger number is of a forged record.
const NUMBER_MAX: u64 = 1 << 53;
/// Records that are read one by one; where more are new, all are read at once.
const SINGLE_MAX: u64 = 16;

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
    let fine = entry.key == key(record.number) && record.number < NUMBER_MAX;
    fine.then_some(record)
}

impl Cluster {
    /// What is kept of the log, oldest first.
    pub fn log(&self) -> Result<Vec<LogRecord>, ClusterError> {
        let entries = self.store.read(LOG)?.entries;
        // The newest is the one that was written last, and none has a larger number.
        let read = |entry: &Entry| Some((entry.revision, read(entry)?));
        let mut records: Vec<(Revision, LogRecord)> = entries.iter().filter_map(read).collect();
        let newest = records.iter().max_by_key(|(revision, _)| *revision);
        let newest = newest.map_or(0, |(_, record)| record.number);
        records.retain(|(_, record)| record.number <= newest);
        records.sort_by_key(|(_, record)| record.number);
        Ok(records.into_iter().map(|(_, record)| record).collect())
    }

    /// What was written after the record with the number `last` and is kept, oldest first. 0:
    /// all. It costs one read of one record where nothing is new.
    pub fn log_after(&self, last: u64) -> Result<Vec<LogRecord>, ClusterError> {
        if last == 0 {
            return self.log();
        }
        let mut records = Vec::new();
        for next in last + 1..=last + SINGLE_MAX {
            let Some(entry) = self.store.get(&key(next))? else {
                return Ok(records);
            };
            match read(&entry) {
                Some(record) if record.number == next => records.push(record),
                // Not written yet: it is one of the round before.
                Some(record) if record.number + LOG_MAX == next => return Ok(records),
                // The ring has gone round since, or the record is damaged.
                _ => break,
            }
        }
        let mut all = self.log()?;
        all.retain(|record| record.number > last);
        Ok(all)
    }
}
