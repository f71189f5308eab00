//! The nouns that every part of the protocol shares: nodes, pages, kinds of
//! access, policies, and who manages what.

use crate::ranges::Ranges;

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;
/// Pages of a chunk (2 MiB): the unit of placement, of history and of interleaving.
pub const CHUNK_PAGES: u64 = 512;
/// Most nodes of one aggregate: a set of nodes is a 32-bit bitmap.
pub const NODES_MAX: usize = 32;
/// Page numbers are below this (8 TiB of addresses).
pub const PAGES_MAX: u64 = 1 << 31;

/// A node of the aggregate, below [`NODES_MAX`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u8);

impl NodeId {
    /// The set that holds this node alone.
    pub const fn bit(self) -> u32 {
        1 << (self.0 & 31)
    }
    /// The node as an index.
    pub const fn index(self) -> usize {
        (self.0 & 31) as usize
    }
    /// The lowest node of a set; `None` when the set is empty.
    pub const fn lowest(set: u32) -> Option<NodeId> {
        if set == 0 {
            None
        } else {
            Some(NodeId(set.trailing_zeros() as u8))
        }
    }
}

impl core::fmt::Display for NodeId {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "node {}", self.0)
    }
}

/// A page number: an address divided by [`PAGE_BYTES`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Page(pub u64);

impl Page {
    /// The chunk that the page belongs to.
    pub const fn chunk(self) -> u64 {
        self.0 / CHUNK_PAGES
    }
}

impl core::fmt::Display for Page {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "page {:#x}", self.0)
    }
}

/// What a fault or an installed page allows. `Write` includes reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Access {
    /// Loads.
    Read,
    /// Loads and stores.
    Write,
}

/// How a page is kept coherent. Alike on all nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Policy {
    /// Write-invalidate: many readers or one writer.
    #[default]
    Invalidate,
    /// Replicated and never written. The owner (the node that loaded it) keeps
    /// it whatever happens; everybody else may drop a copy at will.
    ReadOnly,
    /// As [`Policy::Invalidate`], for pages that one node writes repeatedly and others
    /// read: a node that lost its copy to a write is notified
    /// ([`crate::Action::Outdated`]) and may ask for the new content before
    /// anybody faults on it. A reader never takes such a page for itself.
    Update,
    /// Every node has its own; never leaves it, no message is sent.
    Private,
}

/// What a node of the aggregate takes part in. Nodes learn of a change one after the
/// other: see `docs/membership.md` for the sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Standing {
    /// In nothing: not there yet, or gone. Its number is free.
    Absent,
    /// In everything.
    Present,
    /// It gives away what it has: no page is pushed to it, no manager handed to it.
    Draining,
    /// As [`Standing::Draining`], and it asks for nothing any more.
    Leaving,
}

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
    /// Numbers below `nodes` of nodes that are not there ([`Standing::Absent`]).
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

    #[test]
    fn the_lowest_node_of_a_set() {
        assert_eq!(NodeId::lowest(0), None);
        assert_eq!(NodeId::lowest(0b1010), Some(NodeId(1)));
        assert_eq!(NodeId(31).bit(), 1 << 31);
    }
}
