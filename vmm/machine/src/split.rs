//! What of each source of a migration goes where: by access history to the first destination,
//! or one destination after the other. `docs/membership.md` says more.
//!
//! ```text
//! TellHistory ─▶ Histogram ─▶ threshold ─▶ Split            pages ─▶ EndSplit
//! sources tell   all sources  of the sum   each source notes
//! managers                                 which chunks go first
//! ```

use serde::{Deserialize, Serialize};
use weft_aggregate::commands::{DrainShare, SliceCommand, SliceReply};
use weft_aggregate::{PRIMARY, Slice};
use weft_coherent_memory::{Histogram, Threshold, thresholds};

/// Which pages of a split go to the first destination.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Choose {
    /// Those that were used most and last.
    #[default]
    History,
    /// Those with the lowest numbers.
    Order,
}

/// The pages of a source.
#[derive(Debug, PartialEq)]
pub(super) struct Part {
    pub source: usize,
    pub shares: Vec<DrainShare>,
}

/// Room of the destinations, which parts take from.
pub(super) struct Rooms<'a> {
    /// The nodes, in the order of the request.
    pub nodes: &'a [usize],
    /// Pages that may be handed to each.
    pub pages: Vec<u64>,
}

impl Rooms<'_> {
    /// Takes room for `pages` from the destinations from `from` on, in their order; `None`:
    /// they have too little.
    fn take(&mut self, from: usize, pages: u64) -> Option<Vec<DrainShare>> {
        let mut left = pages;
        let mut shares = Vec::new();
        for (slice, room) in self.nodes.iter().zip(&mut self.pages).skip(from) {
            let pages = left.min(*room);
            *room -= pages;
            left -= pages;
            shares.push(DrainShare {
                slice: *slice,
                pages,
            });
        }
        (left == 0).then_some(shares)
    }

    /// One destination after the other.
    pub fn in_order(mut self, sources: &[(usize, u64)]) -> Option<Vec<Part>> {
        let part = |(source, pages): &(usize, u64)| {
            let shares = self.take(0, *pages)?;
            Some(Part {
                source: *source,
                shares,
            })
        };
        sources.iter().map(part).collect()
    }

    /// The first destination gets what was used most; with the threshold of each source.
    fn by_history(mut self, sources: &[(usize, Histogram)]) -> Option<Vec<(Part, Threshold)>> {
        let histograms: Vec<Histogram> = sources.iter().map(|(_, all)| all.clone()).collect();
        let first = self.pages.first().copied()?;
        let parts = sources.iter().zip(thresholds(&histograms, first));
        let part = |((source, histogram), threshold): (&(usize, Histogram), Threshold)| {
            let pages = histogram.first_pages(threshold);
            let all: u64 = histogram.bins().iter().sum();
            let mut shares = vec![DrainShare {
                slice: self.nodes[0],
                pages,
            }];
            shares.extend(self.take(1, all - pages)?);
            let source = *source;
            Some((Part { source, shares }, threshold))
        };
        parts.map(part).collect()
    }
}

/// By access history: the sources know from now on which of their pages go where.
///
/// # Errors
/// A source that did not answer, or too little room.
pub(super) fn by_history(
    slice: &Slice,
    sources: &[usize],
    rooms: Rooms<'_>,
) -> Result<Vec<Part>, String> {
    if sources.len() > 1 {
        for source in sources {
            slice.command_drain(*source, &SliceCommand::TellHistory)?;
        }
        // What they told each other has arrived.
        for source in sources.iter().filter(|source| **source != PRIMARY) {
            slice.command(*source, &SliceCommand::Settle)?;
        }
    }
    let histogram = |source: &usize| {
        let reply = slice.command_drain(*source, &SliceCommand::Histogram)?;
        let histogram = match &reply {
            SliceReply::Histogram(bins) => Histogram::from_bins(bins),
            _ => None,
        };
        let histogram = histogram.ok_or_else(|| format!("node {source} answered {reply:?}"))?;
        Ok((*source, histogram))
    };
    let histograms: Result<Vec<_>, String> = sources.iter().map(histogram).collect();
    let first = rooms.nodes[0];
    let parts = rooms.by_history(&histograms?).ok_or(NO_ROOM)?;
    for (part, threshold) in &parts {
        let split = SliceCommand::Split {
            first,
            history: threshold.history,
            equal_pages: threshold.equal_pages,
        };
        slice.command_drain(part.source, &split)?;
    }
    Ok(parts.into_iter().map(|(part, _)| part).collect())
}

/// The members fill targets in their order again.
pub(super) fn end(slice: &Slice) {
    for node in slice.members() {
        // A slice that does not answer is lost, which ends the machine.
        let _ = slice.command_drain(node, &SliceCommand::EndSplit);
    }
}

/// Why pages cannot go to destinations.
pub(super) const NO_ROOM: &str = "the destinations have no room left";

#[cfg(test)]
mod tests {
    use super::*;

    fn rooms(pages: &[u64]) -> Rooms<'static> {
        Rooms {
            nodes: &[3, 1, 2],
            pages: pages.to_vec(),
        }
    }

    fn given(part: &Part) -> (usize, Vec<(usize, u64)>) {
        let shares = part.shares.iter();
        let shares = shares.map(|share| (share.slice, share.pages));
        (part.source, shares.collect())
    }

    #[test]
    fn destinations_are_filled_in_their_order() {
        let parts = rooms(&[10, 5, 0]).in_order(&[(0, 7), (4, 5)]).unwrap();
        let expected = [
            (0, vec![(3, 7), (1, 0), (2, 0)]),
            (4, vec![(3, 3), (1, 2), (2, 0)]),
        ];
        assert_eq!(parts.iter().map(given).collect::<Vec<_>>(), expected);
        assert_eq!(rooms(&[10, 5, 0]).in_order(&[(0, 12), (4, 4)]), None);
    }

    #[test]
    fn the_first_destination_gets_what_was_used_most() {
        let mut histograms = [Histogram::default(), Histogram::default()];
        histograms[0].add(0x80, 6);
        histograms[0].add(0, 100);
        histograms[1].add(0x80, 3);
        histograms[1].add(0x40, 3);
        let [zero, four] = histograms;
        let sources = [(0, zero), (4, four)];
        let parts = rooms(&[11, 50, 60]).by_history(&sources).unwrap();
        let expected = [
            (0, vec![(3, 6), (1, 50), (2, 50)]),
            (4, vec![(3, 5), (1, 0), (2, 1)]),
        ];
        let found: Vec<_> = parts.iter().map(|(part, _)| given(part)).collect();
        assert_eq!(found, expected);
        let thresholds: Vec<_> = parts.iter().map(|(_, threshold)| *threshold).collect();
        let threshold = |equal_pages| Threshold {
            history: 0x40,
            equal_pages,
        };
        assert_eq!(thresholds, [threshold(0), threshold(2)]);
        assert!(rooms(&[11, 50, 50]).by_history(&sources).is_none());
    }
}
