//! What a node is told when it is made: who it is, and which node manages which page.

use crate::ranges::Ranges;
use crate::types::{NODES_MAX, NodeId};

/// Which node manages (keeps the directory entry of) a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ManagerOf {
    /// One node manages every page.
    Fixed(NodeId),
    /// Chunk `c` is managed by node `c` modulo the number of nodes.
    Interleaved,
    /// Each node manages a range of pages.
    Ranges(Ranges),
}

/// What a [`crate::Node`] is told when it is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// The node that this is.
    pub me: NodeId,
    /// How many nodes there are, 1 to [`NODES_MAX`].
    pub nodes: u8,
    /// The manager of each page.
    pub manager: ManagerOf,
    /// Whether a page that is read and then written by one node after another
    /// moves at the read already.
    pub migratory: bool,
    /// One stay of such a page in this many begins write-protected, and shows whether
    /// the page is still written; in the others the first write is not noticed. 1: all
    /// do. At most 32.
    pub probe_every: u8,
    /// Pages each node may own of those managed *here*; `u32::MAX` for no
    /// limit, 0 for a node that takes no pushed page. Only pushes respect it:
    /// the engine evicts in time, the protocol never refuses a fault for room.
    pub budgets_pages: [u32; NODES_MAX],
    /// Numbers below `nodes` of nodes that are not there ([`crate::Standing::Absent`]).
    pub absent: u32,
}

impl Config {
    /// A configuration without budgets, with the migratory rule on.
    pub const fn new(me: NodeId, nodes: u8, manager: ManagerOf) -> Config {
        Config {
            me,
            nodes,
            manager,
            migratory: true,
            probe_every: 1,
            budgets_pages: [u32::MAX; NODES_MAX],
            absent: 0,
        }
    }
}

/// Remainder by a divisor that is known early and never changes, without a
/// division (Lemire, Kaser and Kurz, "Faster remainder by direct computation",
/// 2019). Exact for 32-bit values.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Modulus {
    divisor: u32,
    inverse: u64,
}

impl Modulus {
    pub(crate) const fn new(divisor: u32) -> Modulus {
        assert!(divisor > 0, "a modulus of zero");
        Modulus {
            divisor,
            inverse: (u64::MAX / divisor as u64).wrapping_add(1),
        }
    }
    pub(crate) const fn of(self, value: u32) -> u32 {
        let fraction = self.inverse.wrapping_mul(value as u64);
        ((fraction as u128 * self.divisor as u128) >> 64) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modulus_is_the_remainder() {
        for divisor in 1..=32 {
            let modulus = Modulus::new(divisor);
            for value in (0..5000).chain([u32::MAX, u32::MAX - 1, 1 << 22, (1 << 22) - 1]) {
                assert_eq!(modulus.of(value), value % divisor, "{value} mod {divisor}");
            }
        }
    }
}
