//! Which pages of a split go to its first node, by access history (S-memV, section IV-C): the
//! chunks that were used most and last, as many as it has room for.
//!
//! ```text
//!  history of chunks ─▶ Histogram ─▶ Threshold   above it: the first node
//!  of all sources        256 bins    of all      equal: the first node, until it is full
//!                                                below:  the others
//! ```
//!
//! Nothing is sorted: a walk over the chunks and one over the bins. The choice is made once, at
//! the start, so a page that is sent again goes to the same node.

use super::Controller;
use crate::state::Tables;
use crate::types::{CHUNK_PAGES, NodeId, Page};

/// A bin for each value of a chunk's history.
pub const BINS: usize = 256;
/// Chunks of a word of the choice.
const WORD: usize = u64::BITS as usize;

/// Pages by the history of their chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Histogram([u64; BINS]);

impl Default for Histogram {
    fn default() -> Self {
        Self([0; BINS])
    }
}

impl Histogram {
    /// From what [`Histogram::bins`] gave; `None`: not as many.
    pub fn from_bins(bins: &[u64]) -> Option<Self> {
        bins.try_into().ok().map(Self)
    }

    /// Pages by history, from 0 on.
    pub fn bins(&self) -> &[u64] {
        &self.0
    }

    /// Pages of a chunk with this history.
    pub fn add(&mut self, history: u8, pages: u64) {
        self.0[history as usize] += pages;
    }

    /// The threshold by which the first node takes at most `room` pages.
    pub fn threshold(&self, room: u64) -> Threshold {
        let mut left = room;
        for (history, pages) in self.0.iter().enumerate().rev() {
            if *pages > left {
                return Threshold {
                    history: history as u8,
                    equal_pages: left,
                };
            }
            left -= pages;
        }
        Threshold {
            history: 0,
            equal_pages: self.0[0],
        }
    }

    /// How many pages the first node takes of these.
    pub fn first_pages(&self, threshold: Threshold) -> u64 {
        let above: u64 = self.0[threshold.history as usize + 1..].iter().sum();
        above
            + threshold
                .equal_pages
                .min(self.0[threshold.history as usize])
    }
}

/// Which chunks the first node takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Threshold {
    /// All with more history than this.
    pub history: u8,
    /// Of those with exactly this, as many pages.
    pub equal_pages: u64,
}

/// One threshold for several sources, and what the first node takes of each: together at most
/// `room` pages.
pub fn thresholds(sources: &[Histogram], room: u64) -> Vec<Threshold> {
    let mut all = Histogram::default();
    for source in sources {
        for (sum, pages) in all.0.iter_mut().zip(source.0) {
            *sum += pages;
        }
    }
    let Threshold {
        history,
        mut equal_pages,
    } = all.threshold(room);
    let part = |source: &Histogram| {
        let part = equal_pages.min(source.0[history as usize]);
        equal_pages -= part;
        Threshold {
            history,
            equal_pages: part,
        }
    };
    sources.iter().map(part).collect()
}

/// The chunks that go to the first node of a split.
#[derive(Debug)]
pub struct Choice {
    first: NodeId,
    /// A bit for each chunk.
    chosen: Box<[u64]>,
}

impl Choice {
    /// By the history of each chunk, and how many pages of it are to move. A chunk goes as a
    /// whole: one that would go beyond the threshold's pages does not.
    pub fn new(
        first: NodeId,
        threshold: Threshold,
        chunks: impl ExactSizeIterator<Item = (u8, u64)>,
    ) -> Self {
        let mut chosen = vec![0; chunks.len().div_ceil(WORD)].into_boxed_slice();
        let mut equal_left = threshold.equal_pages;
        for (chunk, (history, pages)) in chunks.enumerate() {
            let fits = history == threshold.history && pages <= equal_left;
            if fits {
                equal_left -= pages;
            }
            if fits || history > threshold.history {
                chosen[chunk / WORD] |= 1 << (chunk % WORD);
            }
        }
        Self { first, chosen }
    }

    /// Whether `node` is the one for a page: the first for those of chosen chunks, any other
    /// for the rest.
    pub fn wants(&self, page: Page, node: NodeId) -> bool {
        let chunk = (page.0 / CHUNK_PAGES) as usize;
        let word = self.chosen.get(chunk / WORD).copied().unwrap_or(0);
        (word & 1 << (chunk % WORD) != 0) == (node == self.first)
    }
}

impl<T: Tables, B> Controller<T, B> {
    /// From now on drains and pre-copies choose among their targets by this; `None`: they fill
    /// them one after the other.
    pub fn choose(&mut self, choice: Option<Choice>) {
        self.choice = choice;
    }

