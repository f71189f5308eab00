//! What moves cost in this cluster. Each leader learns it and says it to the next one, and to those
//! who ask how long a host takes to leave.

use crate::{Cluster, ClusterError, Term, json};
use serde::{Deserialize, Serialize};
use std::time::Duration;
use weft_place::MoveCosts;
use weft_store::Change;

const MOVE_COSTS: &str = "weft/move-costs";

/// [`MoveCosts`] in whole numbers: what is written is what is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveRecord {
    start_us: u64,
    kib_per_s: u64,
    /// The moves from which this was learned.
    seen: u32,
}

/// No move starts later.
const START_US_MAX: u64 = 3_600_000_000;

impl MoveRecord {
    pub fn of(costs: &MoveCosts) -> MoveRecord {
        MoveRecord {
            start_us: costs.start.as_micros() as u64,
            kib_per_s: (costs.mib_per_s * 1024.0) as u64,
            seen: costs.seen,
        }
    }

    pub fn costs(&self) -> MoveCosts {
        MoveCosts {
            start: Duration::from_micros(self.start_us.min(START_US_MAX)),
            mib_per_s: self.kib_per_s.max(1) as f64 / 1024.0,
            seen: self.seen,
        }
    }
}

/// The record of what was learned, unless the store has it.
pub(crate) fn news(learned: &MoveCosts, known: Option<&MoveRecord>) -> Option<MoveRecord> {
    let record = MoveRecord::of(learned);
    (record.seen > 0 && known != Some(&record)).then_some(record)
}

impl Cluster {
    /// `None`: no move was seen yet, or what the store has cannot be read.
    pub fn move_costs(&self) -> Result<Option<MoveRecord>, ClusterError> {
        let entry = self.store.get(MOVE_COSTS)?;
        Ok(entry.and_then(|entry| serde_json::from_slice(&entry.value).ok()))
    }
}

impl Term {
    /// Has the store know what moves cost.
    pub fn learned(&self, record: &MoveRecord) -> Result<bool, ClusterError> {
        let change = Change::put(MOVE_COSTS, json(record));
        self.commit_logged(&[], vec![change], None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_again() {
        let costs = MoveCosts {
            start: Duration::from_millis(170),
            mib_per_s: 333.33,
            seen: 3,
        };
        let record = MoveRecord::of(&costs);
        assert_eq!(MoveRecord::of(&record.costs()), record);
        let text = serde_json::to_string(&record).unwrap();
        assert_eq!(serde_json::from_str::<MoveRecord>(&text).unwrap(), record);
        assert_eq!(news(&costs, Some(&record)), None);
        assert_eq!(news(&costs, None), Some(record));
        let unseen = MoveCosts { seen: 0, ..costs };
        assert_eq!(news(&unseen, None), None);
    }

    #[test]
    fn a_damaged_record_has_no_time_without_end() {
        let damaged = MoveRecord {
            start_us: u64::MAX,
            kib_per_s: 0,
            seen: 0,
        };
        let costs = damaged.costs();
        assert!(costs.start < Duration::from_secs(3601) && costs.mib_per_s > 0.0);
    }
}
