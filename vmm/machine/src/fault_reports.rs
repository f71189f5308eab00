//! The fault reports of all slices, on the primary.
//!
//! While the machine runs, the primary requests them from the secondaries. With a trace from
//! the start it collects them once more before the secondaries end.

use weft_aggregate::Slice;
use weft_aggregate::commands::{SliceCommand, SliceReply};
use weft_coherent_memory::{FAULTS_MAX, RING, SliceFaults, SlicePages};

/// Counts and records of faults of a machine's slices.
#[derive(Default)]
pub(super) struct FaultReports {
    /// Whether faults are recorded from the start, and kept when the machine ends.
    wanted: bool,
    /// After the end, in order of slices.
    pages: Vec<SlicePages>,
    faults: Vec<SliceFaults>,
}

impl FaultReports {
    /// Empty reports. `wanted`: they are kept when the machine ends.
    pub fn new(wanted: bool) -> Self {
        Self {
            wanted,
            ..Self::default()
        }
    }

    /// The pages with most faults of each slice. `slice` requests them; `None` after the end,
    /// when the collected ones are returned.
    pub fn pages(&self, slice: Option<&Slice>) -> Vec<SlicePages> {
        let Some(slice) = slice else {
            return self.pages.clone();
        };
        let mut pages = vec![slice.memory().hottest()];
        for (_, reply) in slice.command_all(&SliceCommand::Pages).unwrap_or_default() {
            if let SliceReply::Pages(theirs) = reply {
                pages.push(theirs);
            }
        }
        pages
    }

    /// The recorded faults of each slice, from these numbers on.
    pub fn faults(&self, slice: Option<&Slice>, from: Vec<Option<u64>>) -> Vec<SliceFaults> {
        let Some(slice) = slice else {
            return self.kept(&from);
        };
        let own = from.get(slice.number()).copied().flatten();
        let mut faults = vec![slice.memory().faults(own)];
        for (_, reply) in slice
            .command_all(&SliceCommand::Faults { from })
            .unwrap_or_default()
        {
            if let SliceReply::Faults(theirs) = reply {
                faults.push(theirs);
            }
        }
        faults
    }

    /// The collected faults from these numbers on, as many as fit one reply.
    fn kept(&self, from: &[Option<u64>]) -> Vec<SliceFaults> {
        let of_slice = |kept: &SliceFaults| {
            let first = kept.next - kept.faults.len() as u64;
            let from = from.get(kept.slice).copied().flatten();
            let from = from.unwrap_or(kept.next).min(kept.next);
            let missed = first.saturating_sub(from);
            let skipped = from.saturating_sub(first) as usize;
            let rest = kept.faults.iter().skip(skipped);
            let faults: Vec<_> = rest.take(FAULTS_MAX).copied().collect();
            SliceFaults {
                slice: kept.slice,
                next: from + missed + faults.len() as u64,
                missed,
                faults,
            }
        };
        self.faults.iter().map(of_slice).collect()
    }

    /// Collects the reports before the secondaries end. `slice` is `None` if they no longer
    /// reply.
    pub fn collect(&mut self, slice: Option<&Slice>) {
        let Some(slice) = slice.filter(|_| self.wanted) else {
            return;
        };
        self.pages = self.pages(Some(slice));
        // The secondaries still run and may record as fast as they are read: this many rounds
        // read all that they hold at the first.
        let rounds = RING.div_ceil(FAULTS_MAX);
        let mut kept: Vec<SliceFaults> = Vec::new();
        for _ in 0..rounds {
            let from = from_zero(slice.placement().slices(), &kept);
            let mut added = 0;
            for theirs in self.faults(Some(slice), from) {
                added += theirs.faults.len();
                match kept.iter_mut().find(|kept| kept.slice == theirs.slice) {
                    None => kept.push(theirs),
                    Some(kept) => append(kept, theirs),
                }
            }
            if added == 0 {
                break;
            }
        }
        self.faults = kept;
    }
}

/// By slice: the number of the next record to read, at first 0.
fn from_zero(slices: usize, kept: &[SliceFaults]) -> Vec<Option<u64>> {
    let mut from = vec![Some(0); slices];
    for kept in kept {
        if let Some(from) = from.get_mut(kept.slice) {
            *from = Some(kept.next);
        }
    }
    from
}

/// Appends records. If records between were missed, the earlier ones are dropped, so that the
/// numbers have no gaps.
fn append(kept: &mut SliceFaults, more: SliceFaults) {
    if more.missed > 0 {
        kept.faults.clear();
    }
    kept.faults.extend(more.faults);
    kept.next = more.next;
}

#[cfg(test)]
mod tests {
    use super::*;
    use weft_coherent_memory::{FaultKind, FaultPurpose, FaultRecord};

    fn faults(first: u64, count: u64, missed: u64) -> SliceFaults {
        let record = |number| FaultRecord {
            time_ns: number,
            waited_ns: 1,
            page: number,
            kind: FaultKind::Read,
            purpose: FaultPurpose::Data,
            vcpu: Some(0),
            user: false,
            address: 0,
            rip: 0,
            gs_base: 0,
        };
        SliceFaults {
            slice: 1,
            next: first + count,
            missed,
            faults: (first..first + count).map(record).collect(),
        }
    }

    #[test]
    fn what_is_kept_is_read_from_any_number() {
        let mut kept = faults(0, 3, 0);
        append(&mut kept, faults(3, 2, 0));
        assert_eq!(kept, faults(0, 5, 0));
        append(&mut kept, faults(9, 2, 4));
        assert_eq!(kept.faults, faults(9, 2, 0).faults);
        assert_eq!(
            from_zero(2, std::slice::from_ref(&kept)),
            [Some(0), Some(11)]
        );
        let reports = FaultReports {
            faults: vec![kept],
            ..FaultReports::default()
        };
        assert_eq!(
            reports.faults(None, vec![None, Some(10)])[0],
            faults(10, 1, 0)
        );
        assert_eq!(
            reports.faults(None, vec![None, Some(2)])[0],
            faults(9, 2, 7)
        );
        assert_eq!(
            reports.faults(None, vec![None, Some(99)])[0],
            faults(11, 0, 0)
        );
        assert_eq!(reports.faults(None, vec![])[0], faults(11, 0, 0));
    }
}
