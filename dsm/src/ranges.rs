//! Managers by ranges of pages: node after node, each a range, perhaps none.
//!
//! Invariants: the ends ascend; the last node with a range manages everything
//! from its start on, so every page has exactly one manager.

use core::ops::Range;

use crate::types::{NODES_MAX, NodeId, PAGES_MAX, Page};

/// The end of the last range.
const FOREVER: u32 = u32::MAX;
const _: () = assert!(PAGES_MAX < FOREVER as u64);

/// Which node manages which range of pages, as in an aggregate whose memory is
/// laid out node after node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ranges {
    /// Of each node, the first page after its range; [`FOREVER`] from the last
    /// node with a range on.
    ends: [u32; NODES_MAX],
}

/// Why ends do not make ranges.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RangesError {
    /// More ends than there may be nodes.
    #[error("ranges of pages for {0} nodes: the maximum is {NODES_MAX}")]
    Nodes(usize),
    /// A range ends before it begins.
    #[error(
        "the pages of {node} would end at {end:#x}, before those of the node before it: ends must ascend"
    )]
    Descending {
        /// Whose range.
        node: NodeId,
        /// Its end, a page number.
        end: u64,
    },
    /// A range ends beyond the last page there may be.
    #[error("the pages of {node} would end at {end:#x}, above the maximum, {PAGES_MAX:#x}")]
    Beyond {
        /// Whose range.
        node: NodeId,
        /// Its end, a page number.
        end: u64,
    },
    /// No node manages anything.
    #[error("no node has a range of pages: at least one must")]
    Empty,
}

impl Ranges {
    /// Ranges from their ends: node `n` manages the pages from `ends[n - 1]` (0
    /// for node 0) up to, not including, `ends[n]`; none if these are equal, or
    /// if there is no `ends[n]`. Pages beyond the last end belong to the last
    /// node that has any.
    ///
    /// # Errors
    /// More than [`NODES_MAX`] ends, ends that descend or lie above
    /// [`PAGES_MAX`], or no range at all.
    pub fn new(ends: &[u64]) -> Result<Ranges, RangesError> {
        if ends.len() > NODES_MAX {
            return Err(RangesError::Nodes(ends.len()));
        }
        let mut kept = [FOREVER; NODES_MAX];
        let (mut start, mut last) = (0, None);
        for (index, &end) in ends.iter().enumerate() {
            let node = NodeId(index as u8);
            if end < start {
                return Err(RangesError::Descending { node, end });
            }
            if end > PAGES_MAX {
                return Err(RangesError::Beyond { node, end });
            }
            if end > start {
                last = Some(index);
            }
            kept[index] = end as u32;
            start = end;
        }
        let last = last.ok_or(RangesError::Empty)?;
        kept[last..].fill(FOREVER);
        Ok(Ranges { ends: kept })
    }

    /// The manager of a page. Looks at as many ends as nodes precede it.
    pub fn manager_of(&self, page: Page) -> NodeId {
        let here = |&end: &u32| page.0 < u64::from(end) || end == FOREVER;
        // The last end is `FOREVER`, so there is always one.
        NodeId(self.ends.iter().position(here).unwrap_or(0) as u8)
    }

    /// The pages that a node manages; none, or up to [`u64::MAX`] for the last.
    pub fn of(&self, node: NodeId) -> Range<u64> {
        let index = usize::from(node.0);
        let end = |index: usize| match self.ends.get(index) {
            Some(&FOREVER) | None => u64::MAX,
            Some(&end) => u64::from(end),
        };
        let start = index.checked_sub(1).map_or(0, end);
        start..end(index)
    }

    /// The last node that manages anything.
    pub fn last(&self) -> NodeId {
        self.manager_of(Page(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn managers(ends: &[u64], pages: &[u64]) -> Vec<u8> {
        let ranges = Ranges::new(ends).expect("ends that ascend");
        let manager = |&page| ranges.manager_of(Page(page)).0;
        pages.iter().map(manager).collect()
    }

    #[test]
    fn each_page_has_the_manager_of_its_range() {
        assert_eq!(
            managers(&[10, 25], &[0, 9, 10, 24, 25, PAGES_MAX - 1]),
            [0, 0, 1, 1, 1, 1]
        );
        assert_eq!(managers(&[3], &[0, 3, u64::MAX]), [0, 0, 0]);
    }

    #[test]
    fn a_node_without_memory_manages_nothing() {
        assert_eq!(
            managers(&[0, 10, 10, 20, 20], &[0, 9, 10, 19, 20, PAGES_MAX - 1]),
            [1, 1, 3, 3, 3, 3]
        );
        assert_eq!(Ranges::new(&[0, 10, 10]).map(|r| r.last()), Ok(NodeId(1)));
    }

    #[test]
    fn a_nodes_pages_are_those_it_manages() {
        let ranges = Ranges::new(&[0, 10, 10, 20, 20]).expect("ends that ascend");
        let of = |node| ranges.of(NodeId(node));
        assert_eq!([of(0), of(1), of(2)], [0..0, 0..10, 10..10]);
        assert_eq!(of(3), 10..u64::MAX);
        assert!(of(4).is_empty() && of(31).is_empty() && of(32).is_empty());
    }

    #[test]
    fn as_many_nodes_and_pages_as_there_may_be() {
        let width = PAGES_MAX / NODES_MAX as u64;
        let ends: Vec<u64> = (1..=NODES_MAX as u64).map(|n| n * width).collect();
        for node in 0..NODES_MAX as u64 {
            let pages = [node * width, (node + 1) * width - 1];
            assert_eq!(managers(&ends, &pages), [node as u8; 2]);
        }
    }

    #[test]
    fn what_is_no_layout_is_refused() {
        assert_eq!(Ranges::new(&[]), Err(RangesError::Empty));
        assert_eq!(Ranges::new(&[0, 0]), Err(RangesError::Empty));
        assert_eq!(Ranges::new(&[1; 33]), Err(RangesError::Nodes(33)));
        let (node, end) = (NodeId(1), 4);
        let descending = Err(RangesError::Descending { node, end });
        assert_eq!(Ranges::new(&[5, 4]), descending);
        let end = PAGES_MAX + 1;
        assert_eq!(
            Ranges::new(&[5, end]),
            Err(RangesError::Beyond { node, end })
        );
    }
}