    /// Whether a page goes to `node` rather than to other targets.
    pub fn chooses(&self, page: u64, node: NodeId) -> bool {
        let choice = self.choice.as_ref();
        choice.is_none_or(|choice| choice.wants(Page(page), node))
    }

    /// Whether another node owns a page that this one manages.
    pub fn is_owned_elsewhere(&mut self, page: u64) -> bool {
        let local = *self.node.tables.local(Page(page));
        !local.owner() && !self.node.tables.entry(Page(page)).untouched()
    }

    /// The manager of a page, as far as this node knows.
    pub fn manager(&mut self, page: u64) -> NodeId {
        self.node.manager_of(Page(page))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: NodeId = NodeId(3);

    fn histogram(bins: &[(u8, u64)]) -> Histogram {
        let mut histogram = Histogram::default();
        for (history, pages) in bins {
            histogram.add(*history, *pages);
        }
        histogram
    }

    fn threshold(history: u8, equal_pages: u64) -> Threshold {
        Threshold {
            history,
            equal_pages,
        }
    }

    #[test]
    fn the_threshold_fills_the_first_node() {
        let pages = histogram(&[(255, 10), (128, 20), (7, 30), (0, 40)]);
        let cases = [
            (0, threshold(255, 0)),
            (9, threshold(255, 9)),
            (10, threshold(128, 0)),
            (25, threshold(128, 15)),
            (30, threshold(7, 0)),
            (70, threshold(0, 10)),
            (1000, threshold(0, 40)),
        ];
        for (room, expected) in cases {
            assert_eq!(pages.threshold(room), expected, "{room}");
            assert_eq!(pages.first_pages(expected), room.min(100), "{room}");
        }
        assert_eq!(Histogram::default().threshold(5), threshold(0, 0));
        assert_eq!(Histogram::from_bins(pages.bins()), Some(pages));
        assert_eq!(Histogram::from_bins(&[0; 255]), None);
    }

    #[test]
    fn sources_share_the_room_of_the_first_node() {
        let sources = [
            histogram(&[(200, 5), (100, 8)]),
            histogram(&[(100, 4), (1, 50)]),
            histogram(&[(201, 1), (100, 9)]),
        ];
        let parts = thresholds(&sources, 16);
        let expected = [threshold(100, 8), threshold(100, 2), threshold(100, 0)];
        assert_eq!(parts, expected);
        let taken = sources.iter().zip(&parts);
        let taken: Vec<u64> = taken
            .map(|(source, part)| source.first_pages(*part))
            .collect();
        assert_eq!(taken, [13, 2, 1]);
    }

    #[test]
    fn chunks_above_the_threshold_and_some_that_are_equal_are_chosen() {
        let chunks = [
            (9, 512),
            (8, 512),
            (7, 512),
            (8, 100),
            (8, 500),
            (10, 1),
            (8, 0),
        ];
        let choice = Choice::new(FIRST, threshold(8, 620), chunks.into_iter());
        let chosen = |chunk: u64| choice.wants(Page(chunk * CHUNK_PAGES + 511), FIRST);
        let all: Vec<bool> = (0..8).map(chosen).collect();
        // The chunk of 500 would be more than what is left of 620 pages.
        let expected = [true, true, false, true, false, true, true, false];
        assert_eq!(all, expected);
        for page in (0..8).map(|chunk| Page(chunk * CHUNK_PAGES)) {
            assert_eq!(choice.wants(page, NodeId(0)), !choice.wants(page, FIRST));
        }
    }

    #[test]
    fn a_choice_takes_what_the_histogram_promised() {
        // Any histories, with chunks of one size: exactly the most used ones go.
        let mut state = 7_u64;
        let mut random = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            state >> 33
        };
        for _ in 0..200 {
            let values: Vec<u8> = (0..130).map(|_| (random() % 5 * 50) as u8).collect();
            let room = random() % 140 * CHUNK_PAGES;
            let mut histogram = Histogram::default();
            values
                .iter()
                .for_each(|value| histogram.add(*value, CHUNK_PAGES));
            let threshold = histogram.threshold(room);
            let chunks = values.iter().map(|value| (*value, CHUNK_PAGES));
            let choice = Choice::new(FIRST, threshold, chunks);
            let (mut taken, mut left) = (Vec::new(), Vec::new());
            for (chunk, value) in values.iter().enumerate() {
                match choice.wants(Page(chunk as u64 * CHUNK_PAGES), FIRST) {
                    true => taken.push(*value),
                    false => left.push(*value),
                }
            }
            assert_eq!(taken.len() as u64, (room / CHUNK_PAGES).min(130));
            assert!(taken.iter().min() >= left.iter().max() || taken.is_empty());
        }
    }
}
