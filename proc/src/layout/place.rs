//! Where a new mapping goes.

use super::{Layout, LayoutError, Region, checked};

/// Mappings from this length on get room to grow behind them, bytes.
pub const GROWTH_LENGTH_MIN: u64 = 1 << 20;
/// Most room kept behind one mapping, bytes.
pub const GROWTH_MAX: u64 = 1 << 30;

/// Room kept free behind a mapping of `length` bytes, so that `mremap` can
/// extend it in place: as much again. A `realloc` loop over a large block then
/// moves only when it outgrows twice its size, and moving a mapping means
/// registering it anew and renaming pages on every node.
pub const fn growth_gap(length: u64) -> u64 {
    if length < GROWTH_LENGTH_MIN {
        0
    } else if length < GROWTH_MAX {
        length
    } else {
        GROWTH_MAX
    }
}

impl Layout<'_> {
    /// Finds `length` free bytes, aligned, inside `low..high`. A `hint` that is
    /// free is taken, as Linux does. Otherwise the highest hole that fits wins
    /// (top-down first fit), and both the new mapping and its lower neighbour
    /// keep [`growth_gap`] behind them; only when no hole has room for the gaps
    /// is one used without.
    pub fn find_free(
        &self,
        length: u64,
        alignment: u64,
        hint: Option<u64>,
        low: u64,
        high: u64,
    ) -> Result<u64, LayoutError> {
        let alignment = alignment.max(super::PAGE);
        if !alignment.is_power_of_two() || length == 0 || !length.is_multiple_of(super::PAGE) {
            return Err(LayoutError::Invalid {
                start: 0,
                end: length,
            });
        }
        if let Some(start) = hint {
            let end = start.saturating_add(length);
            let fits = start >= low && end <= high && start.is_multiple_of(alignment);
            if fits && checked(start, end).is_ok() && self.is_free(start, end) {
                return Ok(start);
            }
        }
        let high = high.min(super::LIMIT);
        self.search(length, alignment, low, high, true)
            .or_else(|| self.search(length, alignment, low, high, false))
            .ok_or(LayoutError::NoHole { length })
    }
    /// The highest fitting address, with or without room to grow.
    fn search(&self, length: u64, alignment: u64, low: u64, high: u64, gaps: bool) -> Option<u64> {
        let own_gap = if gaps { growth_gap(length) } else { 0 };
        let mut hole_end = high;
        let mut index = self.regions().partition_point(|r| r.start < high);
        loop {
            let below: Option<&Region> = index.checked_sub(1).map(|i| &self.regions()[i]);
            let mut hole_start = below.map_or(low, |r| {
                let gap = if gaps { growth_gap(r.length()) } else { 0 };
                r.end.saturating_add(gap)
            });
            hole_start = hole_start.max(low);
            if let Some(start) = hole_end
                .checked_sub(own_gap)
                .and_then(|e| e.checked_sub(length))
            {
                let start = start & !(alignment - 1);
                if start >= hole_start {
                    return Some(start);
                }
            }
            let below = below?;
            if below.start <= low {
                return None;
            }
            hole_end = below.start;
            index -= 1;
        }
    }
}
